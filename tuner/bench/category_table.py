"""The table of a bench's speed-ups by category, and what beats plain decoding in words. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from decoding.profile import Interval
from tuner.bench.categories import by_category, categories, category_mean, verdict, verdicts
from tuner.bench.contenders import PLAIN
from tuner.bench.result import BenchResult, Phase
from tuner.tables import figures_table


def category_table(result: BenchResult) -> Table | None:
    """Return a row per category and contender with the speed-ups over plain decoding; None without two categories."""
    if len(categories(result)) < 2:
        return None
    headings = ("prompts", "decoding", "end to end", "per\npass", "accept\nrate")
    table = figures_table("Over plain decoding, by category", ("contender", "category"), *headings)
    for name in result.entries:
        if name != PLAIN:
            _add_contender(table, result, name)
    return table


def _add_contender(table: Table, result: BenchResult, name: str) -> None:
    for category, figures in by_category(result, name).items():
        rate = figures.draft_acceptance_rate
        table.add_row(
            name,
            category,
            str(figures.prompts),
            f"{figures.over_plain}",
            f"{figures.end_to_end_over_plain}",
            f"{figures.mean_acceptance_length:.2f}",
            "" if rate is None else f"{rate:.0%}",
        )
    means = [category_mean(result, name, phase) for phase in Phase]
    if any(means):
        table.add_row(name, "geometric mean", "", *map(_shown, means), "", "")


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval}"


def verdict_lines(result: BenchResult) -> Iterator[tuple[str, str]]:
    """Yield what beats plain decoding: on all counted prompts, and on each category."""
    yield "verdict", verdict(result).sentence
    if len(categories(result)) > 1:
        for category, of_category in verdicts(result):
            yield category, of_category.sentence
