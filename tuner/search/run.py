"""One search, from configuration to profile: exit heads, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order things happen. What is loaded stands in `tuner.search.task`, what is tried is
decided in `studies`, how
a trial runs in `tuner.search.trials`, how it is measured in `tuner.measuring.paired`, who wins in
`tuner.search.decision`, what is made of it in
`tuner.search.outcome`; this file only passes one's results to the next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from decoding.drafts import compact_indices
from studies.contract import TrialRecord, best_trials
from studies.searches.registry import create_study
from tuner.config import SearchConfig
from tuner.errors import SearchError, TrackingError
from tuner.heads.distill import distil_and_track, of_search
from tuner.heads.found import FoundHead, find_heads
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.decision import confirm, race_best
from tuner.search.outcome import SearchEffort, SearchResult, conclude, save_best_so_far, track_result
from tuner.search.problem import build_problem
from tuner.search.race import Finalist
from tuner.search.storage import StudyStore
from tuner.search.task import Task, open_bench
from tuner.search.trials import Budget, run_study
from tuner.tracking import DatasetInput, Tracker

RUN_ID = "mlflow_run_id"


class InterruptedSearchError(SearchError):
    """The user stopped the search; `best` is the best trial so far and `out` the profile written of it, if one was."""

    def __init__(self, best: TrialRecord | None, out: Path | None) -> None:
        self.best = best
        self.out = out
        super().__init__("interrupted")


def search(task: Task, progress: Progress) -> SearchResult:
    """Distil missing heads, run the studies, race their finalists, confirm the winner on held-out prompts, write and track the
    profile.

    Raises `InterruptedSearchError` when the user stops it (finished trials are on disk, the best so far is written), and
    `SearchError` if no trial of any study could be measured.
    """
    config = task.config
    store = StudyStore(config.storage, config.resolved_experiment())
    tracker = _open_tracker(task, store)
    records: list[TrialRecord] = []
    try:
        heads = _provide_heads(task, progress)
        tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
        ended, expected = _run_studies(task, heads, store, tracker, tuning, records, progress)
        finalists = _race(task, tuning, records, ended, expected, progress)
        held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
        confirmed = confirm(finalists, records, held_out, progress)
        cost = SearchEffort(len(records), store.spent_seconds(config.study), _distillation_seconds(heads))
        result = conclude(task, finalists[0], confirmed, held_out, ended, cost, tracker.run_id)
        result.profile.save(config.out)
        track_result(tracker, result, records, task)
    except KeyboardInterrupt:
        tracker.close("KILLED")
        raise InterruptedSearchError(*save_best_so_far(task, records)) from None
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return result


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


def _provide_heads(task: Task, progress: Progress) -> dict[int, FoundHead]:
    """The heads that the studies want, those that are missing made first if the configuration says so."""
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
    return find_heads(config.heads, [*task.heads, *task.missing_heads], task.model, task.prompts.held_out)


def _run_studies(
    task: Task,
    heads: Mapping[int, FoundHead],
    store: StudyStore,
    tracker: Tracker,
    bench: Bench,
    records: list[TrialRecord],
    progress: Progress,
) -> tuple[dict[str, str], dict[str, float]]:
    """Run the asked studies in order, each knowing the trials of those before it; fills `records`, returns why each ended, and
    what they expect of candidates, by their keys."""
    config = task.config
    indices = bench.indices[: config.samples_per_trial]
    ended: dict[str, str] = {}
    expected: dict[str, float] = {}
    for index, name in enumerate(config.study):
        progress.stage(f"{name}: preparing")
        start = time.perf_counter()
        left = len(config.study) - index
        share = _share_of_time(config, store.spent_seconds(), left)
        problem = build_problem(task, heads, bench, records, share, progress)
        study = create_study(name, problem, config.study_settings(name), store.kept(name))
        stored = store.open(study, task.identity, preparation_seconds=time.perf_counter() - start)
        stored.note(RUN_ID, tracker.run_id)
        share = _share_of_time(config, store.spent_seconds(), left)
        if earlier := stored.records():
            progress.say(f"{name}: {len(earlier)} finished trials found in {store.url}, going on from there")
        records.extend(earlier)
        for record in earlier:
            tracker.log_trial(record)
        progress.stage(name, _expected_trials(task, name))
        progress.advance(len(earlier))

        def keep(record: TrialRecord) -> None:
            records.append(record)
            tracker.log_trial(record)
            best = best_trials(records, 1)
            progress.trial(record, best[0] if best else None)

        _, why = run_study(study, stored, bench, indices, Budget(config.trials, share), keep)
        ended[name] = "; ".join([why, *study.remarks()])
        expected |= study.expected()
        progress.say(f"{name}: {ended[name]}")
    return ended, expected


def _share_of_time(config: SearchConfig, spent_seconds: float, studies_left: int) -> float | None:
    """An equal share of the search time that is left, so that the first study does not take it all."""
    return None if config.timeout is None else max(0.0, config.timeout - spent_seconds) / studies_left


def _expected_trials(task: Task, name: str) -> int:
    """The most trials a study may run, for the progress bar."""
    limits = (task.config.trials, task.config.study_settings(name).max_trials)
    return min(limit for limit in limits if limit is not None)


def _race(
    task: Task,
    bench: Bench,
    records: Sequence[TrialRecord],
    ended: Mapping[str, str],
    expected: Mapping[str, float],
    progress: Progress,
) -> list[Finalist]:
    """The finalists, the fastest first. Raises `SearchError` if no trial could be measured."""
    finalists = race_best(records, ended, bench, task.config, progress, expected)
    if not finalists:
        failures = [f"the last trial said: {record.reason}" for record in records if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in ended.items()])
        raise SearchError(f"no candidate could be measured in {len(records)} trials; {why}")
    return finalists


def _distillation_seconds(heads: Mapping[int, FoundHead]) -> float:
    """What the heads took to make; those of one distillation were trained together."""
    runs = {(head.facts.training.seconds, head.facts.training.steps) for head in heads.values() if head.facts.training}
    return sum(seconds for seconds, _ in runs)


def _run_params(task: Task) -> dict[str, str | int | float | bool | None]:
    """The parent run's parameters: every setting of the search, the device, the versions and the revision."""
    # The two addresses may hold passwords; MLflow knows its own, and the trials are in it too.
    settings = task.config.model_dump(mode="json", exclude={"studies", "storage", "tracking_uri", "distillation"})
    flat = {key: ",".join(value) if isinstance(value, list) else value for key, value in settings.items()}
    return {
        **flat,
        "device_name": device_name(task.target.device),
        "precision": str(task.target.dtype),
        "git_revision": git_revision(Path(__file__).parent),
        **{f"version.{package}": version for package, version in versions().items()},
    }
