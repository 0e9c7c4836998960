"""transformers' own generate as a contender: the text of plain decoding, and a model that is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import Target
from decoding.text import Ending
from tests.support.tiny import tiny_llama
from tuner.measuring.contender import Decoded
from tuner.measuring.generation import StockGeneration

PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(6 + seed)) for seed in range(4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "max_cache_len": 64},
    "lookup": {"prompt_lookup_num_tokens": 10},
}
NO_EOS: frozenset[int] = frozenset()
NEW_TOKENS = 16


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def plain(model: LlamaForCausalLM, prompt: tuple[int, ...], eos: frozenset[int] = NO_EOS) -> tuple[int, ...]:
    return plain_decoder(Target(model)).generate(Request(prompt, Ending(NEW_TOKENS, eos))).tokens


def written(contender: StockGeneration, prompt: tuple[int, ...]) -> Decoded:
    return contender.decode([prompt], NEW_TOKENS)


def contenders(model: LlamaForCausalLM, eos: frozenset[int]) -> dict[str, StockGeneration]:
    return {name: StockGeneration(name, model, eos, name, options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_texts_end_where_ours_end(model: LlamaForCausalLM, name: str) -> None:
    texts = [plain(model, prompt) for prompt in PROMPTS]
    eos = frozenset({texts[0][10], texts[1][12]})
    assert any(len(plain(model, prompt, eos)) < NEW_TOKENS for prompt in PROMPTS)
    for prompt in PROMPTS:
        assert written(contenders(model, eos)[name], prompt).texts == (plain(model, prompt, eos),)
        decoded = written(contenders(model, NO_EOS)[name], prompt)
        assert decoded.texts == (plain(model, prompt),)
        assert min(decoded.prefill_seconds, decoded.decode_seconds) > 0
        if name in ("dynamic", "static"):
            assert (decoded.rounds, decoded.accepted, decoded.prefill_tokens) == (NEW_TOKENS - 1, 0, 1)


@pytest.mark.parametrize("name", ["dynamic", "static"])
@pytest.mark.parametrize("pad_token_id", [None, 5])
def test_texts_of_a_batch_are_those_of_each_prompt_alone(
    model: LlamaForCausalLM, name: str, pad_token_id: int | None
) -> None:
    model.generation_config.pad_token_id = pad_token_id
    texts = [plain(model, prompt) for prompt in PROMPTS]
    for eos in (NO_EOS, frozenset({texts[0][10], texts[1][12]})):
        alone = [plain(model, prompt, eos) for prompt in PROMPTS]
        together = contenders(model, eos)[name].decode(PROMPTS, NEW_TOKENS)
        assert list(together.texts) == alone
        # A token a pass, and none after the end of a text, while longer ones go on.
        assert together.rounds == together.decode_tokens == sum(map(len, alone)) - len(alone)
    assert len({len(text) for text in alone}) > 1


def test_transformers_drafts_for_one_text_at_a_time(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        contenders(model, NO_EOS)["lookup"].decode(PROMPTS, NEW_TOKENS)


def test_the_models_own_settings_make_no_other_text_and_are_put_back(model: LlamaForCausalLM) -> None:
    own = model.generation_config
    own.do_sample, own.temperature, own.repetition_penalty = True, 5.0, 3.0
    before = own.to_dict()
    for contender in contenders(model, NO_EOS).values():
        assert written(contender, PROMPTS[0]).texts == (plain(model, PROMPTS[0]),)
    assert model.generation_config is own
    assert own.to_dict() == before
