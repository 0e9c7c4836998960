"""A reduced draft vocabulary: drafts keep to it, tokens keep their ids, and the output stays the target's."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import LayerSkip
from decoding.rounds import Generation
from decoding.runners.eager import EagerRunner
from decoding.runners.features import SpeedFeatures
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner
from decoding.target import DraftView, Target, agree
from decoding.target.heads import new_exit_head
from decoding.target.lm_heads import LEFT_OUT, DraftVocabulary
from decoding.text import Ending, TokenSequence
from tests.support.families import NUM_LAYERS, SUPPORTED, VOCABULARY, build, some_tokens, target_of
from tests.support.generations import write, write_plainly
from tests.support.grid import RULES, SKIPS
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
EVERY_THIRD = tuple(range(0, VOCABULARY, 3))
COUNTS = tuple(int(token in EVERY_THIRD) for token in range(VOCABULARY))
RUNNERS: dict[str, Callable[..., EagerRunner]] = {
    "eager": EagerRunner,
    "static": functools.partial(StaticRunner, compiled=False),
}


def reduced(runner: str, size: int, counts: tuple[int, ...] | None) -> Callable[[MaskKinds, torch.device], EagerRunner]:
    return functools.partial(RUNNERS[runner], features=SpeedFeatures(draft_vocabulary=size, token_counts=counts))


@functools.cache
def of_every_third(family: str, runner: str = "static") -> Target:
    return Target(build(family), reduced(runner, len(EVERY_THIRD), COUNTS))


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
    target, whole = of_every_third("llama", runner), Target(build("llama"))
    found, expected = (_drafted_logits(each) for each in (target, whole))
    chosen = torch.tensor(EVERY_THIRD)
    assert found.shape == expected.shape
    assert agree(found[:, chosen], expected[:, chosen])
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, chosen, False)
    assert (found[:, others] == LEFT_OUT).all()
    assert found.softmax(dim=-1)[:, others].sum() == 0
    assert int(found.argmax()) == int(chosen[expected[0, chosen].argmax()])


def _drafted_logits(target: Target) -> Tensor:
    cache, token_ids = target.new_cache(20), torch.tensor([REQUEST.prompt])
    target.forward(token_ids[:, :-1], cache, 0)
    view = DraftView(target, (1,), (2,), keep_boundary=False)
    return view.forward(token_ids[:, -1:], cache, token_ids.shape[1] - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family with both drafts, each with one of two rules in turn: a rule does not see which tokens may be drafted."""
    rules: list[DraftLengthRule] = [Fixed(max_tokens=3), AdaEdl(max_tokens=4, initial_threshold=0.5)]
    rule, other = rules[:: 1 if FAMILIES.index(family) % 2 else -1]
    target = of_every_third(family)
    expected = plain_tokens(family)
    drafted = _watch_drafts(monkeypatch)
    assert write(target, SKIPS["mixed"], rule, REQUEST).tokens == expected
    drafter = EarlyExitDrafter(target, NUM_LAYERS - 2, new_exit_head(target))
    assert Generation.collect(speculative(target, drafter, other.controller(), REQUEST)).tokens == expected
    assert drafted, "something was drafted"
    assert drafted <= set(EVERY_THIRD)
    assert not set(expected) <= set(EVERY_THIRD), "the target writes other tokens too"


@functools.cache
def plain_tokens(family: str) -> tuple[int, ...]:
    return write_plainly(target_of(family), REQUEST).tokens


def _watch_drafts(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    drafted: set[int] = set()
    genuine = TokenSequence.write_draft

    def watched(sequence: TokenSequence, index: int, token_ids: Tensor) -> None:
        drafted.update(token_ids.tolist())
        genuine(sequence, index, token_ids)

    monkeypatch.setattr(TokenSequence, "write_draft", watched)
    return drafted


def test_sampled_text_is_distributed_as_the_model() -> None:
    processors = "temperature, penalty and top-k"
    target = Target(sampling_target().model, reduced("eager", 3, (0, 2, 0, 1, 0, 0, 3, 0)))
    drafter = build_drafter(target, LayerSkip(skip_attention=(0, 1)))
    assert drafter is not None
    request = request_for(processors, Sampling(torch.Generator().manual_seed(7)))
    controller = Fixed(max_tokens=3).controller()
    counts = Counter(first_tokens(speculative(target, drafter, controller, request)) for _ in range(NUM_SEQUENCES))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


def test_verification_and_the_model_keep_the_whole_vocabulary() -> None:
    target = of_every_third("llama")
    token_ids = torch.tensor([REQUEST.prompt])
    with torch.inference_mode():
        assert (target.forward(token_ids, target.new_cache(20), 0) != LEFT_OUT).all()
        assert (target.model(token_ids).logits != LEFT_OUT).all()
    assert write(target, SKIPS["mixed"], RULES["fixed 3"], REQUEST).num_drafted > 0


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
    views = [
        DraftView(target, (), (index,), keep_boundary=False, vocabulary=DraftVocabulary(EVERY_THIRD))
        for index in (1, 2)
    ]
    assert made
    assert all(weight() is not None for weight in made[:1])
    views.clear()
    gc.collect()
    assert [weight() for weight in made] == [None] * len(made)
