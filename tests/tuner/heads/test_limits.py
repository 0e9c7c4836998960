"""The time of a distillation: its limit covers texts, all groups and evaluation, and its estimate comes first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_time import SimulatedTime
from tests.support.tiny import tiny_target
from tuner.config import DistillSettings, SearchConfig
from tuner.heads.distill import distil
from tuner.heads.limits import TimeLimit, distillation_time
from tuner.heads.plan import expected_time, prepare
from tuner.heads.texts import GeneratedText, TextPlan, generate_texts, spread_order
from tuner.inputs.memory import ModelSize
from tuner.measuring.baseline import Pulse
from tuner.progress import Progress

PROMPTS = tuple(tuple(range(1, 2 + length)) for length in range(1, 13))
"""Prompts of 2 to 13 tokens."""
PLAN = TextPlan(PROMPTS, samples=1, temperature=1.0, response_tokens=4, batch_size=2, seed=0)


def test_every_beginning_of_the_order_is_spread() -> None:
    assert [spread_order(count) for count in (1, 2, 5)] == [[0], [0, 1], [0, 4, 2, 1, 3]]
    for count in (7, 16, 100):
        order = spread_order(count)
        assert sorted(order) == list(range(count))
        assert max(order[: 1 + count // 4]) > count / 2


def test_texts_that_are_cut_have_prompts_of_all_lengths_and_go_on_later(tmp_path: Path) -> None:
    target, path = tiny_target(), tmp_path / "texts"
    cut = generate_texts(target, PLAN, path, may_go_on=lambda texts: len(texts) < 4)
    assert len(cut) == 4
    assert max(len(text.prompt) for text in cut) > 8
    assert [len(text.prompt) for text in cut] == sorted(len(text.prompt) for text in cut)
    whole = generate_texts(target, PLAN, path)
    assert whole == generate_texts(target, PLAN, tmp_path / "undisturbed")
    assert len(whole) == 12


def test_groups_share_what_texts_and_evaluation_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr("tuner.heads.limits.time.perf_counter", lambda: seconds[0])
    limit = TimeLimit(100.0)
    texts = [GeneratedText((1,), (2, 3), seconds=20.0)] * 2
    may_go_on = limit.allows_text(least_tokens=4)
    assert may_go_on(texts[:1])
    assert not may_go_on(texts)
    assert limit.allows_text(least_tokens=5)(texts), "there must be something to train on"
    limit.count_stored(texts, 10.0)
    seconds[0] = 20.0
    assert limit.spent == 50.0
    assert limit.for_group(1, 4, evaluation_seconds=4.0) == pytest.approx((50 - 6) / 4)
    assert TimeLimit(None).for_group(1, 4, 4.0) is None


def _work(checkpoint: Path, prompts_file: Path, workplace: Path, **settings: Any) -> SearchConfig:
    return SearchConfig.model_validate(
        {
            "model": str(checkpoint),
            "dataset": str(prompts_file),
            "max_new_tokens": 12,
            "tuning_prompts": 6,
            "held_out_prompts": 6,
            "heads": str(workplace / "heads"),
            "distillation": {
                "exit_layers": [1, 2, 3],
                "heads_at_once": 1,
                "samples": 8,
                "response_tokens": 12,
                "writing_batch_size": 8,
                "steps": 60,
                **settings,
            },
        }
    )


def _simulated(config: SearchConfig, monkeypatch: pytest.MonkeyPatch, exits: Sequence[int]) -> tuple[float, float]:
    """Return the estimated and the simulated seconds of a distillation."""
    work = prepare(config, Progress())
    simulated = SimulatedTime(0.01)
    simulated.charge(work.target.model.model.layers)
    simulated.replace_clocks(monkeypatch)
    expected = expected_time(work, exits).total
    before = simulated.now
    distil(work, exits, Progress())
    return expected, simulated.now - before


def test_the_limit_holds_for_all_groups_together(
    checkpoint: Path, prompts_file: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _work(checkpoint, prompts_file, workplace, timeout=20)
    _, seconds = _simulated(config, monkeypatch, (1, 2, 3))
    assert seconds <= 20 * 1.1, "a step and a batch of texts are not interrupted"
    assert seconds >= 20 * 0.5


def test_the_estimate_is_of_the_size_of_the_work() -> None:
    size = ModelSize.of(tiny_target().model)
    pulse = Pulse(prefill_seconds=0.6, token_seconds=0.06, num_positions=10)

    def seconds(**changes: int) -> float:
        facts = {
            "num_heads": 2,
            "heads_at_once": 2,
            "num_prompts": 10,
            "prompt_tokens": 10,
            "num_evaluated": 4,
            **changes,
        }
        settings = DistillSettings(steps=10, samples=1, response_tokens=10, batch_size=4)
        return distillation_time(size, settings, pulse, **facts).total

    assert seconds(num_prompts=20) > seconds()
    assert seconds(heads_at_once=1) > seconds(), "each group runs the target again"
    assert seconds(num_heads=4, heads_at_once=4) > seconds()
