"""Costs are resolved before a decoder is built: measured once where a rule lacks them, and only then."""

from __future__ import annotations

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import BetaThompson, CalibratedThompson, CostAwareRule, DraftLengthRule, Fixed, RoundCosts
from decoding.drafters.contract import Drafter
from decoding.drafts import Draft, LayerSkip, PlainDecoding
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from decoding.timing import draft_costs
from decoding.timing.draft_costs import with_measured_costs
from tests.support.tiny import tiny_target

SKIP = LayerSkip.blocks((2, 3))
MEASURED = RoundCosts(draft_step=0.2, verify=(1.0, 1.1))
REQUEST = Request([1, 2, 3], Ending(12))


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """`max_tokens` and `num_sequences` of every measurement that was asked for; none is made."""
    asked: list[tuple[int, int]] = []

    def stand_in(target: Target, drafter: Drafter, max_tokens: int, *, num_sequences: int) -> RoundCosts:
        asked.append((max_tokens, num_sequences))
        return MEASURED

    monkeypatch.setattr(draft_costs, "measure_round_costs", stand_in)
    return asked


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("rule", [BetaThompson(max_tokens=5), CalibratedThompson(max_tokens=5)])
def test_costs_are_measured_once_and_never_by_a_decoder(
    rule: CostAwareRule, persistent: bool, measurements: list[tuple[int, int]]
) -> None:
    rule = rule.model_copy(update={"persistent": persistent})
    ready = with_measured_costs(tiny_target(), SKIP, rule, Decoding())
    assert ready == rule.with_costs(MEASURED)
    decoder = Decoder(tiny_target(), SKIP, ready)
    plain = Decoder(tiny_target(), PlainDecoding(), Fixed()).generate(REQUEST).tokens
    assert [decoder.generate(REQUEST).tokens for _ in range(3)] == [plain] * 3
    assert measurements == [(5, 1)]
    assert decoder.rule is ready


def test_decoder_refuses_a_rule_whose_costs_are_not_resolved(measurements: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="'beta_thompson' has no costs"):
        Decoder(tiny_target(), SKIP, BetaThompson()).generate(REQUEST)
    assert measurements == []


@pytest.mark.parametrize(
    ("draft", "rule"),
    [
        (SKIP, BetaThompson(costs=MEASURED)),
        (SKIP, CalibratedThompson(costs=MEASURED, persistent=True)),
        (SKIP, Fixed(max_tokens=3)),
        (PlainDecoding(), BetaThompson()),
        (PlainDecoding(), BetaThompson(persistent=True)),
    ],
)
def test_nothing_is_measured_that_is_known_or_not_needed(
    draft: Draft, rule: DraftLengthRule, measurements: list[tuple[int, int]]
) -> None:
    ready = with_measured_costs(tiny_target(), draft, rule, Decoding())
    assert ready is rule
    Decoder(tiny_target(), draft, ready).generate(REQUEST)
    assert measurements == []
