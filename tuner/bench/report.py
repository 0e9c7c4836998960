"""Reports of a bench: the table, the picture, and the JSON with all figures. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from rich.console import Group, RenderableType
from rich.table import Table

from decoding.profile import Interval
from tuner.bench.categories import by_category, categories, category_mean, verdict, verdicts
from tuner.bench.category_table import category_table, verdict_lines
from tuner.bench.contenders import PLAIN, PROFILE
from tuner.bench.result import BenchResult, Entry, Phase, mean_prompt_tokens, units_of
from tuner.tables import facts_grid, figures_table

TABLE_WIDTH = 120
"""Width of the table on disk, in characters."""
COLOURS = {PROFILE: "#d55e00", PLAIN: "#555555"}
OTHERS_COLOUR = "#0072b2"
"""Colours by Okabe and Ito, which colour-blind readers can tell apart."""


def bench_table(result: BenchResult) -> RenderableType:
    """Return a table with a line per contender, the contenders left out, and a legend below."""
    prompts = f"{len(result.counted)} {units_of(result.batch_size)} of {mean_prompt_tokens(result):.0f} tokens"
    title = f"Decode phase on {prompts} on average (95 % intervals over {_units(result)})"
    table = figures_table(title, "contender", *("tok/s", "over plain", "profile over it", "per\npass", "iden-\ntical"))
    for entry in result.entries.values():
        table.add_row(entry.name, *_cells(result, entry))
    for name in result.left_out:
        table.add_row(name, "left out")
    legend = facts_grid()
    for term, meaning in _legend(result):
        legend.add_row(term, meaning)
    further = [_end_to_end_table(result), _draft_table(result), category_table(result)]
    return Group(table, *(each for each in further if each is not None), legend)


def _end_to_end_table(result: BenchResult) -> Table:
    """Return a line per contender with the figures of whole decodings."""
    table = figures_table(
        "End to end, prefill included, on the same prompts", "contender", *("tok/s", "over plain", "profile over it")
    )
    for name in result.entries:
        table.add_row(
            name,
            f"{result.rate(name, Phase.END_TO_END).value:.1f}",
            "1.00" if name == PLAIN else _interval(result.over(name, PLAIN, Phase.END_TO_END)),
            "" if name == PROFILE else _interval(result.over(PROFILE, name, Phase.END_TO_END)),
        )
    return table


def _draft_table(result: BenchResult) -> Table:
    """Return a line per contender with its prefill, and the acceptance of drafted tokens."""
    table = figures_table(
        "Prefill and acceptance", "contender", *("prefill ms", "over plain's", "acceptance\nlength", "accepted")
    )
    for name, entry in result.entries.items():
        figures = entry.acceptance(result.counted)
        rate = figures.draft_acceptance_rate
        table.add_row(
            name,
            f"{entry.prefill_seconds * 1000:.1f}",
            "1.00" if name == PLAIN else _interval(result.prefill_over_plain(name)),
            f"{figures.mean_acceptance_length:.2f}",
            "" if rate is None else f"{rate:.0%}",
        )
    return table


def _units(result: BenchResult) -> str:
    return "prompts" if result.batch_size == 1 else "batches"


def _cells(result: BenchResult, entry: Entry) -> tuple[str, ...]:
    ties = f"\n+ {entry.num_ties} tie{'s' if entry.num_ties > 1 else ''}" if entry.num_ties else ""
    return (
        f"{result.rate(entry.name).value:.1f}",
        "1.00" if entry.name == PLAIN else _interval(result.over(entry.name, PLAIN)),
        "" if entry.name == PROFILE else _interval(result.over(PROFILE, entry.name)),
        f"{entry.tokens_per_pass:.2f}",
        f"{entry.num_identical}/{len(entry.samples)}{ties}",
    )


def _interval(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.ci95[0]:.2f}, {interval.ci95[1]:.2f}]"


def _legend(result: BenchResult) -> Iterator[tuple[str, str]]:
    for entry in result.entries.values():
        yield entry.name, entry.description
    for name, reason in result.left_out.items():
        yield name, f"left out: {reason}"
    yield from verdict_lines(result)
    yield "prompts", result.facts["split"]
    yield "device", f"{result.facts['provenance']['device']}, {result.facts['dtype']}"
    for remark in result.remarks:
        yield "note", remark


def bench_json(result: BenchResult) -> dict[str, Any]:
    """Return all figures with their intervals, every sample, device and versions as plain data."""
    return {
        **result.facts,
        "batch_size": result.batch_size,
        "remarks": list(result.remarks),
        "prompts": result.num_prompts,
        "counted": list(result.counted),
        "categories": {name: len(batches) for name, batches in categories(result).items()},
        "verdict": verdict(result).model_dump(mode="json"),
        "verdicts": {category: each.model_dump(mode="json") for category, each in verdicts(result)},
        "contenders": {name: _figures(result, entry) for name, entry in result.entries.items()},
        "left_out": result.left_out,
        "samples": {
            name: [sample.model_dump(mode="json") for sample in entry.samples] for name, entry in result.entries.items()
        },
    }


def _figures(result: BenchResult, entry: Entry) -> dict[str, Any]:
    return {
        "description": entry.description,
        "settings": entry.settings,
        "tokens_per_second": result.rate(entry.name).model_dump(mode="json"),
        "over_plain": result.over(entry.name, PLAIN).model_dump(mode="json"),
        "profile_over_it": result.over(PROFILE, entry.name).model_dump(mode="json"),
        "end_to_end": _end_to_end(result, entry.name),
        "categories": {name: each.model_dump(mode="json") for name, each in by_category(result, entry.name).items()},
        "category_mean_over_plain": _dumped(category_mean(result, entry.name, Phase.DECODE)),
        **entry.acceptance(result.counted).model_dump(mode="json"),
        "prefill_seconds": entry.prefill_seconds,
        "tokens_per_pass": entry.tokens_per_pass,
        "identical": entry.num_identical,
        "ties": entry.num_ties,
        "texts": len(entry.samples),
    }


def _end_to_end(result: BenchResult, name: str) -> dict[str, Any]:
    whole = Phase.END_TO_END
    return {
        "tokens_per_second": _dumped(result.rate(name, whole)),
        "over_plain": _dumped(result.over(name, PLAIN, whole)),
        "profile_over_it": _dumped(result.over(PROFILE, name, whole)),
        "category_mean_over_plain": _dumped(category_mean(result, name, whole)),
        "time_to_first_token_seconds": result.time_to_first_token_seconds(name),
        "prefill_over_plain": _dumped(result.prefill_over_plain(name)),
    }


def _dumped(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.model_dump(mode="json")


def bench_picture(result: BenchResult, file: IO[bytes]) -> None:
    """Draw tokens per second of each contender with their intervals."""
    from matplotlib.figure import Figure

    names = list(result.entries)[::-1]  # the first on top
    rates = [result.rate(name) for name in names]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    reach = [[each.value - each.ci95[0] for each in rates], [each.ci95[1] - each.value for each in rates]]
    colours = [COLOURS.get(name, OTHERS_COLOUR) for name in names]
    axes.barh(names, [each.value for each in rates], color=colours, height=0.6)
    axes.errorbar([each.value for each in rates], names, xerr=reach, fmt="none", ecolor="black", capsize=3)
    texts = "" if result.batch_size == 1 else f" of {result.batch_size} sequences in a batch"
    axes.set_xlabel(f"decoded tokens per second{texts}, 95 % intervals over {_units(result)}")
    axes.set_title(
        f"{result.facts['profile']} on {result.facts['provenance']['device']}, {result.facts['dtype']}",
        fontsize="medium",
    )
    figure.savefig(file, dpi=130)
