"""The plugin for vLLM as it lies in the repository; vLLM itself is not installed here."""

from __future__ import annotations

import sys

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "plugins" / "vllm"))
