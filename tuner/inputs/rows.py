"""A dataset with the format of its rows, checked before a model is loaded: columns, templates, examples, categories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.datasets import Table, open_table
from tuner.inputs.formats import (
    CONVERSATION_COLUMNS,
    Column,
    ConversationFormat,
    Examples,
    RowFormat,
    Template,
    TextFormat,
    TurnsFormat,
)
from tuner.inputs.presets import Preset, load_preset

DEFAULT_COLUMNS = ("prompt", "text", "question", "instruction", "input", "query", "problem", "article", "document")
CATEGORY_COLUMNS = ("category", "task", "subset")
FIRST_TURN = "turns"
"""Column of benchmarks that lists the turns of the user alone, of which the first makes the prompt."""


@dataclass(frozen=True)
class PromptRows:
    """Rows of a dataset and what is made of them."""

    table: Table
    form: RowFormat
    groups: list[Any] | None
    """Group of each row; None if rows are not grouped."""
    group_column: str | None
    category_column: str | None
    categories: Mapping[str, str]
    """Names under which values of the category column are reported."""

    def row(self, index: int) -> dict[str, Any]:
        """Return a row with only the columns that are read."""
        return self.table.row(index, self.form.columns | ({self.category_column} if self.category_column else set()))

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

    Raises `DatasetError` for a missing or unreadable source or column, a wrong template, or examples that cannot be made.
    """
    table = open_table(source)
    preset = load_preset(settings.preset) if settings.preset is not None else table.preset
    form = _format(table, preset, settings)
    for column in sorted(form.columns):
        table.require(column)
    form = _with_examples(form, table, preset, settings)
    category_column = _category_column(table, form, preset, settings.category_column)
    categories = preset.categories if preset is not None and category_column == preset.category_column else {}
    groups = _groups(table, settings.group_column)
    return PromptRows(table, form, groups, settings.group_column, category_column, categories)


def _format(table: Table, preset: Preset | None, settings: PromptSettings) -> RowFormat:
    """Return the format that the settings, the preset or the columns ask for, in this order."""
    if settings.template is not None:
        return TextFormat((_parsed(settings.template, "template"),))
    if settings.prompt_column is not None:
        return _of_column(table, settings.prompt_column)
    if preset is not None:
        return TurnsFormat(preset.turn_templates) if preset.turns else TextFormat(preset.templates)
    return _guessed(table)


def _parsed(written: str, what: str) -> Template:
    try:
        template = Template.parse(written)
    except ValueError as cause:
        raise DatasetError(f"{what}: {cause}; write {{{{ and }}}} for braces") from None
    if not template.columns:
        raise DatasetError(f"{what}: {written!r} names no column; write one in braces, such as {{question}}")
    return template


def _of_column(table: Table, written: str) -> RowFormat:
    if written in table.columns:
        if table.columns[written].is_chat:
            return ConversationFormat(written)
        return TextFormat((Template((("", Column(written)),)),))
    try:
        return TextFormat((Template((("", Column.parse(written)),)),))
    except ValueError as cause:
        raise DatasetError(f"prompt column of the dataset {table.name}: {cause}") from None


def _guessed(table: Table) -> RowFormat:
    """Return the format of the first usual column of conversations, or of the only usual column of texts."""
    chats = [column for column in CONVERSATION_COLUMNS if column in table.columns]
    if found := next((column for column in chats if table.columns[column].is_chat), None):
        return ConversationFormat(found)
    usual = [name for name in DEFAULT_COLUMNS if name in table.columns]
    if not usual and FIRST_TURN in table.columns:
        note = f"prompts are the first of the user's turns in the column {FIRST_TURN!r}"
        return TextFormat((Template((("", Column(FIRST_TURN, (0,))),)),), notes=(note,))
    if len(usual) != 1:
        problem = (
            f"{' and '.join(map(repr, usual))} could each be" if usual else "none of its columns has a usual name for"
        )
        raise DatasetError(
            f"which column of the dataset {table.name} is the prompt? {problem} it; name one with --prompt-column, or give a "
            f"--template; columns: {', '.join(table.columns)}"
        )
    return TextFormat((Template((("", Column(usual[0])),)),))


def _with_examples(form: RowFormat, table: Table, preset: Preset | None, settings: PromptSettings) -> RowFormat:
    """Return the format with the solved examples that the settings or the preset ask for before each prompt."""
    num_shots = settings.shots if settings.shots is not None else (preset.shots if preset is not None else 0)
    if num_shots == 0:
        return form
    if not isinstance(form, TextFormat):
        raise DatasetError(
            "shots: a conversation takes no examples; give --set shots=0, or a --template of a single text"
        )
    written = settings.answer_template or (preset.answer_template if preset is not None else None)
    if written is None:
        raise DatasetError("shots: examples need answers; give --set answer_template=' {answer}'")
    answer = _parsed(written, "answer_template")
    source = _examples_source(table, preset, settings)
    for column in sorted(form.columns | answer.columns):
        source.require(column)
    found = _solved(source, form, answer, preset)
    solved = [pair for pair, _ in zip(found, range(num_shots), strict=False)]
    if len(solved) < num_shots:
        raise DatasetError(
            f"shots: the dataset {source.name} has only {len(solved)} rows with prompt and answer, and {num_shots} are needed"
        )
    questions, answers = zip(*solved, strict=True)
    separator = preset.shots_separator if preset is not None else Examples.separator
    return TextFormat(form.templates, Examples(questions, answers, separator), form.notes)


def _examples_source(table: Table, preset: Preset | None, settings: PromptSettings) -> Table:
    """Return the table of the examples: the given one, the preset's split, or the dataset itself."""
    if settings.shots_dataset is not None:
        return open_table(settings.shots_dataset)
    if table.preset is not None and preset is table.preset and preset.shots_split is not None:
        return open_table(f"{table.location}@{preset.shots_split}")
    return table


def _solved(source: Table, form: TextFormat, answer: Template, preset: Preset | None) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the answer of each different row that has both."""
    seen = set()
    for index in range(source.num_rows):
        row = source.row(index, form.columns | answer.columns)
        try:
            question, solution = form.question(row), answer.render(row)
        except ValueError as cause:
            raise DatasetError(f"row {index} of the dataset {source.name}: {cause}") from None
        if preset is not None and preset.answer_on_one_line:
            solution = solution.replace("\n", "")
        if question and solution and question not in seen:
            seen.add(question)
            yield question, solution


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
    """Return the group of each row, or None if rows are not grouped."""
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
