"""One search, from configuration to profile: exit heads, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order of events, and only passes results on: `task` loads, `study_trials` runs the studies, `race` and
`decision` choose the winner, `outcome` writes the profile, and `budget` tells what there is time for. Several processes may run the
same search on one storage: each runs trials, and the one that is first at their end does the rest, under a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from decoding.profile import SearchCost
from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from tuner.config import SearchConfig
from tuner.errors import SearchError, TrackingError, without_password
from tuner.inputs.memory import explained_shortage
from tuner.measuring.baseline import FEWEST_DECODED, measure_pulse, most_known_bytes
from tuner.measuring.paired import Bench
from tuner.measuring.turns import Measuring
from tuner.progress import Progress
from tuner.results import Provenance
from tuner.review.document import MeasuredCandidate, SearchResult, StockComparison
from tuner.search.budget import PAIRED, SHORTEST, WARMED, WRITING_SECONDS, Seconds
from tuner.search.decision import Confirmations, blocks, confirm, note_cuts, objection, to_confirm
from tuner.search.engine import EngineArena, arena, heat_seconds
from tuner.search.missing_heads import distillation_seconds, provide_heads
from tuner.search.outcome import (
    command_line,
    earlier_race,
    finished_result,
    head_cautions,
    keep_result,
    open_tracker,
    profile_of,
    save_best_so_far,
    track_result,
)
from tuner.search.race import LAP, race, shortlist, unseen_by_trials
from tuner.search.stock import LATER, compare_with_stock
from tuner.search.storage import FAILURES, LOGGING, StudyStore, unusable
from tuner.search.study_trials import StudyRuns
from tuner.search.task import Task, open_bench
from tuner.stage_clock import Stage
from tuner.tracking import Tracker

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
                tracker = open_tracker(task, store)
        with _closing(tracker, task, store):
            return _searched(task, store, tracker, progress)
    except FAILURES as cause:
        raise unusable(task.config.storage, cause) from None
    except TrackingError:
        with suppress(*FAILURES):  # of the two stores that fail, the first one is told
            store.discard_if_new()
        raise
    finally:
        store.close()


@contextmanager
def _closing(tracker: Tracker, task: Task, store: StudyStore) -> Iterator[None]:
    """Close the run of a search in MLflow when the context ends, by how it ends."""
    clock = task.budget.clock
    try:
        yield
        stages = {f"seconds/{stage.name.lower()}": seconds for stage, seconds in clock.seconds().items()}
        tracker.log_figures({**stages, "seconds/total": clock.elapsed}, {})
    except KeyboardInterrupt:
        with suppress(TrackingError):  # the user wants to know what is best so far
            tracker.close("KILLED")
        raise InterruptedSearchError(*save_best_so_far(task, store.records())) from None
    except BaseException:
        with suppress(TrackingError):  # the failure that came first is told
            tracker.close("FAILED")
        raise
    tracker.close("FINISHED")


def _searched(task: Task, store: StudyStore, tracker: Tracker, progress: Progress) -> SearchResult:
    """Run the stages that every process runs, and the end of the search, unless another process was first."""
    config, clock, budget = task.config, task.budget.clock, task.budget
    with clock.stage(Stage.PLAIN), _decoding("a tuning prompt", config):
        heads_seconds = plan(task)
    budget.check(budget.least_seconds, SHORTEST)
    with store.lock():
        heads = provide_heads(task, heads_seconds, progress)
    budget.check(budget.least_seconds, SHORTEST)
    wanted = config.tuning_prompts // config.batch_size
    prompts = _first(task.prompts.tuning, budget.tuning_samples(wanted), wanted, config)
    for line in budget.lines():
        progress.say(line)
    with clock.stage(Stage.PLAIN), _decoding("the tuning prompts", config):
        before = clock.elapsed
        tuning = open_bench(task, prompts, "decoding the tuning prompts plainly", progress)
        num_samples, known = max(1, len(tuning.indices)), tuning.baseline.known.values()
        seconds = (clock.elapsed - before) / num_samples
        budget.plain = _seconds(task, seconds, sum(each.seconds for each in known) / num_samples)
    studies = StudyRuns(task, heads, tuning, store, tracker, progress)
    try:
        with explained_shortage("choosing what to try", f"{_LESS_TO_SURVEY}; {_kept(config)}"):
            studies.run()
        budget.cut("tried", budget.of_trial, config.samples_per_trial, f"tuning {budget.unit} a trial")
        with store.lock(_patience(task)):
            if (finished := finished_result(store, task.settings)) is not None:
                return _shown(task, *finished, progress)
            return _ended(task, store, tracker, progress, studies)
    finally:
        studies.note_time()


def _ended(task: Task, store: StudyStore, tracker: Tracker, progress: Progress, studies: StudyRuns) -> SearchResult:
    """Race the finalists of all trials, confirm the best, write the profile and keep the result. One process does this."""
    config, clock, budget = task.config, task.budget.clock, task.budget
    records, confirmations = store.records(), Confirmations(store)
    with clock.stage(Stage.WRITING), store.lock(what=LOGGING):
        tracker.log_missing(records)
    with arena(task, studies.bench, progress) as engine:
        with _decoding("the race", config):
            finalists = earlier_race(store, len(records)) or _race(task, records, studies, progress, engine)
        with _decoding("the held-out prompts", config):
            rivals, held_out = _confirmed(task, to_confirm(finalists), records, confirmations, progress, engine)
            winner = rivals[0]
            task.watch.look()
            noise = task.watch.noise(blocks(records, finalists), winner.measurement)
            busy = bool(noise.disturbances)
            refused = objection(winner.candidate, finalists[0].measurement, winner.measurement, busy=busy)
            stock = _compared(task, None if refused else winner.candidate, held_out, progress)
        facts = None if engine is None else engine.facts(None if refused else winner.candidate)
    heads = task.head_folder.distillation_seconds(studies.heads)
    cost = SearchCost(trials=len(records), seconds=store.spent_seconds(config.study), distillation_seconds=heads)
    with clock.stage(Stage.WRITING):
        if (count := confirmations.count(winner.candidate)) > 1:
            budget.cuts.append(
                f"winner number {count} that this search confirmed on the same held-out prompts: a speed-up is found by chance "
                f"up to {count} times as often as its interval says"
            )
        comparison = stock if isinstance(stock, StockComparison) else None
        profile = profile_of(task, winner, refused, noise, comparison, cost, tracker.run_id, facts, count)
        profile.save(config.out)
        result = SearchResult(
            experiment=config.resolved_experiment(),
            run_id=tracker.run_id,
            address=tracker.address,
            profile=profile,
            objection=refused,
            rivals=tuple(rivals),
            race=tuple(each for each in finalists if each.measurement.samples),
            trials=tuple(records),
            comparison=comparison,
            no_comparison=stock if isinstance(stock, str) else None,
            noise=noise,
            ended=studies.ended,
            cuts=tuple(budget.cuts),
            cautions=head_cautions(task, winner),
            stages=dict(clock.seconds()),
            cost=cost,
            settings=config.model_dump(mode="json", exclude={"storage", "tracking_uri"}),
            provenance=Provenance.now(task.target.device).model_copy(update={"command": command_line()}),
        )
        track_result(tracker, result, task)
    result = result.model_copy(update={"stages": dict(clock.seconds())})
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
    reads_once = most_known_bytes(task.target.device.type, task.target.weight_bytes) > 0
    first = pulse.prefill_seconds + pulse.token_seconds * (config.max_new_tokens - 1)
    plain = _seconds(task, first, pulse.prefill_seconds if reads_once else 0.0)
    beside = max(WRITING_SECONDS, budget.clock.seconds().get(Stage.WRITING, 0.0))
    heat = 0.0 if task.deployment is None else heat_seconds(task.deployment.program, PAIRED * first)
    budget.plan(config, plain, beside, heat)
    return distillation_seconds(task, pulse)


def _seconds(task: Task, first: float, reading: float) -> Seconds:
    """Return the seconds of a sample that takes `first`, `reading` of them for its prompts, which an engine reads each time."""
    share = 1.0 if task.needs_continuations else min(1.0, FEWEST_DECODED / task.config.max_new_tokens)
    again = first if task.deployment is not None else first - reading
    return Seconds(first, again, beginning=reading + share * (first - reading))


def _first(prompts: Sequence, count: int, wanted: int, config: SearchConfig) -> Sequence:
    """Return the prompts of the first `count` samples; all of them, also those that fill no batch, if no sample is cut."""
    return prompts if count == wanted else prompts[: count * config.batch_size]


def _race(
    task: Task, records: Sequence[TrialRecord], studies: StudyRuns, progress: Progress, engine: EngineArena | None
) -> list[MeasuredCandidate]:
    """Return the finalists, the fastest first. Raises `SearchError` if no trial could be measured."""
    budget = task.budget
    late = budget.out_of_time()
    if (
        late
        and task.deployment is None
        and not best_trials(records, 1)
        and all(each.state is not TrialState.FAIL for each in records)
    ):
        budget.cuts.append(f"no trial was finished in time{late}")
        return [MeasuredCandidate(trial="plain/0", origin="plain", candidate=Candidate.plain())]
    end = budget.fitted()
    after = replace(end, finalists=0, heat=0.0).seconds(budget.plain)
    may_go_on = budget.pace(keep=after)
    trials = shortlist(records, studies.ended, end.finalists, studies.expected)
    if engine is None and len(trials) == 1:  # a race of one decides nothing
        return [MeasuredCandidate.of(trials[0])]
    indices = unseen_by_trials(studies.bench.indices, budget.of_trial)
    with budget.clock.stage(Stage.RACE):
        bench: Measuring = studies.bench
        if engine is not None:
            pace = budget.pace(keep=after + PAIRED * budget.plain.first * LAP * end.finalists)
            trials = engine.shortlist(trials, indices, end.finalists, studies.bench, pace)
            bench = engine.bench(studies.bench)
        # In production an adaptive rule is warm: it is warmed up on the prompts of the trials.
        of_trial = bench.indices[: budget.of_trial]
        warm = [each.model_copy(update={"candidate": bench.warm_up_rule(each.candidate, of_trial)}) for each in trials]
        # Held-out prompts come before certainty about which of two finalists is a little faster.
        whole = replace(budget.end, finalists=0, confirmed=1, heat=0.0).seconds(budget.plain)
        finalists = race(warm, bench, indices, progress, may_go_on, lambda: budget.left > whole)
    if not finalists:
        failures = [f"the last failure: {record.reason}" for record in records if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in studies.ended.items()])
        raise SearchError(f"no candidate could be measured in {len(records)} trials; {why}{late}")
    return finalists


def _confirmed(
    task: Task,
    chosen: Sequence[MeasuredCandidate],
    records: Sequence[TrialRecord],
    confirmations: Confirmations,
    progress: Progress,
    engine: EngineArena | None,
) -> tuple[list[MeasuredCandidate], Bench]:
    """Return the winner and its rivals measured on held-out prompts, and the bench of these."""
    budget, config = task.budget, task.config
    wanted = config.held_out_prompts // config.batch_size
    # What the race measured, or without one the trial, tells what the candidates will take.
    tried = {record.candidate.key: record.speedup for record in records}
    known = [each.measurement.speedup if each.measurement.samples else tried.get(each.candidate.key) for each in chosen]
    speedups = [each for each in known if each]
    paired = PAIRED if len(speedups) < len(chosen) else WARMED * (1 + 1 / min(speedups))
    end = replace(budget.end, finalists=0, confirmed=len(chosen), heat=0.0, paired=paired)
    end = end.fitted(budget.plain, budget.left)
    with budget.clock.stage(Stage.PLAIN):
        prompts = _first(task.prompts.held_out, end.held_out, wanted, config)
        held_out = open_bench(task, prompts, "reading the held-out prompts", progress, whole=False)
    bench = held_out if engine is None else engine.bench(held_out)
    num_earlier = len(confirmations.of(chosen[0].candidate).samples)
    with budget.clock.stage(Stage.CONFIRMATION):
        after = replace(end, held_out=0).seconds(budget.plain)
        confirmed = confirm(chosen, bench, budget, progress, confirmations, keep_seconds=after)
    note_cuts(confirmed, wanted if end.held_out < wanted else len(held_out.indices), num_earlier, budget)
    return confirmed, held_out


def _compared(task: Task, profile: Candidate | None, held_out: Bench, progress: Progress) -> StockComparison | str:
    """Return the comparison of the profile to come with stock generation, or why there is none."""
    budget = task.budget
    if not task.config.stock:
        return f"declined by stock: false; {LATER}"
    if task.config.deploy_to is not None:
        return f"the profile is for {task.config.deploy_to}, which was measured itself"
    end = budget.fitted(finalists=0, held_out=0, stock=min(budget.end.stock, len(held_out.indices)))
    with budget.clock.stage(Stage.STOCK):
        return compare_with_stock(task, profile, held_out, end.stock, progress, budget.pace(keep=end.beside))


def _patience(task: Task) -> float:
    """Return the seconds to wait for a process that ends the search, which ends by its own timeout."""
    return MOST_WAITED if task.config.timeout is None else task.config.timeout


def _decoding(what: str, config: SearchConfig) -> AbstractContextManager[None]:
    """Explain a shortage of memory while decoding `what`."""
    remedy = f"give a lower --batch-size, --max-new-tokens or max_prompt_tokens; {_kept(config)}"
    return explained_shortage(f"decoding {what}", remedy)


def _kept(config: SearchConfig) -> str:
    return f"finished trials stay in {without_password(config.storage)}"
