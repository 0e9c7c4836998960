"""`sdtune bench` of a profile whose draft is the model itself in int8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main


def test_quantised_profile_writes_plain_decodings_text(
    workplace: Path, write_profile: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, code = write_profile(LayerSkip(bits=8), Fixed(max_tokens=3)), write_tiny_prompts(workplace / "code.jsonl")
    sizes = ["--tuning-prompts", "4", "--held-out-prompts", "2", "--max-new-tokens", "24", "--out", "b"]
    files = [str(profile), "--dataset", str(code)]
    result = CliRunner().invoke(main, ["bench", *files, *sizes, "--against", "profile,plain"])
    assert result.exit_code == 0, result.output
    samples = json.loads((workplace / "b" / "bench.json").read_text())["samples"]["profile"]
    assert [sample["identical"] for sample in samples] == [True, True]
    shown = CliRunner().invoke(main, ["show", str(profile)])
    assert "int8" in shown.output
