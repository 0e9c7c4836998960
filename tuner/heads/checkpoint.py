"""Checkpoints of unfinished training runs.

A resumed run ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.errors import DistillationError
from tuner.heads.training import Run


class OtherCheckpointError(DistillationError):
    """Checkpoint that belongs to another training run."""


def save_checkpoint(run: Run, identity: Mapping[str, Any], path: Path) -> None:
    """Replace the checkpoint at `path` atomically with everything needed to resume `run`.

    Raises `DistillationError` if it cannot be written.
    """
    state = {
        "identity": dict(identity),
        "losses": run.losses,
        "seconds": run.seconds,
        "students": {
            exit_layer: {"masters": student.masters, "optimizer": student.optimizer.state_dict()}
            for exit_layer, student in run.students.items()
        },
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
        partial.replace(path)
    except (OSError, RuntimeError) as cause:  # torch wraps the OSError of a full disk in a RuntimeError
        partial.unlink(missing_ok=True)
        raise DistillationError(f"cannot write the checkpoint {path}: {_reason(cause)}") from None


def load_checkpoint(run: Run, identity: Mapping[str, Any], path: Path) -> None:
    """Restore a fresh run from the checkpoint at `path`.

    The checkpoint may hold more exits than `run`: the heads of the others may be finished. Raises `DistillationError` if the
    checkpoint is damaged, and `OtherCheckpointError` if its settings differ or it lacks an exit of `run`.
    """
    state = _read(path)
    stored, students = state["identity"], state["students"]
    differing = differences(stored, identity) or ("choice of exits" if run.students.keys() - students.keys() else "")
    if differing:
        raise OtherCheckpointError(
            f"{path} belongs to an unfinished distillation with another {differing}: resume it with its own settings, "
            "restart with --overwrite, or use another folder"
        )
    with torch.no_grad():
        for exit_layer, student in run.students.items():
            saved = students[exit_layer]
            for master, value in zip(student.masters, saved["masters"], strict=True):
                master.copy_(value)
            student.optimizer.load_state_dict(saved["optimizer"])
            student.sync_weights()
    run.losses, run.seconds = state["losses"], state["seconds"]


def stored_exits(path: Path) -> frozenset[int]:
    """Return the exits whose training the checkpoint at `path` holds; weights are not read."""
    return frozenset(_read(path, mmap=True)["students"])


def _read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if not {"identity", "students", "losses", "seconds"} <= state.keys():
            raise KeyError("parts are missing")
    except Exception as cause:  # a damaged archive can raise almost anything
        raise DistillationError(
            f"the checkpoint {path} is damaged ({_reason(cause)}): remove it to restart the training"
        ) from None
    return state


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the keys in which two identities differ, joined by "and"."""
    names = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
    return " and ".join(name.replace("_", " ") for name in names)


def _reason(cause: BaseException) -> str:
    while cause.__context__ is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    text = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
    return " ".join(text.split())[:200]
