"""Draft lengths of an export at several numbers of requests side by side, and the schedule of lengths that follows.

A server that decodes plainly runs all the time; one with each draft length runs in turn beside it, and one with the whole schedule
where the engine runs one.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from decoding.text import Ending
from tuner.bench.task import token_ids
from tuner.engines.bench import Crowd, LoadFigures, write_alone
from tuner.errors import ConfigError, EngineError
from tuner.export.engines.registry import load_engine
from tuner.export.schedule import KEY, MeasuredSchedule, ScheduledLoad, figures_json, join_ranges, proved
from tuner.measuring.comparison import FEWEST_SAMPLES
from tuner.measuring.contender import PLAIN
from tuner.review.tables import identical
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from decoding.profile import DraftProfile, Interval
    from tuner.bench.engine import EngineTask
    from tuner.export.plan import Plan
    from tuner.progress import Progress

SCHEDULE = "schedule"
"""Name of the results, and of the draft that follows the whole schedule."""
LENGTHS, FEW_LENGTHS = (1, 2, 4, 8), (1, 3)
"""Draft lengths beside the export's own, in an engine that starts at once, and in one that does not."""


@dataclass(frozen=True)
class DraftLoads:
    """One server with a draft, measured in turns with plain decoding at each number of sequences."""

    name: str
    num_tokens: int | None
    """Tokens to draft; None for the whole schedule."""
    flags: tuple[str, ...]
    loads: tuple[LoadFigures, ...]
    seconds: float
    """Seconds that its measurement took, from the start of the server to its end."""

    def at(self, sequences: int) -> LoadFigures:
        """Return the figures at a measured number of sequences."""
        return next(each for each in self.loads if each.sequences == sequences)


@dataclass(frozen=True)
class ScheduleResult:
    """All drafts, and the schedule."""

    engine: str
    """Name of the engine's export."""
    title: str
    version: str
    drafts: tuple[DraftLoads, ...]
    failed: dict[str, str]
    """Drafts that the engine did not run, with its reasons."""
    schedule: MeasuredSchedule
    facts: dict[str, Any]
    remarks: tuple[str, ...] = ()

    @property
    def num_different(self) -> int:
        """Number of texts that differ from the engine's plain decoding, ties apart."""
        return sum(each.measurement.num_different for draft in self.drafts for each in draft.loads)


def check_groups(sequences: Sequence[int], num_prompts: int) -> None:
    """Raise `ConfigError` if the prompts make too few rounds for an interval."""
    most = max(sequences, default=1)
    if sequences and num_prompts // most < FEWEST_SAMPLES:
        raise ConfigError(
            f"--sequences {most} needs at least {FEWEST_SAMPLES * most} prompts, {FEWEST_SAMPLES} rounds, and there are "
            f"{num_prompts}: hold out more (--held-out-prompts), or measure fewer side by side"
        )


def measure_schedule(engine: EngineTask, progress: Progress) -> ScheduleResult:
    """Measure every draft length at every number of sequences; raise `EngineError` if the engine runs none of them."""
    task, program, plan = engine.task, engine.program, engine.plan
    drafts, failed = list[DraftLoads](), dict[str, str]()
    assert task.config.engine is not None, "the caller has looked"
    with engine.server((), progress, what="for plain decoding") as plain:
        prompts, ending = token_ids(task.measured), Ending(task.max_new_tokens, task.eos_token_ids)
        alone = write_alone(program, plain, prompts, task.max_new_tokens, progress)
        crowd = Crowd(prompts, alone, ending, lambda: task.target)

        def measure(name: str, flags: Sequence[str], num_tokens: int | None) -> None:
            began = time.monotonic()
            try:
                with engine.server(flags, progress, what=f"with its draft, {name}") as drafted:
                    numbers = sorted({*task.config.sequences})
                    contenders = engine.contender(PLAIN, plain), engine.contender(name, drafted)
                    repeats = task.config.repeats
                    loads = [crowd.measure(*contenders, each, progress, repeats=repeats) for each in numbers]
            except EngineError as cause:
                failed[name] = str(cause)
                progress.say(f"{name}: {cause}")
                return
            drafts.append(DraftLoads(name, num_tokens, engine.shown(flags), tuple(loads), time.monotonic() - began))

        for num_tokens in task.config.draft_tokens or _usual_lengths(plan, starts_at_once=program.starts_at_once):
            name = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
            measure(name, program.draft_flags(plan.with_length(num_tokens)), num_tokens)
        if not drafts:
            raise EngineError("; ".join(failed.values()))
        schedule = _schedule_of(drafts, task.profile, program.title, engine.version)
        if schedule.most_tokens and load_engine(task.config.engine).has_schedule:
            measure(SCHEDULE, program.draft_flags(plan.with_length(schedule.most_tokens, schedule)), None)
            schedule = _with_its_own(schedule, drafts[-1])
    remarks = (*engine.remarks, *task.notes)
    return ScheduleResult(
        task.config.engine, program.title, engine.version, tuple(drafts), failed, schedule, engine.facts(), remarks
    )


def _usual_lengths(plan: Plan, *, starts_at_once: bool) -> tuple[int, ...]:
    """Return the export's own draft length and a few others, in order."""
    own = plan.lookup.max_tokens if plan.shape is None and plan.lookup is not None else plan.length.num_tokens
    return tuple(sorted({own, *(LENGTHS if starts_at_once else FEW_LENGTHS)}))


def best_length(figures: Mapping[int, LoadFigures]) -> tuple[int, Interval | None]:
    """Return the draft length with the best speed-up of those that are proved to be faster than plain decoding, or 0.

    A length is proved if its 95 % interval lies above 1 and none of its texts differs, ties apart.
    """
    faster = [
        ((interval := each.measurement.speedup_interval()).value, num_tokens, interval)
        for num_tokens, each in figures.items()
        if proved(each.measurement)
    ]
    if not faster:
        return 0, None
    _, num_tokens, interval = max(faster, key=lambda each: each[:2])
    return num_tokens, interval


def _schedule_of(drafts: Sequence[DraftLoads], profile: DraftProfile, engine: str, version: str) -> MeasuredSchedule:
    """Return the best draft length at each measured number of sequences."""
    loads = []
    for number in (each.sequences for each in drafts[0].loads):
        at_load = {each.num_tokens: each.at(number) for each in drafts if each.num_tokens is not None}
        num_tokens, speedup = best_length(at_load)
        loads.append(ScheduledLoad(sequences=number, num_tokens=num_tokens, speedup=speedup))
    return MeasuredSchedule(
        engine=engine,
        engine_version=version,
        date=datetime.now(UTC).date().isoformat(),
        target_weights_sha256=profile.target.weights_sha256,
        draft=profile.draft.model_dump(mode="json"),
        entries=join_ranges({each.sequences: each.num_tokens for each in loads}),
        loads=tuple(loads),
    )


def _with_its_own(schedule: MeasuredSchedule, last: DraftLoads) -> MeasuredSchedule:
    """Return the schedule with the speed-ups of a server that runs it, if that was measured."""
    if last.name != SCHEDULE:
        return schedule
    loads = [
        each.model_copy(update={"scheduled": last.at(each.sequences).measurement.speedup_interval()})
        for each in schedule.loads
    ]
    return schedule.model_copy(update={"loads": tuple(loads)})


def schedule_table(result: ScheduleResult) -> RenderableType:
    """Return a line per number of sequences and draft length, and a legend below."""
    title = f"{result.title} ({result.version}): requests side by side (95 % intervals over groups of prompts)"
    headings = ("groups", "plain\ntok/s", "tok/s", "over plain", "accepted/\ndrafted", "iden-\ntical")
    table, legend = figures_table(title, ("side by side", "draft"), *headings), facts_grid()
    for load in result.schedule.loads:
        for index, draft in enumerate(result.drafts):
            found = draft.at(load.sequences).measurement
            table.add_row(
                str(load.sequences) if index == 0 else "",
                draft.name,
                str(len(found.samples)),
                f"{found.plain_tokens_per_second:.1f}",
                f"{found.draft_tokens_per_second:.1f}",
                f"{found.speedup_interval()}",
                f"{found.num_accepted_draft_tokens}/\n{found.num_draft_tokens}",
                identical(found.num_identical, found.num_prompts, found.num_ties, "\n"),
            )
    for term, meaning in _legend(result):
        legend.add_row(term, meaning)
    return Group(table, legend)


def _legend(result: ScheduleResult) -> Iterator[tuple[str, str]]:
    schedule = result.schedule
    yield (
        "over plain",
        f"tokens of all requests over the wall clock of a round, prompts included, relative to {result.title}'s own plain "
        "decoding of the same prompts side by side, in turns",
    )
    yield KEY, f"{json.dumps(schedule.entries)}: {schedule.describe()}"
    yield "rule", "the fastest length whose interval lies above 1, else 0; between measured numbers the smaller of both"
    yield "use", _use(result)
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
        yield "note", remark
    for name, reason in result.failed.items():
        yield "failed", f"{name}: {reason}"


def _use(result: ScheduleResult) -> str:
    """Return what to do with the schedule in this engine."""
    if not result.schedule.most_tokens:
        return f"decode plainly in {result.title}: no draft is proved to be faster at any measured number of sequences"
    if load_engine(result.engine).has_schedule:
        return (
            f"sdtune export PROFILE --to {result.engine} --schedule schedule.json writes it into the engine's settings"
        )
    return (
        f"{result.title} has no schedule by number of sequences: export with --draft-tokens for the number that a server is to "
        "have, and serve without the draft where the schedule says 0"
    )


def schedule_json(result: ScheduleResult) -> dict[str, Any]:
    """Return all figures with their intervals and samples as plain data."""
    return {
        **result.facts,
        "drafts": {
            each.name: {
                "draft_tokens": each.num_tokens,
                "flags": shlex.join(each.flags),
                "seconds": each.seconds,
                "loads": [_figures(load) for load in each.loads],
            }
            for each in result.drafts
        },
        "failed": result.failed,
        "remarks": list(result.remarks),
        KEY: result.schedule.model_dump(mode="json"),
    }


def _figures(load: LoadFigures) -> dict[str, Any]:
    return {
        "sequences": load.sequences,
        **figures_json(load.measurement),
        "plain_different": load.num_plain_different,
    }
