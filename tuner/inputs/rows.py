"""A dataset with the format of its rows, checked before a model is loaded: columns, templates, examples, categories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.datasets import Preset, Table, load_preset, open_table
from tuner.inputs.formats import (
    CONVERSATION_COLUMNS,
    Column,
    RowFormat,
    Template,
    columns_of,
    conversation_format,
    first_text,
    text_format,
    turns_format,
)

DEFAULT_COLUMNS = ("prompt", "text", "question", "instruction", "input", "query", "problem", "article", "document")
CATEGORY_COLUMNS = ("category", "task", "subset")
FIRST_TURN = "turns"
"""Column of benchmarks that lists the turns of the user alone, of which the first makes the prompt."""


@dataclass(frozen=True)
class PromptRows:
    table: Table
    form: RowFormat
    groups: list[Any] | None
    """Group of each row; None if rows are not grouped."""
    group_column: str | None
    category_column: str | None
    categories: Mapping[str, str]
    """Names under which values of the category column are reported."""

    def row(self, index: int) -> dict[str, Any]:
        return self.table.row(index, {*self.form.columns, *filter(None, [self.category_column])})

    def category(self, row: Mapping[str, Any]) -> str | None:
        """Return the category of a row, by its name if the column holds numbers of named classes."""
        value = None if self.category_column is None else row[self.category_column]
        if self.category_column is None or value is None or value == "":
            return None
        classes = self.table.columns[self.category_column].names
        name = str(classes[value] if classes is not None and isinstance(value, int) else value)
        # Shown in tables and kept in the profile, which takes no control characters.
        return self.categories.get(name, "".join(each if each.isprintable() else " " for each in name))


def open_rows(source: str, settings: PromptSettings) -> PromptRows:
    """Open a dataset (syntax: `tuner.inputs.datasets`) and decide the format of its rows.

    Raises `DatasetError` for a missing or unreadable source or column, a wrong template, or too few examples.
    """
    table = open_table(source)
    preset = load_preset(settings.preset) if settings.preset is not None else table.preset
    form = _format(table, preset, settings)
    for column in sorted(form.columns):
        table.require(column)
    category_column = _category_column(table, form, preset, settings.category_column)
    categories = preset.categories if preset is not None and category_column == preset.category_column else {}
    groups = _groups(table, settings.group_column)
    return PromptRows(table, form, groups, settings.group_column, category_column, categories)


def _format(table: Table, preset: Preset | None, settings: PromptSettings) -> RowFormat:
    """Return the format that the settings, the preset or the columns ask for, in this order."""
    if settings.template is not None:
        return text_format([_parsed(settings.template)])
    if settings.prompt_column is not None:
        return _of_column(table, settings.prompt_column)
    if preset is not None:
        return turns_format(preset.turn_templates) if preset.turns else _preset_format(table, preset)
    return _guessed(table)


def _parsed(written: str) -> Template:
    try:
        template = Template.parse(written)
    except ValueError as cause:
        raise DatasetError(f"template: {cause}; write {{{{ and }}}} for braces") from None
    if not template.columns:
        raise DatasetError(f"template: {written!r} names no column; write one in braces, such as {{question}}")
    return template


def _of_column(table: Table, written: str) -> RowFormat:
    if written in table.columns:
        if table.columns[written].is_chat:
            return conversation_format(written)
        return text_format([Template.of_column(Column(written))])
    try:
        return text_format([Template.of_column(Column.parse(written))])
    except ValueError as cause:
        raise DatasetError(f"prompt column of the dataset {table.name}: {cause}") from None


def _guessed(table: Table) -> RowFormat:
    """Return the format of the first usual column of conversations, or of the only usual column of texts."""
    chats = [column for column in CONVERSATION_COLUMNS if column in table.columns]
    if found := next((column for column in chats if table.columns[column].is_chat), None):
        return conversation_format(found)
    usual = [name for name in DEFAULT_COLUMNS if name in table.columns]
    if not usual and FIRST_TURN in table.columns:
        note = f"prompts are the first of the user's turns in the column {FIRST_TURN!r}"
        return text_format([Template.of_column(Column(FIRST_TURN, (0,)))], notes=(note,))
    if len(usual) != 1:
        problem = (
            f"{' and '.join(map(repr, usual))} could each be" if usual else "none of its columns has a usual name for"
        )
        raise DatasetError(
            f"which column of the dataset {table.name} is the prompt? {problem} it; name one with --prompt-column, or give a "
            f"--template; columns: {', '.join(table.columns)}"
        )
    return text_format([Template.of_column(Column(usual[0]))])


def _preset_format(table: Table, preset: Preset) -> RowFormat:
    """Return the format of a preset of single texts, with its solved examples before each prompt."""
    if preset.answer_template is None:
        return text_format(preset.templates)
    is_copy = preset is not table.preset or preset.shots_split is None  # which has its first rows as examples
    source = table if is_copy else open_table(f"{table.location}@{preset.shots_split}")
    answer = Template.parse(preset.answer_template)
    for column in sorted(columns := columns_of([*preset.templates, answer])):
        source.require(column)
    solved: dict[str, str] = {}
    for index in range(source.num_rows):
        row = source.row(index, set(columns))
        try:
            question, solution = first_text(preset.templates, row), answer.render(row)
        except ValueError as cause:
            raise DatasetError(f"row {index} of the dataset {source.name}: {cause}") from None
        if question and solution:
            solved.setdefault(question, solution.replace("\n", "") if preset.answer_on_one_line else solution)
        if len(solved) == preset.shots:
            return text_format(preset.templates, [*solved.items()], preset.shots_separator)
    raise DatasetError(
        f"the dataset {source.name} has only {len(solved)} rows with prompt and answer, and the preset needs {preset.shots}"
    )


def _category_column(table: Table, form: RowFormat, preset: Preset | None, given: str | None) -> str | None:
    """Return the column of the categories: the given one, the preset's, or the first usual one that holds single values."""
    if given is None:
        usual = [preset.category_column] if preset is not None and preset.category_column else CATEGORY_COLUMNS
        fitting = (name for name in usual if name in table.columns and name not in form.columns)
        return next((name for name in fitting if table.columns[name].is_plain), None)
    table.require(given)
    if not table.columns[given].is_plain:
        raise DatasetError(
            f"category column {given!r} of the dataset {table.name} holds lists or mappings, it must hold text or numbers"
        )
    return given


def _groups(table: Table, group_column: str | None) -> list[Any] | None:
    if group_column is None:
        return None
    table.require(group_column)
    groups = table.values(group_column)
    strange = next((group for group in groups if isinstance(group, list | dict)), None)
    if strange is not None:
        raise DatasetError(
            f"group column {group_column!r} of the dataset {table.name} holds {type(strange).__name__}, "
            "it must hold text or numbers"
        )
    return groups
