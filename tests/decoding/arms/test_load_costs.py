"""What rounds cost by load: measured with real passes, within a budget, and told to the choice."""

from __future__ import annotations

import pytest

from decoding.arms import load_costs
from decoding.arms.arm import Arm
from decoding.arms.chooser import Promise
from decoding.arms.decoder import ArmedDecoder
from decoding.arms.load_costs import measure_load_costs
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, PromptLookup
from tests.support.families import target_of


def _arms() -> list[Arm]:
    target = target_of("llama")
    return [
        Arm("skip", Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)), Promise(1.7, 1.6, 1.8)),
        Arm("copy", Decoder(target, PromptLookup(), Fixed(max_tokens=4)), num_drafted=2),
    ]


def test_a_round_of_each_arm_is_measured_at_each_load() -> None:
    skip, copy = measure_load_costs(_arms(), 5)
    assert list(skip) == list(copy) == [1, 2, 3]
    assert min(skip.values()) > 0.5, "three drafts and a verification, in plain passes"
    assert len({*skip.values(), *copy.values()}) > 3


def test_each_load_is_measured_with_its_fewest_sequences_until_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []

    def measure(_target: object, _drafter: object, num_tokens: int, *, num_sequences: int) -> float:
        measured.append((num_tokens, num_sequences))
        return float(num_tokens * num_sequences)

    monkeypatch.setattr(load_costs, "measure_one_cost", measure)
    seconds = iter([0.0, 5.0, 15.0, 25.0])
    skip, copy = measure_load_costs(_arms(), 15, budget_seconds=10.0, clock=lambda: next(seconds))
    assert measured == [(3, 1), (2, 1), (3, 2), (2, 2)]
    assert skip == {1: 3.0, 2: 6.0, 3: 6.0, 4: 6.0}
    assert copy == {1: 2.0, 2: 4.0, 3: 4.0, 4: 4.0}


def test_the_choice_begins_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ArmedDecoder(_arms())
    served.foresee(4)
    assert served.chooser.arm == 0, "without costs, the profile is not believed beyond one sequence"
    monkeypatch.setattr(load_costs, "measure_one_cost", lambda *_, **__: 1.5)
    served.measure_loads(4)
    served.foresee(4)
    assert served.chooser.arm == 1
