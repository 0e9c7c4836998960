"""Studies beside each other: whose turn it is, what a stop leaves, and that a search gives what it gives one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import optuna
import pytest

from studies.contract import TrialRecord
from tests.support.benches import ScriptedBench, charge, first_block, per_token
from tests.support.commands import SearchCommand
from tests.support.from_list import FromList, LatestFirst
from tests.support.here_devices import HereDevices
from tests.support.records import sample
from tests.support.stored_trials import stored_records
from tuner.config import SearchConfig
from tuner.executors.contract import TrialDevice
from tuner.measuring.disturbance import NotWatched
from tuner.search.budget import Budget
from tuner.search.storage import StudyStore, sqlite_url
from tuner.search.study_run import StudyRun
from tuner.search.trials import StudyTurns

INDICES = range(2)


def _executor(**given: Any) -> LatestFirst:
    bench = ScriptedBench(lambda wanted, index: sample(1.0 + first_block(wanted) / 10, index))
    return LatestFirst(TrialDevice(bench, NotWatched(), "a"), **given)


class Turns:
    """Two studies of one store on two devices."""

    def __init__(self, tmp_path: Path, *studies: FromList, executor: LatestFirst) -> None:
        self.store = StudyStore(sqlite_url(tmp_path / "trials.db"), "e")
        self.records: list[TrialRecord] = []
        self.opened: list[str] = []
        self._studies, self._executor = studies, executor

    def runs(self, num_trials: int | None = None) -> Iterator[StudyRun]:
        for study in self._studies:
            self.opened.append(study.name)
            stored = self.store.open(study, {})
            budget = Budget(num_trials, None)
            yield StudyRun(study, stored, self._executor, INDICES, budget, self.records.append)

    def made(self, num_trials: int | None = None) -> StudyTurns:
        return StudyTurns(self.runs(num_trials), self._executor)


def test_studies_share_the_devices_and_each_has_its_own_records(tmp_path: Path) -> None:
    executor = _executor()
    many, few = FromList([[1], [2], [3], [4]], name="many"), FromList([[5], [6]], together=False, name="few")
    turns = Turns(tmp_path, many, few, executor=executor)
    with turns.made() as made:
        assert made.until_ended("many").ended == "all proposed"
        assert made.until_ended("few").ended == "all proposed"
    turns.store.close()
    assert executor.submitted[:3] == ["trial 0 of many", "trial 1 of many", "trial 0 of few"], (
        "the next is another's turn"
    )
    assert executor.most_waiting == 2
    found = {
        name: [first_block(each.candidate) for each in turns.records if each.study == name] for name in ("many", "few")
    }
    assert {name: sorted(blocks) for name, blocks in found.items()} == {"many": [1, 2, 3, 4], "few": [5, 6]}
    assert found["few"] == [5, 6], "one after the other"


def test_a_limit_of_trials_is_of_each_study(tmp_path: Path) -> None:
    studies = [FromList([[1], [2], [3], [4]], name=name) for name in "ab"]
    turns = Turns(tmp_path, *studies, executor=_executor())
    with turns.made(num_trials=3) as made:
        assert [made.until_ended(name).ended for name in "ab"] == ["all 3 trials are spent"] * 2
    turns.store.close()
    assert sorted(each.study for each in turns.records) == ["a"] * 3 + ["b"] * 3


def test_a_study_is_opened_while_trials_of_the_one_before_run(tmp_path: Path) -> None:
    executor = _executor()
    turns = Turns(tmp_path, *(FromList([[1], [2]], name=name) for name in "ab"), executor=executor)
    seen = []

    def watched() -> Iterator[StudyRun]:
        for run in turns.runs():
            seen.append(list(executor.submitted))
            yield run

    with StudyTurns(watched(), executor) as made:
        made.until_ended("a")
    turns.store.close()
    assert seen == [[], ["trial 0 of a", "trial 1 of a"]]


def test_a_stop_closes_the_trials_of_all_studies_and_finished_ones_are_not_repeated(tmp_path: Path) -> None:
    ended: list[str] = []

    def stop(task: str) -> None:
        if len(ended) == 2:
            raise KeyboardInterrupt
        ended.append(task)

    sets = {"a": [[1], [2]], "b": [[3], [4]]}
    turns = Turns(
        tmp_path,
        *(FromList(of, together=False, name=name) for name, of in sets.items()),
        executor=_executor(before=stop),
    )
    with pytest.raises(KeyboardInterrupt), turns.made() as made:
        made.until_ended("a")
    turns.store.close()
    url = sqlite_url(tmp_path / "trials.db")
    states = [each.state for name in "ab" for each in optuna.load_study(study_name=f"e/{name}", storage=url).trials]
    assert optuna.trial.TrialState.RUNNING not in states
    assert states.count(optuna.trial.TrialState.COMPLETE) == len(turns.records) == 2

    executor = _executor()
    left = {name: of[sum(each.study == name for each in turns.records) :] for name, of in sets.items()}
    again = Turns(tmp_path, *(FromList(of, together=False, name=name) for name, of in left.items()), executor=executor)
    with again.made() as made:
        for name in "ab":
            made.until_ended(name)
    again.store.close()
    assert sorted(first_block(each.candidate) for each in [*turns.records, *again.records]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, [["conf_layers"], ["exit_layer"], ["draft_length"], ["skip_sets"]]),
        ({"executor": "ray"}, [["conf_layers", "exit_layer"], ["draft_length", "skip_sets"]]),
        (
            {"executor": "ray", "studies": {"draft_length": {"draft": {"skip_attention": [2], "skip_mlp": [2]}}}},
            [["conf_layers", "exit_layer", "draft_length", "skip_sets"]],
        ),
    ],
)
def test_only_studies_that_read_no_earlier_trials_run_beside_each_other(
    changes: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> None:
    names = ["conf_layers", "exit_layer", "draft_length", "skip_sets"]
    config = SearchConfig.model_validate({"model": "m", "dataset": "d", "study": names, **changes})
    assert config.study_groups == groups


def test_a_search_on_two_devices_runs_sequential_studies_beside_each_other_and_finds_the_same(
    run_search: SearchCommand, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    meeting, has_met = Barrier(2), set[str]()

    def meet(device: str, method: str) -> None:
        if method == "begin" and device not in has_met:
            has_met.add(device)
            meeting.wait(60)  # until the first trial of the other device begins

    HereDevices(monkeypatch, meet)
    charge(monkeypatch, per_token(plain=2.0))
    both = ("--study", "conf_layers", "--study", "skip_sets", "--trials", "2")
    config = workplace.parent / "small.yaml"
    config.write_text(config.read_text() + "studies: {skip_sets: {method: draft_verify}}\n")
    local = run_search(*both, "--storage", "sqlite:///local.db")
    assert local.exit_code == 0, local.output
    beside = run_search(*both, "--executor", "ray", "--ray-label", "h")
    assert beside.exit_code == 0, beside.output
    assert "conf_layers, skip_sets (4)" in beside.stderr
    for study in ("tiny/conf_layers", "tiny/skip_sets"):
        here, there = (stored_records(Path(name), study) for name in ("local.db", "sdtune.db"))
        told = [[(each.candidate.key, each.state, each.measurement) for each in found] for found in (here, there)]
        assert told[0] == told[1]
        assert len(told[0]) == 2
