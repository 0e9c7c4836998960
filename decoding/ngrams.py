"""Index of the n-grams of a growing token list, for prompt lookup.

Knows neither sequences nor drafts.
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
