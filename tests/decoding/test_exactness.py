"""The same text? And if not, a numerical tie?"""

from __future__ import annotations

import torch

from decoding.exactness import compare
from decoding.target import Target
from tests.tiny import tiny_llama

PROMPT = (5, 17, 33, 8, 2, 9)


def _target(dtype: torch.dtype, twins: tuple[int, int] | None = None) -> Target:
    """A tiny model; the logits of `twins` are always equal."""
    model = tiny_llama()
    if twins:
        with torch.no_grad():
            model.lm_head.weight[twins[1]] = model.lm_head.weight[twins[0]]
    return Target(model.to(dtype))


def test_the_same_tokens_are_identical() -> None:
    found = compare(_target(torch.float32), PROMPT, (1, 2, 3), (1, 2, 3))
    assert found.identical
    assert found.is_lossless


def test_a_near_tie_in_low_precision_is_recognised_and_placed() -> None:
    found = compare(_target(torch.bfloat16, twins=(11, 12)), PROMPT, (1, 11, 3), (1, 12, 4))
    assert (found.identical, found.first_difference, found.tie) == (False, 1, True)
    assert found.is_lossless


def test_a_clear_difference_in_low_precision_is_no_tie() -> None:
    target = _target(torch.bfloat16)
    logits = target.forward(torch.tensor([PROMPT]), target.new_cache(6), 0, last_only=True)[0]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert not compare(target, PROMPT, (best,), (worst,)).is_lossless


def test_in_float32_no_difference_is_excused() -> None:
    assert not compare(_target(torch.float32, twins=(11, 12)), PROMPT, (11,), (12,)).is_lossless


def test_a_text_that_ends_sooner_is_another_text() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = compare(_target(dtype), PROMPT, (1, 2, 3), (1, 2))
        assert found.first_difference == 2
        assert not found.is_lossless
