"""Blocks to skip so that the hidden states stay close to the target's: dynamic programming over blocks (after CLaSp, 2505.24196).

CLaSp does this after each verification, on the last token's states. Here it is done once, on all rounds of a survey, and its
sets are proposals among others. The first block always runs: its output is the first state.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from decoding.target import BlockView
from studies.prediction.survey import JoinedSurvey, Survey


@torch.inference_mode()
def cosine_skips(survey: Survey | JoinedSurvey, counts: Collection[int]) -> list[tuple[int, ...]]:
    """Return, for each of `counts`, the blocks to skip, ascending; counts that exceed the model's blocks are dropped.

    `states[j]` holds the best states after the blocks so far, j of them skipped. The next block either runs on `states[j]` or is
    skipped after `states[j - 1]`, whichever is closer to the target's own states there (mean cosine).
    """
    cache, token_ids = survey.rounds
    target = survey.target
    most = max((count for count in counts if count < target.num_layers), default=0)
    states = {0: BlockView(target, 0).rounds(token_ids, cache, None)}
    skipped: dict[int, tuple[int, ...]] = {0: ()}
    for index in range(1, target.num_layers):
        view = BlockView(target, index)
        run = {count: view.rounds(token_ids, cache, before) for count, before in states.items()}
        true = run[0]
        following: dict[int, Tensor] = {0: true}
        chosen: dict[int, tuple[int, ...]] = {0: ()}
        for count in range(1, min(index, most) + 1):
            choices = []
            if count in run:
                choices.append((_cosine(run[count], true), run[count], skipped[count]))
            choices.append((_cosine(states[count - 1], true), states[count - 1], (*skipped[count - 1], index)))
            _, following[count], chosen[count] = max(choices, key=lambda choice: choice[0])
        states, skipped = following, chosen
    return [skipped[count] for count in counts if count in skipped and count]


def _cosine(states: Tensor, true: Tensor) -> float:
    """Return the mean cosine of states [.., hidden] with the target's."""
    return float(torch.cosine_similarity(states.float(), true.float(), dim=-1).mean())
