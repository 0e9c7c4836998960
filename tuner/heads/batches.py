"""Texts as padded batches, and which texts each training step sees: the seed and the step alone decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.heads.texts import WrittenText

BUCKET = 16
"""Batches whose texts are sorted by length together, so that those of one batch need little padding."""


@dataclass(frozen=True)
class TrainingBatch:
    """Texts without their last token, padded on the right, and the positions at which a token of the response is foretold."""

    token_ids: Tensor  # [texts, length]
    first: int
    """The first position that counts in any of the texts."""
    counts: Tensor  # [texts, length - first], bool

    @classmethod
    def of(cls, texts: Sequence[WrittenText], device: torch.device) -> TrainingBatch:
        """The batch of these texts."""
        length = max(len(text.prompt) + len(text.response) for text in texts) - 1
        first = min(len(text.prompt) for text in texts) - 1
        token_ids = torch.zeros(len(texts), length, dtype=torch.long)
        counts = torch.zeros(len(texts), length - first, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens = torch.tensor((*text.prompt, *text.response)[:-1])
            token_ids[row, : len(tokens)] = tokens
            counts[row, len(text.prompt) - 1 - first : len(tokens) - first] = True
        return cls(token_ids.to(device), first, counts.to(device))


def batches_in_order(texts: Sequence[WrittenText], batch_size: int) -> list[list[WrittenText]]:
    """All texts once, the shortest first."""
    ordered = sorted(texts, key=_length)
    return [ordered[first : first + batch_size] for first in range(0, len(ordered), batch_size)]


class Schedule:
    """Every pass over the texts shuffles them anew into batches of like lengths."""

    def __init__(self, texts: Sequence[WrittenText], batch_size: int, seed: int) -> None:
        self._texts = texts
        self._batch_size = batch_size
        self._seed = seed
        self._num_batches = -(-len(texts) // batch_size)
        self._epoch: tuple[int, list[list[WrittenText]]] = (-1, [])

    def texts_of(self, step: int) -> list[WrittenText]:
        """The texts of a step, counted from 0."""
        epoch, place = divmod(step, self._num_batches)
        if epoch != self._epoch[0]:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][place]

    def _shuffled(self, epoch: int) -> list[list[WrittenText]]:
        generator = random.Random(f"{self._seed}/{epoch}")
        order = generator.sample(self._texts, len(self._texts))
        width = BUCKET * self._batch_size
        buckets = [order[first : first + width] for first in range(0, len(order), width)]
        batches = [batch for bucket in buckets for batch in batches_in_order(bucket, self._batch_size)]
        generator.shuffle(batches)
        return batches


def _length(text: WrittenText) -> int:
    return len(text.prompt) + len(text.response)
