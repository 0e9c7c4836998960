"""Prompts as token ids, in two disjoint parts: tuning and held-out.

Rows and their format come from `tuner.inputs.rows`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from decoding.exit_heads import prompt_sha256
from tuner.config import SearchConfig
from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.encoding import PromptEncoder, RefusedTurnsError
from tuner.inputs.formats import Content, LeftOut, Reason, Turn
from tuner.inputs.rows import PromptRows, open_rows

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""What SPEED-Bench (huggingface.co/datasets/nvidia/SPEED-Bench) publishes in place of many texts."""


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
        if PLACEHOLDER in content.text:
            raise DatasetError(
                f"{name} holds a placeholder in place of the prompt: SPEED-Bench's script prepare.py (in "
                "github.com/NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench) fetches the texts; give --dataset its file, such "
                "as qualitative.jsonl"
            )
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


FEWEST = 6
"""Prompts of each part with which a search begins, if the dataset has no more."""
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
    fewest: int | None = None,
) -> PromptSet:
    """Draw tuning and held-out prompts from `source` (syntax: `tuner.inputs.datasets`), determined by `seed`.

    Rows are drawn at random, and only the rows that are needed are tokenized. Empty and repeated prompts are skipped, and prompts
    that with `max_new_tokens` exceed the context are left out, unless `settings` cut them; the notes of the result report it. Rows
    with equal values in the group column stay in one part. The category column labels prompts and does not change which are drawn.

    Up to `num_spare` further prompts are drawn from the remaining rows that fit; they do not change the two parts. `rows` are those
    of `source`, if they are open already. With `held_out_sha256` the held-out part is the prompts with these hashes, as many as the
    dataset has, in this order, and `num_held_out` is ignored. With `fewest`, a dataset that has too few prompts is halved, if that
    gives this number for both parts.

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
        parts = _draw(reader, (num_tuning, num_held_out), seed, fewest)
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

    Unless the user gave their numbers, a dataset of few prompts is halved. `DatasetError` where that makes fewer than `fewest`.
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
        fewest=_fewest(config),
    )


def _fewest(config: SearchConfig) -> int | None:
    """Return the least prompts of a part; None if the user gave the numbers."""
    given = {"tuning_prompts", "held_out_prompts"} & config.model_fields_set
    return None if given else max(FEWEST, 2 * config.batch_size)


def check_rows(config: SearchConfig, rows: PromptRows) -> None:
    """Raise `DatasetError` if a dataset has not even the rows for the prompts of a search. Needs no tokenizer."""
    least = _fewest(config)
    needed = config.tuning_prompts + config.held_out_prompts if least is None else 2 * least
    if (count := rows.table.num_rows) < needed:
        raise DatasetError(
            f"too few prompts: the dataset {rows.table.name} has {count} rows, and {needed} are needed: {_way_out(count)}"
        )


def _way_out(count: int) -> str:
    flags = f", or --tuning-prompts {count - count // 2} --held-out-prompts {count // 2} for a wide interval"
    return f"give more{flags if count >= 4 else ''}"


def _draw(reader: PromptReader, sizes: tuple[int, int], seed: int, fewest: int | None) -> PromptSet:
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
    notes = (*reader.notes, *reading_notes(read, reader.limits))
    if (len(parts[0]), len(parts[1])) != sizes:
        if groups is None:
            drawn, middle = [*parts[0], *parts[1]], -(-(len(parts[0]) + len(parts[1])) // 2)
            parts = (drawn[:middle], drawn[middle:]) if fewest is not None else parts
        if fewest is None or min(map(len, parts)) < fewest:
            raise _too_few(reader, read, (len(parts[0]), len(parts[1])), sizes if fewest is None else (fewest, fewest))
        split = f"{len(parts[0])} for tuning and {len(parts[1])} held out"
        notes = (*notes, f"few prompts: {split}, so intervals will be wide; {sizes[0]} and {sizes[1]} are usual")
    tuning, held_out = parts
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
    needed = f"{sizes[0]} and {sizes[1]} are needed: {_way_out(sum(found))}{advice}"
    return DatasetError(
        f"too few prompts: the dataset {reader.rows.table.name} gives {found[0]} for tuning and {found[1]} held out{apart} "
        f"(rows left out: {'; '.join(missing.values()) or 'none'}), but {needed}"
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
