"""The preallocated cache: what a pass reads, rollback by length, and the absence of copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache, Slot
from decoding.runners.compilation import compiler_options

HEADS, SIZE = 2, 3


def states(width: int, value: float) -> Tensor:
    return torch.full((1, HEADS, width, SIZE), value)


def test_pass_reads_what_was_written_up_to_its_own_end() -> None:
    cache = KVCache(num_layers=2, capacity=8)
    cache.cover(0, 3)
    keys, values = cache.update(states(3, 1.0), states(3, -1.0), 0)
    assert keys.shape == values.shape == (1, HEADS, 3, SIZE)
    cache.cover(3, 2)
    keys, values = cache.update(states(2, 2.0), states(2, -2.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert values[0, 0, :, 0].tolist() == [-1.0, -1.0, -1.0, -2.0, -2.0]


def test_pass_of_the_last_position_alone_writes_at_the_end() -> None:
    cache = KVCache(num_layers=1, capacity=4)
    cache.cover(0, 3)
    cache.update(states(3, 1.0), states(3, 1.0), 0)
    cache.cover(1, 3)
    keys, _ = cache.update(states(1, 5.0), states(1, 5.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 5.0]


def test_positions_after_a_rollback_are_rewritten_and_not_read() -> None:
    cache = KVCache(num_layers=1, capacity=8)
    cache.cover(0, 6)
    cache.update(states(6, 1.0), states(6, 1.0), 0)
    cache.roll_back(2)
    assert cache.length == 2
    cache.cover(cache.length, 1)
    keys, _ = cache.update(states(1, 3.0), states(1, 3.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, 3.0]


def test_masks_are_sized_by_the_pass_for_every_layer_alike() -> None:
    cache = KVCache(num_layers=3, capacity=8)
    cache.cover(0, 4)
    cache.update(states(4, 1.0), states(4, 1.0), 0)  # layers 1 and 2 are skipped and hold nothing
    cache.cover(4, 2)
    for layer in range(3):
        assert cache.get_mask_sizes(2, layer) == (6, 0)
        assert cache.get_seq_length(layer) == 4


def test_storage_is_allocated_once_and_returned_without_a_copy() -> None:
    cache = KVCache(num_layers=1, capacity=8)
    addresses = set()
    for start, width in ((0, 3), (3, 1), (2, 4), (0, 8)):
        cache.cover(start, width)
        keys, _ = cache.update(states(width, 1.0), states(width, 1.0), 0)
        addresses.add(keys.data_ptr())
    assert len(addresses) == 1
    assert cache.layers[0].keys.shape == (1, HEADS, 8, SIZE)


def test_updates_are_counted_by_layer() -> None:
    cache = KVCache(num_layers=2, capacity=8)
    cache.cover(0, 1)
    for _ in range(3):
        cache.update(states(1, 1.0), states(1, 1.0), 1)
    assert cache.updates_per_layer == [0, 3]


def test_pass_beyond_the_capacity_is_refused() -> None:
    cache = KVCache(num_layers=1, capacity=8)
    cache.cover(6, 2)
    with pytest.raises(ValueError, match="the cache holds 8 positions, but the pass needs position 8"):
        cache.cover(6, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
def test_a_compiled_pass_of_several_sequences_does_not_copy_the_storage() -> None:
    """A copy would cost as much as reading the storage twice, in each layer."""
    rows, heads, capacity, size = 3, 2, 1024, 8

    def write(slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        read = Slot(slots, keys, values, None).update(states, 2 * states)
        return read[0].sum() + read[1].sum()

    keys, values = (torch.zeros(rows, heads, capacity, size) for _ in range(2))
    slots = torch.tensor([[5, 6], [7, 8], [9, 10]])
    states = torch.randn(rows, heads, 2, size)
    with torch.inference_mode():
        compiled = torch.compile(write, fullgraph=True, options=compiler_options(torch.device("cpu")))
        compiled(slots, keys, values, states)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        # torch 2.11 warns of a profiler that does not keep its events, though only one cycle is run.
        with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiled:
            compiled(slots, keys, values, states)
    assert profiled.profiler is not None
    allocated = [event.nbytes() for event in profiled.profiler.kineto_results.events()]
    assert 0 < max(allocated) < keys.nbytes / 10
    for row, own in enumerate(slots.tolist()):
        assert torch.equal(keys[row, :, own], states[row])
        assert torch.equal(values[row, :, own], 2 * states[row])
    assert keys.count_nonzero() == states.numel()
