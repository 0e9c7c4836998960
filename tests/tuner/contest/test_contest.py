"""The contest: one stopwatch for everybody, turns that move on, and who fails is left out with the reason."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tuner.contest.contest import Contest, Prompts
from tuner.measuring.clock import WallClock
from tuner.measuring.recording import Recorder, TimedBatch
from tuner.measuring.turns import WARM_UP_TOKENS

CLOCK = WallClock(torch.device("cpu"))
PREPARING = -1


class Scripted:
    """A contestant that always writes the same tokens, notes its turns, and can fail at one prompt."""

    settings: Mapping[str, Any] = {}

    def __init__(self, name: str, log: list[tuple[str, int]], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def describe(self) -> str:
        return self.name

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        self.log.append((f"{self.name} prepares", len(batches)))
        if self.fails_at == PREPARING:
            raise MemoryError("no room")

    def write(self, prompts: Prompts, max_new_tokens: int, recorder: Recorder) -> None:
        self.log.append((self.name, prompts[0][0]))
        if prompts[0][0] == self.fails_at:
            raise RuntimeError("out of luck\nand more")
        assert not gc.isenabled() or max_new_tokens == WARM_UP_TOKENS
        for text in range(len(prompts)):
            recorder.put([7], text)
            recorder.put(range(max_new_tokens - 1), text)


def single(*prompts: Sequence[int]) -> list[Prompts]:
    """A batch of each prompt."""
    return [[prompt] for prompt in prompts]


def test_who_is_first_moves_on_by_one_from_text_to_text() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({name: Scripted(name, log) for name in "abc"}, CLOCK)
    seen: list[tuple[int, int, dict[str, TimedBatch]]] = []
    contest.hold(
        single((1,), (2,)), max_new_tokens=4, repeats=2, on_batch=lambda *each: seen.append((*each[:2], dict(each[2])))
    )
    assert log == [
        *[("a", 1), ("b", 1), ("c", 1)],
        *[("b", 2), ("c", 2), ("a", 2)],
        *[("c", 1), ("a", 1), ("b", 1)],
        *[("a", 2), ("b", 2), ("c", 2)],
    ]
    assert [each[:2] for each in seen] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(batch.sequences[0].tokens == (7, 0, 1, 2) for _, _, written in seen for batch in written.values())
    assert all(set(written) == {"a", "b", "c"} for _, _, written in seen)


def test_a_batch_is_one_turn() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({name: Scripted(name, log) for name in "ab"}, CLOCK)
    seen: list[int] = []
    contest.hold(
        [[(1,), (2,), (3,)], [(4,), (5,), (6,)]],
        max_new_tokens=4,
        on_batch=lambda index, repeat, written: seen.extend(len(written[name].sequences) for name in "ab"),
    )
    assert log == [("a", 1), ("b", 1), ("b", 4), ("a", 4)]
    assert seen == [3] * 4


def test_every_contender_is_warmed_up_with_a_few_tokens() -> None:
    log: list[tuple[str, int]] = []
    lengths: list[int] = []

    class Counted(Scripted):
        def write(self, prompts: Prompts, max_new_tokens: int, recorder: Recorder) -> None:
            lengths.append(max_new_tokens)
            super().write(prompts, max_new_tokens, recorder)

    contest = Contest({name: Counted(name, log) for name in "ab"}, CLOCK)
    contest.warm_up(single((1,), (2,)))
    assert log == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert set(lengths) == {WARM_UP_TOKENS}


def test_who_fails_is_left_out_with_the_reason_and_the_others_go_on() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({"a": Scripted("a", log), "b": Scripted("b", log, fails_at=2)}, CLOCK, needed=["a"])
    wrote: list[set[str]] = []
    contest.hold(
        single((1,), (2,), (3,)), max_new_tokens=4, on_batch=lambda index, repeat, written: wrote.append(set(written))
    )
    assert wrote == [{"a", "b"}, {"a"}, {"a"}]
    assert contest.left_out == {"b": "RuntimeError: out of luck"}
    assert set(contest.running) == {"a"}
    assert ("b", 3) not in log


def test_who_must_not_fail_raises_and_garbage_is_collected_again() -> None:
    was_enabled = gc.isenabled()
    contest = Contest({"a": Scripted("a", [], fails_at=1)}, CLOCK, needed=["a"])
    with pytest.raises(RuntimeError, match="out of luck"):
        contest.hold(single((1,)), max_new_tokens=4, on_batch=lambda *each: None)
    assert gc.isenabled() == was_enabled


def test_all_prepare_for_all_batches_before_the_first_is_timed() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({"a": Scripted("a", log), "b": Scripted("b", log, fails_at=PREPARING)}, CLOCK, needed=["a"])
    contest.prepare(single((1,), (2,)), max_new_tokens=4)
    assert log == [("a prepares", 2), ("b prepares", 2)]
    assert list(contest.running) == ["a"]
    assert contest.left_out == {"b": "MemoryError: no room"}
