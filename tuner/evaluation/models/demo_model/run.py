"""A training run of the demo model, from its corpus to the finished folder; a killed run is resumed."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tuner.evaluation.models.demo_model.checkpoint import (
    CHECKPOINT,
    CURVE,
    load_checkpoint,
    save_checkpoint,
    write_curve,
    write_document,
)
from tuner.evaluation.models.demo_model.corpus import Corpus, encode, train_tokenizer, window_starts, windows
from tuner.evaluation.models.demo_model.held_out import held_out_loss
from tuner.evaluation.models.demo_model.layer_dropout import LayerTap, tapped
from tuner.evaluation.models.demo_model.recipe import Recipe, RecipeError
from tuner.evaluation.models.demo_model.training import (
    TrainingRun,
    load_model,
    new_model,
    new_optimizers,
    next_token_loss,
    train_step,
)
from tuner.progress import Progress, Unwatched

REPORT = "training.json"


@dataclass(frozen=True)
class Start:
    """Finished model that a run continues, and a note on its training if it has no training.json of its own."""

    folder: Path
    note: str | None = None

    @property
    def weights_sha256(self) -> str:
        """Hash that identifies the weights."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    def report(self) -> dict[str, Any]:
        """Return the new training.json's entry on this start; it names no folder of this machine."""
        path = self.folder / REPORT
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return {"weights_sha256": self.weights_sha256, "note": self.note, "training": earlier}


@dataclass(frozen=True)
class Material:
    """Tokenizer of a run, and its corpus as token ids [length] (int32)."""

    tokenizer: PreTrainedTokenizerFast
    training: Tensor
    held_out: Tensor


def train(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    *,
    device: torch.device,
    start: Start | None = None,
    compile_layers: bool = False,
    progress: Progress = Unwatched(),  # noqa: B008 - has no state
) -> dict[str, Any]:
    """Train, or resume the killed run in `out`; write model, tokenizer, curve and report there, and return the report.

    Raises `RecipeError` if `out` holds a finished run, or a checkpoint of other settings.
    """
    if (out / REPORT).exists():
        raise RecipeError(f"{out} holds a finished run; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(recipe, corpus, out, start)
    material = Material(tokenizer, encode(tokenizer, corpus.training_files), encode(tokenizer, corpus.held_out_files))
    progress.say(f"{len(material.training):,} tokens to train on, {len(material.held_out):,} held out")
    model = (load_model(start.folder, recipe) if start else new_model(recipe)).to(device).train()
    run = TrainingRun(model, new_optimizers(model, recipe))
    origin = digest(material.training, start.weights_sha256 if start else "")
    if (out / CHECKPOINT).exists():
        load_checkpoint(run, recipe, origin, out)
        progress.say(f"resuming at step {run.step:,}")
    progress.stage("training", recipe.steps)
    progress.advance(run.step)
    if start and not run.held_out:
        _evaluate(run, recipe, material, progress)
    loss_of = torch.compile(next_token_loss) if compile_layers else next_token_loss
    with tapped(model.model.layers, compile_layers) as tap:
        while run.step < recipe.steps:
            _step(run, tap, recipe, material.training, loss_of, progress)
            if run.step % recipe.evaluate_every == 0 and run.step < recipe.steps:
                _evaluate(run, recipe, material, progress)
            if run.step % recipe.checkpoint_every == 0 or run.step == recipe.steps:
                save_checkpoint(run, recipe, origin, out)
    return finish(run, recipe, corpus, out, material, start)


def _step(
    run: TrainingRun, tap: LayerTap, recipe: Recipe, tokens: Tensor, loss_of: Callable[..., Tensor], progress: Progress
) -> None:
    """Train one timed step on the windows of the corpus that are its turn."""
    began, cpu_began = time.perf_counter(), time.process_time()
    batch = windows(tokens, window_starts(len(tokens), recipe, run.step), recipe.context)
    train_step(run, tap, recipe, batch.to(run.model.device), loss_of)
    run.seconds += time.perf_counter() - began
    run.cpu_seconds += time.process_time() - cpu_began
    rate = run.step * recipe.batch_size * recipe.context / run.seconds
    progress.advance()
    progress.show(f"loss {run.losses[-1][0]:.3f}, {rate:,.0f} tokens/s")


def _evaluate(run: TrainingRun, recipe: Recipe, material: Material, progress: Progress) -> None:
    loss = held_out_loss(run.model, material.tokenizer, material.held_out, recipe.context)
    run.held_out[run.step] = loss.nats_per_token
    progress.say(f"step {run.step:,}: held-out loss {loss.nats_per_token:.4f} nats per token")


def prepare_tokenizer(recipe: Recipe, corpus: Corpus, out: Path, start: Start | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the model to continue or of the killed run in `out`, else a new one; write it into `out`."""
    if start:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(start.folder / name, out / name)
    elif not (out / CHECKPOINT).exists():
        train_tokenizer(corpus.training_files, recipe.vocabulary_size).save_pretrained(out)
    return PreTrainedTokenizerFast.from_pretrained(out, trust_remote_code=False)


def digest(tokens: Tensor, weights_sha256: str) -> str:
    """Return a hash that identifies the data and the starting weights of a run."""
    return hashlib.sha256(tokens.numpy().tobytes() + weights_sha256.encode()).hexdigest()


def finish(
    run: TrainingRun, recipe: Recipe, corpus: Corpus, out: Path, material: Material, start: Start | None
) -> dict[str, Any]:
    """Save the weights in bfloat16, evaluate the saved model, write curve and report, and remove the checkpoint last."""
    device = run.model.device
    run.model.to(torch.bfloat16).save_pretrained(out)
    loss = held_out_loss(load_model(out, recipe).to(device), material.tokenizer, material.held_out, recipe.context)
    run.held_out[run.step] = loss.nats_per_token
    write_curve(run, recipe, out / CURVE)
    write_document(out / "held_out_files.json", corpus.held_out_names)
    report = {
        "steps": run.step,
        "tokens": run.step * recipe.batch_size * recipe.context,
        "seed": recipe.seed,
        "seconds": round(run.seconds, 1),
        "cpu_seconds": round(run.cpu_seconds, 1),
        "held_out": asdict(loss),
        "held_out_before": run.held_out.get(0),
        "continued_from": start.report() if start else None,
        "corpus": _corpus_facts(corpus, material),
        "recipe": recipe.model_dump(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {module.__name__: str(module.__version__) for module in (torch, transformers, tokenizers)},
    }
    write_document(out / REPORT, report)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return report


def _corpus_facts(corpus: Corpus, material: Material) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "training_files": len(corpus.training_files),
        "held_out_files": len(corpus.held_out_files),
        "copies_left_out": corpus.num_duplicates,
        "training_tokens": len(material.training),
        "held_out_tokens": len(material.held_out),
    }
