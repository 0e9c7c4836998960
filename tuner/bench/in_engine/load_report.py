"""The report of a bench by number of sequences: table and JSON. Measures nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from tuner.export.engines.registry import load_engine
from tuner.export.schedule import KEY
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from tuner.bench.in_engine.loads import LoadFigures
    from tuner.bench.in_engine.result import DraftAtLoads, LoadsResult

HEADINGS = ("groups", "plain\ntok/s", "tok/s", "over plain", "accepted/drafted", "identical")


def loads_table(result: LoadsResult, engine: str) -> RenderableType:
    """Return a line per number of sequences and draft length, and a legend below; `engine` is the name of the export."""
    title = f"{result.title} ({result.version}): requests side by side (95 % intervals over groups of prompts)"
    table = figures_table(title, ("side by side", "draft"), *HEADINGS)
    for load in result.schedule.loads:
        for index, draft in enumerate(result.drafts):
            number = str(load.sequences) if index == 0 else ""
            table.add_row(number, draft.name, *_cells(draft.at(load.sequences)))
    legend = facts_grid()
    for term, meaning in _legend(result, engine):
        legend.add_row(term, meaning)
    return Group(table, legend)


def loads_json(result: LoadsResult) -> dict[str, Any]:
    """Return all figures with their intervals and samples as plain data."""
    return {
        **result.facts,
        "drafts": {each.name: _draft(each) for each in result.drafts},
        "failed": result.failed,
        "remarks": list(result.remarks),
        KEY: result.schedule.model_dump(mode="json"),
        "samples": {
            each.name: {
                str(load.sequences): [sample.model_dump(mode="json") for sample in load.measurement.samples]
                for load in each.loads
            }
            for each in result.drafts
        },
    }


def _draft(draft: DraftAtLoads) -> dict[str, Any]:
    return {
        "draft_tokens": draft.num_tokens,
        "flags": shlex.join(draft.flags),
        "seconds": draft.seconds,
        "loads": [_figures(each) for each in draft.loads],
    }


def _figures(load: LoadFigures) -> dict[str, Any]:
    measurement = load.measurement
    return {
        "sequences": load.sequences,
        "groups": len(measurement.samples),
        "speedup": measurement.speedup_interval().model_dump(mode="json"),
        "plain_tokens_per_second": measurement.plain_tokens_per_second,
        "draft_tokens_per_second": measurement.draft_tokens_per_second,
        "num_draft_tokens": measurement.num_draft_tokens,
        "num_accepted_draft_tokens": measurement.num_accepted_draft_tokens,
        "texts": measurement.num_prompts,
        "identical": measurement.num_identical,
        "ties": measurement.num_ties,
        "plain_different": load.num_plain_different,
    }


def _cells(load: LoadFigures) -> tuple[str, ...]:
    measurement = load.measurement
    ties = f"\n+ {measurement.num_ties} ties" if measurement.num_ties else ""
    return (
        f"{len(measurement.samples)}",
        f"{measurement.plain_tokens_per_second:.1f}",
        f"{measurement.draft_tokens_per_second:.1f}",
        f"{measurement.speedup_interval()}",
        f"{measurement.num_accepted_draft_tokens}/{measurement.num_draft_tokens}",
        f"{measurement.num_identical}/{measurement.num_prompts}{ties}",
    )


def _legend(result: LoadsResult, engine: str) -> Iterator[tuple[str, str]]:
    yield (
        "over plain",
        f"tokens of all requests over the wall clock of a round, prompts included, relative to {result.title}'s own plain "
        "decoding of the same prompts side by side, in turns",
    )
    schedule = result.schedule
    yield KEY, f"{json.dumps(schedule.entries)}: {schedule.describe()}"
    yield "rule", "the fastest length whose interval lies above 1, else 0; between measured numbers the smaller of both"
    yield "use", _use(result, engine)
    for load in schedule.loads:
        if load.scheduled is not None and load.scheduled.ci95[1] < 1:
            yield (
                "slower",
                f"{load.sequences} side by side, a server with the whole schedule is slower than one without a draft, "
                f"{load.scheduled}: where that is the usual number, serve without it",
            )
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


def _use(result: LoadsResult, engine: str) -> str:
    """Return what to do with the schedule in this engine."""
    if not result.schedule.most_tokens:
        return f"decode plainly in {result.title}: no draft is proved to be faster at any measured number of sequences"
    if load_engine(engine).has_schedule:
        return f"sdtune export PROFILE --to {engine} --schedule engine.json writes it into the engine's settings"
    return (
        f"{result.title} has no schedule by number of sequences: export with --draft-tokens for the number that a server is to "
        "have, and serve without the draft where the schedule says 0"
    )
