"""Recorded decodings: what counts as prefill, what counts as decoding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.rounds import Round
from decoding.text import Ending
from tests.support.tiny import tiny_target
from tuner.measuring.clock import PriceList
from tuner.measuring.recording import Recorder, TimedPass, counted, record_decoding


def recorder(*seconds: float, num_sequences: int = 1) -> Recorder:
    """A recorder whose tokens arrive after these seconds."""
    times = iter(seconds)
    return Recorder(lambda record: next(times), num_sequences=num_sequences)


def tokens(passes: Sequence[TimedPass]) -> list[tuple[int, ...]]:
    return [each.tokens for each in passes]


def test_prefill_ends_with_the_first_tokens() -> None:
    recording = recorder(1.0, 3.0, 6.0)
    for arrived in ([5, 6], [7], [8, 9, 1]):
        recording.put(arrived)
    batch = recording.batch()
    assert [sequence.tokens for sequence in batch.sequences] == [(5, 6, 7, 8, 9, 1)]
    assert (batch.prefill_seconds, batch.decode_seconds) == (1.0, 5.0)
    assert batch.num_decoded == 4
    assert tokens(batch.decoded(0)) == [(7,), (8, 9, 1)]


def test_prefill_of_a_batch_ends_with_the_last_first_tokens() -> None:
    recording = recorder(1.0, 2.0, 4.0, 5.0, 6.0, 10.0, num_sequences=2)
    for sequence, arrived in [(0, [5]), (0, [6, 7]), (1, [8]), (0, [9]), (1, [1, 2, 3]), (1, [4])]:
        recording.put(arrived, sequence)
    batch = recording.batch()
    assert [each.tokens for each in batch.sequences] == [(5, 6, 7, 9), (8, 1, 2, 3, 4)]
    assert (batch.prefill_seconds, batch.decode_seconds) == (4.0, 6.0)
    # Tokens of the first sequence that arrive while the second prompt is read count as prefill, as their seconds do.
    assert [tokens(batch.decoded(sequence)) for sequence in (0, 1)] == [[(9,)], [(1, 2, 3), (4,)]]
    assert batch.num_decoded == 5
    assert batch.prefill_tokens == 4


def test_rounds_that_count_as_prefill_are_not_in_the_rounds_of_the_decode_phase() -> None:
    recording = recorder(1.0, 2.0, 4.0, 5.0, 6.0, num_sequences=2)
    rounds = [Round((n,), num_drafted=n, num_accepted=0, seconds=1.0, draft_seconds=0.5) for n in range(3)]
    for sequence, arrived, record in [
        (0, 5, None),
        (0, 6, rounds[0]),
        (1, 8, None),
        (0, 9, rounds[1]),
        (1, 1, rounds[2]),
    ]:
        recording.put([arrived], sequence, record)
    assert [each.num_drafted for each in recording.batch().rounds] == [1, 2]
    assert counted([0, 3, 1, 3]) == (1, 1, 0, 2)
    assert counted([]) == ()


def test_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="not a single token"):
        recorder().batch()
    half = recorder(1.0, num_sequences=2)
    half.put([1], 1)
    with pytest.raises(ValueError, match="not a single token"):
        half.batch()


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_records_of_a_decoder_are_its_generations(num_sequences: int) -> None:
    target = tiny_target()
    decoder = Decoder(target, LayerSkip.blocks((2,)), Fixed(max_tokens=3))
    requests = [Request((3, 5, 7 + row), Ending(12)) for row in range(num_sequences)]
    recording = Recorder(
        PriceList(lambda draft, record: 1.0).start(LayerSkip.blocks((2,))), num_sequences=num_sequences
    )
    record_decoding(decoder, requests, recording)
    batch = recording.batch()
    generations = [decoder.generate(request) for request in requests]
    assert [each.tokens for each in batch.sequences] == [generation.tokens for generation in generations]
    facts = [(r.tokens, r.num_drafted, r.num_accepted) for generation in generations for r in generation.rounds]
    assert sorted((r.tokens, r.num_drafted, r.num_accepted) for r in batch.rounds) == sorted(facts)
    assert batch.decode_seconds == len(facts)
    assert batch.num_decoded == sum(generation.num_decoded for generation in generations)
