"""Contenders in turns: everybody on the same prompts, turns that move on, and who fails is left out with the reason."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from decoding.losslessness import Comparison
from decoding.text import Ending
from studies.measurement import Measurement
from tests.support.records import sample
from tuner.measuring.baseline import Baseline
from tuner.measuring.comparison import Compared
from tuner.measuring.contender import PLAIN, Decoded, Prompts
from tuner.measuring.turns import WARM_UP_TOKENS, Interleaved, PairedBench

PREPARING = -1


class Scripted:
    """A contender that always writes the same tokens, notes its turns, and can fail at one prompt."""

    settings: Mapping[str, Any] = {}
    description = ""

    def __init__(
        self, name: str, log: list[tuple[str, int]], fails_at: int | None = None, seconds: float = 1.0
    ) -> None:
        self.name, self.log, self.fails_at, self.seconds = name, log, fails_at, seconds

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        self.log.append((f"{self.name} prepares", len(batches)))
        if self.fails_at == PREPARING:
            raise MemoryError("no room")

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        self.log.append((self.name, prompts[0][0]))
        if prompts[0][0] == self.fails_at:
            raise RuntimeError("out of luck\nand more")
        assert not gc.isenabled() or max_new_tokens == WARM_UP_TOKENS
        tokens = (max_new_tokens - 1) * len(prompts)
        texts = (tuple(range(max_new_tokens)),) * len(prompts)
        return Decoded(texts, 0.5, len(prompts), self.seconds * tokens, tokens, rounds=tokens)


def single(*prompts: Sequence[int]) -> list[tuple[int, Prompts]]:
    """A batch of each prompt, with its index."""
    return [(index, [prompt]) for index, prompt in enumerate(prompts)]


def test_who_is_first_moves_on_by_one_from_batch_to_batch() -> None:
    log: list[tuple[str, int]] = []
    seen: list[tuple[int, set[str]]] = []
    Interleaved([Scripted(name, log) for name in "abc"]).take(
        [*single((1,), (2,)), (2, [(3,), (4,)])], 4, lambda index, done: seen.append((index, set(done)))
    )
    assert log == [
        *[("a", 1), ("b", 1), ("c", 1)],
        *[("b", 2), ("c", 2), ("a", 2)],
        *[("c", 3), ("a", 3), ("b", 3)],
    ]
    assert seen == [(index, {"a", "b", "c"}) for index in range(3)]


def test_who_fails_is_left_out_with_the_reason_and_the_others_go_on() -> None:
    log: list[tuple[str, int]] = []
    turns = Interleaved([Scripted("a", log), Scripted("b", log, 2), Scripted("c", log, PREPARING)], may_fail="bc")
    turns.prepare([[(1,)]], 4)
    turns.warm_up([[(1,)]])
    done: list[set[str]] = []
    turns.take(single((1,), (2,), (3,)), 4, lambda index, found: done.append(set(found)))
    assert done == [{"a", "b"}, {"a"}, {"a"}]
    assert turns.left_out == {"b": "RuntimeError: out of luck", "c": "MemoryError: no room"}
    assert set(turns.running) == {"a"}
    assert ("b", 3) not in log


def test_who_must_not_fail_raises_and_garbage_is_collected_again() -> None:
    was_enabled = gc.isenabled()
    with pytest.raises(RuntimeError, match="out of luck"):
        Interleaved([Scripted("a", [], fails_at=1)]).take(single((1,)), 4, lambda *each: None)
    assert gc.isenabled() == was_enabled


def test_every_contender_has_samples_beside_plain_decoding_of_the_same_turn() -> None:
    plain, fast = Scripted(PLAIN, [], seconds=3.0), Scripted("fast", [], seconds=1.0)
    broken = Scripted("broken", [], fails_at=2)
    prompts = ((1,), (5,), (2,), (6,))
    bench = PairedBench(
        Baseline(prompts, (), (0, 1, 2, 3), Ending(11, frozenset()), batch_size=2, categories=("qa", "qa", "qa", None)),
        lambda name, row, texts: Comparison(identical=row != 3, tie=row == 3),
    )
    seen: list[set[str]] = []
    turns = Interleaved([plain, fast, broken], may_fail=["broken"])
    found = bench.compete(turns, bench.indices, lambda samples: seen.append(set(samples)), repeats=2, plain_too=True)
    assert list(found) == [PLAIN, "fast"]
    assert seen == [{PLAIN, "fast", "broken"}, *[{PLAIN, "fast"}] * 3]
    first, second = found["fast"].samples
    assert (first.plain_seconds, first.draft_seconds, first.draft_tokens) == (120.0, 40.0, 40), "both repeats"
    assert (first.texts.count, first.identical, first.category) == (4, True, "qa")
    assert (second.texts.identical, second.texts.ties, second.tie, second.category) == (2, 2, True, None)
    assert found[PLAIN].speedup == 1.0
    assert found["fast"].speedup == 3.0


def of_lengths(*lengths: int) -> Measurement:
    """A measurement with one sample for each number of decoded tokens."""
    return Measurement(samples=tuple(sample(1.0, index, draft_tokens=n) for index, n in enumerate(lengths)))


def test_samples_that_one_contender_decoded_too_little_of_count_for_none() -> None:
    needed, long = (PLAIN, "profile"), of_lengths(20, 20, 20, 20)
    found = Compared.of({PLAIN: long, "profile": long, "exit": of_lengths(20, 7, 20, 20)}, needed=needed)
    assert (list(found.measurements), found.left_out, found.counted) == ([PLAIN, "profile", "exit"], {}, (0, 2, 3))
    found = Compared.of({PLAIN: long, "profile": long, "exit": of_lengths(20, 7, 7, 7)}, needed=needed)
    assert (list(found.measurements), found.counted) == ([PLAIN, "profile"], (0, 1, 2, 3))
    assert "within its prefill" in found.left_out["exit"]
    assert Compared.of({PLAIN: of_lengths(20, 7, 7, 7), "profile": long}, needed=needed).counted == (0,)
