"""The last position of a pass, for one sequence and for several."""

from __future__ import annotations

import pytest
import torch

from decoding.cache.kv_cache import last_position, with_last

LAST = torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("shape", "dim", "texts"),
    [
        ((2, 4, 3), -2, 0),  # states
        ((5, 2, 4, 3), -2, 1),  # states of several streams
        ((2, 1, 4, 6), -2, 0),  # a mask
        ((2, 4), -1, 0),  # token ids
    ],
)
def test_each_sequence_has_its_own_last_position(shape: tuple[int, ...], dim: int, texts: int) -> None:
    values = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    found = last_position(values, dim, LAST)
    for text, last in enumerate(LAST.tolist()):
        own = values.select(texts, text).select(dim, last)
        assert torch.equal(found.select(texts, text).select(dim, 0), own)


def test_single_sequence_has_one_last_position_or_the_end() -> None:
    values = torch.arange(12).view(1, 4, 3)
    assert last_position(values, -2, None).tolist() == [[[9, 10, 11]]]
    assert last_position(values, -2, torch.tensor([1])).tolist() == [[[3, 4, 5]]]


@pytest.mark.parametrize("streams", [(), (5,)])
def test_last_positions_are_written_at_their_indices(streams: tuple[int, ...]) -> None:
    values, new = torch.zeros(*streams, 2, 4, 3), torch.ones(*streams, 2, 1, 3)
    found = with_last(values, new, -2, LAST)
    assert found[..., 0, 2, :].eq(1).all()
    assert found[..., 1, 0, :].eq(1).all()
    assert found.sum() == new.sum()
    assert values.sum() == 0
    one = with_last(values[..., :1, :, :], new[..., :1, :, :], -2, torch.tensor([3]))
    assert one[..., 0, 3, :].eq(1).all()
    assert one.sum() == new[..., :1, :, :].sum()
