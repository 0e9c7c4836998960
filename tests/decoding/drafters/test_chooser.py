"""The choice of the stage that opens a round: what has paid in this sequence, and nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from decoding.drafters.chooser import Chooser, ChosenRounds, JudgedCopy
from decoding.drafts import LayerSkip, Lookup, SuffixLookup
from decoding.drafts.choice import StageChoice

CHOICE = StageChoice(prices=(0.1, 0.3), forgetting=0.8, start=2.0, margin=1.2)
BOTH = (0, 1)
Copies = dict[int, JudgedCopy]
NONE: Copies = {}


def opened(
    chooser: Chooser, tokens: dict[int | None, int], count: int, *, copies: Copies = NONE, drafted: int = 4
) -> list[int | None]:
    """Return the stages that open `count` rounds, where the rounds of a stage always have the same number of tokens."""
    stages = list[int | None]()
    for _ in range(count):
        stages.append(stage := chooser.choose(BOTH))
        chooser.drafted(drafted)
        chooser.learn(tokens[stage], copies)
    return stages


def test_first_stage_opens_as_long_as_it_pays() -> None:
    assert opened(Chooser(CHOICE), {0: 4, 1: 4, None: 1}, 20) == [0] * 20


def test_a_stage_that_fails_is_passed_over_and_tried_again() -> None:
    stages = opened(Chooser(CHOICE), {0: 1, 1: 4, None: 1}, 60)
    assert stages[:3] == [0, 1, 1]
    tried = [index for index, stage in enumerate(stages) if stage == 0]
    assert 2 <= len(tried) <= 8, "some rounds later, but not often"


def test_copies_are_judged_while_they_are_passed_over() -> None:
    chooser = Chooser(CHOICE)
    wrong, right = {0: JudgedCopy(4, 0)}, {0: JudgedCopy(4, 4)}
    assert opened(chooser, {0: 1, 1: 3, None: 1}, 40, copies=wrong)[4:] == [1] * 36, "no copy is tried to be judged"
    stages = opened(chooser, {0: 5, 1: 3, None: 1}, 20, copies=right)
    assert stages[0] == 1
    assert set(stages[8:]) == {0}, "they were seen to be right in the rounds of the other stage"


def test_a_stage_whose_tokens_cost_more_must_bring_more() -> None:
    equal = {0: 3, 1: 3, None: 1}
    assert opened(Chooser(CHOICE), equal, 30).count(1) == 0
    expensive = StageChoice(prices=(0.5, 0.1), forgetting=0.8, start=2.0)
    assert opened(Chooser(expensive), equal, 30).count(0) <= 6


def test_plain_steps_where_nothing_pays() -> None:
    stages = opened(Chooser(CHOICE), {0: 1, 1: 1, None: 1}, 60)
    assert stages.count(None) > 30
    assert {0, 1} <= set(stages[20:]), "each stage is tried again"


def test_what_paid_in_the_end_counts_more_than_what_paid_before() -> None:
    chooser = Chooser(CHOICE)
    opened(chooser, {0: 5, 1: 3, None: 1}, 20)
    before = chooser.rate(0)
    opened(chooser, {0: 1, 1: 3, None: 1}, 12, copies={0: JudgedCopy(4, 0)})
    assert chooser.rate(0) < before / 2


def test_a_stage_that_cannot_open_keeps_its_evidence() -> None:
    chooser = Chooser(CHOICE)
    opened(chooser, {0: 5, 1: 3, None: 1}, 8)
    kept = chooser.rate(0)
    for _ in range(5):
        chooser.choose((1,))
        chooser.drafted(4)
        chooser.learn(3, {})
    assert chooser.rate(0) == kept != CHOICE.start


def test_rounds_of_a_sequence_judge_copies_by_the_tokens_written() -> None:
    rounds = ChosenRounds.of(CHOICE)
    assert rounds.open([1, 2], {0: [7, 8, 9]}, BOTH) == 0
    rounds.chooser.drafted(3)
    rounds.open([1, 2, 7, 8, 5], {}, (1,))
    expected = Chooser(CHOICE)
    expected.choose(BOTH)
    expected.learn(3, {0: JudgedCopy(3, 2)})
    assert rounds.chooser.rate(0) == expected.rate(0)


def test_old_lookups_are_saved_as_they_were() -> None:
    for lookup in (Lookup(), SuffixLookup()):
        assert "choice" not in lookup.model_dump()
        chosen = lookup.with_choice(CHOICE)
        assert type(lookup).model_validate(chosen.model_dump()) == chosen
        assert chosen.with_choice(None) == lookup


def test_columns_of_trials_name_the_choice() -> None:
    columns = LayerSkip(lookup=Lookup(choice=CHOICE)).columns()
    assert columns["lookup.choice.prices"] == "0.1 0.3"
    assert columns["lookup.choice.margin"] == 1.2
    assert not any("choice" in name for name in LayerSkip(lookup=Lookup()).columns())


def test_a_lookup_has_two_prices() -> None:
    with pytest.raises(ValidationError, match="one for the lookup, one for the draft, got 3"):
        Lookup(choice=StageChoice(prices=(0.1, 0.2, 0.3)))
