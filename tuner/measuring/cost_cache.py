"""Cost tables on disk, one file per model, device, software and batch size.

A table is measured once, and again after any of these has changed. One that was measured on a disturbed machine serves the process
that measured it, and no later one.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

import decoding
import studies.costs
from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from decoding.drafts import BitWidth
from decoding.fingerprint import fingerprint, hash_json
from decoding.lockstep import shared_batch_size
from decoding.target import Target
from studies.costs.table import CostTable
from tuner.errors import StorageError
from tuner.inputs.environment import device_name, versions
from tuner.measuring import cost_table as measured_table
from tuner.measuring import pass_timer
from tuner.measuring.cost_table import BUDGET_SECONDS, measure_cost_table, resolve_terms
from tuner.measuring.machine import MOST_COST_ERROR
from tuner.progress import Progress

DECIDING_PACKAGES = ("sdtune", "torch", "transformers")


class CostKey(Document):
    """Everything that the seconds of a pass depend on."""

    config_sha256: str
    weights_sha256: str
    dtype: str
    device: str
    threads: int
    attention: str | None
    """Attention kernel, by transformers' name."""
    runner: str
    code_sha256: str
    """Hash of the code that runs and times the passes: a change of it invalidates the table."""
    num_sequences: int
    """Sequences in lockstep that share a pass."""
    versions: dict[str, str]

    @classmethod
    def of(cls, target: Target, num_sequences: int = 1) -> CostKey:
        """Return the key of a loaded model on its device, for passes of `num_sequences` sequences."""
        model, installed = fingerprint(target.model), versions()
        return cls(
            config_sha256=model.config_sha256,
            weights_sha256=model.weights_sha256,
            dtype=str(target.dtype).removeprefix("torch."),
            device=device_name(target.device),
            threads=torch.get_num_threads(),
            attention=getattr(target.config, "_attn_implementation", None),
            runner=_runner_name(target),
            code_sha256=_code_sha256(),
            num_sequences=num_sequences,
            versions={package: installed[package] for package in DECIDING_PACKAGES},
        )

    @property
    def file_name(self) -> str:
        """Name of the file, unique to the key."""
        return f"{hash_json(self.model_dump())[:32]}.json"


@cache
def _code_sha256() -> str:
    folders = (decoding, studies.costs)
    roots = [Path(str(folder.__file__)).parent for folder in folders]
    files = [path for root in roots for kind in ("*.py", "*.cpp") for path in root.rglob(kind)]
    files += [Path(str(module.__file__)) for module in (measured_table, pass_timer)]
    return hash_json([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)])


def _runner_name(target: Target) -> str:
    exact_width = target.runner.exact_width
    return target.runner.name if exact_width is None else f"{target.runner.name}, bit-exact at {exact_width}"


class StoredCosts(Document):
    """Contents of a file; the table includes its measured error."""

    format: Literal[1] = 1
    key: CostKey
    created: str
    load: float | None
    """Load average after the measurement; None where the system has none."""
    table: CostTable

    @property
    def was_disturbed(self) -> bool:
        """True if the table fits badly, or the machine had more to do than it has processors."""
        return self.table.error.median > MOST_COST_ERROR or (self.load or 0.0) > (os.cpu_count() or 1)

    @property
    def is_usable(self) -> bool:
        """True unless the table was disturbed in an earlier process."""
        return not self.was_disturbed or datetime.fromisoformat(self.created).timestamp() >= _process_start()


def _process_start() -> float:
    import psutil

    return float(psutil.Process().create_time())


def cost_table(
    target: Target,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    progress: Progress,
    num_sequences: int = 1,
    bits: Collection[BitWidth] = (),
    folder: Path | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    most_seconds: float = math.inf,
    seed: int = 0,
) -> CostTable:
    """Return the table stored in `folder` if it fits model and device and covers these lengths; else measure and store one.

    With `num_sequences` above 1 the passes run that many sequences in lockstep, or one if the target cannot share
    passes. `bits` are the precisions of quantised drafts that the table must know. An unreadable file or unwritable folder is
    reported to `progress` and costs only the measurement. Raises ValueError as
    `tuner.measuring.cost_table.measure_cost_table` does.
    """
    folder = folder or cache_folder()
    num_sequences = shared_batch_size(target, num_sequences)
    key = CostKey.of(target, num_sequences)
    path = folder / key.file_name
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts, bits=bits)
    stored = _read(path, key, progress)
    if (
        stored is not None
        and stored.table.kinds == terms.kinds
        and stored.table.covers(terms.widths, terms.contexts, terms.bits)
    ):
        progress.say(f"costs of {datetime.fromisoformat(stored.created):%d %b %Y %H:%M} UTC, from {path}")
        return stored.table
    table = measure_cost_table(
        target,
        max_tokens=max_tokens,
        contexts=contexts,
        num_sequences=num_sequences,
        bits=bits,
        budget_seconds=budget_seconds,
        most_seconds=most_seconds,
        seed=seed,
    )
    created = datetime.now(UTC).isoformat()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    _write(path, StoredCosts(key=key, created=created, load=load, table=table), progress)
    return table


def cache_folder() -> Path:
    """Return the folder of the tables: `sdtune/costs` under XDG_CACHE_HOME, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdtune" / "costs"


def _read(path: Path, key: CostKey, progress: Progress) -> StoredCosts | None:
    try:
        stored = StoredCosts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else "damaged, or of another version"
        progress.say(f"the stored costs {path} are measured anew: {reason}")
        return None
    return stored if stored.key == key and stored.is_usable else None


def _write(path: Path, stored: StoredCosts, progress: Progress) -> None:
    try:
        _make_folder(path.parent)
        content = stored.model_dump_json(indent=1).encode()
        write_atomically(path, content, what="the measured costs", error=StorageError)
    except StorageError as cause:
        progress.say(f"{cause}; they will be measured again next time")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise StorageError(f"cannot make the folder of measured costs {folder}: {cause.strerror or cause}") from None
