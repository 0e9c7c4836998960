"""Which drafted tokens the target accepts: pure functions of tensors, and the two ways of decoding built on them.

Greedy and sampled decoding are the same loop; an `Acceptance` is all the difference between them. Drafts are judged on the device:
the host waits for it once, for the outcome.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


def most_likely(scores: Tensor) -> Tensor:
    """Token ids [..] of the highest of `scores` [.., vocabulary]."""
    return scores.argmax(dim=-1)


def accept_greedy(drafted: Tensor, choices: Tensor) -> tuple[int, int]:
    """Accept drafts while they equal the target's choice.

    `drafted` [k] token ids, `choices` [k + 1] the target's argmax behind the last verified token and behind every draft.
    Returns how many are accepted and the token that follows them: the correction, or the bonus if all were.
    """
    num_accepted = _num_leading(drafted == choices[: drafted.shape[0]])
    return _read(num_accepted, choices.index_select(0, num_accepted))


def accept_sampled(
    drafted: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): exact in distribution.

    `drafted` [k] token ids sampled from `draft_probabilities` [k, vocabulary]; `target_probabilities` [k + 1, vocabulary].
    Accept draft x with probability min(1, p(x) / q(x)); at the first rejection sample from max(p - q, 0), normalised; after
    full acceptance from p. Returns how many are accepted and the token that follows them.
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
    return _read(num_accepted, torch.multinomial(rest, 1, generator=generator))


def accept_certain(
    drafted: Tensor, target_probabilities: Tensor, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """`accept_sampled` for drafts that were not sampled: the distribution of each is one point, and need not be written down.

    `drafted` [k] token ids, `target_probabilities` [k + 1, vocabulary]. Accept draft x with probability p(x); at the first
    rejection sample from p without x, normalised; after full acceptance from p. Returns as `accept_sampled` does.
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
    return _read(num_accepted, torch.multinomial(rest, 1, generator=generator))


def _num_leading(agrees: Tensor) -> Tensor:
    """[1]: how many values are true before the first that is not."""
    return agrees.long().cumprod(dim=0).sum(dim=0, keepdim=True)


def _read(num_accepted: Tensor, token: Tensor) -> tuple[int, int]:
    """Both [1] on the device, to the host at once."""
    accepted, following = torch.cat([num_accepted, token]).tolist()
    return accepted, following


def _unless_empty(residual: Tensor, target: Tensor) -> Tensor:
    """The residual; or the target's distribution where rounding leaves nothing of a residual that is tiny: then the two
    distributions are equal, and the target's is what to sample.
    """
    return torch.where(residual.sum() > 0, residual, target)


class Acceptance(Protocol):
    """How tokens are chosen and drafts judged. `scores` are processed logits; the draft's chosen token stays on the device."""

    @property
    def is_greedy(self) -> bool:
        """Whether the token chosen is always the likeliest."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """A token id [1] from `scores` [vocabulary], and the probabilities it was sampled from, if it was."""

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        """Judge `drafted` [k] by the target's `scores` [k + 1, vocabulary].

        They were sampled from `probabilities` [k, vocabulary], or not sampled at all if that is None.
        """


class Greedy:
    """Always the likeliest token."""

    is_greedy = True

    def choose(self, scores: Tensor) -> tuple[Tensor, None]:
        """The argmax [1]."""
        return most_likely(scores[None]), None

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        """See `accept_greedy`."""
        return accept_greedy(drafted, most_likely(scores))


class Sampling:
    """Tokens drawn from the softmax of the scores; temperature, top-k and the like have already shaped them."""

    is_greedy = False

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A sampled token id [1] and its distribution [vocabulary]."""
        probabilities = torch.softmax(scores.float(), dim=-1)
        return torch.multinomial(probabilities, 1, generator=self._generator), probabilities

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        """See `accept_sampled`, and `accept_certain` for drafts that were not sampled; without any, sample from the target."""
        target = torch.softmax(scores.float(), dim=-1)
        if probabilities is None:
            return accept_certain(drafted, target, self._generator)
        return accept_sampled(drafted, probabilities, target, self._generator)
