"""A persistent rule adapts from sequence to sequence, and the decoder tells what it has adapted to."""

from __future__ import annotations

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import AdaEdl, BetaThompson, CalibratedThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import LayerSkip
from decoding.text import Ending
from tests.support.tiny import tiny_target

SKIP = LayerSkip.blocks((2, 3))
MEASURED = RoundCosts(draft_step=0.2, verify=(1.0, 1.1))
REQUEST = Request([1, 2, 3], Ending(12))


@pytest.mark.parametrize("rule", [BetaThompson(costs=MEASURED), CalibratedThompson(costs=MEASURED), AdaEdl()])
def test_decoder_tells_what_a_persistent_controller_has_adapted_to(rule: DraftLengthRule) -> None:
    decoder = Decoder(tiny_target(), SKIP, rule.model_copy(update={"persistent": True}))
    assert decoder.adapted_rule() is None
    decoder.generate(REQUEST)
    first = decoder.adapted_rule()
    assert first is not None
    assert type(first) is type(rule)
    assert first not in (rule, decoder.rule)
    decoder.generate(REQUEST)
    assert decoder.adapted_rule() != first


@pytest.mark.parametrize("rule", [BetaThompson(costs=MEASURED), Fixed(persistent=True)])
def test_decoder_without_a_persistent_controller_has_no_adapted_rule(rule: DraftLengthRule) -> None:
    decoder = Decoder(tiny_target(), SKIP, rule)
    decoder.generate(REQUEST)
    assert decoder.adapted_rule() is None
