"""Conversations in columns of chat datasets: `messages` of role and content, or ShareGPT's `conversations` of from and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tuner.inputs.content import Content, Turn
from tuner.inputs.left_out import LeftOut, Reason

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
"""Columns that are taken for the conversation without being named."""
_KEYS = (("role", "content"), ("from", "value"))
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_CALLS = ("function_call", "tool_calls")


def holds_conversations(feature: Any) -> bool:
    """Return whether a column, given by its `datasets` feature, holds lists of messages."""
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return isinstance(inner, Mapping) and any(set(keys) <= set(inner) for keys in _KEYS)


@dataclass(frozen=True)
class ConversationFormat:
    """Rows that hold a conversation in one column."""

    column: str
    makes_conversations: ClassVar[bool] = True

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""
        return {self.column}

    @property
    def notes(self) -> tuple[str, ...]:
        """Line that says what a prompt is."""
        return (f"prompts are the conversations in the column {self.column!r}, up to the last reply",)

    def read(self, row: Mapping[str, Any]) -> Content | LeftOut:
        """Return the conversation before the reply to be written."""
        turns = []
        for message in row[self.column] or []:
            turn = None if message is None else _turn(message)
            if turn is None:
                return LeftOut(Reason.NOT_TEXT)
            turns.append(turn)
        asked = before_the_reply(turns)
        if not asked or not all(turn.content.strip() for turn in asked if turn.role == "user"):
            return LeftOut(Reason.EMPTY)
        return Content.of_turns(asked)


def before_the_reply(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns before the last reply; none if nobody asks anything.

    Turns of the user alone (as in Spec-Bench and SPEED-Bench) leave out the model's own replies, which nobody knows before they
    are written: the conversation then ends after the first of them.
    """
    end = len(turns)
    while end and turns[end - 1].role == "assistant":
        end -= 1
    asked = tuple(turns[:end])
    users = [index for index, turn in enumerate(asked) if turn.role == "user"]
    if not users:
        return ()
    return asked if any(turn.role == "assistant" for turn in asked) else asked[: users[0] + 1]


def _turn(message: Mapping[str, Any]) -> Turn | None:
    """Return a message as a turn, or None if it is not text alone."""
    role_key, text_key = next(keys for keys in _KEYS if set(keys) <= set(message))
    role, text = str(message[role_key]).strip(), message[text_key]
    if role in _CALLS or any(message.get(key) for key in _CALLS):
        return None
    if isinstance(text, list):
        text = _joined(text)
    if text is not None and not isinstance(text, str):
        return None
    return None if text is None and role != "assistant" else Turn(_ROLES.get(role.lower(), role), text or "")


def _joined(parts: Sequence[Any]) -> str | None:
    """Return the text of a message in parts, or None if a part is not text."""
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    kinds = {part.get("type", "text") for part in parts if isinstance(part, Mapping)}
    return None if kinds - {"text"} or None in texts else "".join(map(str, texts))
