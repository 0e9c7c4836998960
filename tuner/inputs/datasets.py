"""Rows of a dataset, from wherever they are.

The library `datasets` reads all sources. A source is the first match of:

* a file: .jsonl, .json, .csv, .parquet (also followed by .gz), or .txt (prompts separated by blank lines if there are any,
  otherwise one per line);
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

import gzip
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from decoding.documents.strict_yaml import suggest
from decoding.errors import one_line
from tuner.errors import DatasetError
from tuner.inputs.presets import Preset, load_preset, preset_names
from tuner.inputs.row_filter import split_filter

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
FILE_KINDS = (*BUILDERS, ".txt")
USUAL_SPLITS = ("test", "validation", "train")
_SOURCE = re.compile(r"(?P<location>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^@/]+))?")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Table:
    """Rows of one split (a `datasets.Dataset`), and the preset that was named, if any."""

    name: str
    rows: Any
    preset: Preset | None = None
    location: str = ""
    """Source without config, split and filter."""

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


def open_table(source: str, *, split: str | None = None) -> Table:
    """Open `source`, in the syntax of this module; `split` is the same as `@split`.

    Raises `DatasetError` if the source, config, split, or column or value of its filter, does not exist or cannot be read.
    """
    unfiltered, chosen = (source, None) if _existing(source) is not None else split_filter(source)
    table = _open(unfiltered, split)
    if chosen is None:
        return table
    return replace(table, name=f"{table.name}{chosen}", rows=chosen.apply(table.rows, table.name))


def refuse_unknown(source: str) -> None:
    """Raise `DatasetError` for a source that is neither there nor may be on the hub; reads nothing."""
    if _existing(source) is None:
        source, _ = split_filter(source)
    location, _, _ = _parse(source, None)
    if _existing(location) is not None or location in preset_names():
        return
    if _HUB_ID.fullmatch(location) is None or Path(location).suffix.lower() in FILE_KINDS:
        raise DatasetError(
            f"no such dataset {source!r}: neither a file, a folder, a preset nor a hub id (owner/name[:config][@split]); "
            f"presets: {suggest(location, preset_names())}"
        )


def _open(source: str, split: str | None) -> Table:
    """Open a source without a filter."""
    location, config, split = _parse(source, split)
    path = _existing(location)
    if path is not None and path.is_file():
        if config or split:
            raise DatasetError(f"the file {location} has no configs and no splits, got {source!r} with split {split!r}")
        return Table(location, _read_file(path), location=location)
    if path is not None:
        rows, split = _read_folder(path, config, split)
        return Table(_name(location, config, split), rows, location=location)
    if location in preset_names():
        if config:
            raise DatasetError(f"the preset {location!r} has its own config, got {source!r}; write {location}[@split]")
        preset = load_preset(location)
        rows, split = _read_preset(location, preset, split or preset.split)
        return Table(_name(location, None, split), rows, preset, location)
    refuse_unknown(source)
    rows, split = _read_repository(location, config, split)
    return Table(_name(location, config, split), rows, location=location)


def _read_preset(name: str, preset: Preset, split: str) -> tuple[Any, str | None]:
    if not preset.dataset.startswith("https://"):
        return _read_repository(preset.dataset, preset.config, split, preset.revision)
    advice = f"a copy on this machine is read by --dataset FILE --preset {name}"
    with _reading(f"the data file {preset.dataset}", advice):
        import datasets

        builder = BUILDERS[Path(preset.dataset).suffix]
        return datasets.load_dataset(builder, data_files={preset.split: preset.dataset}, split=split), split


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
    kind = Path(path.stem if _is_compressed(path) else path).suffix.lower()
    if kind not in (BUILDERS if _is_compressed(path) else FILE_KINDS):
        raise DatasetError(
            f"the dataset file {path} has an unsupported format, {kind!r}; valid: {', '.join(FILE_KINDS)}"
        )
    with _reading(f"the dataset file {path}"):
        import datasets

        if path.stat().st_size == 0:
            raise DatasetError(f"the dataset file {path} is empty")
        if kind == ".txt":
            return datasets.Dataset.from_dict({"text": _paragraphs(path.read_text(encoding="utf-8-sig"))})
        if BUILDERS[kind] == "json":
            _refuse_bare_values(path)
        # `datasets` treats the name as a glob pattern, so brackets and asterisks are escaped.
        found = datasets.load_dataset(BUILDERS[kind], data_files=escape(str(path.resolve())))
        return _choose(found, None, str(path))[0]


def _refuse_bare_values(path: Path) -> None:
    """Refuse a JSON file that begins with something else than a row or a list: pyarrow 25 crashes where that is `null`."""
    with (gzip.open if _is_compressed(path) else open)(path, "rt", encoding="utf-8-sig") as file:
        first = next((line.strip() for line in file if not line.isspace()), "")
    if first and first[0] not in "{[":
        raise DatasetError(
            f'the dataset file {path} begins with {first[:20]!r}: rows are objects, such as {{"prompt": ...}}'
        )


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


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
