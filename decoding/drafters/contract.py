"""The contract of a drafter: propose tokens behind the text, and say how the target may verify them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.exit_heads import ExitHeads
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed tokens, already written behind the text, and what the verification needs of them."""

    num_tokens: int
    probabilities: Tensor | None
    """[num_tokens, vocabulary] each token was sampled from; None when none was sampled: decoding is greedy, or the tokens were
    looked up, or nothing was drafted."""
    states: Tensor | None = None
    """Boundary states [.., num_tokens or num_tokens + 1, hidden] for prefix reuse, or None to verify from the first block."""
    looked_up: bool = False
    """Whether the tokens were copied from the text, not computed."""
    steered: bool = True
    """Whether the controller was asked about this round; then, and only then, it is told what came of it."""


class Drafter(Protocol):
    """Proposes tokens for `decoding.decode.speculative`. What it must remember of a text from round to round it keeps with
    the text (an index of its n-grams) or in the text's cache (the branch of an exit head), so that one drafter serves any number
    of texts.
    """

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        """The target's logits [1, vocabulary] behind the prompt; called once a text, to take of the prompt what drafting needs."""

    def draft(
        self,
        text: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Write at most `limit` tokens behind the text; must leave `cache.length` as it is.

        As many as `controller` allows, or as the drafter itself will, and then the draft is not `steered`.
        """

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Tensor:
        """The target's logits [num_tokens + 1, vocabulary] behind the text's last token and behind each draft."""


class NewDrafter(Protocol):
    """Builds the drafter of one kind; `decoding.drafts.KINDS` names it."""

    def __call__(self, target: Target, draft: Any, *, prefix_reuse: bool, heads: ExitHeads | None) -> Drafter | None:
        """Return the drafter of `draft`, which comes without the lookup before it.

        Raises ValueError for layers that `target` does not have, and `ExitHeadError` for a head that `heads` does not hold.
        """
