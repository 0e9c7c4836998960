"""Rounds without drafts: they run the passes of plain decoding and no others, whatever draft the profile has."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from decoding.cache.kv_cache import MOST_PENDING_PIECES
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, LayerSkip, Lookup
from decoding.head_folder import HeadFolder
from decoding.serving.batch import ContinuousBatch
from decoding.serving.waiting_room import WaitingRoom
from decoding.text import Ending
from tests.support.arms import HandChooser, armed
from tests.support.heads import write_heads
from tests.support.served import arrive, passes
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


def _passes_of(decoder: Decoder, chooser: HandChooser | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
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
    served = decoder if chooser is None else armed([decoder], chooser)
    batch = ContinuousBatch(served, room, num_rows=3, max_length=32)
    for request in _requests():
        arrive(room, request)
    with monkeypatch.context() as patch:
        patch.setattr(type(runner), "run", noted)
        patch.setattr(type(runner), "run_shared_pass", noted_share)
        for _ in passes(batch):
            pass
    return seen


@pytest.mark.parametrize("kind", ["head", "lookup, then head", "blocks"])
def test_plain_rounds_run_the_passes_of_plain_decoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, chooser = _decoder(tmp_path, kind), HandChooser(0)
    plain = _passes_of(plain_decoder(decoder.target), None, monkeypatch)
    assert _passes_of(decoder, chooser, monkeypatch) == plain
    drafted = _passes_of(decoder, None, monkeypatch)
    assert drafted != plain, "a draft runs passes of its own"


@pytest.mark.parametrize("kind", ["head", "lookup, then head", "blocks"])
def test_a_head_that_reads_the_prompt_late_drafts_as_one_that_read_it_at_once(kind: str, tmp_path: Path) -> None:
    decoder, chooser, room = _decoder(tmp_path, kind), HandChooser(0), WaitingRoom(9)
    batch = ContinuousBatch(armed([decoder], chooser), room, num_rows=3, max_length=24)
    drafted: list[int] = []
    batch._observer = lambda _, event: drafted.append(getattr(event, "num_accepted", 0))
    for start in (0, 1, 5):
        told = [arrive(room, request)[1] for request in _requests()]
        chooser.arm = 0
        for number in passes(batch):
            chooser.arm = int(number > start)
        expected = [plain_decoder(decoder.target).generate(request).tokens for request in _requests()]
        assert [tuple(each.tokens) for each in told] == expected
    assert any(drafted)


def test_many_plain_rounds_keep_their_states_in_few_pieces(tmp_path: Path) -> None:
    decoder, chooser, room = _decoder(tmp_path, "head"), HandChooser(0), WaitingRoom(9)
    batch = ContinuousBatch(armed([decoder], chooser), room, num_rows=2, max_length=120)
    length = MOST_PENDING_PIECES + 20
    told = [arrive(room, request)[1] for request in _requests(length)[:2]]
    chance = random.Random(0)
    for number in passes(batch):
        chooser.arm = int(number > 2 * MOST_PENDING_PIECES and chance.random() < 0.5)
    for each, request in zip(told, _requests(length), strict=False):
        assert tuple(each.tokens) == plain_decoder(decoder.target).generate(request).tokens
