"""A prompt read in pieces gives the same results as a prompt read at once."""

from __future__ import annotations

import pytest
import torch

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Fixed
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.exit_heads import new_exit_head
from decoding.rounds import Generation
from decoding.runners.contract import Inputs, Outputs
from decoding.target.parts import ModelPart
from decoding.text import Ending
from tests.support.families import SUPPORTED, some_tokens, target_of

PROMPT = some_tokens(23)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limits passes to five positions; yields their widths."""
    widths: list[int] = []
    honest = ModelPart.compute

    def compute(self: ModelPart, inputs: Inputs) -> Outputs:
        widths.append(inputs.token_ids.shape[1])
        return honest(self, inputs)

    monkeypatch.setattr(ModelPart, "compute", compute)
    monkeypatch.setattr("decoding.runners.eager.MAX_PASS_WIDTH", 5)
    return widths


@pytest.mark.parametrize("family", SUPPORTED)
def test_pieces_give_the_logits_of_the_whole(family: str, monkeypatch: pytest.MonkeyPatch, pieces: list[int]) -> None:
    target, ids = target_of(family), torch.tensor([PROMPT])
    with torch.inference_mode():
        found = target.forward(ids, target.new_cache(len(PROMPT)), 0, last_only=True)
        assert pieces == [5, 5, 5, 5, 3]
        monkeypatch.setattr("decoding.runners.eager.MAX_PASS_WIDTH", 100)
        whole = target.forward(ids, target.new_cache(len(PROMPT)), 0, last_only=True)
    assert torch.allclose(found, whole, atol=1e-4)


def test_head_reads_the_prompt_in_pieces_too(monkeypatch: pytest.MonkeyPatch, pieces: list[int]) -> None:
    target, texts = target_of("llama"), []
    drafter = EarlyExitDrafter(target, 3, new_exit_head(target))
    pieces.clear()  # of its checks
    for longest in (5, 100):
        monkeypatch.setattr("decoding.runners.eager.MAX_PASS_WIDTH", longest)
        request = Request(PROMPT, Ending(20))
        generation = Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), request))
        texts.append([(step.tokens, step.num_accepted) for step in generation.rounds])
        assert generation.tokens == Generation.collect(autoregressive(target, request)).tokens
    assert texts[0] == texts[1]
    assert pieces[:10] == [5, 5, 5, 5, 3] * 2


def test_passes_whose_logits_are_all_wanted_are_whole(pieces: list[int]) -> None:
    target = target_of("llama")
    with torch.inference_mode():
        assert target.forward(torch.tensor([PROMPT]), target.new_cache(len(PROMPT)), 0).shape[0] == len(PROMPT)
    assert pieces == [len(PROMPT)]
