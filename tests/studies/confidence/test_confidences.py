"""The confidences of blocks: their formulas, and the text that they are read after."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from decoding.errors import UnsupportedModelError
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.states import cache_after, sublayer_outputs
from studies.confidence.confidences import (
    CONFIDENCE_NAMES,
    CONFIDENCES,
    ConfidenceName,
    Excerpt,
    joint_scores,
    logit_lens_entropy,
    sublayer_entropy,
)
from studies.confidence.selection import standardise
from tests.support.tiny import tiny_llama, tiny_target


def test_confidences_of_a_uniform_distribution_are_zero() -> None:
    target = tiny_target()
    with torch.no_grad():
        target.model.lm_head.weight.zero_()
    ids = torch.arange(8)[None]
    assert logit_lens_entropy(target, ids) == pytest.approx(np.zeros((6, 1)), abs=1e-6)


def test_sublayer_entropy_is_the_certainty_of_both_branches() -> None:
    target = tiny_target()
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        attention, mlp = sublayer_outputs(target, ids)[2]
    expected = []
    for branch in (attention, mlp):
        probabilities = torch.softmax(branch.double(), dim=-1)
        entropy = -(probabilities * probabilities.log()).sum(-1)
        expected.append(1 - float(entropy.mean()) / math.log(branch.shape[-1]))
    assert sublayer_entropy(target, ids)[2] == pytest.approx(expected, abs=1e-5)


def test_a_model_without_separate_mlps_is_told_which_confidence_to_use() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2, word_embed_proj_dim=16
    )
    target = Target(OPTForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="logit_lens_entropy"):
        sublayer_entropy(target, torch.arange(4)[None])
    assert logit_lens_entropy(target, torch.arange(4)[None]).shape == (3, 1)


def test_values_are_clamped_before_the_softmax() -> None:
    target = tiny_target()
    block = target.blocks[2]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        block.mlp.down_proj.weight.mul_(1e4)
        clamped = sublayer_entropy(target, ids)[2, 1]
        block.mlp.down_proj.weight.mul_(10.0)
    # Both are far beyond the range of the clamp: the larger values are the same after it, so several dimensions tie.
    assert sublayer_entropy(target, ids)[2, 1] == pytest.approx(clamped, abs=0.05)
    assert clamped < 0.9


@pytest.mark.parametrize("name", CONFIDENCE_NAMES)
def test_a_window_is_read_after_the_text_before_it(name: ConfidenceName) -> None:
    target = tiny_target()
    text = [(3 * index + 1) % 60 for index in range(12)]
    confidence = CONFIDENCES[name]
    alone = confidence(target, torch.tensor([text[8:]]), None)
    after = confidence(target, torch.tensor([text[8:]]), cache_after(target, torch.tensor([text[:8]]), 4))
    per_position = [
        confidence(target, torch.tensor([[text[i]]]), cache_after(target, torch.tensor([text[:i]]), 1))
        for i in range(8, 12)
    ]
    assert after == pytest.approx(np.mean(per_position, axis=0), abs=1e-5)
    assert after != pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("name", CONFIDENCE_NAMES)
def test_the_static_runner_changes_no_confidence(name: ConfidenceName) -> None:
    text, before = torch.tensor([[5, 9, 2, 7]]), torch.tensor([[1, 4, 3]])
    eager, static = Target(tiny_llama()), Target(tiny_llama(), partial(StaticRunner, compiled=False))
    expected = CONFIDENCES[name](eager, text, cache_after(eager, before, 4))
    assert CONFIDENCES[name](static, text, cache_after(static, before, 4)) == pytest.approx(expected, abs=1e-6)


def test_published_scores_round_each_branch_and_their_sum() -> None:
    target, window, before = tiny_target(), [5, 9, 2, 7], [1, 4, 3]
    after = cache_after(target, torch.tensor([before]), len(window))
    parts = sublayer_entropy(target, torch.tensor([window]), after).astype(np.float16)
    values = (parts[:, 0] + parts[:, 1])[1:5]
    expected = (values - values.mean()) / np.float16(float(values.std()) + 1e-6)
    scores = joint_scores("sublayer_entropy", target, [Excerpt(tuple(before), tuple(window))])
    assert scores.dtype == np.float16
    assert scores.tolist() == expected.tolist()


def test_the_published_window_follows_the_prompt_at_once() -> None:
    prompt, continuation = (1, 2, 3), (4, 5, 6, 7, 8)
    assert Excerpt.of(prompt, continuation, 2, "published") == Excerpt((1, 2, 3), (7, 8))
    assert Excerpt.of(prompt, continuation, 2, "unrounded") == Excerpt((1, 2, 3, 4, 5, 6), (7, 8))
    assert Excerpt.of(prompt, continuation, 9, "unrounded") == Excerpt((1, 2, 3), continuation)


def test_several_excerpts_count_alike() -> None:
    target = tiny_target()
    excerpts = [Excerpt((1, 4, 3), (5, 9)), Excerpt((), (7, 2, 8, 6))]
    parts = [
        logit_lens_entropy(target, torch.tensor([[5, 9]]), cache_after(target, torch.tensor([[1, 4, 3]]), 2)),
        logit_lens_entropy(target, torch.tensor([[7, 2, 8, 6]])),
    ]
    expected = standardise(np.mean(parts, axis=0)[1:5, 0], "unrounded")
    assert joint_scores("logit_lens_entropy", target, excerpts, "unrounded") == pytest.approx(expected, abs=1e-4)
