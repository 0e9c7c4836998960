"""Paths of the repository and of the demo configuration."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo"
