"""One search, from configuration to profile: exit heads, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order of events, and only passes results on: `task` loads, `study_sequence` and `trials` run the
studies, `tuner.measuring.paired` measures, `decision` chooses the winner, and `outcome` writes the profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from decoding.profile import EngineFacts
from studies.contract import TrialRecord, best_trials
from tuner.addresses import without_password
from tuner.config import SearchConfig
from tuner.errors import SearchError, TrackingError
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.memory import explained_shortage
from tuner.leases.table import Lease
from tuner.measuring.machine import MachineNoise, wait_until_quiet
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.review.verdict import verdict
from tuner.search.decision import Confirmed, blocks, confirm, objection, race_best, to_confirm
from tuner.search.finished import Confirmations, earlier_race, finished_result, keep_result
from tuner.search.forecast import forecast
from tuner.search.in_engine import EngineArena, arena
from tuner.search.missing_heads import provide_heads
from tuner.search.outcome import SearchEffort, SearchResult, conclude, save_best_so_far, track_result
from tuner.search.race import Finalist
from tuner.search.reviewing import review_of, track_review, written_texts
from tuner.search.stand_in import measure_lookup, plain_winner
from tuner.search.steps import Steps, UnsavedSteps
from tuner.search.stock import LATER, StockOutcome, compare_with_stock
from tuner.search.storage import FAILURES, StudyStore, unusable
from tuner.search.study_sequence import RUN_ID, StudySequence
from tuner.search.task import Task, open_bench
from tuner.search.time_budget import enough
from tuner.search.time_keeper import SHORTEST, TimeKeeper, missing_time
from tuner.stage_clock import Stage, StageClock, spoken
from tuner.tracking import DatasetInput, Tracker

_LESS_TO_SURVEY = "give lower survey_tokens and pool_tokens to the study, or a lower max_prompt_tokens or --batch-size"


class InterruptedSearchError(SearchError):
    """The user stopped the search. `best` is the best trial so far, `out` the unconfirmed profile if one was written."""

    def __init__(self, best: TrialRecord | None, out: Path | None) -> None:
        self.best = best
        self.out = out
        super().__init__("interrupted")


def search(
    task: Task,
    progress: Progress,
    *,
    steps: Steps | None = None,
    patience: float = 0.0,
) -> SearchResult:
    """Run a whole search: write the profile, track it and return the result.

    `steps` may know the results of steps that another process finished. `patience` is the number of seconds to wait for another
    process that works on the same search.

    Raises `InterruptedSearchError` when the user stops it (finished trials are on disk, the best so far is written),
    `StorageError` if another process works on the same search or the storage fails, and `SearchError` if no trial of any study
    could be measured.
    """
    with task.budget.clock.stage(Stage.WRITING):
        store = StudyStore(task.config.storage, task.config.resolved_experiment())
        lease = store.exclusive(patience)
    try:
        with lease:
            return _tracked(task, store, lease, progress, steps or UnsavedSteps())
    except FAILURES as cause:
        raise unusable(task.config.storage, cause) from None
    except TrackingError:
        with suppress(*FAILURES):  # of the two stores that fail, the first one is told
            store.discard_if_new()
        raise
    finally:
        store.close()


def _tracked(task: Task, store: StudyStore, lease: Lease, progress: Progress, steps: Steps) -> SearchResult:
    """Run a search that no other process works on."""
    store.check_identity(task.identity)  # before anything is decoded, and before the run of another search is opened
    if (finished := finished_result(store, task.settings)) is not None:
        return _shown_again(task, *finished, progress)
    clock = task.budget.clock
    with clock.stage(Stage.WRITING):
        tracker = _open_tracker(task, store)
    try:
        result = _searched(task, store, lease, tracker, progress, steps)
        tracker.log_figures(_stage_figures(clock), {})
    except KeyboardInterrupt:
        with suppress(TrackingError):  # the user wants to know what is best so far
            tracker.close("KILLED")
        raise InterruptedSearchError(*save_best_so_far(task, store.records())) from None
    except BaseException:
        with suppress(TrackingError):  # the failure that came first is told
            tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return result


def _shown_again(task: Task, result: SearchResult, finished: str, progress: Progress) -> SearchResult:
    """Write the profile of an earlier run of the same command again, and return its result. Nothing is measured.

    A second race and confirmation on the same prompts would let a user repeat the search until its result pleases.
    """
    progress.say(
        f"finished {finished} UTC; its result stands. A higher --trials or --timeout goes on from it, sdtune bench measures the "
        "profile again, and another --experiment searches anew"
    )
    task.head_folder.copy_beside(result.profile.draft, task.config.out)
    result.profile.save(task.config.out)
    return result


def _searched(
    task: Task, store: StudyStore, lease: Lease, tracker: Tracker, progress: Progress, steps: Steps
) -> SearchResult:
    """Run all stages between the opened stores and the profile."""
    config, clock = task.config, task.budget.clock
    if config.wait_quiet is not None:
        progress.stage("waiting until other work uses little of the processors")
        with clock.stage(Stage.WAITING):
            if not wait_until_quiet(config.wait_quiet):
                progress.say(f"the machine was not quiet within {spoken(config.wait_quiet)}: measuring all the same")
    with clock.stage(Stage.PLAIN), _decoding("a tuning prompt", config):
        found = forecast(task)
    task.budget.check(found.least, SHORTEST)
    heads = provide_heads(task, found.distillation, progress)
    keeper = TimeKeeper(task, found)
    keeper.begin(progress)
    before = clock.elapsed
    with clock.stage(Stage.PLAIN), _decoding("the tuning prompts", config):
        tuning = open_bench(task, keeper.tuning_prompts(), "decoding the tuning prompts plainly", progress)
    reserve = keeper.learn(tuning, clock.elapsed - before)
    with clock.stage(Stage.TRIALS), _decoding("the tuning prompts", config):
        lookup = measure_lookup(task, keeper.plan, store.records(), tuning, progress)
    studies = StudySequence(task, heads, tuning, store, tracker, progress, reserve)
    try:
        with explained_shortage("choosing what to try", f"{_LESS_TO_SURVEY}; {_kept(config)}"):
            studies.run(steps)
        records, confirmations = store.records(), Confirmations(store)
        if lookup is not None and not best_trials(records, 1):
            records = [*records, lookup]
            tracker.log_trial(lookup)
        with arena(task, tuning, progress) as engine:
            with _decoding("the race", config):
                race_them = partial(_race, task, tuning, records, studies, keeper, progress, engine)
                raced = earlier_race(store, len(records))
                finalists = steps.run("race", (lambda: raced) if raced else race_them, list[Finalist])
            with _decoding("the held-out prompts", config):
                confirmed, held_out = _confirmed(
                    task, finalists, records, confirmations, keeper, progress, steps, engine
                )
                task.watch.look()
                noise = task.watch.noise(blocks(records, finalists), confirmed[0].measurement)
                refused = _objection(finalists[0], confirmed, noise)
                stock = _compared(task, finalists[0], refused, confirmed, held_out, keeper, progress, steps)
            facts = None
            if engine is not None:
                candidate = None if refused else finalists[0].trial.candidate
                facts = steps.run("engine", partial(engine.facts, candidate), EngineFacts)
    finally:
        studies.note_time()
    distilling = task.head_folder.distillation_seconds(heads, feature_head=task.feature_draft is not None)
    cost = SearchEffort(len(records), store.spent_seconds(config.study), distilling)
    with clock.stage(Stage.WRITING):
        count = confirmations.count(finalists[0].trial.candidate)
        if count > 1:
            keeper.cuts.append(
                f"winner number {count} that this search confirmed on the same held-out prompts: a speed-up is found by chance "
                f"up to {count} times as often as its interval says"
            )
        result = conclude(
            task,
            finalists[0],
            refused,
            noise,
            confirmed,
            stock,
            studies.ended,
            cost,
            tracker.run_id,
            engine=facts,
            confirmations=count,
        )
        lease.check()  # before the profile of a search that stood still replaces that of its successor
        result.profile.save(config.out)
        track_result(tracker, result, records, task)
        texts = written_texts(task, finalists[0].trial.candidate, result.confirmed, held_out)
        result = replace(
            result,
            race=tuple(each for each in finalists if each.measurement.samples),
            candidates=tuple(confirmed),
            texts=texts,
            cuts=tuple(keeper.cuts),
        )
        review = review_of(task, result, records, tracker.run_id)
        track_review(tracker, review, records, task)
    result = replace(result, stages=clock.seconds(), verdict=verdict(review), address=tracker.address)
    keep_result(store, task.settings, result)
    return result


def _confirmed(
    task: Task,
    finalists: list[Finalist],
    records: Sequence[TrialRecord],
    confirmations: Confirmations,
    keeper: TimeKeeper,
    progress: Progress,
    steps: Steps,
    engine: EngineArena | None,
) -> tuple[list[Confirmed], Bench]:
    """Return the winner and its rivals measured on held-out prompts, and the bench of these."""
    clock = task.budget.clock
    prompts = keeper.held_out_prompts(finalists, len(to_confirm(finalists, records)))
    with clock.stage(Stage.PLAIN):
        held_out = open_bench(task, prompts, "decoding the held-out prompts plainly", progress)
    with clock.stage(Stage.CONFIRMATION):
        pacer, least = keeper.confirmation_pacer, keeper.least_held_out
        measuring = held_out if engine is None else engine.bench(held_out)
        known, keep = dict(confirmations.known), confirmations.keep
        confirm_them = partial(
            confirm, finalists, records, measuring, progress, pacer, least=least, known=known, keep=keep
        )
        confirmed = steps.run("confirmation", confirm_them, list[Confirmed])
    keeper.note_confirmed(confirmed, held_out)
    if (earlier := known.get(confirmed[0].trial.candidate.key)) is not None:
        keeper.cuts.append(
            f"earlier runs of this search measured the winner on {len(earlier.samples)} of its "
            f"{len(confirmed[0].measurement.samples)} held-out prompts: both are pooled"
        )
    return confirmed, held_out


def _objection(winner: Finalist, confirmed: Sequence[Confirmed], noise: MachineNoise) -> str | None:
    """Return why no speed-up is claimed for the winner, or None if one is."""
    return objection(
        winner.trial.candidate, winner.measurement, confirmed[0].measurement, busy=bool(noise.disturbances)
    )


def _compared(
    task: Task,
    winner: Finalist,
    refused: str | None,
    confirmed: Sequence[Confirmed],
    held_out: Bench,
    keeper: TimeKeeper,
    progress: Progress,
    steps: Steps,
) -> StockOutcome:
    """Return the comparison of the profile to come with stock generation, or why there is none."""
    if not task.config.stock:
        return StockOutcome(reason=f"declined by stock: false; {LATER}")
    if task.config.deploy_to is not None:
        return StockOutcome(reason=f"the profile is for {task.config.deploy_to}, which was measured itself")
    count = keeper.num_stock(confirmed[0].measurement, len(held_out.indices))

    def compare_them() -> StockOutcome:
        profile = None if refused else winner.trial.candidate
        return compare_with_stock(task, profile, held_out, count, progress, keeper.stock_pace())

    with task.budget.clock.stage(Stage.STOCK):
        return steps.run("stock", compare_them, StockOutcome)


def _stage_figures(clock: StageClock) -> dict[str, float]:
    """Return the seconds of each stage as figures for MLflow."""
    stages = {f"seconds/{stage.name.lower()}": seconds for stage, seconds in clock.seconds().items()}
    return {**stages, "seconds/total": clock.elapsed}


def _decoding(what: str, config: SearchConfig) -> AbstractContextManager[None]:
    """Explain a shortage of memory while decoding `what`."""
    remedy = f"give a lower --batch-size, --max-new-tokens or max_prompt_tokens; {_kept(config)}"
    return explained_shortage(f"decoding {what}", remedy)


def _kept(config: SearchConfig) -> str:
    return f"finished trials stay in {without_password(config.storage)}"


def _open_tracker(task: Task, store: StudyStore) -> Tracker:
    config = task.config
    return Tracker.open(
        config.tracking_uri,
        config.resolved_experiment(),
        run_id=store.noted(RUN_ID),
        params=_run_params(task),
        dataset=DatasetInput(name=config.dataset, fingerprint=task.prompts.fingerprint, source=config.dataset),
        identity=_run_identity(task),
    )


def _run_identity(task: Task) -> str:
    """Return what finds the run of a search that was killed before it stored a study, which names the run."""
    whole = {**task.identity, "storage": task.config.storage}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _race(
    task: Task,
    bench: Bench,
    records: Sequence[TrialRecord],
    studies: StudySequence,
    keeper: TimeKeeper,
    progress: Progress,
    engine: EngineArena | None,
) -> list[Finalist]:
    """Return the finalists, the fastest first. Raises `SearchError` if no trial could be measured."""
    best = best_trials(records, task.config.finalists, expected=studies.expected)
    if (plain := plain_winner(task, records)) is not None and (late := _out_of_time(task)):
        keeper.cuts.append(f"no trial was finished in time{late}")
        return [plain]
    end = keeper.plan_race(best, num_confirmed=len(task.config.study))
    config = task.config.model_copy(update={"finalists": end.finalists})
    pace = keeper.race_pace(end)
    with task.budget.clock.stage(Stage.RACE):
        if engine is None:
            finalists = race_best(records, studies.ended, bench, config, progress, studies.expected, may_go_on=pace)
        else:
            in_engine = engine.bench(bench)
            in_heat = keeper.heat_pace(end)
            enter = partial(engine.entrants, count=end.finalists, bench=in_engine, may_go_on=in_heat, progress=progress)
            finalists = race_best(
                records, studies.ended, in_engine, config, progress, studies.expected, may_go_on=pace, enter=enter
            )
    if not finalists:
        failures = [f"the last failure: {record.reason}" for record in records if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in studies.ended.items()])
        raise SearchError(f"no candidate could be measured in {len(records)} trials; {why}{_out_of_time(task)}")
    return finalists


def _out_of_time(task: Task) -> str:
    """Return where the time went and how to go on, if it is the time that has run out."""
    timeout = task.config.timeout
    if timeout is None or task.budget.left > timeout / 2:
        return ""
    return f" ({missing_time(task)}): --timeout {enough(2 * timeout)} goes on from what is stored"


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
