"""Reports of a bench: the table, and the JSON with all figures. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from decoding.profile import Interval
from studies.measurement import Measurement
from tuner.bench.result import PROFILE, BenchResult, BenchVerdict, category_mean
from tuner.measuring.comparison import Phase
from tuner.measuring.contender import PLAIN
from tuner.tables import facts_grid, figures_table

TABLE_WIDTH = 120
"""Width of the table on disk, in characters."""


def bench_table(result: BenchResult) -> RenderableType:
    """Return a table with a line per contender, the contenders left out, and a legend below."""
    prompts = f"{len(result.compared.counted)} {result.units} of {result.mean_prompt_tokens:.0f} tokens"
    title = f"Decode phase on {prompts} on average (95 % intervals over {_units(result)})"
    if result.engine is not None:
        title = f"{result.engine}. {title}"
    table = figures_table(title, "contender", "tok/s", "over plain", "profile over it", "accepted", "iden-\ntical")
    for name, everything in result.everything.items():
        if name in result.compared.measurements:
            accepted = _accepted(result.compared.measurements[name])
            table.add_row(name, *_speeds(result, name, Phase.DECODE), accepted, _identical(everything))
    for name in result.left_out:
        table.add_row(name, "left out")
    whole = figures_table(
        "End to end, prefill included, on the same prompts",
        "contender",
        *("tok/s", "over plain", "profile over it", "prefill\nms", "over plain's"),
    )
    for name, each in result.compared.measurements.items():
        prefill = f"{result.first_token_seconds(name) * 1000:.1f}"
        over = "1.00" if name == PLAIN else f"{_prefill_over_plain(each) or ''}"
        whole.add_row(name, *_speeds(result, name, Phase.END_TO_END), prefill, over)
    legend = facts_grid()
    for term, meaning in _legend(result):
        legend.add_row(term, meaning)
    categories = _category_table(result)
    return Group(table, whole, *([] if categories is None else [categories]), legend)


def _speeds(result: BenchResult, name: str, phase: Phase) -> tuple[str, str, str]:
    compared = result.compared
    return (
        f"{compared.rate(name, phase).value:.1f}",
        "1.00" if name == PLAIN else f"{compared.over(name, PLAIN, phase)}",
        "" if name == PROFILE else f"{result.profile_over(name, phase) or ''}",
    )


def _identical(measurement: Measurement) -> str:
    ties = measurement.num_ties
    return f"{measurement.num_identical}/{measurement.num_prompts}" + (
        f"\n+ {ties} tie{'s' if ties > 1 else ''}" if ties else ""
    )


def _accepted(measurement: Measurement) -> str:
    """Return the acceptance length, and the rate where the drafts are known."""
    return f"{measurement.mean_acceptance_length:.2f} {_acceptance_rate(measurement)}".strip()


def _acceptance_rate(measurement: Measurement) -> str:
    return f"{measurement.draft_acceptance_rate:.0%}" if measurement.num_draft_tokens else ""


def _prefill_over_plain(measurement: Measurement) -> Interval | None:
    whole = measurement.end_to_end
    return None if whole is None else whole.prefill_over_plain()


def _category_table(result: BenchResult) -> Table | None:
    """Return a row per category and contender with the speed-ups over plain decoding; None without two categories."""
    if len(result.compared.measurements[PLAIN].by_category()) < 2:
        return None
    headings = ("prompts", "decoding", "end to end", "accepted")
    table = figures_table("Over plain decoding, by category", ("contender", "category"), *headings)
    for name in result.compared.measurements:
        if name != PLAIN:
            _add_categories(table, result, name)
    return table


def _add_categories(table: Table, result: BenchResult, name: str) -> None:
    for category, compared in result.compared.by_category().items():
        each = compared.measurements[name]
        table.add_row(
            name,
            category,
            str(len(each.samples)),
            *(f"{compared.over(name, PLAIN, phase)}" for phase in Phase),
            _accepted(each),
        )
    means = [category_mean(result.compared, name, phase) for phase in Phase]
    if any(means):
        table.add_row(name, "geometric mean", "", *(f"{mean}" if mean else "" for mean in means), "")


def _units(result: BenchResult) -> str:
    return "prompts" if result.batch_size == 1 else "batches"


def _legend(result: BenchResult) -> Iterator[tuple[str, str]]:
    for name in result.compared.measurements:
        yield name, result.contenders[name].description
    for name, reason in result.left_out.items():
        yield name, f"left out: {reason}"
    if result.engine is not None:
        yield (
            "over plain",
            f"over plain decoding of the same prompts by {result.engine}, in turns; seconds by its own clock",
        )
    yield (
        "accepted",
        "tokens of a verification by the target's agreement, and the share of drafted tokens that are accepted",
    )
    yield "verdict", BenchVerdict.of(result.compared).sentence
    if len(result.compared.measurements[PLAIN].by_category()) > 1:
        for category, compared in result.compared.by_category().items():
            yield category, BenchVerdict.of(compared).sentence
    yield "prompts", result.facts["split"]
    yield "device", f"{result.facts['provenance']['device']}, {result.facts['dtype']}"
    for remark in result.remarks:
        yield "note", remark


def bench_json(result: BenchResult) -> dict[str, Any]:
    """Return all figures with their intervals, every sample, device and versions as plain data."""
    compared = result.compared
    categories = compared.measurements[PLAIN].by_category()
    return {
        **result.facts,
        "batch_size": result.batch_size,
        "remarks": list(result.remarks),
        "prompts": len(result.prompt_lengths),
        "counted": list(compared.counted),
        "categories": {name: len(each.samples) for name, each in categories.items()},
        "verdict": BenchVerdict.of(compared).model_dump(mode="json"),
        "verdicts": {
            name: BenchVerdict.of(each).model_dump(mode="json") for name, each in compared.by_category().items()
        },
        "contenders": {name: _figures(result, name) for name in compared.measurements},
        "left_out": result.left_out,
        "samples": {
            name: [sample.model_dump(mode="json") for sample in each.samples]
            for name, each in result.everything.items()
        },
    }


def _figures(result: BenchResult, name: str) -> dict[str, Any]:
    compared, everything, contender = result.compared, result.everything[name], result.contenders[name]
    measurement = compared.measurements[name]
    decode, whole = (_phase_figures(result, name, phase) for phase in Phase)
    return {
        "description": contender.description,
        "settings": dict(contender.settings),
        **decode,
        "end_to_end": {
            **whole,
            "time_to_first_token_seconds": result.first_token_seconds(name),
            "prefill_over_plain": _dumped(_prefill_over_plain(measurement)),
        },
        "categories": {
            category: {
                "prompts": len(each.measurements[name].samples),
                "over_plain": _dumped(each.over(name)),
                "end_to_end_over_plain": _dumped(each.over(name, PLAIN, Phase.END_TO_END)),
                **_acceptance(each.measurements[name]),
            }
            for category, each in compared.by_category().items()
        },
        **_acceptance(measurement),
        "num_spec_steps": measurement.num_spec_steps,
        "num_accepted_draft_tokens": measurement.num_accepted_draft_tokens,
        "acceptance_histogram": measurement.acceptance_histogram,
        "tokens_per_pass": everything.tokens_per_round,
        "identical": everything.num_identical,
        "ties": everything.num_ties,
        "texts": everything.num_prompts,
    }


def _acceptance(measurement: Measurement) -> dict[str, float | None]:
    """Return acceptance by AIPerf's names; what code of others drafts is not known."""
    known = measurement.num_draft_tokens if all(s.drafted is not None for s in measurement.samples) else None
    return {
        "mean_acceptance_length": measurement.mean_acceptance_length,
        "draft_acceptance_rate": measurement.draft_acceptance_rate if known else None,
        "num_draft_tokens": known,
    }


def _phase_figures(result: BenchResult, name: str, phase: Phase) -> dict[str, Any]:
    compared = result.compared
    return {
        "tokens_per_second": _dumped(compared.rate(name, phase)),
        "over_plain": _dumped(compared.over(name, PLAIN, phase)),
        "profile_over_it": _dumped(result.profile_over(name, phase)),
        "category_mean_over_plain": _dumped(category_mean(compared, name, phase)),
    }


def _dumped(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.model_dump(mode="json")
