"""Continuous batching: each request is what it would be alone, whoever comes, leaves or fails beside it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.acceptance import Sampling
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import AdaEdl, BetaThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import Draft, LayerSkip, Lookup, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.serving.batch import ContinuousBatch
from decoding.serving.waiting_room import RequestEnd, Stopped, WaitingRoom, WaitingRoomFullError
from decoding.text import Ending, Shaping
from decoding.token_memory import BatchTokens
from tests.support.families import VOCABULARY, target_of
from tests.support.heads import write_heads
from tests.support.served import arrive, passes, serve_all
from tests.support.tiny import tiny_target

SIZES = ((5, 13), (11, 3), (3, 16), (8, 1), (14, 9), (1, 6), (4, 11), (9, 2))
"""Lengths of the prompts and of their continuations."""
DRAFTS: dict[str, Draft] = {
    "plain": PlainDecoding(),
    "sublayers": LayerSkip(skip_attention=(2, 3), skip_mlp=(1, 3)),
    "lookup, then blocks": LayerSkip(skip_attention=(2, 3), skip_mlp=(2, 3), lookup=Lookup(max_tokens=4)),
}
MAX_LENGTH = 24
SKIPPING = LayerSkip(skip_attention=(2, 3), skip_mlp=(1, 3))


def _requests(vocabulary: int = VOCABULARY, **options: Any) -> list[Request]:
    stream = torch.Generator().manual_seed(3)
    return [
        Request(torch.randint(vocabulary, (length,), generator=stream).tolist(), Ending(new_tokens), **options)
        for length, new_tokens in SIZES
    ]


def _alone(decoder: Decoder, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [decoder.generate(request).tokens for request in requests]


@functools.cache
def _plain_texts(family: str) -> list[tuple[int, ...]]:
    return _alone(plain_decoder(target_of(family)), _requests())


def _batch(decoder: Decoder, num_rows: int = 3, limit: int = 64) -> tuple[ContinuousBatch, WaitingRoom]:
    room = WaitingRoom(limit)
    return ContinuousBatch(decoder, room, num_rows=num_rows, max_length=MAX_LENGTH), room


def _come_and_go(decoder: Decoder, requests: Sequence[Request], expected: Sequence[tuple[int, ...]], seed: int) -> None:
    """Let requests arrive, and some be cancelled, at random passes; check each text, or the part before its cancellation."""
    batch, room = _batch(decoder)
    chance = random.Random(seed)
    arrivals = sorted((chance.randrange(40), index) for index in range(len(requests)) for _ in range(2))
    doomed = {chance.randrange(len(arrivals)): chance.randrange(1, 40) for _ in range(4)}
    served: list[Any] = []
    number = 0
    while arrivals or batch.num_running or len(room):
        while arrivals and (arrivals[0][0] <= number or not batch.num_running):
            _, index = arrivals.pop(0)
            served.append((index, *arrive(room, requests[index])))
        for which, when in doomed.items():
            if when == number and which < len(served):
                room.cancel(served[which][1])
        batch.advance()
        number += 1
    for index, job, told in served:
        if told.end == RequestEnd():
            assert tuple(told.tokens) == expected[index]
        else:
            assert told.end == RequestEnd(Stopped.CANCELLED)
            assert job.is_cancelled
            assert tuple(told.tokens) == expected[index][: len(told.tokens)]
    assert sum(told.end == RequestEnd() for *_, told in served) >= len(served) - 4


@pytest.mark.parametrize(
    ("family", "draft"),
    [("llama", "sublayers"), ("gemma3", "lookup, then blocks"), ("bloom", "sublayers")],
)
def test_requests_that_come_and_go_equal_plain_decoding(family: str, draft: str) -> None:
    """Families that attend to everything, mostly within a window, and one whose sequences take turns."""
    rule: DraftLengthRule = AdaEdl(max_tokens=5) if family == "llama" else Fixed(max_tokens=3)
    seed = list(DRAFTS).index(draft)
    _come_and_go(Decoder(target_of(family), DRAFTS[draft], rule), _requests(), _plain_texts(family), seed)


def test_a_freed_row_keeps_nothing_of_an_exit_heads_state(tmp_path: Path) -> None:
    target = tiny_target()
    draft = write_heads(target, tmp_path, [2])[2]
    decoder = Decoder(target, draft, AdaEdl(max_tokens=4), heads=HeadFolder(target, tmp_path))
    requests = _requests(vocabulary=64)
    _come_and_go(decoder, requests, _alone(plain_decoder(target), requests), seed=2)


@pytest.mark.parametrize("draft", ["plain", "lookup, then blocks"])
def test_a_sampled_request_depends_on_its_own_seed_only(draft: str) -> None:
    decoder = Decoder(target_of("llama"), DRAFTS[draft], Fixed(max_tokens=3))

    def requests() -> list[Request]:
        return [
            Request(each.prompt, each.ending, Sampling(torch.Generator().manual_seed(row)))
            for row, each in enumerate(_requests())
        ]

    texts = _alone(decoder, requests())
    batch, room = _batch(decoder)
    assert serve_all(batch, room, requests()) == texts
    assert serve_all(batch, room, reversed(requests())) == texts[::-1]
    assert texts != _plain_texts("llama")


def test_pending_writes_of_a_freed_row_are_done_before_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a position would be written twice at once, in no defined order."""
    finish = BatchTokens.finish

    def checked(self: BatchTokens) -> None:
        slots = [slot for slot, _ in self._host]
        slots += [first + index for first, values in self._device for index in range(values.shape[0])]
        assert len(slots) == len(set(slots))
        finish(self)

    monkeypatch.setattr(BatchTokens, "finish", checked)
    decoder = Decoder(target_of("llama"), SKIPPING, Fixed(max_tokens=3))
    _come_and_go(decoder, _requests(), _plain_texts("llama"), seed=3)


def test_a_persistent_controller_stays_with_its_row_and_a_fresh_one_does_not() -> None:
    rule = BetaThompson(max_tokens=4, persistent=True, costs=RoundCosts(draft_step=0.3, verify=(1.0, 1.05)))
    decoder = Decoder(target_of("llama"), SKIPPING, rule)
    batch, room = _batch(decoder, num_rows=2)
    job, _ = arrive(room, _requests()[0], fresh=True)
    for _ in passes(batch):
        pass
    assert job.fresh
    assert decoder.adapted_rule() is None
    assert serve_all(batch, room, _requests()) == _plain_texts("llama")
    assert decoder.adapted_rule() not in (None, rule)


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("a processor of the user's")
        return scores

    batch, room = _batch(Decoder(target_of("llama"), SKIPPING, Fixed(max_tokens=3)))
    requests = _requests()
    told = [arrive(room, request)[1] for request in requests]
    _, failing = arrive(room, Request(requests[0].prompt, Ending(9), shaping=Shaping((broken,))))
    for _ in passes(batch):
        pass
    assert [tuple(each.tokens) for each in told] == _plain_texts("llama")
    assert failing.end == RequestEnd(Stopped.FAILED, "RuntimeError: a processor of the user's")


def test_a_failed_pass_ends_the_running_requests_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    batch, room = _batch(plain_decoder(target))
    _, first = arrive(room, _requests()[0])
    batch.advance()
    with monkeypatch.context() as patch:
        patch.setattr(type(target.runner), "run_shared_pass", lambda *_, **__: 1 / 0)
        while batch.advance():
            pass
    assert first.end is not None
    assert first.end.stopped is Stopped.FAILED
    assert serve_all(batch, room, _requests()) == _plain_texts("llama")


def test_requests_beyond_the_limits_are_refused() -> None:
    batch, room = _batch(plain_decoder(target_of("llama")), limit=2)
    _, fits = arrive(room, Request([1] * 20, Ending(4)))
    _, long = arrive(room, Request([1] * 20, Ending(5)))
    with pytest.raises(WaitingRoomFullError, match="2 requests are waiting"):
        arrive(room, _requests()[0])
    for _ in passes(batch):
        pass
    assert len(fits.tokens) == 4
    assert long.end == RequestEnd(Stopped.FAILED, "prompt and new tokens are 25, and the server takes 24")


def test_closing_ends_every_request() -> None:
    batch, room = _batch(plain_decoder(target_of("llama")), num_rows=2)
    told = [arrive(room, request)[1] for request in _requests()]
    batch.advance()
    room.close()
    batch.close()
    assert {each.end.stopped for each in told if each.end} == {Stopped.CLOSED}
    assert batch.advance() is False
    with pytest.raises(WaitingRoomFullError, match="shutting down"):
        arrive(room, _requests()[0])
