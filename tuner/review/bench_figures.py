"""The comparison with stock generation, from the `bench.json` that `sdtune bench` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tuner.errors import ConfigError
from tuner.review.document import StockComparison, StockContender

PLAIN = "plain"


def read_comparison(path: Path, name: str) -> StockComparison:
    """Return the contenders of a bench of the profile named `name`.

    Raises `ConfigError` for a file that is no bench, and for a bench of another profile.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        engine, profile = found.get("engine"), str(found["profile"])
        comparison = _comparison(found) if engine is None else None
    except OSError as cause:
        raise ConfigError(f"cannot read {path}: {cause.strerror}") from None
    except (AttributeError, ValueError, KeyError, TypeError, ValidationError):
        raise ConfigError(f"{path} is no bench.json of this version: `sdtune bench` writes one") from None
    if comparison is None:
        raise ConfigError(f"{path} is a bench in {engine}: give one of `sdtune bench` without --engine")
    if profile != name:
        raise ConfigError(f"{path} is a bench of the profile {profile!r}, not of {name!r}")
    return comparison


def _comparison(found: dict[str, Any]) -> StockComparison:
    return StockComparison(
        num_prompts=len(found["counted"]),
        plain_tokens_per_second=found["contenders"][PLAIN]["tokens_per_second"],
        contenders={name: _contender(each) for name, each in found["contenders"].items() if name != PLAIN},
        left_out=found["left_out"],
    )


def _contender(each: dict[str, Any]) -> StockContender:
    return StockContender(
        description=each["description"],
        tokens_per_second=each["tokens_per_second"],
        over_plain=each["over_plain"],
        end_to_end_over_plain=each["end_to_end"]["over_plain"],
        profile_over_it=each["profile_over_it"],
        texts=each["texts"],
        identical=each["identical"],
        ties=each["ties"],
    )
