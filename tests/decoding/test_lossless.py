"""The project's first test: speculative decoding reproduces plain decoding for every draft, rule and runner."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
from decoding.draft_length import Fixed
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending, Shaping
from tests.support.families import SUPPORTED, WINDOW, build, some_tokens, static_target_of, target_of
from tests.support.generations import NUM_NEW_TOKENS, AnyLength, plain_text, write, write_plainly
from tests.support.grid import PROMPTS, RULES, SKIPS, WITHOUT_LINEARS
from tests.support.recorded_decoding import DRAFTS, alone_and_together, decoder_of, requests

FAMILIES = list(SUPPORTED)
SEVERAL = PROMPTS["several tokens"]


def stock_text(target: Target, prompt: Sequence[int], **settings: Any) -> tuple[int, ...]:
    """Return the output of transformers itself."""
    output = target.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt))), do_sample=False, **settings
    )
    return tuple(output[0, len(prompt) :].tolist())


# --- the grid ---------------------------------------------------------------------------------------------------------


@functools.cache
def stock_texts(family: str) -> list[tuple[int, ...]]:
    asked = [(request.prompt, request.ending.max_new_tokens) for request in requests()]
    return [stock_text(target_of(family), prompt, max_new_tokens=num_tokens) for prompt, num_tokens in asked]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def is_refused(family: str, draft: str) -> bool:
    """Return True for drafts that this family refuses: quantised ones of weights without linear layers."""
    return bool(DRAFTS[draft].parts.bits and family in WITHOUT_LINEARS)


@pytest.mark.parametrize(
    ("family", "draft"), [(family, draft) for family in FAMILIES for draft in DRAFTS if not is_refused(family, draft)]
)
def test_text_is_that_of_generate(family: str, draft: str, heads: Path) -> None:
    """Alone by one runner and in lockstep by the other, in turn, with one rule in turn and with prefix reuse in one of the two."""
    number = FAMILIES.index(family) + list(DRAFTS).index(draft)
    rule = list(RULES)[number % len(RULES)]
    expected = stock_texts(family)
    runners = [target_of, target_of if family == "bloom" else static_target_of][:: 1 if number % 2 else -1]
    alone, together = (
        decoder_of(target_with(family), draft, RULES[rule], heads / target_with.__name__ / family, prefix_reuse=reuse)
        for target_with, reuse in zip(runners, (number % 4 < 2, number % 4 >= 2), strict=True)
    )
    *_, last = requests()
    assert alone.generate(last).tokens == expected[-1], f"{rule}, {runners[0].__name__}"
    found = [each.tokens for each in together.generate_batch(requests()).generations]
    assert found == expected, f"{rule}, {runners[1].__name__}"


@pytest.mark.parametrize("family", FAMILIES)
def test_grid_has_drafts_and_copies_that_are_right_sometimes_but_not_always(family: str, heads: Path) -> None:
    request = Request(SEVERAL, Ending(6 * NUM_NEW_TOKENS))
    target, rule = target_of(family), RULES["fixed 3"]
    drafted, looked_up, suffixes = (
        decoder_of(target, draft, rule, heads).generate(request)
        for draft in ("last block", "lookup", "suffix automaton")
    )
    assert 0.1 < drafted.num_accepted / drafted.num_drafted < 0.95
    assert len(drafted.accepted_lengths) >= 3, "rounds that accept none, some and all drafts"
    assert len(set(drafted.tokens)) > 5
    copies = [step for generation in (looked_up, suffixes) for step in generation.rounds if step.looked_up]
    assert 0.01 < sum(step.num_accepted for step in copies) / sum(step.num_drafted for step in copies) < 0.95
    assert len({step.num_accepted for step in copies}) >= 2, "rounds that accept none and some of a copy"


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_text_many_windows_long_is_that_of_generate(family: str, heads: Path) -> None:
    target, request = target_of(family), Request(some_tokens(3 * WINDOW), Ending(8 * WINDOW))
    expected = stock_text(target, request.prompt, max_new_tokens=8 * WINDOW)
    for draft in ("plain", "half blocks", "lookup, then exit with a head"):
        assert (
            decoder_of(target, draft, Fixed(max_tokens=2 * WINDOW), heads / family).generate(request).tokens == expected
        )


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox_parallel"])
def test_eager_attention_writes_the_text_of_generate_too(family: str, heads: Path) -> None:
    target = Target(build(family, attn_implementation="eager"))
    expected = [stock_text(target, each.prompt, max_new_tokens=each.ending.max_new_tokens) for each in requests()]
    assert target.config._attn_implementation == "eager"
    for draft in ("plain", "half blocks", "lookup, then exit with a head"):
        decoder = decoder_of(target, draft, Fixed(max_tokens=4), heads / f"{family} eager")
        assert alone_and_together(decoder) == [expected[-1], *expected]


# --- rules --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["half blocks", "lookup, then blocks"])
def test_no_decision_of_a_rule_changes_the_output(draft: str) -> None:
    request = Request(SEVERAL, Ending(4 * NUM_NEW_TOKENS))
    target = target_of("llama")
    plain = write_plainly(target, request).tokens
    for prefix_reuse in (True, False):
        generation = write(target, DRAFTS[draft], AnyLength(1), request, prefix_reuse=prefix_reuse)
        assert generation.tokens == plain
        assert {step.num_drafted for step in generation.rounds} >= {0, 1, 2}


@pytest.mark.parametrize("rule", ["AdaEDL, last kept", "Beta-Thompson"])
def test_controller_of_an_earlier_text_steers_the_next_and_changes_no_output(rule: str) -> None:
    target, controller = target_of("llama"), RULES[rule].controller()
    lengths, states = set[int](), [controller.adapted_rule()]
    for seed in range(4):
        request = Request(some_tokens(5, seed), Ending(2 * NUM_NEW_TOKENS))
        generation = write(target, SKIPS["last block"], controller, request)
        assert generation.tokens == write_plainly(target, request).tokens
        lengths |= {step.num_drafted for step in generation.rounds}
        states.append(controller.adapted_rule())
    assert len(lengths) > 2
    assert all(before != after for before, after in itertools.pairwise(states))


# --- stopping conditions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new_tokens", [1, 2, 30])
def test_sequence_has_the_requested_number_of_tokens(num_new_tokens: int) -> None:
    target, request = target_of("llama"), Request(SEVERAL, Ending(num_new_tokens))
    expected = stock_text(target, SEVERAL, max_new_tokens=num_new_tokens)
    assert write_plainly(target, request).tokens == expected
    for skip, rule in (("blocks", "fixed 8"), ("nothing", "fixed 3"), ("nothing", "AdaEDL, last dropped")):
        assert write(target, SKIPS[skip], RULES[rule], request).tokens == expected


@pytest.mark.parametrize(("rule", "skip"), [("fixed 8", "nothing"), ("AdaEDL, last dropped", "blocks")])
def test_end_token_ends_the_sequence_anywhere_in_a_draft(rule: str, skip: str) -> None:
    target, whole = target_of("llama"), plain_text("llama", "several tokens")
    for end_token in dict.fromkeys(whole):
        request = Request(SEVERAL, Ending(NUM_NEW_TOKENS, frozenset({end_token, 1_000})))
        expected = stock_text(target, SEVERAL, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=end_token, pad_token_id=0)
        assert expected == whole[: whole.index(end_token) + 1]
        assert write_plainly(target, request).tokens == expected
        assert write(target, SKIPS[skip], RULES[rule], request).tokens == expected


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
    target, whole = target_of("llama"), plain_text("llama", "several tokens")
    for index, ends in ((0, False), (5, False), (6, True), (NUM_NEW_TOKENS - 1, False)):
        stock, plain, drafted = ([Watching(), Watching(None if ends else whole[index]), Watching()] for _ in range(3))
        settings = {"eos_token_id": whole[index], "pad_token_id": 0} if ends else {}
        expected = stock_text(
            target, SEVERAL, max_new_tokens=NUM_NEW_TOKENS, stopping_criteria=StoppingCriteriaList(stock), **settings
        )
        request = Request(SEVERAL, Ending(NUM_NEW_TOKENS, frozenset({whole[index]} if ends else ()), plain))
        assert write_plainly(target, request).tokens == expected
        request = replace(request, ending=replace(request.ending, criteria=drafted))
        assert write(target, DRAFTS[draft], Fixed(max_tokens=6), request).tokens == expected
        assert [each.seen for each in drafted] == [each.seen for each in plain] == [each.seen for each in stock]


# --- logits processors --------------------------------------------------------------------------------------------------


PROCESSORS = {
    "no early end": [MinNewTokensLengthLogitsProcessor(len(SEVERAL), 8, 7, device="cpu")],
    "warpers": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(7), TopPLogitsWarper(0.8)],
    "all": [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3), TopKLogitsWarper(5)],
}


@pytest.mark.parametrize(
    ("family", "processors"),
    [*(("llama", processors) for processors in PROCESSORS), ("gemma3", "all"), ("gpt_neox_parallel", "all")],
)
def test_logits_processors_shape_the_text_as_in_generate(family: str, processors: str) -> None:
    target, number = target_of(family), 2 * NUM_NEW_TOKENS
    request = Request(SEVERAL, Ending(number), shaping=Shaping(PROCESSORS[processors]))
    stock = stock_text(
        target, SEVERAL, max_new_tokens=number, logits_processor=LogitsProcessorList(PROCESSORS[processors])
    )
    assert write_plainly(target, request).tokens == stock
    assert processors != "all" or stock != stock_text(target, SEVERAL, max_new_tokens=number)
    # One rule keeps the token of its last pass and one drops it.
    for draft, rule in (
        ("half blocks", "fixed 3"),
        ("lookup", "fixed 3"),
        ("suffix automaton, then exit", "AdaEDL, last dropped"),
    ):
        assert write(target, DRAFTS[draft], RULES[rule], request).tokens == stock


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


LOOKUPS = ("lookup", "lookup, then blocks", "suffix automaton", "suffix automaton, then exit")


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


@pytest.mark.parametrize("after", [1, 5])
def test_text_cut_short_by_an_error_leaves_the_next_as_it_is(after: int) -> None:
    target = target_of("llama")
    drafter = LayerSkipDrafter(target, SKIPS["blocks"])
    request = Request(SEVERAL, Ending(NUM_NEW_TOKENS))
    failing = replace(request, shaping=Shaping([Failing(after)]))
    with pytest.raises(RuntimeError, match="out of memory, say"):
        list(speculative(target, drafter, Fixed(max_tokens=3).controller(), failing))
    again = Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), request))
    assert again.tokens == plain_text("llama", "several tokens")
