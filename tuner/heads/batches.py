"""Padded batches of training texts, and the schedule of texts per training step.

The schedule depends on the seed and the step number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.heads.texts import GeneratedText

BUCKET = 16
"""Number of batches whose texts are sorted by length together, so that each batch needs little padding."""


@dataclass(frozen=True)
class TrainingBatch:
    """Right-padded texts without their last token, and the positions that predict response tokens."""

    token_ids: Tensor  # [texts, length]
    first: int
    """First position at which any text's mask is set."""
    response_mask: Tensor  # [texts, length - first], bool

    @classmethod
    def of(cls, texts: Sequence[GeneratedText], device: torch.device) -> TrainingBatch:
        length = max(len(text.prompt) + len(text.response) for text in texts) - 1
        first = min(len(text.prompt) for text in texts) - 1
        token_ids = torch.zeros(len(texts), length, dtype=torch.long)
        mask = torch.zeros(len(texts), length - first, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens = torch.tensor((*text.prompt, *text.response)[:-1])
            token_ids[row, : len(tokens)] = tokens
            mask[row, len(text.prompt) - 1 - first : len(tokens) - first] = True
        return cls(token_ids.to(device), first, mask.to(device))


def batches_by_length(texts: Sequence[GeneratedText], batch_size: int) -> list[list[GeneratedText]]:
    """Return batches of all texts, shortest texts first."""
    ordered = sorted(texts, key=_length)
    return [ordered[first : first + batch_size] for first in range(0, len(ordered), batch_size)]


class Schedule:
    """Shuffled batches of texts of similar length, reshuffled in every epoch."""

    def __init__(self, texts: Sequence[GeneratedText], batch_size: int, seed: int) -> None:
        self._texts = texts
        self._batch_size = batch_size
        self._seed = seed
        self._num_batches = -(-len(texts) // batch_size)
        self._epoch: tuple[int, list[list[GeneratedText]]] = (-1, [])

    def texts_of(self, step: int) -> list[GeneratedText]:
        """Return the texts of `step`, counted from 0."""
        epoch, index = divmod(step, self._num_batches)
        if epoch != self._epoch[0]:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][index]

    def _shuffled(self, epoch: int) -> list[list[GeneratedText]]:
        generator = random.Random(f"{self._seed}/{epoch}")
        order = generator.sample(self._texts, len(self._texts))
        width = BUCKET * self._batch_size
        buckets = [order[first : first + width] for first in range(0, len(order), width)]
        batches = [batch for bucket in buckets for batch in batches_by_length(bucket, self._batch_size)]
        generator.shuffle(batches)
        return batches


def _length(text: GeneratedText) -> int:
    return len(text.prompt) + len(text.response)
