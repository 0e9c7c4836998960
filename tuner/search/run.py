"""One search, from configuration to profile: exit heads, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order of events, and only passes results on: `task` loads, `study_trials` runs the studies,
`tuner.measuring.paired` measures, `decision` chooses the winner, and `outcome` writes the profile. Several processes may run the
same search on one storage: each runs trials, and the one that is first at their end does the rest, under a lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from studies.measurement import Measurement
from tuner.config import FEWEST_SAMPLES, SearchConfig
from tuner.errors import SearchError, TrackingError, without_password
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.memory import explained_shortage
from tuner.inputs.prompts import Prompt
from tuner.measuring.baseline import measure_pulse
from tuner.measuring.machine import wait_until_quiet
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.review.verdict import verdict
from tuner.search.budget import PAIRED, PLAIN_SHARE, WRITING_SECONDS, End, enough, halved
from tuner.search.decision import Confirmed, blocks, confirm, objection, race_best, to_confirm
from tuner.search.finished import Confirmations, earlier_race, finished_result, keep_result
from tuner.search.heat import HEAT, least_candidates
from tuner.search.in_engine import EngineArena, arena
from tuner.search.missing_heads import distillation_seconds, provide_heads
from tuner.search.outcome import SearchEffort, SearchResult, conclude, save_best_so_far, track_result
from tuner.search.race import LAP, Finalist
from tuner.search.reviewing import NUM_TEXTS, review_of, track_review, written_texts
from tuner.search.stock import LATER, StockOutcome, compare_with_stock
from tuner.search.storage import FAILURES, StudyStore, unusable
from tuner.search.study_trials import RUN_ID, StudyRuns
from tuner.search.task import Task, open_bench
from tuner.stage_clock import Stage, StageClock, spoken
from tuner.tracking import DatasetInput, Tracker

SHORTEST = "the shortest search with a result (one trial)"
LEAST_HELD_OUT = 6
"""Held-out prompts, or batches, on which a speed-up is confirmed at least: with fewer an interval says little."""
LEAST_FINALISTS = 2
MOST_STOCK = 6
"""Held-out prompts, or batches, on which stock generation is compared at most."""
MOST_WAITED = 6 * 3600.0
"""Seconds to wait for a process that ends the search, if it has no timeout."""
_LESS_TO_SURVEY = "give lower survey_tokens and pool_tokens to the study, or a lower max_prompt_tokens or --batch-size"


class InterruptedSearchError(SearchError):
    """The user stopped the search. `best` is the best trial so far, `out` the unconfirmed profile if one was written."""

    def __init__(self, best: TrialRecord | None, out: Path | None) -> None:
        self.best = best
        self.out = out
        super().__init__("interrupted")


def search(task: Task, progress: Progress) -> SearchResult:
    """Run a whole search, or join the processes that run it: write the profile, track it and return the result.

    Raises `InterruptedSearchError` when the user stops it (finished trials are on disk, the best so far is written),
    `StorageError` if the storage fails or holds another search, and `SearchError` if no trial of any study could be measured.
    """
    clock = task.budget.clock
    with clock.stage(Stage.WRITING):
        store = StudyStore(task.config.storage, task.config.resolved_experiment())
    try:
        # Before anything is decoded, and before the run of another search is opened.
        store.check_identity(task.identity)
        with store.lock(_patience(task)):
            if (finished := finished_result(store, task.settings)) is not None:
                return _shown(task, *finished, progress)
            with clock.stage(Stage.WRITING):
                tracker = _open_tracker(task, store)
        return _tracked(task, store, tracker, progress)
    except FAILURES as cause:
        raise unusable(task.config.storage, cause) from None
    except TrackingError:
        with suppress(*FAILURES):  # of the two stores that fail, the first one is told
            store.discard_if_new()
        raise
    finally:
        store.close()


def _tracked(task: Task, store: StudyStore, tracker: Tracker, progress: Progress) -> SearchResult:
    """Run a search whose run in MLflow is open, and close that."""
    try:
        result = _searched(task, store, tracker, progress)
        tracker.log_figures(_stage_figures(task.budget.clock), {})
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


def _searched(task: Task, store: StudyStore, tracker: Tracker, progress: Progress) -> SearchResult:
    """Run the stages that every process runs, and the end of the search, unless another process was first."""
    config, clock, budget = task.config, task.budget.clock, task.budget
    if config.wait_quiet is not None:
        progress.stage("waiting until other work uses little of the processors")
        with clock.stage(Stage.WAITING):
            if not wait_until_quiet(config.wait_quiet):
                progress.say(f"the machine was not quiet within {spoken(config.wait_quiet)}: measuring all the same")
    with clock.stage(Stage.PLAIN), _decoding("a tuning prompt", config):
        heads_seconds = plan(task)
    budget.check(_least_seconds(task), SHORTEST)
    with store.lock():
        heads = provide_heads(task, heads_seconds, progress)
    budget.check(_least_seconds(task), SHORTEST)
    for line in plan_lines(task):
        progress.say(line)
    with clock.stage(Stage.PLAIN), _decoding("the tuning prompts", config):
        before = clock.elapsed
        tuning = open_bench(task, _tuning_prompts(task), "decoding the tuning prompts plainly", progress)
        budget.plain = (clock.elapsed - before) / max(1, len(tuning.indices))
    studies = StudyRuns(task, heads, tuning, store, tracker, progress)
    try:
        with explained_shortage("choosing what to try", f"{_LESS_TO_SURVEY}; {_kept(config)}"):
            studies.run()
        with store.lock(_patience(task)):
            if (finished := finished_result(store, task.settings)) is not None:
                return _shown(task, *finished, progress)
            return _ended(task, store, tracker, progress, studies)
    finally:
        studies.note_time()


def _ended(task: Task, store: StudyStore, tracker: Tracker, progress: Progress, studies: StudyRuns) -> SearchResult:
    """Race the finalists of all trials, confirm the best, write the profile and keep the result. One process does this."""
    config, clock = task.config, task.budget.clock
    records, confirmations = store.records(), Confirmations(store)
    with clock.stage(Stage.WRITING):
        tracker.log_missing(records)
    with arena(task, studies.bench, progress) as engine:
        with _decoding("the race", config):
            finalists = earlier_race(store, len(records)) or _race(task, records, studies, progress, engine)
        with _decoding("the held-out prompts", config):
            confirmed, held_out = _confirmed(task, finalists, records, confirmations, progress, engine)
            winner, best = finalists[0], confirmed[0]
            task.watch.look()
            noise = task.watch.noise(blocks(records, finalists), best.measurement)
            candidate, busy = winner.trial.candidate, bool(noise.disturbances)
            refused = objection(candidate, winner.measurement, best.measurement, busy=busy)
            stock = _compared(task, winner, refused, best.measurement, held_out, progress)
        facts = None if engine is None else engine.facts(None if refused else candidate)
    heads = task.head_folder.distillation_seconds(studies.heads, feature_head=task.feature_draft is not None)
    cost = SearchEffort(len(records), store.spent_seconds(config.study), heads)
    with clock.stage(Stage.WRITING):
        count = confirmations.count(candidate)
        if count > 1:
            task.budget.cuts.append(
                f"winner number {count} that this search confirmed on the same held-out prompts: a speed-up is found by chance "
                f"up to {count} times as often as its interval says"
            )
        result = conclude(
            task,
            winner,
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
        result.profile.save(config.out)
        track_result(tracker, result, records, task)
        result = replace(
            result,
            race=tuple(each for each in finalists if each.measurement.samples),
            candidates=tuple(confirmed),
            texts=written_texts(task, candidate, result.confirmed, held_out),
            cuts=tuple(task.budget.cuts),
        )
        review = review_of(task, result, records, tracker.run_id)
        track_review(tracker, review, records, task)
    result = replace(result, stages=clock.seconds(), verdict=verdict(review), address=tracker.address)
    store.close_trials()
    keep_result(store, task.settings, result)
    return result


def _shown(task: Task, result: SearchResult, finished: str, progress: Progress) -> SearchResult:
    """Write the profile of a finished search, and return its result. Nothing is measured.

    A second race and confirmation on the same prompts would let a user repeat the search until its result pleases.
    """
    progress.say(
        f"finished {finished} UTC; its result stands. A higher --trials or --timeout goes on from it, sdtune bench measures the "
        "profile again, and another --experiment searches anew"
    )
    task.head_folder.copy_beside(result.profile.draft, task.config.out)
    result.profile.save(task.config.out)
    return result


def plan(task: Task) -> float | None:
    """Measure the rate of plain decoding for a moment, and set what the search needs of its time.

    Returns the expected seconds of distilling missing heads, None if there is nothing to distil.
    """
    config, budget = task.config, task.budget
    prompts = [prompt.token_ids for prompt in task.prompts.tuning]
    pulse = measure_pulse(task.target, prompts, max_new_tokens=config.max_new_tokens, num_sequences=config.batch_size)
    budget.plain = pulse.prefill_seconds + pulse.token_seconds * (config.max_new_tokens - 1)
    size = config.batch_size
    tuning, held_out = config.tuning_prompts // size, config.held_out_prompts // size
    raced = max(tuning - config.samples_per_trial, min(tuning, FEWEST_SAMPLES))
    beside = max(WRITING_SECONDS, budget.clock.seconds().get(Stage.WRITING, 0.0)) + NUM_TEXTS / size * budget.plain
    if task.deployment is not None:
        start = task.deployment.program.usual_start_seconds
        in_heat = least_candidates(task.deployment.program)
        beside += start + in_heat * (start + PAIRED * budget.plain * HEAT)
    stock = min(MOST_STOCK, held_out) if config.stock else 0
    budget.end = End(config.finalists, raced, len(config.study), held_out, stock, beside)
    finalists = min(config.finalists, LEAST_FINALISTS)
    budget.least = End(finalists, min(LAP, raced), 1, min(LEAST_HELD_OUT, held_out), 0, beside)
    return distillation_seconds(task, pulse)


def plan_lines(task: Task) -> list[str]:
    """Return the plan of a search in words."""
    budget, config = task.budget, task.config
    each, end = budget.trial_seconds(config.samples_per_trial), budget.end.seconds(budget.plain)
    if budget.timeout is None:
        return [f"no --timeout (estimate): {spoken(each)} a trial, {spoken(end)} for race, confirmation and results"]
    before = f", {spoken(budget.spent_before)} of them by earlier runs" if budget.spent_before else ""
    on_top = f"; {spoken(budget.on_top)} of distilling came on top" if budget.on_top else ""
    trials = budget.left_for_trials
    lines = [
        f"--timeout {spoken(budget.timeout)} for everything (estimate): {spoken(budget.spent)} are spent{before}{on_top}; to come: "
        f"{spoken(trials)} for trials, {spoken(each)} each, then {spoken(budget.left - trials)} for race, confirmation and results"
    ]
    needed = _least_seconds(task)
    if needed > budget.left:
        lines.append(
            f"too short: {SHORTEST} takes about {spoken(needed)} (give a --timeout of {enough(budget.spent + needed)})"
        )
    return lines


def _least_seconds(task: Task) -> float:
    """Return the seconds of the shortest search with a result."""
    budget, config = task.budget, task.config
    tuning = min(budget.end.raced, LAP) + config.samples_per_trial
    return tuning * budget.plain + budget.trial_seconds(config.samples_per_trial) + budget.least.seconds(budget.plain)


def _tuning_prompts(task: Task) -> Sequence[Prompt]:
    """Return the tuning prompts, or as many of them as can be decoded in their share of the time."""
    config, budget, size = task.config, task.budget, task.config.batch_size
    tuning = config.tuning_prompts // size
    count = halved(tuning, min(tuning, config.samples_per_trial + LAP), budget.plain, PLAIN_SHARE * budget.left)
    budget.cut("tuned", count, tuning, f"tuning {_unit(config)}")
    budget.end = replace(budget.end, raced=max(count - config.samples_per_trial, min(count, FEWEST_SAMPLES)))
    return _first(task.prompts.tuning, count, tuning, size)


def _first(prompts: Sequence[Prompt], count: int, wanted: int, size: int) -> Sequence[Prompt]:
    """Return the prompts of the first `count` samples; all of them, also those that fill no batch, if no sample is cut."""
    return prompts if count == wanted else prompts[: count * size]


def _race(
    task: Task, records: Sequence[TrialRecord], studies: StudyRuns, progress: Progress, engine: EngineArena | None
) -> list[Finalist]:
    """Return the finalists, the fastest first. Raises `SearchError` if no trial could be measured."""
    budget, config = task.budget, task.config
    if (plain := _plain_winner(task, records)) is not None and (late := _out_of_time(task)):
        budget.cuts.append(f"no trial was finished in time{late}")
        return [plain]
    end = budget.fitted()
    after = replace(end, finalists=0).seconds(budget.plain)
    config = config.model_copy(update={"finalists": end.finalists})
    may_go_on = budget.pace(keep=after)
    with budget.clock.stage(Stage.RACE):
        if engine is None:
            finalists = race_best(
                records, studies.ended, studies.bench, config, progress, studies.expected, may_go_on=may_go_on
            )
        else:
            in_engine = engine.bench(studies.bench)
            lap = PAIRED * budget.plain * LAP * end.finalists
            enter = partial(
                engine.entrants,
                count=end.finalists,
                bench=in_engine,
                may_go_on=budget.pace(keep=after + lap),
                progress=progress,
            )
            finalists = race_best(
                records, studies.ended, in_engine, config, progress, studies.expected, may_go_on=may_go_on, enter=enter
            )
    if not finalists:
        failures = [f"the last failure: {record.reason}" for record in records if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in studies.ended.items()])
        raise SearchError(f"no candidate could be measured in {len(records)} trials; {why}{_out_of_time(task)}")
    return finalists


def _plain_winner(task: Task, records: Sequence[TrialRecord]) -> Finalist | None:
    """Return plain decoding as the winner of a search whose time ended before any trial; None if there was another reason."""
    failed = any(record.state is TrialState.FAIL for record in records)
    if task.budget.timeout is None or task.deployment is not None or failed or best_trials(records, 1):
        return None
    plain = Candidate(draft=PlainDecoding(), draft_length=Fixed())
    trial = TrialRecord(study="plain", number=0, state=TrialState.COMPLETE, candidate=plain)
    return Finalist(trial, Measurement(samples=()))


def _out_of_time(task: Task) -> str:
    """Return where the time went and how to go on, if it is the time that has run out."""
    timeout = task.config.timeout
    if timeout is None or task.budget.left > timeout / 2:
        return ""
    return f" ({task.budget.where_it_went()}): --timeout {enough(2 * timeout)} goes on from what is stored"


def _confirmed(
    task: Task,
    finalists: list[Finalist],
    records: Sequence[TrialRecord],
    confirmations: Confirmations,
    progress: Progress,
    engine: EngineArena | None,
) -> tuple[list[Confirmed], Bench]:
    """Return the winner and its rivals measured on held-out prompts, and the bench of these."""
    budget, config = task.budget, task.config
    wanted = config.held_out_prompts // config.batch_size
    end = budget.fitted(finalists=0, confirmed=len(to_confirm(finalists, records)))
    after = replace(end, held_out=0).seconds(budget.plain)
    with budget.clock.stage(Stage.PLAIN):
        prompts = _first(task.prompts.held_out, end.held_out, wanted, config.batch_size)
        held_out = open_bench(task, prompts, "decoding the held-out prompts plainly", progress)

    def pacer(num_left: int) -> Callable[[], bool] | None:
        """Give each candidate an equal share of what is left; None if that is nothing."""
        left = budget.left - after
        if left < PAIRED * budget.plain * budget.least.held_out:
            return None
        return budget.pace(keep=budget.left - left / num_left)

    with budget.clock.stage(Stage.CONFIRMATION):
        measuring = held_out if engine is None else engine.bench(held_out)
        known = dict(confirmations.known)
        confirmed = confirm(
            finalists,
            records,
            measuring,
            progress,
            pacer,
            least=budget.least.held_out,
            known=known,
            keep=confirmations.keep,
        )
    winner, *rivals = [(each.label, len(each.measurement.samples)) for each in confirmed]
    budget.cut(
        "confirmed", winner[1], wanted if end.held_out < wanted else len(held_out.indices), f"held-out {_unit(config)}"
    )
    if fewer := [f"{label} on {count}" for label, count in rivals if count < winner[1]]:
        budget.cuts.append(
            f"compared on fewer than the winner's {winner[1]} held-out {_unit(config)}: {', '.join(fewer)}"
        )
    if (earlier := known.get(confirmed[0].trial.candidate.key)) is not None:
        budget.cuts.append(
            f"earlier runs of this search measured the winner on {len(earlier.samples)} of its {winner[1]} held-out prompts: "
            "both are pooled"
        )
    return confirmed, held_out


def _compared(
    task: Task, winner: Finalist, refused: str | None, measured: Measurement, held_out: Bench, progress: Progress
) -> StockOutcome:
    """Return the comparison of the profile to come with stock generation, or why there is none."""
    budget = task.budget
    if not task.config.stock:
        return StockOutcome(reason=f"declined by stock: false; {LATER}")
    if task.config.deploy_to is not None:
        return StockOutcome(reason=f"the profile is for {task.config.deploy_to}, which was measured itself")
    end = budget.fitted(finalists=0, held_out=0, stock=min(budget.end.stock, len(held_out.indices)))
    profile = None if refused else winner.trial.candidate
    with budget.clock.stage(Stage.STOCK):
        return compare_with_stock(task, profile, held_out, end.stock, progress, budget.pace(keep=end.beside))


def _patience(task: Task) -> float:
    """Return the seconds to wait for a process that ends the search, which ends by its own timeout."""
    return MOST_WAITED if task.config.timeout is None else task.config.timeout


def _unit(config: SearchConfig) -> str:
    return "prompts" if config.batch_size == 1 else "batches"


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
