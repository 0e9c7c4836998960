"""Acceptance of drafted tokens: pure functions of tensors, and the two decoding modes built on them.

Greedy decoding and sampling share one loop and differ only in their `Acceptance`. Everything here runs on the device
without waiting for it. The host reads a *verdict* in one transfer: a tensor [2 + k] that holds the number of accepted
drafts, the token after them, and the k drafts.

A drafted chain may have side leaves (`Leaves`): further candidates at each depth. A round with leaves has a *tree verdict*, a
tensor [4 + k]: the number of accepted drafts of the chain, the index of the accepted leaf or -1, the token after the accepted
drafts (the leaf, if there is one), the token after the leaf, and the k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaves:
    """Side leaves of a drafted chain, in order of depth: candidates beside each draft, which nothing follows."""

    token_ids: Tensor
    """[m]"""
    counts: Sequence[int]
    """Number of leaves beside each of the k drafts."""

    @property
    def num_leaves(self) -> int:
        return sum(self.counts)

    @property
    def depths(self) -> list[int]:
        """Index of the draft that each leaf stands beside."""
        return [depth for depth, count in enumerate(self.counts) for _ in range(count)]

    def positions(self, start: int) -> list[int]:
        """Return the positions in the sequence of a pass over a token at `start`, the k drafts and the leaves."""
        chain = range(start, start + 1 + len(self.counts))
        return [*chain, *(start + 1 + depth for depth in self.depths)]

    @cached_property
    def table(self) -> Tensor:
        """Indices [k, most leaves at a depth] of the leaves by depth; -1 where there is none."""
        rows, end = list[list[int]](), 0
        for count in self.counts:
            rows.append([*range(end, end + count), *[-1] * (max(self.counts) - count)])
            end += count
        return torch.tensor(rows, dtype=torch.long, device=self.token_ids.device)


def most_likely(scores: Tensor) -> Tensor:
    """Return the token ids [..] with the highest of `scores` [.., vocabulary]."""
    return scores.max(dim=-1).indices  # on a CPU three times as fast as `argmax`


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw a token id [.., 1] from each distribution of `probabilities` [.., vocabulary], which need not be normalised.

    The index of the largest p / e with e ~ Exp(1) has the distribution p (the exponential race, as in
    `torch.multinomial`, which also checks its arguments and waits for the result).
    """
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(dim=-1, keepdim=True)


def sample_several(probabilities: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `count` different token ids [count] from `probabilities` [vocabulary], one after another without replacement.

    The order of arrival in the race of `sample`. Tokens without probability come last.
    """
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).topk(min(count, probabilities.shape[-1])).indices


def accept_greedy(drafted: Tensor, choices: Tensor, num_drafted: Tensor | None = None) -> Tensor:
    """Accept drafted tokens while they equal the target's choice.

    `drafted` [.., k] are token ids; `choices` [.., k + 1] are the target's argmax after the last verified token and
    after every draft. Only the first `num_drafted` [..] drafts count, or all if it is None. Return the verdict
    [.., 2 + k]; the token after the accepted drafts is the correction, or the bonus token if all were accepted.
    """
    agrees = drafted == choices[..., : drafted.shape[-1]]
    if num_drafted is not None:
        agrees = agrees & (torch.arange(drafted.shape[-1], device=drafted.device) < num_drafted[..., None])
    num_accepted = _num_leading(agrees)
    return torch.cat([num_accepted, choices.gather(-1, num_accepted), drafted], dim=-1)


def accept_sampled(
    drafted: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Accept or resample drafted tokens without changing the target's distribution.

    Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). `drafted` [k] are token
    ids sampled from `draft_probabilities` [k, vocabulary]; `target_probabilities` is [k + 1, vocabulary].

    Accept draft x with probability min(1, p(x) / q(x)). At the first rejection sample from max(p - q, 0), normalised;
    after full acceptance sample from p. Return the verdict [2 + k].
    """
    num_drafted = drafted.shape[0]
    rows = torch.arange(num_drafted, device=drafted.device)
    p, q = target_probabilities[rows, drafted], draft_probabilities[rows, drafted]
    draws = torch.rand(num_drafted, device=drafted.device, generator=generator)
    num_accepted = _num_leading(draws * q < p)
    rest = target_probabilities.index_select(0, num_accepted)[0]
    if num_drafted:
        of_rejected = draft_probabilities.index_select(0, num_accepted.clamp_max(num_drafted - 1))[0]
        residual = _unless_empty((rest - of_rejected).clamp_min(0.0), rest)
        rest = torch.where(num_accepted < num_drafted, residual, rest)
    return torch.cat([num_accepted, sample(rest, generator), drafted])


def accept_certain(drafted: Tensor, target_probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Apply `accept_sampled` to drafts with one-point distributions, which need not be materialised.

    `drafted` [k] are token ids; `target_probabilities` is [k + 1, vocabulary]. Accept draft x with probability p(x).
    At the first rejection sample from p without x, normalised; after full acceptance sample from p. Return as
    `accept_sampled` does.
    """
    num_drafted = drafted.shape[0]
    p = target_probabilities[torch.arange(num_drafted, device=drafted.device), drafted]
    draws = torch.rand(num_drafted, device=drafted.device, generator=generator)
    num_accepted = _num_leading(draws < p)
    rest = target_probabilities.index_select(0, num_accepted)[0]
    if num_drafted:
        rejected = drafted.index_select(0, num_accepted.clamp_max(num_drafted - 1))
        residual = _unless_empty(rest.index_fill(0, rejected, 0.0), rest)
        rest = torch.where(num_accepted < num_drafted, residual, rest)
    return torch.cat([num_accepted, sample(rest, generator), drafted])


def accept_leaf_greedy(drafted: Tensor, leaves: Leaves, choices: Tensor) -> Tensor:
    """Accept drafts of a chain while they equal the target's choice, then a leaf that equals it.

    `drafted` [k] are token ids; `choices` [k + 1 + m] are the target's argmax after the last verified token, after every draft and
    after every leaf. Return the tree verdict [4 + k].
    """
    num_accepted, token = accept_greedy(drafted, choices[: len(drafted) + 1])[:2].split(1)
    beside = leaves.table.index_select(0, num_accepted.clamp_max(len(drafted) - 1))[0]
    equals = (leaves.token_ids[beside] == token) & (beside >= 0) & (num_accepted < len(drafted))
    # By a tensor of one index: one without dimensions is read by the host, which waits for the device.
    index = torch.where(equals.any(), beside.gather(0, equals.long().argmax(0, keepdim=True)), -1)
    after = choices.gather(0, len(drafted) + 1 + index.clamp_min(0))
    return torch.cat([num_accepted, index, token, after, drafted])


def accept_leaf_sampled(
    drafted: Tensor,
    leaves: Leaves,
    draft_probabilities: Tensor,
    target_probabilities: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Accept drafts of a chain as `accept_sampled` does, then one of the leaves beside the first rejected draft.

    Recursive rejection sampling (SpecInfer, arXiv 2305.09781; without replacement: Jeon et al., arXiv 2402.14160). `drafted`
    [k] and the leaves beside each draft were sampled from `draft_probabilities` [k, vocabulary], one after another without
    replacement. `target_probabilities` [k + 1 + m, vocabulary] are the target's after the last verified token, after every draft
    and after every leaf.

    After each rejected candidate x, p becomes max(p - q, 0), normalised, and q loses x. The next candidate y is accepted with
    probability min(1, p(y) / q(y)). If none is left, the token is sampled from p. Return the tree verdict [4 + k].
    """
    num_drafted = len(drafted)
    rows = torch.arange(num_drafted, device=drafted.device)
    p, q = target_probabilities[rows, drafted], draft_probabilities[rows, drafted]
    draws = torch.rand(num_drafted, device=drafted.device, generator=generator)
    num_accepted = _num_leading(draws * q < p)
    row = num_accepted.clamp_max(num_drafted - 1)
    rest, rejected = target_probabilities.index_select(0, num_accepted)[0], drafted.index_select(0, row)
    others = draft_probabilities.index_select(0, row)[0]
    is_rejected = (num_accepted < num_drafted)[0]
    rest = torch.where(is_rejected, _residual(rest, others), rest)
    others = _without(others, rejected)
    found, token = torch.full_like(num_accepted, -1), torch.zeros_like(num_accepted)
    for beside in leaves.table.index_select(0, row)[0].split(1):
        leaf = leaves.token_ids.index_select(0, beside.clamp_min(0))
        # A token without probability was not sampled: it fills up where the draft has too few tokens.
        is_candidate = is_rejected & (beside >= 0) & (found < 0) & (others[leaf] > 0)
        draw = torch.rand(1, device=drafted.device, generator=generator)
        accepted = is_candidate & (draw * others[leaf] < rest[leaf])
        found, token = torch.where(accepted, beside, found), torch.where(accepted, leaf, token)
        goes_on = is_candidate & ~accepted
        rest = torch.where(goes_on, _residual(rest, others), rest)
        others = torch.where(goes_on, _without(others, leaf), others)
    token = torch.where(found < 0, sample(rest, generator), token)
    after = sample(target_probabilities.index_select(0, num_drafted + 1 + found.clamp_min(0))[0], generator)
    return torch.cat([num_accepted, found, token, after, drafted])


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(p - q, 0), normalised: the distribution after the rejection of a sample of `draft`."""
    residual = _unless_empty((target - draft).clamp_min(0.0), target)
    return residual / residual.sum()


def _without(probabilities: Tensor, token_ids: Tensor) -> Tensor:
    """Return the distribution [vocabulary] without `token_ids` [1], normalised; zeros if nothing is left."""
    rest = probabilities.index_fill(0, token_ids, 0.0)
    return rest / rest.sum().clamp_min(torch.finfo(rest.dtype).tiny)


def _num_leading(agrees: Tensor) -> Tensor:
    """Return the number [.., 1] of leading true values along the last dimension."""
    return agrees.long().cumprod(dim=-1).sum(dim=-1, keepdim=True)


def _unless_empty(residual: Tensor, target: Tensor) -> Tensor:
    """Return `residual`, or `target` if rounding leaves no mass in the residual.

    A residual without mass means that both distributions are equal, so sampling from the target is correct.
    """
    return torch.where(residual.sum() > 0, residual, target)


class Greedy:
    """The most likely token is always chosen.

    Here and in `Sampling`, `scores` are processed logits. Tokens and verdicts stay on the device.
    """

    is_greedy = True

    def choose(self, scores: Tensor) -> tuple[Tensor, None]:
        """Choose a token from `scores` [vocabulary].

        Return its id [1] and the distribution [vocabulary] it was sampled from, or None if it was not sampled.
        """
        return most_likely(scores[None]), None

    def choose_several(self, scores: Tensor, count: int) -> tuple[Tensor, None]:
        """Choose a token and up to `count` other candidates from `scores` [vocabulary].

        Return their ids [1 + count or fewer], the token first, and the distribution that they were sampled from without
        replacement, or None.
        """
        return scores.topk(min(1 + count, scores.shape[-1])).indices, None

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> Tensor:
        """Judge `drafted` [k] by the target's `scores` [k + 1, vocabulary].

        The drafts were sampled from `probabilities` [k, vocabulary]; None means that they were not sampled. Return
        the verdict [2 + k].
        """
        return accept_greedy(drafted, most_likely(scores))

    def accept_tree(self, drafted: Tensor, leaves: Leaves, probabilities: Tensor | None, scores: Tensor) -> Tensor:
        """Judge a chain `drafted` [k] and its leaves by the target's `scores` [k + 1 + m, vocabulary].

        Drafts and leaves were sampled from `probabilities` [k, vocabulary]; None if greedy. Return the tree verdict [4 + k].
        """
        return accept_leaf_greedy(drafted, leaves, most_likely(scores))


class Sampling:
    """Sampling from the softmax of the scores, which temperature, top-k and the like have already shaped."""

    is_greedy = False

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(scores.float(), dim=-1)
        return sample(probabilities, self._generator), probabilities

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> Tensor:
        """Apply `accept_sampled`, or `accept_certain` if `probabilities` is None.

        Without drafts the token is sampled from the target.
        """
        target = torch.softmax(scores.float(), dim=-1)
        if probabilities is None:
            return accept_certain(drafted, target, self._generator)
        return accept_sampled(drafted, probabilities, target, self._generator)

    def choose_several(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(scores.float(), dim=-1)
        return sample_several(probabilities, 1 + count, self._generator), probabilities

    def accept_tree(self, drafted: Tensor, leaves: Leaves, probabilities: Tensor | None, scores: Tensor) -> Tensor:
        assert probabilities is not None, "leaves are sampled from the distributions of the chain"
        return accept_leaf_sampled(
            drafted, leaves, probabilities, torch.softmax(scores.float(), dim=-1), self._generator
        )


Acceptance = Greedy | Sampling
"""How tokens are chosen and drafts are judged."""
