"""Passes are timed between plain ones, and readings wait for the device."""

from __future__ import annotations

import time

import pytest
import torch

from decoding.timing.passes import Stopwatch, between_plain


@pytest.mark.parametrize(("kind", "num_waits"), [("cpu", 0), ("cuda", 3)])
def test_readings_wait_for_an_accelerator(kind: str, num_waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    ticks = iter(range(100))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    watch = Stopwatch(torch.device(kind))
    assert watch.time(lambda: None) == 1.0
    watch.synchronize()
    assert waited == [torch.device(kind)] * num_waits


@pytest.mark.parametrize(
    ("at_once", "order", "beside"),
    [(1, "PaPbPcP", [1.5, 2.5, 3.5]), (2, "PabPcP", [1.5, 1.5, 2.5])],
)
def test_passes_have_plain_ones_beside_them(at_once: int, order: str, beside: list[float]) -> None:
    log: list[str] = []

    def plain() -> float:
        log.append("P")
        return float(log.count("P"))

    def run(name: str) -> str:
        log.append(name)
        return name

    found = list(between_plain(plain, [lambda name=name: run(name) for name in "abc"], at_once=at_once))  # type: ignore[misc]
    assert "".join(log) == order
    assert found == list(zip("abc", beside, strict=True))
