"""Side leaves of a drafted chain, gathered from the distributions that the chain is drafted from (our formulation).

Greedy leaves are the next most likely tokens, sampled ones further samples without replacement: the chain takes the first of the
candidates. ConfLayers' released code builds the same kind of tree; a tree's size is decided by its document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.acceptance import Acceptance, Leaves
from decoding.cache.kv_cache import KVCache
from decoding.drafts.trees import CandidateTree, SeenDepth
from decoding.text import TokenSequence


class LeafGatherer:
    """The candidates of one round, depth by depth."""

    def __init__(self, tree: CandidateTree, acceptance: Acceptance) -> None:
        self._tree, self._acceptance = tree, acceptance
        self._candidates: list[Tensor] = []
        self._seen: list[Tensor] = []
        """Per depth, the probability of the chain's token, then the highest probabilities."""

    @classmethod
    def of(cls, tree: CandidateTree | None, acceptance: Acceptance, cache: KVCache) -> LeafGatherer | None:
        """Return the gatherer of a round; None without a tree, and in a batch, whose rounds are chains."""
        return None if tree is None or cache.company is not None else cls(tree, acceptance)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the chain's token [1] from `scores` [vocabulary] and keep the others; return as `Acceptance.choose` does."""
        token_ids, distribution = self._acceptance.choose_several(scores, self._tree.most_per_depth)
        self._candidates.append(token_ids)
        if self._tree.weighs:
            probabilities = torch.softmax(scores.float(), dim=-1) if distribution is None else distribution
            ranked = probabilities.topk(len(token_ids)).values
            self._seen.append(torch.cat([probabilities[token_ids[:1]], ranked]))
        return token_ids[:1], distribution

    def written(self, sequence: TokenSequence) -> Leaves | None:
        """Write the leaves after the drafts, and return them; None if the tree has none in this round."""
        if not self._candidates:
            return None
        room = len(self._candidates[0]) - 1
        wanted = self._tree.counts(self._depths(sequence), is_greedy=self._acceptance.is_greedy)
        counts = [min(count, room) for count in wanted]
        if not sum(counts):
            return None
        pairs = zip(self._candidates, counts, strict=True)
        leaves = Leaves(torch.cat([token_ids[1 : 1 + count] for token_ids, count in pairs]), counts)
        sequence.write_draft(len(counts), leaves.token_ids)
        return leaves

    def _depths(self, sequence: TokenSequence) -> Sequence[SeenDepth]:
        if not self._tree.weighs:
            return [SeenDepth(1.0, ())] * len(self._candidates)
        numbers: list[Any] = sequence.read(torch.cat(self._seen))
        size = len(numbers) // len(self._seen)
        rows = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        return [SeenDepth(probability, ranked) for probability, *ranked in rows]
