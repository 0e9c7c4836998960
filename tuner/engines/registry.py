"""The registry of engines that can be measured. To add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.engines.contract import EngineProgram

PROGRAMS: Mapping[str, str] = {
    "llama.cpp": "tuner.engines.llama_cpp:LlamaCppServer",
    "vllm": "tuner.engines.vllm:VllmServer",
}
"""`module:name` of each engine's class, by the name of its export."""


def find_engine(name: str, home: Path | None) -> EngineProgram:
    """Return the installed engine; raise `EngineError` if it is not found."""
    program: type[EngineProgram] = resolve_name(PROGRAMS[name])
    return program.find(home)
