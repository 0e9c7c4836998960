"""Tables of a search's settings on held-out prompts: decode phase, end to end, and by category. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from studies.measurement import Measurement, geometric_means
from tuner.review.document import StockComparison, StockContender
from tuner.tables import facts_grid, figures_table, spaced

NOTHING = "nothing beats plain decoding with 95 % confidence"
FEWEST_SAMPLES = 2
"""Samples without which there is no interval."""


@dataclass(frozen=True)
class ResultRow:
    """A row of the final tables; without a measurement, the row of plain decoding."""

    label: str
    description: str
    measurement: Measurement | None


def results_table(rows: Sequence[ResultRow], comparison: StockComparison | None = None) -> RenderableType:
    """Return the settings side by side, on held-out prompts, each paired with plain decoding; a legend describes them.

    `comparison` adds stock generation.
    """
    parts: list[RenderableType] = [_decode_table(rows)]
    if all(row.measurement is None or row.measurement.end_to_end is not None for row in rows):
        parts.append(_end_to_end_table(rows))
    if categories := _categories(rows):
        parts.append(_category_table(rows, categories))
    if comparison is not None:
        parts.append(_stock_table(comparison))
    legend = facts_grid()
    for row in rows:
        legend.add_row(row.label, spaced(row.description))
    if comparison is not None:
        for name, each in comparison.contenders.items():
            legend.add_row(name, _described(each, "the winner" if name == "profile" else each.description))
        for name, reason in comparison.left_out.items():
            legend.add_row(name, f"left out: {reason}")
    for term, meaning in _verdicts(rows, categories):
        legend.add_row(term, meaning)
    return Group(*parts, legend)


def _measured(rows: Sequence[ResultRow]) -> dict[str, Measurement]:
    return {row.label: row.measurement for row in rows if row.measurement is not None}


def _decode_table(rows: Sequence[ResultRow]) -> Table:
    batch_size = max((each.batch_size for each in _measured(rows).values()), default=1)
    decode_in_lockstep = f" in batches of {batch_size}" if batch_size > 1 else ""
    table = figures_table(
        f"Held-out prompts{decode_in_lockstep}: speed-up of decoding over plain, with its 95 % interval",
        "setting",
        *("speed-up", "tok/s", "plain\ntok/s", "accept\nrate", "per\nround", "identical"),
    )
    for row in rows:
        cells = ("1.00", "", "", "", "", "") if row.measurement is None else _decode_figures(row.measurement)
        table.add_row(row.label, *cells)
    return table


def _stock_table(comparison: StockComparison) -> Table:
    """Return a row for each way of generating that transformers offers, and for the profile in turns with them."""
    rate = comparison.plain_tokens_per_second.value
    table = figures_table(
        f"transformers' own generation, all in turns on {comparison.num_prompts} of these prompts "
        f"(plain decoding: {rate:.1f} tok/s)",
        "setting",
        *("speed-up", "end to end", "profile over it"),
    )
    for name, each in comparison.contenders.items():
        over_it = "" if name == "profile" else f"{each.profile_over_it}"
        table.add_row(name, f"{each.over_plain}", f"{each.end_to_end_over_plain}", over_it)
    return table


def _described(each: StockContender, description: str) -> str:
    ties = f", {each.ties} at ties" if each.ties else ""
    return f"{description}; {each.identical} of {each.texts} texts identical{ties}"


def _decode_figures(measured: Measurement) -> tuple[str, ...]:
    ties = f"\n+ {measured.num_ties} ties" if measured.num_ties else ""
    return (
        f"{measured.speedup_interval():.2f}",
        f"{measured.draft_tokens_per_second:.1f}",
        f"{measured.plain_tokens_per_second:.1f}",
        f"{measured.draft_acceptance_rate:.0%}",
        f"{measured.mean_acceptance_length:.2f}",
        f"{measured.num_identical}/{measured.num_prompts}{ties}",
    )


def _end_to_end_table(rows: Sequence[ResultRow]) -> Table:
    table = figures_table(
        "End to end, prefill (time to first token, TTFT) included",
        "setting",
        *("speed-up", "tok/s", "plain\ntok/s", "TTFT\nms", "over plain's"),
    )
    for row in rows:
        figures = None if row.measurement is None else row.measurement.end_to_end
        if figures is None:
            table.add_row(row.label, "1.00", "", "", "", "1.00")
            continue
        prefill = figures.prefill_over_plain()
        table.add_row(
            row.label,
            f"{figures.speedup_interval():.2f}",
            f"{figures.draft.tokens_per_second:.1f}",
            f"{figures.plain.tokens_per_second:.1f}",
            f"{figures.time_to_first_token_seconds * 1000:.1f}",
            "" if prefill is None else f"{prefill:.2f}",
        )
    return table


def _categories(rows: Sequence[ResultRow]) -> list[str]:
    """Return the categories with enough samples for an interval; none if there is only one category."""
    found = [each.by_category() for each in _measured(rows).values()][:1]
    of_first = found[0] if found else {}
    return [name for name, each in of_first.items() if len(each.samples) >= FEWEST_SAMPLES] if len(of_first) > 1 else []


def _category_table(rows: Sequence[ResultRow], categories: Sequence[str]) -> Table:
    """Return a row per setting and category, and the geometric mean over categories where each has an interval."""
    table = figures_table("By category of prompts", ("setting", "category"), "count", "decoding", "end to end")
    for label, measured in _measured(rows).items():
        of_categories = measured.by_category()
        for name in categories:
            each = of_categories[name]
            whole = each.end_to_end
            cells = f"{each.speedup_interval():.2f}", "" if whole is None else f"{whole.speedup_interval():.2f}"
            table.add_row(label, name, str(each.num_prompts), *cells)
        if (means := geometric_means(of_categories)) is not None:
            decode, end_to_end = means
            cells = f"{decode:.2f}", "" if end_to_end is None else f"{end_to_end:.2f}"
            table.add_row(label, "geometric mean", "", *cells)
    return table


def _verdicts(rows: Sequence[ResultRow], categories: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the tables say about plain decoding: overall, and where nothing beats it."""
    measured = list(_measured(rows).values())
    beaten_overall = any(map(beats_plain, measured))
    if measured and not beaten_overall:
        yield "note", NOTHING
    beaten = [name for name in categories if any(beats_plain(each.by_category()[name]) for each in measured)]
    if beaten or beaten_overall:
        yield from ((name, NOTHING) for name in categories if name not in beaten)


def beats_plain(measured: Measurement) -> bool:
    """Return True for a lossless setting whose speed-up of decoding has its 95 % interval above 1.

    End to end the interval must not lie below 1.
    """
    faster = measured.speedup_interval().ci95[0] > 1.0 and not measured.is_slower_end_to_end
    return faster and measured.is_lossless
