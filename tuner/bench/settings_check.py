"""Settings of a bench that exclude each other, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.bench.config import BenchConfig
from tuner.errors import ConfigError
from tuner.measuring.comparison import FEWEST_SAMPLES

WITHOUT_ENGINE = ("against", "batch_size", "repeats")
"""Settings of a bench in this process that an engine does not have."""
SIDE_BY_SIDE = ("sequences", "draft_tokens")
"""Settings of a bench in an engine with several requests side by side."""


def check_bench_settings(config: BenchConfig) -> None:
    """Raise `ConfigError` for settings that exclude each other."""
    if config.engine is None:
        if given := _given(config, SIDE_BY_SIDE):
            raise ConfigError(f"{given} measures an engine: give --engine too; --batch-size is for this process")
        return
    allowed = ("repeats",) if config.sequences else ()
    if given := _given(config, tuple(name for name in WITHOUT_ENGINE if name not in allowed)):
        raise ConfigError(
            f"{given} does not go with --engine: the engine runs the export; --sequences N measures N requests side by side"
        )
    if config.sequences and config.engine_settings is not None:
        raise ConfigError("engine_settings does not go with --sequences: give draft lengths with --draft-tokens")
    if config.draft_tokens and not config.sequences:
        raise ConfigError("--draft-tokens needs --sequences: sdtune export --draft-tokens sets the length of an export")


def check_groups(sequences: Sequence[int], num_prompts: int) -> None:
    """Raise `ConfigError` if the prompts make too few rounds for an interval."""
    most = max(sequences, default=1)
    if sequences and num_prompts // most < FEWEST_SAMPLES:
        raise ConfigError(
            f"--sequences {most} needs at least {FEWEST_SAMPLES * most} prompts, {FEWEST_SAMPLES} rounds, and there are "
            f"{num_prompts}: hold out more (--held-out-prompts), or measure fewer side by side"
        )


def _given(config: BenchConfig, names: tuple[str, ...]) -> str:
    """Return the flags of those settings that differ from their defaults."""
    found = [name for name in names if getattr(config, name) != BenchConfig.model_fields[name].get_default()]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)
