"""Train the demo model: a small Llama-style code model made for early exits and skipped layers.

Trained on the Python standard library's own sources with layer dropout that grows with depth and a loss at a random exit
(LayerSkip, arXiv 2404.16710), by Muon on the blocks' matrices and AdamW on the rest. The same command resumes a killed run.
`--max-layer-dropout 0 --exit-weight 0` trains an ordinary model.

`configs/demo/model` continued a model of `--no-tests`, 3,260 steps of 12 windows of 256 tokens, on CPython 3.11.7:

    python -m benchmarks.demo_model.train --init FIRST --steps 2600 --rate-scale 0.5 --hold-share 0.2 --threads 1 --out MODEL
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_model.corpus import (
    LIBRARY,
    encode,
    library_corpus,
    token_bytes,
    train_tokenizer,
    window_starts,
    windows,
)
from benchmarks.results import write
from benchmarks.task import arguments

CHECKPOINT, REPORT = "checkpoint.pt", "training.json"
CURVE_STEPS = 20
"""Steps whose mean losses are a row of training.csv."""
RECIPE: dict[str, int | float] = {
    "num_layers": 24,
    "hidden_size": 160,
    "num_heads": 5,
    "mlp_size": 432,
    "vocabulary_size": 4096,
    "max_positions": 1024,
    "steps": 4000,
    "batch_size": 4,
    "context": 768,
    "muon_rate": 0.02,
    "adamw_rate": 3e-3,
    "weight_decay": 0.02,
    "rate_scale": 1.0,
    "warmup_steps": 60,
    "hold_share": 0.5,
    "gradient_norm": 1.0,
    "max_layer_dropout": 0.2,
    "exit_weight": 0.3,
    "seed": 0,
}
"""Everything that decides the weights apart from the files, the device and the weights to start from; each is an option."""


def main() -> None:
    """Train and write the model, its tokenizer, the held-out files, training.json and training.csv."""
    parser = arguments(__doc__)
    for name, default in RECIPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--no-tests", action="store_true", help="train without the interpreter's `test` package")
    parser.add_argument("--init", type=Path, help="finished model to continue")
    parser.add_argument("--checkpoint-every", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if (args.out / REPORT).exists():
        raise SystemExit(f"{args.out} holds a finished run: choose another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


def train(args: Namespace) -> None:
    """Train from the start, from `--init`, or from the checkpoint of a killed run."""
    corpus = library_corpus(with_tests=not args.no_tests)
    if args.init:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(args.init / name, args.out / name)
    elif not (args.out / CHECKPOINT).exists():
        train_tokenizer(corpus.training_files, args.vocabulary_size).save_pretrained(args.out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out, trust_remote_code=False)
    training, held_out = encode(tokenizer, corpus.training_files), encode(tokenizer, corpus.held_out_files)
    print(f"{len(training):,} tokens to train on, {len(held_out):,} held out", flush=True)
    model = _model(args).to(args.device).train()
    optimizers = new_optimizers(model, args)
    origin = hashlib.sha256(training.numpy().tobytes() + repr(_recipe(args)).encode() + _weights(args.init).encode())
    state: dict[str, Any] = {"origin": origin.hexdigest(), "losses": [], "held_out_before": None, "seconds": 0.0}
    if (args.out / CHECKPOINT).exists():
        state = torch.load(args.out / CHECKPOINT, map_location=args.device, weights_only=True)
        if state["origin"] != origin.hexdigest():
            raise SystemExit(f"the checkpoint in {args.out} has another recipe, corpus or start: choose another --out")
        model.load_state_dict(state.pop("model"))
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
    elif args.init:
        state["held_out_before"] = held_out_loss(model, tokenizer, held_out, args.context)["nats_per_token"]
    with tapped(model.model.layers) as tap:
        while (step := len(state["losses"])) < args.steps:
            began = time.perf_counter()
            starts = window_starts(len(training), args.context, args.batch_size, args.seed, step)
            batch = windows(training, starts, args.context).to(args.device)
            state["losses"].append(train_step(model, optimizers, tap, args, batch, step))
            state["seconds"] += time.perf_counter() - began
            if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
                saved = {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
                torch.save({**state, **saved}, args.out / "checkpoint.new")
                (args.out / "checkpoint.new").replace(args.out / CHECKPOINT)
    model.to(torch.bfloat16).save_pretrained(args.out)
    loss_of = held_out_loss(_model(args, args.out).to(args.device), tokenizer, held_out, args.context)
    (args.out / "held_out_files.json").write_text(
        json.dumps([path.relative_to(LIBRARY).as_posix() for path in corpus.held_out_files], indent=2) + "\n"
    )
    curve = [
        {"step": step + CURVE_STEPS, "loss": fmean(whole), "exit_loss": fmean(exits)}
        for step in range(0, args.steps - CURVE_STEPS + 1, CURVE_STEPS)
        for whole, exits in [zip(*state["losses"][step : step + CURVE_STEPS], strict=True)]
    ]
    facts = {
        "tokens": args.steps * args.batch_size * args.context,
        "seconds": round(state["seconds"], 1),
        "held_out": loss_of,
        "held_out_before": state["held_out_before"],
        "continued_from": _weights(args.init) or None,
        "corpus": {
            "with_tests": not args.no_tests,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "training_files": len(corpus.training_files),
            "training_tokens": len(training),
            "held_out_tokens": len(held_out),
        },
        "recipe": _recipe(args),
    }
    write(args.out / REPORT, facts, curve, device=args.device)
    (args.out / CHECKPOINT).unlink()
    print(f"held-out loss {loss_of['nats_per_token']:.4f} nats per token, {loss_of['bits_per_byte']:.4f} bits per byte")


def _recipe(args: Namespace) -> dict[str, int | float]:
    return {name: getattr(args, name) for name in RECIPE}


def _weights(folder: Path | None) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() if folder else ""


def _model(args: Namespace, folder: Path | None = None) -> Any:
    """Return the model of a folder or of `--init` in float32, or a freshly initialised one."""
    if source := folder or args.init:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary_size,
            hidden_size=args.hidden_size,
            intermediate_size=args.mlp_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            num_key_value_heads=args.num_heads,
            max_position_embeddings=args.max_positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            rms_norm_eps=1e-5,
        )
    )


class LayerTap:
    """Interception of a model's blocks: skips some blocks in training and keeps the hidden state at the exit.

    Without a plan every block runs its own forward, so held-out losses are the plain model's.
    """

    plan: tuple[frozenset[int], int] | None = None
    """Blocks that a step skips, and the block after which it also exits."""
    exit_hidden: Tensor | None = None

    def around(self, index: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the forward of block `index`, around its own."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.plan is None:
                return plain(hidden_states, *args, **kwargs)
            if index not in self.plan[0]:
                hidden_states = plain(hidden_states, *args, **kwargs)
            if index == self.plan[1]:
                self.exit_hidden = hidden_states
            return hidden_states

        return forward


@contextmanager
def tapped(layers: Sequence[nn.Module]) -> Iterator[LayerTap]:
    """Put one tap on all blocks; restore their own forwards when the context ends, also after an error."""
    tap = LayerTap()
    try:
        for index, layer in enumerate(layers):
            layer.forward = tap.around(index, layer.forward)
        yield tap
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def plan_step(args: Namespace, step: int) -> tuple[frozenset[int], int]:
    """Draw the skipped blocks and the exit of `step` from seed and step alone.

    The probability of skipping a block is exponential in its depth, and 0 at the first (LayerSkip, section 4.1).
    """
    generator, last = random.Random(f"{args.seed}:{step}"), args.num_layers - 1
    skipped = [
        index
        for index in range(args.num_layers)
        if generator.random() < args.max_layer_dropout * (2 ** (index / last) - 1)
    ]
    return frozenset(skipped), generator.randrange(min(2, last - 1), last)


def new_optimizers(model: nn.Module, args: Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices and AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and ".layers." in name]
    rest = [weight for name, weight in named if not (weight.ndim == 2 and ".layers." in name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.muon_rate, momentum=0.95, weight_decay=args.weight_decay),
        torch.optim.AdamW(rest, lr=args.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def train_step(
    model: Any, optimizers: list[torch.optim.Optimizer], tap: LayerTap, args: Namespace, batch: Tensor, step: int
) -> tuple[float, float]:
    """Run one step on token ids [batch, context + 1]; return the losses at the last layer and at the exit, in nats."""
    tap.plan = plan_step(args, step)
    inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
    with torch.autocast(batch.device.type, torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        assert tap.exit_hidden is not None
        exit_hidden = model.model.norm(tap.exit_hidden)
        loss, exit_loss = (
            F.cross_entropy(F.linear(each, model.lm_head.weight).flatten(0, 1).float(), targets)
            for each in (hidden, exit_hidden)
        )
    (loss + args.exit_weight * exit_loss).backward()
    tap.plan = tap.exit_hidden = None
    nn.utils.clip_grad_norm_(model.parameters(), args.gradient_norm)
    warmup = min(1.0, (step + 1) / (args.warmup_steps + 1))
    decay = min(1.0, (1 - step / args.steps) / max(1 - args.hold_share, 1e-9))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * args.rate_scale * warmup * decay
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item(), exit_loss.item()


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, tokens: Tensor, context: int) -> dict[str, float]:
    """Return the loss on all full windows of the held-out token ids [length]; each token but the first is predicted once."""
    starts, byte_counts = range(0, len(tokens) - context, context), token_bytes(tokenizer)
    was_training, nats, num_tokens, num_bytes = model.training, 0.0, 0, 0
    model.eval()
    for first in range(0, len(starts), 4):
        batch = windows(tokens, starts[first : first + 4], context)
        targets = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1].to(model.device), use_cache=False).logits.float()
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(model.device), reduction="sum").item()
        num_tokens += targets.numel()
        num_bytes += int(byte_counts[targets].sum())
    model.train(was_training)
    return {"nats_per_token": nats / num_tokens, "bits_per_byte": nats / math.log(2) / num_bytes}


if __name__ == "__main__":
    main()
