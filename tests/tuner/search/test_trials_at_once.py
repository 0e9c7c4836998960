"""A study on several devices at once: what it proposes, what is redone, and what a lost or disturbed device leaves."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import optuna
import pytest

from studies.contract import Candidate, Study, TrialRecord, TrialState
from studies.measurement import PromptSample
from tests.support.benches import Answer, ScriptedBench, first_block
from tests.support.from_list import FromList, LatestFirst
from tests.support.records import sample
from tuner.executors.contract import DeviceLostError, RemoteTrialError, TrialDevice
from tuner.measuring.disturbance import DisturbanceWatch, NotWatched
from tuner.search.budget import Budget
from tuner.search.storage import StudyStore, sqlite_url
from tuner.search.trial_run import TrialWork
from tuner.search.trials import run_study

INDICES = range(4)


class Watch:
    """Finds these disturbances, one after each measurement."""

    def __init__(self, *found: str | None) -> None:
        self._found = deque(found)

    def begin(self) -> None: ...

    def found(self) -> str | None:
        return self._found.popleft()


def _faster_by_block(wanted: Candidate, index: int) -> PromptSample:
    return sample(1.0 + first_block(wanted) / 10, index)


def _device(answer: Answer, watch: DisturbanceWatch | None = None, name: str | None = "a") -> TrialDevice:
    return TrialDevice(ScriptedBench(answer), watch or NotWatched(), name)


def _run(
    tmp_path: Path, study: Study, executor: LatestFirst, budget: Budget | None = None, *, most_repeats: int = 0
) -> tuple[list[TrialRecord], str]:
    store = StudyStore(sqlite_url(tmp_path / "trials.db"), "e")
    try:
        stored = store.open(study, {})
        return run_study(
            study,
            stored,
            executor,
            INDICES,
            budget or Budget(None, None),
            lambda record: None,
            most_repeats=most_repeats,
        )
    finally:
        store.close()


def test_every_device_is_filled_and_no_trial_is_lost(tmp_path: Path) -> None:
    study, executor = FromList([[1], [2], [3], [4]]), LatestFirst(_device(_faster_by_block))
    records, ended = _run(tmp_path, study, executor)
    assert ended == "all proposed"
    assert executor.most_waiting == 2
    assert [first_block(each.candidate) for each in records] == [1, 2, 3, 4]
    assert study.observed == [1, 2, 3, 0], "each was observed once, as soon as it ended"
    assert study.beside == [[1]] * 4, "the study knew what was running"


def test_a_sequential_study_has_one_trial_at_a_time(tmp_path: Path) -> None:
    executor = LatestFirst(_device(_faster_by_block))
    study = FromList([[1], [2], [3]], together=False)
    records, ended = _run(tmp_path, study, executor)
    assert (len(records), ended) == (3, "all proposed")
    assert executor.most_waiting == 1


def test_running_trials_count_towards_the_budget(tmp_path: Path) -> None:
    executor = LatestFirst(_device(_faster_by_block))
    records, ended = _run(tmp_path, FromList([[1], [2], [3], [4], [5]]), executor, Budget(3, None))
    assert (len(records), ended) == (3, "all 3 trials are spent")


def test_a_candidate_that_runs_already_waits_and_takes_the_measurement_over(tmp_path: Path) -> None:
    device = _device(_faster_by_block)
    records, _ = _run(tmp_path, FromList([[2], [2], [3]]), LatestFirst(device))
    assert isinstance(device.bench, ScriptedBench)
    assert sorted(block for block, _ in device.bench.blocks_measured) == [2, 3]
    assert [each.repeat_of for each in records] == [None, 0, None]
    assert records[1].speedup == records[0].speedup


def test_a_stopped_search_leaves_no_trial_open(tmp_path: Path) -> None:
    def stop(task: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, FromList([[1], [2]]), LatestFirst(_device(_faster_by_block), stop))
    (stored,) = optuna.get_all_study_summaries(sqlite_url(tmp_path / "trials.db"))
    trials = optuna.load_study(study_name=stored.study_name, storage=sqlite_url(tmp_path / "trials.db")).trials
    assert [each.state for each in trials] == [optuna.trial.TrialState.FAIL] * 2


def test_a_disturbed_trial_is_measured_again_and_its_first_measurement_forgotten(tmp_path: Path) -> None:
    speeds = iter([1.5] * 4 + [2.5] * 4)
    device = _device(lambda wanted, index: sample(next(speeds), index), Watch("other work", None))
    (record,), _ = _run(tmp_path, FromList([[1]]), LatestFirst(device), most_repeats=2)
    assert record.speedup == pytest.approx(2.5)
    assert record.notes == {"device": "a", "attempts": 2}
    study = optuna.load_study(study_name="e/from_list", storage=sqlite_url(tmp_path / "trials.db"))
    reported = list(study.trials[0].intermediate_values.values())
    assert reported == pytest.approx([2.5] * 4), "the pruner compares with the repeat"


def test_a_trial_that_stays_disturbed_says_so(tmp_path: Path) -> None:
    device = _device(_faster_by_block, Watch("other work", "a hot GPU"))
    (record,), _ = _run(tmp_path, FromList([[1]]), LatestFirst(device), most_repeats=1)
    assert record.state is TrialState.COMPLETE
    assert record.notes == {"device": "a", "disturbed": "a hot GPU", "attempts": 2}


def test_no_disturbed_trial_is_repeated_when_the_time_is_spent(tmp_path: Path) -> None:
    class Spent(Budget):
        def overdue(self) -> str | None:
            return "cut"

    device = _device(_faster_by_block, Watch("other work"))
    (record,), _ = _run(tmp_path, FromList([[1]]), LatestFirst(device), Spent(None, None), most_repeats=3)
    assert (record.state, record.notes["disturbed"]) == (TrialState.PRUNED, "other work")


def test_the_trial_of_a_lost_device_is_redone(tmp_path: Path) -> None:
    losses = iter([DeviceLostError("its host is away")])

    def answer(wanted: Candidate, index: int) -> PromptSample:
        if index == 2:
            for lost in losses:
                raise lost
        return _faster_by_block(wanted, index)

    (record,), _ = _run(tmp_path, FromList([[3]]), LatestFirst(_device(answer)))
    assert record.state is TrialState.COMPLETE
    assert record.measurement is not None
    assert len(record.measurement.samples) == len(INDICES)
    assert record.notes == {"device": "a", "attempts": 2}


def test_a_candidate_that_loses_one_device_after_another_fails(tmp_path: Path) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        raise DeviceLostError("killed")

    (record,), _ = _run(tmp_path, FromList([[3]]), LatestFirst(_device(answer)))
    assert record.state is TrialState.FAIL
    assert record.reason == f"{TrialWork.MOST_LOST} devices were lost during this trial, the last one: killed"


def test_a_failure_in_another_process_is_recorded_in_its_own_words(tmp_path: Path) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        raise RemoteTrialError("OutOfMemoryError: CUDA out of memory.")

    (record,), _ = _run(tmp_path, FromList([[3]]), LatestFirst(_device(answer)))
    assert record.reason == "OutOfMemoryError: CUDA out of memory."
