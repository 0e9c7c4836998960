"""Prompts as token ids, in two disjoint parts: tuning and held-out.

Rows and their format come from `tuner.inputs.rows`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decoding.exit_heads import prompt_sha256
from tuner.config import SearchConfig
from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.encoding import PromptEncoder
from tuner.inputs.formats import LeftOut, Reason
from tuner.inputs.reading import LengthLimits, Prompt, PromptReader, left_out, reading_notes
from tuner.inputs.rows import PromptRows, open_rows

DEFAULT_FORMAT = PromptSettings()
"""Columns and templates as guessed."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a search; `fingerprint` is a SHA-256 of both parts' token ids."""

    name: str
    fingerprint: str
    tuning: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    spare: tuple[Prompt, ...] = ()
    """Further prompts to train on. They share neither prompts nor groups with the held-out ones."""
    notes: tuple[str, ...] = ()
    """Lines for the user: prompts that were left out or cut, and what a prompt is where it may not be expected."""


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
    settings: PromptSettings = DEFAULT_FORMAT,
    rows: PromptRows | None = None,
    held_out_sha256: Sequence[str] = (),
) -> PromptSet:
    """Draw tuning and held-out prompts from `source` (syntax: `tuner.inputs.datasets`), determined by `seed`.

    Rows are drawn at random, and only the rows that are needed are tokenized. Empty and repeated prompts are skipped, and prompts
    that with `max_new_tokens` exceed the context are left out, unless `settings` cut them; the notes of the result report it. Rows
    with equal values in the group column stay in one part. The category column labels prompts and does not change which are drawn.

    Up to `num_spare` further prompts are drawn from the remaining rows that fit; they do not change the two parts. `rows` are those
    of `source`, if they are open already. With `held_out_sha256` the held-out part is the prompts with these hashes, as many as the
    dataset has, in this order, and `num_held_out` is ignored.

    Raises `DatasetError` for a missing or unreadable source or column, a template or system prompt that cannot be used, limits that
    leave no room, or too few prompts.
    """
    if num_tuning < 1 or num_held_out < 0:
        raise DatasetError(
            f"num_tuning must be at least 1 and num_held_out at least 0, got {num_tuning} and {num_held_out}"
        )
    limits = LengthLimits(context_length, max_new_tokens, settings.max_prompt_tokens)
    rows = rows or open_rows(source, settings)
    encoder = PromptEncoder(tokenizer, settings.chat_template, settings.system_prompt)
    encoder.check()
    reader = PromptReader(rows, encoder, limits)
    if held_out_sha256:
        parts = _draw_around(reader, num_tuning, held_out_sha256, seed)
    else:
        parts = _draw(reader, (num_tuning, num_held_out), seed)
    return parts if num_spare < 1 else replace(parts, spare=tuple(_spare(reader, parts, num_spare, seed)))


def search_prompts(
    config: SearchConfig,
    tokenizer: Any,
    context_length: int | None,
    *,
    num_spare: int = 0,
    rows: PromptRows | None = None,
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
        settings=config,
        rows=rows,
    )


def _draw(reader: PromptReader, sizes: tuple[int, int], seed: int) -> PromptSet:
    groups, read = reader.rows.groups, list[Prompt | LeftOut]()
    part_of_group = {} if groups is None else _deal(groups, sizes, seed)
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    seen: set[tuple[int, ...]] = set()
    for index in _shuffled(reader.num_rows, seed):
        part = int(len(parts[0]) == sizes[0]) if groups is None else part_of_group[groups[index]]
        if len(parts[part]) == sizes[part]:
            continue
        found = reader.read(index, seen)
        read.append(found)
        if isinstance(found, Prompt):
            seen.add(found.token_ids)
            parts[part].append(found)
            if all(len(filled) == size for filled, size in zip(parts, sizes, strict=True)):
                break
    tuning, held_out = parts
    if (len(tuning), len(held_out)) != sizes:
        raise _too_few(reader, read, (len(tuning), len(held_out)), sizes)
    notes = (*reader.notes, *reading_notes(read, reader.limits))
    return PromptSet(reader.rows.table.name, _fingerprint(parts), tuple(tuning), tuple(held_out), notes=notes)


def _draw_around(reader: PromptReader, num_tuning: int, held_out_sha256: Sequence[str], seed: int) -> PromptSet:
    """Read rows in random order until the held-out prompts are found; tuning prompts are of the other rows."""
    found: dict[str, Prompt] = {}
    wanted = set(held_out_sha256)
    for index in _shuffled(reader.num_rows, seed):
        prompt = reader.read(index)
        if isinstance(prompt, Prompt) and (sha256 := prompt_sha256(prompt.token_ids)) in wanted:
            found.setdefault(sha256, prompt)
            if len(found) == len(wanted):
                break
    held_out = [found[sha256] for sha256 in held_out_sha256 if sha256 in found]
    known = PromptSet(reader.rows.table.name, "", (), tuple(held_out), notes=reader.notes)
    tuning = list(_spare(reader, known, num_tuning, seed))
    return replace(known, fingerprint=_fingerprint((tuning, held_out)), tuning=tuple(tuning))


def _too_few(
    reader: PromptReader, read: Sequence[Prompt | LeftOut], found: tuple[int, int], sizes: tuple[int, int]
) -> DatasetError:
    column = reader.rows.group_column
    apart = f" when no {column!r} is in both" if column else ""
    missing = left_out(read, reader.limits)
    advice = f"; {reader.limits.advice}" if Reason.TOO_LONG in missing else ""
    return DatasetError(
        f"too few prompts: the dataset {reader.rows.table.name} gives {found[0]} for tuning and {found[1]} held out{apart} "
        f"(rows left out: {'; '.join(missing.values()) or 'none'}), but {sizes[0]} and {sizes[1]} are needed{advice}"
    )


def _spare(reader: PromptReader, parts: PromptSet, most: int, seed: int) -> Iterator[Prompt]:
    """Yield up to `most` prompts of rows outside `parts`, in the same random order."""
    groups = reader.rows.groups
    drawn = (*parts.tuning, *parts.held_out)
    taken, seen = {prompt.row for prompt in drawn}, {prompt.token_ids for prompt in drawn}
    kept_apart = set() if groups is None else {groups[prompt.row] for prompt in parts.held_out}
    for index in _shuffled(reader.num_rows, seed):
        if most == 0:
            return
        if index in taken or (groups is not None and groups[index] in kept_apart):
            continue
        found = reader.read(index, seen)
        if isinstance(found, Prompt):
            seen.add(found.token_ids)
            most -= 1
            yield found


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
