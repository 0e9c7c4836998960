"""Text of a growing sequence of tokens, piece by piece, up to a stop string.

The pieces together are what the tokenizer makes of all tokens at once. A piece is held back while it ends within a character, or
while it may begin a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What the bytes of an incomplete character are decoded to."""


class TextStream:
    """Text of the generated tokens; special tokens are left out. A stop string and what follows it are left out too."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        # The text of tokens depends on the ones before: two windows with the same start are compared.
        self._start = self._read = 0
        self._held = ""
        self.num_tokens = 0
        """Number of tokens, up to the one that completed a stop string."""
        self.is_stopped = False
        """True after a stop string."""

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that is certain now. Tokens after a stop string are dropped."""
        pieces = []
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self._tokens.append(token)
            pieces.append(self._checked(self._new_text()))
        return "".join(pieces)

    def finish(self) -> str:
        if self.is_stopped:
            return ""
        rest = self._decode(self._start, len(self._tokens))[len(self._decode(self._start, self._read)) :]
        text = self._checked(rest)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        return text

    def _new_text(self) -> str:
        known, text = self._decode(self._start, self._read), self._decode(self._start, len(self._tokens))
        if len(text) <= len(known) or text.endswith(UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def _checked(self, text: str) -> str:
        """Return the text before a stop string, without an ending that may become one."""
        text, self._held = self._held + text, ""
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        longest = max((_overlap(text, stop) for stop in self._stops), default=0)
        if longest:
            text, self._held = text[:-longest], text[-longest:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
