"""Prompt lookup and suffix automaton: what is copied, the rule that is asked, and where copies end."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import Controller, Decision, DraftDistribution, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.prompt_lookup import CopyDrafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft, SuffixLookup
from decoding.drafts.copies import NgramCopies, copied
from decoding.profile import Decoding
from decoding.rounds import Generation, Round
from decoding.runners.contract import Outputs
from decoding.target import DraftView, Target
from decoding.text import Ending, TokenSequence
from tests.support.families import some_tokens, target_of
from tests.support.generations import check_facts, write_plainly
from tests.support.grid import RULES

CPU = torch.device("cpu")
NUM_NEW_TOKENS = 32
LOOKUP = Lookup(min_ngram=2, max_tokens=5)
CHECKED = Lookup(max_ngram=4, min_ngram=1, direct_from=4, max_tokens=5)
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


def test_longest_ngram_counts_and_of_those_the_latest() -> None:
    cases: list[tuple[tuple[int, ...], int, int, int | None]] = [
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 3, 1, 3),  # three tokens that match, before the later match of two
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 2, 1, 8),
        ((1, 2, 3, 8, 3, 9, 2, 3, 7, 1, 2, 3), 1, 1, 8),
        ((4, 3, 8, 3, 9, 2, 3), 3, 1, 4),  # no more than one matches: the latest of those
        ((4, 3, 8, 3, 9, 2, 3), 3, 2, None),
        ((5,), 3, 1, None),
        ((5, 5), 3, 1, 1),
    ]
    for tokens, most, fewest, position in cases:
        assert NgramCopies(tokens, max_ngram=most, min_ngram=fewest).find() == position


def test_copy_that_reaches_the_end_goes_round_the_loop() -> None:
    cases: list[tuple[tuple[int, ...], int, list[int]]] = [
        ((1, 2, 3, 4, 1), 1, [2, 3, 4, 1, 2, 3, 4]),
        ((1, 2, 1), 1, [2, 1, 2, 1, 2, 1, 2]),
        ((9, 7, 7), 2, [7] * 7),
    ]
    for tokens, position, expected in cases:
        assert copied(tokens, position, 7) == expected
        assert copied(tokens, position, 2) == expected[:2]


def drafted_by(drafter: Drafter, text: TokenSequence, controller: Controller, limit: int) -> tuple[Proposal, list[int]]:
    cache = target_of("llama").new_cache(text.length + limit + 1)
    cache.length = text.length - 1
    draft = drafter.draft(text, cache, controller, Request([0], Ending(9)), limit)
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


def test_rule_ends_a_copy_where_it_wants() -> None:
    cases: list[tuple[list[Decision], int]] = [
        ([Decision.STOP], 0),
        ([Decision.LAST], 1),
        ([Decision.CONTINUE, Decision.STOP], 1),
        ([Decision.CONTINUE, Decision.LAST], 2),
        ([], 4),
    ]
    for decisions, num_drafted in cases:
        drafter = CopyDrafter(target_of("llama"), PromptLookup())
        draft, _ = drafted_by(drafter, text_of(1, 2, 3, 1), Noting(4, decisions), 9)
        assert (draft.num_tokens, draft.steered) == (num_drafted, True)


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


# --- the text is the plain text -----------------------------------------------------------------------------------------

DRAFTS: dict[str, Draft] = {
    "lookup": PromptLookup(),
    "lookup, then skip": LayerSkip(skip_attention=(2, 3), skip_mlp=(3,), lookup=LOOKUP),
    "lookup, then exit": EarlyExit(exit_layer=3, lookup=LOOKUP),
    "lookup, skip checks copies": LayerSkip(skip_attention=(2, 3), skip_mlp=(3,), lookup=CHECKED),
    "lookup, exit checks copies": EarlyExit(exit_layer=3, lookup=CHECKED),
    "suffix automaton": SuffixDraft(),
    "suffix automaton, then skip": LayerSkip(skip_attention=(2, 3), skip_mlp=(3,), lookup=SUFFIXES),
}


@pytest.mark.parametrize(
    ("family", "draft"), [(("llama", "gemma3")[number % 2], draft) for number, draft in enumerate(DRAFTS)]
)
def test_text_that_repeats_itself_is_the_plain_text(family: str, draft: str) -> None:
    target = target_of(family)
    for prefix_reuse, rule in ((True, "fixed 8"), (False, "AdaEDL, last dropped")):
        drafter = build_drafter(target, DRAFTS[draft], Decoding(prefix_reuse=prefix_reuse))
        generation = write(target, drafter, RULES[rule].controller(), request_for(family))
        assert generation.tokens == plain_text(family), rule
        assert sum(step.num_accepted for step in generation.rounds if step.looked_up) > 2, rule
        assert any(step.num_accepted < step.num_drafted for step in generation.rounds), rule


def test_a_draft_checks_copies_after_short_ngrams_in_wide_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    target, check, widths = target_of("llama"), DraftView.check, list[int]()

    def noted(view: DraftView, token_ids: torch.Tensor, cache: KVCache, start: int) -> Outputs:
        widths.append(token_ids.shape[1])
        return check(view, token_ids, cache, start)

    monkeypatch.setattr(DraftView, "check", noted)
    draft = LayerSkip(skip_attention=(3,), lookup=CHECKED)
    generation = write(target, build_drafter(target, draft), Controller(4), request_for("llama"))
    drafted = sum(step.num_drafted for step in generation.rounds if not step.looked_up)
    assert generation.tokens == plain_text("llama")
    assert len(widths) < drafted <= sum(widths), "a pass that checks a copy writes several drafts"
    assert max(widths) == 4
    widths.clear()
    of_batch = Decoder(target, draft, Fixed(max_tokens=4)).generate_batch([request_for("llama")] * 2)
    assert [each.tokens for each in of_batch.generations] == [plain_text("llama")] * 2
    assert not widths, "sequences in lockstep share passes of one position"


def test_copies_that_a_draft_checks_follow_the_drafts_before_them() -> None:
    copies = NgramCopies([1, 2, 3, 4, 5, 1, 2], max_ngram=3, min_ngram=1, direct_from=3)
    assert copies.copy(3) is None, "one and two tokens are too few to be verified at once"
    assert copies.copy_after((), 3) == [3, 4, 5]
    assert copies.copy_after((3,), 2) == [4, 5]
    assert copies.copy_after((5,), 4) == [1, 2, 5, 1]
    assert copies.copy_after((9,), 2) is None
    assert NgramCopies([1, 2, 3, 4, 1, 2, 3], max_ngram=3, min_ngram=1, direct_from=3).copy(1) == [4]


@pytest.mark.parametrize("direct_from", [2, 5])
def test_direct_copies_are_after_longer_ngrams(direct_from: int) -> None:
    with pytest.raises(ValidationError, match=f"direct_from must be above min_ngram .* got {direct_from}"):
        Lookup(max_ngram=4, min_ngram=2, direct_from=direct_from)
    assert Lookup(max_ngram=4, min_ngram=2, direct_from=3).ngram_lengths == (4, 3), "what an engine copies"


def test_end_token_ends_the_text_within_a_copy() -> None:
    draft = "lookup, then skip"
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
