"""Forecasts of exits: right against the model itself, with heads and without, on costs that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import RoundCosts
from decoding.drafts import EarlyExit
from decoding.exit_heads import load_exit_head
from decoding.head_folder import MAX_LOADED, HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Problem
from studies.prediction.lockstep_cost import LockstepBatches, batches_of
from studies.prediction.replay import Recording, replay
from studies.searches.exit_forecast import ExitForecast, forecast_exits
from tests.support.heads import write_heads
from tests.support.tiny import tiny_target

MAX_TOKENS = 4
NUM_LAYERS = 6
STEPS = (0.2, 0.4, 0.8)


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace measured costs by made-up ones; the list holds the longest draft of each measurement."""
    asked: list[int] = []

    def costs(target: Target, drafter: Any, max_tokens: int, *, num_sequences: int) -> RoundCosts:
        asked.append(max_tokens)
        step = STEPS[(len(asked) - 1) % len(STEPS)]
        return RoundCosts(draft_step=step, verify=tuple(1 + step * width for width in range(max_tokens + 1)))

    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", costs)
    return asked


@pytest.fixture(scope="module")
def problem() -> Problem:
    target = tiny_target(NUM_LAYERS)
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(6))
    texts = tuple(
        plain_decoder(target).generate(Request(prompt, Ending(16 + 4 * seed))).tokens
        for seed, prompt in enumerate(prompts)
    )
    return Problem(target, prompts, texts, earlier={}, seed=0)


def exits(layers: Sequence[int]) -> list[EarlyExit]:
    return [EarlyExit(exit_layer=layer) for layer in layers]


def by_layer(forecasts: list[ExitForecast]) -> dict[int, ExitForecast]:
    return {forecast.draft.exit_layer: forecast for forecast in forecasts}


@torch.no_grad()
def direct_recordings(problem: Problem, exit_layer: int) -> list[Recording]:
    """From the hidden states that transformers gives: each position after the prefill's token."""
    model = problem.target.model
    recordings = []
    for prompt, text in zip(problem.prompts, problem.continuations, strict=True):
        done = model(torch.tensor([[*prompt, *text]]), output_hidden_states=True)
        draft = model.lm_head(model.model.norm(done.hidden_states[exit_layer]))
        recordings.append(Recording.of(done.logits[0, len(prompt) : -1], draft[0, len(prompt) : -1]))
    return recordings


def test_forecast_is_what_the_model_itself_says(problem: Problem) -> None:
    forecasts = forecast_exits(problem, exits(range(1, NUM_LAYERS)), MAX_TOKENS)
    assert len({round(forecast.agreement, 6) for forecast in forecasts}) > 2
    for forecast in forecasts:
        expected = direct_recordings(problem, forecast.draft.exit_layer)
        assert forecast.agreement == pytest.approx(sum(each.agreement for each in expected) / len(expected))
        assert forecast.acceptance == pytest.approx(sum(each.acceptance for each in expected) / len(expected), abs=1e-4)


def test_forecasts_come_best_first(problem: Problem) -> None:
    forecasts = forecast_exits(problem, exits(range(1, NUM_LAYERS)), MAX_TOKENS)
    speedups = [forecast.speedup for forecast in forecasts]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > speedups[-1]


def test_costs_of_an_exit_between_timed_ones_are_interpolated(problem: Problem, timed: list[int]) -> None:
    forecasts = by_layer(forecast_exits(problem, exits(range(1, NUM_LAYERS)), MAX_TOKENS))
    assert timed == [MAX_TOKENS] * 3
    for exit_layer, step in {1: 0.2, 2: 0.3, 3: 0.4, 4: 0.6, 5: 0.8}.items():
        costs = RoundCosts(draft_step=step, verify=tuple(1 + step * width for width in range(MAX_TOKENS + 1)))
        forecast = forecasts[exit_layer]
        replayed = replay(forecast.rule, direct_recordings(problem, exit_layer), costs)
        assert forecast.speedup == pytest.approx(replayed.speedup)


def test_rule_of_a_forecast_is_the_best_of_those_tried(problem: Problem) -> None:
    (forecast,) = forecast_exits(problem, exits([5]), MAX_TOKENS)
    costs = RoundCosts(draft_step=0.2, verify=tuple(1 + 0.2 * width for width in range(MAX_TOKENS + 1)))
    recordings = direct_recordings(problem, 5)
    for length in range(1, MAX_TOKENS + 1):
        rule = type(forecast.rule).model_validate({**forecast.rule.model_dump(), "max_tokens": length})
        assert replay(rule, recordings, costs).speedup <= forecast.speedup + 1e-9
    assert 1 <= forecast.rule.max_tokens <= MAX_TOKENS


def test_forecast_for_batches_is_of_sequences_in_lockstep(problem: Problem) -> None:
    assert problem.target.unbatchable_reason is None
    pairs = replace(problem, batch_size=2)
    (forecast,) = forecast_exits(pairs, exits([3]), MAX_TOKENS)
    costs = RoundCosts(draft_step=0.2, verify=tuple(1 + 0.2 * width for width in range(MAX_TOKENS + 1)))
    recordings = direct_recordings(problem, 3)
    together = LockstepBatches(tuple(batches_of(range(len(recordings)), 2).values()), resumes=True)
    replayed = replay(forecast.rule, recordings, costs, None, together)
    assert forecast.speedup == pytest.approx(replayed.speedup)
    assert replayed.speedup != replay(forecast.rule, recordings, costs).speedup


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_last_block_as_the_head_of_the_last_exit_agrees_everywhere(
    problem: Problem, tmp_path: Path, temperature: float
) -> None:
    drafts = write_heads(problem.target, tmp_path, [5])
    asked = replace(problem, heads=HeadFolder(problem.target, tmp_path), decoding=Decoding(temperature=temperature))
    forecasts = forecast_exits(asked, [*drafts.values(), *exits([5])], MAX_TOKENS)
    without, with_head = sorted(forecasts, key=lambda each: each.draft.head is not None)
    assert with_head.agreement == 1.0
    assert with_head.acceptance == pytest.approx(1.0, abs=1e-4)
    assert without.agreement < 1.0


def test_heads_and_exits_without_are_timed_apart(problem: Problem, tmp_path: Path, timed: list[int]) -> None:
    drafts = write_heads(problem.target, tmp_path, [1, 2])
    asked = replace(problem, heads=HeadFolder(problem.target, tmp_path))
    assert len(forecast_exits(asked, [*exits([1, 2, 3, 4, 5]), *drafts.values()], MAX_TOKENS)) == 7
    assert len(timed) == 3 + 2


def test_heads_are_read_from_disk_once_and_not_again_for_every_text(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = write_heads(problem.target, tmp_path, range(1, NUM_LAYERS))
    assert len(drafts) > MAX_LOADED
    read: list[Path] = []
    honest = load_exit_head

    def load(path: Path, *rest: Any) -> Any:
        read.append(path)
        return honest(path, *rest)

    monkeypatch.setattr("decoding.head_folder.load_exit_head", load)
    asked = replace(problem, heads=HeadFolder(problem.target, tmp_path))
    forecast_exits(asked, list(drafts.values()), MAX_TOKENS)
    assert len(read) <= len(drafts) + 3, "once to predict, and the timed ones again"


def test_texts_of_a_single_token_are_passed_over(problem: Problem) -> None:
    short = replace(problem, prompts=((5, 6), *problem.prompts), continuations=((7,), *problem.continuations))
    (passed_over,), (usual,) = (forecast_exits(each, exits([4]), MAX_TOKENS) for each in (short, problem))
    assert (passed_over.agreement, passed_over.acceptance) == (usual.agreement, usual.acceptance)
