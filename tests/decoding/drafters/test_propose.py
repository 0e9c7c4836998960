"""Drafts whose length is known are written without a look: the same tokens and states, and no wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation import RepetitionPenaltyLogitsProcessor

from decoding.acceptance import Sampling
from decoding.decode import Request
from decoding.draft_length import Controller, Looking
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.runners.buckets import CPU_BUCKETS
from decoding.runners.contract import Written
from decoding.runners.static import CHAINS, StaticRunner
from decoding.target import Target
from decoding.text import Ending, Shaping, TokenSequence
from tests.support.families import NUM_LAYERS, build, some_tokens
from tests.support.heads import untrained_head
from tests.support.waits import waits

ROOM = 16
GREEDY = Request([0], Ending(ROOM))
RUNNERS: dict[str, Callable[..., Any] | str] = {
    "eager": "eager",
    "static": functools.partial(StaticRunner, compiled=False, buckets=CPU_BUCKETS),
}
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "skip": lambda target: LayerSkipDrafter(target, LayerSkip.blocks((NUM_LAYERS - 2,))),
    "skip from the first": lambda target: LayerSkipDrafter(target, LayerSkip.blocks((0,))),
    "exit with a head": lambda target: EarlyExitDrafter(target, 2, untrained_head(target)),
}


@functools.cache
def target_by(runner: str) -> Target:
    return Target(build("llama"), RUNNERS[runner])


def drafted(
    target: Target, drafter: Drafter, controller: Controller, request: Request = GREEDY
) -> tuple[Proposal, list[int], int]:
    """One draft after a prompt, its tokens, and the number of waits for the device."""
    prompt = some_tokens(9)
    text, cache = TokenSequence(prompt, 9 + ROOM, target.device), target.new_cache(9 + ROOM)
    drafter.prefill(text, cache)
    cache.length = text.length
    text.append([3])
    with waits() as asked:
        draft = drafter.draft(text, cache, controller, request, controller.max_tokens)
    return draft, text.span(text.length, text.length + draft.num_tokens)[0].tolist(), len(asked)


@torch.inference_mode()
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_draft_written_at_once_is_the_one_written_token_by_token(runner: str, kind: str) -> None:
    length = 7
    target = target_by(runner)
    drafter = DRAFTERS[kind](target)
    at_once, tokens, blind = drafted(target, drafter, Controller(length))
    step_by_step, expected, looks = drafted(target, drafter, Looking(length))
    assert (at_once.num_tokens, tokens) == (length, expected)
    assert (blind, looks) == (0, length)
    assert (at_once.states is None) == (step_by_step.states is None)
    if at_once.states is not None and step_by_step.states is not None:
        torch.testing.assert_close(at_once.states, step_by_step.states, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    "request_",
    [
        replace(GREEDY, shaping=Shaping((RepetitionPenaltyLogitsProcessor(1.3),))),
        replace(GREEDY, acceptance=Sampling(torch.Generator().manual_seed(0))),
    ],
    ids=["shaped", "sampled"],
)
def test_shaped_and_sampled_drafts_are_written_token_by_token(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*args: object, **settings: object) -> None:
        raise AssertionError("written at once")

    target = target_by("eager")
    monkeypatch.setattr(Target, "write_greedily", unexpected)
    draft, tokens, _ = drafted(target, DRAFTERS["skip"](target), Controller(4), request_)
    assert draft.num_tokens == len(tokens) == 4
    with pytest.raises(AssertionError, match="written at once"):
        drafted(target, DRAFTERS["skip"](target), Controller(4))


@torch.inference_mode()
def test_a_long_draft_is_put_together_from_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []

    genuine = StaticRunner._piece

    def watched(*arguments: Any) -> Written:
        piece = genuine(*arguments)
        recorded.append(piece.token_ids.shape[0])
        return piece

    monkeypatch.setattr(StaticRunner, "_piece", watched)
    target = target_by("static")
    drafter = DRAFTERS["skip"](target)
    for length in range(1, ROOM):
        recorded.clear()
        drafted(target, drafter, Controller(length))
        assert sum(recorded) == length
        assert len(recorded) == sum(bool(length & count) for count in (*CHAINS, 1))
        assert set(recorded) <= {*CHAINS, 1}
