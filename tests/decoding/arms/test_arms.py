"""Arms that change in the middle of requests: the text stays plain decoding's, whatever drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from decoding.acceptance import Sampling
from decoding.arms.arm import Arm
from decoding.arms.chooser import Promise
from decoding.arms.decoder import ArmedDecoder
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import BetaThompson, Fixed, RoundCosts, TopProbability
from decoding.drafts import FixedLeaves, LayerSkip, Lookup, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.serving.batch import ContinuousBatch
from decoding.serving.waiting_room import WaitingRoom
from decoding.text import Ending
from tests.support.arms import HandChooser, armed
from tests.support.families import some_tokens, target_of
from tests.support.heads import write_heads
from tests.support.served import arrive, passes
from tests.support.tiny import tiny_target


def _check_random_changes(decoders: list[Decoder], vocabulary: int, num_rows: int = 2) -> None:
    """Change arms at random passes; compare every text with plain decoding."""
    target = decoders[0].target
    requests = [
        Request([token % vocabulary for token in some_tokens(5 + index, index)], Ending(20)) for index in range(5)
    ]
    expected = [plain_decoder(target).generate(request).tokens for request in requests]
    drafted: set[int] = set()
    for seed in range(2):
        chooser, room, chance = HandChooser(seed, len(decoders)), WaitingRoom(9), random.Random(seed)
        batch = ContinuousBatch(armed(decoders, chooser, range(9)), room, num_rows=num_rows, max_length=32)
        told = [arrive(room, request)[1] for request in requests]
        for _ in passes(batch):
            if chance.random() < 0.5:
                chooser.arm = chance.randrange(len(decoders) + 1)
            drafted.add(chooser.arm)
        assert [tuple(each.tokens) for each in told] == expected
    assert drafted == set(range(len(decoders) + 1))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_text_is_plain_decodings_whatever_arm_drafts(family: str, num_rows: int) -> None:
    target = target_of(family)
    costs = RoundCosts(draft_step=0.4, verify=(1.0, 1.1, 1.2, 1.3, 1.4))
    decoders = [
        Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)),
        Decoder(target, PromptLookup(), Fixed(max_tokens=5)),
        Decoder(
            target,
            LayerSkip(skip_attention=(2, 3), skip_mlp=(2,), lookup=Lookup(max_tokens=4)),
            BetaThompson(max_tokens=4, persistent=True, costs=costs),
        ),
    ]
    _check_random_changes(decoders, 96, num_rows)


def test_text_is_plain_decodings_beside_an_arm_with_a_trained_head(tmp_path: Path) -> None:
    target = tiny_target()
    head = write_heads(target, tmp_path, [2])[2]
    folder = HeadFolder(target, tmp_path)
    decoders = [
        Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)),
        Decoder(target, head, Fixed(max_tokens=4), heads=folder),
        Decoder(target, head.model_copy(update={"lookup": Lookup(max_tokens=4)}), TopProbability(), heads=folder),
        Decoder(target, LayerSkip.blocks((2,)).with_tree(FixedLeaves(leaves=2)), Fixed(max_tokens=2)),
    ]
    _check_random_changes(decoders, 60)


def test_an_arm_after_a_plain_phase_accepts_as_much_as_before(tmp_path: Path) -> None:
    """States that another arm has verified are the head's own: drafts do not get worse."""
    target = tiny_target()
    head = write_heads(target, tmp_path, [2])[2]
    decoders = [
        Decoder(target, head, Fixed(max_tokens=3), heads=HeadFolder(target, tmp_path)),
        Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)),
    ]
    request = Request([token % 60 for token in some_tokens(6, 1)], Ending(24))

    def drafts(first_rounds: int) -> list[int]:
        """Accepted drafts by position in the text, after some rounds of the other arm."""
        chooser = HandChooser(2 if first_rounds else 1, 2)
        steps = armed(decoders, chooser).loop(request, 0, target.new_cache)
        found, length = {}, 0
        for number, step in enumerate(steps):
            chooser.arm = 1 if number >= first_rounds else 2
            if number:
                found[length] = getattr(step, "num_accepted", 0) if number > first_rounds else -1
            length += len(getattr(step, "tokens", (0,)))
        return [found.get(position, -1) for position in range(24)]

    always, later = drafts(0), drafts(3)
    both = [(a, b) for a, b in zip(always, later, strict=True) if a >= 0 and b >= 0]
    assert len(both) > 3
    assert all(a == b for a, b in both)


def test_a_fresh_request_is_drafted_by_the_first_arm_whatever_is_chosen() -> None:
    target = target_of("llama")
    decoders = [
        Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)),
        Decoder(target, PromptLookup(), Fixed(max_tokens=5)),
    ]
    texts = []
    for arm in range(3):
        chooser = HandChooser(arm, 2)
        request = Request(some_tokens(6, 1), Ending(12), Sampling(torch.Generator().manual_seed(5)))
        steps = list(armed(decoders, chooser).loop(request, 0, target.new_cache, fresh=True))
        texts.append([(getattr(step, "tokens", None), getattr(step, "num_drafted", 0)) for step in steps])
    assert texts[0] == texts[1] == texts[2]
    assert any(num_drafted for _, num_drafted in texts[0])


def test_rounds_are_observed_until_a_window_ends_and_then_the_chooser_decides() -> None:
    target, room, windows = target_of("llama"), WaitingRoom(9), []
    decoder = Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=2))
    served = ArmedDecoder(
        [Arm("skip", decoder, Promise(1.5, 1.4, 1.6))], listener=lambda name, window: windows.append((name, window))
    )
    batch = ContinuousBatch(served, room, num_rows=2, max_length=200)
    for index in range(3):
        arrive(room, Request(some_tokens(5, index), Ending(60)))
    for _ in passes(batch):
        pass
    assert {name for name, _ in windows} == {"plain", "skip"}
    assert all(window.num_drafted == 0 for name, window in windows if name == "plain")
    assert all(window.seconds > 0 and window.num_rounds >= 8 for _, window in windows)
    assert served.names == ("plain", "skip")


def test_names_are_told_apart() -> None:
    decoder = Decoder(target_of("llama"), PromptLookup(), Fixed())
    served = ArmedDecoder([Arm("code", decoder), Arm("code", decoder), Arm("plain", decoder)])
    assert served.names == ("plain", "code", "code (2)", "plain (3)")
    with pytest.raises(ValueError, match="every arm drafts"):
        ArmedDecoder([Arm("x", plain_decoder(target_of("llama")))])


def test_a_load_that_is_coming_is_chosen_for_before_its_prompts_are_read() -> None:
    target, room = target_of("llama"), WaitingRoom(9)
    decoder = Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=2))
    served = ArmedDecoder([Arm("skip", decoder, Promise(1.7, 1.6, 1.8))])
    assert served.chooser.arm == 1
    batch = ContinuousBatch(served, room, num_rows=4, max_length=60)
    told = [arrive(room, Request(some_tokens(5, index), Ending(30)))[1] for index in range(4)]
    batch.advance()
    assert served.chooser.arm == 0, "four sequences are going to run, beyond what the profile was tuned for"
    while any(len(each.tokens) < 5 for each in told):
        batch.advance()
        assert served.chooser.arm == 0
