"""Readings wait for the device, and garbage collection is restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from decoding.memory import without_garbage_collection
from decoding.timing.stopwatch import Stopwatch


def ticks() -> Iterator[float]:
    return iter(float(second) for second in range(100))


def test_time_is_the_difference_of_two_readings_around_the_work() -> None:
    clock, done = ticks(), list[str]()
    watch = Stopwatch(torch.device("cpu"), clock.__next__)
    assert watch.now() == 0.0
    assert watch.time(lambda: done.append("work")) == 1.0
    assert done == ["work"]


@pytest.mark.parametrize(("kind", "num_waits"), [("cpu", 0), ("cuda", 3)])
def test_readings_wait_for_an_accelerator(kind: str, num_waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device(kind)
    watch = Stopwatch(device, ticks().__next__)
    watch.time(lambda: None)
    watch.synchronize()
    assert waited == [device] * num_waits


def fail_without_garbage_collection() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
        raise RuntimeError("stop")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_off_within_and_as_before_afterwards(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="stop"):
            fail_without_garbage_collection()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
