"""The posterior of a speed-up in production, and the verdict on the profile that promised one.

Windows are correlated: neighbours decode the same texts, disturbances of a machine last, and a window may be in two pairs. So the
unit is a block of consecutive windows that is longer than all of that, as in the method of batch means for correlated
simulation output (B. Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30, 1982, which
recommends 10 to 30 batches). The speed-up is a ratio of totals, as the profile's is, and its error is the ratio estimator's over
blocks (`studies.ratios`). With a flat prior on the logarithm of the speed-up and on that of the error, the posterior is Student's t
(Gelman et al., Bayesian Data Analysis, 3rd ed., section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from studies.ratios import Ratio, Work
from tuner.drift.contract import DriftPosterior, DriftVerdict, Promised
from tuner.drift.pairs import WindowPair

BLOCK_WINDOWS = 128
"""Consecutive windows of a server that make a block: at least 1024 tokens of each sequence, so several requests."""
FEWEST_BLOCKS, MOST_BLOCKS = 8, 24
"""Blocks with pairs before there is a posterior, and how many of the latest ones count."""
MARGIN = 0.03
"""How far below the interval the speed-up must lie. Servers choose their arms by what they see, which biases the estimate: in
simulations upwards by up to 4 % while drafts are fast, and downwards by 2 % where they are about as fast as plain rounds."""
LEVEL = 0.99
"""Probability of a speed-up below that from which the verdict is `below`. It is asked again and again."""


def blocks_of(pairs: Sequence[WindowPair]) -> list[list[WindowPair]]:
    """Return the latest blocks of pairs, the oldest first. `pairs` are ordered by time."""
    found: dict[tuple[str, int], list[WindowPair]] = {}
    for pair in pairs:
        found.setdefault((pair.server, pair.number // BLOCK_WINDOWS), []).append(pair)
    return sorted(found.values(), key=lambda block: block[-1].ended)[-MOST_BLOCKS:]


def posterior_of(blocks: Sequence[Sequence[WindowPair]], promised: Promised) -> DriftPosterior | None:
    """Return the posterior of the speed-up over the blocks; None for fewer than `FEWEST_BLOCKS`."""
    if len(blocks) < FEWEST_BLOCKS:
        return None
    plain = _work([[(pair.plain_seconds, pair.plain_tokens) for pair in block] for block in blocks])
    draft = _work([[(pair.draft_seconds, pair.draft_tokens) for pair in block] for block in blocks])
    ratio = Ratio.of_speeds(plain, draft)
    low, high = ratio.interval().ci95
    return DriftPosterior(
        speedup=ratio.value,
        low=low,
        high=high,
        probability_below=_probability_below(ratio, promised.low * (1 - MARGIN)),
    )


def verdict_on(posterior: DriftPosterior | None) -> DriftVerdict:
    """Return the verdict that follows from the posterior of a profile that promised a speed-up."""
    if posterior is None:
        return DriftVerdict.TOO_LITTLE
    return DriftVerdict.BELOW if posterior.probability_below >= LEVEL else DriftVerdict.HOLDS


def _work(blocks: Sequence[Sequence[tuple[float, float]]]) -> Work:
    """Return the work of blocks of seconds and tokens."""
    sums = np.array([np.sum(block, axis=0) for block in blocks])
    return Work(sums[:, 0], sums[:, 1])


def _probability_below(ratio: Ratio, bound: float) -> float:
    distance = math.log(bound / ratio.value)
    if ratio.log_error == 0:  # blocks that agree exactly, as only planted ones do
        return float(distance > 0)
    return float(stats.t.cdf(distance / ratio.log_error, ratio.degrees_of_freedom))
