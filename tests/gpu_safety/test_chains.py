"""More work between two looks of the host: the same output, in fewer waits or launches. These features are off by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from decoding.decode import Request, speculative
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed, TopProbability
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import EarlyExit, LayerSkip
from decoding.rounds import Generation
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.features import NO_FEATURES, SpeedFeatures
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.fake_cuda import fake_cuda
from tests.support.families import build, some_tokens
from tests.support.heads import untrained_head
from tests.support.recorders import CountingRecorder

SIZES = ((5, 13), (11, 8), (3, 16), (8, 1), (1, 6))
"""Lengths of the prompts and of their continuations: the longest has three rounds of the most drafts at least."""
SKIP = LayerSkip(skip_attention=(2, 3), skip_mlp=(1, 3))
RULES: dict[str, DraftLengthRule] = {
    "top probability": TopProbability(max_tokens=5, threshold=0.3),
    "entropy": AdaEdl(max_tokens=6),
    "entropy, without the last": AdaEdl(max_tokens=6, keep_last=False),
}


@cache
def recorder_of(features: SpeedFeatures) -> CountingRecorder:
    return CountingRecorder()


@cache
def target_with(features: SpeedFeatures) -> Target:
    recorder = recorder_of(features)
    runner = partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder, features=features)
    return Target(build("llama"), runner)


def requests(ends: frozenset[int] = frozenset()) -> list[Request]:
    return [Request(some_tokens(length, seed), Ending(num, ends)) for seed, (length, num) in enumerate(SIZES)]


def facts(generations: Sequence[Generation]) -> list[list[tuple[object, ...]]]:
    """Return what happened in each round, without the seconds."""
    return [[(each.tokens, each.num_drafted, each.num_accepted) for each in one.rounds] for one in generations]


def decode_with_head(target: Target, rule: DraftLengthRule) -> list[Generation]:
    torch.manual_seed(0)
    drafter = EarlyExitDrafter(target, 2, untrained_head(target))
    return [Generation.collect(speculative(target, drafter, rule.controller(), request)) for request in requests()]


WAYS: dict[str, Callable[[Target, DraftLengthRule], Sequence[Generation]]] = {
    "skip": lambda target, rule: [Decoder(target, SKIP, rule).generate(request) for request in requests()],
    "skip in a batch": lambda target, rule: Decoder(target, SKIP, rule).generate_batch(requests()).generations,
    "exit with head": decode_with_head,
}


@cache
def facts_without_features(way: str, rule: str) -> list[list[tuple[object, ...]]]:
    return facts(WAYS[way](target_with(NO_FEATURES), RULES[rule]))


LOOKS = [(way, list(RULES)[number % 3], (2, 4, 1)[number % 3]) for number, way in enumerate(WAYS)]


@pytest.mark.parametrize(("way", "rule", "look_every"), LOOKS)
def test_looking_at_several_drafts_at_once_changes_no_decision(way: str, rule: str, look_every: int) -> None:
    found = WAYS[way](target_with(SpeedFeatures(look_every=look_every)), RULES[rule])
    assert facts(found) == facts_without_features(way, rule)
    assert sum(each.num_accepted for each in found) > 0


@pytest.mark.parametrize(("length", "ends"), [(4, False), (6, True)], ids=["to the limit", "to an end token"])
def test_plain_decoding_in_chains_writes_the_same_tokens(length: int, ends: bool) -> None:
    alone = plain_decoder(target_with(NO_FEATURES))
    end = frozenset(alone.generate(requests()[2]).tokens[4:5]) if ends else frozenset()
    expected = facts([alone.generate(request) for request in requests(end)])
    decoder = plain_decoder(target_with(SpeedFeatures(plain_chain=length)))
    assert facts([decoder.generate(request) for request in requests(end)]) == expected
    assert facts(decoder.generate_batch(requests(end)).generations) == expected


@pytest.mark.parametrize(("draft", "length"), [(SKIP, 5), (EarlyExit(exit_layer=3), 1)], ids=["skip", "exit"])
def test_rounds_of_known_length_are_one_recording_each(length: int, draft: LayerSkip | EarlyExit) -> None:
    replays, found = [], []
    for features in (NO_FEATURES, SpeedFeatures(whole_rounds=True)):
        decoder, recorder = Decoder(target_with(features), draft, Fixed(max_tokens=length)), recorder_of(features)
        found.append(facts([decoder.generate(request) for request in requests()]))
        found.append(facts(decoder.generate_batch(requests()).generations))
        before = recorder.num_recorded, recorder.num_replayed
        again = decoder.generate(requests()[0])
        assert recorder.num_recorded == before[0]
        replays.append((recorder.num_replayed - before[1]) / len(again.rounds))
    assert all(each == found[0] for each in found)
    assert replays[0] > replays[1] == 1


def test_stopping_criteria_are_asked_after_every_token() -> None:
    seen: list[int] = []

    def count(ids: Tensor, scores: Tensor | None) -> bool:
        seen.append(ids.shape[1])
        return False

    request = Request(some_tokens(5), Ending(9, criteria=[count]))
    plain_decoder(target_with(SpeedFeatures(plain_chain=4))).generate(request)
    assert seen == list(range(6, 15))


def test_chains_save_waits() -> None:
    """The waits for nine plain tokens, and for a round that drafts three tokens and looks at each: else 9 and 4."""
    model = build("llama", num_hidden_layers=4)
    with fake_cuda() as device:
        target = device.target(model, SpeedFeatures(plain_chain=4, look_every=3))
        plain, looking = plain_decoder(target), Decoder(target, SKIP, TopProbability(max_tokens=3, threshold=0.1))
        assert device.waits_of(lambda: plain.generate(Request([7, 3, 9], Ending(9)))).total() == 3
        steps = looking.steps(Request([7, 3, 9], Ending(5)))
        next(steps)
        assert device.waits_of(lambda: next(steps)).total() == 2
        fixed = Decoder(target, SKIP, Fixed(max_tokens=3))
        assert device.waits_of(lambda: fixed.generate(Request([7, 3, 9], Ending(5)))).total() == 1 + 4
        assert device.waits_in_recordings == []
