"""`decoder.generate(model, ...)`: streamers, stop strings, and inputs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from decoding.deploy import ProfileDecoder, load_decoder
from decoding.errors import UnsupportedRequestError
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 1}


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()  # its 64 tokens are printable characters of the tokenizer


@pytest.fixture(scope="module")
def decoder(model: LlamaForCausalLM) -> ProfileDecoder:
    return load_decoder(profile_of(model))


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> torch.Tensor:
    return model.generate(PROMPT, **GREEDY)


def test_entry_returns_what_generate_returns(
    model: LlamaForCausalLM, decoder: ProfileDecoder, plain: torch.Tensor
) -> None:
    assert torch.equal(decoder.generate(model, PROMPT, **GREEDY), plain)
    config = GenerationConfig(**GREEDY)
    output = decoder.generate(
        model, input_ids=PROMPT, generation_config=config, return_dict_in_generate=True, tokenizer=None
    )
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, plain)
    assert not output.sequences.is_inference(), "it may be used outside of inference"
    assert decoder.last_generation is not None
    assert 0 < decoder.last_generation.num_accepted < decoder.last_generation.num_drafted


def test_streamer_gets_the_calls_of_plain_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder, plain: torch.Tensor
) -> None:
    """Prompt, then token by token, then the end: a streamer cannot tell the two apart."""
    expected, found = Recorder(), Recorder()
    assert torch.equal(model.generate(PROMPT, streamer=expected, **GREEDY), plain)
    assert torch.equal(decoder.generate(model, PROMPT, streamer=found, **GREEDY), plain)
    assert found.calls == expected.calls
    assert found.calls[-1] == "end"


def test_tokens_are_streamed_as_soon_as_their_round_is_accepted(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    """Both callbacks are called round by round, the streamer first."""
    streamer, sizes, tokens = Recorder(), list[int](), list[int]()

    def on_tokens(piece: tuple[int, ...]) -> None:
        sizes.append(len(streamer.calls))
        tokens.extend(piece)

    output = decoder.generate(model, PROMPT, streamer=streamer, on_tokens=on_tokens, **GREEDY)
    assert tokens == output[0, 4:].tolist()  # type: ignore[index]
    assert decoder.last_generation is not None
    assert len(sizes) == len(decoder.last_generation.rounds) + 1
    assert sizes[-1] == GREEDY["max_new_tokens"] + 1


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"stopping_criteria": [lambda *_: 1 / 0]}])
def test_stream_ends_when_decoding_fails(
    model: LlamaForCausalLM, decoder: ProfileDecoder, settings: dict[str, Any]
) -> None:
    """A thread that reads a `TextIteratorStreamer` would wait for ever."""
    streamer = Recorder()
    with pytest.raises((ZeroDivisionError, UnsupportedRequestError, ValueError)):
        decoder.generate(model, PROMPT, streamer=streamer, **GREEDY, **settings)
    assert streamer.calls[-1] == "end"
    assert streamer.calls.count("end") == 1


def _stop_strings(tokenizer: PreTrainedTokenizerFast, plain: torch.Tensor) -> list[str]:
    """One string after each token of the text: the text of the last two."""
    tokens = plain[0, 4:].tolist()
    return [tokenizer.decode(tokens[end - 2 : end]) for end in range(2, len(tokens), 5)]


def test_stop_strings_end_the_sequence_where_plain_generate_ends_it(
    model: LlamaForCausalLM, decoder: ProfileDecoder, tokenizer: PreTrainedTokenizerFast, plain: torch.Tensor
) -> None:
    """Also inside of an accepted draft, whose further tokens must not appear."""
    inside = 0
    for stop in _stop_strings(tokenizer, plain):
        settings: dict[str, Any] = {**GREEDY, "stop_strings": [stop], "tokenizer": tokenizer}
        expected = model.generate(PROMPT, **settings)
        assert torch.equal(decoder.generate(model, PROMPT, **settings), expected)
        assert expected.shape[1] < plain.shape[1]
        assert decoder.last_generation is not None
        last = decoder.last_generation.rounds[-1] if decoder.last_generation.rounds else None
        inside += last is not None and len(last.tokens) < last.num_accepted + 1
    assert inside > 0


def test_stop_strings_of_a_configuration_are_those_of_the_call(
    model: LlamaForCausalLM,
    decoder: ProfileDecoder,
    tokenizer: PreTrainedTokenizerFast,
    plain: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = _stop_strings(tokenizer, plain)[1]
    expected = model.generate(PROMPT, stop_strings=stop, tokenizer=tokenizer, **GREEDY)
    config = GenerationConfig(stop_strings=stop, **GREEDY)
    found = decoder.generate(model, PROMPT, generation_config=config, tokenizer=tokenizer)
    assert torch.equal(found, expected)
    assert config.stop_strings == stop
    monkeypatch.setattr(model, "generation_config", GenerationConfig(stop_strings=stop, bos_token_id=0))
    assert torch.equal(decoder.generate(model, PROMPT, tokenizer=tokenizer, **GREEDY), expected)


def test_embeddings_are_refused_with_what_to_pass(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    for ids in ({}, {"input_ids": PROMPT}):
        with pytest.raises(UnsupportedRequestError, match="cannot use inputs_embeds: pass the token ids as input_ids"):
            decoder.generate(model, **ids, inputs_embeds=embeddings, **GREEDY)
