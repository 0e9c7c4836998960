"""The draft loop of drafters that run a part of the model: one pass per token, until the controller or the limit stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.acceptance import Acceptance, Leaves
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Proposal
from decoding.drafts.trees import CandidateTree, SeenDepth
from decoding.runners.contract import Outputs, Written
from decoding.text import Request, TokenSequence

Step = Callable[[int, bool], Outputs]
"""Runs the draft on the sequence and its first drafts, as many as the first argument says; logits are [1, vocabulary].

The second argument is `looks` of `EagerRunner.run`.
"""

Write = Callable[[int], Written]
"""Runs the draft after the sequence as often as the argument says, greedily."""


def propose(
    step: Step,
    write: Write,
    sequence: TokenSequence,
    cache: KVCache,
    controller: Controller,
    request: Request,
    limit: int,
    states: Sequence[Tensor],
    tree: CandidateTree | None,
) -> Proposal:
    """Write drafts after the sequence, token by token; several at once if greedy and nothing looks at their distributions.

    A `tree` looks at all of them; in a batch, rounds are chains without it. `states` are the boundary states [.., n, hidden] of the
    passes that have run, those whose distributions the controller did not want included.
    """
    acceptance, shaping = request.acceptance, request.shaping
    gatherer = None if tree is None or cache.company is not None else LeafGatherer(tree, acceptance)
    limit = min(limit, controller.limit())
    looks, most_likely = controller.looks_at_drafts, request.takes_most_likely
    if limit > 0 and most_likely and not looks and gatherer is None:
        sequence.write(0, write(limit).token_ids)
        return Proposal(limit, None, _joined(states))
    probabilities: list[Tensor] = []
    num_drafted = 0
    decision = Decision.CONTINUE
    while num_drafted < limit and decision is Decision.CONTINUE:
        outputs = step(num_drafted, looks)
        scores = outputs.logits[0] if most_likely else shaping.one(sequence, num_drafted, outputs.logits)
        if not acceptance.is_greedy:
            scores = _proper(scores)
        known = None if shaping.processors else outputs.confidence
        decision = controller.decide(num_drafted, DraftDistribution(scores, sequence.read, known))
        if decision is Decision.STOP:
            break
        if gatherer is not None:
            token, distribution = gatherer.choose(scores)
        else:
            token, distribution = (outputs.choices, None) if most_likely else acceptance.choose(scores)
        if distribution is not None:
            probabilities.append(distribution)
        sequence.write(num_drafted, token)
        num_drafted += 1
    leaves = None if gatherer is None else gatherer.written(sequence)
    sampled_from = torch.stack(probabilities) if probabilities else None
    return Proposal(num_drafted, sampled_from, _joined(states), leaves=leaves)


def _joined(states: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(states), dim=-2) if states else None


def _proper(scores: Tensor) -> Tensor:
    """Return scores [vocabulary] that have a softmax: equal ones if the draft has overflowed or forbids every token.

    A token may be sampled from any distribution, as the target judges it by the one that it was sampled from.
    """
    return torch.where(torch.logsumexp(scores.float(), dim=-1).isfinite(), scores, torch.zeros_like(scores))


class LeafGatherer:
    """The candidates of one round, depth by depth, from the distributions that the chain is drafted from (our formulation).

    Greedy leaves are the next most likely tokens, sampled ones further samples without replacement: the chain takes the first of
    the candidates. ConfLayers' released code builds the same kind of tree; a tree's size is decided by its document.
    """

    def __init__(self, tree: CandidateTree, acceptance: Acceptance) -> None:
        self._tree, self._acceptance = tree, acceptance
        self._candidates: list[Tensor] = []
        self._seen: list[Tensor] = []
        """Per depth, the probability of the chain's token, then the highest probabilities."""

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
        sequence.write(len(counts), leaves.token_ids)
        return leaves

    def _depths(self, sequence: TokenSequence) -> Sequence[SeenDepth]:
        if not self._tree.weighs:
            return [SeenDepth(1.0, ())] * len(self._candidates)
        numbers: list[Any] = sequence.read(torch.cat(self._seen))
        size = len(numbers) // len(self._seen)
        rows = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        return [SeenDepth(probability, ranked) for probability, *ranked in rows]
