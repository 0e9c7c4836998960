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
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria, StoppingCriteriaList

from decoding.deploy import OnMismatch, ProfileDecoder, RequestHistory, custom_generate, load_decoder
from decoding.draft_length import AdaEdl, BetaThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import Draft, LayerSkip, Lookup, PromptLookup, SuffixDraft
from decoding.errors import (
    ExitHeadError,
    ProfileWarning,
    TargetMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from decoding.profile import Decoding, DraftProfile
from decoding.runners.contract import Outputs
from decoding.target import ResumeView, Target
from tests.support.families import dbrx
from tests.support.heads import write_heads
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
CHEAP = RoundCosts(draft_step=0.1, verify=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12))
"""Costs with which drafting pays; measured ones depend on what else the machine does."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def decoder(model: LlamaForCausalLM) -> ProfileDecoder:
    return load_decoder(profile_of(model))


class EndsAtAMultipleOfThree(StoppingCriteria):
    """Ends a text of 12 tokens and more whose sum is a multiple of three."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids.sum(dim=1) % 3 == 0) & (input_ids.shape[1] >= 12)


EVERY_FOURTH = list(range(0, 64, 4))
CRITERIA = StoppingCriteriaList([EndsAtAMultipleOfThree()])
GREEDY: list[dict[str, Any]] = [
    {"max_new_tokens": 1},
    {"max_length": 20},
    {"max_new_tokens": 30, "repetition_penalty": 1.4},
    {"max_new_tokens": 30, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 30, "stopping_criteria": CRITERIA},
    {"max_new_tokens": 30, "min_new_tokens": 10, "eos_token_id": EVERY_FOURTH},
    {"max_new_tokens": 9, "min_length": 8, "forced_eos_token_id": 2, "eos_token_id": EVERY_FOURTH},
    {"max_new_tokens": 30, "bad_words_ids": [[3], [7, 9]], "suppress_tokens": [1, 2]},
    {"max_new_tokens": 9, "use_cache": False},
    {"max_new_tokens": 9, "cache_implementation": "static"},
    {"max_new_tokens": 9, "generation_config": GenerationConfig(repetition_penalty=1.3, bos_token_id=0)},
]


def test_greedy_tokens_are_those_of_generate(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    assert repr(decoder) == f"<ProfileDecoder {decoder.profile.name}: {decoder.profile.draft.describe()}>"
    for settings in GREEDY:
        plain = model.generate(PROMPT, do_sample=False, **settings)
        found = model.generate(PROMPT, do_sample=False, custom_generate=decoder, **settings)
        assert torch.equal(plain, found), settings


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4, "return_dict_in_generate": True},
        {"min_new_tokens": 10, "eos_token_id": EVERY_FOURTH},
        {"stopping_criteria": CRITERIA, "eos_token_id": 63},
    ],
    ids=lambda settings: "-".join(settings),
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


def test_a_batch_of_texts_that_end_apart_needs_a_token_for_padding(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    ids = torch.tensor([[5, 17, 33, 8], [2, 41, 9, 11]])
    criteria = StoppingCriteriaList([EndsAtAMultipleOfThree()])
    with pytest.raises(UnsupportedRequestError, match="set pad_token_id"):
        model.generate(ids, do_sample=False, max_new_tokens=20, stopping_criteria=criteria, custom_generate=decoder)


PADDED: list[dict[str, Any]] = [
    {"max_length": 19},
    {"max_new_tokens": 12, "repetition_penalty": 1.4},
    {"max_new_tokens": 12, "min_new_tokens": 3, "eos_token_id": EVERY_FOURTH},
    {"max_new_tokens": 12, "min_length": 9, "eos_token_id": EVERY_FOURTH},
    {"max_new_tokens": 12, "stopping_criteria": CRITERIA},
]


def test_padding_is_shown_to_processors_and_criteria_as_in_generate(
    model: LlamaForCausalLM, decoder: ProfileDecoder
) -> None:
    padded = torch.cat([torch.full((1, 3), 50), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    for settings in PADDED:
        plain = model.generate(padded, attention_mask=mask, do_sample=False, **settings)
        drafted = model.generate(padded, attention_mask=mask, do_sample=False, custom_generate=decoder, **settings)
        assert torch.equal(plain, drafted), settings


def test_sampled_tokens_are_among_the_top_k_of_plain_decoding(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    torch.manual_seed(2)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 3, "temperature": 5.0, "max_new_tokens": 40}
    text = model.generate(PROMPT, custom_generate=decoder, **settings)
    with torch.no_grad():
        best = model(text).logits[0, 3:-1].topk(3).indices  # [generated, 3]
    ranks = (best == text[0, 4:, None]).int()
    assert ranks.sum(dim=1).eq(1).all()
    assert ranks.sum(dim=0).gt(0).all()  # every rank was drawn: it does sample


NOT_OFFERED: list[tuple[torch.Tensor, dict[str, Any], str]] = [
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
]


def test_what_it_does_not_offer_is_refused(model: LlamaForCausalLM, decoder: ProfileDecoder) -> None:
    for inputs, settings, words in NOT_OFFERED:
        with pytest.raises(UnsupportedRequestError, match=words) as refused:
            model.generate(inputs, max_new_tokens=4, custom_generate=decoder, **{"do_sample": False, **settings})
        assert "\n" not in str(refused.value)


def test_a_model_is_checked_when_it_is_first_used_and_only_then(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(custom_generate, "check_target", lambda profile, given, **_: checked.append(given))
    decoder = load_decoder(profile_of(model))
    assert not checked
    for _ in range(2):
        model.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=decoder)
    assert checked == [model]


def test_the_same_model_in_another_precision_is_the_model_of_the_profile() -> None:
    half = tiny_llama().to(torch.bfloat16)
    profile = profile_of(half)
    with pytest.warns(ProfileWarning, match="dtype bfloat16, not float32"):
        assert load_decoder(profile).decoder_for(half).target.model is half
    whole = half.float()
    assert load_decoder(profile).decoder_for(whole).target.model is whole


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_prefix_reuse_is_as_the_profile_says(
    model: LlamaForCausalLM, prefix_reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []
    honest = ResumeView.run
    monkeypatch.setattr(ResumeView, "run", lambda self, *args: resumed.append(1) or honest(self, *args))
    profile = profile_of(model).model_copy(update={"decoding": Decoding(prefix_reuse=prefix_reuse)})
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=load_decoder(profile))
    assert bool(resumed) is prefix_reuse
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("persistent", [True, False])
def test_only_a_persistent_rule_remembers_the_last_text(model: LlamaForCausalLM, persistent: bool) -> None:
    rule = AdaEdl(initial_threshold=0.1, step=0.5, threshold_decay=0.0, target_acceptance=1.0, persistent=persistent)
    decoder = load_decoder(profile_of(model, rule=rule))
    facts = []
    for _ in range(2):
        model.generate(PROMPT, max_new_tokens=20, do_sample=False, custom_generate=decoder)
        assert decoder.last_generation is not None
        facts.append([step.num_drafted for step in decoder.last_generation.rounds])
    assert (facts[0] == facts[1]) is not persistent


def _other_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("on_mismatch", "assign"), [("error", True), ("plain", False)])
def test_a_model_that_gets_other_weights_is_checked_again(on_mismatch: OnMismatch, assign: bool) -> None:
    model = tiny_llama()
    decoder = load_decoder(profile_of(model), on_mismatch=on_mismatch)
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
    decoder = load_decoder(profile_of(model))
    first = decoder.decoder_for(model)
    change(model)
    drafted = model.generate(PROMPT, max_new_tokens=9, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    assert (decoder.decoder_for(model) is not first) is is_rebuilt


def _exit_profile(model: PreTrainedModel, folder: Path, head_of: PreTrainedModel | None = None) -> Path:
    """A profile with an exit at layer 3, and beside it a head for that exit, of this model or another."""
    draft = write_heads(Target(head_of or model), folder, [3])[3]
    profile_of(model, draft).save(folder / "profile.yaml")
    return folder / "profile.yaml"


def test_exit_with_its_head_beside_the_profile(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = _exit_profile(model, tmp_path)
    profile, expected = DraftProfile.load(path), model.generate(PROMPT, max_new_tokens=30, do_sample=False)
    for decoder in (load_decoder(path), load_decoder(profile, folder=tmp_path)):
        found = model.generate(PROMPT, max_new_tokens=30, do_sample=False, custom_generate=decoder)
        assert torch.equal(found, expected)
        assert decoder.last_generation is not None
        assert decoder.last_generation.num_drafted > 10
    with pytest.raises(ExitHeadError, match="give folder="):
        load_decoder(profile)
    (head,) = tmp_path.glob("*.safetensors")
    head.write_bytes(head.read_bytes()[:-1])
    with pytest.raises(ExitHeadError, match="its contents differ"):
        load_decoder(path)


@pytest.mark.parametrize(
    ("draft", "rule"),
    [
        (PromptLookup(), Fixed(max_tokens=4)),
        (LayerSkip(bits=8, lookup=Lookup()), BetaThompson(max_tokens=6, persistent=True, costs=CHEAP)),
    ],
    ids=["lookup", "lookup, then int8"],
)
def test_profile_with_a_lookup_writes_the_text_of_generate(
    model: LlamaForCausalLM, tmp_path: Path, draft: Draft, rule: DraftLengthRule
) -> None:
    path = tmp_path / "profile.yaml"
    profile_of(model, draft, rule).save(path)
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


def test_answers_of_earlier_requests_are_copied_from(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, SuffixDraft(), Fixed(max_tokens=6)))
    mine, others = RequestHistory(), RequestHistory()
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


def test_history_that_the_draft_does_not_read_is_refused(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model, PromptLookup()))
    with pytest.raises(UnsupportedRequestError, match="only a suffix automaton takes a history"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=decoder, history=RequestHistory())


# --- runners ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
def test_runner_and_mode_are_as_the_profile_says(model: LlamaForCausalLM) -> None:
    exact_width = 4
    decoding = Decoding(runner="static", exact_width=exact_width)
    decoder = load_decoder(profile_of(model).model_copy(update={"decoding": decoding}))
    drafted = model.generate(PROMPT, max_new_tokens=20, do_sample=False, custom_generate=decoder)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=20, do_sample=False))
    runner = decoder.decoder_for(model).target.runner
    assert (runner.name, runner.exact_width) == ("static", exact_width)
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_accepted > 0


def test_a_model_that_does_not_resume_after_a_prefix_is_verified_whole_with_a_warning(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile says that it does: it was written by hand, or before the model's code changed."""
    honest = ResumeView.run

    def wrong(self: ResumeView, *args: Any) -> Outputs:
        outputs = honest(self, *args)
        return replace(outputs, logits=outputs.logits.flip(-1))

    monkeypatch.setattr(ResumeView, "run", wrong)
    decoder = load_decoder(profile_of(model))
    with pytest.warns(ProfileWarning, match="different logits from block 2 on .*: each verification runs the whole"):
        drafted = decoder.generate(model, PROMPT, max_new_tokens=24)
    assert torch.equal(drafted, model.generate(PROMPT, max_new_tokens=24, do_sample=False))
    decoder.generate(model, PROMPT, max_new_tokens=4)  # the result is remembered: a second warning would be an error


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
