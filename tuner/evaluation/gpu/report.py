"""The figures of the GPU benchmark, read from what its steps have written, and their table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tuner.evaluation.gpu.steps import Done


def figures(out: Path) -> dict[str, Any]:
    """Return rates, ratios to plain decoding and equal outputs of every bench in `out`, and the readiness of candidates."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("*/bench.json")):
        bench = json.loads(path.read_text())
        found[path.parent.name] = {
            "device": bench["provenance"]["device"],
            "dtype": bench["dtype"],
            "runner": bench["runner"],
            "batch_size": bench.get("batch_size", 1),
            "roofline_tokens_per_second": bench["roofline"]["tokens_per_second"],
            "left_out": bench["left_out"],
            "contenders": {
                name: {
                    key: each[key]
                    for key in ("tokens_per_second", "over_plain", "share_of_roofline", "identical", "ties", "texts")
                }
                for name, each in bench["contenders"].items()
            },
        }
    passes = out / "passes" / "passes.json"
    return {**found, "readiness": json.loads(passes.read_text())["readiness"]} if passes.exists() else found


def table(done: Sequence[Done], found: dict[str, Any]) -> Table:
    """Return a table with a row per step and a row per contender."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("step or contender", "tok/s", "over plain", "roofline", "identical"):
        shown.add_column(heading, overflow="fold")
    for step in done:
        shown.add_row(
            f"{'ok' if step.ok else 'FAILED'}: {step.name}",
            f"{step.seconds:.0f} s",
            "",
            "",
            "" if step.ok else step.last_line,
        )
    for bench, facts in found.items():
        for name, each in facts.get("contenders", {}).items():
            low, high = each["over_plain"]["ci95"]
            shown.add_row(
                f"{bench}: {name}",
                f"{each['tokens_per_second']['value']:.1f}",
                f"{each['over_plain']['value']:.2f} [{low:.2f}, {high:.2f}]",
                f"{each['share_of_roofline']:.0%}",
                f"{each['identical']}/{each['texts']} + {each['ties']} ties",
            )
    return shown
