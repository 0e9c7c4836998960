"""Rows become the contents of prompts: one text or the turns of a conversation, by templates or from a column of messages."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from decoding.conversation import asking, paragraphs


class Reason(Enum):
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


class Turn(NamedTuple):
    """One message: `system`, `user`, `assistant` or `tool`, and its text."""

    role: str
    content: str


@dataclass(frozen=True)
class Content:
    """One text, or the turns of a conversation that ends before the reply to be written."""

    text: str
    """The text, or the turns as a chat would be printed."""
    turns: tuple[Turn, ...] = ()
    """Turns of a conversation; empty for a single text."""

    @classmethod
    def of_turns(cls, turns: tuple[Turn, ...]) -> Content:
        """Return a conversation; its text labels each turn with the role."""
        return cls(paragraphs(turns), turns)

    def as_turns(self, system_prompt: str | None) -> tuple[Turn, ...]:
        """Return the turns, or the text as the user's only one, after the given system prompt.

        A system prompt replaces the system turns with which a conversation begins.
        """
        turns = self.turns or (Turn("user", self.text),)
        if system_prompt is None:
            return turns
        first = next(index for index, turn in enumerate(turns) if turn.role not in ("system", "developer"))
        return (Turn("system", system_prompt), *turns[first:])

    def plain_text(self, system_prompt: str | None) -> str:
        """Return the text for a model without a chat template.

        A single text stays as it is, after the system prompt and a blank line. A conversation becomes labelled paragraphs
        that end with the label of the reply.
        """
        if not self.turns:
            return self.text if system_prompt is None else f"{system_prompt}\n\n{self.text}"
        return asking(self.as_turns(system_prompt))

    def from_user_turn(self, index: int, text: str) -> Content:
        """Return the content from a user turn on, which has `text` in place of its own; system turns before it stay."""
        if not self.turns:
            return Content(text)
        kept = tuple(turn for turn in self.turns[:index] if turn.role in ("system", "developer"))
        return Content.of_turns((*kept, Turn("user", text), *self.turns[index + 1 :]))

    @property
    def user_turns(self) -> tuple[int, ...]:
        """Indices of the user's turns; a single text is one."""
        return tuple(index for index, turn in enumerate(self.as_turns(None)) if turn.role == "user")


_COLUMN = re.compile(r"(?P<name>[^\[\]]+)(?P<steps>(?:\[[^\[\]]+\])*)")


class Column(NamedTuple):
    """Column, or an element of its values: `question`, `turns[0]`, `translation[de]`."""

    name: str
    steps: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, written: str) -> Column:
        """Parse a name with optional bracketed steps; raise `ValueError` for anything else."""
        match = _COLUMN.fullmatch(written)
        if match is None:
            raise ValueError(f"{written!r} is not a column; write it as question, turns[0] or translation[de]")
        steps = re.findall(r"\[([^\[\]]+)\]", match["steps"])
        return cls(match["name"], tuple(int(step) if step.isdecimal() else step for step in steps))

    def read(self, row: Mapping[str, Any]) -> str:
        """Return the column's text in `row`, empty if missing.

        Raises `ValueError` if the value is not text.
        """
        value = row[self.name]
        for step in self.steps:
            if value is None or (isinstance(value, list) and isinstance(step, int) and step >= len(value)):
                return ""
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"column {self.name!r} has no element [{step}]") from None
        if value is None:
            return ""
        if not isinstance(value, str):
            inside = f"; name an element of it, such as {self.name}[0]" if isinstance(value, list) else ""
            raise ValueError(f"column {self.name!r} holds {type(value).__name__}, not text{inside}")
        return value


@dataclass(frozen=True)
class Template:
    """Text with columns in braces, such as `Question: {question}`; literal braces are doubled."""

    parts: tuple[tuple[str, Column | None], ...]

    @classmethod
    def of_column(cls, column: Column) -> Template:
        return cls((("", column),))

    @classmethod
    def parse(cls, written: str) -> Template:
        """Parse a template; raise `ValueError` for unbalanced braces, formats or conversions."""
        parts = []
        for text, column, form, conversion in string.Formatter().parse(written):
            if form or conversion:
                raise ValueError(f"{{{column}}} takes no format and no conversion")
            parts.append((text, None if column is None else Column.parse(column)))
        return cls(tuple(parts))

    @property
    def columns(self) -> set[str]:
        return {column.name for _, column in self.parts if column}

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of `row`, empty if a column is blank.

        Raises `ValueError` if a value is not text.
        """
        pieces = []
        for text, column in self.parts:
            value = column.read(row) if column else ""
            if column and not value.strip():
                return ""
            pieces.append(text + value)
        return "".join(pieces)


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
class RowFormat:
    columns: frozenset[str]
    """Names of the columns that are read."""
    read: Callable[[Mapping[str, Any]], Content | LeftOut]
    """Returns the content of a prompt, or why there is none. Raises `ValueError` for a value that is not text."""
    makes_conversations: bool = False
    """True if contents have turns, false if they are single texts."""
    notes: tuple[str, ...] = ()
    """Lines that say what a prompt is, where a user may not expect it."""


def conversation_format(column: str) -> RowFormat:
    """Return the format of rows that hold a conversation in one column; prompts end before the reply to be written."""

    def read(row: Mapping[str, Any]) -> Content | LeftOut:
        turns = []
        for message in row[column] or []:
            turn = None if message is None else _turn(message)
            if turn is None:
                return LeftOut(Reason.NOT_TEXT)
            turns.append(turn)
        asked = before_the_reply(turns)
        if not asked or not all(turn.content.strip() for turn in asked if turn.role == "user"):
            return LeftOut(Reason.EMPTY)
        return Content.of_turns(asked)

    note = f"prompts are the conversations in the column {column!r}, up to the last reply"
    return RowFormat(frozenset([column]), read, makes_conversations=True, notes=(note,))


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


def text_format(
    templates: Sequence[Template],
    solved: Sequence[tuple[str, str]] = (),
    separator: str = "",
    notes: tuple[str, ...] = (),
) -> RowFormat:
    """Return the format of single texts by templates, the first of which that finds no blank column is used.

    The `solved` examples, questions and answers, stand before each prompt. A row that is an example itself counts as repeated.
    """
    examples, questions = "".join(each + answer + separator for each, answer in solved), {each for each, _ in solved}

    def read(row: Mapping[str, Any]) -> Content | LeftOut:
        text = first_text(templates, row)
        if not text:
            return LeftOut(Reason.EMPTY)
        return LeftOut(Reason.REPEATED) if text in questions else Content(examples + text)

    return RowFormat(columns_of(templates), read, notes=notes)


def first_text(templates: Sequence[Template], row: Mapping[str, Any]) -> str:
    """Return the text by the first template that finds no blank column; empty if there is none."""
    return next((text for template in templates if (text := template.render(row))), "")


def columns_of(templates: Sequence[Template]) -> frozenset[str]:
    return frozenset().union(*(template.columns for template in templates))


def turns_format(templates: Sequence[Template]) -> RowFormat:
    """Return the format of conversations by templates of the user's and the assistant's turns in alternation, none blank."""

    def read(row: Mapping[str, Any]) -> Content | LeftOut:
        texts = [template.render(row) for template in templates]
        if not all(text.strip() for text in texts):
            return LeftOut(Reason.EMPTY)
        roles = ("user", "assistant")
        return Content.of_turns(tuple(Turn(roles[index % 2], text) for index, text in enumerate(texts)))

    return RowFormat(columns_of(templates), read, makes_conversations=True)
