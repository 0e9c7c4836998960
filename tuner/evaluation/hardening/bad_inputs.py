"""Bad input to every command, each in a process of its own: status 2, one clear line, and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tuner.bench.config import BenchConfig
from tuner.config import DistillSettings, SearchConfig
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.registry import EVALUATIONS, resolve
from tuner.export.settings import ExportSettings
from tuner.progress import Progress

BAD_INPUT = 2
GARBAGE = "@none\x1b[of]these"
"""A value that no number, choice or file has; with brackets and an escape sequence, which must not be interpreted."""
LIMIT_SECONDS = 120

SEMANTIC: tuple[tuple[str, ...], ...] = (
    ("serch",),
    ("search",),
    ("search", "--model", "no/such-model", "--dataset", "data.jsonl"),
    ("search", "--model", "model", "--dataset", "missing.jsonl"),
    ("search", "--model", "model", "--dataset", "data.jsonl", "--out", "data.jsonl"),
    ("search", "--model", "model", "--dataset", "data.jsonl", "--out", "."),
    ("search", "--model", "model", "--dataset", "data.jsonl", "--out", "no/folder/p.yaml"),
    ("search", "--config", "data.jsonl"),
    ("search", "--config", "missing.yaml"),
    ("search", "--model", "model", "--dataset", "data.jsonl", "--storage", "sqlite:///data.jsonl"),
    ("search", "--model", "model", "--dataset", "data.jsonl", "--storage", "nodatabase://me:secret@host/db"),
    ("search", "--model", "model", "--dataset", "null.json"),
    ("show", "missing.yaml"),
    ("show", "data.jsonl"),
    ("show", "empty"),
    ("generate", "--profile", "missing.yaml", "--prompt", "x"),
    ("generate", "--profile", "data.jsonl", "--prompt", ""),
    ("generate", "--profile", "data.jsonl"),
    ("export", "missing.yaml", "--to", "folder", "--out", "x"),
    ("doctor",),
    ("doctor", "--model", "missing"),
    ("doctor", "--model", "empty"),
    ("doctor", "--model", "model", "--device", "meta"),
    ("bench", "--profile", "missing.yaml", "--dataset", "data.jsonl"),
    ("distill", "--model", "missing", "--dataset", "data.jsonl"),
    ("evaluate", "nothing"),
)
"""Commands whose arguments are read, and do not fit together or name what is not there. Run in `prepare_folder`'s folder."""

DOCUMENTS: Mapping[str, tuple[type[BaseModel], ...]] = {
    "search": (SearchConfig,),
    "distill": (DistillSettings,),
    "bench": (BenchConfig,),
    "export": (ExportSettings,),
}


def command_lines() -> list[tuple[str, ...]]:
    """Return the command lines: garbage for each number, choice and switch of every command, and the semantic ones."""
    commands: dict[tuple[str, ...], Sequence[type[BaseModel]]] = {
        **{(name,): documents for name, documents in DOCUMENTS.items()},
        **{("evaluate", name): (resolve(name),) for name in EVALUATIONS},
    }
    lines = [*SEMANTIC]
    for command, documents in commands.items():
        lines.append((*command, "--no-such-option"))
        lines += [(*command, flag, GARBAGE) for document in documents for flag in _flags(document)]
    return lines


def _flags(document: type[BaseModel]) -> Iterator[str]:
    """Yield the flags of fields that take no free text."""
    for name, field in document.model_fields.items():
        kind = str(field.annotation)
        if any(text in kind for text in ("str", "Path", "dict", "Settings", "Config")) and "Literal" not in kind:
            continue
        yield f"--{name.replace('_', '-')}"


def prepare_folder(folder: Path) -> None:
    """Write the files that the command lines name: an empty folder, a broken model and data sets."""
    for name in ("empty", "model"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text("[]", encoding="utf-8")
    (folder / "data.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    (folder / "null.json").write_text("null", encoding="utf-8")


def refuse_all(folder: Path, lines: Sequence[tuple[str, ...]], progress: Progress) -> tuple[CheckOutcome, list[float]]:
    """Run the command lines in `folder`; return what went wrong, and the seconds of each."""
    tally, seconds = CheckOutcome("bad input"), list[float]()
    progress.stage(tally.name, len(lines))
    prepare_folder(folder)
    before = _contents(folder)
    for line in lines:
        start = time.perf_counter()
        result = _run(folder, line)
        seconds.append(time.perf_counter() - start)
        failure = _failure(result, changed=_contents(folder) != before)
        tally.count(None if failure is None else f"{' '.join(line)!r}: {failure}")
        progress.advance()
    return tally, seconds


def _run(folder: Path, line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner.cli.main", *line]
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no answer within {LIMIT_SECONDS} s")


def _failure(result: Any, *, changed: bool) -> str | None:
    said = [line for line in result.stderr.splitlines() if line.startswith("sdtune: ")]
    if result.returncode != BAD_INPUT:
        return f"status {result.returncode}: {' '.join(result.stderr.split())[-200:]}"
    if len(said) != 1 or "Traceback" in result.stderr:
        return f"{len(said)} lines for the user: {' '.join(result.stderr.split())[-200:]}"
    if "secret" in result.stderr + result.stdout:
        return "the password is shown"
    return "files were written or changed" if changed else None


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
