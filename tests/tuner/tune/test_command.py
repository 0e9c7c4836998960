"""`sdtune tune` with a stand-in for llama.cpp: what is started, compared and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from tests.support.engine_stub import write_llama_cpp
from tests.support.refusals import refused
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main

Tune = Callable[..., Result]


@pytest.fixture
def tune(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run the command in a folder with prompts and the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_tiny_prompts(Path("prompts.jsonl"))
    write_llama_cpp(Path("llama.cpp"))

    def run(*flags: str) -> Result:
        numbers = ("--tuning-prompts", "4", "--held-out-prompts", "4", "--max-new-tokens", "12")
        command = ["tune", "--model", str(checkpoint), "--dataset", "prompts.jsonl", *numbers]
        return CliRunner().invoke(main, [*command, "--engine", "llama.cpp", "--engine-home", "llama.cpp", *flags])

    return run


def _document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(Path("tune/tune.json").read_text()))


def test_each_load_is_measured_and_gets_its_flags(tune: Tune) -> None:
    done = tune("--sequences", "2", "--sequences", "1")
    assert done.exit_code == 0, done.output
    found = _document()
    assert {each["sequences"] for each in found["tried"]} == {1, 2}
    assert [each["sequences"] for each in found["chosen"]] == [1, 2]
    assert all(each["texts"] == each["identical"] == 4 for each in found["tried"])
    assert all("--spec-type ngram-simple" in use["flags"] for use in found["use"])
    assert found["provenance"]["revision"]
    table = " ".join(Path("tune/tune.txt").read_text().split())
    assert "its own speculation, on held-out prompts" in table
    assert "use" in table


def test_a_draft_model_is_measured_at_two_lengths_first(tune: Tune) -> None:
    done = tune("--draft-model", "small.gguf")
    assert done.exit_code == 0, done.output
    settings = [each["setting"] for each in _document()["tried"]]
    assert {"draft model, 8 tokens", "draft model, 2 tokens"} <= set(settings)


def test_a_draft_that_does_not_start_is_named_and_left_out(tune: Tune) -> None:
    """The stand-in refuses more than 32 drafted tokens, and every draft with an unknown flag."""
    refused(tune("--engine-args", "--broken"), "invalid argument")


def test_a_different_text_is_an_error(tune: Tune) -> None:
    refused(tune("--engine-args", "--wrong"), "texts differ", "llama.cpp's own plain decoding")
    assert _document()["use"] == []
