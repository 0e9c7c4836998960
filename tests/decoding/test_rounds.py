"""The records of a decoding run and the rates derived from them."""

from __future__ import annotations

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Fixed
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.rounds import Generation, Prefill, Round
from decoding.text import Ending
from tests.support.families import some_tokens, target_of


def test_facts_of_a_generation_are_those_of_its_rounds() -> None:
    rounds = (
        Round((1, 2, 3), num_drafted=4, num_accepted=2, seconds=0.25, draft_seconds=0.125),
        Round((4,), num_drafted=1, num_accepted=0, seconds=0.125, draft_seconds=0.0625),
        # An end token, truncated after it.
        Round((5,), num_drafted=3, num_accepted=2, seconds=0.25, draft_seconds=0.125),
        Round((8, 9), num_drafted=5, num_accepted=1, seconds=0.25, draft_seconds=0.0, looked_up=True),
    )
    generation = Generation.collect(iter([Prefill(token=7, seconds=0.5), *rounds]))
    assert generation == Generation(Prefill(token=7, seconds=0.5), rounds)
    assert generation.tokens == (7, 1, 2, 3, 4, 5, 8, 9)
    assert (generation.num_decoded, generation.decode_seconds, generation.draft_seconds) == (7, 0.875, 0.3125)
    assert (generation.num_drafted, generation.num_looked_up, generation.num_accepted) == (13, 5, 5)
    assert generation.accepted_lengths == {2: 2, 0: 1, 1: 1}
    empty = Generation(Prefill(token=7, seconds=0.5), ())
    assert (empty.tokens, empty.num_decoded, empty.num_drafted, empty.decode_seconds) == ((7,), 0, 0, 0)


def test_rounds_are_timed_and_yielded_as_they_happen() -> None:
    target, seen = target_of("llama"), list[int]()
    request = Request(some_tokens(4), Ending(16, criteria=[lambda ids, scores: bool(seen.append(1))]))
    plain, drafter = autoregressive(target, request), LayerSkipDrafter(target, LayerSkip.blocks((2, 3)))
    for steps, drafts in ((plain, False), (speculative(target, drafter, Fixed().controller(), request), True)):
        seen.clear()
        num_tokens = 0
        for step in steps:
            num_tokens += 1 if isinstance(step, Prefill) else len(step.tokens)
            assert len(seen) == num_tokens
            assert step.seconds > 0.0
            if isinstance(step, Round):
                assert (
                    (0.0 < step.draft_seconds < step.seconds)
                    if drafts
                    else (step.draft_seconds, step.num_drafted) == (0, 0)
                )


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
