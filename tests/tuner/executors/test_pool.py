"""Several devices as one executor: how trials are shared out, and what happens to those of a lost device."""

from __future__ import annotations

from threading import Event, Lock
from typing import Any

import pytest

from studies.measurement import PromptSample
from tests.support.benches import ScriptedBench
from tests.support.records import sample
from tuner.errors import ConfigError, SearchError
from tuner.executors.contract import DeviceLostError, TrialDevice
from tuner.executors.pool import DevicePool
from tuner.measuring.disturbance import NotWatched


def _answer(*_: Any) -> PromptSample:
    return sample(1.0)


class Connection:
    """A device in this process. `opening` says what each opening raises; after the last, opening waits until it is closed."""

    def __init__(self, name: str, *opening: Exception | None) -> None:
        self.name = name
        self._opening = iter(opening)
        self.closed = Event()
        self.in_use = Lock()

    def open(self) -> TrialDevice:
        for outcome in self._opening:
            if outcome is not None:
                raise outcome
            return TrialDevice(ScriptedBench(_answer), NotWatched(), self.name)
        self.closed.wait()
        raise DeviceLostError("closed")

    def close(self) -> None:
        self.closed.set()


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


def _name(device: TrialDevice) -> str | None:
    return device.name


def _take(pool: DevicePool, count: int) -> dict[str, Any]:
    return dict(pool.wait() for _ in range(count))


def test_trials_run_at_the_same_time_and_one_at_a_time_on_each_device(said: Said) -> None:
    connections = [Connection("a", None), Connection("b", None)]
    locks = {each.name: each.in_use for each in connections}
    both = {"a": Event(), "b": Event()}

    def work(device: TrialDevice) -> str:
        assert device.name is not None
        assert locks[device.name].acquire(blocking=False), "another trial runs on this device"
        both[device.name].set()
        assert all(each.wait(10) for each in both.values()), "the other device never got a trial"
        locks[device.name].release()
        return device.name

    with DevicePool(connections, said) as pool:
        assert pool.num_devices == 2
        for number in range(6):
            pool.submit(f"trial {number}", work)
        ended = _take(pool, 6)
    assert sorted(ended) == [f"trial {number}" for number in range(6)]
    assert set(ended.values()) == {"a", "b"}
    assert said == []
    assert all(each.closed.is_set() for each in connections)


def test_the_trial_of_a_lost_device_is_redone_by_another(said: Said) -> None:
    taken = Event()

    def work(device: TrialDevice) -> str | None:
        if device.name == "lost":
            taken.set()
            raise DeviceLostError("killed")
        assert taken.wait(10), "the other device never got a trial"
        return device.name

    with DevicePool([Connection("lost", None), Connection("other", None)], said) as pool:
        pool.submit("trial 7", work)
        pool.submit("trial 8", work)
        assert _take(pool, 2) == {"trial 7": "other", "trial 8": "other"}
    assert said in ([f"lost is lost (killed): trial {number} is redone"] for number in (7, 8))


def test_a_device_that_comes_back_takes_trials_again(said: Said) -> None:
    losses = iter([DeviceLostError("killed")])

    def work(device: TrialDevice) -> str | None:
        for loss in losses:
            raise loss
        return device.name

    with DevicePool([Connection("a", None, None)], said) as pool:
        pool.submit("trial 0", work)
        assert pool.wait() == ("trial 0", "a")
    assert said == ["a is lost (killed): trial 0 is redone"]


def test_a_device_that_never_comes_is_given_up(said: Said) -> None:
    connections = [Connection("a", DeviceLostError("no process was ready on it")), Connection("b", None)]
    with DevicePool(connections, said) as pool:
        assert pool.num_devices == 1
        pool.submit("trial 0", _name)
        assert pool.wait() == ("trial 0", "b")
    assert said == ["a is given up: no process was ready on it"]


def test_a_device_that_is_not_ready_is_not_waited_for_for_long_and_joins_later(said: Said) -> None:
    class LateConnection(Connection):
        def __init__(self) -> None:
            super().__init__("late", None)
            self.may_open = Event()

        def open(self) -> TrialDevice:
            self.may_open.wait()
            return super().open()

        def close(self) -> None:
            self.may_open.set()
            super().close()

    late, late_works = LateConnection(), Event()

    def work(device: TrialDevice) -> str | None:
        if device.name == "late":
            late_works.set()
        else:
            late.may_open.set()
            assert late_works.wait(10), "the late device never got a trial"
        return device.name

    with DevicePool([Connection("a", None), late], said, patience=0.01) as pool:
        assert pool.num_devices == 1
        for number in range(2):
            pool.submit(f"trial {number}", work)
        assert set(_take(pool, 2).values()) == {"a", "late"}
    assert said == ["1 of 2 devices are not ready yet: they join later"]


def test_without_any_device_the_search_ends(said: Said) -> None:
    with pytest.raises(SearchError, match="a is given up: away; no device is left"):
        DevicePool([Connection("a", DeviceLostError("away"))], said).__enter__()


def test_the_search_ends_when_its_last_device_is_lost_for_good(said: Said) -> None:
    def work(device: TrialDevice) -> None:
        raise DeviceLostError("killed")

    with DevicePool([Connection("a", None, DeviceLostError("away"))], said) as pool:
        pool.submit("trial 0", work)
        with pytest.raises(SearchError, match="no device is left"):
            pool.wait()


def test_a_device_of_another_kind_ends_the_search(said: Said) -> None:
    connections = [Connection("a", None), Connection("b", ConfigError("b: another GPU"))]
    with pytest.raises(ConfigError, match="b: another GPU"):
        DevicePool(connections, said).__enter__()
    assert all(each.closed.is_set() for each in connections)


def test_an_error_of_the_search_itself_is_raised_where_it_waits(said: Said) -> None:
    def work(device: TrialDevice) -> None:
        raise MemoryError("of the search")

    with DevicePool([Connection("a", None)], said) as pool:
        pool.submit("trial 0", work)
        with pytest.raises(MemoryError, match="of the search"):
            pool.wait()
