"""Stock generation beside the winner: same prompts, same texts, and a reason where there is no comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Candidate
from tests.support.benches import bench_on
from tests.support.tiny import tiny_llama
from tuner.measuring.generation import ONE_SEQUENCE, StockGeneration
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.review.document import StockComparison
from tuner.search.stock import compare_with_stock, spread

PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(6 + seed)) for seed in range(4)]
DRAFT = Candidate(draft=LayerSkip.blocks((4,)), draft_length=Fixed(max_tokens=2))


@pytest.fixture(scope="module")
def held_out() -> Bench:
    return bench_on(Target(tiny_llama()), PROMPTS, max_new_tokens=10)


def compared(bench: Bench, profile: Candidate | None = DRAFT, count: int = 3, times: int = 99) -> StockComparison | str:
    """Compare on `count` samples, of which time allows `times`."""
    task = cast("Any", SimpleNamespace(loaded=SimpleNamespace(model=bench.target.model), target=bench.target))
    left = iter(range(times))
    return compare_with_stock(task, profile, bench, count, Progress(), lambda: next(left, None) is not None)


def test_all_contenders_write_the_text_of_plain_decoding(held_out: Bench) -> None:
    found = compared(held_out)
    assert isinstance(found, StockComparison)
    assert found.num_prompts == 3
    assert {name: (each.texts, each.identical) for name, each in found.contenders.items()} == dict.fromkeys(
        ("profile", "hf", "hf-prompt-lookup"), (3, 3)
    )
    assert found.contenders["profile"].profile_over_it.value == pytest.approx(1.0)
    generate = found.contenders["hf"]
    expected = found.contenders["profile"].tokens_per_second.value / generate.tokens_per_second.value
    assert generate.profile_over_it.value == pytest.approx(expected)
    assert generate.over_plain.value == pytest.approx(
        generate.tokens_per_second.value / found.plain_tokens_per_second.value
    )


def test_a_profile_that_decodes_plainly_is_compared_by_plain_decoding(held_out: Bench) -> None:
    found = compared(held_out, None, 2)
    assert isinstance(found, StockComparison)
    assert list(found.contenders) == ["hf", "hf-prompt-lookup"]
    hf = found.contenders["hf"]
    assert hf.profile_over_it.value == pytest.approx(1 / hf.over_plain.value)


def test_time_ends_the_comparison(held_out: Bench) -> None:
    cut = compared(held_out, count=4, times=2)
    assert isinstance(cut, StockComparison)
    assert cut.num_prompts == 2
    assert "too few prompts" in str(compared(held_out, times=1))
    assert "no time was left" in str(compared(held_out, count=0))


def test_a_contender_that_fails_is_left_out_with_the_reason(held_out: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StockGeneration, *given: object) -> None:
        raise RuntimeError("not on this model")

    monkeypatch.setattr(StockGeneration, "decode", fail)
    outcome = compared(held_out, count=2)
    assert "hf: RuntimeError: not on this model" in str(outcome)


def test_batches_leave_out_prompt_lookup() -> None:
    found = compared(bench_on(Target(tiny_llama()), PROMPTS, max_new_tokens=10, batch_size=2), count=2)
    assert isinstance(found, StockComparison)
    assert found.left_out == {"hf-prompt-lookup": ONE_SEQUENCE}
    assert (found.num_prompts, found.contenders["hf"].identical) == (4, 4)


def test_prompts_are_spread_over_the_categories() -> None:
    assert spread(range(24), 6) == [0, 4, 8, 12, 16, 20]
    assert spread(range(2), 2) == [0, 1]
