"""Rounds without drafts: they run the passes of plain decoding and no others, whatever draft the profile has."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.acceptance import Sampling
from decoding.cache.kv_cache import MOST_PENDING_PIECES
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import BetaThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import Draft, LayerSkip, Lookup, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.serving.batch import ContinuousBatch
from decoding.serving.control import DraftControl
from decoding.serving.waiting_room import Job, WaitingRoom
from decoding.text import Ending
from tests.support.families import some_tokens, target_of
from tests.support.heads import write_heads
from tests.support.served import HandControl, arrive, passes
from tests.support.tiny import tiny_target


def _decoder(folder: Path, kind: str) -> Decoder:
    target = tiny_target()
    head = write_heads(target, folder, [2])[2]
    drafts: dict[str, Draft] = {
        "head": head,
        "lookup, then head": head.model_copy(update={"lookup": Lookup(max_tokens=4)}),
        "blocks": LayerSkip.blocks((2, 3)),
    }
    return Decoder(target, drafts[kind], Fixed(max_tokens=3), heads=HeadFolder(target, folder))


def _requests(length: int = 12) -> list[Request]:
    return [Request([(7 * row + place) % 60 for place in range(3 + row)], Ending(length)) for row in range(3)]


def _passes_of(decoder: Decoder, control: HandControl | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the passes of three requests side by side: how many positions, and whether the logits of all were needed."""
    seen: list[tuple[Any, ...]] = []
    runner = decoder.target.runner
    run, share = type(runner).run, type(runner).run_shared_pass

    def noted(self: Any, part: Any, token_ids: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(("alone", token_ids.shape[1]))
        return run(self, part, token_ids, *arguments, **options)

    def noted_share(self: Any, part: Any, asked: Mapping[int, Any], memory: Any) -> Any:
        seen.append(("shared", *(each.width for each in asked.values())))
        return share(self, part, asked, memory)

    room = WaitingRoom(9)
    batch = ContinuousBatch(decoder, room, num_rows=3, max_length=32, control=control)
    for request in _requests():
        arrive(room, request)
    with monkeypatch.context() as patch:
        patch.setattr(type(runner), "run", noted)
        patch.setattr(type(runner), "run_shared_pass", noted_share)
        for _ in passes(batch):
            pass
    return seen


@pytest.mark.parametrize("kind", ["lookup, then head", "blocks"])
def test_plain_rounds_run_the_passes_of_plain_decoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, control = _decoder(tmp_path, kind), HandControl()
    plain = _passes_of(plain_decoder(decoder.target), None, monkeypatch)
    assert _passes_of(decoder, control, monkeypatch) == plain
    drafted = _passes_of(decoder, None, monkeypatch)
    assert drafted != plain, "a draft runs passes of its own"


@pytest.mark.parametrize("kind", ["head", "lookup, then head"])
def test_a_head_that_reads_the_prompt_late_drafts_as_one_that_read_it_at_once(kind: str, tmp_path: Path) -> None:
    decoder, control, room = _decoder(tmp_path, kind), HandControl(), WaitingRoom(9)
    batch = ContinuousBatch(decoder, room, num_rows=3, max_length=24, control=control)
    drafted: list[int] = []
    batch._observer = lambda _, event: drafted.append(getattr(event, "num_accepted", 0))
    for start in (0, 1, 5):
        told = [arrive(room, request)[1] for request in _requests()]
        control.drafts = False
        for number in passes(batch):
            control.drafts = number > start
        expected = [plain_decoder(decoder.target).generate(request).tokens for request in _requests()]
        assert [tuple(each.tokens) for each in told] == expected
    assert any(drafted)


def test_many_plain_rounds_keep_their_states_in_few_pieces(tmp_path: Path) -> None:
    decoder, control, room = _decoder(tmp_path, "head"), HandControl(), WaitingRoom(9)
    batch = ContinuousBatch(decoder, room, num_rows=2, max_length=120, control=control)
    length = MOST_PENDING_PIECES + 20
    told = [arrive(room, request)[1] for request in _requests(length)[:2]]
    chance = random.Random(0)
    for number in passes(batch):
        control.drafts = number > 2 * MOST_PENDING_PIECES and chance.random() < 0.5
    for each, request in zip(told, _requests(length), strict=False):
        assert tuple(each.tokens) == plain_decoder(decoder.target).generate(request).tokens


@pytest.mark.parametrize(
    ("family", "num_rows", "kind"),
    [("llama", 2, "copies"), ("llama", 1, "skip"), ("gemma3", 2, "lookup and rule"), ("gemma3", 1, "skip")],
)
def test_text_is_plain_decodings_whenever_rounds_draft(family: str, num_rows: int, kind: str) -> None:
    target, chance, drafted = target_of(family), random.Random(num_rows), 0
    costs = RoundCosts(draft_step=0.4, verify=(1.0, 1.1, 1.2, 1.3, 1.4))
    drafts: dict[str, tuple[Draft, DraftLengthRule]] = {
        "skip": (LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)),
        "copies": (PromptLookup(), Fixed(max_tokens=5)),
        "lookup and rule": (
            LayerSkip(skip_attention=(2, 3), skip_mlp=(2,), lookup=Lookup(max_tokens=4)),
            BetaThompson(max_tokens=4, persistent=True, costs=costs),
        ),
    }
    decoder, control, room = Decoder(target, *drafts[kind]), HandControl(), WaitingRoom(9)
    batch = ContinuousBatch(decoder, room, num_rows=num_rows, max_length=32, control=control)
    requests = [Request(some_tokens(5 + index, index), Ending(20)) for index in range(5)]
    told = [arrive(room, request)[1] for request in requests]
    for _ in passes(batch):
        control.drafts = chance.random() < 0.5
        drafted += control.drafts
    assert [tuple(each.tokens) for each in told] == [plain_decoder(target).generate(each).tokens for each in requests]
    assert drafted


def test_a_fresh_request_drafts_whatever_the_control_says_and_is_not_observed() -> None:
    decoder, seen = Decoder(target_of("llama"), LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)), []

    def samples(control: DraftControl | None) -> list[tuple[int, ...]]:
        room = WaitingRoom(9)
        batch = ContinuousBatch(decoder, room, num_rows=1, max_length=32, control=control)
        request = Request(some_tokens(6, 1), Ending(12), Sampling(torch.Generator().manual_seed(5)))
        rounds: list[tuple[int, ...]] = []
        room.put(Job(request, lambda event: rounds.append(getattr(event, "tokens", ())), fresh=True))
        for _ in passes(batch):
            pass
        return rounds

    always, controlled = samples(None), samples(control := HandControl())
    control.observe = lambda *given: seen.append(given)  # type: ignore[method-assign]
    assert always == controlled == samples(control)
    assert any(len(tokens) > 1 for tokens in always)
    assert not seen
