"""The records of a decoding run and the rates derived from them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Fixed
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.rounds import Generation, Prefill, Round
from decoding.text import Ending
from tests.support.families import some_tokens, target_of

GENERATION = Generation(
    Prefill(token=7, seconds=0.5),
    (
        Round((1, 2, 3), num_drafted=4, num_accepted=2, seconds=0.25, draft_seconds=0.125),
        Round((4,), num_drafted=1, num_accepted=0, seconds=0.125, draft_seconds=0.0625),
        Round(
            (5,), num_drafted=3, num_accepted=2, seconds=0.25, draft_seconds=0.125
        ),  # an end token, truncated after it
    ),
)


def test_tokens_include_the_prefills_and_every_rounds() -> None:
    assert GENERATION.tokens == (7, 1, 2, 3, 4, 5)


def test_rates_cover_the_decode_phase_only() -> None:
    assert GENERATION.num_decoded == 5
    assert GENERATION.decode_seconds == 0.625
    assert GENERATION.draft_seconds == 0.3125


def test_counts_are_summed_over_the_rounds() -> None:
    assert (GENERATION.num_drafted, GENERATION.num_accepted) == (8, 4)
    assert GENERATION.accepted_lengths == {2: 2, 0: 1}
    assert GENERATION.num_looked_up == 0


def test_copies_are_counted_among_the_drafts() -> None:
    copy = Round((8, 9), num_drafted=5, num_accepted=1, seconds=0.25, draft_seconds=0.0, looked_up=True)
    generation = Generation(GENERATION.prefill, (*GENERATION.rounds, copy))
    assert (generation.num_drafted, generation.num_looked_up, generation.num_accepted) == (13, 5, 5)


def test_text_of_one_token_has_no_rounds() -> None:
    generation = Generation(Prefill(token=7, seconds=0.5), ())
    assert generation.tokens == (7,)
    assert (generation.num_decoded, generation.num_drafted, generation.decode_seconds) == (0, 0, 0)


def test_collecting_drains_a_loop() -> None:
    steps = iter([GENERATION.prefill, *GENERATION.rounds])
    assert Generation.collect(steps) == GENERATION
    assert next(steps, None) is None


def test_records_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        GENERATION.rounds[0].num_drafted = 5  # type: ignore[misc]


def test_plain_decoding_is_rounds_that_draft_nothing() -> None:
    generation = Generation.collect(autoregressive(target_of("llama"), Request(some_tokens(4), Ending(6))))
    assert [(len(step.tokens), step.num_drafted, step.num_accepted) for step in generation.rounds] == [(1, 0, 0)] * 5
    assert generation.draft_seconds == 0.0
    assert generation.decode_seconds > 0.0
    assert generation.prefill.seconds > 0.0


def test_drafting_takes_a_part_of_each_round() -> None:
    drafter = LayerSkipDrafter(target_of("llama"), LayerSkip.blocks((2, 3)))
    request = Request(some_tokens(4), Ending(16))
    generation = Generation.collect(speculative(target_of("llama"), drafter, Fixed().controller(), request))
    assert all(0.0 < step.draft_seconds < step.seconds for step in generation.rounds)


def test_drafts_after_the_end_of_the_sequence_count_as_accepted() -> None:
    target, prompt = target_of("llama"), some_tokens(9)
    plain = Generation.collect(autoregressive(target, Request(prompt, Ending(16)))).tokens
    position = next(index for index in range(2, 8) if plain[index] not in plain[:index])
    request = Request(prompt, Ending(16, frozenset({plain[position]})))
    drafter = LayerSkipDrafter(target, LayerSkip())
    generation = Generation.collect(speculative(target, drafter, Fixed(max_tokens=10).controller(), request))
    (only,) = generation.rounds
    assert only.tokens == plain[1 : position + 1]
    assert (only.num_drafted, only.num_accepted) == (10, 10)


def test_rounds_are_yielded_as_they_happen() -> None:
    drafter = LayerSkipDrafter(target_of("llama"), LayerSkip.blocks((2, 3)))
    seen: list[int] = []

    def criterion(ids: object, scores: object) -> bool:
        seen.append(1)
        return False

    request = Request(some_tokens(4), Ending(16, criteria=[criterion]))
    num_tokens = 0
    for step in speculative(target_of("llama"), drafter, Fixed(max_tokens=3).controller(), request):
        num_tokens += 1 if isinstance(step, Prefill) else len(step.tokens)
        assert len(seen) == num_tokens
