"""Threads share one decoder, as in a server: no text is wrong and none is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import load_decoder
from decoding.draft_length import BetaThompson, Fixed
from decoding.drafts import Draft, LayerSkip, Lookup
from decoding.head_folder import HeadFolder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.grid import COSTS
from tests.support.heads import write_heads
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

NUM_THREADS, NUM_TEXTS, NUM_NEW = 8, 12, 8
PROMPTS = [[index + 1, index + 7, index + 3, index + 11] for index in range(8)]

DRAFTS: dict[str, Draft] = {
    "blocks": LayerSkip.blocks((3, 4)),
    "lookup, then blocks": LayerSkip(skip_attention=(3,), skip_mlp=(3,), lookup=Lookup(max_tokens=3)),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def targets(model: LlamaForCausalLM) -> dict[str, Target]:
    static = Target(model, lambda masks, device: StaticRunner(masks, device, compiled=False))
    return {"eager": Target(model), "static": static}


@pytest.fixture(scope="module")
def expected(targets: dict[str, Target]) -> list[tuple[int, ...]]:
    plain = plain_decoder(targets["eager"])
    return [plain.generate(Request(prompt, Ending(NUM_NEW))).tokens for prompt in PROMPTS]


def written_by_threads(write: Callable[[Sequence[int]], Sequence[int]]) -> list[tuple[int, ...]]:
    """Let threads share `write`; they take the prompts in turn, and switch so often that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return list(pool.map(lambda number: tuple(write(PROMPTS[number % len(PROMPTS)])), range(NUM_TEXTS)))
    finally:
        sys.setswitchinterval(before)


def all_right(decoder: Decoder, expected: list[tuple[int, ...]]) -> None:
    def write(prompt: Sequence[int]) -> tuple[int, ...]:
        return decoder.generate(Request(prompt, Ending(NUM_NEW))).tokens

    assert written_by_threads(write) == [expected[number % len(PROMPTS)] for number in range(NUM_TEXTS)]


@pytest.mark.parametrize(("draft", "runner"), [("lookup, then blocks", "eager"), ("blocks", "static")])
def test_threads_share_a_decoder(
    targets: dict[str, Target], expected: list[tuple[int, ...]], draft: str, runner: str
) -> None:
    all_right(Decoder(targets[runner], DRAFTS[draft], Fixed(max_tokens=4)), expected)


def test_sequences_at_the_same_time_have_controllers_of_their_own(targets: dict[str, Target]) -> None:
    rule = BetaThompson(max_tokens=4, costs=COSTS, persistent=True)
    decoder = Decoder(targets["eager"], DRAFTS["blocks"], rule)
    first, second = (decoder.steps(Request(prompt, Ending(NUM_NEW))) for prompt in PROMPTS[:2])
    next(first), next(second)
    kept = decoder._kept[0]
    assert not kept, "both are in use"
    list(second), list(first)
    assert len(kept) == 2
    latest = kept[-1]
    decoder.generate(Request(PROMPTS[2], Ending(NUM_NEW)))
    assert kept[-1] is latest, "a later sequence goes on with one of them"
    assert len(kept) == 2


def test_threads_share_a_decoder_in_generate(model: LlamaForCausalLM, expected: list[tuple[int, ...]]) -> None:
    decoder = load_decoder(profile_of(model))

    def write(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = decoder.generate(model, ids, do_sample=False, max_new_tokens=NUM_NEW, pad_token_id=63)
        return list(output[0, len(prompt) :].tolist())  # type: ignore[index]

    assert written_by_threads(write) == [expected[number % len(PROMPTS)] for number in range(NUM_TEXTS)]


def test_threads_share_a_decoder_with_trained_heads(
    targets: dict[str, Target], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    target = targets["static"]
    exits = write_heads(target, tmp_path, [3])
    all_right(Decoder(target, exits[3], Fixed(max_tokens=4), heads=HeadFolder(target, tmp_path)), expected)
