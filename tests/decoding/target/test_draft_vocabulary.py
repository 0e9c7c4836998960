"""A reduced draft vocabulary: drafts keep to it and to the text, tokens keep their ids, and the output stays the target's."""

from __future__ import annotations

import functools
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
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip, Lookup
from decoding.errors import UnsupportedModelError
from decoding.rounds import Generation
from decoding.runners.eager import EagerRunner
from decoding.runners.static import StaticRunner
from decoding.target import Target, lm_heads
from decoding.target.lm_heads import LEFT_OUT
from decoding.text import Ending, TokenSequence
from tests.support.families import SUPPORTED, VOCABULARY, build, some_tokens, target_of
from tests.support.generations import write_plainly
from tests.support.grid import SKIPS, WITHOUT_LINEARS
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
BELOW = 20
FROM_TEXT = LayerSkip(bits=8, ids_below=BELOW)
FAMILIES = [family for family in SUPPORTED if family != "bloom" and family not in WITHOUT_LINEARS]
RUNNERS: dict[str, Callable[..., EagerRunner]] = {
    "eager": EagerRunner,
    "static": functools.partial(StaticRunner, compiled=False),
}


@functools.cache
def target_by(runner: str, family: str = "llama") -> Target:
    return Target(build(family), RUNNERS[runner])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family with one of two rules in turn: a rule does not see which tokens may be drafted."""
    rules: list[DraftLengthRule] = [Fixed(max_tokens=3), AdaEdl(max_tokens=4, initial_threshold=0.5)]
    rule, target = rules[FAMILIES.index(family) % 2], target_by("static", family)
    expected = write_plainly(target_of(family), REQUEST).tokens
    drafter = LayerSkipDrafter(target, SKIPS["mixed"].having(bits=8, ids_below=BELOW))
    drafted = _watch_drafts(monkeypatch, drafter)
    assert Generation.collect(speculative(target, drafter, rule.controller(), REQUEST)).tokens == expected
    assert drafted, "something was drafted"
    assert drafted <= {*range(BELOW), *REQUEST.prompt, *expected}
    assert not {*expected} <= {*range(BELOW), *REQUEST.prompt}, "the target writes other tokens too"


def _watch_drafts(monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> set[int]:
    drafted, genuine = set[int](), drafter.draft

    def watched(sequence: TokenSequence, *args: Any) -> Proposal:
        draft: Proposal = genuine(sequence, *args)
        drafted.update(sequence.written(sequence.length, sequence.length + draft.num_tokens)[0].tolist())
        return draft

    monkeypatch.setattr(drafter, "draft", watched)
    return drafted


def test_sampled_text_is_distributed_as_the_model() -> None:
    processors = "temperature, penalty and top-k"
    target = Target(sampling_target().model)
    drafter = LayerSkipDrafter(target, LayerSkip(skip_attention=(0, 1), bits=8, ids_below=2))
    request = request_for(processors, Sampling(torch.Generator().manual_seed(7)))
    controller = Fixed(max_tokens=3).controller()
    counts = Counter(first_tokens(speculative(target, drafter, controller, request)) for _ in range(NUM_SEQUENCES))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


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
        LayerSkipDrafter(Target(model), FROM_TEXT)
