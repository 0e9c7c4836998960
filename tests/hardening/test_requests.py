"""Requests that used to be decoded as something else, without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from decoding.acceptance import Sampling
from decoding.deploy import load_decoder
from decoding.drafters.propose import _proper
from decoding.drafts import PromptLookup
from decoding.errors import TargetMismatchError, UnsupportedRequestError
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 63}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(3)


def test_positions_with_gaps_are_refused(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match="leave position_ids out"):
        model.generate(PROMPT, position_ids=torch.tensor([[0, 1, 7, 8]]), custom_generate=decoder, **GREEDY)
    given = model.generate(PROMPT, position_ids=torch.tensor([[0, 1, 2, 3]]), custom_generate=decoder, **GREEDY)
    assert torch.equal(given, model.generate(PROMPT, **GREEDY))


def test_token_types_that_the_model_reads_are_refused() -> None:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=None)
    ).eval()
    decoder = load_decoder(profile_of(gpt2, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match="reads token_type_ids"):
        gpt2.generate(PROMPT, token_type_ids=torch.ones_like(PROMPT), custom_generate=decoder, **GREEDY)


def test_a_model_in_training_mode_is_refused(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match=r"call model\.eval"):
        model.train().generate(PROMPT, custom_generate=decoder, **GREEDY)
    assert model.training


def test_a_replaced_module_is_not_decoded_with_the_old_one(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    model.generate(PROMPT, custom_generate=decoder, **GREEDY)
    model.lm_head = nn.Linear(32, 64, bias=False)
    with pytest.raises(TargetMismatchError, match="other weights"):
        model.generate(PROMPT, custom_generate=decoder, **GREEDY)


def test_overflowing_draft_can_be_sampled_from() -> None:
    for scores in (torch.full((8,), torch.nan), torch.full((8,), -torch.inf), torch.tensor([0.0, torch.inf])):
        token, distribution = Sampling().choose(_proper(scores))
        assert distribution.isfinite().all()
        assert 0 <= int(token) < len(scores)
    kept = torch.tensor([0.0, 1.0, -torch.inf])
    assert torch.equal(_proper(kept), kept)
