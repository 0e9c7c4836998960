"""Rows of a dataset, and the templates that turn rows into prompts.

The library `datasets` reads all sources. A source is the first match of:

* a file: .jsonl, .json, .csv, .parquet, or .txt (prompts separated by blank lines if there are any, otherwise one per line);
* a folder, `folder[:config][@split]`, written by `save_to_disk` or laid out like a hub dataset (data files, optionally listed in
  a README.md);
* a preset of `configs/datasets`, `name[@split]`;
* a hub id, `owner/name[:config][@split]`.

A split may be a slice such as `test[:100]`, except in folders written by `save_to_disk`. The default is the only split, or the
first of `test` (the least likely training data of a model), `validation` and `train`.

A source may end in `#column=value` or `#column=value|value`, such as `questions.jsonl#task=math`: only the rows with one of these
values are read.
"""

from __future__ import annotations

import logging
import re
import string
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from decoding.documents.strict_yaml import Document, read_mapping, suggest, validate
from decoding.errors import one_line
from tuner.errors import DatasetError
from tuner.inputs.row_filter import split_filter

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
FILE_KINDS = (*BUILDERS, ".txt")
USUAL_SPLITS = ("test", "validation", "train")
_SOURCE = re.compile(r"(?P<location>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^@/]+))?")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_COLUMN = re.compile(r"(?P<name>[^\[\]]+)(?P<steps>(?:\[[^\[\]]+\])*)")


class Column(NamedTuple):
    """Column, or an element of its values: `question`, `turns[0]`, `translation[de]`."""

    name: str
    steps: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, written: str) -> Column:
        """Parse a name with optional bracketed steps; raise `ValueError` for anything else."""
        match = _COLUMN.fullmatch(written)
        if match is None:
            raise ValueError(f"{written!r} is not a column; write it as question, turns[0] or translation[de]")
        steps = re.findall(r"\[([^\[\]]+)\]", match["steps"])
        return cls(match["name"], tuple(int(step) if step.isdecimal() else step for step in steps))

    def read(self, row: Mapping[str, Any]) -> str:
        """Return the column's text in `row`, empty if missing.

        Raises `ValueError` if the value is not text.
        """
        value = row[self.name]
        for step in self.steps:
            if value is None or (isinstance(value, list) and isinstance(step, int) and step >= len(value)):
                return ""
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"column {self.name!r} has no element [{step}]") from None
        if value is None:
            return ""
        if not isinstance(value, str):
            inside = f"; name an element of it, such as {self.name}[0]" if isinstance(value, list) else ""
            raise ValueError(f"column {self.name!r} holds {type(value).__name__}, not text{inside}")
        return value


@dataclass(frozen=True)
class Template:
    """Text with columns in braces, such as `Question: {question}`; literal braces are doubled."""

    parts: tuple[tuple[str, Column | None], ...]

    @classmethod
    def parse(cls, written: str) -> Template:
        """Parse a template; raise `ValueError` for unbalanced braces, formats or conversions."""
        parts = []
        for text, column, form, conversion in string.Formatter().parse(written):
            if form or conversion:
                raise ValueError(f"{{{column}}} takes no format and no conversion")
            parts.append((text, None if column is None else Column.parse(column)))
        return cls(tuple(parts))

    @property
    def columns(self) -> set[str]:
        """Names of the columns that the template reads."""
        return {column.name for _, column in self.parts if column}

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of `row`, empty if a column is blank.

        Raises `ValueError` if a value is not text.
        """
        pieces = []
        for text, column in self.parts:
            value = column.read(row) if column else ""
            if column and not value.strip():
                return ""
            pieces.append(text + value)
        return "".join(pieces)


def _parsable(written: str) -> str:
    Template.parse(written)
    return written


class Preset(Document):
    """Well-known dataset: its source, and the templates of its prompts."""

    description: str
    dataset: str = Field(description="hub id, or a folder laid out like a hub dataset")
    config: str | None = None
    revision: str | None = Field(None, description="branch or commit on the hub")
    split: str
    columns: tuple[str, ...] = Field(min_length=1, description="columns that the templates read")
    template: Annotated[str, AfterValidator(_parsable)]
    short_template: Annotated[str, AfterValidator(_parsable)] | None = Field(
        None, description="template for rows in which a column of `template` is blank; without it such rows are skipped"
    )

    @property
    def templates(self) -> tuple[Template, ...]:
        """Templates, first match first."""
        return tuple(Template.parse(written) for written in (self.template, self.short_template) if written)

    @model_validator(mode="after")
    def _columns_are_used(self) -> Preset:
        used = set().union(*(template.columns for template in self.templates))
        if used != set(self.columns):
            raise ValueError(f"columns must match the templates, {sorted(used)}, got {sorted(self.columns)}")
        return self


@dataclass(frozen=True)
class Table:
    """Rows of one split (a `datasets.Dataset`), and the templates of their preset, if any."""

    name: str
    rows: Any
    templates: tuple[Template, ...] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.rows.column_names)

    def require(self, column: str) -> None:
        """Raise `DatasetError` that lists the columns unless `column` is one of them."""
        if column not in self.columns:
            raise DatasetError(
                f"the dataset {self.name} has no column {column!r}; its columns are {', '.join(self.columns)}"
            )


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    files = resources.files("configs.datasets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """Return the preset `name`; raise `DatasetError` if it is missing or invalid."""
    with resources.as_file(resources.files("configs.datasets") / f"{name}.yaml") as path:
        data = read_mapping(path, what="preset", error=DatasetError)
    return validate(Preset, data, source=f"preset {name}", error=DatasetError)


def open_table(source: str, *, split: str | None = None) -> Table:
    """Open `source`, in the syntax of this module; `split` is the same as `@split`.

    Raises `DatasetError` if the source, config, split, or column or value of its filter, does not exist or cannot be read.
    """
    unfiltered, chosen = (source, None) if _existing(source) is not None else split_filter(source)
    table = _open(unfiltered, split)
    if chosen is None:
        return table
    return replace(table, name=f"{table.name}{chosen}", rows=chosen.apply(table.rows, table.name))


def _open(source: str, split: str | None) -> Table:
    """Open a source without a filter."""
    location, config, split = _parse(source, split)
    path = _existing(location)
    if path is not None and path.is_file():
        if config or split:
            raise DatasetError(f"the file {location} has no configs and no splits, got {source!r} with split {split!r}")
        return Table(location, _read_file(path))
    if path is not None:
        rows, split = _read_folder(path, config, split)
        return Table(_name(location, config, split), rows)
    if location in preset_names():
        if config:
            raise DatasetError(f"the preset {location!r} has its own config, got {source!r}; write {location}[@split]")
        preset = load_preset(location)
        rows, split = _read_repository(preset.dataset, preset.config, split or preset.split, preset.revision)
        return Table(_name(location, None, split), rows, preset.templates)
    if _HUB_ID.fullmatch(location) is None or Path(location).suffix.lower() in FILE_KINDS:
        raise DatasetError(
            f"no such dataset {source!r}: neither a file, a folder, a preset nor a hub id (owner/name[:config][@split]); "
            f"presets: {suggest(location, preset_names())}"
        )
    rows, split = _read_repository(location, config, split)
    return Table(_name(location, config, split), rows)


def _parse(source: str, split: str | None) -> tuple[str, str | None, str | None]:
    if _existing(source) is not None:
        return source, None, split
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise DatasetError(f"no such dataset {source!r}: give a file, a folder, a preset or a hub id")
    if split and match["split"] and split != match["split"]:
        raise DatasetError(f"the dataset {source!r} names another split than the split given separately, {split!r}")
    return match["location"], match["config"], split or match["split"]


def _existing(location: str) -> Path | None:
    try:
        path = Path(location).expanduser()
        return path if location.strip() and path.exists() else None
    except (OSError, RuntimeError):  # not a usable path: too long, below an unreadable folder, or an unknown home
        return None


def _name(location: str, config: str | None, split: str | None) -> str:
    return location + (f":{config}" if config else "") + (f"@{split}" if split else "")


def _read_file(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind not in FILE_KINDS:
        raise DatasetError(
            f"the dataset file {path} has an unsupported format, {kind!r}; valid: {', '.join(FILE_KINDS)}"
        )
    with _reading(f"the dataset file {path}"):
        import datasets

        if path.stat().st_size == 0:
            raise DatasetError(f"the dataset file {path} is empty")
        if kind == ".txt":
            return datasets.Dataset.from_dict({"text": _paragraphs(path.read_text(encoding="utf-8-sig"))})
        # `datasets` treats the name as a glob pattern, so brackets and asterisks are escaped.
        found = datasets.load_dataset(BUILDERS[kind], data_files=escape(str(path.resolve())))
        return _choose(found, None, str(path))[0]


def _paragraphs(text: str) -> list[str]:
    blocks = re.split(r"\n(?:[ \t]*\n)+", text.strip("\n"))
    return blocks if len(blocks) > 1 else text.split("\n")


def _read_folder(path: Path, config: str | None, split: str | None) -> tuple[Any, str | None]:
    if not any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
        return _read_repository(str(path), config, split)
    if config:
        raise DatasetError(f"the folder {path} was written by save_to_disk and has no configs, got {config!r}")
    with _reading(f"the dataset folder {path}"):
        import datasets

        found = datasets.load_from_disk(str(path))
        if isinstance(found, Mapping):
            return _choose(found, split, str(path))
        if split:
            raise DatasetError(f"the folder {path} holds one dataset without splits, got split {split!r}")
        return found, None


def _read_repository(
    location: str, config: str | None, split: str | None, revision: str | None = None
) -> tuple[Any, str | None]:
    """Return the rows and the split of a hub dataset or similar folder."""
    folder = _existing(location)
    if folder is None:
        what, advice = (
            f"the hub dataset {location!r}",
            "a hub id is owner/name[:config][@split]; a file or folder needs no hub",
        )
    else:
        what, advice = f"the dataset folder {location}", f"it should hold data files ({', '.join(FILE_KINDS)})"
    with _reading(what, advice):
        import datasets

        # An absolute path, as `datasets` would take a folder named `json` or `text` for one of its builders.
        where = location if folder is None else str(folder.resolve())
        found = datasets.load_dataset(where, config, split=split, revision=revision if folder is None else None)
        return _choose(found, None, location) if split is None else (found, split)


def _choose(found: Mapping[str, Any], split: str | None, location: str) -> tuple[Any, str]:
    names = list(found)
    if not names:
        raise DatasetError(f"the dataset {location} holds no splits")
    chosen = split or (names[0] if len(names) == 1 else next((usual for usual in USUAL_SPLITS if usual in names), None))
    if chosen is None:
        raise DatasetError(
            f"the dataset {location} has several splits: name one as {location}@split; valid: {', '.join(names)}"
        )
    if chosen not in names:
        raise DatasetError(f"the dataset {location} has no split {chosen!r}; {suggest(chosen, names)}")
    return found[chosen], chosen


@contextmanager
def _reading(what: str, advice: str = "") -> Iterator[None]:
    """Silence the readers, and turn every failure into a one-line `DatasetError`."""
    try:
        with _quiet():
            yield
    except DatasetError:
        raise
    # Every format and the hub's client raise their own errors; to the user each means that this source cannot be read.
    except Exception as cause:
        raise DatasetError(f"cannot read {what}: {_reason(cause)}" + (f"; {advice}" if advice else "")) from cause


def _reason(cause: BaseException) -> str:
    from datasets.exceptions import DatasetGenerationError

    while isinstance(cause, DatasetGenerationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return one_line(cause)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, logs and warnings of `datasets` and the hub's client temporarily."""
    import datasets
    from huggingface_hub import utils as hub

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = [
        (hub.are_progress_bars_disabled(), hub.disable_progress_bars, hub.enable_progress_bars),
        (not datasets.is_progress_bar_enabled(), datasets.disable_progress_bars, datasets.enable_progress_bars),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL + 1)
            for were_disabled, disable, _ in bars:
                if not were_disabled:
                    disable()
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            for were_disabled, _, enable in bars:
                if not were_disabled:
                    enable()
