"""Jobs whose service, worker, MLflow server and connections are killed while they run."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decoding.profile import DraftProfile
from tuner.errors import SearchError
from tuner.evaluation.hardening.outcomes import CheckOutcome, prefixed
from tuner.evaluation.hardening.priced_search import SearchPlace, finished_trials, tracked_runs
from tuner.evaluation.hardening.resumption import Records, changed, unlike, untrue
from tuner.evaluation.service.parts import ServiceParts, repeated_steps, running
from tuner.progress import Progress
from tuner.service.admission import OF_THE_SERVICE
from tuner.service.contract import JobResult, JobState, SearchRequest

POLL_SECONDS = 0.2
LIMIT_SECONDS = 1800.0
"""After this a job counts as hanging, also on a busy machine."""
SHARE = 0.5
"""Longest time between two kills, as a share of an undisturbed job: most jobs meet several."""


def killed_jobs(
    database: str, folder: Path, num_kills: int, seed: int, progress: Progress, note: Callable[[KilledJobs], None]
) -> KilledJobs:
    """Kill parts `num_kills` times at random moments of running jobs; return what went wrong. `note` gets it after each job."""
    chance = random.Random(seed)
    with running(ServiceParts(SearchPlace.made(folder), database)) as parts:
        jobs = KilledJobs(parts, chance, progress)
        progress.stage("a job that nothing disturbs")
        jobs.undisturbed()
        progress.stage("kills", num_kills)
        while jobs.kills.num_cases < num_kills:
            jobs.disturbed(num_kills)
            note(jobs)
    return jobs


class KilledJobs:
    """Jobs of one service, each compared with an undisturbed one."""

    def __init__(self, parts: ServiceParts, chance: random.Random, progress: Progress) -> None:
        self._parts, self._chance, self._progress = parts, chance, progress
        self.kills, self.ends = CheckOutcome("kills"), CheckOutcome("jobs whose parts were killed")
        self._killed: Counter[str] = Counter()
        self._num_jobs = 0
        self._seconds = 0.0
        self._wanted: Any = None
        self._records: Records = {}

    @property
    def facts(self) -> dict[str, Any]:
        """Figures, and the cases with what went wrong in them."""
        return {
            **{each.name: {"cases": each.num_cases, "failures": each.failures} for each in (self.kills, self.ends)},
            "seconds_undisturbed": round(self._seconds, 2),
            "trials": len(self._records),
            "killed": dict(self._killed),
        }

    def undisturbed(self) -> None:
        """Run a job that the others are compared with. Raises `SearchError` if it fails."""
        for _ in ("imports what is needed", "is timed"):
            start = time.perf_counter()
            job = self._submit()
            if (problem := self._waited(job)) is not None:
                raise SearchError(f"the undisturbed job failed: {problem}")
        self._seconds = time.perf_counter() - start
        self._records, self._wanted = self._finished(job), self._winner(job)
        if (problem := self._wrong(job, {})) is not None:
            raise SearchError(f"the undisturbed job is wrong: {problem}")

    def disturbed(self, num_kills: int) -> None:
        """Run a job, and kill parts until it ends or there were `num_kills` kills."""
        job = self._submit()
        known: Records = {}
        while self.kills.num_cases < num_kills:
            self._pause(self._chance.uniform(0.0, SHARE * self._seconds), job)
            if self._state(job).is_over:
                break
            name = self._chance.choice(self._parts.names)
            if not self._parts.kill(name, self._chance.randrange):
                continue
            found = self._finished(job)
            self.kills.count(prefixed(f"{job}, {name}", changed(known, found)))
            self._killed[name] += 1
            known = found
            self._parts.restart(name)
            self._progress.advance()
        self.ends.count(prefixed(job, self._waited(job) or self._wrong(job, known)))

    def _submit(self) -> str:
        """Submit a job that no other is, twice, as a client does whose first request went unanswered."""
        self._num_jobs += 1
        # The limit is longer than any prompt, so it changes the identity and nothing else.
        config = self._parts.place.config("job", max_prompt_tokens=1000 + self._num_jobs)
        settings = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_SERVICE))
        first, again = (self._parts.ask(lambda client: client.submit(SearchRequest(config=settings)).id) for _ in "12")
        if first != again:
            raise SearchError(f"one submission became two jobs: {first} and {again}")
        return first

    def _pause(self, seconds: float, job: str) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._state(job).is_over:
            self._parts.revive()
            time.sleep(min(POLL_SECONDS, seconds))

    def _waited(self, job: str) -> str | None:
        """Wait until the job is over; return what went wrong."""
        end = time.monotonic() + LIMIT_SECONDS
        while not (state := self._state(job)).is_over:
            if time.monotonic() > end:
                return f"no end after {LIMIT_SECONDS:.0f} s"
            self._parts.revive()
            time.sleep(POLL_SECONDS)
        if state is JobState.FINISHED:
            return None
        return f"{state}: {self._parts.ask(lambda client: client.search(job).error)}"

    def _state(self, job: str) -> JobState:
        return self._parts.ask(lambda client: client.search(job).state)

    def _wrong(self, job: str, known: Records) -> str | None:
        """Return how a finished job differs from an undisturbed one, or None."""
        records, experiment = self._finished(job), self._experiment(job)
        if (problem := changed(known, records) or unlike(records, self._records)) is not None:
            return problem
        if repeated := repeated_steps(self._parts.steps_log, job):
            return f"finished steps that began again: {repeated}"
        if (problem := untrue(tracked_runs(self._parts.tracking_store, experiment), records)) is not None:
            return problem
        winner = self._winner(job)
        return None if winner == self._wanted else f"another winner: {winner}, undisturbed {self._wanted}"

    def _winner(self, job: str) -> Any:
        result: JobResult = self._parts.ask(lambda client: client.result(job))
        path = self._parts.place.folder / f"{job}.yaml"
        path.write_text(result.profile, encoding="utf-8")
        return DraftProfile.load(path).model_dump(mode="json", include={"draft", "draft_length"})

    def _finished(self, job: str) -> Records:
        return finished_trials(self._parts.database, self._experiment(job))

    def _experiment(self, job: str) -> str:
        return f"model-prompts-{job}"
