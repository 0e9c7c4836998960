"""Files of a training run: checkpoint, curve and JSON documents, each written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch

from decoding.documents.atomic_write import write_atomically
from tuner.evaluation.models.demo_model.recipe import Recipe, RecipeError
from tuner.evaluation.models.demo_model.training import TrainingRun

CHECKPOINT, CURVE = "checkpoint.pt", "training_curve.csv"


def write_document(path: Path, data: Any) -> None:
    """Write indented JSON. Raises `RecipeError` if that fails."""
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode(), what="the document", error=RecipeError)


def save_checkpoint(run: TrainingRun, recipe: Recipe, origin: str, out: Path) -> None:
    """Write all that a resumed run needs, and the training curve so far. Raises `RecipeError` if that fails."""
    state = {
        "recipe": recipe.model_dump(),
        "origin": origin,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "losses": run.losses,
        "held_out": run.held_out,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
    }
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(out / CHECKPOINT, content.getvalue(), what="the checkpoint", error=RecipeError)
    write_curve(run, recipe, out / CURVE)


def load_checkpoint(run: TrainingRun, recipe: Recipe, origin: str, out: Path) -> None:
    """Restore a fresh run from the checkpoint in `out`. Raises `RecipeError` if recipe, corpus or starting weights differ."""
    state = torch.load(out / CHECKPOINT, map_location="cpu", weights_only=True)
    settings = recipe.model_dump()
    changed = [name for name in settings if settings[name] != state["recipe"].get(name)]
    changed += ["corpus or starting weights"] if state["origin"] != origin else []
    if changed:
        raise RecipeError(
            f"the checkpoint in {out} was made with another {', '.join(changed)}; continue it unchanged or use another --out"
        )
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.losses = [(loss, exit_loss) for loss, exit_loss in state["losses"]]
    run.held_out = dict(state["held_out"])
    run.seconds, run.cpu_seconds = state["seconds"], state["cpu_seconds"]


def write_curve(run: TrainingRun, recipe: Recipe, path: Path) -> None:
    """Write one row per block of steps: mean losses in nats per token, and the held-out loss if it was measured there."""
    rows: dict[int, list[str]] = {}
    for first in range(0, run.step, recipe.curve_every):
        block = run.losses[first : first + recipe.curve_every]
        rows[first + len(block)] = [f"{sum(losses) / len(block):.4f}" for losses in zip(*block, strict=True)]
    for step in run.held_out:
        rows.setdefault(step, ["", ""])
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(["step", "loss", "exit_loss", "held_out_loss"])
    for step in sorted(rows):
        held_out = f"{run.held_out[step]:.4f}" if step in run.held_out else ""
        writer.writerow([step, *rows[step], held_out])
    write_atomically(path, content.getvalue().encode(), what="the training curve", error=RecipeError)
