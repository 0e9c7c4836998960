"""The choice of a runner and its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat

import pytest
import torch

from decoding.cache.kv_cache import KVCache
from decoding.lockstep import Lockstep
from decoding.target import Target
from decoding.timing.runner_choice import fastest_runner
from tests.support.families import build
from tests.support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds by runner that a pass takes; `now` is what the clock shows."""
    seconds = {"eager": 1.0, "static": 1.0, "now": 0.0}
    honest = Target.forward

    def forward(self: Target, token_ids: torch.Tensor, cache: KVCache, start: int, **settings: bool) -> torch.Tensor:
        seconds["now"] += seconds[self.runner.name]
        return honest(self, token_ids, cache, start, **settings)

    monkeypatch.setattr(Target, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds["now"])
    return seconds


@pytest.mark.parametrize(("static", "chosen"), [(0.5, "static"), (2.0, "eager")])
def test_auto_takes_the_one_that_was_faster(clock: dict[str, float], static: float, chosen: str) -> None:
    clock["static"] = static
    choice = fastest_runner(tiny_llama())
    assert choice.target.runner.name == chosen
    assert f"{1 / static:.2f} times as fast as eager" in choice.reason


@pytest.mark.parametrize(("takes_turns", "num_together"), [(False, 3), (True, 1)])
def test_passes_of_a_batch_are_timed_as_a_batch_runs_them(
    takes_turns: bool, num_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    run = Lockstep.run

    def watched(self: Lockstep, tasks: Sequence[Callable[[], object]]) -> None:
        counted.append(len(tasks))
        run(self, tasks)

    monkeypatch.setattr(Lockstep, "run", watched)
    if takes_turns:
        monkeypatch.setattr(Target, "unbatchable_reason", "for the sake of the test")
    fastest_runner(tiny_llama(), num_sequences=3)
    assert set(counted) == {num_together}


def test_a_disturbed_sweep_does_not_decide(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock["static"] = 0.5
    jumps = chain([0.0] * 10, [1e6] * 3, repeat(0.0))

    def disturbed() -> float:
        clock["now"] += next(jumps)
        return clock["now"]

    monkeypatch.setattr(time, "perf_counter", disturbed)
    assert fastest_runner(tiny_llama()).target.runner.name == "static"


def test_auto_says_why_a_model_is_run_as_it_is() -> None:
    choice = fastest_runner(build("bloom"))
    assert choice.target.runner.name == "eager"
    assert "BloomForCausalLM does not run with the runner 'static'" in choice.reason
