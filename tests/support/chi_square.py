"""A chi-square test that counted outcomes come from a distribution."""

from __future__ import annotations

from collections import Counter

from scipy import stats

ALPHA = 1e-3  # with these seeds a right acceptance stays above; a wrong one falls below by many orders of magnitude
FEWEST_EXPECTED = 5.0

Outcome = tuple[int, ...]


def p_value(counts: Counter[Outcome], expected: dict[Outcome, float]) -> float:
    """Return the p-value of the chi-square test that `counts` come from `expected`; rare outcomes are pooled."""
    total = counts.total()
    assert abs(sum(expected.values()) - 1.0) < 1e-4
    impossible = [outcome for outcome in counts if expected.get(outcome, 0.0) == 0.0]
    assert not impossible, f"outcomes that the target never generates: {impossible[:3]}"
    common = [outcome for outcome, share in expected.items() if share * total >= FEWEST_EXPECTED]
    assert len(common) > 10, "too few outcomes to tell distributions apart"
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] * total for outcome in common]
    rest = total - sum(wanted)
    if rest >= FEWEST_EXPECTED:
        observed.append(total - sum(observed))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [value * scale for value in wanted]).pvalue)
