"""A search that is run again because the profile in use has lost its speed-up: warm start, champion and promotion.

What production reports has no texts, so no round of it can be replayed: the search is warm-started by candidates alone, and all of
them are measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoding.drafts import Draft
from studies.contract import Candidate, best_trials
from tuner.config import SearchConfig
from tuner.errors import PromotionError, SearchError
from tuner.registry import championships, promote
from tuner.search.champion import ChampionOutcome
from tuner.search.steps import Steps
from tuner.search.storage import StudyStore
from tuner.service.admission import placed
from tuner.service.contract import ChampionContest, Retuning
from tuner.service.jobs import Jobs

if TYPE_CHECKING:
    from tuner.service.worker import WorkerSettings

NUM_KNOWN = 5
"""Best trials of the earlier search that are measured first, beside the champion."""
WARM_START = "warm_start"
SERVICE = "sdtune service"


@dataclass(frozen=True)
class RetunedSearch:
    """What a search that is run again knows of the one before."""

    retuning: Retuning
    config: dict[str, Any]
    """The configuration with the warm start before its studies."""
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
        for each in [champion, *_best(retuning, settings, jobs)]
        if retuning.has_same_data or not _has_files(each.draft)
    ]
    candidates = list({each.key: each for each in usable}.values())
    reason = None
    if champion not in usable:
        reason = "the champion drafts with a trained head, and the data set has changed: compare them by hand"
    whole = SearchConfig.model_validate(config)
    studies = dict(config.get("studies") or {})
    names = [name for name in whole.study if name != WARM_START]
    if candidates:
        names = [WARM_START, *names]
        studies[WARM_START] = {"candidates": [each.model_dump(mode="json") for each in candidates]}
    return RetunedSearch(
        retuning,
        {**config, "study": names, "studies": studies},
        champion if reason is None else None,
        known.mlflow_run,
        reason,
    )


def _best(retuning: Retuning, settings: WorkerSettings, jobs: Jobs) -> list[Candidate]:
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
    best = best_trials([record for records in found for record in records], NUM_KNOWN)
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
