"""Prompts of several tasks in equal numbers: the categories of a data set, and further data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.inputs.models import Loaded
from tuner.inputs.prompts import Prompt, PromptSet, load_prompts
from tuner.inputs.row_filter import split_filter
from tuner.inputs.rows import PromptRows, open_rows

NamedRows = tuple[str, PromptRows]


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise `ConfigError` for a task that is not NAME=DATASET, or a name that is given twice."""
    names = [_named_source(task)[0] for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"task: the name {twice!r} is given twice")


def task_prompts(
    config: SearchConfig,
    tasks: Sequence[str],
    loaded: Loaded,
    context_length: int | None,
    *,
    num_tuning: int,
    num_held_out: int,
) -> PromptSet:
    """Return `num_tuning` and `num_held_out` prompts of each task, whose name is their category, one of each task in turn.

    Raises `DatasetError` if a task has too few, and `ConfigError` for two tasks of one name.
    """
    found: dict[str, PromptSet] = {}
    for name, rows in _rows_of_tasks(config, tasks):
        if name in found:
            raise ConfigError(f"task: {name!r} is a category of the data set, too: give another name")
        found[name] = load_prompts(
            rows.table.name,
            loaded.tokenizer,
            num_tuning=num_tuning,
            num_held_out=num_held_out,
            max_new_tokens=config.max_new_tokens,
            context_length=context_length,
            seed=config.seed,
            settings=config,
            rows=rows,
        )
    fingerprints = ",".join(each.fingerprint for each in found.values())
    return PromptSet(
        name=config.dataset,
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        tuning=_in_turn({name: each.tuning for name, each in found.items()}),
        held_out=_in_turn({name: each.held_out for name, each in found.items()}),
        notes=tuple(f"{name}: {note}" for name, each in found.items() for note in each.notes),
    )


def _in_turn(parts: dict[str, tuple[Prompt, ...]]) -> tuple[Prompt, ...]:
    """Return one prompt of each task, then the next of each, labelled by the task."""
    return tuple(
        replace(prompt, category=name)
        for prompts in zip(*parts.values(), strict=True)
        for name, prompt in zip(parts, prompts, strict=True)
    )


def _rows_of_tasks(config: SearchConfig, tasks: Sequence[str]) -> Iterator[NamedRows]:
    """Yield the rows of each category of the data set, or all under its name, and those of further tasks."""
    rows = open_rows(config.dataset, config)
    categories = list(_by_category(rows))
    yield from categories or [(_source_name(config.dataset), rows)]
    for task in tasks:
        name, source = _named_source(task)
        yield name, open_rows(source, config.model_copy(update={"category_column": None}))


def _by_category(rows: PromptRows) -> Iterator[NamedRows]:
    """Yield the rows of each category, in the order of first appearance; rows without one are left out."""
    indices: dict[str, list[int]] = {}
    if rows.category_column is None:
        return
    for index, value in enumerate(rows.table.values(rows.category_column)):
        if (name := rows.category({rows.category_column: value})) is not None:
            indices.setdefault(name, []).append(index)
    for name, chosen in indices.items():
        groups = None if rows.groups is None else [rows.groups[index] for index in chosen]
        yield name, replace(rows, table=rows.table.select(chosen), groups=groups)


def _named_source(task: str) -> tuple[str, str]:
    name, sign, source = task.partition("=")
    if not name or not sign or not source or "#" in name:
        raise ConfigError(f"task: {task!r} is not NAME=DATASET, such as code=humaneval")
    return name, source


def _source_name(source: str) -> str:
    return Path(split_filter(source)[0]).stem
