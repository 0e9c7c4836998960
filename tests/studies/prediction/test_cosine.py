"""Skips by cosine: the best for each count where that can be tried out, and none of the first block."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import BlockView, Target
from decoding.target.states import exit_states
from decoding.text import Ending
from studies.prediction.proposals import cosine_skips
from studies.prediction.survey import Survey
from tests.support.families import SUPPORTED, some_tokens, target_of
from tests.support.tiny import tiny_target

NUM_LAYERS = 6


def survey_of(target: Target) -> Survey:
    prompts = [some_tokens(8, seed=seed)[:8] for seed in (1, 2)]
    prompts = [[token % 60 for token in prompt] for prompt in prompts]
    texts = [plain_decoder(target).generate(Request(prompt, Ending(17))).tokens for prompt in prompts]
    return Survey(target, prompts, texts)


@torch.inference_mode()
def states_after(survey: Survey, blocks: list[int]) -> torch.Tensor:
    """Return the states after the last block with only `blocks` run."""
    cache, token_ids = survey.rounds
    states = None
    for index in blocks:
        states = BlockView(survey.target, index).rounds(token_ids, cache, states)
    assert states is not None
    return states


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=-1).mean())


def test_sets_are_close_to_the_best_of_their_size() -> None:
    survey = survey_of(tiny_target(NUM_LAYERS))
    true = states_after(survey, list(range(NUM_LAYERS)))

    def closeness(skipped: tuple[int, ...]) -> float:
        return cosine(states_after(survey, [index for index in range(NUM_LAYERS) if index not in skipped]), true)

    for skipped in cosine_skips(survey, [2, 3]):
        all_of_that_size = sorted(closeness(other) for other in combinations(range(1, NUM_LAYERS), len(skipped)))
        assert closeness(skipped) >= all_of_that_size[-3], "among the three best"


def test_counts_are_kept_and_the_first_block_is_always_run() -> None:
    skips = cosine_skips(survey_of(tiny_target(NUM_LAYERS)), [1, 3, 5, 6, 9])
    assert [len(skipped) for skipped in skips] == [1, 3, 5]
    assert all(0 not in skipped and list(skipped) == sorted(set(skipped)) for skipped in skips)


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_block_by_block_the_states_are_those_of_the_target(family: str) -> None:
    target = target_of(family)
    prompt = some_tokens(7, seed=3)
    text = plain_decoder(target).generate(Request(prompt, Ending(9))).tokens
    survey = Survey(target, [prompt], [text])
    with torch.inference_mode():
        token_ids = torch.tensor([[*prompt, *text[:-1]]])
        states, _ = exit_states(target, token_ids, [target.num_layers - 1])
    (true,) = states.values()
    ours = states_after(survey, list(range(target.num_layers - 1)))
    torch.testing.assert_close(ours.flatten(-3, -2), true[..., len(prompt) :, :].flatten(-3, -2), rtol=1e-3, atol=1e-3)
