"""The result of a bench: every contender's measurement, what beats plain decoding, the table and the JSON. Measures nothing.

In this process all contenders take turns. In an engine each draft takes turns with plain decoding alone: its server needs memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.measurement import Measurement, geometric_means
from tuner.measuring.comparison import Compared, Phase
from tuner.measuring.contender import PLAIN, PROFILE, Contender
from tuner.review.tables import accepted, category_table, identical
from tuner.tables import facts_grid, figures_table

PERCENTILES = (50, 90, 99)
TABLE_WIDTH = 120
"""Width of the table on disk, in characters."""


@dataclass(frozen=True)
class BenchResult:
    """All contenders on the same prompts."""

    contenders: Mapping[str, Contender]
    everything: Mapping[str, Measurement]
    """All samples of each contender; with repeats, their sums."""
    compared: Compared
    """The samples that all contenders decoded at some length, to which rates and ratios refer."""
    left_out: dict[str, str]
    """Contenders that could not be measured, with the reasons."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt."""
    facts: dict[str, Any]
    """Task, device and versions as plain data."""
    remarks: tuple[str, ...] = ()
    batch_size: int = 1
    repeats: int = 1
    engine: str | None = None
    """The engine and its version; None for a bench in this process."""

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean length of the prompts that count."""
        size = self.batch_size
        counted = [n for index in self.compared.counted for n in self.prompt_lengths[index * size : (index + 1) * size]]
        return sum(counted) / len(counted)

    @property
    def units(self) -> str:
        """The unit of rates and intervals in words."""
        return units_of(self.batch_size)

    def profile_over(self, name: str, phase: Phase) -> Interval | None:
        """Return the profile's speed-up over a contender; None where the two did not take turns."""
        apart = self.engine is not None and name not in (PROFILE, PLAIN)
        return None if apart else self.compared.over(PROFILE, name, phase)

    @property
    def num_different(self) -> int:
        """Number of sequences that differ from plain decoding's, ties apart."""
        return sum(each.num_different for each in self.everything.values())

    def first_token_seconds(self, name: str) -> float:
        """Return the mean prefill seconds of a batch."""
        whole = self.compared.measurements[name].end_to_end
        assert whole is not None, "a bench times the prefill of every sample"
        return whole.time_to_first_token_seconds / self.repeats

    def latencies(self, name: str) -> dict[str, dict[str, float]]:
        """Return percentiles over the samples, in milliseconds: time to first token, and time per output token after it."""
        samples = self.compared.measurements[name].samples
        first = [each.prefill.draft_seconds / self.repeats for each in samples if each.prefill is not None]
        per_token = [each.draft_seconds * each.texts.count / each.draft_tokens for each in samples]
        return {
            key: {f"p{q}": float(np.percentile(seconds, q)) * 1000 for q in PERCENTILES}
            for key, seconds in (("ttft_ms", first), ("tpot_ms", per_token))
        }


def units_of(batch_size: int) -> str:
    """Return the unit of rates and intervals in words."""
    return "prompts" if batch_size == 1 else f"batches of {batch_size} prompts"


class BenchVerdict(Document):
    """What beats plain decoding: contenders whose 95 % interval over it lies above 1, the fastest first."""

    decode: tuple[str, ...]
    end_to_end: tuple[str, ...]
    contradicted: tuple[str, ...]
    """Contenders that decode faster than plain decoding, but are slower end to end, both with 95 % confidence."""

    @classmethod
    def of(cls, compared: Compared) -> BenchVerdict:
        """Return what beats plain decoding on these samples."""
        others = [name for name in compared.measurements if name != PLAIN]
        decode, whole = ({name: compared.over(name, PLAIN, phase) for name in others} for phase in Phase)
        return cls(
            decode=_above_1(decode),
            end_to_end=_above_1(whole),
            contradicted=tuple(name for name in _above_1(decode) if whole[name].ci95[1] < 1.0),
        )

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if not self.decode and not self.end_to_end:
            return "nothing beats plain decoding with 95 % confidence"
        decode = ", ".join(self.decode) or "nothing"
        both = self.decode == self.end_to_end
        said = decode if both else f"{decode} in decoding, {', '.join(self.end_to_end) or 'nothing'} end to end"
        against = (
            f"; {', '.join(self.contradicted)} decodes faster but is slower end to end" if self.contradicted else ""
        )
        return f"faster than plain decoding with 95 % confidence: {said}{against}"


def _above_1(speedups: Mapping[str, Interval]) -> tuple[str, ...]:
    faster = [name for name, speedup in speedups.items() if speedup.ci95[0] > 1.0]
    return tuple(sorted(faster, key=lambda name: -speedups[name].value))


def bench_table(result: BenchResult) -> RenderableType:
    """Return a table with a line per contender, the contenders left out, and a legend below."""
    prompts = f"{len(result.compared.counted)} {result.units} of {result.mean_prompt_tokens:.0f} tokens"
    title = f"Decode phase on {prompts} on average (95 % intervals over {'prompts' if result.batch_size == 1 else 'batches'})"
    if result.engine is not None:
        title = f"{result.engine}. {title}"
    table = figures_table(title, "contender", "tok/s", "over plain", "profile over it", "accepted", "iden-\ntical")
    for name, everything in result.everything.items():
        if name in result.compared.measurements:
            equal = identical(everything.num_identical, everything.num_prompts, everything.num_ties, "\n")
            of_contender = accepted(result.compared.measurements[name])
            table.add_row(name, *_speeds(result, name, Phase.DECODE), of_contender, equal)
    for name in result.left_out:
        table.add_row(name, "left out")
    whole = figures_table(
        "End to end, prefill included, on the same prompts",
        "contender",
        *("tok/s", "over plain", "profile over it", "prefill over\nplain's"),
    )
    latency = figures_table(
        "Latency in ms over the prompts: time to first token (TTFT), time per output token (TPOT)",
        "contender",
        *(f"{what}\np{q}" for what in ("TTFT", "TPOT") for q in PERCENTILES),
    )
    for name, each in result.compared.measurements.items():
        over = "1.00" if name == PLAIN else f"{_prefill_over_plain(each) or ''}"
        whole.add_row(name, *_speeds(result, name, Phase.END_TO_END), over)
        latency.add_row(name, *(f"{ms:.1f}" for found in result.latencies(name).values() for ms in found.values()))
    legend = facts_grid()
    for term, meaning in _legend(result):
        legend.add_row(term, meaning)
    parts = [table, whole, latency]
    if len(result.compared.measurements[PLAIN].by_category()) > 1:
        others = {name: each for name, each in result.compared.measurements.items() if name != PLAIN}
        parts.append(category_table("Over plain decoding, by category", "contender", others))
    return Group(*parts, legend)


def _speeds(result: BenchResult, name: str, phase: Phase) -> tuple[str, str, str]:
    compared = result.compared
    return (
        f"{compared.rate(name, phase).value:.1f}",
        "1.00" if name == PLAIN else f"{compared.over(name, PLAIN, phase)}",
        "" if name == PROFILE else f"{result.profile_over(name, phase) or ''}",
    )


def _prefill_over_plain(measurement: Measurement) -> Interval | None:
    whole = measurement.end_to_end
    return None if whole is None else whole.prefill_over_plain()


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
    means = geometric_means(measurement.by_category()) or (None, None)
    decode, whole = (_phase_figures(result, name, phase, mean) for phase, mean in zip(Phase, means, strict=True))
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
        "latency": result.latencies(name),
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


def _phase_figures(result: BenchResult, name: str, phase: Phase, mean: Interval | None) -> dict[str, Any]:
    compared = result.compared
    return {
        "tokens_per_second": _dumped(compared.rate(name, phase)),
        "over_plain": _dumped(compared.over(name, PLAIN, phase)),
        "profile_over_it": _dumped(result.profile_over(name, phase)),
        "category_mean_over_plain": _dumped(mean),
    }


def _dumped(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.model_dump(mode="json")
