"""Rows of a dataset, from wherever they are.

The library `datasets` reads all sources, in a process of its own (`tuner.inputs.reader`). A source is the first match of:

* a file: .jsonl, .json, .csv, .parquet (also followed by .gz), or .txt (prompts separated by blank lines if there are any,
  otherwise one per line);
* a folder, `folder[:config][@split]`, written by `save_to_disk` or with data files, whose names tell the splits; a config is a
  subfolder;
* a preset of `configs/datasets`, `name[@split]`: a YAML file that says where a well-known dataset is, and how its rows become
  prompts and examples;
* a hub id, `owner/name[:config][@split]`.

A split may be a slice such as `test[:100]`, except in folders written by `save_to_disk`. The default is the only split, or the
first of `test` (the least likely training data of a model), `validation` and `train`.

A source may end in `#column=value` or `#column=value|value`, such as `questions.jsonl#task=math`: only the rows with one of these
values are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from decoding.documents.strict_yaml import Document, read_mapping, suggest, validate
from tuner.errors import DatasetError
from tuner.inputs.data_files import FILE_KINDS, split_filter
from tuner.inputs.formats import Template
from tuner.inputs.reader import READER

_SOURCE = re.compile(r"(?P<location>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^@/]+))?")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def _parsable(written: str) -> str:
    Template.parse(written)
    return written


Written = Annotated[str, AfterValidator(_parsable)]


class Preset(Document):
    """Well-known dataset: its source, and the templates of its prompts and of the answers in examples."""

    description: str
    dataset: str = Field(description="hub id, address of a data file, or a folder laid out like a hub dataset")
    config: str | None = None
    revision: str | None = Field(None, description="branch or commit on the hub")
    split: str
    template: Written | None = None
    short_template: Written | None = Field(
        None, description="template for rows in which a column of `template` is blank; without it such rows are skipped"
    )
    turns: tuple[Written, ...] = Field(
        (),
        description="in place of `template`: a conversation, whose turns are the user's and the assistant's alternately",
    )
    answer_template: Written | None = Field(
        None, description="format of the answer of an example, after its prompt; there are `shots` before each prompt"
    )
    answer_on_one_line: bool = Field(
        False, description="remove the line breaks of answers, as the authors of a prompt do"
    )
    shots: int = Field(0, ge=0, description="solved examples before each prompt")
    shots_split: str | None = Field(None, description="split of the examples; default: the first rows of the dataset")
    shots_separator: str = Field("\n\n", description="text between two examples, and before the prompt")
    category_column: str | None = None
    categories: dict[str, str] = Field(
        default_factory=dict, description="names under which values of the category column are reported"
    )

    @property
    def templates(self) -> tuple[Template, ...]:
        """Templates of a prompt, first match first; none if the preset makes conversations."""
        return tuple(Template.parse(written) for written in (self.template, self.short_template) if written)

    @property
    def turn_templates(self) -> tuple[Template, ...]:
        """Templates of the turns of a conversation; none if the preset makes single texts."""
        return tuple(Template.parse(written) for written in self.turns)

    @model_validator(mode="after")
    def _is_text_or_conversation(self) -> Preset:
        if (self.template is None) != bool(self.turns) or (self.turns and len(self.turns) % 2 == 0):
            raise ValueError(
                "a preset has either a template or an odd number of turns, the last of which is the user's"
            )
        if bool(self.shots) != (self.answer_template is not None) or (self.shots and self.turns):
            raise ValueError("shots need an answer_template, which is for shots only, and texts")
        return self


def preset_names() -> list[str]:
    files = resources.files("configs.datasets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    if name not in preset_names():
        raise DatasetError(f"no such preset {name!r}; {suggest(name, preset_names())}")
    with resources.as_file(resources.files("configs.datasets") / f"{name}.yaml") as path:
        data = read_mapping(path, what="preset", error=DatasetError)
    return validate(Preset, data, source=f"preset {name}", error=DatasetError)


class ColumnFacts(NamedTuple):
    is_plain: bool
    """True if it holds single values, not lists or mappings."""
    is_chat: bool
    """True if it holds lists of messages."""
    names: tuple[str, ...] | None
    """Names of the classes that its numbers stand for, if they do."""


@dataclass(frozen=True)
class Table:
    """Rows of one split, which the reader hands out, and the preset that was named, if any."""

    name: str
    location: str
    """Source without config, split and filter."""
    preset: Preset | None
    columns: Mapping[str, ColumnFacts]
    num_rows: int
    order: Mapping[str, Any]
    """What the reader has read."""

    def require(self, column: str) -> None:
        """Raise `DatasetError` that lists the columns unless `column` is one of them."""
        if column not in self.columns:
            raise DatasetError(f"the dataset {self.name} has no column {column!r}; {suggest(column, self.columns)}")

    def row(self, index: int, columns: set[str]) -> dict[str, Any]:
        """Return the values of one row in `columns`. Values that JSON does not have become mappings."""
        return dict(READER.ask({"do": "row", "order": self.order, "columns": sorted(columns), "row": index}))

    def values(self, column: str) -> list[Any]:
        return list(READER.ask({"do": "columns", "order": self.order, "columns": [column]})[column])


def open_table(source: str) -> Table:
    """Open `source`, in the syntax of this module.

    Raises `DatasetError` if the source, config, split, or column or value of its filter, does not exist or cannot be read.
    """
    unfiltered, chosen = (source, None) if _existing(source) is not None else split_filter(source)
    location, config, split = _parse(unfiltered)
    path, preset, revision = _existing(location), None, None
    where, kind = location, "hub"
    if path is not None:
        kind, where = _kind_of(path), str(path.resolve())
        if kind == "file" and (config or split):
            raise DatasetError(f"the file {location} has no configs and no splits, got {unfiltered!r}")
    elif location in preset_names():
        if config:
            raise DatasetError(
                f"the preset {location!r} has its own config, got {unfiltered!r}; write {location}[@split]"
            )
        preset = load_preset(location)
        where, config, revision, split = preset.dataset, preset.config, preset.revision, split or preset.split
        here = _existing(where)
        kind = "address" if where.startswith("https://") else "hub" if here is None else _kind_of(here)
    else:
        refuse_unknown(unfiltered)
    name = _name(location, None if preset else config, split)
    order = {
        "kind": kind,
        "location": where,
        "config": config,
        "split": split,
        "revision": revision,
        "filter": chosen,
        "name": name,
    }
    found = READER.ask({"do": "open", "order": order})
    name = _name(location, None if preset else config, found["split"])
    columns = {
        each: ColumnFacts(facts["is_plain"], facts["is_chat"], facts["names"] and tuple(facts["names"]))
        for each, facts in found["columns"].items()
    }
    only = f"#{chosen[0]}={'|'.join(chosen[1])}" if chosen else ""
    return Table(f"{name}{only}", location, preset, columns, found["num_rows"], order)


def _kind_of(path: Path) -> str:
    if not path.is_file() and not path.is_dir():
        raise DatasetError(f"the dataset {path} is neither a file nor a folder")
    return "file" if path.is_file() else "folder"


def refuse_unknown(source: str) -> None:
    """Raise `DatasetError` for a source that is neither there nor may be on the hub; reads nothing."""
    if _existing(source) is None:
        source, _ = split_filter(source)
    location, _, _ = _parse(source)
    if _existing(location) is not None or location in preset_names():
        return
    if _HUB_ID.fullmatch(location) is None or Path(location).suffix.lower() in FILE_KINDS:
        raise DatasetError(
            f"no such dataset {source!r}: neither a file, a folder, a preset nor a hub id (owner/name[:config][@split]); "
            f"presets: {suggest(location, preset_names())}"
        )


def _parse(source: str) -> tuple[str, str | None, str | None]:
    if _existing(source) is not None:
        return source, None, None
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise DatasetError(f"no such dataset {source!r}: give a file, a folder, a preset or a hub id")
    return match["location"], match["config"], match["split"]


def _existing(location: str) -> Path | None:
    try:
        path = Path(location).expanduser()
        return path if location.strip() and path.exists() else None
    except (OSError, RuntimeError):  # not a usable path: too long, below an unreadable folder, or an unknown home
        return None


def _name(location: str, config: str | None, split: str | None) -> str:
    return location + (f":{config}" if config else "") + (f"@{split}" if split else "")
