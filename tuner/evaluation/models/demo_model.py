"""The recipe of the demo model: a small Llama-style code model that is made for early exits and skipped layers.

Trained on the Python standard library's own sources with layer dropout that grows with depth and a loss at a random exit
(LayerSkip, arXiv 2404.16710), by Muon on the layers' matrices and AdamW on the rest. Run as `python -m
tuner.evaluation.models.demo_model`.
A killed run is continued by the same command. Knows nothing of decoding: what it leaves is a stock transformers folder.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import platform
import random
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
NOT_LIBRARY = ("site-packages", "/test", "encodings", "idlelib", "pydoc_data", "lib2to3", "turtledemo")
CORPORA = ("library", "library+tests")


class RecipeError(Exception):
    """The run cannot start or continue as asked; the message says why in one line."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, apart from the files, the device and the weights it starts from."""

    num_layers: int = 24
    hidden_size: int = 160
    num_heads: int = 5
    mlp_size: int = 432
    vocabulary_size: int = 4096
    max_positions: int = 1024
    steps: int = 4000
    batch_size: int = 4  # windows per step
    context: int = 768  # tokens per window; prompt and continuation together should stay below it
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    weight_decay: float = 0.02  # on the layers' matrices
    rate_scale: float = 1.0  # on both rates; below 1 for a continued run
    warmup_steps: int = 60
    hold_share: float = 0.5  # share of the steps after which the rates fall linearly to 0
    gradient_norm: float = 1.0
    max_layer_dropout: float = 0.2  # probability at the last layer
    exit_weight: float = 0.3
    seed: int = 0
    checkpoint_every: int = 200  # steps
    evaluate_every: int = 1000  # steps
    curve_every: int = 20  # steps per row of the curve

    def __post_init__(self) -> None:
        if self.num_layers < 2:
            raise ValueError(f"an exit before the last layer needs at least 2 layers, got num_layers={self.num_layers}")
        for name in ("steps", "batch_size", "checkpoint_every", "evaluate_every", "curve_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.context <= self.max_positions:
            raise ValueError(f"context must be within 1..{self.max_positions} positions, got {self.context}")

    def llama_config(self) -> LlamaConfig:
        """The architecture in transformers' terms."""
        return LlamaConfig(
            vocab_size=self.vocabulary_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.mlp_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            rms_norm_eps=1e-5,
        )

    def layer_dropout(self, index: int) -> float:
        """Probability that the block `index` is left out: exponential in depth, 0 at the first (LayerSkip, section 4.1)."""
        return self.max_layer_dropout * (2 ** (index / (self.num_layers - 1)) - 1)

    def rate_factor(self, step: int) -> float:
        """What both learning rates are multiplied by at `step`: linear warm-up, plateau, linear decay to 0."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        decay = min(1.0, (1 - step / self.steps) / max(1 - self.hold_share, 1e-9))
        return self.rate_scale * warmup * decay


# The corpus


@dataclass(frozen=True)
class Corpus:
    """Source files to train on and to hold out; paths lie below `root`."""

    name: str
    root: Path
    training_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]
    num_duplicates: int = 0

    @property
    def held_out_names(self) -> list[str]:
        """The held-out files as paths relative to `root`."""
        return [path.relative_to(self.root).as_posix() for path in self.held_out_files]


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_corpus(name: str, root: Path | None = None, num_held_out: int = 40) -> Corpus:
    """The standard library below `root`, shuffled with a fixed seed, the first files held out; with its `test` package if asked."""
    if name not in CORPORA:
        raise RecipeError(f"unknown corpus {name!r}; valid: {', '.join(CORPORA)}")
    root = root or standard_library()
    library = sorted(path for path in root.rglob("*.py") if is_library(path.relative_to(root)))
    random.Random(0).shuffle(library)
    held_out, training = library[:num_held_out], library[num_held_out:]
    if name == "library+tests":
        tests = sorted((root / "test").rglob("*.py"))
        if not tests:
            raise RecipeError(
                "this interpreter comes without its `test` package; install it, or use the corpus 'library'"
            )
        training += [path for path in tests if "data" not in path.relative_to(root).parts]
    distinct = without_copies(training, held_out)
    return Corpus(name, root, tuple(distinct), tuple(held_out), len(training) - len(distinct))


def is_library(relative: Path) -> bool:
    """Whether a source file is code of the library proper: no tests, tables, applications or installed packages."""
    return not any(part in f"/{relative.as_posix()}" for part in NOT_LIBRARY)


def read_source(path: Path) -> str | None:
    """The text of a source file, or None if it is not UTF-8 (a few tests are so on purpose)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def without_copies(files: Sequence[Path], held_out: Sequence[Path], share: float = 0.5) -> list[Path]:
    """The files that are no copy of a held-out one.

    A copy has the same text, or the two have more than `share` of the distinct lines of one of them in common. Files of
    fewer than ten distinct lines are only compared as texts: their lines (imports, `pass`) stand everywhere.
    """
    texts = {read_source(path) or "" for path in held_out} - {""}
    held_lines = [lines for lines in map(distinct_lines, texts) if len(lines) >= 10]

    def is_copy(text: str) -> bool:
        lines = distinct_lines(text)
        if text in texts or len(lines) < 10:
            return text in texts
        return any(len(lines & held) > share * min(len(lines), len(held)) for held in held_lines)

    return [path for path in files if not is_copy(read_source(path) or "")]


def distinct_lines(text: str) -> set[str]:
    """The lines long enough to tell one file from another."""
    return {stripped for line in text.splitlines() if len(stripped := line.strip()) > 8}


def train_tokenizer(files: Sequence[Path], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the training files; token 0 begins every file and ends every text."""
    bpe = ByteLevelBPETokenizer()
    texts = (text for path in files if (text := read_source(path)) is not None)
    bpe.train_from_iterator(texts, vocab_size=vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, files: Sequence[Path]) -> Tensor:
    """All files one behind the other as token ids [length] (int32), each begun by token 0."""
    texts = [text for path in files if (text := read_source(path)) is not None]
    if not texts:
        raise RecipeError("the corpus has no readable file to train on or to hold out")
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (0, *ids)], dtype=torch.int32)


def window_starts(num_tokens: int, recipe: Recipe, step: int) -> list[int]:
    """Where the windows of `step` begin in the corpus.

    Every pass over the corpus cuts it anew into adjoining windows and takes each once, so nothing but `step` and the seed
    decides a batch, and a resumed run sees what the uninterrupted one would have seen.
    """
    num_windows = (num_tokens - recipe.context) // recipe.context
    if num_windows < 1:
        needed = 2 * recipe.context
        raise RecipeError(f"the corpus has {num_tokens} tokens; windows of {recipe.context} need at least {needed}")
    first = step * recipe.batch_size
    starts = []
    for position in range(first, first + recipe.batch_size):
        epoch, place = divmod(position, num_windows)
        offset, order = epoch_order(num_windows, recipe.context, f"{recipe.seed}/{epoch}")
        starts.append(offset + order[place] * recipe.context)
    return [min(start, num_tokens - recipe.context - 1) for start in starts]


def epoch_order(num_windows: int, context: int, seed: str) -> tuple[int, list[int]]:
    """The offset of an epoch's first window in tokens, and the order in which its windows are seen."""
    generator = random.Random(seed)
    offset, order = generator.randrange(context), list(range(num_windows))
    generator.shuffle(order)
    return offset, order


def windows(tokens: Tensor, starts: Sequence[int], context: int) -> Tensor:
    """Token ids [windows, context + 1] (int64): inputs and, moved by one, targets."""
    return torch.stack([tokens[start : start + context + 1] for start in starts]).long()


# Layer dropout and the early exit


@dataclass(frozen=True)
class StepPlan:
    """What one step does to the layer stack: the blocks it leaves out, and the block behind which it also exits."""

    left_out: frozenset[int]
    exit_block: int


def plan_step(recipe: Recipe, step: int) -> StepPlan:
    """Draw the plan of `step`; seed and step alone decide it."""
    generator = random.Random(f"{recipe.seed}:{step}")
    blocks = range(recipe.num_layers)
    left_out = frozenset(index for index in blocks if generator.random() < recipe.layer_dropout(index))
    first_exit = min(2, recipe.num_layers - 2)
    return StepPlan(left_out, generator.randrange(first_exit, recipe.num_layers - 1))


@dataclass
class LayerTap:
    """Stands between the model and its blocks: leaves out those of the plan and keeps the hidden state at the exit.

    Without a plan every block runs its own forward, uncompiled: held-out losses are those of the plain model.
    """

    plan: StepPlan | None = None
    exit_hidden: Tensor | None = None  # [batch, length, hidden]

    def around(self, index: int, plain: Callable[..., Tensor], trained: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward of block `index`, which calls `trained` under a plan and `plain` otherwise."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.plan is None:
                return plain(hidden_states, *args, **kwargs)
            if index not in self.plan.left_out:
                hidden_states = trained(hidden_states, *args, **kwargs)
            if index == self.plan.exit_block:
                self.exit_hidden = hidden_states
            return hidden_states

        return forward


@contextmanager
def tapped(layers: Sequence[nn.Module], compile_layers: bool = False) -> Iterator[LayerTap]:
    """Put one tap on all blocks; their own forwards are back when the context is left, however it is left."""
    tap = LayerTap()
    try:
        for index, layer in enumerate(layers):
            trained = torch.compile(layer.forward) if compile_layers else layer.forward
            layer.forward = tap.around(index, layer.forward, trained)
        yield tap
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of targets [batch, length] under normed hidden states [batch, length, hidden]."""
    logits = F.linear(hidden, head)  # [batch, length, vocabulary]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# Training


@dataclass
class TrainingRun:
    """A run in progress: what a checkpoint holds. The curve and the report are derived from its losses."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    losses: list[tuple[float, float]] = field(default_factory=list)  # (last layer, exit) of every step, nats per token
    held_out: dict[int, float] = field(default_factory=dict)  # step -> nats per token
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)


def new_model(recipe: Recipe) -> Any:
    """A freshly initialised model in float32; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(recipe.llama_config())


def load_model(folder: Path, recipe: Recipe) -> Any:
    """The model of a finished run in float32, refused if it is not of the recipe's architecture."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = recipe.llama_config()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        found, expected = getattr(model.config, key), getattr(wanted, key)
        if found != expected:
            raise RecipeError(f"the model to continue has {key}={found}, the recipe {expected}")
    return model


def new_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings and norms; each group keeps its `base_lr`."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and ".layers." in name]
    rest = [weight for name, weight in named if not (weight.ndim == 2 and ".layers." in name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def train_step(
    run: TrainingRun, tap: LayerTap, recipe: Recipe, batch: Tensor, loss_of: Callable[..., Tensor] = next_token_loss
) -> None:
    """One step on token ids [batch, context + 1]; the losses are added to the run's."""
    model, step = run.model, run.step
    tap.plan = plan_step(recipe, step)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with torch.autocast(batch.device.type, torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        assert tap.exit_hidden is not None
        exit_hidden = model.model.norm(tap.exit_hidden)
        loss = loss_of(hidden, model.lm_head.weight, targets)
        exit_loss = loss_of(exit_hidden, model.lm_head.weight, targets)
    (loss + recipe.exit_weight * exit_loss).backward()
    tap.plan = tap.exit_hidden = None
    nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * recipe.rate_factor(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.losses.append((loss.item(), exit_loss.item()))


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on all full, non-overlapping windows of the held-out text."""

    context: int  # tokens
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, tokens: Tensor, context: int, batch_size: int = 4) -> HeldOutLoss:
    """Evaluate `model` on the held-out token ids [length] in its own precision; always the same windows for one context.

    A window's targets are the next window's inputs moved by one, so each token but the first is predicted once.
    """
    starts = range(0, len(tokens) - context, context)
    if not starts:
        raise RecipeError(f"the held-out text has {len(tokens)} tokens, fewer than one window of {context + 1}")
    byte_counts = token_bytes(tokenizer)
    was_training, nats, num_tokens, num_bytes = model.training, 0.0, 0, 0
    model.eval()
    for first in range(0, len(starts), batch_size):
        batch = windows(tokens, starts[first : first + batch_size], context)
        targets = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1].to(model.device), use_cache=False).logits.float()
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(model.device), reduction="sum").item()
        num_tokens += targets.numel()
        num_bytes += int(byte_counts[targets].sum())
    model.train(was_training)
    return HeldOutLoss(context, num_tokens, nats / num_tokens, nats / math.log(2) / num_bytes)


def token_bytes(tokenizer: Any) -> Tensor:
    """Bytes of text each token of a byte-level BPE stands for [vocabulary]; its alphabet has one character per byte."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if index in special else len(name) for index, name in enumerate(names)])


# What lies on disk


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` and put it in its place: a killed run leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    partial.replace(path)


def write_json(path: Path, data: Any) -> None:
    """Write readable JSON atomically."""
    text = json.dumps(data, indent=2) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def save_checkpoint(run: TrainingRun, recipe: Recipe, origin: str, out: Path) -> None:
    """Everything a resumed run needs, and the curve so far for whoever watches."""
    state = {
        "recipe": asdict(recipe),
        "origin": origin,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "losses": run.losses,
        "held_out": run.held_out,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
    }
    write_atomically(out / "checkpoint.pt", lambda partial: torch.save(state, partial))
    write_curve(run, recipe, out / "training_curve.csv")


def load_checkpoint(run: TrainingRun, recipe: Recipe, origin: str, out: Path) -> None:
    """Bring a fresh run to where the checkpoint in `out` was; refuse one of another recipe, corpus or start."""
    state = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    settings = asdict(recipe)
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
    """One row per block of steps: mean losses in nats per token, and the held-out loss where it was taken."""
    rows: dict[int, list[str]] = {}
    for first in range(0, run.step, recipe.curve_every):
        block = run.losses[first : first + recipe.curve_every]
        rows[first + len(block)] = [f"{sum(losses) / len(block):.4f}" for losses in zip(*block, strict=True)]
    for step in run.held_out:
        rows.setdefault(step, ["", ""])

    def write(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["step", "loss", "exit_loss", "held_out_loss"])
            for step in sorted(rows):
                held_out = f"{run.held_out[step]:.4f}" if step in run.held_out else ""
                writer.writerow([step, *rows[step], held_out])

    write_atomically(path, write)


@dataclass(frozen=True)
class Start:
    """The finished model that a run continues, and a note on how it came to be if it has no training.json of its own."""

    folder: Path
    note: str | None = None

    @property
    def weights_sha256(self) -> str:
        """What identifies the weights."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    def report(self) -> dict[str, Any]:
        """What the new training.json says of this start; names no folder of this machine."""
        path = self.folder / "training.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return {"weights_sha256": self.weights_sha256, "note": self.note, "training": earlier}


def train(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    *,
    device: torch.device,
    start: Start | None = None,
    compile_layers: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train, or continue the killed run in `out`, and leave model, tokenizer, curve and report there; returns the report."""
    console = console or Console(quiet=True)
    if (out / "training.json").exists():
        raise RecipeError(f"{out} holds a finished run; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(recipe, corpus, out, start)
    training, held_out = encode(tokenizer, corpus.training_files), encode(tokenizer, corpus.held_out_files)
    console.print(f"{len(training):,} tokens to train on, {len(held_out):,} held out")
    model = (load_model(start.folder, recipe) if start else new_model(recipe)).to(device).train()
    run = TrainingRun(model, new_optimizers(model, recipe))
    origin = digest(training, start.weights_sha256 if start else "")
    if (out / "checkpoint.pt").exists():
        load_checkpoint(run, recipe, origin, out)
        console.print(f"continuing at step {run.step:,}")

    def evaluate() -> None:
        run.held_out[run.step] = held_out_loss(model, tokenizer, held_out, recipe.context).nats_per_token
        console.print(f"step {run.step:,}: held-out loss {run.held_out[run.step]:.4f} nats a token")

    with tapped(model.model.layers, compile_layers) as tap, progress_bar(console) as progress:
        task = progress.add_task("training", total=recipe.steps, completed=run.step, loss=math.nan, rate=0.0)
        loss_of = torch.compile(next_token_loss) if compile_layers else next_token_loss
        if start and not run.held_out:
            evaluate()
        while run.step < recipe.steps:
            began, cpu_began = time.perf_counter(), time.process_time()
            batch = windows(training, window_starts(len(training), recipe, run.step), recipe.context)
            train_step(run, tap, recipe, batch.to(device), loss_of)
            run.seconds += time.perf_counter() - began
            run.cpu_seconds += time.process_time() - cpu_began
            rate = run.step * recipe.batch_size * recipe.context / run.seconds
            progress.update(task, completed=run.step, loss=run.losses[-1][0], rate=rate)
            if run.step % recipe.evaluate_every == 0 and run.step < recipe.steps:
                evaluate()
            if run.step % recipe.checkpoint_every == 0 or run.step == recipe.steps:
                save_checkpoint(run, recipe, origin, out)
    return finish(run, recipe, corpus, out, tokenizer, training, held_out, start)


def prepare_tokenizer(recipe: Recipe, corpus: Corpus, out: Path, start: Start | None) -> PreTrainedTokenizerFast:
    """The tokenizer of the model to continue or of the killed run in `out`, otherwise a new one; it lies in `out`."""
    if start:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(start.folder / name, out / name)
    elif not (out / "checkpoint.pt").exists():
        train_tokenizer(corpus.training_files, recipe.vocabulary_size).save_pretrained(out)
    return PreTrainedTokenizerFast.from_pretrained(out)


def digest(tokens: Tensor, weights_sha256: str) -> str:
    """What identifies the data and the starting weights of a run."""
    return hashlib.sha256(tokens.numpy().tobytes() + weights_sha256.encode()).hexdigest()


def finish(
    run: TrainingRun,
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    tokenizer: Any,
    training: Tensor,
    held_out: Tensor,
    start: Start | None,
) -> dict[str, Any]:
    """Save the weights in bfloat16, evaluate what was saved, and write curve and report; the checkpoint goes last."""
    device = run.model.device
    run.model.to(torch.bfloat16).save_pretrained(out)
    saved = load_model(out, recipe).to(device)
    loss = held_out_loss(saved, tokenizer, held_out, recipe.context)
    run.held_out[run.step] = loss.nats_per_token
    write_curve(run, recipe, out / "training_curve.csv")
    write_json(out / "held_out_files.json", corpus.held_out_names)
    report = {
        "steps": run.step,
        "tokens": run.step * recipe.batch_size * recipe.context,
        "seed": recipe.seed,
        "seconds": round(run.seconds, 1),
        "cpu_seconds": round(run.cpu_seconds, 1),
        "held_out": asdict(loss),
        "held_out_before": run.held_out.get(0),
        "continued_from": start.report() if start else None,
        "corpus": {
            "name": corpus.name,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "training_files": len(corpus.training_files),
            "held_out_files": len(corpus.held_out_files),
            "copies_left_out": corpus.num_duplicates,
            "training_tokens": len(training),
            "held_out_tokens": len(held_out),
        },
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {module.__name__: str(module.__version__) for module in (torch, transformers, tokenizers)},
    }
    write_json(out / "training.json", report)
    (out / "checkpoint.pt").unlink(missing_ok=True)
    return report


def progress_bar(console: Console) -> Progress:
    """Loss, speed and remaining time of the run."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def resolve_device(name: str) -> torch.device:
    """The device `name` stands for; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the model; a killed run goes on."
)
@click.option("--steps", type=click.IntRange(1), default=Recipe.steps)
@click.option("--seed", type=int, default=Recipe.seed)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's]")
@click.option("--batch-size", type=click.IntRange(1), default=Recipe.batch_size, help="Windows per step.")
@click.option("--context", type=click.IntRange(1), default=Recipe.context, help="Tokens per window.")
@click.option("--corpus", type=click.Choice(CORPORA), default="library+tests")
@click.option(
    "--init", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Finished model to continue."
)
@click.option("--init-note", help="How the model to continue was trained, if it has no training.json.")
@click.option("--rate-scale", type=float, default=Recipe.rate_scale, help="Share of the full learning rates.")
@click.option("--warmup-steps", type=click.IntRange(0), default=Recipe.warmup_steps)
@click.option(
    "--hold-share", type=click.FloatRange(0, 1), default=Recipe.hold_share, help="Share of steps before decay."
)
@click.option(
    "--max-layer-dropout",
    type=click.FloatRange(0, 1),
    default=Recipe.max_layer_dropout,
    help="Probability that the last layer is left out of a step; 0, with --exit-weight 0, trains an ordinary model.",
)
@click.option(
    "--exit-weight", type=click.FloatRange(0), default=Recipe.exit_weight, help="Weight of the early-exit loss."
)
@click.option("--compile", "compile_layers", is_flag=True, help="Compile the blocks (needs a C++ compiler on a CPU).")
@click.option("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
def main(
    out: Path,
    threads: int | None,
    corpus: str,
    init: Path | None,
    init_note: str | None,
    compile_layers: bool,
    device: str,
    **settings: Any,
) -> None:
    """Train the demo model on the standard library's sources; run again to continue after an interruption."""
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    try:
        report = train(
            Recipe(**settings),
            library_corpus(corpus),
            out,
            device=resolve_device(device),
            start=Start(init, init_note) if init else None,
            compile_layers=compile_layers,
            console=console,
        )
    except (RecipeError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    held_out = report["held_out"]
    console.print(
        f"held-out loss {held_out['nats_per_token']:.4f} nats a token, {held_out['bits_per_byte']:.4f} bits a byte"
    )


if __name__ == "__main__":
    main()
