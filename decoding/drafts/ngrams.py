"""Index of the n-grams of a growing token list, for prompt lookup (prompt lookup decoding, Saxena 2023).

The longest n-gram at the end of the sequence that also occurs earlier is looked up, and the tokens after it are proposed. Among
several occurrences, the latest is used (transformers uses the first). A copy that reaches the end of the sequence continues with
its own tokens, so that a loop is drafted to the full length.
"""

from __future__ import annotations

from collections.abc import Sequence


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
        self.update()
        return self._positions.get(tuple(self._token_ids[-self._length :]))


class NgramCopies:
    """Copies of what followed the longest n-gram of `min_ngram` to `max_ngram` tokens at the end of `token_ids`."""

    def __init__(self, token_ids: Sequence[int], *, max_ngram: int, min_ngram: int) -> None:
        self._token_ids = token_ids
        self._longest_first = [NgramIndex(token_ids, length) for length in range(max_ngram, min_ngram - 1, -1)]

    def update(self) -> None:
        for index in self._longest_first:
            index.update()

    def copy(self, num_tokens: int) -> list[int] | None:
        """Return the `num_tokens` tokens after the latest earlier occurrence of the longest n-gram, or None."""
        start = self.find()
        return None if start is None else copied(self._token_ids, start, num_tokens)

    def find(self) -> int | None:
        for index in self._longest_first:
            if (start := index.find_last()) is not None:
                return start
        return None


def copied(token_ids: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens of `token_ids` from `start` on; at the end, the copy starts again at `start`."""
    period = len(token_ids) - start
    return [token_ids[start + index % period] for index in range(num_tokens)]
