"""ConfLayers: the adaptive threshold on cases computed by hand, the movement of lambda, and the search around them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from decoding.drafts import LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.target import Target
from studies.contract import Problem, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from studies.searches.conf_layers import (
    ConfLayers,
    ConfLayersSettings,
    adapt_lambda,
    logit_lens_entropy,
    select_layers,
    sublayer_entropy,
)
from studies.searches.registry import create_study
from tests.support.tiny import tiny_target


def test_equal_confidences_skip_nothing() -> None:
    # z is 0 everywhere, so every neighbourhood has mean 0 and deviation 0, and 0 < 0 never holds.
    for lam in (-1.0, 0.0, 1.0):
        assert select_layers([0.3] * 6, lam=lam, num_layers=8) == []


def test_a_dip_between_equals_is_skipped() -> None:
    # z = (0.707, -1.414, 0.707). Second gradient: 2.121 everywhere, so k = 3, A = 15 and g = 0.5 everywhere.
    # Windows 2 + int(15 * 0.5 * (1, 2, 3) / 5) = 3, 5, 6; halves 1, 2, 3. Only block 2 lies below its neighbours' mean.
    assert select_layers([1.0, 0.0, 1.0], lam=0.0, num_layers=5) == [2]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (0.0, [2, 4]),  # means of the neighbours: -0.707, 0.354, -1.061, 0.707, -1.414
        (2.0, [2, 4]),  # thresholds of blocks 2 and 4: 0.354 - 2 * 0.354 and 0.707 - 2 * 0.707
        (4.0, []),  # -1.061 and -2.121: below both values
        (-4.0, [2, 3, 4]),  # block 3: -1.061 + 4 * 0.354 = 0.354 > 0
    ],
)
def test_thresholds_of_immediate_neighbours(lam: float, expected: list[int]) -> None:
    # Mean 2, deviation sqrt(2): z = (0.707, -0.707, 0, -1.414, 1.414). A is capped at 0, so each window is 2, its half 1.
    assert select_layers([3.0, 1.0, 2.0, 0.0, 4.0], lam=lam, num_layers=7, window_growth_cap=0) == expected


def test_the_window_grows_with_depth_and_curvature() -> None:
    # z of (0, 0, 0, 0, 3, 0, 0, 0): 3 at block 5, the rest equal. Gradient twice is 0 at the first two indices (k = 2, A = 10).
    # Uncapped, blocks far after the peak see it in a window that has grown and fall below their neighbours' mean; with
    # immediate neighbours only blocks 4 and 6 do.
    values = [0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert select_layers(values, lam=0.0, num_layers=10, window_growth_cap=0) == [4, 6]
    wide = select_layers(values, lam=0.0, num_layers=10)
    assert {4, 6} < set(wide)
    assert 5 not in wide


def test_the_first_and_last_block_are_never_selected() -> None:
    rng = np.random.default_rng(0)
    for num_layers in (3, 4, 12, 40):
        for _ in range(50):
            found = select_layers(rng.random(num_layers - 2).tolist(), lam=float(rng.normal()), num_layers=num_layers)
            assert found == sorted(set(found))
            assert all(1 <= index <= num_layers - 2 for index in found)


def test_a_wrong_number_of_confidences_is_refused() -> None:
    with pytest.raises(ValueError, match="8 layers have 6 blocks between the first and the last, got 5"):
        select_layers([0.1] * 5, lam=0.0, num_layers=8)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.71, 0.05), (0.70, 0.0), (0.45, 0.0), (0.44, -0.05)],  # wanted 0.45, slack 0.25
)
def test_lambda_moves_towards_the_wanted_ratio(ratio: float, expected: float) -> None:
    assert adapt_lambda(0.0, ratio, 0.45) == pytest.approx(expected)


def test_confidences_of_a_uniform_distribution_are_zero() -> None:
    target = tiny_target()
    with torch.no_grad():
        target.model.lm_head.weight.zero_()
    ids = torch.arange(8)[None]
    assert logit_lens_entropy(target, ids) == pytest.approx(np.zeros(6), abs=1e-6)


def test_sublayer_entropy_is_the_certainty_of_both_branches() -> None:
    target = tiny_target()
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        attention, mlp = target.sublayer_outputs(ids)[2]
    expected = 0.0
    for branch in (attention, mlp):
        probabilities = torch.softmax(branch.double(), dim=-1)
        entropy = -(probabilities * probabilities.log()).sum(-1)
        expected += 1 - float(entropy.mean()) / math.log(branch.shape[-1])
    assert sublayer_entropy(target, ids)[2] == pytest.approx(expected, abs=1e-5)


def _problem() -> Problem:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(40)) for index in range(4))
    return Problem(tiny_target(8), prompts=texts, continuations=texts, earlier={}, seed=0)


def limited(problem: Problem, **settings: Any) -> Study:
    return create_study("conf_layers", problem, ConfLayersSettings(**settings))


def _record(study: Study, number: int, speedup: float, **facts: Any) -> TrialRecord:
    trial = optuna.create_study().ask()
    candidate, notes = study.propose(trial)
    sample = PromptSample(
        prompt=0,
        plain_seconds=speedup,
        plain_tokens=1,
        draft_seconds=1.0,
        draft_tokens=1,
        rounds=1,
        drafted=1,
        accepted=1,
        identical=True,
    )
    values = {"state": TrialState.COMPLETE, "measurement": Measurement(samples=(sample,)), **facts}
    return TrialRecord(study="conf_layers", number=number, candidate=candidate, notes=notes, **values)


def test_the_search_starts_from_the_odd_blocks() -> None:
    record = _record(ConfLayers(_problem(), ConfLayersSettings()), 0, 1.0)
    assert record.candidate.draft == LayerSkip.blocks([1, 3, 5])


def test_the_confidences_take_turns() -> None:
    study = ConfLayers(_problem(), ConfLayersSettings())
    seen = []
    for number in range(4):
        record = _record(study, number, 1.0)
        study.observe(record)
        seen.append(record.notes["confidence"])
    assert seen == ["sublayer_entropy", "logit_lens_entropy"] * 2


def test_it_stops_after_patience_iterations_without_a_better_speedup() -> None:
    study = limited(_problem(), patience=3)
    for number, speedup in enumerate([1.0, 1.2, 1.1, 1.2, 0.9]):
        assert study.finished() is None
        study.observe(_record(study, number, speedup))
    assert study.finished() == "no better candidate in 3 trials"


def test_it_stops_at_the_iteration_limit() -> None:
    study = limited(_problem(), max_trials=2)
    for number in range(2):
        study.observe(_record(study, number, 1.0 + number))
    assert study.finished() == "2 trials done"


def test_failed_trials_count_as_iterations_without_improvement() -> None:
    study = limited(_problem(), patience=2)
    for number in range(2):
        study.observe(_record(study, number, 1.0, state=TrialState.FAIL, measurement=None, reason="out of memory"))
    assert study.finished() == "no better candidate in 2 trials"


def test_a_resumed_search_proposes_what_the_uninterrupted_one_would() -> None:
    problem, settings = _problem(), ConfLayersSettings()
    whole = ConfLayers(problem, settings)
    records = []
    for number in range(5):
        records.append(_record(whole, number, 1.0 + 0.1 * number))
        whole.observe(records[-1])
    resumed = ConfLayers(problem, settings)
    for record in records:
        resumed.observe(TrialRecord.model_validate_json(record.model_dump_json()))
    assert _record(resumed, 5, 1.0).candidate == _record(whole, 5, 1.0).candidate


def test_a_model_without_separate_mlps_is_told_which_confidence_to_use() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2, word_embed_proj_dim=16
    )
    target = Target(OPTForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="logit_lens_entropy"):
        sublayer_entropy(target, torch.arange(4)[None])
    assert logit_lens_entropy(target, torch.arange(4)[None]).shape == (3,)
