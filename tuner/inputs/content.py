"""The content of a prompt before it is tokenized: one text, or the turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LABELS = {"system": "System", "user": "User", "assistant": "Assistant"}
"""Labels of roles where no chat template writes them; other roles are written with a capital."""


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
        return cls("\n\n".join(f"{_label(turn.role)}: {turn.content}" for turn in turns), turns)

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
        written = Content.of_turns(self.as_turns(system_prompt)).text
        return f"{written}\n\n{_label('assistant')}:"

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


def _label(role: str) -> str:
    return LABELS.get(role, role.capitalize())
