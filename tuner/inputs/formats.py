"""Formats of rows: templates of single texts with examples, and templates of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tuner.inputs.content import Content, Turn
from tuner.inputs.left_out import LeftOut, Reason
from tuner.inputs.templates import Template


class RowFormat(Protocol):
    """Conversion of a row into the content of a prompt."""

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that say what a prompt is, where a user may not expect it."""

    @property
    def makes_conversations(self) -> bool:
        """True if contents have turns, false if they are single texts."""

    def read(self, row: Mapping[str, Any]) -> Content | LeftOut:
        """Return the content of a prompt, or why there is none. Raises `ValueError` for a value that is not text."""


@dataclass(frozen=True)
class Examples:
    """Solved examples before each prompt (few-shot prompting)."""

    questions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    separator: str = "\n\n"

    @property
    def text(self) -> str:
        """The examples as they stand before a prompt."""
        solved = zip(self.questions, self.answers, strict=True)
        return "".join(question + answer + self.separator for question, answer in solved)


@dataclass(frozen=True)
class TextFormat:
    """Single texts by templates, the first of which that finds no blank column is used."""

    templates: tuple[Template, ...]
    examples: Examples = Examples()
    notes: tuple[str, ...] = ()
    makes_conversations: ClassVar[bool] = False

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""
        return set().union(*(template.columns for template in self.templates))

    def question(self, row: Mapping[str, Any]) -> str:
        """Return the text without examples, empty if a column is blank."""
        return next((text for template in self.templates if (text := template.render(row))), "")

    def read(self, row: Mapping[str, Any]) -> Content | LeftOut:
        """Return the text after the examples. A row that is an example itself counts as repeated."""
        question = self.question(row)
        if not question:
            return LeftOut(Reason.EMPTY)
        if question in self.examples.questions:
            return LeftOut(Reason.REPEATED)
        return Content(self.examples.text + question)


@dataclass(frozen=True)
class TurnsFormat:
    """Conversations by templates of the user's and the assistant's turns, alternately."""

    turns: tuple[Template, ...]
    notes: tuple[str, ...] = ()
    makes_conversations: ClassVar[bool] = True

    @property
    def columns(self) -> set[str]:
        """Names of the columns that are read."""
        return set().union(*(template.columns for template in self.turns))

    def read(self, row: Mapping[str, Any]) -> Content | LeftOut:
        """Return the conversation; a row with a blank turn makes none."""
        texts = [template.render(row) for template in self.turns]
        if not all(text.strip() for text in texts):
            return LeftOut(Reason.EMPTY)
        return Content.of_turns(
            tuple(Turn("assistant" if index % 2 else "user", text) for index, text in enumerate(texts))
        )
