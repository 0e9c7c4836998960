"""The registry of engines: a file in `configs/engines`, or a module that is named here."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tuner.export.engines.data_file import DataEngine, data_engines

if TYPE_CHECKING:
    from tuner.export.engines.contract import Engine

IN_CODE: Mapping[str, str] = {
    "hf": "tuner.export.engines.hf:Transformers",
    "vllm": "tuner.export.engines.vllm:Vllm",
    "llama.cpp": "tuner.export.engines.llama_cpp:LlamaCpp",
}
"""`module:name` of the class of each engine that needs code."""
ENGINES = (*IN_CODE, *data_engines())
"""Names of all engines."""


def load_engine(name: str) -> Engine:
    return resolve_name(IN_CODE[name])() if name in IN_CODE else DataEngine(name)
