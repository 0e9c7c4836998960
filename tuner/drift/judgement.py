"""From observations to the verdict on a profile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from decoding.arms.belief import PLAIN_NAME
from tuner.drift.contract import DriftState, DriftVerdict, Kept, ObservedWindow, Promised
from tuner.drift.pairs import covers, pairs_of
from tuner.drift.posterior import blocks_of, posterior_of, verdict_on


def judge(promised: Promised | None, kept: Kept) -> DriftState:
    """Return the verdict on a profile. One that promises nothing decodes plainly, or was measured in another engine."""
    all_windows = [window for _, window in kept.windows]
    state = DriftState(
        verdict=DriftVerdict.NOTHING_PROMISED,
        promised=promised,
        plain_windows=sum(window.arm == PLAIN_NAME for window in all_windows),
        requests=len(kept.requests),
        texts=kept.num_texts,
        prompt_tokens=_median([request.prompt_tokens for request in kept.requests]),
        new_tokens=_median([request.new_tokens for request in kept.requests]),
        latest=max((window.ended for window in all_windows), default=None),
    )
    if promised is None:
        return state
    own = [window for window in all_windows if window.arm == promised.name]
    pairs = pairs_of(kept.windows, promised)
    blocks = blocks_of(pairs)
    posterior = posterior_of(blocks, promised)
    return state.model_copy(
        update={
            "verdict": verdict_on(posterior),
            "posterior": posterior,
            "windows": len(own),
            "elsewhere": sum(not covers(promised, window) for window in own),
            "pairs": sum(map(len, blocks)),
            "blocks": len(blocks),
            "acceptance_by_position": acceptance_by_position(own),
        }
    )


def acceptance_by_position(windows: Sequence[ObservedWindow]) -> tuple[float, ...]:
    """Return the share of all rounds that accepted the first, second ... drafted token."""
    counts: list[int] = []
    for window in windows:
        counts += [0] * (len(window.accepted_lengths) - len(counts))
        for length, count in enumerate(window.accepted_lengths):
            counts[length] += count
    total = sum(counts)
    return tuple(sum(counts[position:]) / total for position in range(1, len(counts))) if total else ()


def _median(values: Sequence[int]) -> float | None:
    return float(median(values)) if values else None
