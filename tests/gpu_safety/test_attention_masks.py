"""Masks are made once per pass: no layer turns one into another form, repeats it or narrows it for itself."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.cache.kv_cache import KVCache
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.static import StaticRunner
from decoding.target import ResumeView, Target
from tests.support.families import NUM_LAYERS, build

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


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("family", "num_kinds"), [("llama", 1), ("gpt_neox_parallel", 1), ("gemma3", 2)])
@torch.no_grad()  # in inference mode attention would be a single operation
def test_number_of_mask_operations_is_independent_of_the_layers(family: str, num_kinds: int, width: int) -> None:
    target, cache = static_target(family)
    target.forward(TOKEN_IDS[:, :width], cache, CONTEXT)
    with MaskOperations(GPU_BUCKETS.reach(CONTEXT)) as operations:
        target.forward(TOKEN_IDS[:, :width], cache, CONTEXT)
    assert operations.counts.total() <= 2 * num_kinds < NUM_LAYERS, operations.counts


@torch.no_grad()
def test_inputs_are_narrowed_to_the_last_position_once_for_all_blocks() -> None:
    target, cache = static_target("llama")
    counts = []
    for boundary in (1, NUM_LAYERS - 1):
        view, states = ResumeView(target, boundary), torch.randn(1, 2, 32)
        view.forward(TOKEN_IDS[:, :3], cache, CONTEXT, states)
        with Selections() as selections:
            view.forward(TOKEN_IDS[:, :3], cache, CONTEXT, states)
        counts.append(selections.count)
    assert counts[0] == counts[1] > 0


class Selections(TorchDispatchMode):
    """Counts selections by index: how a pass narrows its inputs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.index_select.default
        return func(*args, **(kwargs or {}))
