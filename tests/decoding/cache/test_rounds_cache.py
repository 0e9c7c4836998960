"""Many rounds drafted at once with known tokens equal the same rounds drafted one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.cache.rounds_cache import LEAST_IN_A_PASS, LEAST_KEPT, MemoryLimits, RoundsCache
from decoding.target import DraftView, Target
from tests.support.families import NUM_LAYERS, SUPPORTED, some_tokens, target_of

SKIPS = {
    "blocks": ((1, 3), (1, 3)),
    "attention": ((1, 2), ()),
    "mlp": ((), (0, 3)),
    "exit": (range(2, NUM_LAYERS), range(2, NUM_LAYERS)),
    "nothing": ((), ()),
}
DEPTH = 4
TEXTS = (some_tokens(13, seed=1), some_tokens(21, seed=2))
STARTS = ((0, 5), (0, 8), (1, 3), (1, 17))  # of text, position
LIMITS = {
    "kept": MemoryLimits(),
    "gathered": MemoryLimits(kept=0),
    "in chunks": MemoryLimits(kept=0, gathered=3 * (17 + DEPTH) * 2 * 2 * 8 * 4),
    "one by one": MemoryLimits(kept=0, gathered=0),
}


def _read(target: Target, text: list[int]) -> KVCache:
    cache = target.new_cache(len(text) + DEPTH)
    target.forward(torch.tensor([text]), cache, 0)
    return cache


def _draft_one_round(target: Target, skip: str, text: list[int], start: int) -> Tensor:
    """Return logits [DEPTH, vocabulary] of one round, drafted token by token after the target's own keys and values."""
    cache = _read(target, text)
    view = DraftView(target, *SKIPS[skip], keep_boundary=False)
    steps = range(start, start + DEPTH)
    return torch.cat(
        [view.run(torch.tensor([text[position : position + 1]]), cache, position).logits for position in steps]
    )


@pytest.mark.parametrize("family", SUPPORTED)
@torch.inference_mode()
def test_rounds_at_once_are_the_rounds_one_by_one(family: str) -> None:
    """Every draft with all memory, and one with less."""
    target = target_of(family)
    caches = [_read(target, text) for text in TEXTS]
    sequences = [(cache, [start for of, start in STARTS if of == text]) for text, cache in enumerate(caches)]
    token_ids = torch.tensor([TEXTS[text][start : start + DEPTH] for text, start in STARTS])
    for skip in SKIPS:
        alone = [_draft_one_round(target, skip, TEXTS[text], start) for text, start in STARTS]
        view = DraftView(target, *SKIPS[skip], keep_boundary=False)
        for limits in LIMITS if skip == "blocks" else ["kept"]:
            rounds = RoundsCache(sequences, DEPTH, LIMITS[limits])
            for _ in range(2):  # a pass leaves nothing that the next one sees
                together = torch.cat(list(view.rounds(token_ids, rounds)))
                torch.testing.assert_close(together, torch.stack(alone), rtol=1e-3, atol=1e-3, msg=f"{skip}, {limits}")


@pytest.mark.parametrize("kept", [MemoryLimits().kept, 0])
@torch.inference_mode()
def test_a_pass_returns_no_more_than_the_limit(kept: int) -> None:
    target = target_of("llama")
    row_bytes = DEPTH * target.config.vocab_size * 4
    limits = MemoryLimits(kept, returned=2 * row_bytes)
    sequences = [(_read(target, TEXTS[0]), [0, 5, 8]), (_read(target, TEXTS[1]), [3, 17])]
    rounds = RoundsCache(sequences, DEPTH, limits, output_bytes=row_bytes)
    token_ids = torch.tensor(
        [TEXTS[0][start : start + DEPTH] for start in (0, 5, 8)] + [TEXTS[1][3:7], TEXTS[1][17:21]]
    )
    view = DraftView(target, *SKIPS["blocks"], keep_boundary=False)

    chunks = list(view.rounds(token_ids, rounds))

    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    whole = RoundsCache(
        [(_read(target, TEXTS[0]), [0, 5, 8]), (_read(target, TEXTS[1]), [3, 17])], DEPTH, MemoryLimits(kept)
    )
    torch.testing.assert_close(torch.cat(chunks), torch.cat(list(view.rounds(token_ids, whole))), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_rounds_need_a_round_and_a_token() -> None:
    target = target_of("llama")
    with pytest.raises(ValueError, match="got 0 of 4"):
        RoundsCache([], 4)
    with pytest.raises(ValueError, match="got 1 of 0"):
        RoundsCache([(_read(target, TEXTS[0]), [5])], 0)
    with pytest.raises(ValueError, match="at least one known token"):
        RoundsCache([(_read(target, TEXTS[0]), [0])], 4)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (32 * 2**30, MemoryLimits()),
        (640_000_000, MemoryLimits(kept=80_000_000, gathered=40_000_000, returned=40_000_000)),
        (30_000_000, MemoryLimits(LEAST_KEPT, LEAST_IN_A_PASS, LEAST_IN_A_PASS)),
    ],
)
def test_limits_follow_from_the_size_of_the_model(weights: int, expected: MemoryLimits) -> None:
    assert MemoryLimits.beside(weights) == expected
