"""Predictions of quantised drafts: recorded rounds are rounds of a real drafter, and replays are what decoding does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed, RoundCosts
from decoding.drafts import Draft, EarlyExit, LayerSkip
from decoding.head_folder import HeadFolder
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.replay import replay
from studies.prediction.survey import Survey
from tests.support.families import build, some_tokens
from tests.support.heads import write_heads

PROMPTS = tuple(tuple(some_tokens(9, seed)) for seed in range(3))
NUM_TOKENS = 40
DRAFTS: dict[str, Draft] = {
    "int8": LayerSkip(bits=8),
    "int4": LayerSkip(bits=4),
    "int8 from fewer ids": LayerSkip(bits=8, ids_below=24),
    "int4, last block": LayerSkip(skip_attention=(4,), skip_mlp=(4,), bits=4),
    "int8, exit": EarlyExit(exit_layer=3, bits=8),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[int, ...]]:
    return [plain_decoder(target).generate(Request(prompt, Ending(NUM_TOKENS))).tokens for prompt in PROMPTS]


def decoded(decoder: Decoder) -> list[Generation]:
    return [decoder.generate(Request(prompt, Ending(NUM_TOKENS))) for prompt in PROMPTS]


@pytest.mark.parametrize("draft", DRAFTS)
def test_replay_has_the_rounds_of_decoding(target: Target, texts: list[tuple[int, ...]], draft: str) -> None:
    rule = Fixed(max_tokens=3)
    recordings = Survey(target, PROMPTS, texts).record(DRAFTS[draft])
    replayed = replay(rule, recordings, RoundCosts(draft_step=0.3, verify=(1.0, 1.1, 1.2, 1.3)))
    generations = decoded(Decoder(target, DRAFTS[draft], rule))
    rounds = sum(len(each.rounds) for each in generations)
    assert abs(replayed.rounds - rounds) <= 0.06 * rounds
    assert replayed.tokens == sum(len(each.tokens) - 1 for each in generations)


def test_int8_agrees_more_than_int4(target: Target, texts: list[tuple[int, ...]]) -> None:
    survey = Survey(target, PROMPTS, texts)
    int8, int4, whole = (survey.record(draft)[0] for draft in (LayerSkip(bits=8), LayerSkip(bits=4), LayerSkip()))
    assert whole.agreement == 1.0 >= int8.agreement > int4.agreement > 0.3
    assert whole.acceptance > int8.acceptance > int4.acceptance


@torch.inference_mode()
def test_exit_with_a_quantised_head_is_recorded_nearly_as_it_drafts(
    target: Target, texts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    head = write_heads(target, tmp_path, [4])[4]
    heads, rule = HeadFolder(target, tmp_path), Fixed(max_tokens=2)
    for bits in (8, 4):
        draft = head.model_copy(update={"bits": bits})
        recordings = Survey(target, PROMPTS, texts, heads=heads).record(draft)
        replayed = replay(rule, recordings, RoundCosts(draft_step=0.3, verify=(1.0, 1.1, 1.2)))
        rounds = sum(len(each.rounds) for each in decoded(Decoder(target, draft, rule, heads=heads)))
        assert abs(replayed.rounds - rounds) <= 0.15 * rounds
