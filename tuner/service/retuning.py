"""A search that is run again because the profile in use has lost its speed-up: warm start, champion and promotion.

The search is warm-started by candidates alone, and all of them are measured anew. If production has reported texts, these are
replayed first: that orders the candidates, and more of them are considered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from decoding.drafts import Draft
from studies.contract import Candidate, best_trials
from tuner.config import SearchConfig
from tuner.errors import PromotionError, SearchError
from tuner.progress import Progress
from tuner.registry import championships, promote
from tuner.search.champion import ChampionOutcome
from tuner.search.steps import Steps
from tuner.search.storage import StudyStore
from tuner.search.task import Task
from tuner.service.admission import placed
from tuner.service.contract import ChampionContest, Retuning
from tuner.service.jobs import Jobs
from tuner.service.text_replay import RatedCandidates, replay_texts

if TYPE_CHECKING:
    from tuner.service.worker import WorkerSettings

NUM_KNOWN = 5
"""Candidates that are measured first, beside the champion: the best trials of the earlier search, or what promises most on texts of
production."""
NUM_REPLAYED = 20
"""Best trials of the earlier search that are replayed on texts of production."""
WARM_START = "warm_start"
SERVICE = "sdtune service"


@dataclass(frozen=True)
class RetunedSearch:
    """What a search that is run again knows of the one before."""

    retuning: Retuning
    config: dict[str, Any]
    """The configuration with the warm start before its studies."""
    known: tuple[Candidate, ...]
    """The champion, if it can be measured, and the best trials of its search."""
    champion: Candidate | None
    champion_run: str
    """Run of the champion's search in MLflow."""
    reason: str | None = None
    """Why the champion cannot be measured; None if it can."""


def retuned_search(
    config: Mapping[str, Any], retuning: Retuning, settings: WorkerSettings, jobs: Jobs
) -> RetunedSearch:
    """Return what is known for a search that is run again. Raises `SearchError` if the champion's search has no profile."""
    known = jobs.result(retuning.champion)
    if known is None or known.winner is None:
        raise SearchError(f"the search {retuning.champion} has no profile to be compared with")
    champion = Candidate.model_validate(known.winner)
    # Heads were trained on the tuning prompts of the data set as it was: of another one, these may be held out.
    usable = [
        each
        for each in [champion, *_best(retuning, settings, jobs, NUM_REPLAYED if retuning.replays else NUM_KNOWN)]
        if retuning.has_same_data or not _has_files(each.draft)
    ]
    candidates = tuple({each.key: each for each in usable}.values())
    reason = None
    if champion not in usable:
        reason = "the champion drafts with a trained head, and the data set has changed: compare them by hand"
    whole = SearchConfig.model_validate(config)
    started = warm_started(whole.study, config.get("studies") or {}, candidates[: NUM_KNOWN + 1])
    return RetunedSearch(
        retuning,
        {**config, **started},
        candidates,
        champion if reason is None else None,
        known.mlflow_run,
        reason,
    )


def warm_started(study: Sequence[str], studies: Mapping[str, Any], candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the studies of a configuration, and their settings, after a warm start with these candidates, if there are any."""
    names, settings = [name for name in study if name != WARM_START], dict(studies)
    if candidates:
        names = [WARM_START, *names]
        settings[WARM_START] = {"candidates": [each.model_dump(mode="json") for each in candidates]}
    return {"study": names, "studies": settings}


def replayed(search: RetunedSearch, task: Task, jobs: Jobs, job: str, progress: Progress, steps: Steps) -> Task:
    """Return the task of a search that is run again, warm-started by what promises most on texts of production.

    If production has reported none that the model writes, the task is returned as it is. The predictions are stored with the job.
    """
    if not search.retuning.replays:
        return task

    def replay_them() -> RatedCandidates:
        texts = jobs.observations.texts(search.retuning.root)
        return replay_texts(task, search.known, search.champion, texts, progress)

    found = steps.run("replay", replay_them, RatedCandidates)
    progress.say(found.replay.describe())
    jobs.note_replay(job, found.replay)
    if not found.candidates:
        return task
    best = first_measured(found.candidates, search.champion)
    started = warm_started(task.config.study, task.config.studies, best)
    changes = {**started, "study": tuple(started["study"])}
    return replace(task, config=task.config.model_copy(update=changes))


def first_measured(candidates: Sequence[Candidate], champion: Candidate | None) -> list[Candidate]:
    """Return the best rule of each of the first `NUM_KNOWN` drafts, and the champion in any case; the order stays.

    Rules of one draft are alike in most of what decides about them: the studies look for better ones.
    """
    of_drafts = {each.draft: each for each in reversed(candidates) if each != champion}
    others = [each for each in candidates if of_drafts.get(each.draft) == each][:NUM_KNOWN]
    return [each for each in candidates if each == champion or each in others]


def _best(retuning: Retuning, settings: WorkerSettings, jobs: Jobs, count: int) -> list[Candidate]:
    """Return the best candidates of the champion's search."""
    whole = placed(
        jobs.request(retuning.champion).config,
        retuning.champion,
        database=settings.database,
        tracking_uri=settings.tracking_uri,
        folder=settings.folder / retuning.champion,
    )
    names = [WARM_START, *whole.study]
    store = StudyStore(settings.database, whole.resolved_experiment())
    try:
        found = [stored.records() for name in names if (stored := store.find(name)) is not None]
    finally:
        store.close()
    best = best_trials([record for records in found for record in records], count)
    return [record.candidate for record in best]


def _has_files(draft: Draft) -> bool:
    return bool(draft.files)


def concluded(
    search: RetunedSearch, outcome: ChampionOutcome | None, run_id: str, settings: WorkerSettings, steps: Steps
) -> ChampionContest:
    """Return how the search has ended for the champion. Promotes the new profile if it is faster and that was asked for.

    Only an alias that is at the champion's profile goes to the new one.
    """
    champion = search.retuning.champion
    if outcome is None or not outcome.wins:
        interval = None if outcome is None else outcome.over_champion
        return ChampionContest(
            champion=champion, over_champion=interval, reason=search.reason or (outcome.reason if outcome else None)
        )
    found = ChampionContest(champion=champion, over_champion=outcome.over_champion)
    if not search.retuning.promote:
        return found

    def promote_it() -> ChampionContest:
        # A worker that was killed here may have promoted it under some names already.
        done = [_address(name) for name in championships(run_id, tracking_uri=settings.tracking_uri)]
        why = (
            f"re-tuned after drift: {outcome.over_champion} times the speed of {champion}, in turns on held-out prompts"
        )
        names = championships(search.champion_run, tracking_uri=settings.tracking_uri)
        try:
            for name in names:
                done.append(
                    promote(
                        run_id,
                        name,
                        why=why,
                        by=SERVICE,
                        tracking_uri=settings.tracking_uri,
                        over_champion=outcome.over_champion,
                    ).address
                )
        except PromotionError as refused:
            return found.model_copy(update={"promoted": done, "reason": str(refused)})
        if not done:
            why_not = "no alias of the registry is at the profile in use: promote it by hand"
            return found.model_copy(update={"reason": why_not})
        return found.model_copy(update={"promoted": done})

    return steps.run("promotion", promote_it, ChampionContest)


def _address(name: str) -> str:
    return f"models:/{name}@champion"
