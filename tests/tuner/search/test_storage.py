"""Finished trials on disk, resumed only by the same search."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState as OptunaState

from studies.contract import TrialRecord, TrialState
from studies.samplers.contract import BEGUN, Parameters, measured_now
from tests.support.records import candidate, record
from tests.support.scripted import Scripted
from tests.support.stored_trials import stored_trials
from tuner.errors import StorageError
from tuner.search.storage import StoredStudy, StudyStore, sqlite_url

IDENTITY = {"model": "a", "data": "b"}


class OneCandidate(Scripted):
    """Tries skip sets by number; its space is what the test says."""

    name = "one_candidate"

    def __init__(self, space: dict[str, Any] | None = None, starts: Sequence[Parameters] = ()) -> None:
        super().__init__([(number,) for number in range(99)], starts=starts)
        self._identity = space or {}

    def identity(self) -> dict[str, Any]:
        return self._identity


TWO = [{"index": 0}, {"index": 1}]


def _store(tmp_path: Path) -> StudyStore:
    return StudyStore(sqlite_url(tmp_path / "trials.db"), "experiment")


def _ask(stored: StoredStudy) -> optuna.Trial:
    with warnings.catch_warnings(action="ignore"):  # Optuna's: signs of life are given under `optimize` only
        return stored.study.ask()


def _finish(stored: StoredStudy, made: TrialRecord) -> None:
    trial = _ask(stored)
    stored.keep(trial, made)
    stored.study.tell(trial, made.speedup, state=None if made.speedup else OptunaState.FAIL)


@pytest.mark.parametrize(
    "made",
    [
        record(1.25, number=0, notes={"lambda": -0.05}),
        record(None, number=0),
        record(0.9, number=0, state=TrialState.PRUNED),
    ],
)
def test_a_finished_trial_is_read_back_by_a_new_process(tmp_path: Path, made: TrialRecord) -> None:
    stored = _store(tmp_path).open(OneCandidate(), IDENTITY)
    _finish(stored, made)
    assert _store(tmp_path).open(OneCandidate(), IDENTITY).records() == [made]


def _states(tmp_path: Path) -> list[str]:
    return [trial.state.name for trial in stored_trials(tmp_path / "trials.db", "experiment/one_candidate")]


def test_a_running_trial_of_a_dead_process_is_no_record_and_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.storage.BEAT_SECONDS", 1)
    monkeypatch.setattr("tuner.search.storage.GRACE_SECONDS", 1)
    study = OneCandidate(starts=TWO)
    dead = _store(tmp_path).open(study, IDENTITY)
    trial = _ask(dead)  # and dies before its first sign of life
    trial.set_user_attr(BEGUN, study.space.suggest(trial).key)
    stored = _store(tmp_path).open(study, IDENTITY)
    assert stored.records() == []
    assert measured_now(stored.study) == [candidate((0,))]
    stored.wait_for_others()
    assert stored.records() == measured_now(stored.study) == []
    assert _states(tmp_path) == ["FAIL", "WAITING", "WAITING"]
    again = [study.space.suggest(_ask(stored)) for _ in range(2)]
    assert again == [candidate((1,)), candidate((0,))], "what began first, then the lost one"
    stored.wait_for_others()
    assert _states(tmp_path) == ["FAIL"] * 3 + ["WAITING"], "a retry is not retried"


@pytest.mark.parametrize("num_starts", [0, 2])
@pytest.mark.parametrize("num_suggested", [0, 1])
def test_a_candidate_is_tried_once_more_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_starts: int, num_suggested: int
) -> None:
    """A part of a candidate's parameters would be mixed with those of whatever the sampler chooses next."""
    monkeypatch.setattr("tuner.search.storage.BEAT_SECONDS", 1)
    monkeypatch.setattr("tuner.search.storage.GRACE_SECONDS", 1)
    starts = [{"index": number, "other": number} for number in range(num_starts)]
    dead = _store(tmp_path).open(OneCandidate(starts=starts), IDENTITY)
    trial = _ask(dead)
    for _ in range(num_suggested):
        trial.suggest_int("index", 0, 99)  # and dies before it knows the candidate
    stored = _store(tmp_path).open(OneCandidate(starts=starts), IDENTITY)
    stored.wait_for_others()
    waiting = stored.study.get_trials(states=(OptunaState.WAITING,))
    assert [each.system_attrs["fixed_params"] for each in waiting] == [*starts[1:], *starts[:1]]


@pytest.mark.parametrize("made", [record(1.25), record(None), record(0.9, state=TrialState.PRUNED)])
def test_a_trial_whose_process_died_after_its_record_ends_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: TrialRecord
) -> None:
    monkeypatch.setattr("tuner.search.storage.BEAT_SECONDS", 1)
    monkeypatch.setattr("tuner.search.storage.GRACE_SECONDS", 1)
    dead = _store(tmp_path).open(OneCandidate(), IDENTITY)
    dead.keep(_ask(dead), made)  # and dies before it tells Optuna
    stored = _store(tmp_path).open(OneCandidate(), IDENTITY)
    stored.wait_for_others()
    (trial,) = stored.study.trials
    assert (trial.state.name, trial.value) == (made.state.name, made.speedup)


def test_a_new_file_is_discarded_unless_another_process_uses_it(tmp_path: Path) -> None:
    store, path = _store(tmp_path), tmp_path / "trials.db"
    store.discard_if_new()
    assert not path.exists()
    store = _store(tmp_path)
    _store(tmp_path).open(OneCandidate(), IDENTITY)
    store.discard_if_new()
    assert path.exists()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # hidden by no thread from another
def test_processes_that_begin_at_once_on_a_new_file_make_one_study(tmp_path: Path) -> None:
    """Threads stand for processes: each has its own store, and connections of its own."""
    barrier, failures = Barrier(4), list[Exception]()

    def begin(number: int) -> None:
        try:
            barrier.wait()
            store = _store(tmp_path)
            with store.lock():
                stored = store.open(OneCandidate(starts=TWO), IDENTITY)
            _finish(stored, record(1.25, number=number))
        except Exception as failure:
            failures.append(failure)

    threads = [Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert _states(tmp_path) == ["COMPLETE"] * 4


@pytest.mark.parametrize(
    ("identity", "space", "differing"),
    [
        ({**IDENTITY, "model": "other"}, {}, "another model"),
        ({**IDENTITY, "data": "other"}, {}, "another data"),
        (IDENTITY, {"rules": ["fixed"]}, r"another space \(rules\)"),
        (IDENTITY, {"draft_parameters": {"kind": ["none"]}}, r"another space \(draft parameters\): choose another"),
    ],
)
def test_another_search_under_the_same_name_is_refused_by_what_differs(
    tmp_path: Path, identity: dict[str, str], space: dict[str, Any], differing: str
) -> None:
    _store(tmp_path).open(OneCandidate(), IDENTITY)
    with pytest.raises(StorageError, match=differing) as refused:
        _store(tmp_path).open(OneCandidate(space), identity)
    assert "\n" not in str(refused.value)


def test_two_experiments_share_a_storage(tmp_path: Path) -> None:
    _store(tmp_path).open(OneCandidate(), IDENTITY)
    other = StudyStore(sqlite_url(tmp_path / "trials.db"), "other").open(OneCandidate(), {"model": "c"})
    assert other.records() == []


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.db"
    path.write_bytes(b"this is not a database, and long enough to be sure of it " * 50)
    before = path.read_bytes()
    with pytest.raises(StorageError, match="not a database") as refused:
        StudyStore(sqlite_url(path), "experiment").open(OneCandidate(), IDENTITY)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_a_file_of_another_optuna_is_refused(tmp_path: Path) -> None:
    """Only a file that was not there is not checked: it has the schema of the Optuna that makes it."""
    _store(tmp_path)
    with closing(sqlite3.connect(tmp_path / "trials.db")) as file, file:
        file.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
    with pytest.raises(StorageError, match="no longer compatible"):
        _store(tmp_path)


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////dev/null/trials.db", "mystery://x"])
def test_an_unusable_url_is_one_line(url: str) -> None:
    with pytest.raises(StorageError) as refused:
        StudyStore(url, "experiment")
    assert "\n" not in str(refused.value)


def test_an_experiment_below_another_is_another(tmp_path: Path) -> None:
    """A name may have slashes, and each is a search of its own."""
    names = ("a", "a/b", "a/b/c")
    stores = {name: StudyStore(sqlite_url(tmp_path / "trials.db"), name) for name in names}
    for seconds, (name, store) in enumerate(stores.items(), start=1):
        store.check_identity({"model": name})
        store.open(OneCandidate(), {"model": name}, elapsed=iter([10, 10 + seconds]).__next__)
    for seconds, (name, store) in enumerate(stores.items(), start=1):
        store.check_identity({"model": name})
        assert store.spent_seconds() == seconds


def test_a_study_is_found_to_read_whatever_it_was_a_search_over(tmp_path: Path) -> None:
    assert _store(tmp_path).find("one_candidate") is None
    stored = _store(tmp_path).open(OneCandidate(), IDENTITY)
    _finish(stored, made := record(1.25))
    found = _store(tmp_path).find("one_candidate")
    assert found is not None
    assert found.records() == [made]
    assert _store(tmp_path).find("one") is None


def test_spent_seconds_are_of_trials_and_of_preparing_named_studies(tmp_path: Path) -> None:
    store = _store(tmp_path)
    stored = store.open(OneCandidate(), IDENTITY, elapsed=iter([2.0, 7.0]).__next__)
    _finish(stored, record(1.25, seconds=2.0))
    _finish(stored, record(None, seconds=0.5))
    assert store.spent_seconds() == store.spent_seconds(["one_candidate"]) == 7.5
    assert store.spent_seconds(["conf_layers"]) == 0.0


@pytest.mark.parametrize("killed_at", ["enqueue_trial", "set_user_attr"])
def test_study_whose_making_was_cut_short_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    honest = getattr(optuna.Study, killed_at)
    calls = iter(range(9))

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return honest(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            _store(tmp_path).open(OneCandidate(starts=[{"index": 50}, {"index": 51}]), IDENTITY)
    study = OneCandidate(starts=TWO)
    stored = _store(tmp_path).open(study, IDENTITY)
    assert [study.space.suggest(_ask(stored)) for _ in range(2)] == [candidate((0,)), candidate((1,))]
    trials = optuna.load_study(study_name="experiment/one_candidate", storage=stored.url).trials
    assert len(trials) == 2, "no start of the lost one is left"
