"""Requests that used to be decoded as something else, without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaForCausalLM

from decoding.acceptance import Sampling
from decoding.deploy import load_decoder
from decoding.drafters.propose import _proper
from decoding.drafts import PromptLookup
from decoding.errors import UnsupportedRequestError
from tests.support.families import build, make
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


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_token_types_of_zero_are_as_good_as_none_where_they_change_nothing(family: str) -> None:
    """GPT-2 adds the embedding of token 0; BERT takes zeros for granted."""
    model = make("Bert", is_decoder=True) if family == "bert" else build(family)
    decoder = load_decoder(profile_of(model, PromptLookup()))
    zeros, settings = torch.zeros_like(PROMPT), {**GREEDY, "pad_token_id": 0}
    stock = model.generate(PROMPT, token_type_ids=zeros, **settings)
    if family == "bert":
        assert torch.equal(model.generate(PROMPT, token_type_ids=zeros, custom_generate=decoder, **settings), stock)
        with pytest.raises(UnsupportedRequestError, match="reads token_type_ids"):
            model.generate(PROMPT, token_type_ids=torch.ones_like(PROMPT), custom_generate=decoder, **settings)
    else:
        assert not torch.equal(model.generate(PROMPT, **settings), stock), "leaving them out is another text"
        with pytest.raises(UnsupportedRequestError, match="reads token_type_ids, these change its output"):
            model.generate(PROMPT, token_type_ids=zeros, custom_generate=decoder, **settings)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_size_of_prefill_chunks_is_refused(model: LlamaForCausalLM, use_cache: bool) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match="leave prefill_chunk_size out, got 2"):
        model.generate(PROMPT, prefill_chunk_size=2, use_cache=use_cache, custom_generate=decoder, **GREEDY)


@pytest.mark.parametrize("is_filled", [False, True])
def test_the_two_caches_of_an_encoder_and_a_decoder_are_refused_or_left_empty(
    model: LlamaForCausalLM, is_filled: bool
) -> None:
    past = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    decoder = load_decoder(profile_of(model, PromptLookup()))
    settings = {**GREEDY, "return_dict_in_generate": True}
    if is_filled:
        model(PROMPT[:, :2], past_key_values=past.self_attention_cache)
        with pytest.raises(UnsupportedRequestError, match="it is an EncoderDecoderCache: pass a DynamicCache"):
            model.generate(PROMPT, past_key_values=past, custom_generate=decoder, **settings)
    else:
        given = model.generate(PROMPT, past_key_values=past, custom_generate=decoder, **settings)
        assert torch.equal(given.sequences, model.generate(PROMPT, **GREEDY))


def test_padding_is_refused_where_the_model_counts_it() -> None:
    prompts = [[0, 0, 5, 17, 33], [8, 5, 17, 33, 8]]
    bart = make(
        "Bart", seed=0, **{"d_model": 32, "decoder_layers": 5, "decoder_ffn_dim": 48, "decoder_attention_heads": 4}
    )
    decoder, ids = load_decoder(profile_of(bart, PromptLookup())), torch.tensor(prompts)
    settings = {**GREEDY, "pad_token_id": 0}
    with pytest.raises(UnsupportedRequestError, match="counts padding as positions"):
        bart.generate(ids, attention_mask=(ids > 0).long(), custom_generate=decoder, **settings)
    ones = torch.ones_like(ids)
    plain = bart.generate(ids, attention_mask=ones, **settings)
    assert torch.equal(bart.generate(ids, attention_mask=ones, custom_generate=decoder, **settings), plain)


def test_a_model_in_training_mode_is_refused(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match=r"call model\.eval"):
        model.train().generate(PROMPT, custom_generate=decoder, **GREEDY)
    assert model.training


def test_overflowing_draft_can_be_sampled_from() -> None:
    for scores in (torch.full((8,), torch.nan), torch.full((8,), -torch.inf), torch.tensor([0.0, torch.inf])):
        token, distribution = Sampling().choose(_proper(scores))
        assert distribution.isfinite().all()
        assert 0 <= int(token) < len(scores)
    kept = torch.tensor([0.0, 1.0, -torch.inf])
    assert torch.equal(_proper(kept), kept)
