"""Controllers that draft any number of tokens."""

from __future__ import annotations

import random

from decoding.draft_length import Controller, Decision, DraftDistribution


class AnyLength(Controller):
    """Draft a random number of tokens, possibly none, and drop some of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(max_tokens=4)
        self._random = random.Random(seed)

    def limit(self) -> int:
        return self._random.choice([0, 0, 1, 2, 4])

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return self._random.choice([Decision.CONTINUE, Decision.CONTINUE, Decision.LAST, Decision.STOP])
