"""Drift of the profiles of searches: reports of production servers are kept, and judged at once."""

from __future__ import annotations

from tuner.drift.contract import DriftState, Kept, ObservationReport
from tuner.drift.judgement import judge
from tuner.service.contract import NoResultError
from tuner.service.jobs import Jobs


class DriftWatch:
    """The observations of the jobs of one database."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def report(self, report: ObservationReport) -> DriftState:
        """Keep a report and return the verdict. Raises `UnknownJobError`, and `NoResultError` for a search without a profile."""
        result = self._jobs.result(report.search)
        if result is None:
            raise NoResultError(report.search, self._jobs.find(report.search).state)
        store = self._jobs.observations
        store.keep(report.search, report)
        state = judge(result.promised, store.kept(report.search))
        store.note(report.search, state)
        return state

    def state(self, job: str) -> DriftState:
        """Return the latest verdict on the profile of a search. Raises `UnknownJobError`."""
        known = self._jobs.observations.states([job]).get(job)
        if known is not None:
            return known
        result = self._jobs.result(job)
        return judge(None if result is None else result.promised, Kept())
