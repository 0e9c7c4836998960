"""Table of a comparison of draft-length rules."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner.evaluation.rules.compare import RuleComparison
from tuner.tables import facts_grid, spaced


def rules_table(comparison: RuleComparison) -> RenderableType:
    """Return a table of the rules' speed-ups by kind of text."""
    columns = list(comparison.columns)
    table = Table(
        title="Speed-up over plain decoding and over the best fixed length (same prompts, 95 % intervals)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("rule", no_wrap=True)
    for heading in (*columns, f"over best fixed ({columns[-1]})", "identical"):
        table.add_column(heading, justify="right", overflow="fold")  # a truncated figure is useless
    for entry in comparison.entries:
        cells = []
        for column, indices in comparison.columns.items():
            mark = "*" if entry is comparison.best_fixed(column) else " "
            cells.append(f"{entry.on(indices).speedup_interval():.2f}{mark}")
        measured = entry.measurement
        ties = f" + {measured.num_ties} ties" if measured.num_ties else ""
        ratio = f"{comparison.over_best_fixed(entry, columns[-1]):.2f}"
        table.add_row(Text(entry.label), *cells, ratio, f"{measured.num_identical}/{len(measured.samples)}{ties}")
    legend = facts_grid()
    legend.add_row("draft", spaced(comparison.draft.describe()))
    legend.add_row("*", "best fixed length of the column, chosen by measuring all lengths on these prompts")
    legend.add_row("warm", "rule warmed up on other prompts of the same kinds")
    return Group(table, legend)
