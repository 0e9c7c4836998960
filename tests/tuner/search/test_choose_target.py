"""The runner of a search: the one asked for, the fastest, or the one with a bit-exact mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from decoding.errors import UnsupportedRunnerError
from decoding.runners import AUTO, RUNNERS
from decoding.target import Target
from tests.support.families import build
from tests.support.tiny import tiny_llama
from tuner.config import SearchConfig
from tuner.progress import Progress
from tuner.search.task import choose_target

pytestmark = pytest.mark.usefixtures("uncompiled")


def chosen(family: str | None = None, **settings: Any) -> Target:
    model = tiny_llama() if family is None else build(family)
    return choose_target(model, SearchConfig(model="m", dataset="d", **settings), Progress())


@pytest.mark.parametrize("name", RUNNERS)
def test_runner_asked_for_by_name_is_taken(name: str) -> None:
    assert chosen(runner=name).runner.name == name


def test_runner_named_by_the_user_is_not_replaced_if_it_cannot_run() -> None:
    with pytest.raises(UnsupportedRunnerError, match="does not run with the runner 'static'"):
        chosen("bloom", runner="static")
    assert chosen("bloom", runner=AUTO).runner.name == "eager"


@pytest.mark.parametrize(
    ("device", "num_bytes", "expected"), [("cpu", 10**6, "eager"), ("cpu", 10**9, AUTO), ("cuda", 10**6, AUTO)]
)
def test_default_runner_is_the_faster_one_but_small_models_are_not_compiled_for_a_cpu(
    device: str, num_bytes: int, expected: str
) -> None:
    assert SearchConfig(model="m", dataset="d").runner_on(device, num_bytes) == expected
    assert SearchConfig(model="m", dataset="d", runner="static").runner_on(device, num_bytes) == "static"


def test_fastest_runner_is_taken_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = SimpleNamespace(runner=SimpleNamespace(name="static"))
    monkeypatch.setattr(
        "tuner.search.task.fastest_runner", lambda model, **settings: SimpleNamespace(target=fastest, reason="faster")
    )
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), get_memory_footprint=lambda: 0)
    assert choose_target(on_gpu, SearchConfig(model="m", dataset="d"), Progress()) is fastest


@pytest.mark.parametrize("settings", [{}, {"runner": AUTO}, {"runner": "static"}])
def test_bit_exact_mode_decides_for_a_runner_that_has_it(settings: dict[str, str]) -> None:
    runner = chosen(exact="bitwise", exact_width=4, **settings).runner
    assert (runner.name, runner.exact_width) == ("static", 4)


def test_bit_exact_mode_of_a_runner_without_it_is_refused() -> None:
    with pytest.raises(
        ValidationError, match="bitwise is not a mode of the runner eager: give --runner static or auto"
    ):
        SearchConfig(model="m", dataset="d", exact="bitwise", runner="eager")
