"""Random configurations: every kind has its share, none is impossible, and the same seed draws the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from decoding.draft_length import RULES
from decoding.drafters.build import build_drafter
from decoding.drafts import BitWidth, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.target import Target
from studies.prediction.skip_space import SkipSpace
from tests.support.tiny import tiny_target
from tuner.evaluation.random_candidates import (
    EXIT,
    EXIT_WITH_HEAD,
    FEATURE_HEAD,
    LEAVES,
    LOOKUP_ALONE,
    LOOKUP_FIRST,
    QUANTISED,
    SHARES,
    SKIP_SET,
    RandomCandidates,
    kind_of,
)

NUM_LAYERS = 8
HEAD = EarlyExit(exit_layer=3, head="exit_head_3.safetensors", head_sha256="0" * 64)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


def drawer(
    target: Target, *, heads: bool = True, rules: tuple[str, ...] = tuple(RULES), bits: tuple[BitWidth, ...] = ()
) -> RandomCandidates:
    return RandomCandidates(SkipSpace.of(target), NUM_LAYERS, {3: HEAD} if heads else {}, rules, 6, bits)


def test_each_kind_has_its_share_and_rules_take_turns(target: Target) -> None:
    num_drawn = 10 * len(RULES)
    drawn = drawer(target).draw(num_drawn, seed=0)
    assert len({candidate.key for candidate in drawn}) == num_drawn
    kinds = Counter(kind_of(candidate.draft) for candidate in drawn)
    on_request = {QUANTISED, FEATURE_HEAD, LEAVES}
    assert kinds == {kind: round(num_drawn * share) for kind, share in SHARES.items() if kind not in on_request}
    assert Counter(candidate.draft_length.rule for candidate in drawn) == dict.fromkeys(RULES, 10)
    assert all(candidate.draft_length.max_tokens <= 6 for candidate in drawn)
    first = [kind_of(candidate.draft) for candidate in drawn[:12]]
    assert any(one != other for one, other in pairwise(first)), "kinds are mixed, not grouped"


def test_leaves_are_drawn_beside_every_kind_where_asked_for(target: Target) -> None:
    given = replace(drawer(target, bits=(8,)), with_leaves=True)
    drawn = [candidate.draft for candidate in given.draw(120, seed=1)]
    leaves = [draft for draft in drawn if kind_of(draft) == LEAVES]
    assert len(leaves) == round(120 * 0.1 / sum(share for kind, share in SHARES.items() if kind != FEATURE_HEAD))
    chains = {kind_of(draft.having(tree=None)) for draft in leaves}
    assert {SKIP_SET, EXIT, EXIT_WITH_HEAD, QUANTISED} <= chains
    assert {draft.parts.tree.describe().split()[0] for draft in leaves if draft.parts.tree} > {"tree"}


def test_without_heads_the_other_kinds_share_theirs(target: Target) -> None:
    kinds = Counter(kind_of(candidate.draft) for candidate in drawer(target, heads=False).draw(16, seed=0))
    assert kinds == {SKIP_SET: 8, EXIT: 4, LOOKUP_FIRST: 2, LOOKUP_ALONE: 2}


def test_quantised_drafts_are_drawn_in_the_precisions_asked_for(target: Target) -> None:
    drafts = [candidate.draft for candidate in drawer(target, bits=(8, 4)).draw(120, seed=0)]
    quantised = [draft for draft in drafts if kind_of(draft) == QUANTISED]
    assert len(quantised) == 20, "a sixth: its weight among all"
    assert {draft.parts.bits for draft in quantised} == {8, 4}
    assert {draft.parts.lookup is None for draft in quantised} == {False, True}
    assert {type(draft) for draft in quantised} == {LayerSkip, EarlyExit}
    for draft in quantised:
        assert build_drafter(target, draft.model_copy(update={"head": None, "head_sha256": None})) is not None


def test_drafts_are_such_as_the_model_has_and_of_varied_sizes(target: Target) -> None:
    drafts = [candidate.draft for candidate in drawer(target, heads=False).draw(200, seed=1)]
    for draft in drafts:
        assert build_drafter(target, draft) is not None
    skips = [draft for draft in drafts if isinstance(draft, LayerSkip)]
    sizes = {len(draft.skip_attention) + len(draft.skip_mlp) for draft in skips}
    assert min(sizes) <= 2
    assert max(sizes) >= 9
    rows = [d.skip_attention for d in skips if d.skip_attention == d.skip_mlp and len(d.skip_attention) > 1]
    in_a_row = [row for row in rows if row == tuple(range(row[0], row[-1] + 1))]
    late = [row for row in in_a_row if row[-1] == NUM_LAYERS - 2]
    assert 0.3 * len(in_a_row) < len(late) < len(in_a_row)
    assert {draft.exit_layer for draft in drafts if isinstance(draft, EarlyExit)} == set(range(1, NUM_LAYERS))


def test_a_seed_draws_the_same_again(target: Target) -> None:
    keys = [[candidate.key for candidate in drawer(target).draw(20, seed)] for seed in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]


def test_fewer_are_drawn_where_there_are_no_more() -> None:
    small = tiny_target(2)
    drawn = RandomCandidates(SkipSpace.of(small), 2, {}, ("fixed",), 1).draw(200, seed=0)
    assert 20 < len(drawn) < 200
    assert len({candidate.key for candidate in drawn}) == len(drawn)


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        (LayerSkip.blocks((1,)), SKIP_SET),
        (EarlyExit(exit_layer=2), EXIT),
        (HEAD, EXIT_WITH_HEAD),
        (HEAD.model_copy(update={"lookup": Lookup()}), LOOKUP_FIRST),
        (LayerSkip(lookup=Lookup()), LOOKUP_FIRST),
        (PromptLookup(), LOOKUP_ALONE),
        (LayerSkip(bits=8), QUANTISED),
        (LayerSkip(bits=8, lookup=Lookup()), QUANTISED),
    ],
)
def test_kinds(draft: LayerSkip | EarlyExit | PromptLookup, kind: str) -> None:
    assert kind_of(draft) == kind


def test_what_has_no_random_configurations_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="not a draft"):
        kind_of(PlainDecoding())
    with pytest.raises(ValueError, match="needs 2 layers and a rule"):
        drawer(target, rules=())
