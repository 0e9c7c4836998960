"""The installed engine of a name; `tuner.fields` lists them."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tuner.fields import PROGRAMS

if TYPE_CHECKING:
    from tuner.engines.contract import EngineProgram


def find_engine(name: str, home: Path | None) -> EngineProgram:
    """Return the installed engine; raise `EngineError` if it is not found."""
    program: type[EngineProgram] = resolve_name(PROGRAMS[name])
    return program.find(home)
