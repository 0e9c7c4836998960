"""One study run: records, repeats, pruning, failures, budget, resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial

from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import BatchTexts, PromptSample
from studies.samplers.contract import Parameters
from tests.support.benches import ScriptedBench, first_block
from tests.support.records import sample
from tests.support.scripted import Scripted
from tests.support.stored_trials import stored_trials
from tuner.search.budget import Budget, Seconds, TrialTime
from tuner.search.objective import NUM_WARM_UP, Trials
from tuner.search.storage import StudyStore, sqlite_url
from tuner.stage_clock import StageClock

INDICES = range(6)


def _run(
    tmp_path: Path, sets: Sequence[Sequence[int]], bench: ScriptedBench, **limits: Any
) -> tuple[list[TrialRecord], str, Scripted]:
    study = Scripted(sets)
    stored = StudyStore(sqlite_url(tmp_path / "trials.db"), "e").open(study, {})
    records, ended = Trials(study, stored, bench, INDICES, **limits).run()
    return records, ended, study


def _by_first_block(wanted: Candidate, index: int) -> PromptSample:
    return sample(1.0 + first_block(wanted) / 10 + index / 1000, index)


def test_a_rule_is_warmed_up_before_its_trial_and_recorded_as_proposed(tmp_path: Path) -> None:
    measured: list[bool] = []

    def answer(wanted: Candidate, index: int) -> PromptSample:
        measured.append(wanted.draft_length.persistent)
        return sample(1.2, index)

    bench = ScriptedBench(answer)
    records, _, _ = _run(tmp_path, [[3]], bench)
    assert bench.warmed_up_on == [tuple(INDICES[:NUM_WARM_UP])]
    assert all(measured), "the warmed-up rule is measured"
    assert not records[0].candidate.draft_length.persistent


def test_every_trial_is_measured_recorded_and_observed(tmp_path: Path) -> None:
    records, ended, study = _run(tmp_path, [[3], [4]], ScriptedBench(_by_first_block))
    assert ended == "all proposed"
    assert [record.state for record in records] == [TrialState.COMPLETE] * 2
    assert [len(record.measurement.samples) for record in records if record.measurement] == [6, 6]
    assert study.observed == records
    assert [record.notes for record in records] == [{"skipped": "skip layers 3"}, {"skipped": "skip layers 4"}]


def test_a_set_met_before_is_not_measured_again(tmp_path: Path) -> None:
    bench = ScriptedBench(_by_first_block)
    records, _, _ = _run(tmp_path, [[3], [4], [3]], bench)
    assert [block for block, _ in bench.blocks_measured] == [3, 4]
    assert records[2].repeat_of == 0
    assert records[2].speedup == records[0].speedup


def test_a_candidate_that_is_slower_prompt_by_prompt_is_pruned(tmp_path: Path) -> None:
    records, _, _ = _run(tmp_path, [[9], [1]], ScriptedBench(_by_first_block))
    assert records[1].state is TrialState.PRUNED
    assert records[1].measurement is not None
    assert len(records[1].measurement.samples) < 6
    assert records[1].speedup is None


def test_optuna_knows_state_and_value_of_each_record(tmp_path: Path) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        if first_block(wanted) == 5:
            raise ValueError("no")
        return _by_first_block(wanted, index)

    records, _, _ = _run(tmp_path, [[9], [1], [5], [9]], ScriptedBench(answer))
    assert [record.state.name for record in records] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    trials = stored_trials(tmp_path / "trials.db")
    assert [trial.state.name for trial in trials] == [record.state.name for record in records]
    complete = [trial.value for trial in trials if trial.state.name == "COMPLETE"]
    assert complete == [record.speedup for record in records if record.state is TrialState.COMPLETE]


def test_output_that_differs_from_plain_decoding_fails_the_trial(tmp_path: Path) -> None:
    bench = ScriptedBench(lambda wanted, index: sample(9.0, index, identical=index != 2))
    (record,), _, _ = _run(tmp_path, [[3]], bench)
    assert record.state is TrialState.FAIL
    assert record.reason == "the output for tuning prompt 2 differs from plain decoding"


def test_wrong_output_in_a_batch_fails_the_trial(tmp_path: Path) -> None:
    batch = BatchTexts(count=4, identical=1, ties=1)
    bench = ScriptedBench(lambda wanted, index: sample(9.0, index, identical=False, batch=batch))
    (record,), _, _ = _run(tmp_path, [[3]], bench)
    assert record.state is TrialState.FAIL
    assert record.reason == "2 of 4 outputs for tuning batch 0 differ from plain decoding"


def test_a_numerical_tie_does_not_fail_the_trial(tmp_path: Path) -> None:
    bench = ScriptedBench(lambda wanted, index: sample(2.0, index, identical=index != 2, tie=index == 2))
    (record,), _, _ = _run(tmp_path, [[3]], bench)
    assert record.state is TrialState.COMPLETE


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), "OutOfMemoryError: CUDA out of memory."),
        (ValueError(""), "ValueError: no message"),
        (OSError("no file \ud800"), "OSError: no file ?"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_trial_that_raises_is_recorded_and_the_search_goes_on(
    tmp_path: Path, failure: BaseException, reason: str
) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        if wanted.draft.skip_attention == (4,):
            raise failure
        return _by_first_block(wanted, index)

    records, _, _ = _run(tmp_path, [[3], [4], [5]], ScriptedBench(answer))
    assert [record.state for record in records] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert records[1].reason == reason


def test_a_failed_set_may_be_tried_again(tmp_path: Path) -> None:
    answers = iter([ValueError("once")])

    def answer(wanted: Candidate, index: int) -> PromptSample:
        for failure in answers:
            raise failure
        return _by_first_block(wanted, index)

    records, _, _ = _run(tmp_path, [[3], [3]], ScriptedBench(answer))
    assert [record.state for record in records] == [TrialState.FAIL, TrialState.COMPLETE]


def test_stopping_the_search_is_no_failed_trial(tmp_path: Path) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        if wanted.draft.skip_attention == (4,):
            raise KeyboardInterrupt
        return _by_first_block(wanted, index)

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, [[3], [4]], ScriptedBench(answer))
    records, _, _ = _run(tmp_path, [[3], [4]], ScriptedBench(_by_first_block))
    assert [record.number for record in records] == [0, 2]
    assert [record.state for record in records] == [TrialState.COMPLETE] * 2


def test_the_trial_budget_counts_stored_trials(tmp_path: Path) -> None:
    _run(tmp_path, [[3], [4], [5]], ScriptedBench(_by_first_block), most=2)
    bench = ScriptedBench(_by_first_block)
    records, ended, _ = _run(tmp_path, [[3], [4], [5]], bench, most=2)
    assert bench.measured == []
    assert len(records) == 2
    assert ended == "2 trials done"


@pytest.mark.parametrize(
    ("sets", "num_trials"),
    [
        ([[1], [3], [2], [3], [9]], 4),  # the best is the second, and its repeat is no better one
        ([[5], [4], [6], [5], [4], [7]], 5),  # a failed one counts
    ],
)
def test_it_ends_after_patience_trials_without_a_better_speedup(
    tmp_path: Path, sets: Sequence[Sequence[int]], num_trials: int
) -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        if first_block(wanted) == 4:
            raise ValueError("no")
        return _by_first_block(wanted, index)

    records, ended, _ = _run(tmp_path, sets, ScriptedBench(answer), patience=2)
    assert (len(records), ended) == (num_trials, "no better candidate in 2 trials")


def test_no_trial_begins_when_the_seconds_are_spent(tmp_path: Path) -> None:
    bench = ScriptedBench(_by_first_block)
    limit = TrialTime(
        Budget(10.0, StageClock(), spent_before=10.0, plain=Seconds(1.0, 1.0), of_trial=1), 0.0, has_result=lambda: True
    )
    records, ended, _ = _run(tmp_path, [[3]], bench, limit=limit)
    assert records == []
    assert ended == "its share of the search time is spent"


class Clock:
    """A replacement of the module `time` that advances by the seconds of the work."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_seconds_of_a_trial_are_those_of_thinking_and_of_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    class Thinking(Scripted):
        def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
            clock.now += 2.0
            return super().choose(study, trial)

        def observe(self, record: TrialRecord) -> None:
            clock.now += 0.5
            super().observe(record)

        def finished(self, study: optuna.Study) -> str | None:
            clock.now += 0.25
            return super().finished(study)

    def answer(wanted: Candidate, index: int) -> PromptSample:
        clock.now += 10.0
        return sample(1.2, index)

    def show(record: TrialRecord) -> None:
        clock.now += 1000.0

    monkeypatch.setattr("tuner.search.objective.time", clock)
    stored = StudyStore(sqlite_url(tmp_path / "trials.db"), "e").open(study := Thinking([[3], [4], [3]]), {})
    records, _ = Trials(study, stored, ScriptedBench(answer), INDICES, on_record=show).run()
    # Learning from a trial (0.5 s) and deciding whether to go on (0.25 s, and again when it begins) count with the next trial. A
    # repeat is not measured.
    assert [record.seconds for record in records] == [62.5, 63.0, 3.0]
    assert stored.records() == records
