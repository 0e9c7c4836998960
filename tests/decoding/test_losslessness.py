"""Comparison of outputs: identical, tied or different."""

from __future__ import annotations

import torch

from decoding.losslessness import compare
from decoding.target import Target
from tests.support.tiny import tiny_llama

PROMPT = (5, 17, 33, 8, 2, 9)


def _target(dtype: torch.dtype, twins: tuple[int, int] | None = None) -> Target:
    """Return a tiny model; the logits of `twins` are always equal."""
    model = tiny_llama()
    if twins:
        with torch.no_grad():
            model.lm_head.weight[twins[1]] = model.lm_head.weight[twins[0]]
    return Target(model.to(dtype))


def test_the_same_tokens_are_identical() -> None:
    for tokens in ((1, 2, 3), ()):
        found = compare(_target(torch.float32), PROMPT, tokens, tokens)
        assert found.identical
        assert found.is_lossless


def test_a_near_tie_in_low_precision_is_recognised_and_located() -> None:
    for prompt in (PROMPT, (5,)):
        found = compare(_target(torch.bfloat16, twins=(11, 12)), prompt, (1, 11, 3), (1, 12, 4))
        assert (found.identical, found.first_difference, found.tie) == (False, 1, True)
        assert found.is_lossless


def test_a_clear_difference_after_common_tokens_is_not_a_tie() -> None:
    target = _target(torch.bfloat16, twins=(11, 12))
    common: list[int] = []
    for _ in range(2):
        ids = torch.tensor([[*PROMPT, *common]])
        common.append(int(target.forward(ids, target.new_cache(ids.shape[1]), 0, last_only=True)[0].argmax()))
    ids = torch.tensor([[*PROMPT, *common]])
    logits = target.forward(ids, target.new_cache(ids.shape[1]), 0, last_only=True)[0]
    best, worst = int(logits.argmax()), int(logits.argmin())
    found = compare(target, PROMPT, (*common, best, 11), (*common, worst, 12))
    assert (found.first_difference, found.tie, found.is_lossless) == (2, False, False), "nor does a later tie excuse it"


def test_in_float32_no_difference_is_excused() -> None:
    assert not compare(_target(torch.float32, twins=(11, 12)), PROMPT, (11,), (12,)).is_lossless


def test_a_shorter_output_is_different() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for plain, other in (((1, 2, 3), (1, 2)), ((1, 2), (1, 2, 3)), ((1, 2), ())):
            found = compare(_target(dtype), PROMPT, plain, other)
            assert found.first_difference == min(len(plain), len(other))
            assert not found.is_lossless


def test_a_tie_in_float32_is_named_and_still_a_difference() -> None:
    target = _target(torch.float32, twins=(11, 12))
    with torch.no_grad():
        target.model.lm_head.weight[12] *= 1 + 2**-22  # a few units in the last place
    found = compare(target, PROMPT, (1, 11, 3), (1, 12, 4))
    assert (found.identical, found.tie, found.float32_tie, found.is_lossless) == (False, False, True, False)
    logits = target.forward(torch.tensor([PROMPT]), target.new_cache(6), 0, last_only=True)[0]
    assert not compare(target, PROMPT, (int(logits.argmax()),), (int(logits.argmin()),)).float32_tie
