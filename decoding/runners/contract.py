"""What a runner is given and what it returns: a part of the model, a pass's inputs and its outputs.

A runner knows shapes, cache slots and devices. The computation belongs to the part: a runner calls `compute` with
tensors, any number of times, and may pad them, record the computation and replay it. Every runner extends
`decoding.runners.eager.EagerRunner`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decoding.acceptance import accept_greedy, most_likely
from decoding.cache.kv_cache import KVCache
from decoding.draft_length.contract import entropy, top_probability

BlockCall = Callable[[nn.Module, Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block on hidden states [.., width, hidden] and the block's other arguments."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a pass."""

    token_ids: Tensor
    """[batch, width]."""
    positions: Tensor
    """[batch, width]: positions in the sequence."""
    cache: KVCache
    logits_to_keep: int | Tensor
    """Number of final positions that get logits (0 means all), or their indices [n]."""
    states: Tensor | None = None
    """Known states [.., batch, width or width - 1, hidden] that a part resumes from."""
    last: Tensor | None = None
    """Index of the last position that is not padding: [1], or one per sequence; None without padding."""
    masks: tuple[Tensor, ...] = ()
    """One mask [batch, 1, width, num_slots] per kind of layer; empty if the model makes its own."""
    fixed_shape: bool = False
    """True if passes of the same shape are many: whatever plans for a shape may take long."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a pass.

    `logits` are [width or fewer, vocabulary], `states` [.., width, hidden] the states at the part's tap, if any. A
    recorded pass computes the rest too, so that the host need not launch it: see `judged`.
    """

    logits: Tensor
    states: Tensor | None
    best: Tensor | None = None
    """The most likely token ids [width or fewer]."""
    verdict: Tensor | None = None
    """[2 + width - 1]: judges the tokens after the first as greedy drafts (see `decoding.acceptance.accept_greedy`)."""
    looked: Tensor | None = None
    """[width or fewer, 2]: the top probability and the entropy (see `confidence`)."""

    @property
    def choices(self) -> Tensor:
        """The most likely token ids [width or fewer]."""
        return most_likely(self.logits) if self.best is None else self.best

    @property
    def confidence(self) -> Tensor | None:
        """The confidence [2] of the first position, if the pass has computed it."""
        return None if self.looked is None else self.looked[0]

    def of_row(self, row: int, width: int, states: Tensor | None, *, last_only: bool) -> Outputs:
        """Return what belongs to the first `width` positions of a sequence in the batch, or to the last of them."""
        kept = slice(width - 1 if last_only else 0, width)
        return Outputs(
            self.logits[row, kept],
            states,
            None if self.best is None else self.best[row, kept],
            None if self.verdict is None else self.verdict[row, : width + 1],
            None if self.looked is None else self.looked[row, kept],
        )

    def copied(self) -> Outputs:
        rest = self.states, self.best, self.verdict, self.looked
        return Outputs(self.logits.clone(), *map(_copied, rest))


def judged(outputs: Outputs, token_ids: Tensor, last: Tensor | None, *, drafted: bool, looks: bool) -> Outputs:
    """Add what follows from the logits [batch, width or 1, vocabulary] of a pass over `token_ids` [batch, width].

    `last` is the index of the last token without padding: [1], one per sequence, or None without padding. `drafted`
    asks for the verdict on the tokens after the first, `looks` for the confidence.
    """
    best = most_likely(outputs.logits)
    return replace(
        outputs,
        best=best,
        verdict=accept_greedy(token_ids[:, 1:], best, last) if drafted else None,
        looked=confidence(outputs.logits) if looks else None,
    )


def confidence(logits: Tensor) -> Tensor:
    """Return the top probability and the entropy in nats, [.., 2], of the softmax of `logits` [.., vocabulary]."""
    log_probabilities = logits.float().log_softmax(dim=-1)
    return torch.stack([top_probability(log_probabilities), entropy(log_probabilities)], dim=-1)


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that a part drafted one after another.

    `token_ids` are [n], `states` [.., n, hidden] the states at the part's tap, if any.
    """

    token_ids: Tensor
    states: Tensor | None

    def copied(self) -> Written:
        return Written(self.token_ids.clone(), _copied(self.states))


def _copied(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.clone()


WritePiece = Callable[[Tensor, int], Written]
"""Lets a part write at least one token after a token [.., 1], the `index`-th after the first."""


def write_by(piece: WritePiece, token_ids: Tensor, num_tokens: int) -> Written:
    """Write `num_tokens` greedy tokens [.., num_tokens] after `token_ids` [.., 1], piece by piece."""
    pieces: list[Written] = []
    index = 0
    while index < num_tokens:
        pieces.append(piece(token_ids, index))
        token_ids = pieces[-1].token_ids[..., -1:].reshape(token_ids.shape)
        index += pieces[-1].token_ids.shape[-1]
    if len(pieces) == 1:
        return pieces[0]
    states = [each.states for each in pieces if each.states is not None]
    written = torch.cat([each.token_ids for each in pieces], dim=-1)
    return Written(written, torch.cat(states, dim=-2) if states else None)


def one_token(outputs: Outputs) -> Written:
    """Return the most likely token after a pass with logits of one position."""
    return Written(outputs.choices, outputs.states)


@dataclass(frozen=True, slots=True)
class PassRequest:
    """The arguments of a pending `EagerRunner.run` of one sequence."""

    token_ids: Tensor
    """[1, width]."""
    cache: KVCache
    start: int
    last_only: bool
    states: Tensor | None
    looks: bool = False

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]


class Part(Protocol):
    """The model, or a part of it, as a function of tensors."""

    @property
    def is_whole(self) -> bool:
        """True if no part of the model is skipped, so that its logits determine the output."""

    @property
    def verifies(self) -> bool:
        """True if its logits are the whole model's, by which drafts are judged."""

    def compute(self, inputs: Inputs) -> Outputs:
        """Compute logits [batch, width or fewer, vocabulary] in one pass, writing the cache at its window."""
