"""Side leaves in predictions: replayed rounds are those of decoding, and a search proposes trees only where they pay."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafts import CandidateTree, Draft, EarlyExit, FixedLeaves, LayerSkip, PublishedLeaves, SizedLeaves
from decoding.profile import Decoding
from decoding.text import Ending
from studies.prediction.pools import with_trees
from studies.prediction.predictor import Predictor
from studies.prediction.replay import NO_LEAF, Recording, TargetText, TreeReplay, replay
from studies.prediction.survey import Survey
from tests.support.families import some_tokens, target_of
from tests.support.generations import write_plainly

COSTS = RoundCosts(draft_step=0.3, look=0.01, verify=(1.0, 1.1, 1.2, 1.3))
NUM_NEW_TOKENS = 40


class FlatCosts:
    """Costs that depend on the number of verified positions only."""

    def __init__(self, price: float) -> None:
        self._price = price

    def round_costs(self, draft: Draft, max_tokens: int, *, context: float, prefix_reuse: bool) -> RoundCosts:
        verify = tuple(1.0 + self._price * number for number in range(max_tokens + 1))
        return RoundCosts(draft_step=0.3, verify=verify)


@functools.cache
def requests() -> tuple[Request, ...]:
    return tuple(Request(some_tokens(9, seed), Ending(NUM_NEW_TOKENS)) for seed in range(2))


@functools.cache
def survey() -> Survey:
    target = target_of("llama")
    texts = [write_plainly(target, request).tokens for request in requests()]
    return Survey(target, [request.prompt for request in requests()], texts)


@pytest.mark.parametrize(
    ("draft", "rule", "tree"),
    [
        (EarlyExit(exit_layer=3), Fixed(max_tokens=3), FixedLeaves(leaves=2)),
        (LayerSkip.blocks((3,)), Fixed(max_tokens=2), SizedLeaves(least_gain=0.03, max_leaves=4)),
        (EarlyExit(exit_layer=3), TopProbability(max_tokens=4, threshold=0.3), PublishedLeaves()),
    ],
)
def test_replayed_rounds_are_those_of_decoding(draft: Draft, rule: DraftLengthRule, tree: CandidateTree) -> None:
    """Up to the end of a sequence, where replay and decoding draft a token more or less."""
    target = target_of("llama")
    recordings = survey().record(draft.having(tree=tree))
    chain = replay(rule, survey().record(draft), COSTS)
    replayed = replay(rule, recordings, COSTS, tree=TreeReplay(tree, True, COSTS))
    decoder = Decoder(target, draft.having(tree=tree), rule)
    rounds = [len(decoder.generate(request).rounds) for request in requests()]
    assert abs(replayed.rounds - sum(rounds)) <= len(rounds)
    assert replayed.rounds < chain.rounds, "leaves are accepted"


def recorded(matches: str, ranks: Sequence[int]) -> Recording:
    """Return a recording with candidates; where the draft is wrong, the target's token has this rank."""
    target, draft = torch.zeros(len(matches), 8), torch.arange(8.0, 0.0, -1.0).repeat(len(matches), 1)
    for position, (match, rank) in enumerate(zip(matches, ranks, strict=True)):
        target[position, 0 if match == "+" else rank] = 9.0
    return Recording.against(TargetText.of(target), draft, with_candidates=True)


def test_a_leaf_adds_a_token_and_costs_its_position() -> None:
    recording = recorded("+-+-+++", [0, 1, 0, 3, 0, 0, 0])
    assert [each.num_needed for each in recording.beside][1::2][:2] == [1, 3]
    tree = TreeReplay(FixedLeaves(leaves=2), True, RoundCosts(draft_step=1.0, verify=(1.0, 1.1)))
    replayed = replay(Fixed(max_tokens=2), [recording], COSTS, tree=tree)
    # Tokens 1 to 3 (one accepted, its neighbour's leaf, and one more), 4 (the leaf missed), 5 to 7.
    assert replayed.rounds == 3
    assert replayed.cost == pytest.approx(3 * (1.6 + 2 * 0.31))


def test_sampled_leaves_are_predicted_by_what_rejections_leave() -> None:
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    other = torch.randn(40, 12, generator=torch.Generator().manual_seed(2))
    decoding = Decoding(temperature=1.0)
    recording = Recording.against(TargetText.of(logits, decoding), other, decoding, with_candidates=True)
    needed = [each.num_needed for each in recording.beside]
    assert set(needed) <= set(range(1, NO_LEAF + 1))
    assert len(set(needed)) > 2


def test_trees_are_proposed_only_where_a_position_is_cheap() -> None:
    draft = EarlyExit(exit_layer=3)
    cheap, expensive = (Predictor(survey(), FlatCosts(price), max_tokens=4) for price in (0.01, 0.4))
    (chosen,) = with_trees(cheap, [draft])
    assert chosen.parts.tree is not None
    assert cheap.best(chosen).speedup > cheap.best(draft).speedup
    assert with_trees(expensive, [draft]) == []
