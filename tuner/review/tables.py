"""Tables of a finished search: on the terminal, for pages of text, and as CSV. Measures nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from studies.contract import TrialRecord
from studies.measurement import Measurement, geometric_means
from tuner.measuring.contender import PROFILE
from tuner.review.document import MeasuredCandidate, SearchResult, StockComparison, StockContender
from tuner.tables import facts_grid, figures_table, spaced

PLAIN_LABEL, PLAIN_DESCRIPTION = "plain decoding", "the whole model, token by token"
NOTHING = "nothing beats plain decoding with 95 % confidence"
FEWEST_SAMPLES = 2
"""Samples without which there is no interval."""
SAMPLE_COLUMNS = (
    *("trial", "prompt", "category", "speedup", "plain_seconds", "plain_tokens", "draft_seconds", "draft_tokens"),
    *("rounds", "drafted", "accepted", "identical", "tie"),
)


def results_table(result: SearchResult) -> RenderableType:
    """Return the final table for a terminal: the candidates on held-out prompts, stock generation, and a legend."""
    measured = {each.study: each.measurement for each in result.rivals}
    parts: list[RenderableType] = [_decode_table(measured)]
    if all(each.end_to_end is not None for each in measured.values()):
        parts.append(_end_to_end_table(measured))
    if categories := _categories(result.confirmed):
        parts.append(category_table("By category of prompts", "setting", measured))
    legend = facts_grid()
    legend.add_row(PLAIN_LABEL, PLAIN_DESCRIPTION)
    for each in result.rivals:
        legend.add_row(each.study, spaced(description(each, result.winner)))
    if result.comparison is not None:
        parts.append(_stock_table(result.comparison))
        for name, contender in result.comparison.contenders.items():
            legend.add_row(name, _stock_description(contender, "the winner" if name == PROFILE else None))
        for name, reason in result.comparison.left_out.items():
            legend.add_row(name, f"left out: {reason}")
    for term, meaning in _verdicts(measured, categories):
        legend.add_row(term, meaning)
    return Group(*parts, legend)


def description(each: MeasuredCandidate, winner: MeasuredCandidate) -> str:
    """Return a candidate in words: draft, rule, the method that proposed it, and the winner's figure on its prompts if fewer."""
    origin = f"; from {each.origin}" if each.origin != each.study else ""
    prompts = {sample.prompt for sample in each.measurement.samples}
    common = Measurement(samples=tuple(sample for sample in winner.measurement.samples if sample.prompt in prompts))
    fewer = ""
    if len(common.samples) < len(winner.measurement.samples):
        fewer = f"; on {common.num_prompts} prompts, where the winner has {common.speedup_interval()}"
    return f"{each.candidate.describe()}{origin}{fewer}"


def _decode_table(measured: Mapping[str, Measurement]) -> Table:
    batch_size = max((each.batch_size for each in measured.values()), default=1)
    in_batches = f" in batches of {batch_size}" if batch_size > 1 else ""
    table = figures_table(
        f"Held-out prompts{in_batches}: speed-up of decoding over plain, with its 95 % interval",
        "setting",
        *("speed-up", "tok/s", "plain\ntok/s", "accept\nrate", "per\nround", "identical"),
    )
    table.add_row(PLAIN_LABEL, "1.00", "", "", "", "", "")
    for label, each in measured.items():
        table.add_row(
            label,
            f"{each.speedup_interval():.2f}",
            f"{each.draft_tokens_per_second:.1f}",
            f"{each.plain_tokens_per_second:.1f}",
            f"{each.draft_acceptance_rate:.0%}",
            f"{each.mean_acceptance_length:.2f}",
            identical(each.num_identical, each.num_prompts, each.num_ties, "\n"),
        )
    return table


def _end_to_end_table(measured: Mapping[str, Measurement]) -> Table:
    table = figures_table(
        "End to end, prefill (time to first token, TTFT) included",
        "setting",
        *("speed-up", "tok/s", "plain\ntok/s", "TTFT\nms", "over plain's"),
    )
    table.add_row(PLAIN_LABEL, "1.00", "", "", "", "1.00")
    for label, each in measured.items():
        figures = each.end_to_end
        assert figures is not None, "the caller has looked"
        prefill = figures.prefill_over_plain()
        table.add_row(
            label,
            f"{figures.speedup_interval():.2f}",
            f"{figures.draft.tokens_per_second:.1f}",
            f"{figures.plain.tokens_per_second:.1f}",
            f"{figures.time_to_first_token_seconds * 1000:.1f}",
            "" if prefill is None else f"{prefill:.2f}",
        )
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
        over_it = "" if name == PROFILE else f"{each.profile_over_it}"
        table.add_row(name, f"{each.over_plain}", f"{each.end_to_end_over_plain}", over_it)
    return table


def _stock_description(each: StockContender, description: str | None) -> str:
    ties = f", {each.ties} at ties" if each.ties else ""
    return f"{description or each.description}; {each.identical} of {each.texts} texts identical{ties}"


def _categories(measured: Measurement) -> list[str]:
    """Return the categories with enough samples for an interval; none if there is only one category."""
    found = measured.by_category()
    return [name for name, each in found.items() if len(each.samples) >= FEWEST_SAMPLES] if len(found) > 1 else []


def category_table(title: str, names: str, measured: Mapping[str, Measurement]) -> Table:
    """Return for each name a row per category with an interval, and their geometric mean if each has one."""
    table = figures_table(title, f"{names}, category", "count", "decoding", "end to end", "accepted")
    for label, each in measured.items():
        table.add_row(label, "", "", "", "")
        of_categories = each.by_category()
        for name, own in of_categories.items():
            if len(own.samples) >= FEWEST_SAMPLES:
                whole = "" if own.end_to_end is None else f"{own.end_to_end.speedup_interval():.2f}"
                table.add_row(f"  {name}", str(own.num_prompts), f"{own.speedup_interval():.2f}", whole, accepted(own))
        if (means := geometric_means(of_categories)) is not None:
            table.add_row("  geometric mean", "", *("" if mean is None else f"{mean:.2f}" for mean in means), "")
    return table


def accepted(measurement: Measurement) -> str:
    """Return the acceptance length, and the rate where the drafts are known."""
    rate = f" {measurement.draft_acceptance_rate:.0%}" if measurement.num_draft_tokens else ""
    return f"{measurement.mean_acceptance_length:.2f}{rate}"


def _verdicts(measured: Mapping[str, Measurement], categories: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the tables say about plain decoding: overall, and where nothing beats it."""
    beaten_overall = any(map(beats_plain, measured.values()))
    if not beaten_overall:
        yield "note", NOTHING
    beaten = [name for name in categories if any(beats_plain(each.by_category()[name]) for each in measured.values())]
    if beaten or beaten_overall:
        yield from ((name, NOTHING) for name in categories if name not in beaten)


def beats_plain(measured: Measurement) -> bool:
    """Return True for a lossless setting whose speed-up of decoding has its 95 % interval above 1.

    End to end the interval must not lie below 1.
    """
    faster = measured.speedup_interval().ci95[0] > 1.0 and not measured.is_slower_end_to_end
    return faster and measured.is_lossless


@dataclass(frozen=True)
class FinalRow:
    """A line of the final table, for pages of text."""

    name: str
    description: str
    cells: tuple[str, ...]
    """Speed-up of decoding, end to end, tokens per second, plain decoding's on the same prompts, acceptance, identical outputs."""
    won: bool = False
    is_stock: bool = False


def final_rows(result: SearchResult) -> Iterator[FinalRow]:
    """Yield the candidates on held-out prompts, then stock generation."""
    for rival in result.rivals:
        measured = rival.measurement
        cells = (
            f"{measured.speedup_interval()}",
            "" if measured.end_to_end is None else f"{measured.end_to_end.speedup_interval()}",
            f"{measured.draft_tokens_per_second:.1f}",
            f"{measured.plain_tokens_per_second:.1f}",
            f"{measured.draft_acceptance_rate:.0%}",
            identical(measured.num_identical, measured.num_prompts, measured.num_ties),
        )
        yield FinalRow(rival.trial, description(rival, result.winner), cells, won=rival is result.winner)
    if result.comparison is None:
        return
    plain = f"{result.comparison.plain_tokens_per_second.value:.1f}"
    for name, each in result.comparison.contenders.items():
        rate, equal = f"{each.tokens_per_second.value:.1f}", identical(each.identical, each.texts, each.ties)
        cells = f"{each.over_plain}", f"{each.end_to_end_over_plain}", rate, plain, "", equal
        yield FinalRow(name, each.description, cells, is_stock=True)


def identical(number: int, count: int, ties: int, separator: str = " ") -> str:
    """Return how many of the sequences are identical to plain decoding's, and how many differ at ties."""
    return f"{number}/{count}" + (f"{separator}+ {ties} tie{'s' if ties > 1 else ''}" if ties else "")


def samples_csv(measured: Iterable[MeasuredCandidate]) -> str:
    """Return a line for each candidate and each of its samples."""
    return _csv(
        SAMPLE_COLUMNS,
        (
            {"trial": each.trial, **sample.model_dump(), "speedup": round(sample.ratio, 4)}
            for each in measured
            for sample in each.measurement.samples
        ),
    )


def trials_csv(records: Sequence[TrialRecord]) -> str:
    """Return one line per trial, with the columns that MLflow shows."""
    rows = [
        {**trial_params(r), "state": r.state.value, "repeat_of": r.repeat_of, **trial_metrics(r), "reason": r.reason}
        for r in records
    ]
    return _csv(list(dict.fromkeys(key for row in rows for key in row)), rows)


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def trial_params(record: TrialRecord) -> dict[str, Any]:
    """Return the candidate of a trial and its notes, as flat columns."""
    draft, rule = record.candidate.draft, record.candidate.draft_length
    params: dict[str, Any] = {"study": record.study, "trial": record.number, "kind": draft.kind, "rule": rule.rule}
    params |= draft.columns()
    params |= {f"rule.{key}": value for key, value in rule.model_dump(exclude={"rule"}).items()}
    # Costs and priors of an adaptive rule are in the artefact `candidate.yaml`.
    params = {key: value for key, value in params.items() if isinstance(value, str | int | float | bool)}
    scalars = {key: value for key, value in record.notes.items() if isinstance(value, str | int | float | bool)}
    return {**params, **{f"note.{key}": value for key, value in scalars.items()}}


def trial_metrics(record: TrialRecord) -> dict[str, float]:
    """Return the measured figures of a trial; only its seconds if nothing was measured.

    Its speed-ups are named for the tuning prompts: a ranking of runs by `speedup` has each search once, by its held-out prompts.
    """
    measured = {} if record.measurement is None else measured_metrics(record.measurement)
    named = {f"tuning_{name}" if "speedup" in name else name: value for name, value in measured.items()}
    return {"seconds": record.seconds, **named}


def measured_metrics(measured: Measurement) -> dict[str, float]:
    """Return the figures of a measurement: of a trial, or of the winner on held-out prompts."""
    metrics = {
        "speedup": measured.speedup,
        "tokens_per_second": measured.draft_tokens_per_second,
        "plain_tokens_per_second": measured.plain_tokens_per_second,
        "draft_acceptance_rate": measured.draft_acceptance_rate,
        "mean_acceptance_length": measured.mean_acceptance_length,
        "tokens_per_round": measured.tokens_per_round,
        "drafted_per_round": measured.drafted_per_round,
        "prompts": measured.num_prompts,
        "identical_prompts": measured.num_identical,
        "ties": measured.num_ties,
        "exact": float(measured.is_lossless),
    }
    if len(measured.samples) > 1:
        metrics["speedup_low"], metrics["speedup_high"] = measured.speedup_interval().ci95
    if (whole := measured.end_to_end) is not None:
        interval = whole.speedup_interval()
        metrics |= {
            "end_to_end_speedup": interval.value,
            "end_to_end_speedup_low": interval.ci95[0],
            "end_to_end_speedup_high": interval.ci95[1],
            "end_to_end_tokens_per_second": whole.draft.tokens_per_second,
            "plain_end_to_end_tokens_per_second": whole.plain.tokens_per_second,
            "time_to_first_token_seconds": whole.time_to_first_token_seconds,
            "plain_time_to_first_token_seconds": whole.plain_time_to_first_token_seconds,
        }
    return metrics
