"""Quality of exits as drafts on given texts: sampling acceptance (exact) and greedy agreement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decoding.exit_heads import ExitFigures
from decoding.target import ExitHead, Target
from decoding.target.states import exit_logits, exit_states
from tuner.heads.batches import TrainingBatch, batches_by_length
from tuner.heads.texts import GeneratedText

Heads = Mapping[int, ExitHead | None]
"""Heads by exit layer; None is an exit without a head."""


@torch.no_grad()
def evaluate(
    target: Target,
    heads: Heads,
    texts: Sequence[GeneratedText],
    batch_size: int,
    on_progress: Callable[[int], None] = lambda num_texts: None,
) -> dict[int, ExitFigures]:
    """Return the figures of each exit over all response tokens of `texts`.

    `on_progress` is called after each batch with the number of texts in it.
    """
    sums = {exit_layer: torch.zeros(2, dtype=torch.float64) for exit_layer in heads}
    num_tokens = 0
    for texts_of_batch in batches_by_length(texts, batch_size):
        batch = TrainingBatch.of(texts_of_batch, target.device)
        states, logits = exit_states(target, batch.token_ids, list(heads), first=batch.first)
        target_logits = logits[batch.response_mask]
        num_tokens += target_logits.shape[0]
        for exit_layer, head in heads.items():
            drafted = exit_logits(target, batch.token_ids, states.pop(exit_layer), head, first=batch.first)
            sums[exit_layer] += summed(target_logits, drafted[batch.response_mask]).cpu()
        on_progress(len(texts_of_batch))
    return {
        exit_layer: ExitFigures(
            acceptance=min(1.0, float(acceptance) / num_tokens), agreement=float(agreed) / num_tokens
        )
        for exit_layer, (acceptance, agreed) in sums.items()
    }


def acceptance(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the acceptance probability of a sampled draft token at temperature 1.

    Logits are [..., vocabulary], the result is [...]. It is the sum over the vocabulary of min(p, q), or 1 minus the total
    variation distance of the target distribution p and the draft distribution q (Leviathan et al., arXiv 2211.17192, corollary
    3.6).
    """
    p, q = (torch.softmax(logits.float(), dim=-1) for logits in (target_logits, draft_logits))
    return torch.minimum(p, q).sum(dim=-1)


def summed(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return acceptance and agreement, each summed over positions: [2]."""
    agrees = target_logits.argmax(dim=-1) == draft_logits.argmax(dim=-1)
    return torch.stack([acceptance(target_logits, draft_logits).double().sum(), agrees.double().sum()])
