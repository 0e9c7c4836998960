"""The registry of engines. To add one, write its module and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.export.engines.contract import Engine

ENGINES: Mapping[str, str] = {
    "hf": "tuner.export.engines.hf:Transformers",
    "vllm": "tuner.export.engines.vllm:Vllm",
    "sglang": "tuner.export.engines.sglang:SgLang",
    "trtllm": "tuner.export.engines.trtllm:TensorRtLlm",
    "llama.cpp": "tuner.export.engines.llama_cpp:LlamaCpp",
    "mlx": "tuner.export.engines.mlx:MlxLm",
}
"""`module:name` of each engine's class."""


def load_engine(name: str) -> Engine:
    """Return the engine with this name."""
    engine: Engine = resolve_name(ENGINES[name])()
    return engine
