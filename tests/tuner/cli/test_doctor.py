"""`sdtune doctor` on a model that can be tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from decoding.kernels.choice import KernelChoice
from tests.support.tiny import save_tiny_checkpoint
from tuner.cli.main import main


def test_kernels_are_named_with_the_reason_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"linear": KernelChoice("few positions"), "int8": KernelChoice(None, "the processor has no AVX2")}
    monkeypatch.setattr("decoding.kernels.choice.kernels_on", lambda device, dtype: chosen)
    asked = ["doctor", str(save_tiny_checkpoint(tmp_path / "model"))]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == 0, found.output
    assert "linear: few positions; int8: none, the processor has no AVX2" in found.stdout
    data = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    assert data["is_supported"]
    assert data["kernels"] == {"linear": "few positions", "int8": None}
