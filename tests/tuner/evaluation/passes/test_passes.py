"""`sdtune evaluate passes` on a tiny model: one JSON file with a key per part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from decoding.drafts import LayerSkip, PlainDecoding
from tuner.cli.main import main


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["evaluate", "passes", *arguments])


def written(folder: Path) -> dict[str, Any]:
    assert sorted(path.name for path in folder.iterdir()) == ["passes.json", "passes.txt"]
    return json.loads((folder / "passes.json").read_text())


@pytest.mark.usefixtures("uncompiled")
def test_without_a_profile_passes_and_readiness_are_measured(workplace: Path, checkpoint: Path) -> None:
    done = evaluate("--model", str(checkpoint), "--sweeps", "2", "--candidates", "2")
    assert done.exit_code == 0, done.output
    found = written(workplace / "evaluate_passes")
    assert (found["model"], found["dtype"]) == (checkpoint.name, "float32")
    assert found["provenance"]["versions"]["torch"]
    assert {row["runner"] for row in found["widths"]["rows"]} == {"eager", "static"}
    assert len(found["readiness"]["candidates"]) == 2
    assert "contexts" not in found
    for words in ("over one position", "Readiness of new candidates"):
        assert words in done.stdout
        assert words in (workplace / "evaluate_passes" / "passes.txt").read_text()


def test_rounds_of_a_profile_are_measured_after_each_context(
    write_profile: Callable[..., Path], workplace: Path
) -> None:
    path = write_profile(LayerSkip.blocks((2, 3)))
    flags = ("--part", "contexts", "--contexts", "16", "--contexts", "300", "--max-tokens", "4", "--seconds", "0")
    done = evaluate("--profile", str(path), *flags, "--out", "there")
    assert done.exit_code == 0, done.output
    found = written(workplace / "there")["contexts"]
    assert found["native_positions"] == 256
    rounds = found["rounds_in_plain_passes"]
    assert {context: list(costs) for context, costs in rounds.items()} == {
        "16": ["1", "2", "4"],
        "300": ["1", "2", "4"],
    }
    assert all(cost > 0 for costs in rounds.values() for cost in costs.values())
    assert found["growth"]["4"] == pytest.approx(rounds["300"]["4"] / rounds["16"]["4"])
    assert "growth" in done.stdout


def test_what_cannot_be_measured_is_one_line(
    write_profile: Callable[..., Path], checkpoint: Path, workplace: Path
) -> None:
    plain = write_profile(PlainDecoding())
    for arguments, words in (
        (("--part", "contexts", "--profile", str(plain)), "decodes plainly"),
        (("--part", "contexts", "--model", str(checkpoint)), "give --profile"),
        ((), "which model? give --model or --profile"),
        (
            (
                "--part",
                "width",
            ),
            "--part",
        ),
    ):
        refused = evaluate(*arguments)
        assert refused.exit_code == 2, refused.output
        assert words in refused.stderr.splitlines()[-1]
