"""Rows of prompts from wherever they are: a file, a saved folder, the hub, or a preset. Everything is read by `datasets`.

A source is one of
* a file: .jsonl, .json, .csv, .parquet, or .txt (a prompt a line; prompts are separated by blank lines if there are any);
* a folder written by `datasets.save_to_disk`, or one with data files in it;
* the name of a preset in configs/datasets;
* a hub id, `owner/name[:config][@split]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from decoding.documents import Document, read_mapping, suggest, validate
from tuner.errors import DatasetError

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
PREFERRED_SPLITS = ("train", "test", "validation")
HUB_ID = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")


class Preset(Document):
    """A well-known dataset: where it is on the hub and how a row becomes a prompt."""

    description: str
    path: str = Field(description="hub id, or a local folder of the same form")
    config: str | None = None
    split: str
    template: str = Field(
        description="a format string over the columns, e.g. 'Question: {question}'; {turns[0]} for lists"
    )


@dataclass(frozen=True)
class Table:
    """Rows by index, and the template that makes prompts of them if the source has one."""

    name: str
    rows: Any
    """A `datasets.Dataset`."""
    template: str | None = None

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.rows.column_names)


def open_table(source: str) -> Table:
    """Open `source` (see above). Raises `DatasetError` if there is no such thing or it cannot be read."""
    path = Path(source)
    if path.is_file():
        return Table(source, _read_file(path))
    if path.is_dir():
        return Table(source, _read_folder(path))
    if source in (known := preset_names()):
        preset = load_preset(source)
        return Table(source, _read_hub(preset.path, preset.config, preset.split), preset.template)
    if path.suffix in {*FILE_FORMATS, ".txt"} or (match := HUB_ID.fullmatch(source)) is None:
        raise DatasetError(
            f"no such dataset: {source!r} is no file, folder, hub id or preset; for presets, {suggest(source, known)}"
        )
    return Table(source, _read_hub(match["path"], match["config"], match["split"]))


def preset_names() -> list[str]:
    """The presets that come with sdtune."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in _preset_folder().iterdir() if entry.name.endswith(".yaml")
    )


def load_preset(name: str) -> Preset:
    """One of `preset_names`."""
    with resources.as_file(_preset_folder() / f"{name}.yaml") as path:
        data = read_mapping(path, what="preset", error=DatasetError)
    return validate(Preset, data, source=f"preset {name}", error=DatasetError)


def _preset_folder() -> Any:
    return resources.files("configs.datasets")


def _read_file(path: Path) -> Any:
    import datasets

    if path.suffix == ".txt":
        return datasets.Dataset.from_dict({"prompt": _text_prompts(path)})
    if path.suffix not in FILE_FORMATS:
        known = ", ".join([*FILE_FORMATS, ".txt"])
        raise DatasetError(f"cannot read {path}: a dataset file ends in one of {known}")
    with _reading(str(path)), _scratch_cache() as cache:
        return datasets.load_dataset(
            FILE_FORMATS[path.suffix], data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True
        )


def _text_prompts(path: Path) -> list[str]:
    with _reading(str(path)):
        text = path.read_text(encoding="utf-8")
    pieces = re.split(r"\n\s*\n", text) if re.search(r"\n\s*\n\s*\S", text.strip()) else text.splitlines()
    return [piece for piece in pieces if piece.strip()]


def _read_folder(path: Path) -> Any:
    import datasets

    with _reading(str(path)):
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return _one_split(datasets.load_from_disk(str(path)), str(path), None)
        with _scratch_cache() as cache:
            return _one_split(datasets.load_dataset(str(path), cache_dir=cache, keep_in_memory=True), str(path), None)


def _read_hub(path: str, config: str | None, split: str | None) -> Any:
    import datasets

    with _reading(path):
        return _one_split(datasets.load_dataset(path, config), path, split)


def _one_split(loaded: Any, source: str, split: str | None) -> Any:
    """A dataset itself, or the asked split of a dictionary of them, or the usual one."""
    if not hasattr(loaded, "keys"):
        return loaded
    names = list(loaded)
    if split is not None and split not in names:
        raise DatasetError(f"{source} has no split {split!r}; {suggest(split, names)}")
    chosen = split or next((name for name in PREFERRED_SPLITS if name in names), names[0])
    return loaded[chosen]


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Whatever goes wrong in reading becomes one line; no progress bars meanwhile, as before afterwards."""
    import datasets

    had_bars = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except DatasetError:
        raise
    except Exception as cause:  # readers of many formats fail in many ways; each is the user's file or connection
        origin = cause.__cause__ or cause
        reason = (str(origin).strip().splitlines() or [type(origin).__name__])[0]
        raise DatasetError(f"cannot read the dataset {source}: {reason}") from None
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


@contextmanager
def _scratch_cache() -> Iterator[str]:
    """A cache folder for local files, which are read into memory: nothing of them stays behind."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="sdtune-") as folder:
        yield folder
