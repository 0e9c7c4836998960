"""Prompts as token ids, in two parts: one to tune on, one for the reported figures. Where rows come from: `tuner.tables`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tuner.errors import DatasetError
from tuner.tables import Table, open_table

USUAL_COLUMNS = ("prompt", "text", "question", "instruction", "input", "query", "content", "article")


@dataclass(frozen=True)
class Prompt:
    """One prompt: the row it is from, its text, and its token ids as the model sees them."""

    row: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a search. No prompt, and no group of prompts, stands in both parts."""

    name: str
    fingerprint: str
    """SHA-256 over the token ids of both parts, in order."""
    tuning: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def load_prompts(
    source: str,
    tokenizer: Any,
    *,
    num_tuning: int,
    num_held_out: int,
    max_new_tokens: int,
    context_length: int | None,
    seed: int,
    prompt_column: str | None = None,
    group_column: str | None = None,
    chat_template: bool = True,
    max_prompt_tokens: int | None = None,
) -> PromptSet:
    """Draw the two parts from `source`: shuffled by `seed`, without empty and repeated prompts, tokenized as they are drawn.

    With `group_column`, rows of equal value stay in one part. With `max_prompt_tokens`, longer prompts lose their beginning.
    Raises `DatasetError` for a source or column that is not there, too few prompts, or one too long for the model's context.
    """
    table = open_table(source)
    to_text = _text_of(table, prompt_column)
    groups = _groups(table, group_column)
    room = None if context_length is None else context_length - max_new_tokens

    def draw(indices: list[int], seen: set[str]) -> Iterator[Prompt]:
        for index in indices:
            text = to_text(table.rows[index], index)
            if not text.strip() or text in seen:
                continue
            seen.add(text)
            ids = encode_prompt(text, tokenizer, chat_template=chat_template)
            if max_prompt_tokens is not None:
                ids = ids[-max_prompt_tokens:]
            if room is not None and len(ids) > room:
                raise DatasetError(
                    f"row {index} of {source} has {len(ids)} tokens, but the model's context of {context_length} leaves "
                    f"{max(room, 0)} beside {max_new_tokens} new ones: set max_prompt_tokens to cut prompts from the left"
                )
            if ids:
                yield Prompt(index, text, tuple(ids))

    tuning, held_out = _split(list(groups.values()), num_tuning, num_held_out, seed, draw)
    if len(tuning) < num_tuning or len(held_out) < num_held_out:
        unit = f" in {len(groups)} groups of {group_column!r}" if group_column else ""
        raise DatasetError(
            f"too few prompts: {source} gives {len(tuning)} for tuning and {len(held_out)} held out{unit}, "
            f"{num_tuning} and {num_held_out} were asked for; lower --tuning-prompts and --held-out-prompts"
        )
    digest = hashlib.sha256(repr([[p.token_ids for p in part] for part in (tuning, held_out)]).encode()).hexdigest()
    return PromptSet(table.name, digest, tuple(tuning), tuple(held_out))


def encode_prompt(text: str, tokenizer: Any, *, chat_template: bool = True) -> list[int]:
    """Token ids of one prompt: as a user's turn if the tokenizer has a chat template and it is wanted, else as it is."""
    if chat_template and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(encoded["input_ids"])
    return list(tokenizer(text)["input_ids"])


def _split(
    groups: list[list[int]],
    num_tuning: int,
    num_held_out: int,
    seed: int,
    draw: Callable[[list[int], set[str]], Iterator[Prompt]],
) -> tuple[list[Prompt], list[Prompt]]:
    """Deal shuffled groups to the part that has the smaller share of what it needs, until both are full."""
    shuffle = random.Random(seed)
    shuffle.shuffle(groups)
    parts: list[list[Prompt]] = [[], []]
    needs = (num_tuning, num_held_out)
    seen: set[str] = set()
    for group in groups:
        part = min((0, 1), key=lambda place: len(parts[place]) / needs[place])
        if len(parts[part]) >= needs[part]:
            break
        members = list(group)
        shuffle.shuffle(members)
        for prompt in draw(members, seen):
            parts[part].append(prompt)
            if len(parts[part]) == needs[part]:
                break
    return parts[0], parts[1]


def _groups(table: Table, column: str | None) -> dict[Any, list[int]]:
    """Row indices by the value of `column`; each row for itself without one."""
    if column is None:
        return {index: [index] for index in range(len(table.rows))}
    _require(table, column)
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(table.rows[column]):
        groups.setdefault(value, []).append(index)
    return groups


def _text_of(table: Table, column: str | None) -> Callable[[dict[str, Any], int], str]:
    """How a row becomes a prompt: the preset's template, the named column, or the only one with a usual name."""
    if table.template is not None and column is None:
        return lambda row, index: _fill(table, row, index)
    chosen = column or _guess(table)
    _require(table, chosen)

    def read(row: dict[str, Any], index: int) -> str:
        value = row[chosen]
        if not isinstance(value, str):
            raise DatasetError(
                f"column {chosen!r} of {table.name} must hold text, row {index} holds {type(value).__name__}"
            )
        return value

    return read


def _fill(table: Table, row: dict[str, Any], index: int) -> str:
    assert table.template is not None
    try:
        return table.template.format(**row)
    except (KeyError, IndexError) as cause:
        raise DatasetError(
            f"row {index} of {table.name} does not fit its template {table.template!r}: no {cause}; "
            f"its columns are {', '.join(table.columns)}"
        ) from None


def _guess(table: Table) -> str:
    usual = [name for name in USUAL_COLUMNS if name in table.columns]
    if not usual:
        raise DatasetError(
            f"{table.name} has no column with a usual name for prompts ({', '.join(USUAL_COLUMNS)}): name one of its columns, "
            f"{', '.join(table.columns)}, with --prompt-column"
        )
    return usual[0]


def _require(table: Table, column: str) -> None:
    if column not in table.columns:
        raise DatasetError(f"{table.name} has no column {column!r}; its columns are {', '.join(table.columns)}")
