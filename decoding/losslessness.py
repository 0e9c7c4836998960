"""Comparison of speculative with plain output: identical, or first different at a numerical tie.

A wide pass and a one-token pass round differently, so two tokens whose logits differ by no more than that rounding may swap
ranks. In low precision such a tie is recognised, counted and reported. In float32 it is rare enough to be asked for every token:
a tie is recognised there too, to be named as the reason, and still is a difference. Bit-exact mode (`Target`) has no ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.target import Target

PASS_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Comparison:
    """The comparison of two continuations of one prompt.

    `first_difference` is the index of the first differing generated token.
    """

    identical: bool
    first_difference: int | None = None
    tie: bool = False
    """True if it is a numerical tie in low precision."""
    float32_tie: bool = False
    """True if it is a numerical tie in float32, which does not make the outputs lossless."""

    @property
    def is_lossless(self) -> bool:
        return self.identical or self.tie


def compare(target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Comparison:
    if tuple(plain) == tuple(other):
        return Comparison(identical=True)
    pairs = zip(plain, other, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    is_tie = (
        target.runner.exact_width is None
        and index < min(len(plain), len(other))
        and _is_tie(target, [*prompt, *plain[:index]], plain[index], other[index])
    )
    in_float32 = target.dtype == torch.float32
    return Comparison(
        identical=False, first_difference=index, tie=is_tie and not in_float32, float32_tie=is_tie and in_float32
    )


@torch.inference_mode()
def _is_tie(target: Target, context: Sequence[int], first: int, second: int) -> bool:
    """Return True if the logits of the two tokens after `context` are numerically tied.

    Our formulation: the gap is computed by passes of several widths that all end at the same position. It is a tie if
    the smallest gap is at most twice the spread of the gaps, or at most four units in the last place of the largest
    logit.
    """
    ids = torch.tensor([list(context)], device=target.device)
    gaps, height = [], 0.0
    for width in (width for width in PASS_WIDTHS if width < len(context)):
        cache = target.new_cache(len(context))
        split = len(context) - width
        target.forward(ids[:, :split], cache, 0, last_only=True)
        logits = target.forward(ids[:, split:], cache, split, last_only=True)[0].float()
        gaps.append(float(logits[first] - logits[second]))
        height = max(height, float(logits.abs().max()))
    if not gaps:
        return False
    smallest = min(abs(gap) for gap in gaps)
    return smallest <= max(2 * (max(gaps) - min(gaps)), 4 * torch.finfo(target.dtype).eps * height)
