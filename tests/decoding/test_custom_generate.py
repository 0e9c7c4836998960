"""A profile as the decoder of `model.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from decoding.deploy import ProfileDecoder, load_decoder
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed
from decoding.errors import ProfileError, TargetMismatchError, UnsupportedRequestError
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile, LayerSkip, PlainDecoding, Target
from tests.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])


def _profile(model: LlamaForCausalLM, rule: DraftLengthRule | None = None, *, plain: bool = False) -> DraftProfile:
    found = fingerprint(model)
    return DraftProfile(
        name="tiny",
        target=Target(
            model="tiny",
            architecture="LlamaForCausalLM",
            num_layers=model.config.num_hidden_layers,
            dtype="float32",
            config_sha256=found.config_sha256,
            weights_sha256=found.weights_sha256,
        ),
        draft=PlainDecoding() if plain else LayerSkip(skip_attention=(2, 3, 4), skip_mlp=(3, 4)),
        draft_length=rule or Fixed(max_tokens=4),
    )


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def decoder(model: LlamaForCausalLM) -> ProfileDecoder:
    return load_decoder(_profile(model))


class EndsAtAMultipleOfThree(StoppingCriteria):
    """Ends a text of 12 tokens and more whose sum is a multiple of three."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= 12 and int(input_ids.sum()) % 3 == 0
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 30},
        {"max_new_tokens": 1},
        {"max_length": 20},
        {"max_new_tokens": 30, "repetition_penalty": 1.4},
        {"max_new_tokens": 30, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([EndsAtAMultipleOfThree()])},
        {"max_new_tokens": 30, "min_new_tokens": 10, "eos_token_id": list(range(0, 64, 4))},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_greedy_tokens_are_those_of_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder, settings: dict[str, Any]
) -> None:
    plain = model.generate(PROMPT, do_sample=False, **settings)
    assert torch.equal(plain, model.generate(PROMPT, do_sample=False, custom_generate=decoder, **settings))


def test_an_end_of_text_token_ends_the_text_where_plain_decoding_ends(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    text = model.generate(PROMPT, do_sample=False, max_new_tokens=24)[0, 4:].tolist()
    for eos in sorted(set(text)):
        plain = model.generate(PROMPT, do_sample=False, max_new_tokens=24, eos_token_id=eos)
        drafted = model.generate(PROMPT, do_sample=False, max_new_tokens=24, eos_token_id=eos, custom_generate=decoder)
        assert torch.equal(plain, drafted)


def test_drafts_are_really_used(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    model.generate(PROMPT, do_sample=False, max_new_tokens=30, custom_generate=decoder)
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_accepted > 0
    assert decoder.last_generation.num_drafted > decoder.last_generation.num_accepted


def test_padding_on_the_left_is_no_part_of_the_text(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    padded = torch.cat([torch.zeros((1, 3), dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    drafted = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=15, custom_generate=decoder)
    assert torch.equal(drafted[:, :7], padded)
    assert torch.equal(drafted[:, 7:], model.generate(PROMPT, do_sample=False, max_new_tokens=15)[:, 4:])


def test_sampling_is_reproducible_and_shaped_by_generates_own_settings(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(1)
        texts.append(
            model.generate(PROMPT, do_sample=True, top_k=5, temperature=0.9, max_new_tokens=20, custom_generate=decoder)
        )
    assert torch.equal(texts[0], texts[1])
    greedy = model.generate(PROMPT, do_sample=False, max_new_tokens=20)
    only_one = model.generate(PROMPT, do_sample=True, top_k=1, max_new_tokens=20, custom_generate=decoder)
    assert torch.equal(only_one, greedy)


def test_tokens_are_streamed_as_they_come(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    pieces: list[tuple[int, ...]] = []
    output = model.generate(
        PROMPT, do_sample=False, max_new_tokens=20, custom_generate=decoder, on_tokens=pieces.append
    )
    assert [token for piece in pieces for token in piece] == output[0, 4:].tolist()
    assert max(len(piece) for piece in pieces) > 1


def test_the_output_object_is_given_when_asked_for(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    output = model.generate(
        PROMPT, max_new_tokens=5, do_sample=False, custom_generate=decoder, return_dict_in_generate=True
    )
    assert output.sequences.shape == (1, 9)


@pytest.mark.parametrize(
    ("inputs", "settings", "words"),
    [
        (PROMPT.repeat(2, 1), {}, "2 prompts in a batch"),
        (PROMPT, {"num_beams": 2}, "num_beams=1, got 2"),
        (PROMPT, {"output_scores": True, "return_dict_in_generate": True}, "output_scores must be off"),
    ],
)
def test_what_it_does_not_offer_is_refused(
    model: LlamaForCausalLM, decoder: ProfileDecoder, inputs: torch.Tensor, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedRequestError, match=words):
        model.generate(inputs, max_new_tokens=4, do_sample=False, custom_generate=decoder, **settings)


def test_a_filled_cache_is_refused(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    cache = DynamicCache(config=model.config)
    model(PROMPT[:, :3], past_key_values=cache)
    with pytest.raises(UnsupportedRequestError, match="filled past_key_values"):
        model.generate(PROMPT, past_key_values=cache, max_new_tokens=4, do_sample=False, custom_generate=decoder)


def test_a_profile_for_another_model_is_refused_or_warned_of(model: LlamaForCausalLM) -> None:
    other = tiny_llama(seed=1)
    with pytest.raises(TargetMismatchError, match="other weights"):
        other.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=load_decoder(_profile(model)))
    with pytest.warns(UserWarning, match="other weights"):
        drafted = other.generate(
            PROMPT, max_new_tokens=9, do_sample=False, custom_generate=load_decoder(_profile(model), strict=False)
        )
    assert torch.equal(drafted, other.generate(PROMPT, max_new_tokens=9, do_sample=False))


def test_another_number_of_layers_is_refused_strict_or_not(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(_profile(model), strict=False)
    with pytest.raises(TargetMismatchError, match="its 4 layers"):
        tiny_llama(4).generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=decoder)


def test_a_profile_that_found_nothing_decodes_plainly(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(_profile(model, plain=True))
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_drafted == 0


@pytest.mark.parametrize("persistent", [True, False])
def test_only_a_persistent_rule_remembers_the_last_text(model: LlamaForCausalLM, persistent: bool) -> None:
    rule = AdaEdl(initial_threshold=0.1, step=0.5, threshold_decay=0.0, target_acceptance=1.0, persistent=persistent)
    decoder = load_decoder(_profile(model, rule))
    facts = []
    for _ in range(2):
        model.generate(PROMPT, max_new_tokens=20, do_sample=False, custom_generate=decoder)
        assert decoder.last_generation is not None
        facts.append([step.num_drafted for step in decoder.last_generation.rounds])
    assert (facts[0] == facts[1]) is not persistent


def test_one_decoder_serves_two_models_in_turn(model: LlamaForCausalLM) -> None:
    twin = tiny_llama()
    decoder = load_decoder(_profile(model))
    for each in (model, twin, model):
        drafted = each.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
        assert torch.equal(drafted, each.generate(PROMPT, max_new_tokens=9, do_sample=False))


def test_a_profile_is_loaded_from_its_file(model: LlamaForCausalLM, tmp_path: Path) -> None:
    _profile(model).save(tmp_path / "p.yaml")
    assert load_decoder(tmp_path / "p.yaml").profile == _profile(model)
    with pytest.raises(ProfileError, match="no such profile"):
        load_decoder(tmp_path / "q.yaml")
