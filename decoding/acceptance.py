"""Acceptance of drafted tokens: pure functions of tensors, and the two decoding modes built on them.

Greedy decoding and sampling share one loop and differ only in their `Acceptance`. Everything here runs on the device
without waiting for it. The host reads a *verdict* in one transfer: a tensor [2 + k] that holds the number of accepted
drafts, the token after them, and the k drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> Tensor:
        """Judge `drafted` [k] by the target's `scores` [k + 1, vocabulary].

        The drafts were sampled from `probabilities` [k, vocabulary]; None means that they were not sampled. Return
        the verdict [2 + k].
        """
        return accept_greedy(drafted, most_likely(scores))


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


Acceptance = Greedy | Sampling
"""How tokens are chosen and drafts are judged."""
