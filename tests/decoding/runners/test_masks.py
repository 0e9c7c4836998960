"""Attention masks of fixed-shape passes."""

from __future__ import annotations

import torch

from decoding.runners.masks import MaskKinds

SLOTS = torch.tensor([3, 4])


def test_position_sees_itself_and_earlier_positions() -> None:
    (mask,) = MaskKinds((None, None), additive=None).masks(SLOTS, 6)
    assert mask.shape == (1, 1, 2, 6)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_window_counts_the_position_itself() -> None:
    kinds = MaskKinds((None, 2, None), additive=None)
    whole, window = kinds.masks(SLOTS, 6)
    assert [kinds.kind_of(layer) for layer in range(3)] == [0, 1, 0]
    assert whole[0, 0, 0].int().tolist() == [1, 1, 1, 1, 0, 0]
    assert window[0, 0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]


def test_additive_masks_hide_what_others_leave_out() -> None:
    (allowed,) = MaskKinds((None,), additive=None).masks(SLOTS, 6)
    (added,) = MaskKinds((None,), additive=torch.bfloat16).masks(SLOTS, 6)
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, allowed)
    assert set(added.unique().tolist()) == {torch.finfo(torch.bfloat16).min, 0.0}
