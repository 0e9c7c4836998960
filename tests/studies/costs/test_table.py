"""Cost tables: the fit recovers known seconds, and round costs equal sums by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from studies.costs.fit import fit_costs
from studies.costs.plan import plan_passes
from studies.costs.table import CostError, CostTable, TermSeconds
from studies.costs.terms import BlockKinds, DraftStep, Pass, Terms, Verification
from tests.support.costs import assert_monotone
from tests.support.families import SUPPORTED, target_of

ALIKE = BlockKinds(frame=(0,) * 12, attention=(0,) * 12, mlp=(0,) * 12)
MIXED = BlockKinds(
    frame=(0,) * 12,
    attention=(0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1),
    mlp=(0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1),
)
CLOSED = BlockKinds(frame=(0, 1, 0, 1, 0, 0), attention=(0, None, 0, None, 0, 0), mlp=(0, None, 0, None, 0, 0))
WIDTHS, CONTEXTS, NUM_TOKENS = (1, 2, 3, 5, 9), (64, 256), 4096


def seconds_of(kinds: BlockKinds, each: Pass) -> float:
    """Return the seconds of a pass on a made-up device: linear in width and context, different for each kind."""
    far = each.context / 64
    attention = [0.0 if kind is None else (2.0 + 0.5 * far) * (1 + kind) for kind in kinds.attention]
    mlp = [0.0 if kind is None else 3.0 * (1 + 2 * kind) for kind in kinds.mlp]
    frame = [0.4 + 6 * kind for kind in kinds.frame]
    layers = range(kinds.num_layers)
    if isinstance(each, DraftStep):
        skip_attention, skip_mlp = each.skip.skip_attention, each.skip.skip_mlp
        blocks = sum(
            frame[i] * (i not in skip_attention or i not in skip_mlp)
            + attention[i] * (i not in skip_attention)
            + mlp[i] * (i not in skip_mlp)
            for i in layers
        )
        return 5.0 + 0.25 * far + 0.7 + blocks
    rest = 5.0 + 0.25 * far + 1.5 * (each.width - 1)
    wider = sum((each.width - 1) * (0.2 + 0.1 * far) for _ in layers[each.boundary :])
    return rest + sum(frame) + sum(attention) + sum(mlp) + wider + 0.05 * each.boundary


def known_table(kinds: BlockKinds, num_tokens: int | None = NUM_TOKENS) -> CostTable:
    terms = Terms(kinds, WIDTHS, CONTEXTS, num_tokens)
    fitted, held_out = plan_passes(terms, seed=3)
    return fit_costs(
        terms,
        {each: seconds_of(kinds, each) for each in fitted},
        {each: seconds_of(kinds, each) for each in held_out},
    )


def some_skips(kinds: BlockKinds) -> list[LayerSkip]:
    stream = random.Random(1)
    open_blocks = [index for index, kind in enumerate(kinds.attention) if kind is not None]
    skips = [LayerSkip(), LayerSkip.blocks((1,)), LayerSkip.blocks(tuple(range(kinds.num_layers)))]
    for count in range(1, len(open_blocks)):
        attention, mlp = (tuple(sorted(stream.sample(open_blocks, k=count))) for _ in range(2))
        skips.append(LayerSkip(skip_attention=attention, skip_mlp=mlp))
    return skips


@pytest.mark.parametrize("kinds", [ALIKE, MIXED, CLOSED], ids=["alike", "mixed", "closed"])
def test_the_fit_recovers_known_seconds(kinds: BlockKinds) -> None:
    table = known_table(kinds)
    assert table.error.worst < 1e-6
    for skip in some_skips(kinds):
        for context in (64, 100, 256, 1000):
            drafted = table.draft_seconds(skip, context=context)
            assert drafted == pytest.approx(seconds_of(kinds, DraftStep(skip, context)), rel=1e-6)
            for num_drafted in (0, 1, 3, 6, 8):
                known = seconds_of(kinds, Verification(num_drafted + 1, context))
                whole = table.verify_seconds(skip, num_drafted, context=context, prefix_reuse=False)
                assert whole == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(
    ("draft", "prefix_reuse", "boundary"),
    [
        (LayerSkip(skip_attention=(7, 9), skip_mlp=(5,)), True, 5),
        (LayerSkip(skip_attention=(7, 9), skip_mlp=(5,)), False, 0),
        (LayerSkip(skip_mlp=(0, 5)), True, 0),
        (LayerSkip(), True, 0),
        (EarlyExit(exit_layer=8), True, 8),
        (EarlyExit(exit_layer=8), False, 0),
    ],
)
def test_blocks_before_the_first_skip_take_one_token_with_known_states(
    draft: LayerSkip | EarlyExit, prefix_reuse: bool, boundary: int
) -> None:
    table = known_table(ALIKE)
    for num_drafted in (1, 2, 6):
        predicted = table.verify_seconds(draft, num_drafted, context=64, prefix_reuse=prefix_reuse)
        # Rest: 5.25, plus 1.5 per extra token. Each of 12 blocks: 5.9; plus 0.3 per extra token after the boundary, 0.05 before it.
        expected = 5.25 + 1.5 * num_drafted + 12 * 5.9 + 0.3 * num_drafted * (12 - boundary) + 0.05 * boundary
        assert predicted == pytest.approx(expected, rel=1e-6)
    nothing_drafted = table.verify_seconds(draft, 0, context=64, prefix_reuse=prefix_reuse)
    assert nothing_drafted == table.plain_seconds(context=64) == pytest.approx(5.25 + 12 * 5.9, rel=1e-6)


def test_an_exit_costs_its_blocks_and_a_head_one_more() -> None:
    table = known_table(ALIKE)
    without = table.draft_seconds(EarlyExit(exit_layer=3), context=64)
    head = EarlyExit(exit_layer=3, head="exit_head_3.safetensors", head_sha256="0" * 64)
    assert without == pytest.approx(5.25 + 0.7 + 3 * 5.9, rel=1e-6)
    assert table.draft_seconds(head, context=64) == pytest.approx(without + 5.9, rel=1e-6)
    for reuse in (False, True):
        costs = {
            draft: table.verify_seconds(draft, 4, context=64, prefix_reuse=reuse)
            for draft in (head, EarlyExit(exit_layer=3))
        }
        assert len(set(costs.values())) == 1


def test_a_head_costs_as_much_as_the_last_block() -> None:
    table = known_table(MIXED)
    head = EarlyExit(exit_layer=3, head="exit_head_3.safetensors", head_sha256="0" * 64)
    added = table.draft_seconds(head, context=64) - table.draft_seconds(EarlyExit(exit_layer=3), context=64)
    assert added == pytest.approx(0.4 + 2.5 * 2 + 3 * 3, rel=1e-6)


def test_each_kind_of_sublayer_has_its_own_cost() -> None:
    table = known_table(MIXED)
    assert table.saved_seconds(LayerSkip(skip_attention=(0,)), context=64) == pytest.approx(2.5, rel=1e-6)
    assert table.saved_seconds(LayerSkip(skip_attention=(2,)), context=64) == pytest.approx(5.0, rel=1e-6)
    assert table.saved_seconds(LayerSkip(skip_attention=(2,)), context=256) == pytest.approx(8.0, rel=1e-6)
    assert table.saved_seconds(LayerSkip(skip_mlp=(0,)), context=64) == pytest.approx(3.0, rel=1e-6)
    assert table.saved_seconds(LayerSkip(skip_mlp=(1,)), context=64) == pytest.approx(9.0, rel=1e-6)
    assert table.saved_seconds(LayerSkip.blocks((1,)), context=64) == pytest.approx(0.4 + 2.5 + 9.0, rel=1e-6)


def test_round_costs_are_in_plain_passes() -> None:
    table = known_table(ALIKE)
    costs = table.round_costs(EarlyExit(exit_layer=6), 4, context=64, prefix_reuse=True)
    plain = 5.25 + 12 * 5.9
    assert len(costs.verify) == 5
    assert costs.verify[0] == pytest.approx(1.0)
    assert costs.draft_step == pytest.approx((5.95 + 6 * 5.9) / plain, rel=1e-6)
    assert costs.verify[2] == pytest.approx((plain + 3.0 + 0.6 * 6 + 0.05 * 6) / plain, rel=1e-6)


def test_lookup_before_a_draft_costs_nothing() -> None:
    table = known_table(ALIKE)
    skip = LayerSkip.blocks((3, 4))
    with_lookup = skip.model_copy(update={"lookup": Lookup()})
    costs = [table.round_costs(draft, 4, context=64, prefix_reuse=True) for draft in (skip, with_lookup)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("draft", [PlainDecoding(), PromptLookup()], ids=["plain", "lookup"])
def test_a_draft_without_model_passes_is_refused(draft: Draft) -> None:
    with pytest.raises(ValueError, match="runs no part of the model"):
        known_table(ALIKE).round_costs(draft, 4, context=64, prefix_reuse=True)


@pytest.mark.parametrize(
    ("kinds", "draft", "reason"),
    [
        (ALIKE, LayerSkip.blocks((3, 12)), "skips layer 12, but the target has layers 0 to 11"),
        (ALIKE, EarlyExit(exit_layer=12), "exits at layer 12, but it must be 1 to 11"),
        (CLOSED, LayerSkip(skip_mlp=(1,)), "block 1 has no separate MLP module"),
        (CLOSED, LayerSkip(skip_attention=(3,)), "block 3 has no separate attention module"),
    ],
)
def test_missing_layers_are_refused(kinds: BlockKinds, draft: LayerSkip | EarlyExit, reason: str) -> None:
    table = known_table(kinds)
    for predict in (
        lambda: table.draft_seconds(draft, context=64),
        lambda: table.verify_seconds(draft, 3, context=64, prefix_reuse=True),
    ):
        with pytest.raises(ValueError, match=reason):
            predict()


def noisy(timed: list[Pass], spread: Callable[[], float]) -> dict[Pass, float]:
    return {each: seconds_of(ALIKE, each) * spread() for each in timed}


def test_the_error_is_measured_on_held_out_passes() -> None:
    terms = Terms(ALIKE, WIDTHS, CONTEXTS)
    fitted, held_out = plan_passes(terms, seed=3)
    steps = [each for each in held_out if isinstance(each, DraftStep)][:3]
    exact = noisy(fitted, lambda: 1.0)
    slower = {each: seconds_of(ALIKE, each) / factor for each, factor in zip(steps, (1.1, 0.98, 1.02), strict=True)}
    error = fit_costs(terms, exact, slower).error
    assert (error.median, error.worst) == (pytest.approx(0.02, abs=1e-6), pytest.approx(0.1, abs=1e-6))
    assert error.num_passes == 3
    assert not set(fitted) & set(held_out)


def test_costs_fall_with_skips_and_rise_with_draft_length() -> None:
    stream = np.random.default_rng(0)
    terms = Terms(ALIKE, WIDTHS, CONTEXTS)
    fitted, held_out = plan_passes(terms, seed=3)
    table = fit_costs(
        terms, noisy(fitted, lambda: stream.uniform(0.6, 1.6)), noisy(held_out, lambda: stream.uniform(0.6, 1.6))
    )
    assert_monotone(table)


def test_a_clock_without_resolution_gives_equal_costs() -> None:
    terms = Terms(ALIKE, WIDTHS, CONTEXTS)
    fitted, held_out = plan_passes(terms, seed=3)
    table = fit_costs(terms, dict.fromkeys(fitted, 0.0), dict.fromkeys(held_out, 0.0))
    costs = table.round_costs(LayerSkip.blocks((3,)), 4, context=64, prefix_reuse=True)
    assert (costs.draft_step, *costs.verify) == (1.0,) * 6


def test_a_table_covers_its_measured_widths_and_contexts() -> None:
    table = known_table(ALIKE)
    assert table.covers((1, 9), (64, 256))
    assert table.covers((4,), (100,))
    assert not table.covers((10,), (100,))
    assert not table.covers((4,), (63, 100))
    assert not table.covers((4,), (100, 257))


def test_the_description_names_times_and_error() -> None:
    error = CostError(median=0.03, worst=0.071, num_passes=8)
    seconds = TermSeconds(
        rest=((0.001,), (0.001,)), frame=(0.0001,), attention=((0.0002,),), mlp=(0.0003,), wider=(((0.0,),),),
        narrowed=0.0, choice=0.0, look=0.0,
    )  # fmt: skip
    kinds = BlockKinds(frame=(0, 0), attention=(0, 0), mlp=(0, 0))
    table = CostTable(kinds=kinds, widths=(1, 2), contexts=(64,), seconds=seconds, error=error)
    assert table.describe() == (
        "a pass takes 2.2 ms, a block 0.6 ms, attention 0.2 ms, MLP 0.3 ms, all after 64 tokens; predicted within 3.0 % (median, "
        "worst 7 %) on 8 held-out passes"
    )


@pytest.mark.parametrize("family", SUPPORTED)
def test_kinds_of_parts_in_every_family(family: str) -> None:
    target = target_of(family)
    kinds = BlockKinds.of(target)
    assert kinds.num_layers == target.num_layers
    types = getattr(target.config, "layer_types", None)
    if types is not None:
        assert len({*zip(types, kinds.attention, strict=True)}) == len(set(types))
        assert len(set(kinds.attention)) >= len(set(types))
