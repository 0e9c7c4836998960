"""The report of a bench in an engine: table and JSON. Measures nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from tuner.bench.in_engine.result import EngineDraft, EngineFigures, EngineResult
from tuner.export.engines.registry import load_engine
from tuner.export.schedule import KEY
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from tuner.export.schedule import MeasuredSchedule

LONGEST_NAME = 24
"""Characters of a draft's name beside which the figures fit into the table."""
HEADINGS = ("plain\ntok/s", "tok/s", "over plain")
COUNTS = ("accepted/\ndrafted", "iden-\ntical")


def engine_table(result: EngineResult, engine: str) -> RenderableType:
    """Return a line per draft, or per number of sequences and draft, and a legend below; `engine` is the name of the export."""
    table, legend = (_table_by_load if result.schedule is not None else _table_by_draft)(result), facts_grid()
    names = [each.name for each in result.drafts] + list(result.failed)
    for name, shown in _short(names).items():
        if shown != name:
            legend.add_row(shown, name)
    for term, meaning in _legend(result, engine):
        legend.add_row(term, meaning)
    return Group(table, legend)


def _table_by_load(result: EngineResult) -> Table:
    """Return a line per number of sequences and draft length."""
    assert result.schedule is not None, "the caller has looked"
    title = f"{result.title} ({result.version}): requests side by side (95 % intervals over groups of prompts)"
    table = figures_table(title, ("side by side", "draft"), "groups", *HEADINGS, *COUNTS)
    for load in result.schedule.loads:
        for index, draft in enumerate(result.drafts):
            figures, number = draft.at(load.sequences), str(load.sequences) if index == 0 else ""
            groups = str(len(figures.measurement.samples))
            table.add_row(number, draft.name, groups, *_speeds(figures), *_counts(figures))
    return table


def _table_by_draft(result: EngineResult) -> Table:
    """Return a line per draft, the profile's first and the others by speed."""
    own, *others = result.drafts
    num_texts = own.loads[0].texts.num_prompts
    title = f"{result.title} ({result.version}): {num_texts} prompts (95 % intervals over prompts)"
    table = figures_table(title, "draft", *HEADINGS, "end to end", "per\nround", *COUNTS)
    shown = _short([each.name for each in result.drafts] + list(result.failed))
    by_speed = sorted(others, key=lambda each: each.loads[0].measurement.speedup, reverse=True)
    for draft in (own, *by_speed):
        figures = draft.loads[0]
        whole = figures.measurement.end_to_end
        per_round = f"{figures.measurement.mean_acceptance_length:.2f}"
        ends = "" if whole is None else f"{whole.speedup_interval()}"
        table.add_row(shown[draft.name], *_speeds(figures), ends, per_round, *_counts(figures))
    for name in result.failed:
        table.add_row(shown[name], "failed")
    return table


def _speeds(figures: EngineFigures) -> tuple[str, ...]:
    measurement = figures.measurement
    return (
        f"{measurement.plain_tokens_per_second:.1f}",
        f"{measurement.draft_tokens_per_second:.1f}",
        f"{measurement.speedup_interval()}",
    )


def _counts(figures: EngineFigures) -> tuple[str, str]:
    measurement, texts = figures.measurement, figures.texts
    ties = f"\n+ {texts.num_ties} ties" if texts.num_ties else ""
    return (
        f"{measurement.num_accepted_draft_tokens}/\n{measurement.num_draft_tokens}",
        f"{texts.num_identical}/{texts.num_prompts}{ties}",
    )


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return what the table calls each draft: flags are long, and are numbered."""
    return {name: name if len(name) <= LONGEST_NAME else f"flags {number}" for number, name in enumerate(names)}


def engine_json(result: EngineResult) -> dict[str, Any]:
    """Return all figures with their intervals and samples as plain data."""
    predicted, schedule = result.predicted, result.schedule
    return {
        **result.facts,
        "predicted": predicted and {"speedup": predicted.value, "explanation": predicted.explanation},
        "drafts": {each.name: _draft(each) for each in result.drafts},
        "failed": result.failed,
        "remarks": list(result.remarks),
        **({} if schedule is None else {KEY: schedule.model_dump(mode="json")}),
        "samples": {
            each.name: {
                str(load.sequences): [sample.model_dump(mode="json") for sample in load.texts.samples]
                for load in each.loads
            }
            for each in result.drafts
        },
    }


def _draft(draft: EngineDraft) -> dict[str, Any]:
    return {
        "draft_tokens": draft.num_tokens,
        "flags": shlex.join(draft.flags),
        "seconds": draft.seconds,
        "loads": [_figures(each) for each in draft.loads],
    }


def _figures(load: EngineFigures) -> dict[str, Any]:
    measurement, texts = load.measurement, load.texts
    whole = measurement.end_to_end
    return {
        "sequences": load.sequences,
        "samples": len(measurement.samples),
        "speedup": measurement.speedup_interval().model_dump(mode="json"),
        "end_to_end_speedup": whole and whole.speedup_interval().model_dump(mode="json"),
        "plain_tokens_per_second": measurement.plain_tokens_per_second,
        "draft_tokens_per_second": measurement.draft_tokens_per_second,
        "rounds": measurement.num_spec_steps,
        "num_draft_tokens": measurement.num_draft_tokens,
        "num_accepted_draft_tokens": measurement.num_accepted_draft_tokens,
        "mean_acceptance_length": measurement.mean_acceptance_length,
        "texts": texts.num_prompts,
        "identical": texts.num_identical,
        "ties": texts.num_ties,
        "plain_different": load.num_plain_different,
    }


def _legend(result: EngineResult, engine: str) -> Iterator[tuple[str, str]]:
    if result.schedule is None:
        yield from _legend_by_draft(result)
    else:
        yield from _legend_by_load(result, result.schedule, engine)
    if result.num_different:
        yield "different", f"{result.num_different} texts differ from {result.title}'s own plain decoding"
    if most := max(load.num_plain_different for each in result.drafts for load in each.loads):
        yield (
            "plain",
            f"side by side, up to {most} texts of {result.title}'s plain decoding differ from those of the prompts alone",
        )
    for remark in result.remarks:
        yield "remark", remark
    for name, reason in result.failed.items():
        yield "failed", f"{name}: {reason}"


def _legend_by_draft(result: EngineResult) -> Iterator[tuple[str, str]]:
    yield (
        "over plain",
        f"decode phase by {result.title}'s own clock, over its own plain decoding of the same prompts, in turns",
    )
    yield "per round", "tokens that a round with a draft adds on average: accepted ones, and one of the target"
    if (predicted := result.predicted) is not None:
        value = "none" if predicted.value is None else f"{predicted.value:.2f}"
        yield "predicted", f"{value}: {predicted.explanation}"
    yield "verdict", _verdict(result)


def _legend_by_load(result: EngineResult, schedule: MeasuredSchedule, engine: str) -> Iterator[tuple[str, str]]:
    yield (
        "over plain",
        f"tokens of all requests over the wall clock of a round, prompts included, relative to {result.title}'s own plain "
        "decoding of the same prompts side by side, in turns",
    )
    yield KEY, f"{json.dumps(schedule.entries)}: {schedule.describe()}"
    yield "rule", "the fastest length whose interval lies above 1, else 0; between measured numbers the smaller of both"
    yield "use", _use(result, schedule, engine)
    for load in schedule.loads:
        if load.scheduled is not None and load.scheduled.ci95[1] < 1:
            yield (
                "slower",
                f"{load.sequences} side by side, a server with the whole schedule is slower than one without a draft, "
                f"{load.scheduled}: where that is the usual number, serve without it",
            )


def _use(result: EngineResult, schedule: MeasuredSchedule, engine: str) -> str:
    """Return what to do with the schedule in this engine."""
    if not schedule.most_tokens:
        return f"decode plainly in {result.title}: no draft is proved to be faster at any measured number of sequences"
    if load_engine(engine).has_schedule:
        return f"sdtune export PROFILE --to {engine} --schedule engine.json writes it into the engine's settings"
    return (
        f"{result.title} has no schedule by number of sequences: export with --draft-tokens for the number that a server is to "
        "have, and serve without the draft where the schedule says 0"
    )


def _verdict(result: EngineResult) -> str:
    """Return what the intervals say of the profile's draft, and the fastest other draft that beats plain decoding."""
    profile, *others = [(each.name, each.loads[0].measurement.speedup_interval()) for each in result.drafts]
    low, high = profile[1].ci95
    if low > 1:
        text = f"the profile's draft is faster than plain decoding in {result.title}"
    elif high < 1:
        text = f"decode plainly in {result.title} rather than with the profile's draft, which is slower there"
    else:
        text = f"no gain is proved in {result.title}: the interval of the profile's draft reaches 1"
    faster = [(interval.value, name) for name, interval in others if interval.ci95[0] > 1]
    return f"{text}; the fastest other draft: {max(faster)[1]}" if faster else text
