"""The engines that can be measured, by name. Imports nothing, so that settings may list them.

To add one, write its module in `tuner.engines` and name it here.
"""

from __future__ import annotations

from collections.abc import Mapping

PROGRAMS: Mapping[str, str] = {
    "llama.cpp": "tuner.engines.llama_cpp:LlamaCppServer",
    "vllm": "tuner.engines.vllm:VllmServer",
}
"""`module:name` of each engine's class, by the name of its export."""
