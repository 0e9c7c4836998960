"""Prompts of a given length: short ones are preceded by other rows of the data set, long ones are cut from the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.errors import DatasetError
from tuner.inputs.content import Content
from tuner.inputs.encoding import PromptEncoder
from tuner.inputs.prompts import Prompt

BETWEEN = "\n\n"
"""Separator between two rows."""


def at_length(
    prompts: Sequence[Prompt], length: int, fillers: Sequence[Prompt], encoder: PromptEncoder
) -> list[Prompt]:
    """Return the prompts, each preceded by rows of `fillers` and cut from the left to `length` tokens.

    The end of a prompt stays as it is, so that it asks for the same continuation after a longer context. Every prompt starts with
    another filler and never with its own row. Only whole characters are cut: a prompt may be a token or two short of `length`.

    Raises DatasetError if the fillers are too short, or if `length` leaves no room beside special tokens and chat template.
    """
    return [_lengthened(prompt, length, _others(prompt, fillers, turn), encoder) for turn, prompt in enumerate(prompts)]


def _others(prompt: Prompt, fillers: Sequence[Prompt], turn: int) -> list[Prompt]:
    others = [filler for filler in fillers if filler.row != prompt.row]
    first = turn % len(others) if others else 0
    return [*others[first:], *others[:first]]


def _lengthened(prompt: Prompt, length: int, fillers: Sequence[Prompt], encoder: PromptEncoder) -> Prompt:
    content, token_ids = prompt.content, list(prompt.token_ids)
    for filler in fillers:
        if len(token_ids) >= length:
            break
        content = content.starting_with(f"{filler.text}{BETWEEN}")
        token_ids = encoder.encode(content)
    if len(token_ids) < length:
        raise DatasetError(
            f"the data set has too little text for prompts of {length} tokens: row {prompt.row} preceded by all other rows "
            f"makes {len(token_ids)}; give a shorter --context or more rows"
        )
    if len(token_ids) > length:
        if (cut := encoder.cut(content, length)) is None:
            raise DatasetError(f"--context {length} leaves no room for text beside special tokens and chat template")
        content, token_ids = cut
    return _made_of(prompt, content, token_ids)


def _made_of(prompt: Prompt, content: Content, token_ids: Sequence[int]) -> Prompt:
    return replace(prompt, token_ids=tuple(token_ids), text=content.text, turns=content.turns)
