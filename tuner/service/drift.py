"""Drift of the profiles of searches: reports of production servers are kept and judged, and a search may be run again.

Observations belong to the search that was submitted, its root. Searches that were re-tuned from it have profiles of other names, so
one report may tell of several of them; the one whose window arrived last is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuner.drift.contract import DriftState, DriftVerdict, Kept, ObservationReport
from tuner.drift.judgement import judge
from tuner.service.admission import Allowed, admitted, identity
from tuner.service.contract import JobResult, NoResultError, Retuning, SearchJob, ServiceError
from tuner.service.given_heads import has_heads, heads_of
from tuner.service.jobs import Jobs, retuned_id

PAUSE_SECONDS = 86_400.0
"""Seconds from one search of a lineage to the next that is re-tuned, unless another pause is given."""


@dataclass(frozen=True)
class RetuningPolicy:
    """What follows from a speed-up below its interval. Nothing unless it is asked for."""

    retune: bool = False
    promote: bool = False
    """Whether the alias goes to a profile that is faster than the champion, measured in turns."""
    pause_seconds: float = PAUSE_SECONDS
    most_texts: int = 0
    """Texts of production that are kept for a search, to be replayed first; 0 refuses them."""


class DriftWatch:
    """The observations of the jobs of one database."""

    def __init__(
        self,
        jobs: Jobs,
        policy: RetuningPolicy,
        allowed: Allowed,
        folder: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._jobs, self._policy, self._allowed, self._folder, self._now = jobs, policy, allowed, folder, now

    def report(self, report: ObservationReport) -> DriftState:
        """Keep a report and return the verdict on the profile in use, of this search or of one that was re-tuned from it.

        Raises `UnknownJobError`, `NoResultError` for a search without a profile, and `ServiceError` for texts that are not wanted.
        """
        if report.texts and not self._policy.most_texts:
            raise ServiceError(
                "texts: this service takes none: start it with --accept-texts, or report without `sdtune jobs observe --texts`"
            )
        if self._jobs.result(report.search) is None:
            raise NoResultError(report.search, self._jobs.find(report.search).state)
        root = self._root(report.search)
        store = self._jobs.observations
        store.keep(root, report, most_texts=self._policy.most_texts)
        kept, lineage = store.kept(root), self._jobs.lineage(root)
        results = {job.id: result for job in lineage if (result := self._jobs.result(job.id)) is not None}
        used = _used(results, kept) or report.search
        states = {job: judge(result.promised, kept) for job, result in results.items()}
        if states[used].verdict is DriftVerdict.BELOW:
            done = self._retune(root, used, lineage, kept.num_texts)
            states[used] = states[used].model_copy(update={"retuning": done})
        for job, state in states.items():
            if state.windows or job in (used, report.search):
                store.note(job, state)
        return states[used]

    def forget(self, job: str) -> DriftState:
        """Delete what production has reported for a search and those of its lineage; return the verdict that is left.

        Raises `UnknownJobError`.
        """
        root = self._root(job)
        self._jobs.observations.forget(root, [each.id for each in self._jobs.lineage(root)])
        return self.state(job)

    def _root(self, job: str) -> str:
        retuning = self._jobs.retuning(job)
        return job if retuning is None else retuning.root

    def state(self, job: str) -> DriftState:
        """Return the latest verdict on the profile of a search. Raises `UnknownJobError`."""
        known = self._jobs.observations.states([job]).get(job)
        if known is not None:
            return known
        result = self._jobs.result(job)
        return judge(None if result is None else result.promised, Kept())

    def _retune(self, root: str, champion: str, lineage: list[SearchJob], num_texts: int) -> str:
        """Submit another search unless there is a reason not to; return what was done. One that runs is left alone."""
        if not self._policy.retune:
            return "nothing: the service was started without --retune"
        *_, latest = lineage
        if not latest.state.is_over:
            return f"{latest.id} is {latest.state}"
        waited = self._now() - latest.created_seconds
        if latest.retuned_from is not None and waited < self._policy.pause_seconds:
            left = (self._policy.pause_seconds - waited) / 3600
            return f"{latest.id} was submitted {waited / 3600:.1f} hours ago, and is {latest.state}: {left:.1f} to wait"
        request = self._jobs.request(root)
        try:
            config = admitted(request, self._allowed)
            has_same_data = identity(config, request.queue, self._jobs.heads(root)) == root
            # Heads were trained on tuning prompts: of another data set, these may be held out.
            takes_heads = has_same_data and has_heads(champion, self._folder)
            heads = heads_of(champion, self._jobs, self._folder) if takes_heads else None
        except ServiceError as refused:
            return f"not accepted any more: {refused}"
        # Two reports at once have the same number, so they submit one search.
        job = retuned_id(root, len(lineage))
        # Greedy texts say nothing of a profile for sampling.
        replays = self._policy.most_texts > 0 and num_texts > 0 and not config.temperature
        retuning = Retuning(
            root=root,
            champion=champion,
            has_same_data=has_same_data,
            promote=self._policy.promote,
            replays=replays,
        )
        self._jobs.submit(job, request.config, request.queue, heads, retuning)
        return f"submitted {job}{f', which replays {num_texts} texts first' if replays else ''}"


def _used(results: dict[str, JobResult], kept: Kept) -> str | None:
    """Return the search whose profile has the window that arrived last; None if no window is of any of them."""
    names = {result.promised.name: job for job, result in results.items() if result.promised is not None}
    return next((names[window.arm] for _, window in reversed(kept.windows) if window.arm in names), None)
