"""Token ids of prompts: chat template, system prompt, and cuts to a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoding.errors import one_line
from tuner.errors import DatasetError
from tuner.inputs.formats import Content

# Some chat templates insert today's date. A fixed date keeps prompts the same, so that a search can be resumed on another day.
# The empty expression preserves a leading line break of the template.
_DATES = {
    "%Y": "2025",
    "%y": "25",
    "%m": "01",
    "%d": "01",
    "%B": "January",
    "%b": "Jan",
    "%A": "Wednesday",
    "%a": "Wed",
}
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{directive}', '{value}')" for directive, value in _DATES.items())
    + " }}{% endmacro %}{{ '' }}"
)


class RefusedTurnsError(DatasetError):
    """Conversation that the chat template refuses."""


@dataclass(frozen=True)
class PromptEncoder:
    """Conversion of contents into token ids, as the model is prompted in production."""

    tokenizer: Any
    chat_template: bool = True
    """Apply the chat template if the tokenizer has one. One that inserts today's date is given a fixed one."""
    system_prompt: str | None = None

    @property
    def applies_template(self) -> bool:
        return self.chat_template and bool(getattr(self.tokenizer, "chat_template", None))

    def check(self) -> None:
        """Raise `DatasetError` if the chat template refuses a user turn, or the system prompt before one."""
        if not self.applies_template:
            return
        try:
            self._templated(Content("?"))
        except RefusedTurnsError as cause:
            turns = "one user turn" if self.system_prompt is None else "a system prompt and one user turn"
            advice = "--set chat_template=no turns it off"
            if self.system_prompt is not None:
                advice = f"put the text into --template, or {advice}"
            raise DatasetError(f"the tokenizer's chat template fails on {turns}: {cause}; {advice}") from cause

    def encode(self, content: Content) -> list[int]:
        """Return the token ids. Raises `RefusedTurnsError` if the chat template refuses the turns."""
        if not self.applies_template:
            return list(self.tokenizer(content.plain_text(self.system_prompt), verbose=False)["input_ids"])
        rendered = self._templated(content)
        # Encoded in a separate call, because `verbose=False` suppresses the tokenizer's warning about long sequences.
        return list(self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])

    def cut(self, content: Content, longest: int) -> tuple[Content, list[int]] | None:
        """Return the content without its beginning, of at most `longest` tokens, and the tokens; None if nothing fits.

        System turns and the chat template stay whole. A conversation begins with as early a user turn as fits, whose text is
        cut from the left.
        """
        found = (self._cut_turn(content, index, longest) for index in content.user_turns)
        return next((cut for cut in found if cut is not None), None)

    def _cut_turn(self, content: Content, index: int, longest: int) -> tuple[Content, list[int]] | None:
        """Return the content from one user turn on, whole if it fits, else with the turn's text cut from the left."""

        def encode(text: str) -> list[int]:
            return self.encode(content.from_user_turn(index, text))

        text = content.as_turns(None)[index].content
        whole = encode(text)
        found = (text, whole) if len(whole) <= longest else cut_from_left(text, longest, encode)
        return None if found is None else (content.from_user_turn(index, found[0]), found[1])

    def _templated(self, content: Content) -> str:
        try:
            template = self.tokenizer.get_chat_template()
            return str(
                self.tokenizer.apply_chat_template(
                    [turn._asdict() for turn in content.as_turns(self.system_prompt)],
                    chat_template=_FIXED_DATE + template if "strftime_now" in template else template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except Exception as cause:  # a chat template is a program and may raise anything
            raise RefusedTurnsError(one_line(cause)) from cause


def encode_prompt(
    text: str, tokenizer: Any, *, chat_template: bool = True, system_prompt: str | None = None
) -> list[int]:
    """Return the token ids of one text, as `PromptEncoder` makes them.

    Raises `DatasetError` if the chat template refuses a single user turn, or the system prompt.
    """
    encoder = PromptEncoder(tokenizer, chat_template, system_prompt)
    encoder.check()
    return encoder.encode(Content(text))


def cut_from_left(text: str, longest: int, encode: Callable[[str], list[int]]) -> tuple[str, list[int]] | None:
    """Return the longest suffix of `text` with at most `longest` tokens, and the tokens.

    Returns None if no suffix fits. Found by bisection over characters, so the result may be a token or two shorter than
    `longest`. `encode` may add special tokens and a chat template, which stay whole.
    """
    too_early, start, fitting = 0, len(text), None
    while start - too_early > 1:
        middle = (too_early + start) // 2
        token_ids = encode(text[middle:])
        if len(token_ids) <= longest:
            start, fitting = middle, token_ids
        else:
            too_early = middle
    return None if fitting is None else (text[start:], fitting)
