"""Recorded decodings: what counts as prefill, what counts as decoding."""

from __future__ import annotations

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.rounds import Round
from decoding.text import Ending
from tests.support.tiny import tiny_target
from tuner.measuring.contender import PriceList, Recorder, histogram
from tuner.measuring.paired import OwnDecoding


def recorder(*seconds: float, num_sequences: int = 1) -> Recorder:
    """A recorder whose tokens arrive after these seconds."""
    times = iter(seconds)
    return Recorder(lambda record: next(times), num_sequences=num_sequences)


def test_prefill_ends_with_the_first_tokens() -> None:
    recording = recorder(1.0, 3.0, 6.0)
    for arrived in ([5, 6], [7], [8, 9, 1]):
        recording.put(arrived)
    batch = recording.decoded()
    assert batch.texts == ((5, 6, 7, 8, 9, 1),)
    assert (batch.prefill_seconds, batch.decode_seconds) == (1.0, 5.0)
    assert (batch.prefill_tokens, batch.decode_tokens) == (2, 4)
    # Code of others keeps no records: what a pass adds beyond a token was accepted, and the drafts are not known.
    assert (batch.rounds, batch.accepted, batch.accepted_lengths, batch.drafted) == (2, 2, (1, 0, 1), None)


def test_prefill_of_a_batch_ends_with_the_last_first_tokens() -> None:
    recording = recorder(1.0, 2.0, 4.0, 5.0, 6.0, 10.0, num_sequences=2)
    for sequence, arrived in [(0, [5]), (0, [6, 7]), (1, [8]), (0, [9]), (1, [1, 2, 3]), (1, [4])]:
        recording.put(arrived, sequence)
    batch = recording.decoded()
    assert batch.texts == ((5, 6, 7, 9), (8, 1, 2, 3, 4))
    assert (batch.prefill_seconds, batch.decode_seconds) == (4.0, 6.0)
    # Tokens of the first sequence that arrive while the second prompt is read count as prefill, as their seconds do.
    assert (batch.prefill_tokens, batch.decode_tokens, batch.rounds) == (4, 5, 3)


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
    assert (recording.decoded().rounds, recording.decoded().drafted) == (2, 3)


def test_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="not a single token"):
        recorder().decoded()
    half = recorder(1.0, num_sequences=2)
    half.put([1], 1)
    with pytest.raises(ValueError, match="not a single token"):
        half.decoded()


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_records_of_a_decoder_are_its_generations(num_sequences: int) -> None:
    decoder = Decoder(tiny_target(), LayerSkip.blocks((2,)), Fixed(max_tokens=3))
    prompts = [(3, 5, 7 + row) for row in range(num_sequences)]
    own = OwnDecoding("draft", decoder, frozenset(), clock=PriceList(lambda draft, record: 1.0))
    batch = own.decode(prompts, 12)
    generations = [decoder.generate(Request(prompt, Ending(12))) for prompt in prompts]
    assert batch.texts == tuple(generation.tokens for generation in generations)
    rounds = [each for generation in generations for each in generation.rounds]
    assert (batch.rounds, batch.drafted) == (len(rounds), sum(each.num_drafted for each in rounds))
    assert batch.accepted_lengths == histogram(each.num_accepted for each in rounds)
    assert batch.decode_seconds == len(rounds)
    assert batch.decode_tokens == sum(generation.num_decoded for generation in generations)
