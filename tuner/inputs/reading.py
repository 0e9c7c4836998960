"""Rows become prompts of a limited length, and the rows that make none are counted for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from tuner.errors import DatasetError
from tuner.inputs.encoding import PromptEncoder, RefusedTurnsError
from tuner.inputs.formats import Content, LeftOut, Reason, Turn
from tuner.inputs.rows import PromptRows

PLACEHOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE": (
            "SPEED-Bench publishes many rows without their texts, which its script prepare.py fetches from their sources (in "
            "github.com/NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench); run it, and give --dataset the file that it writes, "
            "such as qualitative.jsonl"
        )
    }
)
"""Advice by placeholder. SPEED-Bench: huggingface.co/datasets/nvidia/SPEED-Bench."""


@dataclass(frozen=True)
class Prompt:
    """Prompt: row in the dataset (from 0), token ids, and what they were made of."""

    row: int
    token_ids: tuple[int, ...]
    text: str
    """Text without chat template and system prompt; of a conversation, its turns with labels."""
    category: str | None = None
    """Category of the row, if the dataset has any."""
    turns: tuple[Turn, ...] = ()
    """Turns of a conversation; empty for a single text."""
    is_cut: bool = False
    """True if the beginning was cut off, as the prompt was too long."""


@dataclass(frozen=True)
class LengthLimits:
    """Limits of the prompt length; raises `DatasetError` if they contradict each other."""

    context_length: int | None
    max_new_tokens: int
    max_prompt_tokens: int | None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise DatasetError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.room is not None and self.room < 1:
            raise DatasetError(
                f"{self.max_new_tokens} new tokens leave no room for a prompt in the model's context of {self.context_length}; "
                f"max_new_tokens must be less than {self.context_length}"
            )
        if self.room is not None and (self.max_prompt_tokens or 0) > self.room:
            raise DatasetError(f"max_prompt_tokens: {self.max_prompt_tokens} is too many, as {self}")

    @property
    def room(self) -> int | None:
        """Number of prompt tokens that fit the context; None if unlimited."""
        return None if self.context_length is None else self.context_length - self.max_new_tokens

    def __str__(self) -> str:
        return (
            f"at most {self.room} fit the model's context of {self.context_length} with {self.max_new_tokens} new ones"
        )

    @property
    def advice(self) -> str:
        return f"--set max_prompt_tokens={self.room} cuts them from the left"


@dataclass(frozen=True)
class PromptReader:
    rows: PromptRows
    encoder: PromptEncoder
    limits: LengthLimits

    @property
    def num_rows(self) -> int:
        return self.rows.table.num_rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that say what a prompt is, where a user may not expect it."""
        form = self.rows.form
        if not form.makes_conversations or self.encoder.applies_template:
            return form.notes
        reason = "is missing in the tokenizer" if self.encoder.chat_template else "is turned off"
        return (*form.notes, f"the chat template {reason}: turns are written as 'User: ...' and 'Assistant: ...'")

    def read(self, index: int, seen: Set[tuple[int, ...]] = frozenset()) -> Prompt | LeftOut:
        """Return the prompt of a row, or why it makes none; one whose token ids are `seen` is repeated.

        Raises `DatasetError` for a value that is not text, or a placeholder.
        """
        row = self.rows.row(index)
        name = f"row {index} of the dataset {self.rows.table.name}"
        try:
            content = self.rows.form.read(row)
        except ValueError as cause:
            raise DatasetError(f"{name}: {cause}") from None
        if isinstance(content, LeftOut):
            return content
        if (advice := next((PLACEHOLDERS[each] for each in PLACEHOLDERS if each in content.text), None)) is not None:
            raise DatasetError(f"{name} holds a placeholder in place of the prompt: {advice}")
        try:
            found = self._encoded(content)
        except RefusedTurnsError as cause:
            return LeftOut(Reason.REFUSED, str(cause))
        if isinstance(found, LeftOut):
            return found
        fitting, token_ids, is_cut = found
        if tuple(token_ids) in seen:
            return LeftOut(Reason.REPEATED)
        category = self.rows.category(row)
        return Prompt(index, tuple(token_ids), fitting.text, category, fitting.turns, is_cut)

    def _encoded(self, content: Content) -> tuple[Content, list[int], bool] | LeftOut:
        """Return the content and its token ids, cut from the left if it is longer than the user wants."""
        token_ids = self.encoder.encode(content)
        longest, room = self.limits.max_prompt_tokens, self.limits.room
        if not token_ids:
            return LeftOut(Reason.EMPTY)
        if longest is None or len(token_ids) <= longest:
            fits = room is None or len(token_ids) <= room
            return (content, token_ids, False) if fits else LeftOut(Reason.TOO_LONG)
        if (cut := self.encoder.cut(content, longest)) is not None:
            return (*cut, True)
        if content.turns:
            return LeftOut(Reason.TOO_LONG)
        raise DatasetError(
            f"max_prompt_tokens: {longest} leaves no room for text after special tokens and chat template"
        )


def left_out(read: Sequence[Prompt | LeftOut], limits: LengthLimits) -> dict[Reason, str]:
    """Return how many of the rows that were read make no prompt, in words, by the reason."""
    found = [each for each in read if isinstance(each, LeftOut)]
    counts, refusal = Counter(each.reason for each in found), next((each.message for each in found if each.message), "")
    words = {
        Reason.EMPTY: "empty",
        Reason.REPEATED: "repeated",
        Reason.TOO_LONG: f"too long, as {limits}",
        Reason.NOT_TEXT: "with images or calls of tools",
        Reason.REFUSED: f"refused by the chat template ({refusal})",
    }
    return {reason: f"{counts[reason]} {words[reason]}" for reason in words if counts[reason]}


def reading_notes(read: Sequence[Prompt | LeftOut], limits: LengthLimits) -> tuple[str, ...]:
    """Return a line for every kind of row that a user should know to be missing or cut."""
    missing = left_out(read, limits)
    advice = {Reason.TOO_LONG: f"; {limits.advice}"}
    told = (Reason.TOO_LONG, Reason.NOT_TEXT, Reason.REFUSED)
    lines = [f"of {len(read)} rows left out: {missing[each]}{advice.get(each, '')}" for each in told if each in missing]
    if num_cut := sum(isinstance(each, Prompt) and each.is_cut for each in read):
        lines.append(f"{num_cut} of {len(read)} prompts were cut from the left to {limits.max_prompt_tokens} tokens")
    return tuple(lines)
