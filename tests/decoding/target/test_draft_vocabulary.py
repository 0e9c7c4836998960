"""A reduced draft vocabulary: drafts keep to it and to the text, tokens keep their ids, and the output stays the target's."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip, Lookup
from decoding.errors import UnsupportedModelError
from decoding.rounds import Generation
from decoding.runners.eager import EagerRunner
from decoding.runners.static import StaticRunner
from decoding.target import DraftView, Target, agree, lm_heads
from decoding.target.heads import new_exit_head
from decoding.target.lm_heads import LEFT_OUT, DraftVocabulary
from decoding.text import Ending, TokenSequence
from tests.support.families import NUM_LAYERS, SUPPORTED, VOCABULARY, build, some_tokens, target_of
from tests.support.generations import write_plainly
from tests.support.grid import SKIPS
from tests.support.sampled import (
    ALPHA,
    NUM_SEQUENCES,
    exact_distribution,
    first_tokens,
    p_value,
    request_for,
    sampling_target,
)

REQUEST = Request(some_tokens(9), Ending(16))
FAMILIES = [family for family in SUPPORTED if family != "bloom"]
EVERY_THIRD = DraftVocabulary(tuple(range(0, VOCABULARY, 3)))
RUNNERS: dict[str, Callable[..., EagerRunner]] = {
    "eager": EagerRunner,
    "static": functools.partial(StaticRunner, compiled=False),
}


@functools.cache
def target_by(runner: str, family: str = "llama") -> Target:
    return Target(build(family), RUNNERS[runner])


@pytest.mark.parametrize(
    ("size", "counts", "expected"),
    [(3, None, (0, 1, 2)), (2, (1, 5, 5, 9), (1, 3))],
)
def test_tokens_rank_by_count_and_then_by_id(
    size: int, counts: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    found = DraftVocabulary.of_most_frequent(size, 5, counts)
    assert found is not None
    assert found.token_ids == expected


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_chosen_tokens_keep_their_ids_and_logits(runner: str) -> None:
    found, expected = (_drafted_logits(target_by(runner), each) for each in (EVERY_THIRD, None))
    chosen = torch.tensor(EVERY_THIRD.token_ids)
    assert found.shape == expected.shape
    assert agree(found[:, chosen], expected[:, chosen])
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, chosen, False)
    assert (found[:, others] == LEFT_OUT).all()
    assert found.softmax(dim=-1)[:, others].sum() == 0
    assert int(found.argmax()) == int(chosen[expected[0, chosen].argmax()])


def _drafted_logits(target: Target, vocabulary: DraftVocabulary | None) -> Tensor:
    cache, token_ids = target.new_cache(20), torch.tensor([REQUEST.prompt])
    target.forward(token_ids[:, :-1], cache, 0)
    view = DraftView(target, (1,), (2,), keep_boundary=False, vocabulary=vocabulary)
    return view.run(token_ids[:, -1:], cache, token_ids.shape[1] - 1).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family with both drafts, each with one of two rules in turn: a rule does not see which tokens may be drafted."""
    rules: list[DraftLengthRule] = [Fixed(max_tokens=3), AdaEdl(max_tokens=4, initial_threshold=0.5)]
    rule, other = rules[:: 1 if FAMILIES.index(family) % 2 else -1]
    target = target_by("static", family)
    expected = plain_tokens(family)
    skips = LayerSkipDrafter(target, SKIPS["mixed"], vocabulary=EVERY_THIRD)
    exits = EarlyExitDrafter(target, NUM_LAYERS - 2, new_exit_head(target, EVERY_THIRD))
    drafted = _watch_drafts(monkeypatch, skips, exits)
    for drafter, each in ((skips, rule), (exits, other)):
        assert Generation.collect(speculative(target, drafter, each.controller(), REQUEST)).tokens == expected
    assert drafted, "something was drafted"
    assert drafted <= set(EVERY_THIRD.token_ids)
    assert not set(expected) <= set(EVERY_THIRD.token_ids), "the target writes other tokens too"


@functools.cache
def plain_tokens(family: str) -> tuple[int, ...]:
    return write_plainly(target_of(family), REQUEST).tokens


def _watch_drafts(monkeypatch: pytest.MonkeyPatch, *drafters: Drafter) -> set[int]:
    drafted: set[int] = set()
    for drafter in drafters:
        genuine = drafter.draft

        def watched(sequence: TokenSequence, *args: Any, genuine: Any = genuine) -> Proposal:
            draft: Proposal = genuine(sequence, *args)
            drafted.update(sequence.written(sequence.length, sequence.length + draft.num_tokens)[0].tolist())
            return draft

        monkeypatch.setattr(drafter, "draft", watched)
    return drafted


def test_sampled_text_is_distributed_as_the_model() -> None:
    processors = "temperature, penalty and top-k"
    target = Target(sampling_target().model)
    skip, vocabulary = LayerSkip(skip_attention=(0, 1)), DraftVocabulary((1, 3, 6))
    of_text = LayerSkip(skip_attention=(0, 1), bits=8, ids_below=2)
    for drafter in (LayerSkipDrafter(target, skip, vocabulary=vocabulary), LayerSkipDrafter(target, of_text)):
        _check_distribution(drafter, processors)


def _check_distribution(drafter: LayerSkipDrafter, processors: str) -> None:
    target = drafter._target
    request = request_for(processors, Sampling(torch.Generator().manual_seed(7)))
    controller = Fixed(max_tokens=3).controller()
    counts = Counter(first_tokens(speculative(target, drafter, controller, request)) for _ in range(NUM_SEQUENCES))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


BELOW = 20
FROM_TEXT = LayerSkip(bits=8, ids_below=BELOW)


def drafted_from(target: Target, prompt: Sequence[int], drafter: LayerSkipDrafter) -> Tensor:
    """Return the draft's logits [1, vocabulary] after the prompt."""
    cache, sequence = target.new_cache(40), TokenSequence(prompt, 40, target.device)
    drafter.prefill(sequence, cache)
    cache.length = sequence.length - 1
    view = drafter._view
    view.follow(sequence, sequence.batch, sequence.token_ids)
    return view.run(sequence.span(cache.length, sequence.length), cache, cache.length).logits


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_a_quantised_draft_chooses_from_frequent_tokens_and_those_of_the_text(runner: str) -> None:
    """With the logits that it gives them anyway; a text that follows another one finds none of its tokens."""
    target, others = target_by(runner), [token for token in range(40, 60) if token not in REQUEST.prompt]
    drafter, whole = (LayerSkipDrafter(target, each) for each in (FROM_TEXT, LayerSkip(bits=8)))
    for prompt in (REQUEST.prompt, others, REQUEST.prompt):
        found, expected = (drafted_from(target, prompt, each) for each in (drafter, whole))
        chosen = sorted({*range(BELOW), *prompt})
        left_out = sorted({*range(VOCABULARY)} - {*chosen})
        assert torch.equal(found[:, chosen], expected[:, chosen])
        assert (found[:, left_out] == LEFT_OUT).all()
        assert found.shape == expected.shape


@torch.inference_mode()
def test_ids_below_more_than_there_are_leave_nothing_out() -> None:
    target = target_by("eager")
    drafters = [LayerSkipDrafter(target, LayerSkip(bits=8, ids_below=below)) for below in (VOCABULARY, None)]
    all_ids, plain = (drafted_from(target, REQUEST.prompt, each) for each in drafters)
    assert torch.equal(all_ids, plain)


@torch.inference_mode()
def test_the_latest_tokens_of_a_text_with_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_heads, "TEXT_SLOTS", 3)
    target = target_by("eager")
    drafter, whole = (LayerSkipDrafter(target, each) for each in (FROM_TEXT, LayerSkip(bits=8)))
    prompt, cache = [30, 31, 32, 5, 33], target.new_cache(40)
    sequence = TokenSequence(prompt, 40, target.device)
    drafter.prefill(sequence, cache)
    for added, held in (([], {31, 32, 33}), ([40, 32], {32, 33, 40}), ([41, 42], {40, 41, 42})):
        sequence.append(added)
        drafter._view.follow(sequence, sequence.batch, sequence.token_ids)
        logits = drafter._view.run(sequence.span(0, 1), target.new_cache(40), 0).logits
        assert {*(logits[0] > LEFT_OUT).nonzero()[:, 0].tolist()} == {*range(BELOW), *held}
        expected = whole._view.run(sequence.span(0, 1), target.new_cache(40), 0).logits
        assert torch.equal(logits[:, sorted(held)], expected[:, sorted(held)])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "rule", [Fixed(max_tokens=3), AdaEdl(max_tokens=4, initial_threshold=0.5)], ids=["fixed", "AdaEDL"]
)
def test_text_is_the_targets_when_drafts_follow_it(runner: str, rule: DraftLengthRule) -> None:
    """One by one, and side by side, where sequences share the places for tokens of their texts."""
    target, prompts = target_by(runner), [some_tokens(length, seed) for seed, length in enumerate((9, 5, 14))]
    requests = [Request(prompt, Ending(24)) for prompt in prompts]
    expected = [write_plainly(target, request).tokens for request in requests]
    draft = FROM_TEXT.having(lookup=Lookup(min_ngram=1, direct_from=3, max_tokens=4))
    for each in (FROM_TEXT, draft):
        decoder = Decoder(target, each, rule)
        alone = [decoder.generate(request) for request in requests]
        assert [generation.tokens for generation in alone] == expected
        batch = decoder.generate_batch(requests).generations
        assert [generation.tokens for generation in batch] == expected
        again = [decoder.generate(request) for request in reversed(requests)]
        assert [len(generation.rounds) for generation in reversed(again)] == [
            len(generation.rounds) for generation in alone
        ]


def test_lm_head_of_another_class_is_refused_in_one_line() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = build("llama")
    model.lm_head.__class__ = OwnLinear
    with pytest.raises(UnsupportedModelError, match="need a model whose LM head is a plain linear layer"):
        _drafted_logits(Target(model), EVERY_THIRD)


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_are_shared_by_views_and_gone_with_the_last_one(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    genuine = DraftVocabulary.rows_of

    def watched(vocabulary: DraftVocabulary, lm_head: nn.Linear) -> nn.Linear:
        rows = genuine(vocabulary, lm_head)
        made.append(weakref.ref(rows.weight))
        return rows

    monkeypatch.setattr(DraftVocabulary, "rows_of", watched)
    target = Target(build("llama"), RUNNERS[runner])
    made.clear()
    views = [DraftView(target, (), (index,), keep_boundary=False, vocabulary=EVERY_THIRD) for index in (1, 2)]
    assert made
    assert all(weight() is not None for weight in made[:1])
    views.clear()
    gc.collect()
    assert [weight() for weight in made] == [None] * len(made)
