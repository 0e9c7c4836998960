"""Memory: what speculative decoding needs beyond plain decoding, the absence of cache copies, and shortages of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.cache.kv_cache import KVCache, Storage
from decoding.decode import NewCache, Request, autoregressive, speculative
from decoding.draft_length import Fixed
from decoding.drafters.contract import Drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.memory import is_out_of_memory
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import NUM_LAYERS, some_tokens, target_of
from tests.support.heads import untrained_head

K, PROMPT, NEW = 5, 150, 30
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "skip": lambda target: LayerSkipDrafter(target, LayerSkip.blocks((NUM_LAYERS - 2,))),
    "exit with a head": lambda target: EarlyExitDrafter(target, 2, untrained_head(target)),
}


def kept(target: Target, write: Callable[[NewCache], object]) -> KVCache:
    """Return the cache in which a sequence was decoded."""
    made: list[KVCache] = []

    def new_cache(capacity: int) -> KVCache:
        made.append(target.new_cache(capacity))
        return made[-1]

    write(new_cache)
    (cache,) = made
    return cache


def num_bytes(storage: Storage) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in storage.layers if layer.is_initialized)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_draft_keeps_its_own_positions_and_a_head_its_own_layer(kind: str) -> None:
    target, request = target_of("llama"), Request(some_tokens(PROMPT), Ending(NEW))
    drafter = DRAFTERS[kind](target)
    plain = kept(target, lambda new_cache: Generation.collect(autoregressive(target, request, new_cache)))
    controller = Fixed(max_tokens=K).controller()
    drafted = kept(
        target, lambda new_cache: Generation.collect(speculative(target, drafter, controller, request, new_cache))
    )
    position = num_bytes(plain.storage) // plain.capacity
    assert num_bytes(drafted.storage) - num_bytes(plain.storage) == K * position
    of_head = num_bytes(drafted.storage.branch)
    if kind == "skip":
        assert of_head == 0
    else:
        assert of_head == drafted.capacity * position // NUM_LAYERS, "keys and values of one block"
        pending = drafted.branch.pending
        assert pending is None or pending.shape[-2] <= K + 1, "states of one round"


class LargestNew(TorchDispatchMode):
    """The largest number of elements in a tensor that any operation has newly allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize(("family", "kind"), [("mistral", "plain"), *(("llama", kind) for kind in DRAFTERS)])
def test_nothing_as_large_as_the_keys_of_a_layer_is_made_while_decoding(kind: str, family: str) -> None:
    target, request = target_of(family), Request(some_tokens(PROMPT), Ending(NEW))
    if kind == "plain":
        steps = autoregressive(target, request)
    else:
        steps = speculative(target, DRAFTERS[kind](target), Fixed(max_tokens=K).controller(), request)
    next(steps)  # reads the prompt and makes the cache
    largest = LargestNew()
    config = target.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with largest:
        for _ in steps:
            pass
    assert 0 < largest.elements < config.num_key_value_heads * PROMPT * size


def test_shortage_of_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_other_errors_are_told_apart() -> None:
    cases: list[tuple[BaseException, bool]] = [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("a size does not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ]
    for error, expected in cases:
        assert is_out_of_memory(error) is expected
