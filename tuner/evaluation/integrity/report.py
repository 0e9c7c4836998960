"""Tables of the integrity checks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from tuner.evaluation.integrity.coverage import CoverageCheck
from tuner.evaluation.integrity.nulls import MAX_CLAIMS, NullCheck
from tuner.evaluation.tables import ALL
from tuner.tables import figures_table


def nulls_table(checks: Sequence[NullCheck]) -> RenderableType:
    """Return a table of false claims by family."""
    title = f"False claims of a speed-up (limit: {MAX_CLAIMS:.0%} of the runs)"
    table = figures_table(
        title, "candidates", "count", "best trial", "confirmed", "runs", "claims", "share, 95 % interval"
    )
    for check in checks:
        table.add_row(
            check.family,
            str(check.num_candidates),
            f"{fmean(run.best_trial for run in check.runs):.3f}",
            f"{fmean(run.confirmed.value for run in check.runs):.3f}",
            str(len(check.runs)),
            str(check.num_claims),
            f"{check.share.value:.1%} [{check.share.ci95[0]:.1%}, {check.share.ci95[1]:.1%}]",
        )
    lines = []
    for check in checks:
        banks = [measured.speedup_interval() for measured in check.in_bank]
        known = (
            f"; {', '.join(f'{bank:.3f}' for bank in banks)} in the bank of held-out prompts"
            if banks
            else "; decoded afresh"
        )
        lines.append(f"{check.family:<10} speed-up {check.truth}{known}")
    return Group(table, *(Text(line) for line in lines))


def coverage_table(check: CoverageCheck) -> RenderableType:
    """Return a table of the intervals' coverage by kind of draft."""
    title = "Coverage of 95 % intervals of a confirmation (at least 90 % expected)"
    table = figures_table(title, "configurations", "count", "intervals", "covered", "too high", "too low")
    for name, confirmations in check.by_kind().items():
        shares = (
            sum(each.is_covered for each in confirmations),
            sum(each.is_above for each in confirmations),
            sum(each.is_below for each in confirmations),
        )
        number = sum(name in (ALL, each.kind) for each in check.configurations)
        shown = (f"{share / len(confirmations):.1%}" for share in shares)
        table.add_row(name, str(number), str(len(confirmations)), *shown)
    line = (
        f"intervals  from {check.num_drawn} prompts drawn from one pass over {check.num_prompts}; on the same prompts a "
        f"speed-up varies by {check.spread_of_passes:.1%} from pass to pass"
    )
    return Group(table, Text(line))
