"""The profile that the search found, against what users would use instead, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.bench.config import BenchConfig
from tuner.bench.report import bench_json
from tuner.bench.run import run_bench
from tuner.bench.task import prepare_bench
from tuner.errors import ConfigError
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import DATASET, DEMO, GROUP_COLUMN, HELD_OUT_PROMPTS, NEW_TOKENS, Shared
from tuner.evaluation.gpu.side_by_side import ratio_text
from tuner.progress import Unwatched

STOCK = ("hf", "hf-prompt-lookup")
STOCK_OF_BATCHES = ("hf",)
STOCK_COMPILED = ("hf-static",)
"""Compiles the whole model, for longer than most steps last."""


@dataclass(frozen=True)
class ProfileBench:
    """Step: the search's profile in batches of one size."""

    batch_size: int
    against: tuple[str, ...]
    prompts: int
    limit_seconds: float
    pessimistic_seconds: float
    suffix: str = ""
    """What tells the step from another one with batches of this size."""

    @property
    def name(self) -> str:
        """See `GpuStep.name`."""
        return f"bench-{self.batch_size}{self.suffix}"

    @property
    def question(self) -> str:
        """See `GpuStep.question`."""
        how = "one sequence" if self.batch_size == 1 else f"batches of {self.batch_size}"
        return f"Is the profile faster than `generate` with {how}, with the same tokens?"

    def run(self, shared: Shared, seconds: float) -> Result:
        """Bench the profile on the model at hand. Raises `ConfigError` if no search has written one."""
        profile = _profile_of(shared)
        config = BenchConfig(
            profile=profile,
            dataset=str(DATASET),
            group_column=GROUP_COLUMN,
            # Batches of 16 need two whole ones: the split is then not the search's, and the result says so.
            held_out_prompts=max(self.prompts, HELD_OUT_PROMPTS),
            prompts=self.prompts,
            max_new_tokens=NEW_TOKENS,
            against=self.against,
            batch_size=self.batch_size,
            device=str(shared.device),
        )
        task = prepare_bench(config, profile, Unwatched(), loaded=shared.loaded, target=shared.static)
        return bench_figures(bench_json(run_bench(task, Unwatched())))

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line per contender."""
        yield from bench_lines(result)


@dataclass(frozen=True)
class DemoLosslessness:
    """Step: the demo model and its committed profile by every runner, in one precision."""

    dtype: str
    limit_seconds: float
    pessimistic_seconds: float

    against: tuple[str, ...] = ("plain-eager", "profile-eager", "plain-bitwise", "profile-bitwise")
    prompts: int = 4

    @property
    def name(self) -> str:
        """See `GpuStep.name`."""
        return f"lossless-{self.dtype}"

    @property
    def question(self) -> str:
        """See `GpuStep.question`."""
        return f"Do all runners write the same tokens in {self.dtype}, drafted and plain?"

    def run(self, shared: Shared, seconds: float) -> Result:
        """Bench the committed profile of the demo model."""
        profile = DEMO / "result" / "profile.yaml"
        config = BenchConfig(
            profile=profile,
            dataset=str(DATASET),
            group_column=GROUP_COLUMN,
            prompts=self.prompts,
            max_new_tokens=32,
            against=self.against,
            dtype=self.dtype,
            runner="static",
            device=str(shared.device),
        )
        return bench_figures(bench_json(run_bench(prepare_bench(config, profile, Unwatched()), Unwatched())))

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the counts of equal outputs."""
        for name, each in result["contenders"].items():
            wrong = each["texts"] - each["identical"] - each["ties"]
            yield f"{name}: identical {each['identical']}/{each['texts']} + {each['ties']} ties" + " WRONG" * bool(
                wrong
            )
        yield from _left_out(result)


def bench_figures(document: Mapping[str, Any]) -> Result:
    """Return what a bench found without its samples."""
    kept = ("dtype", "runner", "batch_size", "max_new_tokens", "split", "remarks", "left_out", "contenders", "counted")
    return {key: document[key] for key in kept}


def bench_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per contender of a bench."""
    for name, each in result["contenders"].items():
        yield (
            f"{name}: {each['tokens_per_second']['value']:.1f} tok/s, {ratio_text(each['over_plain'])} over plain, "
            f"identical {each['identical']}/{each['texts']} + {each['ties']} ties"
        )
    yield from _left_out(result)


def _left_out(result: Mapping[str, Any]) -> Iterator[str]:
    for name, reason in result["left_out"].items():
        yield f"{name} left out: {reason[:120]}"


def _profile_of(shared: Shared) -> Path:
    """Return the profile of the search, or the best one of a search that was interrupted."""
    unconfirmed = shared.profile.with_suffix(".unconfirmed.yaml")
    for path in (shared.profile, unconfirmed):
        if path.exists():
            return path
    raise ConfigError("there is no profile to measure: the search wrote none")
