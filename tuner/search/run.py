"""One search, from configuration to profile: exit heads, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order of events, and only passes results on: `task` loads, `study_sequence` and `trials` run the
studies, `tuner.measuring.paired` measures, `decision` chooses the winner, and `outcome` writes the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from decoding.drafts import EarlyExit, compact_indices
from studies.contract import TrialRecord
from tuner.config import SearchConfig
from tuner.errors import SearchError, TrackingError
from tuner.heads.distill import distil_and_track, of_search
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.memory import explained_shortage
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.decision import confirm, race_best
from tuner.search.outcome import SearchEffort, SearchResult, conclude, save_best_so_far, track_result
from tuner.search.race import Finalist
from tuner.search.storage import StudyStore
from tuner.search.study_sequence import RUN_ID, StudySequence
from tuner.search.task import Task, open_bench, token_ids
from tuner.tracking import DatasetInput, Tracker

_LESS_TO_SURVEY = (
    "give lower survey_tokens and pool_tokens to the study, or a lower --max-prompt-tokens or --batch-size"
)


class InterruptedSearchError(SearchError):
    """The user stopped the search. `best` is the best trial so far, `out` the unconfirmed profile if one was written."""

    def __init__(self, best: TrialRecord | None, out: Path | None) -> None:
        self.best = best
        self.out = out
        super().__init__("interrupted")


def search(task: Task, progress: Progress) -> SearchResult:
    """Run a whole search: write the profile, track it and return the result.

    Raises `InterruptedSearchError` when the user stops it (finished trials are on disk, the best so far is written), and
    `SearchError` if no trial of any study could be measured.
    """
    config = task.config
    store = StudyStore(config.storage, config.resolved_experiment())
    tracker = _open_tracker(task, store)
    try:
        heads = _provide_heads(task, progress)
        with _decoding("the tuning prompts", config):
            tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
        studies = StudySequence(task, heads, tuning, store, tracker, progress)
        with explained_shortage("choosing what to try", f"{_LESS_TO_SURVEY}; {_kept(config)}"):
            studies.run()
        records = store.records()
        with _decoding("the race", config):
            finalists = _race(task, tuning, records, studies, progress)
        with _decoding("the held-out prompts", config):
            held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
            confirmed = confirm(finalists, records, held_out, progress)
        cost = SearchEffort(
            len(records), store.spent_seconds(config.study), task.head_folder.distillation_seconds(heads)
        )
        result = conclude(task, finalists[0], confirmed, held_out, studies.ended, cost, tracker.run_id)
        result.profile.save(config.out)
        track_result(tracker, result, records, task)
    except KeyboardInterrupt:
        tracker.close("KILLED")
        raise InterruptedSearchError(*save_best_so_far(task, store.records())) from None
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return result


def _decoding(what: str, config: SearchConfig) -> AbstractContextManager[None]:
    """Explain a shortage of memory while decoding `what`."""
    remedy = f"give a lower --batch-size, --max-new-tokens or --max-prompt-tokens; {_kept(config)}"
    return explained_shortage(f"decoding {what}", remedy)


def _kept(config: SearchConfig) -> str:
    return f"finished trials stay in {config.storage}"


def _open_tracker(task: Task, store: StudyStore) -> Tracker:
    config = task.config
    try:
        return Tracker.open(
            config.tracking_uri,
            config.resolved_experiment(),
            run_id=store.noted(RUN_ID),
            params=_run_params(task),
            dataset=DatasetInput(name=config.dataset, fingerprint=task.prompts.fingerprint, source=config.dataset),
        )
    except TrackingError:
        store.discard_if_new()
        raise


def _provide_heads(task: Task, progress: Progress) -> dict[int, EarlyExit]:
    """Return the heads that the studies need, after distilling missing ones if the configuration allows it."""
    config = task.config
    if task.missing_heads and config.distill == "never":
        missing = compact_indices(task.missing_heads)
        progress.say(
            f"no exit head in {config.heads} for exit {missing}: searching without (--distill auto makes them)"
        )
    if not task.missing_heads or config.distill == "never":
        return dict(task.heads)
    work = of_search(config, task.loaded, task.target, task.prompts, progress)
    progress.say(f"distilling exit heads for exit {compact_indices(task.missing_heads)} into {config.heads} first")
    distil_and_track(work, task.missing_heads, config, progress)
    exits = [*task.heads, *task.missing_heads]
    return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))


def _race(
    task: Task, bench: Bench, records: Sequence[TrialRecord], studies: StudySequence, progress: Progress
) -> list[Finalist]:
    """Return the finalists, the fastest first. Raises `SearchError` if no trial could be measured."""
    finalists = race_best(records, studies.ended, bench, task.config, progress, studies.expected)
    if not finalists:
        failures = [f"the last failure: {record.reason}" for record in records if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in studies.ended.items()])
        raise SearchError(f"no candidate could be measured in {len(records)} trials; {why}")
    return finalists


def _run_params(task: Task) -> dict[str, str | int | float | bool | None]:
    """Return the parent run's parameters: every setting of the search, the device, the versions and the revision."""
    # Both addresses may hold passwords.
    settings = task.config.model_dump(mode="json", exclude={"studies", "storage", "tracking_uri", "distillation"})
    flat = {key: ",".join(value) if isinstance(value, list) else value for key, value in settings.items()}
    return {
        **flat,
        "device_name": device_name(task.target.device),
        "precision": str(task.target.dtype),
        "git_revision": git_revision(Path(__file__).parent),
        **{f"version.{package}": version for package, version in versions().items()},
    }
