"""Sets of ConfLayers as proposals: the text they are read from, their range of lambda, and models without a confidence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import Target
from decoding.target.states import sublayer_outputs
from decoding.text import Ending
from studies.confidence.selection import select_from_scores, standardise
from studies.prediction.proposals import LAMBDAS, MOST_SEQUENCES, WINDOW, confident_skips
from studies.prediction.survey import Survey
from tests.support.tiny import tiny_target

NUM_LAYERS = 12


def written(target: Target, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return `count` prompts, each with a continuation longer than the window."""
    prompts = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(6 + seed)) for seed in range(count)]
    plain = plain_decoder(target)
    return [(prompt, plain.generate(Request(prompt, Ending(WINDOW + 8))).tokens) for prompt in prompts]


def surveyed(target: Target, count: int = 4) -> Survey:
    """Survey `count` sequences."""
    prompts, texts = zip(*written(target, count), strict=True)
    return Survey(target, prompts, texts)


@torch.inference_mode()
def in_context(target: Target, prompt: Sequence[int], continuation: Sequence[int]) -> list[float]:
    """Return the entropy confidences of one pass over the whole text, of its last `WINDOW` tokens."""
    outputs = sublayer_outputs(target, torch.tensor([[*prompt, *continuation]]))
    values = []
    for branches in outputs:
        certainties = []
        for branch in branches:
            p = torch.softmax(branch[-WINDOW:].double(), dim=-1)
            entropy = torch.special.entr(p).sum(-1).mean()
            certainties.append(1 - entropy / torch.log(torch.tensor(float(branch.shape[-1]))))
        values.append(float(sum(certainties)))
    return values[1:-1]


def test_confidences_are_read_after_the_prompt_and_all_earlier_tokens() -> None:
    target = tiny_target(NUM_LAYERS)
    survey = surveyed(target, 1)
    scores = standardise(in_context(target, *written(target, 1)[0]), "unrounded")
    expected = {tuple(select_from_scores(scores, lam=lam, num_layers=NUM_LAYERS, form="unrounded")) for lam in LAMBDAS}
    sets, _ = confident_skips(survey)
    assert expected - {()} <= sets.keys()


def test_both_confidences_and_the_whole_range_of_lambda_propose() -> None:
    sets, remarks = confident_skips(surveyed(tiny_target(NUM_LAYERS)))
    origins = list(sets.values())
    assert remarks == []
    assert any("sublayer_entropy, lambda" in origin for origin in origins)
    assert any("logit_lens_entropy, lambda" in origin for origin in origins)
    lambdas = {float(origin.rsplit(" ", 1)[1].rstrip(")")) for origin in origins}
    assert min(lambdas) < 0 <= max(lambdas)
    assert all(origin.startswith("conf_layers (") for origin in origins)


def test_several_prompts_are_read_but_not_all_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = tiny_target(NUM_LAYERS), []

    def counted(self: Target, token_ids: torch.Tensor, after: KVCache | None = None) -> object:
        read.append(tuple(token_ids[0].tolist()))
        return sublayer_outputs(self, token_ids, after=after)

    monkeypatch.setattr("studies.confidence.confidences.sublayer_outputs", counted)
    confident_skips(surveyed(target, 6))
    assert len(set(read)) == len(read) == MOST_SEQUENCES > 1


def test_a_model_without_separate_mlps_gets_the_other_confidence_and_a_remark() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=8, num_attention_heads=2, word_embed_proj_dim=16
    )
    torch.manual_seed(0)
    sets, remarks = confident_skips(surveyed(Target(OPTForCausalLM(config).eval()), 2))
    assert sets
    assert all("logit_lens_entropy" in origin for origin in sets.values())
    assert len(remarks) == 1
    assert "no sets of ConfLayers by sublayer_entropy: block 0 has no separate mlp module" in remarks[0]
