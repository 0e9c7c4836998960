"""Attention on CUDA: masks are made once per pass, not in each layer, and cuDNN is left out of every pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends import cuda
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.attention import attention_backends
from decoding.text import Ending
from tests.support.families import NUM_LAYERS, build
from tuner.measuring.generation import StockGeneration

CONTEXT = 10
TOKEN_IDS = torch.arange(CONTEXT)[None]


class MaskOperations(TorchDispatchMode):
    """Counts operations that compute something of the number of slots: only masks have this size."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.ndim == 4
            and result.shape[-1] == self.num_slots
            and not _is_view(func)
        ):
            self.counts[func.__name__] += 1
        return result


def _is_view(func: Any) -> bool:
    return any(returned.alias_info is not None for returned in func._schema.returns)


def static_target(family: str) -> tuple[Target, KVCache]:
    target = Target(build(family), functools.partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS))
    cache = target.new_cache(4 * CONTEXT)
    target.forward(TOKEN_IDS, cache, 0)
    return target, cache


@pytest.mark.parametrize(("family", "num_kinds", "width"), [("llama", 1, 1), ("gemma3", 2, 3)])
@torch.no_grad()  # in inference mode attention would be a single operation
def test_number_of_mask_operations_is_independent_of_the_layers(family: str, num_kinds: int, width: int) -> None:
    target, cache = static_target(family)
    target.forward(TOKEN_IDS[:, :width], cache, CONTEXT)
    with MaskOperations(GPU_BUCKETS.reach(CONTEXT)) as operations:
        target.forward(TOKEN_IDS[:, :width], cache, CONTEXT)
    assert operations.counts.total() <= 2 * num_kinds < NUM_LAYERS, operations.counts


def allowed() -> tuple[bool, bool, bool, bool]:
    """Return torch's settings for cuDNN, flash, efficient and plain attention."""
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def test_cudnn_is_for_fixed_shapes_on_cuda_only_and_only_inside() -> None:
    before = allowed()
    assert before[0], "torch's own default"
    with attention_backends(torch.device("cpu")):
        assert allowed() == before
    with attention_backends(torch.device("cuda", 0)):
        assert allowed() == (False, True, True, True)
    with attention_backends(torch.device("cuda", 0), fixed_shape=True):
        assert allowed() == (True, True, True, True)
    assert allowed() == before


@pytest.mark.parametrize("runner", ["eager", "static"])
@pytest.mark.usefixtures("uncompiled")
def test_every_pass_asks_for_its_device(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    target = Target(build("llama"), runner)
    decoder = plain_decoder(target)  # checks the model with passes of its own
    open_now, seen = _watch(monkeypatch, "decoding.target.parts.attention_backends"), list[int]()
    target.blocks[0].register_forward_hook(lambda *_: seen.append(len(open_now)))
    decoder.generate(Request((5, 17, 33), Ending(6)))
    assert seen == [1] * 6


@pytest.mark.parametrize(("runner", "fixed"), [("eager", set()), ("static", {True})])
@pytest.mark.usefixtures("uncompiled")
def test_fixed_shapes_are_those_of_the_static_runner(
    monkeypatch: pytest.MonkeyPatch, runner: str, fixed: set[bool]
) -> None:
    """In a batch of the eager runner each pass has another number of slots: cuDNN would plan for each."""
    decoder, seen = plain_decoder(Target(build("llama"), runner)), list[bool]()

    @contextmanager
    def watched(device: torch.device, *, fixed_shape: bool = False) -> Iterator[None]:
        seen.append(fixed_shape)
        yield

    monkeypatch.setattr("decoding.target.parts.attention_backends", watched)
    decoder.generate_batch([Request((5, 17, 33), Ending(6))] * 2)
    assert set(seen) == {False, *fixed}, "prompts have shapes of their own"


def test_stock_generation_runs_with_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    open_now, seen = _watch(monkeypatch, "tuner.measuring.generation.attention_backends"), list[int]()
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(len(open_now)))
    StockGeneration("hf", model, frozenset(), "hf").decode([[5, 17, 33]], 6)
    assert seen == [1] * 6


def _watch(monkeypatch: pytest.MonkeyPatch, name: str) -> list[torch.device]:
    """Replace `attention_backends` where it is used; return the devices for which it is open at the moment."""
    open_now: list[torch.device] = []

    @contextmanager
    def watched(device: torch.device, **shapes: bool) -> Iterator[None]:
        open_now.append(device)
        yield
        open_now.pop()

    monkeypatch.setattr(name, watched)
    return open_now
