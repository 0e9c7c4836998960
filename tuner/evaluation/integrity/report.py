"""What the checks of integrity found, for people: tables for the terminal and the text file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.text import Text

from tuner.evaluation.integrity.coverage import CoverageCheck
from tuner.evaluation.integrity.nulls import MOST_CLAIMS, NullCheck
from tuner.evaluation.tables import ALL, new_table


def nulls_table(checks: Sequence[NullCheck]) -> RenderableType:
    """How often a speed-up was claimed where none can be, family by family."""
    title = f"Speed-ups claimed where none can be (at most {MOST_CLAIMS:.0%} of the runs should)"
    table = new_table(
        title, "candidates", "number", "best trial", "confirmed", "runs", "claims", "share, 95 % interval"
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
            else "; decoded anew"
        )
        lines.append(f"{check.family:<10} speed-up {check.truth}{known}")
    return Group(table, *(Text(line) for line in lines))


def coverage_table(check: CoverageCheck) -> RenderableType:
    """How often a confirmation's interval held the value of the other passes, by kind of draft."""
    title = "Confirmations whose 95 % interval holds the value of a long re-measurement (at least 90 % should)"
    table = new_table(title, "configurations", "number", "intervals", "hold it", "claim too much", "claim too little")
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
        f"intervals  of {check.prompts_drawn} prompts drawn from one pass over {check.prompts_in_all}; from pass to pass a "
        f"speed-up varies by {check.spread_of_passes:.1%}, the prompts being the same"
    )
    return Group(table, Text(line))
