"""The project's first test: speculative decoding reproduces plain decoding for every draft and rule."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.decode import Request, speculative
from decoding.draft_length import (
    AdaEdl,
    Controller,
    Decision,
    DraftDistribution,
    Fixed,
)
from decoding.drafters.build import build_drafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft, SuffixLookup
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending, Shaping
from tests.support.families import SUPPORTED, WINDOW, build, some_tokens, target_of
from tests.support.generations import NUM_NEW_TOKENS, plain_text, write, write_plainly
from tests.support.grid import PROMPTS, RULES, SKIPS

FAMILIES = list(SUPPORTED)

LOOKUPS: dict[str, Draft] = {
    "lookup": PromptLookup(),
    "lookup, then blocks": LayerSkip(skip_attention=(2, 3), skip_mlp=(2, 3), lookup=Lookup(max_tokens=4)),
    "lookup, then mlp": LayerSkip(skip_mlp=(0, 4), lookup=Lookup(max_ngram=2, max_tokens=2)),
    "lookup, then exit": EarlyExit(exit_layer=3, lookup=Lookup(min_ngram=2)),
    "suffix automaton": SuffixDraft(),
    "suffix automaton, then blocks": LayerSkip(
        skip_attention=(2, 3), skip_mlp=(2, 3), lookup=SuffixLookup(max_tokens=4)
    ),
}
DRAFTS: dict[str, Draft] = {**SKIPS, **LOOKUPS}
# One rule keeps the token of its last pass and one drops it.
TWO_RULES = ("fixed 3", "AdaEDL, last dropped")
# One family attends to everything, one mostly within a window.
EVERY_RULE = ("llama", "gemma3")


def has_prefix(draft: Draft) -> bool:
    """Return True if there are leading blocks that the verification need not compute again."""
    return isinstance(draft, EarlyExit) or (isinstance(draft, LayerSkip) and bool(draft.first_skipped))


def stock_text(target: Target, prompt: Sequence[int], **settings: Any) -> tuple[int, ...]:
    """Return the output of transformers itself."""
    output = target.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt))), do_sample=False, **settings
    )
    return tuple(output[0, len(prompt) :].tolist())


# --- the grid ---------------------------------------------------------------------------------------------------------


def cases_of(family: str, draft: str) -> list[tuple[str, bool]]:
    """Choose rules and prefix reuse for one family and draft: pairs are covered, and all three by two families between them.

    A rule and a family meet only in the cache, by the token of the last pass, which a rule keeps or drops. Therefore
    every draft meets every family with a rule that drops it and with one of all rules in turn: this way each family
    meets each rule, and each draft each rule.
    """
    reuses = not has_prefix(DRAFTS[draft])
    if family in EVERY_RULE:
        first = (EVERY_RULE.index(family) + list(DRAFTS).index(draft)) % 2
        return [*((rule, True) for rule in [*RULES][first::2]), *((rule, False) for rule in TWO_RULES if not reuses)]
    in_turn = (FAMILIES.index(family) + list(DRAFTS).index(draft)) % len(RULES)
    return [(list(RULES)[in_turn], True), ("AdaEDL, last dropped", reuses)]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_text_is_the_plain_text(family: str, draft: str) -> None:
    target = target_of(family)
    prompts = [*PROMPTS][
        :: 1 if list(DRAFTS).index(draft) % 2 else -1
    ]  # alternating, so that every kind of draft meets both
    for number, (rule, prefix_reuse) in enumerate(cases_of(family, draft)):
        prompt = prompts[number % 2]
        request = Request(PROMPTS[prompt], Ending(NUM_NEW_TOKENS))
        generation = write(target, DRAFTS[draft], RULES[rule], request, prefix_reuse=prefix_reuse)
        assert generation.tokens == plain_text(family, prompt), f"{rule}, {prompt}, prefix reuse {prefix_reuse}"


def test_every_family_and_every_draft_meet_every_rule() -> None:
    met = [(family, draft, rule) for family in FAMILIES for draft in DRAFTS for rule, _ in cases_of(family, draft)]
    assert {(family, rule) for family, _, rule in met} == {(family, rule) for family in FAMILIES for rule in RULES}
    rare = [each for each in met if each[0] not in EVERY_RULE]
    assert {(draft, rule) for _, draft, rule in rare} == {(draft, rule) for draft in DRAFTS for rule in RULES}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_is_the_text_of_generate(family: str, prompt: str) -> None:
    expected = stock_text(target_of(family), PROMPTS[prompt], max_new_tokens=NUM_NEW_TOKENS)
    assert plain_text(family, prompt) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_grid_has_drafts_that_are_right_sometimes_but_not_always(family: str) -> None:
    request = Request(PROMPTS["several tokens"], Ending(4 * NUM_NEW_TOKENS))
    generation = write(target_of(family), SKIPS["last block"], Fixed(max_tokens=3), request)
    assert 0.1 < generation.num_accepted / generation.num_drafted < 0.95
    assert len(generation.accepted_lengths) >= 3, "rounds that accept none, some and all drafts"
    assert len(set(generation.tokens)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_grid_has_copies_that_are_right_sometimes_but_not_always(family: str) -> None:
    request = Request(PROMPTS["several tokens"], Ending(6 * NUM_NEW_TOKENS))
    drafts = [LOOKUPS[name] for name in ("lookup", "lookup, then mlp", "suffix automaton")]  # the others copy alike
    generations = [write(target_of(family), draft, Fixed(max_tokens=3), request) for draft in drafts]
    assert all(generation.num_looked_up > 0 for generation in generations)
    copies = [step for generation in generations for step in generation.rounds if step.looked_up]
    assert 0.01 < sum(step.num_accepted for step in copies) / sum(step.num_drafted for step in copies) < 0.95
    assert len({step.num_accepted for step in copies}) >= 2, "rounds that accept none and some of a copy"


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("draft", ["attention", "last block", "lookup", "lookup, then blocks"])
def test_text_many_windows_long_is_the_plain_text(family: str, draft: str) -> None:
    request = Request(some_tokens(3 * WINDOW), Ending(8 * WINDOW))
    expected = long_stock_text(family)
    assert write(target_of(family), DRAFTS[draft], Fixed(max_tokens=2 * WINDOW), request).tokens == expected


@functools.cache
def long_stock_text(family: str) -> tuple[int, ...]:
    """Return the output of transformers many windows long, which plain decoding must write too."""
    target = target_of(family)
    request = Request(some_tokens(3 * WINDOW), Ending(8 * WINDOW))
    text = stock_text(target, request.prompt, max_new_tokens=8 * WINDOW)
    assert write_plainly(target, request).tokens == text
    return text


@pytest.mark.parametrize(("family", "first"), [("llama", 0), ("mistral", 1), ("gemma2", 0), ("gpt_neox_parallel", 1)])
def test_eager_attention_writes_the_plain_text_too(family: str, first: int) -> None:
    """Each draft with one family that attends within a window and with one that does not, as far as they alternate."""
    target = Target(build(family, attn_implementation="eager"))
    request = Request(PROMPTS["several tokens"], Ending(NUM_NEW_TOKENS))
    plain = write_plainly(target, request).tokens
    assert target.config._attn_implementation == "eager"
    for draft in list(DRAFTS.values())[first::2]:
        assert write(target, draft, Fixed(max_tokens=4), request).tokens == plain


# --- rules --------------------------------------------------------------------------------------------------------------


class ScriptedController(Controller):
    """A controller that decides at random, even to draft nothing or to stop before the first token."""

    def __init__(self, seed: int) -> None:
        super().__init__(max_tokens=5)
        self._random = random.Random(seed)

    def limit(self) -> int:
        return self._random.randint(0, self.max_tokens)

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return self._random.choice([Decision.CONTINUE, Decision.CONTINUE, Decision.LAST, Decision.STOP])


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("draft", ["blocks", "mixed", "first attention", "nothing", "lookup, then blocks"])
def test_no_decision_of_a_rule_changes_the_output(draft: str, prefix_reuse: bool) -> None:
    request = Request(PROMPTS["several tokens"], Ending(4 * NUM_NEW_TOKENS))
    target = target_of("llama")
    plain = write_plainly(target, request).tokens
    for seed in range(2):
        generation = write(target, DRAFTS[draft], ScriptedController(seed), request, prefix_reuse=prefix_reuse)
        assert generation.tokens == plain
        assert {step.num_drafted for step in generation.rounds} >= {0, 1, 2}


def test_drafts_longer_than_the_text_end_with_it() -> None:
    target = target_of("llama")
    request = Request(PROMPTS["several tokens"], Ending(NUM_NEW_TOKENS))
    generation = write(target, LayerSkip(), Fixed(max_tokens=64), request)
    assert generation.tokens == write_plainly(target, request).tokens
    # One round after the prefill's token: all remaining tokens except the last, which is the target's.
    assert [(step.num_drafted, step.num_accepted) for step in generation.rounds] == [(NUM_NEW_TOKENS - 2,) * 2]


def test_controller_of_an_earlier_text_may_steer_the_next() -> None:
    target = target_of("llama")
    drafter = LayerSkipDrafter(target, SKIPS["blocks"])
    controller = AdaEdl(max_tokens=6, gamma=0.3, step=0.2).controller()
    thresholds = []
    for seed in range(4):
        request = Request(some_tokens(5, seed), Ending(NUM_NEW_TOKENS))
        generation = Generation.collect(speculative(target, drafter, controller, request))
        assert generation.tokens == write_plainly(target, request).tokens
        thresholds.append(controller.threshold)
    assert len(set(thresholds)) > 1


@pytest.mark.parametrize("rule", ["Beta-Thompson", "calibrated Thompson"])
def test_persistent_thompson_controller_varies_lengths_but_not_the_output(
    rule: str,
) -> None:
    target = target_of("llama")
    controller = RULES[rule].controller()
    lengths = set()
    for seed in range(4):
        request = Request(some_tokens(5, seed), Ending(2 * NUM_NEW_TOKENS))
        generation = write(target, SKIPS["last block"], controller, request)
        assert generation.tokens == write_plainly(target, request).tokens
        lengths |= {step.num_drafted for step in generation.rounds}
    assert {0, 1, 2} <= lengths


# --- stopping conditions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new_tokens", [1, 2, 3, 30])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sequence_has_the_requested_number_of_tokens(family: str, num_new_tokens: int) -> None:
    target = target_of(family)
    request = Request(PROMPTS["several tokens"], Ending(num_new_tokens))
    plain = write_plainly(target, request).tokens
    assert len(plain) == num_new_tokens
    assert plain == stock_text(target, request.prompt, max_new_tokens=num_new_tokens)
    for skip in ("blocks", "nothing"):
        for rule in ("fixed 8", *TWO_RULES):
            assert write(target, SKIPS[skip], RULES[rule], request).tokens == plain


@pytest.mark.parametrize(
    ("rule", "skip"), [("fixed 3", "last block"), ("fixed 8", "nothing"), ("AdaEDL, last dropped", "blocks")]
)
def test_end_token_ends_the_sequence_anywhere_in_a_draft(rule: str, skip: str) -> None:
    target = target_of("llama")
    prompt = PROMPTS["several tokens"]
    whole = plain_text("llama", "several tokens")
    for end_token in dict.fromkeys(whole):
        request = Request(prompt, Ending(NUM_NEW_TOKENS, frozenset({end_token, 1_000})))
        expected = whole[: whole.index(end_token) + 1]
        assert write_plainly(target, request).tokens == expected
        assert write(target, SKIPS[skip], RULES[rule], request).tokens == expected


def test_end_token_ends_the_text_where_generate_ends_it() -> None:
    target, prompt = target_of("llama"), PROMPTS["several tokens"]
    end_token = plain_text("llama", "several tokens")[4]
    stock = stock_text(target, prompt, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=end_token, pad_token_id=0)
    assert write_plainly(target, Request(prompt, Ending(NUM_NEW_TOKENS, frozenset({end_token})))).tokens == stock


class Watching:
    """A stopping criterion that records its inputs and is met at `token`."""

    def __init__(self, token: int | None = None) -> None:
        self.token = token
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        return torch.tensor([self.seen[-1][-1] == self.token])


@pytest.mark.parametrize("draft", ["blocks", "nothing", "lookup"])
def test_stopping_criteria_see_every_single_token_as_in_generate(draft: str) -> None:
    target, prompt = target_of("llama"), PROMPTS["several tokens"]
    whole = plain_text("llama", "several tokens")
    for index in (0, 1, 5, 9, NUM_NEW_TOKENS - 1):
        stock, plain, drafted = ([Watching(), Watching(whole[index]), Watching()] for _ in range(3))
        request = Request(prompt, Ending(NUM_NEW_TOKENS, criteria=plain))
        expected = stock_text(
            target, prompt, max_new_tokens=NUM_NEW_TOKENS, stopping_criteria=StoppingCriteriaList(stock)
        )
        assert write_plainly(target, request).tokens == expected
        request = replace(request, ending=replace(request.ending, criteria=drafted))
        assert write(target, DRAFTS[draft], Fixed(max_tokens=6), request).tokens == expected
        assert [each.seen for each in drafted] == [each.seen for each in plain] == [each.seen for each in stock]
        assert [len(text) - len(prompt) for text in drafted[0].seen] == list(range(1, len(expected) + 1))


def test_stopping_criteria_see_the_end_token_as_in_generate() -> None:
    target, prompt = target_of("llama"), PROMPTS["several tokens"]
    end_token = plain_text("llama", "several tokens")[6]
    stock, drafted = Watching(), Watching()
    settings = {"eos_token_id": end_token, "pad_token_id": 0, "stopping_criteria": StoppingCriteriaList([stock])}
    expected = stock_text(target, prompt, max_new_tokens=NUM_NEW_TOKENS, **settings)
    request = Request(prompt, Ending(NUM_NEW_TOKENS, frozenset({end_token}), [drafted]))
    assert write(target, LayerSkip(), Fixed(max_tokens=6), request).tokens == expected
    assert drafted.seen == stock.seen


# --- logits processors --------------------------------------------------------------------------------------------------


PROCESSORS = {
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
    "no repeated pair": [NoRepeatNGramLogitsProcessor(2)],
    "no early end": [MinNewTokensLengthLogitsProcessor(len(PROMPTS["several tokens"]), 8, 7, device="cpu")],
    "warpers": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(7), TopPLogitsWarper(0.8)],
    "all": [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3), TopKLogitsWarper(5)],
}


@pytest.mark.parametrize(
    ("family", "processors"),
    [*(("llama", processors) for processors in PROCESSORS), ("gemma3", "all"), ("gpt_neox_parallel", "all")],
)
def test_logits_processors_shape_the_text_as_in_generate(family: str, processors: str) -> None:
    target, prompt = target_of(family), PROMPTS["several tokens"]
    request = Request(prompt, Ending(2 * NUM_NEW_TOKENS), shaping=Shaping(PROCESSORS[processors]))
    expected = stock_text(
        target,
        prompt,
        max_new_tokens=2 * NUM_NEW_TOKENS,
        logits_processor=LogitsProcessorList(PROCESSORS[processors]),
    )
    assert write_plainly(target, request).tokens == expected
    first = list(PROCESSORS).index(processors)
    for number, draft in enumerate(("blocks", "mixed", "lookup", "lookup, then exit")):
        rule = TWO_RULES[(first + number + number // 2) % 2]  # each draft meets both, with one processor or the next
        assert write(target, DRAFTS[draft], RULES[rule], request).tokens == expected


def test_processors_tried_include_some_that_change_the_output() -> None:
    without = write_plainly(target_of("llama"), Request(PROMPTS["several tokens"], Ending(40))).tokens
    texts = {
        write_plainly(
            target_of("llama"), Request(PROMPTS["several tokens"], Ending(40), shaping=Shaping(processors))
        ).tokens
        for processors in PROCESSORS.values()
    }
    assert len(texts | {without}) > 2


# --- frequencies that depend on the sequence length ---------------------------------------------------------------------


ROPES = {
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [8.0, 7.0, 6.0, 5.0],
                "factor": 12.8,
                "original_max_position_embeddings": 20,
            },
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_text_that_outgrows_its_rotary_frequencies_is_the_plain_text(rope: str) -> None:
    family, settings = ROPES[rope]
    target = Target(build(family, **settings))
    num_looked_up = 0
    for seed in range(2):
        request = Request(some_tokens(7, seed), Ending(2 * NUM_NEW_TOKENS))
        plain = write_plainly(target, request).tokens
        for draft in ("blocks", "nothing", *LOOKUPS):
            generation = write(target, DRAFTS[draft], Fixed(max_tokens=8), request)
            assert generation.tokens == plain
            assert generation.num_accepted > 0 or draft in ("lookup", "suffix automaton")
            num_looked_up += generation.num_looked_up
        assert not target.follow_weights(), "what its passes compute is no change of the model's weights"
    assert num_looked_up > 10


@pytest.mark.parametrize("rope", ROPES)
def test_checks_of_a_model_end_before_its_rotary_frequencies_change(rope: str) -> None:
    family, settings = ROPES[rope]
    early = {name: 8 for name in ("max_position_embeddings", "original_max_position_embeddings") if name in settings}
    rotary = settings["rope_parameters"]
    target = Target(build(family, **{**settings, **early, "rope_parameters": {**rotary, **early}}))
    before = {name: buffer.clone() for name, buffer in target.model.named_buffers()}
    build_drafter(target, DRAFTS["blocks"])
    target.checks.padding()
    after = dict(target.model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    request = Request(some_tokens(5), Ending(NUM_NEW_TOKENS))
    assert write(target, DRAFTS["blocks"], Fixed(max_tokens=8), request).tokens == write_plainly(target, request).tokens


# --- consecutive sequences ----------------------------------------------------------------------------------------------


def test_interleaved_sequences_do_not_affect_each_other() -> None:
    target = target_of("gemma3")
    drafter = LayerSkipDrafter(target, SKIPS["blocks"])
    requests = [Request(some_tokens(4 + seed, seed), Ending(NUM_NEW_TOKENS)) for seed in range(3)]
    running = [speculative(target, drafter, Fixed(max_tokens=3).controller(), request) for request in requests]
    steps: list[list[Any]] = [[] for _ in requests]
    unfinished = list(range(len(requests)))
    while unfinished:
        for index in list(unfinished):
            step = next(running[index], None)
            if step is None:
                unfinished.remove(index)
            else:
                steps[index].append(step)
    for request, own in zip(requests, steps, strict=True):
        assert Generation.collect(own).tokens == write_plainly(target, request).tokens


class Failing:
    """A logits processor that fails on its `after`-th call."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory, say")
        return scores


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6, 7, 8])
def test_text_cut_short_by_an_error_leaves_the_next_as_it_is(after: int) -> None:
    target = target_of("llama")
    drafter = LayerSkipDrafter(target, SKIPS["blocks"])
    request = Request(PROMPTS["several tokens"], Ending(NUM_NEW_TOKENS))
    failing = replace(request, shaping=Shaping([Failing(after)]))
    with pytest.raises(RuntimeError, match="out of memory, say"):
        list(speculative(target, drafter, Fixed(max_tokens=3).controller(), failing))
    again = Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), request))
    assert again.tokens == plain_text("llama", "several tokens")


def test_order_of_texts_and_drafts_does_not_matter() -> None:
    target = target_of("olmo2")
    drafters = [LayerSkipDrafter(target, SKIPS[skip]) for skip in ("blocks", "mixed", "first mlp")]
    requests = [Request(some_tokens(5, seed), Ending(NUM_NEW_TOKENS)) for seed in range(2)]

    def facts(which: int, text: int) -> list[Any]:
        rule = AdaEdl(max_tokens=5, gamma=0.3, step=0.2)
        generation = Generation.collect(speculative(target, drafters[which], rule.controller(), requests[text]))
        return [(step.tokens, step.num_drafted, step.num_accepted) for step in generation.rounds]

    cases = [(which, text) for which in range(3) for text in range(2)]
    forwards = {case: facts(*case) for case in cases}
    backwards = {case: facts(*case) for case in reversed(cases)}
    assert forwards == backwards


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request([], Ending(3))
