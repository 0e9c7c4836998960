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
from tuner.measuring.contender import Decoded, Prompts
from tuner.measuring.generation import (
    CHOICE_TOKENS,
    EarlyExitGeneration,
    StockGeneration,
    exits_to_try,
    fastest_exit,
)

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
    stock = {name: StockGeneration(name, model, eos, name, options) for name, options in OPTIONS.items()}
    return {**stock, "exit": EarlyExitGeneration("exit", model, eos, 3)}


@pytest.mark.parametrize("name", [*OPTIONS, "exit"])
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


@pytest.mark.parametrize("name", ["lookup", "exit"])
def test_transformers_drafts_for_one_text_at_a_time(model: LlamaForCausalLM, name: str) -> None:
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        contenders(model, NO_EOS)[name].decode(PROMPTS, NEW_TOKENS)


def test_the_models_own_settings_make_no_other_text_and_are_put_back(model: LlamaForCausalLM) -> None:
    own = model.generation_config
    own.do_sample, own.temperature, own.repetition_penalty = True, 5.0, 3.0
    before = own.to_dict()
    for contender in contenders(model, NO_EOS).values():
        assert written(contender, PROMPTS[0]).texts == (plain(model, PROMPTS[0]),)
    assert model.generation_config is own
    assert own.to_dict() == before


def test_drafts_are_as_long_as_the_models_own_settings_say(model: LlamaForCausalLM) -> None:
    exit_at = EarlyExitGeneration("exit", model, NO_EOS, 5)
    model.generation_config.assistant_confidence_threshold = 0.0  # a random model is never sure
    longest = max(len(written(exit_at, prompt).accepted_lengths) for prompt in PROMPTS)
    assert longest > 3, "else nothing is seen below"
    model.generation_config.num_assistant_tokens = 2
    assert max(len(written(exit_at, prompt).accepted_lengths) for prompt in PROMPTS) <= 3
    assert exit_at.settings["generation_config"]["num_assistant_tokens"] == 2


def test_an_early_exit_leaves_the_model_whole_after_an_error(model: LlamaForCausalLM) -> None:
    cut_short: list[int] = []

    def break_down(*_: Any) -> None:
        if model.config.num_hidden_layers == 3:
            cut_short.append(model.config.num_hidden_layers)
            raise RuntimeError("in the middle of a draft")

    handle = model.lm_head.register_forward_hook(break_down)
    own = model.generation_config
    with pytest.raises(RuntimeError, match="in the middle"):
        written(EarlyExitGeneration("exit", model, NO_EOS, 3), PROMPTS[0])
    handle.remove()
    assert cut_short == [3], "it broke while the number of layers was cut short"
    assert model.config.num_hidden_layers == 6
    assert model.generation_config is own


def test_the_fastest_exit_is_taken_and_all_that_were_tried_are_told(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {1: 10.0, 2: 30.0, 3: 20.0, 4: 5.0}

    def decode(self: EarlyExitGeneration, prompts: Prompts, max_new_tokens: int) -> Decoded:
        longest.append(max_new_tokens)
        tokens = max_new_tokens - 1
        seconds = tokens / rates[self.settings["options"]["assistant_early_exit"]]
        return Decoded(((3,) * max_new_tokens,), 0.1, 1, seconds, tokens)

    monkeypatch.setattr(EarlyExitGeneration, "decode", decode)
    longest = list[int]()
    found = fastest_exit("exit", model, NO_EOS, PROMPTS[:2], num_layers=6, max_new_tokens=512)
    assert exits_to_try(24) == (3, 6, 9, 12, 15, 18)
    assert found.settings["options"] == {"assistant_early_exit": 2}
    assert found.settings["tried"] == {str(exit_layer): pytest.approx(rate) for exit_layer, rate in rates.items()}
    assert "assistant_early_exit=2" in found.description
    assert "2: 30.0" in found.description
    assert max(longest) == CHOICE_TOKENS, "the choice must not take longer than the comparison"


def test_where_no_exit_runs_the_reason_is_told(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this family has no exits")

    monkeypatch.setattr(model, "generate", refuse)
    with pytest.raises(ValueError, match="no exit runs: NotImplementedError: this family has no exits"):
        fastest_exit("exit", model, NO_EOS, PROMPTS, num_layers=6, max_new_tokens=12)
    with pytest.raises(ValueError, match="a model of 1 layer has no exit"):
        fastest_exit("exit", model, NO_EOS, PROMPTS, num_layers=1, max_new_tokens=12)
