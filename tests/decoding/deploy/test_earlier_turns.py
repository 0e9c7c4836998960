"""Caches of earlier turns: read, not recomputed, and handed to the next turn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from decoding.deploy import ProfileDecoder, load_decoder
from decoding.drafts import Draft, EarlyExit, LayerSkip, PlainDecoding, PromptLookup, SuffixLookup
from decoding.errors import UnsupportedRequestError
from decoding.profile import Decoding
from decoding.runners.eager import EagerRunner
from decoding.target import Target
from tests.support.families import target_of
from tests.support.heads import write_heads
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

FIRST = torch.tensor([[5, 17, 33, 8, 40, 2]])
SECOND, THIRD = torch.tensor([[9, 41, 3]]), torch.tensor([[22]])
TURN: dict[str, Any] = {"do_sample": False, "max_new_tokens": 11, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def _draft(kind: str, model: PreTrainedModel, folder: Path) -> Draft:
    if kind == "exit":
        return write_heads(Target(model), folder, [3])[3]
    drafts: dict[str, Draft] = {
        "skip": LayerSkip(skip_attention=(2, 3, 4), skip_mlp=(3, 4)),
        "skip without a head, after a lookup": EarlyExit(exit_layer=4, lookup=SuffixLookup(max_tokens=6)),
        "lookup": PromptLookup(),
        "plain": PlainDecoding(),
    }
    return drafts[kind]


KINDS = ["skip", "skip without a head, after a lookup", "lookup", "plain", "exit"]


def _conversation(model: PreTrainedModel, decoder: ProfileDecoder | None, **settings: Any) -> list[torch.Tensor]:
    """Return the sequences of three turns, each of which continues the cache of the one before."""
    ids, past, found = FIRST, None, []
    for said in (SECOND, THIRD, None):
        output = model.generate(ids, past_key_values=past, custom_generate=decoder, **TURN, **settings)
        past, expected = output.past_key_values, output.sequences.shape[1] - 1
        assert past.get_seq_length() == expected
        found.append(output.sequences)
        if said is not None:
            ids = torch.cat([output.sequences, said], dim=1)
    return found


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("runner", "kind"),
    [*(("eager", kind) for kind in KINDS), ("static", "skip"), ("static", "exit")],
)
def test_turns_are_those_of_plain_generate(model: LlamaForCausalLM, tmp_path: Path, kind: str, runner: str) -> None:
    profile = profile_of(model, _draft(kind, model, tmp_path))
    profile = profile.model_copy(update={"decoding": Decoding(runner=runner)})
    found = _conversation(model, load_decoder(profile, folder=tmp_path))
    for turn, expected in zip(found, _conversation(model, None), strict=True):
        assert torch.equal(turn, expected)


def test_a_head_drafts_as_well_as_after_reading_everything(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Its keys and values travel with the cache, also with a copy of it."""
    decoder = load_decoder(profile_of(model, _draft("exit", model, tmp_path)), folder=tmp_path)
    first = model.generate(FIRST, custom_generate=decoder, **TURN)
    ids = torch.cat([first.sequences, SECOND], dim=1)
    rounds = []
    for past in (None, copy.deepcopy(first.past_key_values), first.past_key_values):
        model.generate(ids, past_key_values=past, custom_generate=decoder, **TURN)
        assert decoder.last_generation is not None
        rounds.append([(step.tokens, step.num_drafted) for step in decoder.last_generation.rounds])
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_that_dropped_positions_are_no_obstacle(family: str) -> None:
    """A dropped position is outside of the window of every later one, and stays hidden."""
    model = target_of(family).model
    decoder = load_decoder(profile_of(model))
    for turn, expected in zip(_conversation(model, decoder), _conversation(model, None), strict=True):
        assert torch.equal(turn, expected)


def test_only_new_positions_are_computed(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, spans = load_decoder(profile_of(model)), list[tuple[int, int]]()
    first = model.generate(FIRST, custom_generate=decoder, **TURN)
    honest = EagerRunner._run

    def run(self: Any, part: Any, token_ids: Any, cache: Any, start: int, **settings: Any) -> Any:
        spans.append((start, token_ids.shape[1]))
        return honest(self, part, token_ids, cache, start, **settings)

    monkeypatch.setattr(EagerRunner, "_run", run)
    ids = torch.cat([first.sequences, SECOND], dim=1)
    model.generate(ids, past_key_values=first.past_key_values, custom_generate=decoder, **TURN)
    known = first.sequences.shape[1] - 1
    assert spans[0] == (known, 1 + SECOND.shape[1])
    assert min(start for start, _ in spans) == known


def test_caches_go_from_plain_generate_to_the_decoder_and_back(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model))
    expected = _conversation(model, None)
    past = DynamicCache(config=model.config)
    model.generate(FIRST, past_key_values=past, **TURN)
    ids = torch.cat([expected[0], SECOND], dim=1)
    second = decoder.generate(model, ids, past_key_values=past, **{**TURN, "return_dict_in_generate": False})
    assert torch.equal(second, expected[1])
    assert past.get_seq_length() == second.shape[1] - 1  # the cache given is filled, as `generate` does
    third = model.generate(torch.cat([second, THIRD], dim=1), past_key_values=past, **TURN)
    assert torch.equal(third.sequences, expected[2])


def test_sequence_that_ends_within_a_draft_leaves_no_trace_of_the_rest(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model))
    text = model.generate(FIRST, **TURN).sequences[0, 6:].tolist()
    for eos in sorted(set(text))[::3]:
        settings: dict[str, Any] = {**TURN, "eos_token_id": eos}
        plain = model.generate(FIRST, **settings)
        found = model.generate(FIRST, custom_generate=decoder, **settings)
        assert torch.equal(found.sequences, plain.sequences)
        for own, stock in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
            assert own.keys.shape == stock.keys.shape
            assert torch.allclose(own.keys, stock.keys, atol=1e-4)
            assert torch.allclose(own.values, stock.values, atol=1e-4)
            assert not own.keys.is_inference()


def _filled(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(FIRST[:, :4], past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("ids", "settings", "words"),
    [
        (FIRST.repeat(2, 1), {}, "continues a single prompt, got a batch of 2"),
        (FIRST[:, :4], {}, "holds 4 positions, and input_ids has only 4 tokens"),
        (SECOND, {"attention_mask": torch.ones(1, 7)}, "pass the token ids of all turns, got 3 of 7"),
        (FIRST, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "takes no padding"),
    ],
    ids=["batch", "nothing new", "new tokens only", "padding"],
)
def test_filled_caches_that_cannot_be_continued_are_refused(
    model: LlamaForCausalLM, ids: torch.Tensor, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedRequestError, match=words) as refused:
        load_decoder(profile_of(model)).generate(model, ids, past_key_values=_filled(model), **TURN, **settings)
    assert "\n" not in str(refused.value)


def test_a_head_needs_a_cache_that_it_has_read(model: LlamaForCausalLM, tmp_path: Path) -> None:
    kind = "exit"
    decoder = load_decoder(profile_of(model, _draft(kind, model, tmp_path)), folder=tmp_path)
    with pytest.raises(UnsupportedRequestError, match="has not read these turns") as refused:
        decoder.generate(model, FIRST, past_key_values=_filled(model), **TURN)
    assert "\n" not in str(refused.value)
