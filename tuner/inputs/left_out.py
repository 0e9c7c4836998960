"""Rows that make no prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Reason(Enum):
    """Why a row makes no prompt."""

    EMPTY = auto()
    REPEATED = auto()
    TOO_LONG = auto()
    NOT_TEXT = auto()
    """It holds images or calls of tools."""
    REFUSED = auto()
    """The chat template refuses the turns."""


@dataclass(frozen=True)
class LeftOut:
    """A row that makes no prompt: the reason, and what the chat template said if it refused the row."""

    reason: Reason
    message: str = ""
