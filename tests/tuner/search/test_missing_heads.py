"""Missing exit heads of a search: announced, distilled within the time or on top of it, or left out."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import SearchConfig
from tuner.progress import Progress
from tuner.search import missing_heads
from tuner.search.budget import Budget
from tuner.search.missing_heads import provide_heads
from tuner.stage_clock import Stage, StageClock

EXPECTED = 300.0


class Told(Progress):
    """Progress that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Search:
    """A search without a model, of which exits 2 and 3 have no head; distilling them takes 250 simulated seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.seconds = 0.0
        self.limits: list[float | None] = []
        self.told = Told()
        config = SearchConfig.model_validate({"model": "m", "dataset": "d", **settings})
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)
        self.budget = Budget(config.timeout, StageClock())
        folder = SimpleNamespace(drafts=lambda exits, held_out: dict.fromkeys(exits), missing=lambda exits: exits)
        self.task: Any = SimpleNamespace(
            config=config,
            budget=self.budget,
            missing_heads=(2, 3),
            heads={},
            head_folder=folder,
            loaded=None,
            target=None,
            prompts=SimpleNamespace(held_out=()),
        )
        monkeypatch.setattr(missing_heads, "of_search", lambda *parts: SimpleNamespace(most_seconds=None))
        monkeypatch.setattr(
            missing_heads, "replace", lambda work, most_seconds: SimpleNamespace(most_seconds=most_seconds)
        )
        monkeypatch.setattr(missing_heads, "distil_and_track", self._distil)

    def _distil(self, work: Any, *rest: Any) -> None:
        self.limits.append(work.most_seconds)
        self.seconds += 250.0

    def provide(self) -> set[int]:
        """Return the exits that have heads in the end."""
        expected = None if self.task.config.distill == "never" else EXPECTED
        return set(provide_heads(self.task, expected, self.told))


def test_without_a_limit_they_are_announced_and_distilled(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch)
    assert search.provide() == {2, 3}
    assert search.limits == [None]
    assert search.told.lines == [
        "distilling exit heads for exit 2,3 into exit_heads first: about 5:00 min (--set distill=never declines)"
    ]


def test_within_the_time_of_the_search_they_may_take_half(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, timeout="20m")
    assert search.provide() == {2, 3}
    assert search.limits == [600.0]
    assert search.budget.left == 1200 - 250


def test_what_takes_more_than_half_is_left_out_and_the_line_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Search(monkeypatch, timeout="8m")
    assert search.provide() == set()
    assert not search.limits
    (line,) = search.told.lines
    assert "distilling takes about 5:00 min of the 8:00 min left: searching without" in line
    assert (
        "`sdtune distill` makes them, and --set distillation.timeout=6m gives them that time on top of --timeout"
        in line
    )


def test_time_of_its_own_comes_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, timeout="8m", distillation={"timeout": "4m"})
    assert search.provide() == {2, 3}
    assert "about 4:00 min, at most 4:00 min on top of --timeout" in search.told.lines[0]
    assert search.budget.left == 480.0
    assert search.budget.clock.seconds()[Stage.DISTILLING] == 250.0


def test_declined_heads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(monkeypatch, distill="never", heads=Path("h"))
    assert search.provide() == set()
    assert search.told.lines == ["no exit head in h for exit 2,3: searching without (--set distill=auto makes them)"]
