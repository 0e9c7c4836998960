"""What counts as wrong after kills. The parts are stand-ins: a service that finishes each job at once, and nothing to kill."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoding.documents.strict_yaml import dump
from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, TargetIdentity
from studies.contract import TrialRecord
from tests.support.records import record
from tuner.evaluation.service import kills
from tuner.evaluation.service.kills import KilledJobs
from tuner.evaluation.service.parts import repeated_steps
from tuner.progress import Unwatched
from tuner.service.contract import JobResult, JobState, SearchRequest

Trials = dict[tuple[str, int], TrialRecord]
TRIALS: Trials = {("exit_layer", number): record(number=number, study="exit_layer") for number in range(3)}


def test_a_step_is_repeated_only_if_its_result_was_stored(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    lines = ["a begun race", "a begun race", "a stored race", "b begun race", "a stored race", "a begun confirmation"]
    log.write_text("".join("\t".join(line.split()) + "\n" for line in lines))
    assert repeated_steps(log, "a") == []
    with log.open("a") as file:
        file.write("a\tbegun\trace\n")
    assert repeated_steps(log, "a") == ["race"]
    assert repeated_steps(log, "b") == []


class StandIn:
    """The parts of a service, and what it has stored of each job."""

    names = ("worker",)

    def __init__(self, folder: Path) -> None:
        config = SimpleNamespace(model_dump=lambda **_: {"model": "m", "dataset": "d"})
        self.place = SimpleNamespace(folder=folder, config=lambda *_, **__: config)
        self.database = self.tracking_store = "none"
        self.steps_log = folder / "steps.log"
        self.steps_log.write_text("")
        self.trials: dict[str, Trials] = {}
        self.open_run = self.is_new = False
        self.skipped = 2
        self.on_kill: Callable[[str], None] = lambda job: None

    def ask(self, request: Callable[[Any], Any]) -> Any:
        return request(self)

    def submit(self, request: SearchRequest) -> Any:
        self.is_new = not self.is_new  # submitted twice
        job = f"job{len(self.trials) + self.is_new - 1}"
        self.trials.setdefault(f"model-prompts-{job}", dict(TRIALS))
        return SimpleNamespace(id=job)

    def search(self, job: str) -> Any:
        return SimpleNamespace(state=JobState.FINISHED if self.was_killed else JobState.RUNNING, error=None)

    def result(self, job: str) -> JobResult:
        identity = TargetIdentity(
            model="m", architecture="a", num_layers=6, dtype="float32", config_sha256="a", weights_sha256="b"
        )
        profile = DraftProfile(name="p", target=identity, draft=LayerSkip.blocks((self.skipped,)))
        return JobResult(profile=dump(profile), claims_speedup=True, rows=[], report="", mlflow_run="")

    was_killed = True

    def kill(self, name: str, chance: Callable[[int], int]) -> bool:
        self.was_killed = True
        return True

    def restart(self, name: str) -> None:
        self.on_kill(list(self.trials)[-1])

    def revive(self) -> None:
        pass


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    parts = StandIn(tmp_path)
    monkeypatch.setattr(kills, "finished_trials", lambda database, experiment: dict(parts.trials[experiment]))

    def runs(store: str, experiment: str) -> tuple[list[str], dict[tuple[str, int], list[str]]]:
        return ["RUNNING" if parts.open_run else "FINISHED"], {key: ["FINISHED"] for key in parts.trials[experiment]}

    monkeypatch.setattr(kills, "tracked_runs", runs)
    return parts


def _lose_a_trial(parts: StandIn, job: str) -> None:
    parts.trials[job].popitem()


def _another_winner(parts: StandIn, job: str) -> None:
    parts.skipped = 3


def _repeat_a_step(parts: StandIn, job: str) -> None:
    own = job.removeprefix("model-prompts-")
    parts.steps_log.write_text(f"{own}\tbegun\trace\n{own}\tstored\trace\n{own}\tbegun\trace\n")


def _leave_a_run_open(parts: StandIn, job: str) -> None:
    parts.open_run = True


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda parts, job: None, None),
        (_lose_a_trial, "is lost"),
        (_another_winner, "another winner"),
        (_repeat_a_step, "finished steps that began again: ['race']"),
        (_leave_a_run_open, "parent runs in MLflow: ['RUNNING']"),
    ],
)
def test_what_a_kill_breaks_is_found(parts: StandIn, harm: Callable[[StandIn, str], None], found: str | None) -> None:
    jobs = KilledJobs(parts, random.Random(0), Unwatched())  # type: ignore[arg-type]
    jobs.undisturbed()
    parts.was_killed = False
    parts.on_kill = lambda job: harm(parts, job)
    jobs.disturbed(1)
    assert (jobs.kills.num_cases, jobs.ends.num_cases) == (1, 1)
    assert jobs.facts["killed"] == {"worker": 1}
    failures = [*jobs.kills.failures, *jobs.ends.failures]
    assert failures == [] if found is None else any(found in failure for failure in failures), failures
