"""A training in progress on disk, so that the same command goes on after a kill and ends with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.errors import DistillationError
from tuner.heads.training import Run


class OtherCheckpointError(DistillationError):
    """A checkpoint of another training."""


def save_checkpoint(run: Run, identity: Mapping[str, Any], path: Path) -> None:
    """Put everything a resumed run needs in the place of the last checkpoint, whole or not at all.

    Raises `DistillationError` if the place is unwritable or full.
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
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
        beside.replace(path)
    except (OSError, RuntimeError) as cause:  # torch hides the error of a full disk behind one of its own
        beside.unlink(missing_ok=True)
        raise DistillationError(f"cannot write the checkpoint {path}: {_reason(cause)}") from None


def load_checkpoint(run: Run, identity: Mapping[str, Any], path: Path) -> None:
    """Bring a fresh run to where the checkpoint was.

    Raises `DistillationError` if it is damaged, and `OtherCheckpointError` if it belongs to a training with other settings, or of
    other exits: it may hold more than the run has, as their heads may be finished.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        stored, students = state["identity"], state["students"]
    except Exception as cause:  # what a damaged archive raises is anyone's guess
        raise DistillationError(
            f"the checkpoint {path} is damaged ({_reason(cause)}): remove it, and the training begins anew"
        ) from None
    differing = differences(stored, identity) or ("choice of exits" if run.students.keys() - students.keys() else "")
    if differing:
        raise OtherCheckpointError(
            f"{path} is of an unfinished distillation with another {differing}: go on with its settings, begin anew with "
            "--overwrite, or use another folder"
        )
    with torch.no_grad():
        for exit_layer, student in run.students.items():
            saved = students[exit_layer]
            for master, value in zip(student.masters, saved["masters"], strict=True):
                master.copy_(value)
            student.optimizer.load_state_dict(saved["optimizer"])
            student.follow_masters()
    run.losses, run.seconds = state["losses"], state["seconds"]


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The names of what differs between two identities, in words; empty if nothing does."""
    names = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
    return " and ".join(name.replace("_", " ") for name in names)


def _reason(cause: BaseException) -> str:
    while cause.__context__ is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    text = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
    return " ".join(text.split())[:200]
