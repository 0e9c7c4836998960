"""Table of a comparison of draft-length rules."""

from __future__ import annotations

from rich.console import Group, RenderableType

from tuner.evaluation.rules.compare import RuleComparison
from tuner.tables import facts_grid, figures_table, spaced


def rules_table(comparison: RuleComparison) -> RenderableType:
    """Return a table of the rules' speed-ups by kind of text."""
    columns = list(comparison.columns)
    table = figures_table(
        "Speed-up over plain decoding and over the best fixed length (same prompts, 95 % intervals)",
        "rule",
        *columns,
        f"over best fixed ({columns[-1]})",
        "identical",
    )
    for entry in comparison.entries:
        cells = []
        for column, indices in comparison.columns.items():
            mark = "*" if entry is comparison.best_fixed(column) else " "
            cells.append(f"{entry.on(indices).speedup_interval():.2f}{mark}")
        measured = entry.measurement
        ties = f" + {measured.num_ties} ties" if measured.num_ties else ""
        ratio = f"{comparison.over_best_fixed(entry, columns[-1]):.2f}"
        table.add_row(entry.label, *cells, ratio, f"{measured.num_identical}/{len(measured.samples)}{ties}")
    legend = facts_grid()
    legend.add_row("draft", spaced(comparison.draft.describe()))
    legend.add_row("*", "best fixed length of the column, chosen by measuring all lengths on these prompts")
    legend.add_row("warm", "rule warmed up on other prompts of the same kinds")
    return Group(table, legend)
