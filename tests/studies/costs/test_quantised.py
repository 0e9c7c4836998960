"""Costs of quantised drafts: terms of their own where weights are read, the model's own where keys and values are."""

from __future__ import annotations

import pytest

from decoding.drafts import BitWidth, EarlyExit, LayerSkip
from studies.costs.fit import fit_costs
from studies.costs.plan import plan_passes
from studies.costs.table import CostTable
from studies.costs.terms import BlockKinds, DraftStep, Pass, Terms, Verification
from tests.support.families import target_of
from tests.support.tiny import tiny_target
from tuner.measuring.cost_table import measure_cost_table, resolve_terms

KINDS = BlockKinds(frame=(0,) * 12, attention=(0, 0, 1) * 4, mlp=(0, 1, 1, 0) * 3)
WIDTHS, CONTEXTS, NUM_TOKENS = (1, 2, 5, 9), (64, 256), 4096
HEAD = {"head": "h.safetensors", "head_sha256": "0" * 64}
SHARES = {None: 1.0, 8: 0.4, 4: 0.2}
"""Seconds of reading the weights, by precision."""


def seconds_of(each: Pass) -> float:
    """Return the seconds of a pass on a made-up device, on which quantised weights take a share of the time."""
    skip = each.skip if isinstance(each, DraftStep) else LayerSkip()
    share, far = SHARES[skip.bits], each.context / 64
    blocks = 0.0
    for index, (attention, mlp) in enumerate(zip(KINDS.attention, KINDS.mlp, strict=True)):
        assert attention is not None
        assert mlp is not None
        runs = index not in skip.skip_attention, index not in skip.skip_mlp
        blocks += (
            0.4 * any(runs) + runs[0] * (0.5 * far + 2.0 * share) * (1 + attention) + runs[1] * 3 * share * (1 + mlp)
        )
    if isinstance(each, Verification):
        return blocks + 0.25 * far + 5.0 + (each.width - 1) * 2.0
    below = each.skip.ids_below
    left_out = 0.0 if below is None else 1 - below / NUM_TOKENS
    return blocks + 0.25 * far + (5.0 - 3.0 * left_out) * share + 0.7


@pytest.fixture(scope="module")
def table() -> CostTable:
    terms = Terms(KINDS, WIDTHS, CONTEXTS, NUM_TOKENS, (4, 8))
    fitted, held_out = plan_passes(terms, seed=3)
    return fit_costs(terms, *({each: seconds_of(each) for each in passes} for passes in (fitted, held_out)))


@pytest.mark.parametrize("context", [100, 1000])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_fit_recovers_known_seconds(table: CostTable, bits: BitWidth, context: float) -> None:
    assert table.error.worst < 1e-6
    for skip in (
        LayerSkip(bits=bits),
        LayerSkip.blocks((1, 5, 6), bits=bits),
        LayerSkip(bits=bits, ids_below=1000),
        LayerSkip(skip_attention=(0, 2, 8), skip_mlp=(2, 3), bits=bits),
    ):
        known = seconds_of(DraftStep(skip, context))
        assert table.draft_seconds(skip, context=context) == pytest.approx(known, rel=1e-6)


def test_a_quantised_exit_has_a_quantised_head_and_is_verified_from_the_first_block(table: CostTable) -> None:
    plain, quantised = (EarlyExit(exit_layer=4, bits=bits, **HEAD) for bits in (None, 8))
    without = table.draft_seconds(EarlyExit(exit_layer=4, bits=8), context=64)
    assert table.draft_seconds(quantised, context=64) - without == pytest.approx(
        0.4 + 2 * (0.5 + 0.8) + 3 * 0.4, rel=1e-6
    )
    assert table.draft_seconds(quantised, context=64) < table.draft_seconds(plain, context=64)
    verified = [table.verify_seconds(quantised, 4, context=64, prefix_reuse=reuse) for reuse in (False, True)]
    assert verified[0] == verified[1] == table.verify_seconds(LayerSkip(), 4, context=64, prefix_reuse=True)


def test_a_precision_that_was_not_measured_is_refused(table: CostTable) -> None:
    without = Terms(KINDS, WIDTHS, CONTEXTS, NUM_TOKENS)
    fitted, held_out = plan_passes(without, seed=3)
    other = fit_costs(without, *({each: seconds_of(each) for each in passes} for passes in (fitted, held_out)))
    with pytest.raises(ValueError, match="costs of int8 drafts were not measured"):
        other.draft_seconds(LayerSkip(bits=8), context=64)
    assert table.covers((1, 9), (64,), (8,))
    assert not other.covers((1, 9), (64,), (8,))


def test_quantised_passes_of_a_model_are_timed() -> None:
    table = measure_cost_table(tiny_target(), max_tokens=2, contexts=(8, 16), budget_seconds=0.0, bits=(8,))
    assert table.bits == (8,)
    assert table.draft_seconds(LayerSkip(bits=8), context=8) > 0


def test_a_model_without_linear_layers_has_no_quantised_costs() -> None:
    assert resolve_terms(target_of("gpt2"), max_tokens=2, contexts=(8,), bits=(8, 4)).bits == ()
    assert resolve_terms(target_of("llama"), max_tokens=2, contexts=(8,), bits=(8, 4)).bits == (4, 8)
