"""The program that reads data sets, in a process of its own: files and folders of others' making go through parsers in C.

It answers requests on its standard input, one at a time (`tuner.inputs.reader` sends them). An order says what to read; it travels
with each request, so that a new process can go on where another has died. Rows leave as JSON, in the columns that were asked for.

A folder's own metadata (README.md, dataset_infos.json, state.json) is not read: its data files are those that lie in it. The card
of a hub dataset may name files of its own repository only.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from decoding.documents.strict_yaml import suggest
from decoding.errors import one_line
from tuner.errors import DatasetError
from tuner.inputs.formats import holds_conversations

_FILTER = re.compile(r"(?P<source>.+)#(?P<column>[^#=]+)=(?P<values>[^#]+)")
MOST_SHOWN = 12
"""Values that an error lists."""


def split_filter(source: str) -> tuple[str, tuple[str, tuple[str, ...]] | None]:
    """Return a source without its filter, and column and values if there is one: `#column=value`, or `#column=value|value`."""
    match = _FILTER.fullmatch(source)
    if match is None:
        return source, None
    return match["source"], (match["column"].strip(), tuple(each.strip() for each in match["values"].split("|")))


def _matching(rows: Any, column: str, values: Sequence[str], name: str) -> Any:
    """Return the rows of a `datasets.Dataset` whose value in `column`, as text, is one of `values`, in order."""
    if column not in rows.column_names:
        raise DatasetError(
            f"the dataset {name} has no column {column!r} to choose rows by; {suggest(column, rows.column_names)}"
        )
    found = [str(value) for value in rows.with_format(None)[column]]
    for value in values:
        if value not in found:
            raise DatasetError(
                f"no row of the dataset {name} has {value!r} in its column {column!r}; values: {_listed(found)}"
            )
    return rows.select([index for index, value in enumerate(found) if value in values])


def _listed(found: Sequence[str]) -> str:
    values = list(dict.fromkeys(found))
    shown = ", ".join(map(repr, values[:MOST_SHOWN]))
    return f"{shown} and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else shown


BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv", ".json": "json", ".txt": "text"}
"""Readers of `datasets` by kind of file. Of several kinds in a folder the first of this order is read."""
FILE_KINDS = tuple(sorted(BUILDERS))
USUAL_SPLITS = ("test", "validation", "train")
SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
NO_DATA = re.compile(r"dataset_infos?|dataset_dict|state|requirements|license", re.IGNORECASE)
"""Files beside the data of a dataset, by name without ending."""
MOST_ROW_BYTES = 2**24
MOST_COLUMNS = 10_000
LOOKED_AT = 2**24
"""Bytes at the beginning of a file that are looked at before the parsers get it."""
DEEPEST = 32
"""Most levels of lists and mappings inside a column."""
MOST_OPEN = 8
"""Datasets kept open; others are opened again when they are asked for."""
FRAME = struct.Struct("<Q")
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-\d{5,}-of-\d{5,}")

Order = Mapping[str, Any]
"""What to read: `kind` (file, folder, hub or address), `location`, `config`, `split`, `revision`, `filter`."""


def kind_of(path: Path) -> str:
    """Return the ending of a data file in lower case, without .gz."""
    return Path(path.stem if _is_compressed(path) else path).suffix.lower()


def answer(request: Mapping[str, Any], opened: dict[str, Any]) -> Any:
    """Return the answer to one request; `opened` holds the datasets read so far, by order. Raises `DatasetError`."""
    order = request["order"]
    key = json.dumps(order, sort_keys=True)
    if key not in opened or request["do"] == "open":
        opened.pop(key, None)
        rows, split = _read(order)
        while len(opened) >= MOST_OPEN:
            del opened[next(iter(opened))]
        opened[key] = rows, split, {}
    rows, split, views = opened[key]
    if request["do"] == "open":
        facts = {name: _facts(feature) for name, feature in rows.features.items()}
        return {"columns": facts, "num_rows": len(rows), "split": split}
    columns = tuple(request["columns"])
    if columns not in views:
        view = rows.select_columns(list(columns))
        views[columns] = view.with_format(None), view.with_format("arrow")
    plain, arrow = views[columns]
    if request["do"] == "columns":
        return {name: list(plain[name]) for name in columns}
    index = request["row"]
    if (size := arrow[index : index + 1].nbytes) > MOST_ROW_BYTES:
        raise DatasetError(
            f"row {index} of the dataset {order['location']} holds {size / 2**20:.0f} MiB, and a row may hold "
            f"{MOST_ROW_BYTES >> 20} MiB"
        )
    return plain[index]


def _facts(feature: Any) -> dict[str, Any]:
    """Return what is asked of a column: lists and mappings have no type of their own."""
    names = list(feature.names) if hasattr(feature, "int2str") else None
    return {"is_plain": hasattr(feature, "dtype"), "is_chat": holds_conversations(feature), "names": names}


def _read(order: Order) -> tuple[Any, str | None]:
    path, split = Path(order["location"]).expanduser(), order["split"]
    if order["kind"] == "file":
        rows = _read_file(path)
    elif order["kind"] == "folder":
        rows, split = _read_folder(path, order["config"], split)
    elif order["kind"] == "address":
        rows = _read_address(order)
    else:
        rows, split = _read_hub(order["location"], order["config"], split, order["revision"])
    if (count := len(rows.column_names)) > MOST_COLUMNS:
        raise DatasetError(f"the dataset {order['location']} has {count} columns, and at most {MOST_COLUMNS} are read")
    for name, feature in rows.info.features.items():
        _as_stored(feature, f"the column {name!r} of the dataset {order['location']}")
    if order["filter"] is not None:
        column, values = order["filter"]
        rows = _matching(rows, column, values, order["name"])
    return rows, split


def _as_stored(feature: Any, what: str, depth: int = 0) -> None:
    """Let images and the like stay what is stored, as decoding one opens the file or address that a row names."""
    if depth > DEEPEST:
        raise DatasetError(f"{what} holds lists or mappings more than {DEEPEST} deep")
    if hasattr(feature, "decode"):
        feature.decode = False
    inside = feature.values() if isinstance(feature, Mapping) else feature if isinstance(feature, list) else ()
    for each in (*inside, *([feature.feature] if hasattr(feature, "feature") else [])):
        _as_stored(each, what, depth + 1)


def _read_file(path: Path) -> Any:
    kind = kind_of(path)
    if kind not in BUILDERS or (kind == ".txt" and _is_compressed(path)):
        raise DatasetError(
            f"the dataset file {path} has an unsupported format, {kind!r}; valid: {', '.join(FILE_KINDS)}"
        )
    with _reading(f"the dataset file {path}"):
        import datasets

        if path.stat().st_size == 0:
            raise DatasetError(f"the dataset file {path} is empty")
        if kind == ".txt":
            return datasets.Dataset.from_dict({"text": _paragraphs(path.read_text(encoding="utf-8-sig"))})
        _refuse_hopeless(path, kind)
        return _load_files(kind, {"train": [path]}, None)["train"]


def _load_files(kind: str, files: Mapping[str, list[Path]], split: str | None) -> Any:
    import datasets

    for path in (path for paths in files.values() for path in paths):
        if "::" in str(path):
            raise DatasetError(f"the data file {path} has '::' in its name, which stands for addresses: rename it")
    # `datasets` treats names as glob patterns, so brackets and asterisks are escaped.
    patterns = {name: [escape(str(path.resolve())) for path in paths] for name, paths in files.items()}
    return datasets.load_dataset(BUILDERS[kind], data_files=patterns, split=split)


def _refuse_hopeless(path: Path, kind: str) -> None:
    """Refuse what the parsers crash on, or take minutes for, as far as the beginning shows it."""
    if kind == ".parquet":
        return
    with gzip.open(path) if _is_compressed(path) else path.open("rb") as file:
        start = file.read(LOOKED_AT).removeprefix(b"\xef\xbb\xbf").lstrip()
    if kind == ".csv":
        if (count := start.partition(b"\n")[0].count(b",") + 1) > MOST_COLUMNS:
            raise DatasetError(f"the dataset file {path} has {count} columns, and at most {MOST_COLUMNS} are read")
        return
    try:
        for line in [start] if kind == ".json" else start.splitlines():
            found = json.loads(line)
            row = found[0] if isinstance(found, list) and found else found
            if isinstance(row, dict) and (count := len(row)) > MOST_COLUMNS:
                raise DatasetError(f"the dataset file {path} has {count} columns, and at most {MOST_COLUMNS} are read")
    except RecursionError:
        raise DatasetError(f"the dataset file {path} holds lists or mappings more than {DEEPEST} deep") from None
    except ValueError:
        pass  # the last line is cut; what is wrong elsewhere, the reader of `datasets` says
    if start and start[:1] not in b"{[":  # pyarrow 25 crashes where that is `null`
        shown = start[:20].split(b"\n")[0].decode(errors="replace").strip()
        raise DatasetError(
            f'the dataset file {path} begins with {shown!r}: rows are objects, such as {{"prompt": ...}}'
        )


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _paragraphs(text: str) -> list[str]:
    blocks = re.split(r"\n(?:[ \t]*\n)+", text.strip("\n"))
    return blocks if len(blocks) > 1 else text.split("\n")


def _read_folder(path: Path, config: str | None, split: str | None) -> tuple[Any, str | None]:
    if not any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
        with _reading(f"the dataset folder {path}", f"it should hold data files ({', '.join(FILE_KINDS)})"):
            kind, files = _data_files(path, config)
            for each in (each for paths in files.values() for each in paths):
                _refuse_hopeless(each, kind)
            found = _load_files(kind, files, split)
        return _choose(found, None, str(path)) if split is None else (found, split)
    if config:
        raise DatasetError(f"the folder {path} was written by save_to_disk and has no configs, got {config!r}")
    with _reading(f"the dataset folder {path}"):
        if (path / "dataset_dict.json").exists():
            saved = {each.name: partial(_saved, each) for each in sorted(path.iterdir()) if each.is_dir()}
            chosen = _chosen(list(saved), split, str(path))
            return saved[chosen](), chosen
        if split:
            raise DatasetError(f"the folder {path} holds one dataset without splits, got split {split!r}")
        return _saved(path), None


def _saved(folder: Path) -> Any:
    import datasets

    files = [_inside(each, folder) for each in sorted(folder.glob("data-*-of-*.arrow")) or folder.glob("dataset.arrow")]
    if not files:
        raise DatasetError(f"the folder {folder} holds no data-*-of-*.arrow")
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])


def _data_files(folder: Path, config: str | None) -> tuple[str, dict[str, list[Path]]]:
    """Return the kind of the data files in a folder, and the files by split as their names tell.

    A config is a subfolder; one with a single subfolder of data files has it as its config.
    """
    found = [
        each for each in _walk(folder) if kind_of(each) in BUILDERS and not NO_DATA.fullmatch(each.name.split(".")[0])
    ]
    configs = sorted({each.relative_to(folder).parts[0] for each in found if len(each.relative_to(folder).parts) > 1})
    if config is None and all(each.parent != folder for each in found):
        of_its_own = [name for name in configs if name != "data" and _split_of(Path(name) / "-") is None]
        if len(of_its_own) > 1:
            raise DatasetError(
                f"the folder {folder} has several configs: name one as {folder}:config; valid: {', '.join(of_its_own)}"
            )
        config = of_its_own[0] if of_its_own and configs == of_its_own else None
    if config is not None:
        if config not in configs:
            raise DatasetError(f"the folder {folder} has no config {config!r}; {suggest(config, configs)}")
        folder = folder / config
        found = [each for each in found if each.is_relative_to(folder)]
    kinds = {kind_of(each) for each in found}
    kind = next((kind for kind in BUILDERS if kind in kinds), None)
    if kind is None:
        raise DatasetError(f"the folder {folder} holds no data files ({', '.join(FILE_KINDS)})")
    files = sorted(each for each in found if kind_of(each) == kind)
    splits: dict[str, list[Path]] = {}
    for each in files:
        if (split := _split_of(each.relative_to(folder))) is not None:
            splits.setdefault(split, []).append(each)
    return kind, splits or {"train": files}


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder without following links to folders; hidden ones are left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (_inside(Path(place) / name, folder) for name in sorted(files) if not name.startswith("."))


def _inside(file: Path, folder: Path) -> Path:
    """Return a file unless it is a link that leaves `folder`, or no ordinary file."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise DatasetError(f"{file} is a link to a file outside of the dataset's folder")
    if not file.is_file():
        raise DatasetError(f"{file} is not an ordinary file")
    return file


def _split_of(path: Path) -> str | None:
    """Return the split that the name of a data file tells, as `datasets` does: train-00000-of-00001, test.jsonl, val/a.csv."""
    if shard := _SHARD.match(path.name):
        return shard["split"]
    for split, words in SPLIT_WORDS.items():
        if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", path.as_posix()):
            return split
    return None


def _read_address(order: Order) -> Any:
    advice = f"a copy on this machine is read by --dataset FILE --set preset={order['name']}"
    with _reading(f"the data file {order['location']}", advice):
        import datasets

        builder = BUILDERS[Path(order["location"]).suffix]
        return datasets.load_dataset(builder, data_files={order["split"]: order["location"]}, split=order["split"])


def _read_hub(name: str, config: str | None, split: str | None, revision: str | None) -> tuple[Any, str | None]:
    with (
        _reading(f"the hub dataset {name!r}", "a hub id is owner/name[:config][@split]; a file or folder needs no hub"),
        _own_files_only(name),
    ):
        import datasets

        found = datasets.load_dataset(name, config, split=split, revision=revision)
        return _choose(found, None, name) if split is None else (found, split)


@contextmanager
def _own_files_only(name: str) -> Iterator[None]:
    """Refuse patterns of data files, which the card of a hub dataset may name, that lead out of its repository."""
    from datasets import data_files

    resolve = data_files.resolve_pattern

    def resolve_own(pattern: str, base_path: str, *args: Any, **options: Any) -> Any:
        place = f"hf://datasets/{name}@".lower()
        leads_out = pattern.startswith(("/", "~")) or "://" in pattern or "::" in pattern or ".." in pattern.split("/")
        is_own = pattern.lower().startswith(place) and ".." not in pattern.split("/") and "::" not in pattern
        if (leads_out and not is_own) or not f"{base_path}".lower().startswith(place) or ".." in base_path.split("/"):
            raise DatasetError(f"the hub dataset {name!r} names data files outside of its repository: {pattern!r}")
        return resolve(pattern, base_path, *args, **options)

    data_files.resolve_pattern = resolve_own
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def _choose(found: Mapping[str, Any], split: str | None, location: str) -> tuple[Any, str]:
    chosen = _chosen(list(found), split, location)
    return found[chosen], chosen


def _chosen(names: list[str], split: str | None, location: str) -> str:
    if not names:
        raise DatasetError(f"the dataset {location} holds no splits")
    chosen = split or (names[0] if len(names) == 1 else next((usual for usual in USUAL_SPLITS if usual in names), None))
    if chosen is None:
        raise DatasetError(
            f"the dataset {location} has several splits: name one as {location}@split; valid: {', '.join(names)}"
        )
    if chosen not in names:
        raise DatasetError(f"the dataset {location} has no split {chosen!r}; {suggest(chosen, names)}")
    return chosen


@contextmanager
def _reading(what: str, advice: str = "") -> Iterator[None]:
    try:
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


def serve(requests: BinaryIO, answers: BinaryIO, seconds: int) -> None:
    """Answer requests until their end. The system ends the process if one takes more than `seconds` of a processor."""
    opened: dict[str, Any] = {}
    while length := requests.read(FRAME.size):
        request = json.loads(requests.read(*FRAME.unpack(length)))
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, resource.RLIM_INFINITY))
        try:
            found = {"found": answer(request, opened)}
        except DatasetError as error:
            found = {"error": str(error)}
        except (MemoryError, RecursionError) as cause:
            found = {
                "error": f"cannot read the dataset {request['order']['location']}: {type(cause).__name__} {one_line(cause)}"
            }
        # A value that JSON does not have, such as a date, is no text either.
        content = json.dumps(found, default=lambda value: {"type": type(value).__name__, "value": str(value)}).encode()
        answers.write(FRAME.pack(len(content)) + content)
        answers.flush()


def main() -> None:
    """Read requests with a limit on memory beyond what the libraries take; the arguments are its bytes and the seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the parent, which then closes the pipe
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import datasets
    from huggingface_hub.utils import disable_progress_bars

    datasets.disable_progress_bars()
    disable_progress_bars()
    memory, seconds = map(int, sys.argv[1:])
    status = Path("/proc/self/status")
    if status.exists():  # Linux: files in the page cache, of any size, do not count
        taken = re.search(r"VmData:\s+(\d+) kB", status.read_text())
        assert taken is not None
        limit = int(taken[1]) * 1024 + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    serve(sys.stdin.buffer, answers, seconds)


if __name__ == "__main__":
    main()
