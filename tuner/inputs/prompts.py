"""Prompts as token ids, in two disjoint parts: tuning and held-out.

Rows come from `tuner.inputs.datasets`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from decoding.errors import one_line
from tuner.config import SearchConfig
from tuner.errors import DatasetError
from tuner.inputs.datasets import Column, Table, Template, open_table

DEFAULT_COLUMNS = ("prompt", "text", "question", "instruction", "input", "query", "problem", "article", "document")
CATEGORY_COLUMNS = ("category", "task", "subset")

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


@dataclass(frozen=True)
class Prompt:
    """Prompt: row in the dataset (from 0), token ids, text without chat template, category if the dataset has any."""

    row: int
    token_ids: tuple[int, ...]
    text: str
    category: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a search; `fingerprint` is a SHA-256 of both parts' token ids."""

    name: str
    fingerprint: str
    tuning: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    spare: tuple[Prompt, ...] = ()
    """Further prompts to train on. They share neither prompts nor groups with the held-out ones."""


def load_prompts(
    source: str,
    tokenizer: Any,
    *,
    num_tuning: int,
    num_held_out: int,
    num_spare: int = 0,
    max_new_tokens: int,
    context_length: int | None,
    seed: int,
    prompt_column: str | None = None,
    group_column: str | None = None,
    category_column: str | None = None,
    chat_template: bool = True,
    max_prompt_tokens: int | None = None,
    split: str | None = None,
) -> PromptSet:
    """Draw tuning and held-out prompts from `source` (syntax: `tuner.inputs.datasets`), determined by `seed`.

    Rows are drawn at random, and only the rows that are needed are tokenized. Empty and repeated prompts are skipped. Rows with
    equal values in `group_column` stay in one part. `prompt_column` (`question`, or `turns[0]` for an element) overrides a
    preset's template and the default columns. `category_column` (default: the first of `CATEGORY_COLUMNS` that exists) labels
    prompts and does not change which are drawn. With `max_prompt_tokens` a longer prompt is cut from the left, while special
    tokens and chat template stay whole.

    Up to `num_spare` further prompts are drawn from the remaining rows that fit; they do not change the two parts.

    Raises `DatasetError` for a missing or unreadable source or column, a prompt that with `max_new_tokens` exceeds the context,
    or too few prompts.
    """
    if num_tuning < 1 or num_held_out < 0:
        raise DatasetError(
            f"num_tuning must be at least 1 and num_held_out at least 0, got {num_tuning} and {num_held_out}"
        )
    limits = _Limits(context_length, max_new_tokens, max_prompt_tokens)
    table = open_table(source, split=split)
    templates = table.templates if table.templates and not prompt_column else (_one_column(table, prompt_column),)
    for column in sorted(set().union(*(template.columns for template in templates))):
        table.require(column)
    reader = _Reader(table, templates, tokenizer, chat_template, limits, _category_column(table, category_column))
    groups = _groups(table, group_column)
    parts = _draw(reader, groups, group_column, (num_tuning, num_held_out), seed)
    return parts if num_spare < 1 else replace(parts, spare=tuple(_spare(reader, groups, parts, num_spare, seed)))


def search_prompts(
    config: SearchConfig, tokenizer: Any, context_length: int | None, *, num_spare: int = 0
) -> PromptSet:
    """Return the prompts of a search for its configuration; see `load_prompts`.

    A distillation calls this too, so that it knows the search's held-out prompts and avoids them.
    """
    return load_prompts(
        config.dataset,
        tokenizer,
        num_tuning=config.tuning_prompts,
        num_held_out=config.held_out_prompts,
        num_spare=num_spare,
        max_new_tokens=config.max_new_tokens,
        context_length=context_length,
        seed=config.seed,
        prompt_column=config.prompt_column,
        group_column=config.group_column,
        category_column=config.category_column,
        chat_template=config.chat_template,
        max_prompt_tokens=config.max_prompt_tokens,
    )


def encode_prompt(text: str, tokenizer: Any, *, chat_template: bool = True) -> list[int]:
    """Return the token ids of one prompt.

    With `chat_template`, the prompt is rendered as a user turn if the tokenizer has a template. A chat template that inserts
    today's date is given a fixed one. Raises `DatasetError` if the template refuses a single user turn.
    """
    if not (chat_template and getattr(tokenizer, "chat_template", None)):
        return list(tokenizer(text, verbose=False)["input_ids"])
    try:
        template = tokenizer.get_chat_template()
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=_FIXED_DATE + template if "strftime_now" in template else template,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as cause:  # a chat template is a program and may raise anything
        reason = one_line(cause)
        raise DatasetError(
            f"the tokenizer's chat template fails on one user turn: {reason}; --no-chat-template turns it off"
        ) from cause
    # Encoded in a separate call, because `verbose=False` suppresses the tokenizer's warning about long sequences.
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


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


@dataclass(frozen=True)
class _Limits:
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


class _TooLongError(DatasetError):
    """Prompt that does not fit the context."""


@dataclass(frozen=True)
class _Reader:
    """Conversion of rows into prompts."""

    table: Table
    templates: tuple[Template, ...]
    tokenizer: Any
    chat_template: bool
    limits: _Limits
    category_column: str | None

    @property
    def rows(self) -> Any:
        """Rows with only the columns that the templates read."""
        needed = set().union(*(template.columns for template in self.templates))
        if self.category_column is not None:
            needed.add(self.category_column)
        return self.table.rows.with_format(None).select_columns(sorted(needed))

    def read(self, rows: Any, index: int) -> Prompt | None:
        """Return the prompt of a row, or None if it is empty."""
        row = rows[index]
        try:
            text = next((text for template in self.templates if (text := template.render(row))), "")
        except ValueError as cause:
            raise DatasetError(f"row {index} of the dataset {self.table.name}: {cause}") from None
        token_ids = self._encode(text) if text else []
        if not token_ids:
            return None
        longest, room = self.limits.max_prompt_tokens, self.limits.room
        if longest is not None and len(token_ids) > longest:
            text, token_ids = self._cut(text, longest)
        if room is not None and len(token_ids) > room:
            raise _TooLongError(
                f"row {index} of the dataset {self.table.name} makes a prompt of {len(token_ids)} tokens, but {self.limits}; "
                f"max_prompt_tokens: {room} would cut it from the left"
            )
        return Prompt(index, tuple(token_ids), text, self._category(row))

    def _category(self, row: Mapping[str, Any]) -> str | None:
        """Return the category of a row, by its name if the column holds numbers of named classes."""
        value = None if self.category_column is None else row[self.category_column]
        if value is None or isinstance(value, str):
            return value or None
        feature = self.table.rows.features[self.category_column]
        return str(feature.int2str(value) if hasattr(feature, "int2str") else value)

    def _encode(self, text: str) -> list[int]:
        return encode_prompt(text, self.tokenizer, chat_template=self.chat_template)

    def _cut(self, text: str, longest: int) -> tuple[str, list[int]]:
        found = cut_from_left(text, longest, self._encode)
        if found is None:
            raise DatasetError(
                f"max_prompt_tokens: {longest} leaves no room for text after special tokens and chat template"
            )
        return found


def _one_column(table: Table, prompt_column: str | None) -> Template:
    """Return a template of the given prompt column, or of the only default one."""
    if prompt_column is None:
        usual = [name for name in DEFAULT_COLUMNS if name in table.columns]
        if len(usual) != 1:
            problem = (
                f"{' and '.join(map(repr, usual))} could each be"
                if usual
                else "none of its columns has a usual name for"
            )
            raise DatasetError(
                f"which column of the dataset {table.name} is the prompt? {problem} it; name one with --prompt-column; "
                f"columns: {', '.join(table.columns)}"
            )
        return Template((("", Column(usual[0])),))
    if prompt_column in table.columns:
        return Template((("", Column(prompt_column)),))
    try:
        return Template((("", Column.parse(prompt_column)),))
    except ValueError as cause:
        raise DatasetError(f"prompt column of the dataset {table.name}: {cause}") from None


def _category_column(table: Table, given: str | None) -> str | None:
    """Return the column of the categories: the given one, or the first usual one that holds single values."""
    if given is None:
        return next((name for name in CATEGORY_COLUMNS if name in table.columns and _is_plain(table, name)), None)
    table.require(given)
    if not _is_plain(table, given):
        raise DatasetError(
            f"category column {given!r} of the dataset {table.name} holds lists or mappings, it must hold text or numbers"
        )
    return given


def _is_plain(table: Table, column: str) -> bool:
    """Return whether a column holds single values: lists and mappings have no type of their own."""
    return hasattr(table.rows.features[column], "dtype")


def _groups(table: Table, group_column: str | None) -> list[Any] | None:
    """Return the group of each row, or None if rows are not grouped."""
    if group_column is None:
        return None
    table.require(group_column)
    groups = list(table.rows.with_format(None)[group_column])
    strange = next((group for group in groups if isinstance(group, list | dict)), None)
    if strange is not None:
        raise DatasetError(
            f"group column {group_column!r} of the dataset {table.name} holds {type(strange).__name__}, "
            "it must hold text or numbers"
        )
    return groups


def _draw(
    reader: _Reader, groups: list[Any] | None, group_column: str | None, sizes: tuple[int, int], seed: int
) -> PromptSet:
    """Read rows in random order until both parts are full."""
    table, rows = reader.table, reader.rows
    part_of_group = {} if groups is None else _deal(groups, sizes, seed)
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    seen: set[tuple[int, ...]] = set()
    num_empty = num_repeated = 0
    for index in _shuffled(len(rows), seed):
        part = int(len(parts[0]) == sizes[0]) if groups is None else part_of_group[groups[index]]
        if len(parts[part]) == sizes[part]:
            continue
        prompt = reader.read(rows, index)
        if prompt is None:
            num_empty += 1
        elif prompt.token_ids in seen:
            num_repeated += 1
        else:
            seen.add(prompt.token_ids)
            parts[part].append(prompt)
            if all(len(filled) == size for filled, size in zip(parts, sizes, strict=True)):
                break
    tuning, held_out = parts
    if (len(tuning), len(held_out)) != sizes:
        apart = f" when no {group_column!r} is in both" if group_column else ""
        raise DatasetError(
            f"too few prompts: the dataset {table.name} gives {len(tuning)} for tuning and {len(held_out)} held out{apart} "
            f"({num_empty} empty and {num_repeated} repeated rows skipped), but {sizes[0]} and {sizes[1]} are needed"
        )
    return PromptSet(table.name, _fingerprint(parts), tuple(tuning), tuple(held_out))


def _spare(reader: _Reader, groups: list[Any] | None, parts: PromptSet, most: int, seed: int) -> Iterator[Prompt]:
    """Yield up to `most` prompts of rows outside `parts`, in the same random order."""
    rows = reader.rows
    drawn = (*parts.tuning, *parts.held_out)
    taken, seen = {prompt.row for prompt in drawn}, {prompt.token_ids for prompt in drawn}
    kept_apart = set() if groups is None else {groups[prompt.row] for prompt in parts.held_out}
    for index in _shuffled(len(rows), seed):
        if most == 0:
            return
        if index in taken or (groups is not None and groups[index] in kept_apart):
            continue
        try:
            prompt = reader.read(rows, index)
        except _TooLongError:
            continue
        if prompt is not None and prompt.token_ids not in seen:
            seen.add(prompt.token_ids)
            most -= 1
            yield prompt


def _deal(groups: list[Any], sizes: tuple[int, int], seed: int) -> dict[Any, int]:
    """Return the part of each group.

    Largest groups first, each to the part that lacks more prompts, so that both parts can be filled.
    """
    counts = Counter(groups)
    order = list(counts)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda group: -counts[group])
    lacking = list(sizes)
    part_of_group = {}
    for group in order:
        part = 0 if lacking[0] >= lacking[1] else 1
        part_of_group[group] = part
        lacking[part] -= counts[group]
    return part_of_group


def _shuffled(length: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `length` in random order, lazily: Fisher-Yates on a sparse list."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}
    for index in range(length):
        other = generator.randrange(index, length)
        yield moved.get(other, other)
        moved[other] = moved.pop(index, index)


def _fingerprint(parts: tuple[list[Prompt], list[Prompt]]) -> str:
    token_ids = [[prompt.token_ids for prompt in part] for part in parts]
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()
