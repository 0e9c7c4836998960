"""A profile as the decoder of `model.generate`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria, StoppingCriteriaList

import decoding.target
from decoding.deploy import OnMismatch, ProfileDecoder, RequestHistory, custom_generate, load_decoder
from decoding.draft_length import AdaEdl, CalibratedThompson, DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup, SuffixDraft, SuffixLookup
from decoding.errors import (
    ExitHeadError,
    ProfileError,
    ProfileWarning,
    TargetMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
    UnsupportedRunnerError,
)
from decoding.exit_heads import HeadFacts, save_head
from decoding.fingerprint import fingerprint
from decoding.profile import Decoding, DraftProfile, TargetIdentity
from decoding.runners.contract import Outputs
from decoding.target import ResumeView
from decoding.target.heads import new_exit_head
from tests.support.families import build, dbrx, liven, target_of
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
CHEAP = RoundCosts(draft_step=0.1, verify=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12))
"""Costs with which drafting pays; measured ones depend on what else the machine does."""


def _profile(model: PreTrainedModel, rule: DraftLengthRule | None = None, *, plain: bool = False) -> DraftProfile:
    found = fingerprint(model)
    return DraftProfile(
        name="tiny",
        target=TargetIdentity(
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
        return (input_ids.sum(dim=1) % 3 == 0) & (input_ids.shape[1] >= 12)


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
        {"max_new_tokens": 9, "min_length": 8, "forced_eos_token_id": 2, "eos_token_id": list(range(0, 64, 4))},
        {"max_new_tokens": 30, "bad_words_ids": [[3], [7, 9]], "suppress_tokens": [1, 2]},
        {"max_new_tokens": 9, "use_cache": False},
        {"max_new_tokens": 9, "cache_implementation": "static"},
        {"max_new_tokens": 9, "generation_config": GenerationConfig(repetition_penalty=1.3, bos_token_id=0)},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_greedy_tokens_are_those_of_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder, settings: dict[str, Any]
) -> None:
    plain = model.generate(PROMPT, do_sample=False, **settings)
    assert torch.equal(plain, model.generate(PROMPT, do_sample=False, custom_generate=decoder, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": list(range(0, 64, 4))},
        {"eos_token_id": list(range(0, 64, 4))},
        {"stopping_criteria": StoppingCriteriaList([EndsAtAMultipleOfThree()]), "eos_token_id": 63},
        {"return_dict_in_generate": True},
    ],
    ids=lambda settings: "-".join(settings) or "nothing",
)
def test_prompts_of_a_batch_are_continued_as_by_generate_alone(
    model: LlamaForCausalLM, decoder: ProfileDecoder, settings: dict[str, Any]
) -> None:
    """Rows are compared one by one, because left padding changes the rounding of a batch in `generate`."""
    prompts = [[5, 17, 33, 8], [9], [2, 41, 9, 11, 30, 7, 22]]
    ids = torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (7 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    asked = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 1, **settings}
    alone = [
        model.generate(ids[row : row + 1], attention_mask=mask[row : row + 1], **asked) for row in range(len(prompts))
    ]
    together = model.generate(ids, attention_mask=mask, custom_generate=decoder, **asked)
    if settings.get("return_dict_in_generate"):
        assert isinstance(together, GenerateDecoderOnlyOutput)
        alone, together = [each.sequences for each in alone], together.sequences
    assert together.shape[1] == max(each.shape[1] for each in alone)
    for row, each in enumerate(alone):
        length = each.shape[1]
        assert torch.equal(together[row, :length], each[0])
        assert (together[row, length:] == 1).all()
    assert decoder.last_generation is None
    assert decoder.last_batch is not None
    assert len(decoder.last_batch.generations) == 3


def test_several_texts_may_be_sampled_of_one_prompt(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    torch.manual_seed(0)
    output = model.generate(
        PROMPT, do_sample=True, num_return_sequences=4, max_new_tokens=12, custom_generate=decoder, pad_token_id=1
    )
    assert output.shape == (4, 16)
    assert len({tuple(row.tolist()) for row in output}) > 1


def test_a_batch_of_texts_that_end_apart_needs_a_token_for_padding(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    ids = torch.tensor([[5, 17, 33, 8], [2, 41, 9, 11]])
    criteria = StoppingCriteriaList([EndsAtAMultipleOfThree()])
    with pytest.raises(UnsupportedRequestError, match="set pad_token_id"):
        model.generate(ids, do_sample=False, max_new_tokens=20, stopping_criteria=criteria, custom_generate=decoder)


def test_an_end_of_text_token_ends_the_text_where_plain_decoding_ends(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    text = model.generate(PROMPT, do_sample=False, max_new_tokens=24)[0, 4:].tolist()
    for eos in sorted(set(text)):
        plain = model.generate(PROMPT, do_sample=False, max_new_tokens=24, eos_token_id=eos)
        drafted = model.generate(PROMPT, do_sample=False, max_new_tokens=24, eos_token_id=eos, custom_generate=decoder)
        assert torch.equal(plain, drafted)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "bloom", "gpt_oss", "gemma3n"])
@pytest.mark.parametrize("prompt", [(5,), (5, 17, 33, 8, 2, 41, 9)], ids=len)
def test_every_kind_of_family_generates_the_same_tokens(family: str, prompt: tuple[int, ...]) -> None:
    model = target_of(family).model
    decoder = load_decoder(_profile(model))
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(torch.tensor([prompt]), **settings)
    assert torch.equal(plain, model.generate(torch.tensor([prompt]), custom_generate=decoder, **settings))


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_a_prompt_of_one_token_is_continued_as_in_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder, first: int
) -> None:
    prompt, settings = torch.tensor([[first]]), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, **settings), model.generate(prompt, custom_generate=decoder, **settings))


@pytest.mark.parametrize("rule", [Fixed(max_tokens=1), TopProbability(), AdaEdl(), AdaEdl(keep_last=False)])
def test_every_rule_of_a_profile_decodes_the_same_tokens(model: LlamaForCausalLM, rule: DraftLengthRule) -> None:
    decoder = load_decoder(_profile(model, rule))
    drafted = model.generate(PROMPT, do_sample=False, max_new_tokens=20, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, do_sample=False, max_new_tokens=20))


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


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 19},
        {"max_new_tokens": 12, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "min_new_tokens": 3, "eos_token_id": list(range(0, 64, 3))},
        {"max_new_tokens": 12, "min_length": 9, "eos_token_id": list(range(0, 64, 3))},
        {"max_new_tokens": 12, "stopping_criteria": StoppingCriteriaList([EndsAtAMultipleOfThree()])},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_padding_is_shown_to_processors_and_criteria_as_in_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder, settings: dict[str, Any]
) -> None:
    padded = torch.cat([torch.full((1, 3), 50), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    plain = model.generate(padded, attention_mask=mask, do_sample=False, **settings)
    drafted = model.generate(padded, attention_mask=mask, do_sample=False, custom_generate=decoder, **settings)
    assert torch.equal(plain, drafted)


def test_a_prompt_padded_on_the_right_is_refused(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    with pytest.raises(UnsupportedRequestError, match="pad on the left"):
        model.generate(PROMPT, attention_mask=torch.tensor([[1, 1, 1, 0]]), max_new_tokens=4, custom_generate=decoder)


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


def test_sampled_tokens_are_among_the_top_k_of_plain_decoding(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    torch.manual_seed(2)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 3, "temperature": 5.0, "max_new_tokens": 40}
    text = model.generate(PROMPT, custom_generate=decoder, **settings)
    with torch.no_grad():
        best = model(text).logits[0, 3:-1].topk(3).indices  # [generated, 3]
    ranks = (best == text[0, 4:, None]).int()
    assert ranks.sum(dim=1).eq(1).all()
    assert ranks.sum(dim=0).gt(0).all()  # every rank was drawn: it does sample


def test_another_seed_samples_another_text(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    texts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(PROMPT, do_sample=True, top_k=0, max_new_tokens=20, custom_generate=decoder))
    assert not torch.equal(*texts)


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
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, model.generate(PROMPT, max_new_tokens=5, do_sample=False))


def test_the_output_may_be_used_outside_of_inference(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    output = model.generate(PROMPT, max_new_tokens=5, do_sample=False, custom_generate=decoder)
    assert output.dtype == PROMPT.dtype
    assert not output.is_inference()


@pytest.mark.parametrize(
    ("inputs", "settings", "words"),
    [
        (PROMPT.repeat(2, 1), {"on_tokens": print}, "on_tokens streams a single prompt, got a batch of 2"),
        (PROMPT, {"num_beams": 2}, "num_beams=1, got 2"),
        (PROMPT, {"num_beams": 2, "num_return_sequences": 2}, "num_beams=1, got 2"),
        (PROMPT, {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor remembers its calls"),
        (
            PROMPT,
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2]), "do_sample": True},
            "SynthIDTextWatermarkLogitsProcessor remembers its calls",
        ),
        (PROMPT, {"output_scores": True, "return_dict_in_generate": True}, "output_scores must be off"),
    ],
)
def test_what_it_does_not_offer_is_refused(
    model: LlamaForCausalLM, decoder: ProfileDecoder, inputs: torch.Tensor, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedRequestError, match=words) as refused:
        model.generate(inputs, max_new_tokens=4, custom_generate=decoder, **{"do_sample": False, **settings})
    assert "\n" not in str(refused.value)


def test_embeddings_instead_of_tokens_are_refused(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    for ids in ({}, {"input_ids": PROMPT}):
        with pytest.raises(UnsupportedRequestError, match="cannot use inputs_embeds"):
            model.generate(**ids, inputs_embeds=embeddings, max_new_tokens=4, do_sample=False, custom_generate=decoder)


def test_a_refused_request_leaves_the_decoder_usable(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    plain = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    with pytest.raises(UnsupportedRequestError):
        model.generate(PROMPT, num_beams=2, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(plain, model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder))


def test_an_empty_cache_is_no_filled_cache(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    cache = DynamicCache(config=model.config)
    drafted = model.generate(PROMPT, past_key_values=cache, custom_generate=decoder, **settings)
    assert torch.equal(drafted, model.generate(PROMPT, **settings))
    assert cache.get_seq_length() == drafted.shape[1] - 1  # filled in place, as by `generate`


def test_a_profile_for_another_model_is_refused_or_warned_of(model: LlamaForCausalLM) -> None:
    other = tiny_llama(seed=1)
    with pytest.raises(TargetMismatchError, match="other weights"):
        other.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=load_decoder(_profile(model)))
    with pytest.warns(UserWarning, match="other weights"):
        drafted = other.generate(
            PROMPT, max_new_tokens=9, do_sample=False, custom_generate=load_decoder(_profile(model), on_mismatch="warn")
        )
    assert torch.equal(drafted, other.generate(PROMPT, max_new_tokens=9, do_sample=False))


def test_another_configuration_is_refused_or_warned_of(model: LlamaForCausalLM) -> None:
    other = tiny_llama()
    other.config.rms_norm_eps = 1e-3
    with pytest.raises(TargetMismatchError, match="another configuration") as refused:
        other.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=load_decoder(_profile(model)))
    assert "\n" not in str(refused.value)
    with pytest.warns(UserWarning, match="another configuration"):
        load_decoder(_profile(model), on_mismatch="warn").decoder_for(other)


def test_a_model_is_checked_when_it_is_first_used_and_only_then(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(custom_generate, "check_target", lambda profile, given, **_: checked.append(given))
    decoder = load_decoder(_profile(model))
    assert not checked
    for _ in range(2):
        model.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=decoder)
    assert checked == [model]


def test_the_same_model_in_another_precision_is_the_model_of_the_profile() -> None:
    half = tiny_llama().to(torch.bfloat16)
    profile = _profile(half)
    with pytest.warns(ProfileWarning, match="dtype bfloat16, not float32"):
        assert load_decoder(profile).decoder_for(half).target.model is half
    whole = half.float()
    assert load_decoder(profile).decoder_for(whole).target.model is whole


def test_another_number_of_layers_is_refused_also_with_warnings(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(_profile(model), on_mismatch="warn")
    with pytest.raises(TargetMismatchError, match="the model has 4 layers"):
        tiny_llama(4).generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=decoder)


def test_a_profile_that_found_nothing_decodes_plainly(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(_profile(model, plain=True))
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_drafted == 0


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_prefix_reuse_is_as_the_profile_says(
    model: LlamaForCausalLM, prefix_reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []
    honest = ResumeView.run
    monkeypatch.setattr(ResumeView, "run", lambda self, *args: resumed.append(1) or honest(self, *args))
    profile = _profile(model).model_copy(update={"decoding": Decoding(prefix_reuse=prefix_reuse)})
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=load_decoder(profile))
    assert bool(resumed) is prefix_reuse
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))


def test_a_draft_that_skips_nothing_decodes_the_same_tokens(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(_profile(model).model_copy(update={"draft": LayerSkip()}))
    drafted = model.generate(PROMPT, max_new_tokens=12, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=12, do_sample=False))
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_accepted == decoder.last_generation.num_drafted


def test_decoding_leaves_the_model_as_it_was(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    modules = dict(model.named_modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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


def _other_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("on_mismatch", ["error", "warn", "plain"])
def test_a_model_that_gets_other_weights_is_checked_again(on_mismatch: OnMismatch, assign: bool) -> None:
    model = tiny_llama()
    decoder = load_decoder(_profile(model), on_mismatch=on_mismatch)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    model.load_state_dict(_other_weights(model), assign=assign)
    expected = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    for _ in range(2):
        if on_mismatch == "error":
            with pytest.raises(TargetMismatchError, match="other weights"):
                model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ProfileWarning)
            found = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
        assert torch.equal(found, expected)
        assert (decoder.plain_because is not None) is (on_mismatch == "plain")
    model.load_state_dict(own, assign=assign)
    found = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(found, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    assert decoder.plain_because is None


def _move(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.filterwarnings("ignore::decoding.errors.ProfileWarning")
@pytest.mark.parametrize(
    ("change", "is_rebuilt"),
    [
        (_move, False),
        (lambda model: model.to(torch.float64), True),
        (lambda model: setattr(model, "lm_head", copy.deepcopy(model.lm_head)), True),
    ],
    ids=["moved", "precision", "module"],
)
def test_the_decoder_of_a_changed_model_is_made_again_where_it_must_be(
    change: Callable[[PreTrainedModel], object], is_rebuilt: bool
) -> None:
    model = tiny_llama()
    decoder = load_decoder(_profile(model))
    first = decoder.decoder_for(model)
    change(model)
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    assert (decoder.decoder_for(model) is not first) is is_rebuilt


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


def _exit_profile(model: PreTrainedModel, folder: Path, head_of: PreTrainedModel | None = None) -> Path:
    """A profile with an exit at layer 3, and beside it a head for that exit, of this model or another."""
    owner = head_of or model
    found = fingerprint(owner)
    facts = HeadFacts(
        exit_layer=3,
        num_layers=6,
        architecture="LlamaForCausalLM",
        config_sha256=found.config_sha256,
        weights_sha256=found.weights_sha256,
    )
    sha256 = save_head(folder / "head.safetensors", new_exit_head(decoding.target.Target(owner)), facts)
    draft = EarlyExit(exit_layer=3, head="head.safetensors", head_sha256=sha256)
    path = folder / "profile.yaml"
    _profile(model).model_copy(update={"draft": draft}).save(path)
    return path


def test_exit_with_its_head_beside_the_profile(model: LlamaForCausalLM, tmp_path: Path) -> None:
    decoder = load_decoder(_exit_profile(model, tmp_path))
    expected = model.generate(PROMPT, max_new_tokens=30, do_sample=False)
    for _ in range(2):
        assert torch.equal(
            model.generate(PROMPT, max_new_tokens=30, do_sample=False, custom_generate=decoder), expected
        )
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_drafted > 10
    profile = DraftProfile.load(tmp_path / "profile.yaml")
    given = load_decoder(profile, folder=tmp_path)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=30, do_sample=False, custom_generate=given), expected)


@pytest.mark.parametrize(
    "draft",
    [
        PromptLookup(),
        LayerSkip(skip_attention=(3, 4), skip_mlp=(3, 4), lookup=Lookup()),
        EarlyExit(exit_layer=4, lookup=Lookup(min_ngram=2, max_tokens=4)),
        SuffixDraft(max_spec_factor=8, min_token_prob=0),
    ],
    ids=lambda draft: draft.describe(),
)
@pytest.mark.parametrize("rule", [Fixed(max_tokens=4), CalibratedThompson(max_tokens=6, persistent=True, costs=CHEAP)])
def test_profile_with_a_lookup_writes_the_text_of_generate(
    model: LlamaForCausalLM, tmp_path: Path, draft: Draft, rule: DraftLengthRule
) -> None:
    path = tmp_path / "profile.yaml"
    _profile(model, rule).model_copy(update={"draft": draft}).save(path)
    decoder = load_decoder(path)
    expected = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    for _ in range(2):
        text = model.generate(PROMPT, max_new_tokens=40, do_sample=False, custom_generate=decoder)
        assert torch.equal(text, expected)
        assert decoder.last_generation is not None
        copies = [step for step in decoder.last_generation.rounds if step.looked_up]
        assert sum(step.num_accepted for step in copies) > 2
    sampled = model.generate(PROMPT, max_new_tokens=12, do_sample=True, custom_generate=decoder)
    assert sampled.shape == (1, PROMPT.shape[1] + 12)


@pytest.mark.parametrize(
    "draft",
    [SuffixDraft(), LayerSkip(skip_mlp=(3, 4), lookup=SuffixLookup(max_tokens=6))],
    ids=lambda draft: draft.describe(),
)
def test_answers_of_earlier_requests_are_copied_from(model: LlamaForCausalLM, tmp_path: Path, draft: Draft) -> None:
    path = tmp_path / "profile.yaml"
    _profile(model, Fixed(max_tokens=6)).model_copy(update={"draft": draft}).save(path)
    decoder, mine, others = load_decoder(path), RequestHistory(), RequestHistory()
    expected = model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    num_rounds = []
    for history in (None, mine, mine, others):
        text = model.generate(PROMPT, max_new_tokens=24, do_sample=False, custom_generate=decoder, history=history)
        assert torch.equal(text, expected)
        assert decoder.last_generation is not None
        num_rounds.append(len(decoder.last_generation.rounds))
    assert num_rounds[2] < num_rounds[0] == num_rounds[1] == num_rounds[3]
    assert (mine.num_answers, mine.num_tokens) == (1, 24)
    batch = model.generate(
        PROMPT.repeat(2, 1), max_new_tokens=24, do_sample=False, custom_generate=decoder, history=mine
    )
    assert torch.equal(batch, expected.repeat(2, 1))


def test_history_that_the_draft_does_not_read_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    _profile(model, Fixed(max_tokens=4)).model_copy(update={"draft": PromptLookup()}).save(path)
    with pytest.raises(UnsupportedRequestError, match="only a suffix automaton takes a history"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=load_decoder(path), history=RequestHistory())


def test_missing_or_different_head_is_refused_on_loading(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = _exit_profile(model, tmp_path)
    with pytest.raises(ExitHeadError, match="give folder="):
        load_decoder(DraftProfile.load(path))
    head = tmp_path / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-1])
    with pytest.raises(ExitHeadError, match="its contents differ"):
        load_decoder(path)
    head.unlink()
    with pytest.raises(ExitHeadError, match="it belongs beside the profile"):
        load_decoder(path)


@pytest.mark.parametrize("on_mismatch", ["error", "warn"])
def test_head_of_another_target_is_refused_also_with_warnings(
    model: LlamaForCausalLM, tmp_path: Path, on_mismatch: OnMismatch
) -> None:
    decoder = load_decoder(_exit_profile(model, tmp_path, head_of=tiny_llama(seed=1)), on_mismatch=on_mismatch)
    with pytest.raises(ExitHeadError, match="belongs to another model"):
        model.generate(PROMPT, max_new_tokens=8, do_sample=False, custom_generate=decoder)


# --- runners ----------------------------------------------------------------------------------------------------------


def _by(profile: DraftProfile, **decoding: Any) -> DraftProfile:
    return profile.model_copy(update={"decoding": Decoding(**decoding)})


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("exact_width", [None, 4])
def test_runner_and_mode_are_as_the_profile_says(model: LlamaForCausalLM, exact_width: int | None) -> None:
    decoder = load_decoder(_by(_profile(model), runner="static", exact_width=exact_width))
    drafted = model.generate(PROMPT, max_new_tokens=20, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=20, do_sample=False))
    runner = decoder.decoder_for(model).target.runner
    assert (runner.name, runner.exact_width) == ("static", exact_width)
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_accepted > 0


@pytest.mark.usefixtures("uncompiled")
def test_model_that_the_runner_cannot_run_is_run_as_it_is_with_a_warning() -> None:
    bloom = build("bloom")
    profile = _profile(bloom)
    with pytest.warns(
        UserWarning, match=r"does not run with the runner 'static'.* may be slower than profile 'tiny' reports"
    ):
        decoder = load_decoder(_by(profile, runner="static")).decoder_for(bloom)
    assert decoder.target.runner.name == "eager"
    with pytest.raises(
        UnsupportedRunnerError, match="does not run with the runner 'static'"
    ):  # never less exact than promised
        load_decoder(_by(profile, runner="static", exact_width=4)).decoder_for(bloom)


def test_a_model_that_does_not_resume_after_a_prefix_is_verified_whole_with_a_warning(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile says that it does: it was written by hand, or before the model's code changed."""
    honest = ResumeView.run

    def wrong(self: ResumeView, *args: Any) -> Outputs:
        outputs = honest(self, *args)
        return replace(outputs, logits=outputs.logits.flip(-1))

    monkeypatch.setattr(ResumeView, "run", wrong)
    decoder = load_decoder(_profile(model))
    with pytest.warns(ProfileWarning, match="different logits from block 2 on .*: each verification runs the whole"):
        drafted = decoder.generate(model, PROMPT, max_new_tokens=24)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=24, do_sample=False))
    decoder.generate(model, PROMPT, max_new_tokens=4)  # the result is remembered: a second warning would be an error


@pytest.mark.parametrize("draft", [LayerSkip(skip_attention=(0,)), PromptLookup(), PlainDecoding()])
def test_a_model_whose_cache_does_not_do_is_refused_at_load(draft: Draft) -> None:
    """An encoder's tokens attend to later ones: a draft would change them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    bert = BertLMHeadModel(BertConfig(num_hidden_layers=3, num_attention_heads=4, **sizes)).eval()
    liven(bert)
    decoder = load_decoder(profile_of(bert, draft))
    with pytest.raises(UnsupportedModelError, match="a token attends to later tokens"):
        decoder.generate(bert, PROMPT, max_new_tokens=4, pad_token_id=0)


@pytest.mark.parametrize("on_mismatch", ["error", "plain"])
def test_a_skip_that_the_model_does_not_run_without_is_refused_at_load(on_mismatch: OnMismatch) -> None:
    model = dbrx()
    decoder = load_decoder(profile_of(model, LayerSkip(skip_attention=(0,))), on_mismatch=on_mismatch)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    refusal = "block 0 has no separate attention module that it runs without"
    if on_mismatch == "error":
        with pytest.raises(UnsupportedModelError, match=refusal):
            decoder.generate(model, PROMPT, **settings)
    else:
        with pytest.warns(ProfileWarning, match=refusal):
            plain = decoder.generate(model, PROMPT, **settings)
        assert torch.equal(plain, model.generate(PROMPT, **settings))
