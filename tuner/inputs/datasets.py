"""Rows of a dataset, from wherever they are.

The library `datasets` reads all sources, in a process of its own (`tuner.inputs.reader`). A source is the first match of:

* a file: .jsonl, .json, .csv, .parquet (also followed by .gz), or .txt (prompts separated by blank lines if there are any,
  otherwise one per line);
* a folder, `folder[:config][@split]`, written by `save_to_disk` or with data files, whose names tell the splits; a config is a
  subfolder;
* a preset of `configs/datasets`, `name[@split]`;
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
from pathlib import Path
from typing import Any, NamedTuple

from decoding.documents.strict_yaml import suggest
from tuner.errors import DatasetError
from tuner.inputs.data_files import FILE_KINDS, split_filter
from tuner.inputs.presets import Preset, load_preset, preset_names
from tuner.inputs.reader import READER

_SOURCE = re.compile(r"(?P<location>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^@/]+))?")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


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
            raise DatasetError(
                f"the dataset {self.name} has no column {column!r}; its columns are {', '.join(self.columns)}"
            )

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
