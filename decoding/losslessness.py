"""Is it the text that plain decoding writes? If not, was the first difference a numerical tie?

In float32 every token must be the same. In lower precision a wide pass and a one-token pass round differently, so two
tokens whose logits are as close as that rounding may change places: such a tie is recognised, counted and reported. In bit-exact
mode (`Target`) there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.target import Target

PASS_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Comparison:
    """How two texts of one prompt compare; `first_difference` is the place of the first differing generated token."""

    identical: bool
    first_difference: int | None = None
    tie: bool = False

    @property
    def is_lossless(self) -> bool:
        """The same text, or another one that parted at a numerical tie."""
        return self.identical or self.tie


def compare(target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Comparison:
    """Compare the tokens `other` with those of `plain` decoding, both continuations of `prompt`."""
    if tuple(plain) == tuple(other):
        return Comparison(identical=True)
    pairs = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    is_tie = (
        target.dtype != torch.float32
        and target.runner.exact_width is None
        and place < min(len(plain), len(other))
        and _is_tie(target, [*prompt, *plain[:place]], plain[place], other[place])
    )
    return Comparison(identical=False, first_difference=place, tie=is_tie)


@torch.inference_mode()
def _is_tie(target: Target, context: Sequence[int], first: int, second: int) -> bool:
    """Whether the two tokens' logits behind `context` are as close as passes of different width disagree about them.

    Our formulation: the gap is computed by passes of several widths that all end at the same position. It is a tie if it is
    no larger than twice their spread, or than four units in the last place of the logits.
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
