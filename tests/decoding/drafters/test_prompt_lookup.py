"""Prompt lookup and suffix automaton, alone and before another draft: its copies, the rule that is asked, and losslessness.

That it leaves texts as they are is also tested with all families and rules in `test_lossless`, with exit heads in
`test_early_exit`, and its sampling in `test_sampling`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import Controller, Decision, DraftDistribution, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.prompt_lookup import CopyDrafter, LookupFirst, steered_part
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft, SuffixLookup
from decoding.drafts.copies import NgramCopies, copied
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.rounds import Generation, Round
from decoding.target import Target
from decoding.target.heads import new_exit_head
from decoding.text import Ending, Shaping, TokenSequence
from tests.support.controllers import AnyLength
from tests.support.families import NUM_LAYERS, some_tokens, target_of
from tests.support.generations import check_facts, write_plainly
from tests.support.grid import RULES
from tests.support.heads import untrained_head, write_heads

CPU = torch.device("cpu")
NUM_NEW_TOKENS = 32
LOOKUP = Lookup(min_ngram=2, max_tokens=5)
SUFFIXES = SuffixLookup(max_spec_factor=4, min_token_prob=0, max_tokens=5)


@functools.cache
def repetitive_prompt(family: str) -> tuple[int, ...]:
    """A prompt that ends with two earlier continuations of the model, so that the model repeats itself."""
    target = target_of(family)
    prompt = tuple(some_tokens(6)) * 2
    for _ in range(2):
        prompt += write_plainly(target, Request(prompt, Ending(2 * NUM_NEW_TOKENS))).tokens
    return prompt


def request_for(family: str, num_new: int = NUM_NEW_TOKENS) -> Request:
    return Request(repetitive_prompt(family), Ending(num_new))


@functools.cache
def plain_text(family: str) -> tuple[int, ...]:
    return write_plainly(target_of(family), request_for(family)).tokens


def write(target: Target, drafter: Drafter | None, controller: Controller, request: Request) -> Generation:
    assert drafter is not None
    generation = Generation.collect(speculative(target, drafter, controller, request))
    check_facts(generation, request, max(controller.max_tokens, LOOKUP.max_tokens))
    return generation


def text_of(*tokens: int) -> TokenSequence:
    return TokenSequence(tokens, 64, CPU)


# --- what is copied -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "most", "fewest", "position"),
    [
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 3, 1, 3),  # three tokens that match, before the later match of two
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 2, 1, 8),
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 1, 1, 8),
        ((4, 3, 8, 3, 9, 2, 3), 3, 1, 4),  # no more than one matches: the latest of those
        ((4, 3, 8, 3, 9, 2, 3), 3, 2, None),
        ((5,), 3, 1, None),
        ((5, 5), 3, 1, 1),
    ],
)
def test_longest_ngram_counts_and_of_those_the_latest(
    tokens: tuple[int, ...], most: int, fewest: int, position: int | None
) -> None:
    assert NgramCopies(tokens, max_ngram=most, min_ngram=fewest).find() == position


@pytest.mark.parametrize(
    ("tokens", "position", "expected"),
    [
        ((1, 2, 3, 4, 1), 1, [2, 3, 4, 1, 2, 3, 4]),
        ((1, 2, 1), 1, [2, 1, 2, 1, 2, 1, 2]),
        ((9, 7, 7), 2, [7] * 7),
    ],
)
def test_copy_that_reaches_the_end_goes_round_the_loop(
    tokens: tuple[int, ...], position: int, expected: list[int]
) -> None:
    assert copied(tokens, position, 7) == expected
    assert copied(tokens, position, 2) == expected[:2]


def test_copy_reads_on_in_what_it_has_itself_proposed() -> None:
    tokens = some_tokens(9)
    for position in range(1, 9):
        proposed: list[int] = []
        for index in range(20):
            proposed.append([*tokens, *proposed][position + index])
        assert copied(tokens, position, 20) == proposed


def drafted_by(drafter: Drafter, text: TokenSequence, controller: Controller, limit: int) -> tuple[Proposal, list[int]]:
    cache = target_of("llama").new_cache(text.length + limit + 1)
    cache.length = text.length - 1
    draft = drafter.draft(text, cache, controller, Shaping(), Greedy(), limit)
    return draft, text.span(text.length, text.length + draft.num_tokens)[0].tolist()


def test_rejected_and_unread_drafts_are_never_looked_up() -> None:
    drafter = CopyDrafter(target_of("llama"), PromptLookup(max_ngram=2))
    text = text_of(1, 2, 3, 1, 2)
    assert drafted_by(drafter, text, Controller(4), 4)[1] == [3, 1, 2, 3]
    text.append([5])  # all of them rejected
    assert drafted_by(drafter, text, Controller(4), 4)[0].num_tokens == 0
    text.append([3])
    assert drafted_by(drafter, text, Controller(4), 4)[1] == [1, 2, 5, 3]
    text.append([1, 2])  # two accepted, then the target's
    text.append([5])
    assert drafted_by(drafter, text, Controller(4), 4)[1] == [3, 1, 2, 5]


# --- who is asked -------------------------------------------------------------------------------------------------------


class Noting(Controller):
    """Drafts up to `max_tokens`, and notes what it is asked and told."""

    def __init__(self, max_tokens: int = 4, decisions: Sequence[Decision] = ()) -> None:
        super().__init__(max_tokens)
        self.num_limits = 0
        self.seen: list[tuple[float, float]] = []
        self.observed: list[tuple[int, int]] = []
        self._decisions = decisions

    def limit(self) -> int:
        self.num_limits += 1
        return self.max_tokens

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        self.seen.append((distribution.top_probability, distribution.entropy))
        return self._decisions[num_drafted] if num_drafted < len(self._decisions) else Decision.CONTINUE

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.observed.append((num_drafted, num_accepted))


def test_rule_is_asked_about_tokens_that_are_certain() -> None:
    drafter = CopyDrafter(target_of("llama"), PromptLookup())
    controller = Noting(3)
    draft, tokens = drafted_by(drafter, text_of(1, 2, 3, 1), controller, 9)
    assert (tokens, draft.probabilities, draft.looked_up, draft.steered) == ([2, 3, 1], None, True, True)
    assert controller.seen == [(1.0, 0.0)] * 3


@pytest.mark.parametrize(
    ("decisions", "num_drafted"),
    [
        ([Decision.STOP], 0),
        ([Decision.LAST], 1),
        ([Decision.CONTINUE, Decision.STOP], 1),
        ([Decision.CONTINUE, Decision.LAST], 2),
        ([], 4),
    ],
)
def test_rule_ends_a_copy_where_it_wants(decisions: list[Decision], num_drafted: int) -> None:
    drafter = CopyDrafter(target_of("llama"), PromptLookup())
    draft, _ = drafted_by(drafter, text_of(1, 2, 3, 1), Noting(4, decisions), 9)
    assert (draft.num_tokens, draft.steered) == (num_drafted, True)


@pytest.mark.parametrize(("tokens", "limit"), [((1, 2, 3), 9), ((1, 2, 1), 0)], ids=["no match", "no room"])
def test_rule_is_not_asked_where_nothing_can_be_copied(tokens: tuple[int, ...], limit: int) -> None:
    drafter = CopyDrafter(target_of("llama"), PromptLookup())
    controller = Noting()
    draft, _ = drafted_by(drafter, text_of(*tokens), controller, limit)
    assert (draft.num_tokens, draft.steered, controller.num_limits) == (0, False, 0)


def test_rule_learns_of_the_copies_that_it_steers() -> None:
    target, controller = target_of("llama"), Noting()
    drafter = build_drafter(target, PromptLookup(min_ngram=2))
    generation = write(target, drafter, controller, request_for("llama", 64))
    copies = [step for step in generation.rounds if step.looked_up]
    assert 2 < len(copies) < len(generation.rounds)
    assert controller.observed == [(step.num_drafted, step.num_accepted) for step in copies]
    assert generation.num_looked_up == generation.num_drafted


def test_rule_is_neither_asked_nor_told_of_copies_before_its_draft() -> None:
    target, controller = target_of("llama"), Noting()
    drafter = build_drafter(target, LayerSkip.blocks((4,)).model_copy(update={"lookup": LOOKUP}))
    generation = write(target, drafter, controller, request_for("llama", 64))
    copies = [step for step in generation.rounds if step.looked_up]
    steered = [step for step in generation.rounds if not step.looked_up]
    assert len(copies) > 2
    assert len(steered) > 2
    assert controller.num_limits == len(steered)
    assert controller.observed == [(step.num_drafted, step.num_accepted) for step in steered]
    assert len(controller.seen) == sum(step.num_drafted for step in steered)
    assert {step.num_drafted for step in copies[:-2]} == {LOOKUP.max_tokens}
    assert 0 < generation.num_looked_up < generation.num_drafted


def test_rule_steers_the_fallback_of_a_lookup() -> None:
    target = target_of("llama")
    alone = CopyDrafter(target, PromptLookup())
    fallback = LayerSkipDrafter(target, LayerSkip.blocks((4,)))
    assert steered_part(alone) is alone
    assert steered_part(LookupFirst(fallback, LOOKUP)) is steered_part(fallback) is fallback


# --- the text is the plain text -----------------------------------------------------------------------------------------

DRAFTS: dict[str, Draft] = {
    "lookup": PromptLookup(),
    "pairs": PromptLookup(max_ngram=2, min_ngram=2),
    "lookup, then skip": LayerSkip(skip_attention=(2, 3), skip_mlp=(3,), lookup=LOOKUP),
    "lookup, then exit": EarlyExit(exit_layer=3, lookup=LOOKUP),
    "suffix automaton": SuffixDraft(),
    "suffix automaton, then skip": LayerSkip(skip_attention=(2, 3), skip_mlp=(3,), lookup=SUFFIXES),
}


def _every_other_rule(family: str, prefix_reuse: bool) -> list[tuple[str, DraftLengthRule]]:
    """Return half of the rules, so that both families and both settings of prefix reuse meet them all between them."""
    return list(RULES.items())[(family == "llama") == prefix_reuse :: 2]


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_text_that_repeats_itself_is_the_plain_text(family: str, draft: str, prefix_reuse: bool) -> None:
    """Every draft meets every rule with each family, and with and without prefix reuse."""
    target = target_of(family)
    drafter = build_drafter(target, DRAFTS[draft], Decoding(prefix_reuse=prefix_reuse))
    for name, rule in _every_other_rule(family, prefix_reuse):
        generation = write(target, drafter, rule.controller(), request_for(family))
        assert generation.tokens == plain_text(family), name
        copies = [step for step in generation.rounds if step.looked_up]
        assert sum(step.num_accepted for step in copies) > 2, name
        assert any(step.num_accepted < step.num_drafted for step in generation.rounds), name


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_lookup_before_a_head_is_lossless(family: str, prefix_reuse: bool) -> None:
    target = target_of(family)
    fallback = EarlyExitDrafter(target, 2, untrained_head(target), prefix_reuse=prefix_reuse)
    rules = _every_other_rule(family, prefix_reuse)
    controllers = [*((name, rule.controller()) for name, rule in rules), ("any length", AnyLength(1))]
    for name, controller in controllers:
        generation = write(target, LookupFirst(fallback, LOOKUP), controller, request_for(family))
        assert generation.tokens == plain_text(family), name
        assert sum(step.num_accepted for step in generation.rounds if step.looked_up) > 2, name


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_head_has_seen_every_position_after_rounds_that_were_looked_up(family: str, prefix_reuse: bool) -> None:
    """The last block as head of the last exit equals the whole model only if it has seen every position."""
    target = target_of(family)
    fallback = EarlyExitDrafter(target, NUM_LAYERS - 1, new_exit_head(target), prefix_reuse=prefix_reuse)
    lookup = Lookup(min_ngram=1, max_ngram=2, max_tokens=3)
    copies, drafts = 0, 0
    for seed in range(3):
        request = Request(some_tokens(9, seed), Ending(40))
        for step in write(target, LookupFirst(fallback, lookup), AnyLength(seed), request).rounds:
            copies += step.looked_up
            if not step.looked_up:
                drafts += step.num_drafted
                assert step.num_accepted == step.num_drafted
    assert copies > 10
    assert drafts > 10


def test_head_from_its_folder_may_follow_a_lookup(tmp_path: Path) -> None:
    target = target_of("llama")
    draft = write_heads(target, tmp_path, [3])[3].model_copy(update={"lookup": LOOKUP})
    decoder = Decoder(target, draft, Fixed(max_tokens=3), heads=HeadFolder(target, tmp_path))
    generation = decoder.generate(request_for("llama"))
    assert generation.tokens == plain_text("llama")
    assert 0 < generation.num_looked_up < generation.num_drafted


@pytest.mark.parametrize("draft", DRAFTS)
def test_end_token_ends_the_text_within_a_copy(draft: str) -> None:
    target, prompt = target_of("llama"), repetitive_prompt("llama")
    drafter = build_drafter(target, DRAFTS[draft])
    cut = 0
    for end_token in set(plain_text("llama")):
        request = Request(prompt, Ending(NUM_NEW_TOKENS, frozenset({end_token})))
        generation = write(target, drafter, Controller(5), request)
        assert generation.tokens == write_plainly(target, request).tokens
        *_, last = [generation.prefill, *generation.rounds]
        cut += isinstance(last, Round) and last.looked_up and len(last.tokens) <= last.num_accepted
    assert cut > 0


@pytest.mark.parametrize("num_new", [1, 2, 3, 5])
def test_copy_longer_than_the_text_may_become_ends_with_it(num_new: int) -> None:
    target, prompt = target_of("llama"), repetitive_prompt("llama")
    long = Lookup(min_ngram=1, max_tokens=64)
    for draft in (PromptLookup(), LayerSkip(skip_mlp=(2,), lookup=long), EarlyExit(exit_layer=2, lookup=long)):
        request = Request(prompt, Ending(num_new))
        generation = write(target, build_drafter(target, draft), Controller(2), request)
        assert generation.tokens == plain_text("llama")[:num_new]


@pytest.mark.parametrize("prompt", [[7], [7, 7], [7, 7, 7], some_tokens(2)], ids=len)
def test_prompt_shorter_than_the_ngrams_is_continued(prompt: list[int]) -> None:
    target = target_of("llama")
    request = Request(prompt, Ending(NUM_NEW_TOKENS))
    drafter = build_drafter(target, PromptLookup(max_ngram=5, min_ngram=1))
    generation = write(target, drafter, Controller(4), request)
    assert generation.tokens == write_plainly(target, request).tokens
    assert generation.num_looked_up > 0


def test_one_drafter_serves_texts_in_turns() -> None:
    target = target_of("gemma3")
    drafter = build_drafter(target, DRAFTS["lookup, then exit"])
    assert drafter is not None
    requests = [request_for("gemma3"), Request(some_tokens(9), Ending(NUM_NEW_TOKENS))]
    running = [speculative(target, drafter, Controller(3), request) for request in requests]
    steps: list[list[Any]] = [[], []]
    for _ in range(NUM_NEW_TOKENS):
        for text, own in zip(running, steps, strict=True):
            own += [step for step in [next(text, None)] if step is not None]
    for request, own in zip(requests, steps, strict=True):
        assert Generation.collect(own).tokens == write_plainly(target, request).tokens


def test_seeded_samples_with_a_lookup_are_the_same_at_every_run() -> None:
    target = target_of("llama")
    drafter = build_drafter(target, DRAFTS["lookup, then skip"])

    def text() -> Generation:
        sampling = Sampling(torch.Generator().manual_seed(3))
        request = Request(repetitive_prompt("llama"), Ending(NUM_NEW_TOKENS), sampling)
        return write(target, drafter, Controller(3), request)

    assert text().tokens == text().tokens
    assert text().num_looked_up > 0
