"""Where the n-grams of a growing list of tokens stand: what prompt lookup asks of a text. Knows neither texts nor drafts."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """For every n-gram of `token_ids` that a token follows, the place of the token behind its latest occurrence.

    `token_ids` may grow and must not change otherwise. Each token is read once, at the first question after it has come.
    Raises `ValueError` for n-grams of less than one token.
    """

    def __init__(self, token_ids: Sequence[int], length: int) -> None:
        if length < 1:
            raise ValueError(f"an n-gram has at least one token, got {length}")
        self._token_ids = token_ids
        self._length = length
        self._places: dict[tuple[int, ...], int] = {}
        self._next_place = length

    def update(self) -> None:
        """Read what has come since the last time."""
        # The n-gram that ends the list has no token behind it yet: it would find itself.
        for place in range(self._next_place, len(self._token_ids)):
            self._places[tuple(self._token_ids[place - self._length : place])] = place
        self._next_place = max(self._next_place, len(self._token_ids))

    def find_last(self) -> int | None:
        """The place behind the latest earlier occurrence of the n-gram that ends the list; None if it stands there only."""
        self.update()
        return self._places.get(tuple(self._token_ids[-self._length :]))
