"""The plan of the GPU benchmark fits into ten minutes, whatever happens, by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from decoding.runners.features import NO_FEATURES, SpeedFeatures
from tuner.evaluation.gpu.plan import PLAN, steps_named
from tuner.evaluation.gpu.records import StepRecord, StepRecords
from tuner.evaluation.gpu.run import reported_steps
from tuner.evaluation.gpu.settings import GpuEvaluation
from tuner.evaluation.gpu.steps.features import FEATURE_STEPS, FUSED_PROJECTIONS
from tuner.evaluation.gpu.supervisor import GRACE_SECONDS, Ended, Event, Finished, Started, Supervisor

KILLED_AFTER = 600.0
"""Seconds after which a command is killed on the machine that the plan is for."""
NAMES = [step.name for step in PLAN]
STARTING_SECONDS = 12.0
"""Seconds until a worker begins its first step, as slow as we can imagine: Python, torch, transformers, CUDA."""


@dataclass
class SimulatedClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class SimulatedWorker:
    """A worker whose steps take given seconds; those in `dying` end the process, those in `deaf` ignore the interrupt."""

    def __init__(
        self,
        clock: SimulatedClock,
        records: StepRecords,
        names: Sequence[str],
        durations: Callable[[str], float],
        dying: Sequence[str] = (),
        deaf: Sequence[str] = (),
        starting: float = STARTING_SECONDS,
    ) -> None:
        self._clock, self._records = clock, records
        self._durations, self._dying, self._deaf = durations, dying, deaf
        self._coming: list[tuple[float, Event]] = []
        at = clock.now + starting
        for name in names:
            self._coming.append((at, Started(name)))
            at += durations(name)
            self._coming.append((at, Ended("killed by SIGSEGV") if name in dying else Finished(name)))
            if name in dying:
                break
        else:
            self._coming.append((at, Ended("exit status 0")))
        self.is_killed = False

    def wait(self, seconds: float) -> Event | None:
        assert seconds >= 0
        at, event = self._coming[0]
        if at > self._clock.now + seconds:
            self._clock.now += seconds
            return None
        self._clock.now = max(at, self._clock.now)
        del self._coming[0]
        if isinstance(event, Finished):
            self._records.write(StepRecord(name=event.name, status="ok", seconds=1.0, result={}))
        return event

    def interrupt(self) -> None:
        """Let the running step end in two seconds, and all others that much earlier, unless it is deaf."""
        at, event = self._coming[0]
        if isinstance(event, Finished) and event.name not in self._deaf:
            earlier = at - (self._clock.now + 2)
            self._coming = [(when - earlier, each) for when, each in self._coming]

    def kill(self) -> None:
        self.is_killed = True


def supervise(
    out: Path,
    durations: Callable[[str], float],
    *,
    dying: Sequence[str] = (),
    deaf: Sequence[str] = (),
    seconds: float | None = None,
) -> tuple[float, tuple[str, ...], list[SimulatedWorker]]:
    """Run the plan; return the seconds that it took, the steps without time, and the workers."""
    clock, records, workers = SimulatedClock(), StepRecords(out), list[SimulatedWorker]()

    def open_worker(names: Sequence[str], ends: Mapping[str, float]) -> SimulatedWorker:
        workers.append(SimulatedWorker(clock, records, names, durations, dying, deaf))
        return workers[-1]

    limit = seconds or GpuEvaluation().seconds
    supervisor = Supervisor(PLAN, records, open_worker, seconds=limit, clock=clock)
    not_run = supervisor.run()
    return clock.now - 1000.0, not_run, workers


def statuses(out: Path) -> dict[str, str]:
    return {name: record.status for name in NAMES if (record := StepRecords(out).read(name)) is not None}


def pessimistic(name: str) -> float:
    return next(step.pessimistic_seconds for step in PLAN if step.name == name)


def test_the_limits_leave_room_in_ten_minutes() -> None:
    """The last step gets what the others leave."""
    assert sum(step.limit_seconds for step in PLAN[:-1]) <= 540
    assert NAMES[-1] == "bench-1-hf-static"
    assert GpuEvaluation().seconds + GRACE_SECONDS < KILLED_AFTER - 20
    assert all(step.pessimistic_seconds < step.limit_seconds for step in PLAN)
    assert all(step.limit_seconds >= GRACE_SECONDS for step in PLAN), (
        "a step that has to be killed uses up time of the next one"
    )
    assert len(set(NAMES)) == len(NAMES)


def test_with_pessimistic_times_every_step_runs_and_ends_in_time(tmp_path: Path) -> None:
    taken, not_run, workers = supervise(tmp_path, pessimistic)
    assert taken <= GpuEvaluation().seconds + GRACE_SECONDS
    assert not_run == ()
    assert {**statuses(tmp_path), NAMES[-1]: "ok"} == dict.fromkeys(NAMES, "ok")
    assert len(workers) == 1, "models are made once"


@pytest.mark.parametrize("deaf", [(), NAMES], ids=["that end when interrupted", "that ignore the interrupt"])
def test_steps_that_never_end_do_not_outlast_the_command(tmp_path: Path, deaf: Sequence[str]) -> None:
    taken, not_run, workers = supervise(tmp_path, lambda name: 1e6, deaf=deaf)
    assert taken <= GpuEvaluation().seconds + GRACE_SECONDS < KILLED_AFTER
    assert statuses(tmp_path), "each step had its own time"
    assert all(worker.is_killed for worker in workers)
    assert len(statuses(tmp_path)) + len(not_run) == len(NAMES)


def test_one_slow_step_costs_the_others_nothing(tmp_path: Path) -> None:
    _, not_run, workers = supervise(tmp_path, lambda name: 1e6 if name == "search" else pessimistic(name))
    assert not_run == ()
    assert set(statuses(tmp_path)) == set(NAMES)
    assert len(workers) == 1, "an interrupted search ends by itself, and the models stay"


def test_a_death_costs_one_step_and_the_rest_runs_in_a_fresh_process(tmp_path: Path) -> None:
    _, _, workers = supervise(tmp_path, lambda name: 3.0, dying=["rates", "bench-4"])
    found = statuses(tmp_path)
    assert len(workers) == 3
    assert [name for name in NAMES if found[name] == "died"] == ["rates", "bench-4"]
    record = StepRecords(tmp_path).read("rates")
    assert record is not None
    assert record.cause == "killed by SIGSEGV"
    assert [name for name in NAMES if found[name] == "ok"] == [n for n in NAMES if n not in ("rates", "bench-4")]


def test_a_second_run_repeats_what_failed_and_skips_what_succeeded(tmp_path: Path) -> None:
    supervise(tmp_path, lambda name: 3.0, dying=["rates"])
    ran: list[str] = []

    def duration(name: str) -> float:
        ran.append(name)
        return 3.0

    supervise(tmp_path, duration)
    assert ran == ["rates"]
    assert statuses(tmp_path) == dict.fromkeys(NAMES, "ok")


def test_time_that_steps_leave_is_for_the_later_ones(tmp_path: Path) -> None:
    """The search may use what the steps before it have not: it is interrupted when all their limits are used up."""
    until = sum(step.limit_seconds for step in PLAN[: NAMES.index("search") + 1])
    supervise(tmp_path, lambda name: until - 30 if name == "search" else 1.0)
    assert statuses(tmp_path)["search"] == "ok"


def test_what_had_no_time_has_no_record_and_runs_next(tmp_path: Path) -> None:
    taken, not_run, _ = supervise(tmp_path, lambda name: 30.0, seconds=100.0)
    assert taken <= 100 + GRACE_SECONDS
    assert not_run[-1] == NAMES[-1]
    assert StepRecords(tmp_path).unfinished(NAMES)[-1] == NAMES[-1]
    assert not set(statuses(tmp_path)) & set(not_run)


def test_single_steps_leave_the_results_of_earlier_runs_in_the_report(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    records.write(StepRecord(name="rates", status="ok", seconds=1.0, result={}))
    asked = steps_named(["search", "environment"])
    assert [step.name for step in reported_steps(asked, records)] == ["environment", "rates", "search"]


def test_a_process_that_gives_itself_up_after_a_step_is_replaced_without_blame(tmp_path: Path) -> None:
    clock, records, opened = SimulatedClock(), StepRecords(tmp_path), list[Sequence[str]]()

    def open_worker(names: Sequence[str], ends: Mapping[str, float]) -> SimulatedWorker:
        opened.append(names)
        return SimulatedWorker(clock, records, names[:1], lambda name: 1.0)

    Supervisor(PLAN[:3], records, open_worker, seconds=500, clock=clock).run()
    assert [len(names) for names in opened] == [3, 2, 1]
    assert set(statuses(tmp_path).values()) == {"ok"}


def test_a_process_that_never_starts_is_not_started_for_ever(tmp_path: Path) -> None:
    clock, records = SimulatedClock(), StepRecords(tmp_path)

    class Stillborn(SimulatedWorker):
        def wait(self, seconds: float) -> Event | None:
            clock.now += 1.0
            return Ended("exit status 1: ModuleNotFoundError")

    def open_worker(names: Sequence[str], ends: Mapping[str, float]) -> SimulatedWorker:
        return Stillborn(clock, records, names, lambda name: 1.0)

    Supervisor(PLAN[:3], records, open_worker, seconds=500, clock=clock).run()
    assert [records.read(name).cause for name in NAMES[:3]] == ["exit status 1: ModuleNotFoundError"] * 3  # type: ignore[union-attr]


def test_replays_come_before_any_figure_and_features_after_the_promised_ones() -> None:
    order = {name: index for index, name in enumerate(NAMES)}
    assert (
        order["compile"]
        < order["replays-tiny"]
        < order["replays-wide"]
        < order["rates"]
        < order["switch"]
        < order["search"]
    )
    assert order["search"] < order["bench-1"] < order["bench-4"] < order["bench-16"]
    assert order["lossless-bfloat16"] < min(order[step.name] for step in FEATURE_STEPS)


def test_every_speed_feature_has_its_step() -> None:
    steps = (*FEATURE_STEPS, FUSED_PROJECTIONS)
    # `token_counts` is no feature of its own: it says which tokens `draft_vocabulary` keeps.
    features = {field.name for field in fields(SpeedFeatures)} - {"token_counts"}
    assert {step.feature for step in steps} == features
    for step in steps:
        on = [
            field.name
            for field in fields(SpeedFeatures)
            if getattr(step.features, field.name) != getattr(NO_FEATURES, field.name)
        ]
        assert on == [step.feature], "one feature at a time"


def test_the_step_that_moves_weights_comes_after_all_that_record_passes_over_them() -> None:
    at = NAMES.index(FUSED_PROJECTIONS.name)
    assert NAMES[at + 1 :] == ["bench-1-hf-static"]


def test_steps_are_found_by_name() -> None:
    assert steps_named(["rates", "environment"])[0] is PLAN[NAMES.index("rates")]
    with pytest.raises(KeyError):
        steps_named(["nothing"])
