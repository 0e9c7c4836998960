"""The sequence being generated, the shaping of scores, the stopping conditions, and the request that holds these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from decoding.acceptance import Acceptance, Greedy
from decoding.cache.earlier_turns import EarlierTurns
from decoding.cache.known_prompt import KnownPrompt
from decoding.cache.kv_cache import Company
from decoding.drafts.history import RequestHistory
from decoding.drafts.lookup import CopyIndex, CopySettings
from decoding.runners.contract import Outputs
from decoding.token_memory import OwnTokens, TokenRow

SettingsT = TypeVar("SettingsT", bound=Hashable)
KeptT = TypeVar("KeptT")

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""transformers' signature: (token ids [1, length], scores [1, vocabulary]) -> scores [1, vocabulary]."""

StoppingCriterion = Callable[..., Tensor | bool]
"""transformers' signature: (token ids [1, length], scores) -> a truth value for the single sequence."""


class TokenSequence:
    """Token ids in a preallocated buffer on the device.

    The first `length` tokens are the sequence; drafts are written after it until they are judged. The host keeps a
    copy of the sequence without drafts, because every verified token passes through the host. `company` are the other
    sequences of a batch (`decoding.lockstep`): they share memory and waits. `history` holds earlier answers that drafts
    may be copied from. `known` is what the target knows of the prompt, or keeps of it once it has read it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        capacity: int,
        device: torch.device,
        company: Company | None = None,
        history: RequestHistory | None = None,
        known: KnownPrompt | None = None,
    ) -> None:
        self._company = company
        self._memory: OwnTokens | TokenRow = OwnTokens(capacity, device) if company is None else company.tokens
        self._memory.write_from_host(0, prompt)
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self.known = known
        self._token_ids = list(prompt)
        self._history = history
        self._indexes: dict[CopySettings, CopyIndex] = {}
        self._kept: dict[Hashable, Any] = {}

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence's token ids on the host, without drafts."""
        return self._token_ids

    @property
    def batch(self) -> object:
        """What the sequences that share passes with this one have in common; the sequence itself if it is alone."""
        return self if self._company is None else self._company.tokens.batch

    def index(self, source: CopySettings) -> CopyIndex:
        """Return the index of the sequence, without drafts, for these settings: made at the first use."""
        if source not in self._indexes:
            self._indexes[source] = source.new_index(self._token_ids, self._history)
        return self._indexes[source]

    def kept(self, settings: SettingsT, new: Callable[[SettingsT], KeptT]) -> KeptT:
        """Return what a drafter keeps with this sequence for these settings: made by `new` at the first use."""
        if settings not in self._kept:
            self._kept[settings] = new(settings)
        kept: KeptT = self._kept[settings]
        return kept

    def span(self, start: int, stop: int) -> Tensor:
        """Return token ids [1, stop - start], drafts included, as a view for a pass.

        In a batch the latest writes may be pending until the pass runs.
        """
        return self._memory.ids[:, start:stop]

    def written(self, start: int, stop: int) -> Tensor:
        """Return token ids [1, stop - start], drafts included, as a view with all writes done."""
        self._memory.finish()
        return self.span(start, stop)

    def write(self, index: int, token_ids: Tensor) -> None:
        """Write `token_ids` [n], drafted or chosen by the target, after the sequence and its first `index` drafts."""
        self._memory.write(self.length + index, token_ids)

    def write_drafts(self, tokens: Sequence[int], index: int = 0) -> None:
        """Write drafts that are known on the host after the sequence and its first `index` drafts."""
        self._memory.write_from_host(self.length + index, tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the sequence by verified tokens."""
        self._memory.write_from_host(self.length, tokens)
        self.settle(tokens)

    def settle(self, tokens: Sequence[int]) -> None:
        """Extend the sequence by verified tokens that follow it on the device already."""
        self._token_ids += tokens
        self.length += len(tokens)

    def read(self, values: Tensor) -> list[Any]:
        """Copy `values` [n] to the host, which waits for the device; in a batch, once for all sequences."""
        return values.tolist() if self._company is None else self._company.read(values)


@dataclass(frozen=True)
class Shaping:
    """The logits processors of `generate`, applied alike to the draft's and the target's scores."""

    processors: Sequence[LogitsProcessor] = ()

    def one(self, sequence: TokenSequence, num_drafted: int, logits: Tensor) -> Tensor:
        """Return scores [vocabulary] after the sequence and `num_drafted` drafts, from logits [1, vocabulary]."""
        scores = logits.float()
        if self.processors:
            ids = sequence.written(0, sequence.length + num_drafted)
            for process in self.processors:
                scores = process(ids, scores)
        return scores[0]

    def all(self, sequence: TokenSequence, logits: Tensor) -> Tensor:
        """Return scores [width, vocabulary] after the last token and after each draft, from logits [width, vocabulary]."""
        if not self.processors:
            return logits.float()
        return torch.stack([self.one(sequence, index, logits[index : index + 1]) for index in range(logits.shape[0])])


@dataclass(frozen=True)
class Ending:
    """Stopping conditions: the token limit, end-of-sequence tokens, and `generate`'s own stopping criteria."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriterion] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"at least one token must be generated, got max_new_tokens={self.max_new_tokens}")

    def append(self, sequence: TokenSequence, tokens: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """Append `tokens` until one ends the sequence; on the device they must follow the sequence already.

        Return the appended tokens and True if the sequence has ended. Criteria are evaluated after each single token,
        as in plain decoding.
        """
        tokens = tokens[: self.remaining(sequence)]
        if not self.criteria:
            end = next((index + 1 for index, token in enumerate(tokens) if token in self.eos_token_ids), None)
            kept = tuple(tokens[:end])
            sequence.settle(kept)
            return kept, end is not None or self.remaining(sequence) == 0
        for index, token in enumerate(tokens):
            sequence.settle([token])
            if self._criterion_met(sequence) or token in self.eos_token_ids or self.remaining(sequence) == 0:
                return tuple(tokens[: index + 1]), True
        return tuple(tokens), False

    def remaining(self, sequence: TokenSequence) -> int:
        return self.max_new_tokens - sequence.num_generated

    def _criterion_met(self, sequence: TokenSequence) -> bool:
        ids = sequence.written(0, sequence.length)
        # All criteria are evaluated, as in plain decoding: some count their calls or stream the tokens.
        met = [bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria]
        return any(met)


@dataclass(frozen=True)
class Request:
    """One sequence to generate: prompt token ids, choice and shaping of tokens, stopping conditions.

    `history` holds earlier answers that a draft may copy from. `turns` is the cache of earlier turns: the tokens in it
    are not computed again, and it is extended when the sequence has ended. `known` spares a prompt without earlier turns its pass
    if an earlier request has kept it there; a draft that needs more of the prompt than keys and values reads it all the same.
    """

    prompt: Sequence[int]
    ending: Ending
    acceptance: Acceptance = field(default_factory=Greedy)
    shaping: Shaping = field(default_factory=Shaping)
    history: RequestHistory | None = None
    turns: EarlierTurns | None = None
    known: KnownPrompt | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty: at least one token is needed to continue from")
        if self.turns is not None and self.known is not None:
            raise ValueError("a prompt is known as a whole or continues earlier turns, not both")

    @property
    def takes_most_likely(self) -> bool:
        """True if the most likely token by the model's own logits is always chosen."""
        return self.acceptance.is_greedy and not self.shaping.processors

    def choose(self, sequence: TokenSequence, outputs: Outputs) -> Tensor:
        """Choose the token [1] after the sequence by a pass with logits [1, vocabulary]."""
        if self.takes_most_likely:
            return outputs.choices
        return self.acceptance.choose(self.shaping.one(sequence, 0, outputs.logits))[0]
