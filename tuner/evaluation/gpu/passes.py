"""Passes of the static runner against eager ones: every shape, several runs each, at other positions on other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from decoding.runners.static import CHAINS
from decoding.target import Target

WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 65)
NUM_RUNS = 3
"""Runs of each shape: the first one prepares, the others replay."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.08}
"""Largest difference of two computations of the same logits, relative to the largest logit: as `check_runner` allows."""


@torch.inference_mode()
def compare_passes(
    static: Target, eager: Target, contexts: tuple[int, ...], *, vocabulary: int | None = None
) -> dict[str, Any]:
    """Compare logits of the first `vocabulary` tokens over all widths and contexts, and the drafts of a view.

    Return the number of shapes, the largest difference relative to the largest logit, and the shapes that differ.
    """
    tolerance, worst, differing, num_shapes = TOLERANCES[static.dtype], 0.0, list[str](), 0
    for context in contexts:
        pair = _Pair(static, eager, context, vocabulary)
        for name, differences in (*pair.whole(), *pair.views()):
            num_shapes += 1
            worst = max(worst, *differences)
            if max(differences) > tolerance:
                runs = ", ".join(f"{each:.2g}" for each in differences)
                differing.append(f"{name} after {context} tokens (runs: {runs})")
    return {"shapes": num_shapes, "worst": worst, "tolerance": tolerance, "differing": differing}


class _Pair:
    """Two targets that have read the same random sequence."""

    def __init__(self, static: Target, eager: Target, context: int, vocabulary: int | None) -> None:
        stream = torch.Generator().manual_seed(context)
        length = context + max(WIDTHS) + NUM_RUNS
        self._ids = torch.randint(static.config.vocab_size, (1, length), generator=stream).to(static.device)
        self._targets = (static, eager)
        self._context = context
        self._vocabulary = vocabulary
        self._caches = [target.new_cache(length) for target in self._targets]
        for target, cache in zip(self._targets, self._caches, strict=True):
            target.forward(self._ids, cache, 0)

    def whole(self) -> Iterator[tuple[str, list[float]]]:
        """Yield the differences of passes of the whole model, by width."""
        for last_only in (False, True):
            for width in WIDTHS:
                kept = "last of " if last_only else ""
                yield f"{kept}{width} positions", [self._pass(run, width, last_only) for run in range(NUM_RUNS)]

    def _pass(self, run: int, width: int, last_only: bool) -> float:
        start = self._context + run
        ids = self._ids[:, start : start + width]
        found, expected = (
            target.forward(ids, cache, start, last_only=last_only)
            for target, cache in zip(self._targets, self._caches, strict=True)
        )
        return self._difference(found, expected)

    def views(self) -> Iterator[tuple[str, list[float]]]:
        """Yield the differences of a draft's single steps and of its chains; a chain differs by the logit that it gave away."""
        views = [target.draft_view([1], [2], keep_boundary=False) for target in self._targets]
        yield "draft step", [self._step(views, run) for run in range(NUM_RUNS)]
        for length in CHAINS:
            yield f"chain of {length}", [self._chain(views, length, run) for run in range(NUM_RUNS)]

    def _step(self, views: list[Any], run: int) -> float:
        start = self._context + run
        ids = self._ids[:, start : start + 1]
        found, expected = (view.forward(ids, cache, start) for view, cache in zip(views, self._caches, strict=True))
        return self._difference(found, expected)

    def _chain(self, views: list[Any], length: int, run: int) -> float:
        start = self._context + run
        first = self._ids[:, start : start + 1]
        drafted = views[0].write(first, self._caches[0], start, length).token_ids
        given, worst = torch.cat([first[0], drafted]), 0.0
        for index, token in enumerate(drafted.tolist()):
            (logits,) = views[1].forward(given[index : index + 1][None], self._caches[1], start + index).float()
            worst = max(worst, float((logits.max() - logits[token]) / logits.abs().max().clamp_min(1e-6)))
        return worst

    def _difference(self, found: Tensor, expected: Tensor) -> float:
        """Return the largest difference relative to the largest value; infinity if a value is not finite."""
        found, expected = (each[..., : self._vocabulary].float() for each in (found, expected))
        if not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
