"""Settings of a bench that exclude each other, refused before anything is loaded."""

from __future__ import annotations

from tuner.bench.config import BenchConfig
from tuner.errors import ConfigError

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


def _given(config: BenchConfig, names: tuple[str, ...]) -> str:
    """Return the flags of those settings that differ from their defaults."""
    found = [name for name in names if getattr(config, name) != BenchConfig.model_fields[name].get_default()]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)
