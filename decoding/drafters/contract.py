"""The contract of a drafter: propose tokens after the sequence, and verify them with the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.errors import UnsupportedRequestError
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Request, TokenSequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed tokens, already written after the sequence, with the facts that verification needs."""

    num_tokens: int
    probabilities: Tensor | None
    """Distributions [num_tokens, vocabulary] that the tokens were sampled from; None if greedy, looked up, or nothing drafted."""
    states: Tensor | None = None
    """Boundary states [.., num_tokens or num_tokens + 1, hidden] for prefix reuse, or None to verify from the first block."""
    looked_up: bool = False
    """True if the tokens were copied from the sequence, not computed."""
    steered: bool = True
    """True if the controller was asked about this round; only then it is told the number of accepted tokens."""


Copy = Callable[[Sequence[int], int], list[int] | None]
"""Maps the drafts so far and a number of tokens to the tokens that may follow them, not more than that, or to None."""


def check_head_has_read(cache: KVCache) -> None:
    """Raise `UnsupportedRequestError` unless the head of a draft knows every position that the cache holds."""
    if cache.length and (not cache.has_branch or cache.branch.num_known != cache.length):
        raise UnsupportedRequestError(
            "the head of the draft has not read these turns: pass a past_key_values that this profile's decoder has filled, or none"
        )


def read_prompt(target: Target, sequence: TokenSequence, cache: KVCache) -> Tensor:
    """Run the target over what the cache lacks of the prompt, unless it is known; return the logits [1, vocabulary] after it."""
    known = sequence.known
    if known is not None and known.is_read:
        return known.recall(cache)
    logits = target.forward(sequence.span(cache.length, sequence.length), cache, cache.length, last_only=True)
    if known is not None:
        cache.length = sequence.length
        known.keep(cache, logits)
    return logits


class Drafter:
    """Proposes tokens for `decoding.decode.speculative`; one drafter serves any number of sequences.

    State from round to round is kept with the sequence (the index of its n-grams) or in its cache (the branch of an exit head).
    """

    has_head = False
    """True if it has a head that reads states of the prompt, so that keys and values are not enough to know the prompt by."""

    @abstractmethod
    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Return the target's logits [1, vocabulary] after the prompt; called once per sequence, to prepare drafting.

        The cache may hold the first positions of the prompt already. Raises `UnsupportedRequestError` if it does and the draft
        needs more than their keys and values.
        """

    def prefill_target(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Do the same with as little work for drafts as can be done now, so that rounds without drafts cost no more.

        An exit head can read the prompt as late as in the first round that drafts.
        """
        return self.prefill(sequence, cache)

    @abstractmethod
    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Write at most `limit` tokens after the sequence, without changing `cache.length`.

        `controller` decides the number. A drafter that decides by itself returns a proposal that is not `steered`.
        """

    def draft_checking(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, limit: int, copy: Copy
    ) -> Proposal | None:
        """Draft greedily as `draft` does, but check several tokens of a `copy` in one pass where there is one.

        Returns None, and drafts nothing, if the drafter cannot or if the controller looks at each token.
        """
        return None

    @abstractmethod
    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target on the last token and the drafts; the logits are [num_tokens + 1, vocabulary]."""
