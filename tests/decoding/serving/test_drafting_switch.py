"""The choice between drafted and plain rounds: near the better one in every phase, by simulated seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, Lookup
from decoding.serving.batch import ContinuousBatch
from decoding.serving.drafting_switch import DraftingSwitch
from decoding.serving.waiting_room import WaitingRoom
from decoding.text import Ending
from tests.support.families import some_tokens, target_of
from tests.support.served import arrive, passes, serve_all

Phase = tuple[int, int, float, float]
"""Sequences side by side, passes, seconds of a pass with a drafted round each, and tokens of such a round; plain has 1 and 1."""
DELAY = 0.25
"""Share of a phase after which the switch must have found the better arm."""


def _rates(phases: Sequence[Phase], noise: float = 0.05, seed: int = 0) -> list[tuple[float, float, float]]:
    """Run a switch; return for each phase the speed in it and after the delay, over plain decoding's, and the best arm's."""
    switch, chance, found = DraftingSwitch(), random.Random(seed), []
    for num_running, num_passes, seconds, tokens in phases:
        rates = []
        for begin in (0.0, DELAY):
            total_tokens = total_seconds = 0.0
            for _ in range(int(num_passes * (DELAY if begin == 0 else 1 - DELAY))):
                drafts = switch.may_draft
                took = (seconds if drafts else 1.0) * chance.uniform(1 - noise, 1 + noise)
                gained = sum(
                    1 + (chance.random() < tokens % 1) + int(tokens) - 1 if drafts else 1 for _ in range(num_running)
                )
                switch.observe(num_running, num_running, gained, took)
                total_tokens += gained
                total_seconds += took
            rates.append((total_tokens, total_seconds))
        (early_tokens, early_seconds), (late_tokens, late_seconds) = rates
        whole = (early_tokens + late_tokens) / (early_seconds + late_seconds) / num_running
        found.append((whole, late_tokens / late_seconds / num_running, max(tokens / seconds, 1.0)))
    return found


PROSE, CODE = (1.5, 1.2), (1.5, 2.6)
"""Seconds of a drafted round, and its tokens."""


@pytest.mark.parametrize(
    "phases",
    [
        [(1, 4000, *CODE), (1, 4000, *PROSE), (1, 4000, *CODE)],
        [(1, 4000, *PROSE), (8, 4000, *PROSE)],
        [(1, 4000, *CODE), (8, 4000, 3.0, 2.6), (1, 4000, *CODE)],
    ],
    ids=["text changes", "never pays", "load changes"],
)
def test_each_phase_is_near_its_best_arm_and_never_below_plain(phases: Sequence[Phase]) -> None:
    for seed in range(3):
        for whole, late, best in _rates(phases, seed=seed):
            assert late > 0.95 * best
            assert whole > 0.97


@pytest.mark.parametrize(("tuned_batch", "begins_with"), [(1, [True, False]), (8, [True, True])])
def test_rounds_begin_plain_beyond_the_batch_that_was_tuned_for(tuned_batch: int, begins_with: list[bool]) -> None:
    switch, found = DraftingSwitch(tuned_batch), []
    for num_running in (1, 8):
        switch.observe(num_running, num_running, num_running, 1.0)
        found.append(switch.may_draft)
    assert found == begins_with
    for _ in range(400):  # drafts pay at this load
        switch.observe(8, 8, 16 if switch.may_draft else 8, 1.0)
    assert switch.may_draft


def test_arms_that_are_equal_are_not_changed_all_the_time() -> None:
    switch, changes, before = DraftingSwitch(), 0, True
    chance = random.Random(0)
    for _ in range(4000):
        switch.observe(1, 1, 1, chance.uniform(0.95, 1.05))
        changes += switch.may_draft is not before
        before = switch.may_draft
    assert changes < 2 * 4000 / 8 / 4


@pytest.mark.parametrize(
    "draft", [LayerSkip.blocks((2, 3)), LayerSkip(skip_attention=(2, 3), skip_mlp=(2,), lookup=Lookup(max_tokens=4))]
)
def test_text_is_plain_decodings_whenever_the_arm_changes(draft: LayerSkip) -> None:
    target = target_of("llama")
    requests = [Request(some_tokens(5 + index, index), Ending(16)) for index in range(4)]
    switch, room = DraftingSwitch(), WaitingRoom(9)
    decoder = Decoder(target, draft, Fixed(max_tokens=3))
    batch = ContinuousBatch(decoder, room, num_rows=2, max_length=32, switch=switch)
    told = [arrive(room, request)[1] for request in requests]
    chance, drafted = random.Random(1), set()
    for _ in passes(batch):
        switch.may_draft = chance.random() < 0.5
        drafted.add(switch.may_draft)
    expected = [plain_decoder(target).generate(request).tokens for request in requests]
    assert [tuple(each.tokens) for each in told] == expected
    assert drafted == {True, False}
    assert serve_all(batch, room, requests) == expected


def test_a_fresh_job_does_not_depend_on_the_switch() -> None:
    target, switch, room = target_of("llama"), DraftingSwitch(), WaitingRoom(9)
    decoder = Decoder(target, LayerSkip.blocks((2, 3)), Fixed(max_tokens=3))
    batch = ContinuousBatch(decoder, room, num_rows=2, max_length=32, switch=switch)
    lengths = []

    def watch(job: object, event: object) -> None:
        lengths.append(getattr(event, "num_drafted", 0))

    batch._observer = watch
    for fresh in (True, False):
        switch.may_draft = False
        arrive(room, Request([1, 2, 3], Ending(9)), fresh=fresh)
        for _ in passes(batch):
            switch.may_draft = False
        assert any(lengths) is fresh
        lengths.clear()
    assert torch.is_inference_mode_enabled() is False
