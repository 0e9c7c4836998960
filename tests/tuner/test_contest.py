"""The contest: one stopwatch for everybody, turns that move on, and who fails is left out with the reason."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tuner.contest import Contest, Stopwatch, Writing
from tuner.measure import WARM_UP_TOKENS

CPU = torch.device("cpu")


class Scripted:
    """Writes the same tokens whatever the prompt, notes when it was its turn, and fails at one prompt if told to."""

    settings: Mapping[str, Any] = {}

    def __init__(self, name: str, log: list[tuple[str, int]], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def describe(self) -> str:
        return self.name

    def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
        self.log.append((self.name, prompt[0]))
        if prompt[0] == self.fails_at:
            raise RuntimeError("out of luck\nand more")
        assert not gc.isenabled() or max_new_tokens == WARM_UP_TOKENS
        watch.put([7])
        watch.put(range(max_new_tokens - 1))


def test_the_prefill_ends_with_the_first_tokens_and_what_is_decoded_comes_behind_them() -> None:
    times = iter([10.0, 11.0, 13.0, 16.0])
    watch = Stopwatch(lambda: next(times))
    for tokens in ([5, 6], [7], [8, 9, 1]):
        watch.put(tokens)
    writing = watch.writing()
    assert writing.tokens == (5, 6, 7, 8, 9, 1)
    assert (writing.prefill_seconds, writing.decode_seconds) == (1.0, 5.0)
    assert (writing.num_decoded, writing.num_passes) == (4, 2)


def test_a_text_of_nothing_is_no_text() -> None:
    with pytest.raises(ValueError, match="not a single token"):
        Stopwatch().writing()


def test_who_is_first_moves_on_by_one_from_text_to_text() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({name: Scripted(name, log) for name in "abc"}, CPU)
    seen: list[tuple[int, int, dict[str, Writing]]] = []
    contest.hold(
        [(1,), (2,)], max_new_tokens=4, repeats=2, on_texts=lambda *each: seen.append((*each[:2], dict(each[2])))
    )
    assert log == [
        *[("a", 1), ("b", 1), ("c", 1)],
        *[("b", 2), ("c", 2), ("a", 2)],
        *[("c", 1), ("a", 1), ("b", 1)],
        *[("a", 2), ("b", 2), ("c", 2)],
    ]
    assert [each[:2] for each in seen] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(text.tokens == (7, 0, 1, 2) for _, _, texts in seen for text in texts.values())
    assert all(set(texts) == {"a", "b", "c"} for _, _, texts in seen)


def test_everybody_is_warmed_up_with_a_few_tokens() -> None:
    log: list[tuple[str, int]] = []
    lengths: list[int] = []

    class Counted(Scripted):
        def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
            lengths.append(max_new_tokens)
            super().write(prompt, max_new_tokens, watch)

    contest = Contest({name: Counted(name, log) for name in "ab"}, CPU)
    contest.warm_up([(1,), (2,)])
    assert log == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert set(lengths) == {WARM_UP_TOKENS}


def test_who_fails_is_left_out_with_the_reason_and_the_others_go_on() -> None:
    log: list[tuple[str, int]] = []
    contest = Contest({"a": Scripted("a", log), "b": Scripted("b", log, fails_at=2)}, CPU, needed=["a"])
    texts: list[set[str]] = []
    contest.hold([(1,), (2,), (3,)], max_new_tokens=4, on_texts=lambda place, repeat, each: texts.append(set(each)))
    assert texts == [{"a", "b"}, {"a"}, {"a"}]
    assert contest.left_out == {"b": "RuntimeError: out of luck"}
    assert set(contest.running) == {"a"}
    assert ("b", 3) not in log


def test_who_must_not_fail_raises_and_garbage_is_collected_again() -> None:
    was_enabled = gc.isenabled()
    contest = Contest({"a": Scripted("a", [], fails_at=1)}, CPU, needed=["a"])
    with pytest.raises(RuntimeError, match="out of luck"):
        contest.hold([(1,)], max_new_tokens=4, on_texts=lambda *each: None)
    assert gc.isenabled() == was_enabled
