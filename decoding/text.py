"""The text being written: its tokens on the device, what shapes the next one, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.ngrams import NgramIndex

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""transformers' form: (token ids [1, length], scores [1, vocabulary]) -> scores [1, vocabulary]."""

StoppingCriterion = Callable[..., Tensor | bool]
"""transformers' form: (token ids [1, length], scores) -> a truth value for the one text."""


class TokenSequence:
    """Token ids in a preallocated buffer. The first `length` are the text; drafts are written behind it until they are judged.

    The text, without drafts, is kept on the host too, as every token of it passes there.
    """

    def __init__(self, prompt: Sequence[int], capacity: int, device: torch.device) -> None:
        self._buffer = torch.zeros((1, capacity), dtype=torch.long, device=device)
        self._buffer[0, : len(prompt)] = torch.tensor(prompt, dtype=torch.long, device=device)
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self._token_ids = list(prompt)
        self._ngrams: dict[int, NgramIndex] = {}

    @property
    def num_generated(self) -> int:
        """Tokens behind the prompt."""
        return self.length - self.prompt_length

    @property
    def token_ids(self) -> Sequence[int]:
        """The text's token ids on the host, drafts not included."""
        return self._token_ids

    def ngrams(self, length: int) -> NgramIndex:
        """The index of the text's n-grams of `length` tokens, made when first asked for; drafts are never in it."""
        if length not in self._ngrams:
            self._ngrams[length] = NgramIndex(self._token_ids, length)
        return self._ngrams[length]

    def span(self, start: int, stop: int) -> Tensor:
        """Token ids [1, stop - start], drafts included; a view, not a copy."""
        return self._buffer[:, start:stop]

    def write_draft(self, index: int, token_ids: Tensor) -> None:
        """Put the draft's `token_ids` [n] behind the text, from its place `index` on."""
        start = self.length + index
        self._buffer[0, start : start + token_ids.shape[0]] = token_ids

    def write_drafts(self, tokens: Sequence[int]) -> None:
        """Put drafts that are known on the host behind the text, all at once."""
        self._write(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Make the text longer by verified tokens."""
        self._write(tokens)
        self._token_ids += tokens
        self.length += len(tokens)

    def _write(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        self._buffer[0, self.length : end] = torch.tensor(tokens, dtype=torch.long, device=self._buffer.device)


@dataclass(frozen=True)
class Shaping:
    """The logits processors of `generate`, applied alike to the draft's and to the target's scores."""

    processors: Sequence[LogitsProcessor] = ()

    def one(self, text: TokenSequence, num_drafted: int, logits: Tensor) -> Tensor:
        """Scores [vocabulary] of the token behind the text and `num_drafted` drafts, from logits [1, vocabulary]."""
        scores = logits.float()
        if self.processors:
            ids = text.span(0, text.length + num_drafted)
            for process in self.processors:
                scores = process(ids, scores)
        return scores[0]

    def all(self, text: TokenSequence, logits: Tensor) -> Tensor:
        """Scores [width, vocabulary] behind the text's last token and behind each draft, from logits [width, vocabulary]."""
        if not self.processors:
            return logits.float()
        return torch.stack([self.one(text, index, logits[index : index + 1]) for index in range(logits.shape[0])])


@dataclass(frozen=True)
class Ending:
    """When a text ends: enough tokens, an end-of-text token, or one of `generate`'s own stopping criteria."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriterion] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"at least one token must be generated, got max_new_tokens={self.max_new_tokens}")

    def append(self, text: TokenSequence, tokens: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """Append `tokens` one by one until one ends the text; the appended ones, and whether it has ended.

        Criteria see the text as plain decoding would show it to them: after each single token.
        """
        tokens = tokens[: self.remaining(text)]
        if not self.criteria:
            end = next((index + 1 for index, token in enumerate(tokens) if token in self.eos_token_ids), None)
            kept = tuple(tokens[:end])
            text.append(kept)
            return kept, end is not None or self.remaining(text) == 0
        for index, token in enumerate(tokens):
            text.append([token])
            if self._criterion_met(text) or token in self.eos_token_ids or self.remaining(text) == 0:
                return tuple(tokens[: index + 1]), True
        return tuple(tokens), False

    def remaining(self, text: TokenSequence) -> int:
        """How many more tokens may be generated."""
        return self.max_new_tokens - text.num_generated

    def _criterion_met(self, text: TokenSequence) -> bool:
        ids = text.span(0, text.length)
        # All are asked, as plain decoding asks them: some count or pass on what they are shown.
        met = [bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria]
        return any(met)
