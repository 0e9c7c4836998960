"""The steps of the GPU benchmark: commands of `sdtune`, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner.evaluation.gpu.steps import BenchmarkStep

DEMO = Path("configs/demo")
OUR_MODES = "plain-eager,profile-eager,plain-bitwise,profile-bitwise"
STOCK = "plain-eager,hf,hf-static,hf-early-exit,hf-prompt-lookup"
STOCK_OF_BATCHES = "plain-eager,profile-eager,hf,hf-static"
BATCHES = {4: 16, 16: 32}
"""Batch sizes, and the number of prompts that are measured with each."""


def plan(out: Path, device: str, preset: str, search_seconds: int) -> list[BenchmarkStep]:
    """Return the steps of a benchmark whose results go into the folder `out`."""
    common = {"dataset": DEMO / "prompts.jsonl", "group_column": "file", "device": device}
    wide = {"profile": out / "profile.yaml", "model": out / "widened", "context": 512, **common}
    return [
        *_lossless(out, common),
        _widening(out, device, preset),
        _search(out, search_seconds, common),
        BenchmarkStep(
            "bench", ("bench", *_flags(**wide, prompts=8, against=STOCK, out=out / "widened_bench")), timeout=180
        ),
        *_batches(out, wide),
        _readiness(out, device),
    ]


def _lossless(out: Path, common: dict[str, object]) -> Iterator[BenchmarkStep]:
    profile = DEMO / "result" / "profile.yaml"
    for dtype in ("float32", "bfloat16"):
        flags = _flags(
            profile=profile, **common, dtype=dtype, runner="static", against=OUR_MODES, prompts=16, out=out / dtype
        )
        yield BenchmarkStep(f"lossless in {dtype}", ("bench", *flags), timeout=120)


def _widening(out: Path, device: str, preset: str) -> BenchmarkStep:
    flags = _flags(
        model=DEMO / "model", preset=preset, heads=DEMO / "heads", device=device, dtype="bfloat16", out=out / "widened"
    )
    return BenchmarkStep("widening", ("evaluate", "widen", *flags), timeout=120)


def _search(out: Path, seconds: int, common: dict[str, object]) -> BenchmarkStep:
    flags = _flags(
        model=out / "widened",
        **common,
        heads=out / "widened" / "heads",
        distill="never",
        tuning_prompts=16,
        held_out_prompts=max(BATCHES.values()),
        max_new_tokens=48,
        storage=f"sqlite:///{out}/sdtune.db",
        tracking_uri=f"sqlite:///{out}/mlflow.db",
        dtype="bfloat16",
        runner="static",
        timeout=f"{seconds}s",
        out=out / "profile.yaml",
    )
    return BenchmarkStep("search", ("search", *flags), timeout=seconds + 120)


def _batches(out: Path, wide: dict[str, object]) -> Iterator[BenchmarkStep]:
    for size, num_prompts in BATCHES.items():
        flags = _flags(
            **wide,
            batch_size=size,
            prompts=num_prompts,
            against=STOCK_OF_BATCHES,
            out=out / f"widened_bench_batch_{size}",
        )
        yield BenchmarkStep(f"bench in batches of {size}", ("bench", *flags), timeout=90)


def _readiness(out: Path, device: str) -> BenchmarkStep:
    flags = _flags(model=out / "widened", part="readiness", dtype="bfloat16", device=device, out=out / "passes")
    return BenchmarkStep("readiness", ("evaluate", "passes", *flags), timeout=90)


def _flags(**settings: object) -> tuple[str, ...]:
    """Return settings as flags: `max_tokens=8` becomes `--max-tokens 8`."""
    return tuple(part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value)))
