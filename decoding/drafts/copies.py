"""Copies from a growing token list: after its last n-gram (prompt lookup decoding, Saxena 2023), or after its longest suffix match.

The longest n-gram at the end of the sequence that also occurs earlier is looked up, and the tokens after it are proposed. Among
several occurrences, the latest is used (transformers uses the first). A copy that reaches the end of the sequence continues with
its own tokens, so that a loop is drafted to the full length.
"""

from __future__ import annotations

from collections.abc import Sequence

from decoding.drafts.history import RequestHistory
from decoding.drafts.suffix_automaton import ROOT, SuffixAutomaton


class NgramIndex:
    """Position after the latest occurrence of every n-gram of `token_ids` that has a next token.

    `token_ids` may grow but not change otherwise. Each token is indexed once, at the first query after it was
    appended. Raises `ValueError` if `length` is below 1.
    """

    def __init__(self, token_ids: Sequence[int], length: int) -> None:
        if length < 1:
            raise ValueError(f"an n-gram has at least one token, got {length}")
        self._token_ids = token_ids
        self._length = length
        self._positions: dict[tuple[int, ...], int] = {}
        self._next_position = length

    def update(self) -> None:
        """Index the tokens appended since the last update."""
        # The final n-gram has no next token yet: indexing it would make it find itself.
        for position in range(self._next_position, len(self._token_ids)):
            self._positions[tuple(self._token_ids[position - self._length : position])] = position
        self._next_position = max(self._next_position, len(self._token_ids))

    def find_last(self) -> int | None:
        """Return the position after the final n-gram's latest earlier occurrence, or None."""
        return self.find_after(())

    def find_after(self, drafts: Sequence[int]) -> int | None:
        """Return the same for the final n-gram of the tokens and of `drafts` after them, which are not indexed."""
        self.update()
        own = self._token_ids[-self._length :]
        return self._positions.get(tuple([*own, *drafts][-self._length :]))


class NgramCopies:
    """Copies of what followed the longest n-gram of `min_ngram` to `max_ngram` tokens at the end of `token_ids`.

    With `direct_from`, n-grams of fewer tokens count only for `copy_after`, whose copies a draft is to check.
    """

    def __init__(
        self, token_ids: Sequence[int], *, max_ngram: int, min_ngram: int, direct_from: int | None = None
    ) -> None:
        self._token_ids = token_ids
        self._longest_first = [NgramIndex(token_ids, length) for length in range(max_ngram, min_ngram - 1, -1)]
        self._num_direct = max_ngram + 1 - (direct_from or min_ngram)

    def update(self) -> None:
        """Read the tokens appended since the last call."""
        for index in self._longest_first:
            index.update()

    def copy(self, num_tokens: int) -> list[int] | None:
        """Return the `num_tokens` tokens after the latest earlier occurrence of the longest n-gram, or None.

        A copy of fewer tokens is the beginning of a copy of more.
        """
        start = self.find()
        return None if start is None else copied(self._token_ids, start, num_tokens)

    def copy_after(self, drafts: Sequence[int], num_tokens: int) -> list[int] | None:
        """Return a copy as `copy` does, after an n-gram of any length at the end of the sequence and of `drafts` that follow it."""
        for index in self._longest_first:
            if (start := index.find_after(drafts)) is not None:
                return copied([*self._token_ids, *drafts], start, num_tokens)
        return None

    def find(self) -> int | None:
        for index in self._longest_first[: self._num_direct]:
            if (start := index.find_last()) is not None:
                return start
        return None


def copied(token_ids: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens of `token_ids` from `start` on; at the end, the copy starts again at `start`."""
    period = len(token_ids) - start
    return [token_ids[start + index % period] for index in range(num_tokens)]


class SuffixCopies:
    """Suffix automaton of `token_ids`, with a matcher for each answer in `history`.

    The longest match counts; among equals the sequence's own, then the latest answer's. A match of fewer than `min_match` tokens
    is none. At most `max_spec_factor` tokens are copied for each token of the match, and as long as their estimated
    probability is at least `min_token_prob`; the names are SuffixDecoding's (arXiv 2411.04975).
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        min_match: int,
        max_spec_factor: float,
        min_token_prob: float,
        history: RequestHistory | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._min_match, self._factor, self._least = min_match, max_spec_factor, min_token_prob
        self._own = SuffixAutomaton()
        self._history = history
        self._matchers = [_Matcher(*each) for each in history.answers()] if history else []

    def update(self) -> None:
        for position in range(self._own.num_tokens, len(self._token_ids)):
            token = self._token_ids[position]
            self._own.extend(token)
            for matcher in self._matchers:
                matcher.read(token)

    def copy(self, num_tokens: int) -> list[int] | None:
        """Return the continuation of the longest match, of one to `num_tokens` tokens, or None."""
        self.update()
        state, length = self._own.repeated()
        automaton = self._own
        longer = [each for each in self._matchers if each.length > max(length, self._min_match - 1)]
        if longer and self._history is not None:
            best = max(longer, key=lambda each: each.length)
            automaton, state, length = best.automaton, best.state, best.length
            self._history.note_use(best.answer)
        if length < self._min_match:
            return None
        most = min(num_tokens, max(1, int(self._factor * length)))
        tokens = automaton.continuation(state, most, min_match=self._min_match, min_token_prob=self._least)
        return tokens or None


class _Matcher:
    """The longest suffix of a growing text that occurs in one earlier answer."""

    def __init__(self, answer: tuple[int, ...], automaton: SuffixAutomaton) -> None:
        self.answer, self.automaton = answer, automaton
        self.state, self.length = ROOT, 0

    def read(self, token: int) -> None:
        self.state, self.length = self.automaton.step(self.state, self.length, token)
