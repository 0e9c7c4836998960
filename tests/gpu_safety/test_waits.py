"""A budget of the host's waits for the device: one per round, however many tokens and sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import AdaEdl, Fixed, TopProbability
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import LayerSkip, PromptLookup
from decoding.exit_heads import new_exit_head
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.families import build

PROMPT = (7, 3, 9, 7, 3)
NUM_DRAFTED = 3
NUM_LAYERS = 2
"""A wait in a block would count for each of them, however few."""
EXIT_LAYER = 1
SKIP = LayerSkip.blocks((1,))
SHORT, LONG = 3, 7
"""Tokens of two decodings; the longer one's additional waits belong to its additional rounds."""

Decode = Callable[[Target, int], Sequence[Generation]]


@dataclass(frozen=True)
class Loaded:
    """A target on the fake device."""

    device: FakeCuda
    target: Target

    def waits_per_round(self, decode: Decode) -> float:
        """Return the waits of a round, prefill excluded; all shapes are recorded beforehand."""
        decode(self.target, LONG)
        waits, rounds = [], []
        for num_tokens in (SHORT, LONG):
            done: list[Generation] = []
            waits.append(self.device.waits_of(lambda: done.extend(decode(self.target, num_tokens))).total())  # noqa: B023
            rounds.append(max(len(each.rounds) for each in done))
        return (waits[1] - waits[0]) / (rounds[1] - rounds[0])


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    model = build("llama", num_hidden_layers=NUM_LAYERS)
    with fake_cuda() as device:
        yield Loaded(device, device.target(model))


def request(num_tokens: int, *, samples: bool = False) -> Request:
    if samples:
        return Request(PROMPT, Ending(num_tokens), Sampling())
    return Request(PROMPT, Ending(num_tokens))


def decode_alone(new_decoder: Callable[[Target], Decoder], *, samples: bool = False) -> Decode:
    return lambda target, num_tokens: [new_decoder(target).generate(request(num_tokens, samples=samples))]


def decode_with_head(target: Target, num_tokens: int) -> Sequence[Generation]:
    drafter = EarlyExitDrafter(target, EXIT_LAYER, new_exit_head(target))
    return [Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), request(num_tokens)))]


def fixed(target: Target) -> Decoder:
    return Decoder(target, SKIP, Fixed(max_tokens=NUM_DRAFTED))


@pytest.mark.parametrize(
    "decode",
    [
        decode_alone(plain_decoder),
        decode_alone(fixed, samples=True),
        decode_alone(lambda target: Decoder(target, PromptLookup(), Fixed(max_tokens=NUM_DRAFTED))),
        decode_with_head,
    ],
    ids=["plain", "fixed sampling", "lookup", "exit with head"],
)
def test_a_round_waits_once(loaded: Loaded, decode: Decode) -> None:
    assert loaded.waits_per_round(decode) == 1
    assert loaded.device.waits_in_recordings == []


def always_looking(target: Target) -> Decoder:
    """Every probability is 0.5 on the fake device: the rule looks at each token and never stops."""
    return Decoder(target, SKIP, TopProbability(max_tokens=NUM_DRAFTED, threshold=0.1))


def test_a_rule_that_looks_waits_once_per_look(loaded: Loaded) -> None:
    def decode(target: Target, num_tokens: int) -> Sequence[Generation]:
        # Longer by a draft, so that the additional rounds have room for all drafts.
        return [always_looking(target).generate(request(num_tokens + NUM_DRAFTED))]

    assert loaded.waits_per_round(decode) == NUM_DRAFTED + 1


def entropy_rule(target: Target) -> Decoder:
    return Decoder(target, SKIP, AdaEdl(max_tokens=NUM_DRAFTED, initial_threshold=0.05))


@pytest.mark.parametrize(
    ("num_sequences", "new_decoder", "num_waits"),
    [
        (5, fixed, 1),
        (3, entropy_rule, NUM_DRAFTED + 1),
    ],
    ids=["5, fixed", "3, entropy"],
)
def test_the_waits_of_a_batch_do_not_depend_on_its_size(
    loaded: Loaded, num_sequences: int, new_decoder: Callable[[Target], Decoder], num_waits: int
) -> None:
    def decode(target: Target, num_tokens: int) -> Sequence[Generation]:
        requests = [request(num_tokens + NUM_DRAFTED) for _ in range(num_sequences)]
        return new_decoder(target).generate_batch(requests).generations

    assert loaded.waits_per_round(decode) <= num_waits
    assert loaded.device.waits_in_recordings == []
