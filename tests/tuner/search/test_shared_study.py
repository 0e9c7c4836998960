"""Several processes on one study, on SQLite and PostgreSQL. Threads stand for processes: each has its own store."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from studies.contract import Candidate, TrialRecord
from studies.measurement import PromptSample
from tests.support.benches import ScriptedBench, first_block
from tests.support.records import sample
from tests.support.scripted import Scripted
from tuner.search.objective import Trials
from tuner.search.storage import StudyStore, sqlite_url

NUM_TRIALS, NUM_WORKERS = 12, 3


def _by_number(*, beside: bool) -> Scripted:
    """Tries another skip set in each trial; more than are asked for."""
    return Scripted([(number,) for number in range(50)], starts=[{"index": 0}], follows=not beside)


def _answer(wanted: Candidate, index: int) -> PromptSample:
    return sample(1.0 + first_block(wanted) / 10, index)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return sqlite_url(tmp_path / "trials.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # hidden by no thread from another
@pytest.mark.parametrize("beside", [False, True])
def test_workers_share_a_study_and_nothing_is_lost_or_doubled(url: str, beside: bool) -> None:
    made: dict[int, list[TrialRecord]] = {number: [] for number in range(NUM_WORKERS)}
    studies = [_by_number(beside=beside) for _ in made]
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        store = StudyStore(url, f"shared-{beside}")
        try:
            with store.lock():
                stored = store.open(studies[worker], {"model": "a"})
            bench, keep = ScriptedBench(_answer), made[worker].append
            Trials(studies[worker], stored, bench, range(2), most=NUM_TRIALS, on_record=keep).run()
        except BaseException as failure:
            failures.append(failure)
        finally:
            store.close()

    threads = [Thread(target=work, args=(worker,)) for worker in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store = StudyStore(url, f"shared-{beside}")
    records = store.open(_by_number(beside=beside), {"model": "a"}).records()
    store.close()
    numbers = [record.number for record in records]
    assert len(records) == len(set(numbers)) == NUM_TRIALS, "no trial is missing, none is there twice"
    assert sorted((each for own in made.values() for each in own), key=lambda each: each.number) == records
    for study in studies:
        observed = sorted(study.observed, key=lambda each: each.number)
        assert observed == records, "each learns from the trials of all, and once"


class _Meanwhile:
    """A limit that another process uses up, right after this one has looked at the trials."""

    def __init__(self, other: Trials) -> None:
        self._others = [other]

    def took(self, record: TrialRecord) -> None:
        pass

    def spent(self) -> str | None:
        while self._others:
            self._others.pop().run()
        return None

    def overdue(self) -> str | None:
        return None


def test_a_trial_that_another_process_ends_meanwhile_counts(tmp_path: Path) -> None:
    studies = [_by_number(beside=True) for _ in range(2)]
    first, second = (StudyStore(sqlite_url(tmp_path / "trials.db"), "meanwhile").open(each, {}) for each in studies)
    bench = ScriptedBench(_answer)
    other = Trials(studies[1], second, bench, range(2), most=1)
    records, ended = Trials(studies[0], first, bench, range(2), most=1, limit=_Meanwhile(other)).run()
    assert [record.number for record in records] == [0]
    assert ended == "1 trials done"
