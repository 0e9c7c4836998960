"""`sdtune bench --engine --sequences`: draft lengths at several numbers of requests side by side, and the schedule from them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.losslessness import compare
from tuner.bench.in_engine.loads import PlainTexts, groups_of, measure_load
from tuner.bench.in_engine.result import DraftAtLoads, LoadsResult
from tuner.bench.task import token_ids
from tuner.errors import EngineError
from tuner.export.schedule import MeasuredSchedule, ScheduledLoad, join_ranges

if TYPE_CHECKING:
    from decoding.profile import Interval
    from tuner.bench.in_engine.loads import LoadFigures
    from tuner.bench.in_engine.setup import EngineTask
    from tuner.engines.loopback import Client
    from tuner.export.plan import Plan
    from tuner.progress import Progress

LENGTHS, FEW_LENGTHS = (1, 2, 4, 8), (1, 3)
"""Draft lengths beside the export's own, in an engine that starts at once, and in one that does not."""
SCHEDULE = "schedule"


def run_by_load(engine: EngineTask, progress: Progress) -> LoadsResult:
    """Measure every length at every number of sequences, and the schedule that follows where the engine runs one.

    One server decodes plainly all the time; another runs each length in turn, at all numbers of sequences.
    Raises `EngineError` if the engine runs no length.
    """
    program, plan, task = engine.program, engine.plan, engine.task
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as folder:
        logs = Path(folder)
        progress.stage(f"files for {program.title}")
        remarks = program.prepare(plan, logs / "convert.log")
        with engine.server((), logs / "plain.log", progress) as plain:
            progress.stage(f"{program.title}: plain texts", len(task.measured))
            texts = PlainTexts.of(
                program,
                plain,
                token_ids(task.measured),
                task.max_new_tokens,
                partial(compare, task.target),
                progress.advance,
            )
            bench = _LoadBench(engine, plain, texts, logs, progress)
            for num_tokens in engine.config.draft_tokens or usual_lengths(plan, starts_at_once=program.starts_at_once):
                bench.measure(_name(num_tokens), plan.with_length(num_tokens), num_tokens)
            if not bench.drafts:
                raise EngineError("; ".join(bench.failed.values()))
            schedule = _schedule(engine, bench.drafts)
            if schedule.most_tokens and engine.has_schedule:
                bench.measure(SCHEDULE, plan.with_length(schedule.most_tokens, schedule), None)
                schedule = _with_its_own(schedule, bench.drafts[-1])
    return LoadsResult(
        title=program.title,
        version=engine.version,
        drafts=tuple(bench.drafts),
        failed=bench.failed,
        schedule=schedule,
        facts=engine.facts(),
        remarks=(*remarks, *task.notes),
    )


@dataclass
class _LoadBench:
    """Measures one server after another beside the plain one."""

    engine: EngineTask
    plain: Client
    texts: PlainTexts
    logs: Path
    progress: Progress
    drafts: list[DraftAtLoads] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Names of drafts that the engine did not run, with its reasons."""

    def measure(self, name: str, plan: Plan, num_tokens: int | None) -> None:
        """Start a server with the draft of `plan`, and measure it at every number of sequences."""
        flags, began = self.engine.program.draft_flags(plan), time.monotonic()
        log = self.logs / f"{name.replace(' ', '-')}.log"
        try:
            with self.engine.server(flags, log, self.progress, what=f"with its draft, {name}") as drafted:
                found = tuple(
                    self._at_load(name, drafted, sequences) for sequences in _in_order(self.engine.config.sequences)
                )
        except EngineError as cause:
            self.failed[name] = str(cause)
            self.progress.say(f"{name}: {cause}")
            return
        seconds = time.monotonic() - began
        self.drafts.append(DraftAtLoads(name, num_tokens, self.engine.shown(flags), found, seconds))

    def _at_load(self, name: str, drafted: Client, sequences: int) -> LoadFigures:
        engine, progress, repeats = self.engine, self.progress, self.engine.config.repeats
        num_rounds = repeats * len(groups_of(len(self.texts.prompts), sequences))
        progress.stage(f"{engine.program.title}: {name}, {sequences} side by side", num_rounds)
        found = measure_load(
            engine.program, self.plain, drafted, sequences, self.texts, on_round=progress.advance, repeats=repeats
        )
        speedup = found.measurement.speedup_interval()
        progress.say(f"{sequences} side by side, {name}: {speedup} over plain decoding")
        return found


def usual_lengths(plan: Plan, *, starts_at_once: bool) -> tuple[int, ...]:
    """Return the export's own draft length and a few others, in order."""
    own = plan.lookup.max_tokens if plan.shape is None and plan.lookup is not None else plan.length.num_tokens
    return tuple(sorted({own, *(LENGTHS if starts_at_once else FEW_LENGTHS)}))


def best_length(figures: Mapping[int, LoadFigures]) -> tuple[int, Interval | None]:
    """Return the draft length with the best speed-up of those that are proved to be faster than plain decoding, or 0.

    A length is proved if its 95 % interval lies above 1 and none of its texts differs, ties apart.
    """
    faster = [
        (interval.value, num_tokens, interval)
        for num_tokens, each in figures.items()
        if (interval := each.measurement.speedup_interval()).ci95[0] > 1 and not each.num_different
    ]
    if not faster:
        return 0, None
    _, num_tokens, interval = max(faster, key=lambda each: each[:2])
    return num_tokens, interval


def _name(num_tokens: int) -> str:
    return "1 token" if num_tokens == 1 else f"{num_tokens} tokens"


def _in_order(sequences: Sequence[int]) -> list[int]:
    return sorted(set(sequences))


def _schedule(engine: EngineTask, drafts: Sequence[DraftAtLoads]) -> MeasuredSchedule:
    loads = []
    for number in _in_order(engine.config.sequences):
        at_load = {each.num_tokens: each.at(number) for each in drafts if each.num_tokens is not None}
        num_tokens, speedup = best_length(at_load)
        loads.append(ScheduledLoad(sequences=number, num_tokens=num_tokens, speedup=speedup))
    profile = engine.task.profile
    return MeasuredSchedule(
        engine=engine.program.title,
        engine_version=engine.version,
        date=datetime.now(UTC).date().isoformat(),
        target_weights_sha256=profile.target.weights_sha256,
        draft=profile.draft.model_dump(mode="json"),
        entries=join_ranges({each.sequences: each.num_tokens for each in loads}),
        loads=tuple(loads),
    )


def _with_its_own(schedule: MeasuredSchedule, last: DraftAtLoads) -> MeasuredSchedule:
    """Return the schedule with the speed-ups of a server that runs it, if that was measured."""
    if last.name != SCHEDULE:
        return schedule
    loads = [
        each.model_copy(update={"scheduled": last.at(each.sequences).measurement.speedup_interval()})
        for each in schedule.loads
    ]
    return schedule.model_copy(update={"loads": tuple(loads)})
