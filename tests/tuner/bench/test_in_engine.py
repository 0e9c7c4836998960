"""`sdtune bench --engine`, with a stand-in for llama.cpp: from the profile to the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from decoding.drafts import LayerSkip
from tests.support.engine_stub import write_llama_cpp
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main

Bench = Callable[..., Result]


@pytest.fixture
def bench(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command in a folder with a profile, prompts and the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_tiny_prompts(Path("prompts.jsonl"))
    write_llama_cpp(Path("llama.cpp"))
    save_profile(Path("profile.yaml"), checkpoint, LayerSkip.blocks((2, 3)))

    def run(*flags: str) -> Result:
        numbers = ("--tuning-prompts", "4", "--held-out-prompts", "4", "--max-new-tokens", "12")
        command = ["bench", "profile.yaml", "--dataset", "prompts.jsonl", *numbers]
        return CliRunner().invoke(main, [*command, "--engine", "llama.cpp", "--engine-home", "llama.cpp", *flags])

    return run


def test_the_export_is_measured_against_the_engines_plain_decoding(bench: Bench) -> None:
    Path("others.txt").write_text("# a comment\n--spec-type ngram-simple --model-draft {out}/draft.gguf\n--broken\n")
    done = bench("--set", "engine_settings=others.txt")
    assert done.exit_code == 0, done.output
    document = json.loads(Path("bench/bench.json").read_text())
    assert document["engine_version"] == "11434 (abc)"
    assert list(document["contenders"]) == ["profile", "plain", "flags 1"]
    profile = document["contenders"]["profile"]
    assert profile["over_plain"]["value"] == profile["profile_over_it"]["value"] * 2.0 == pytest.approx(2.0)
    assert document["contenders"]["plain"]["profile_over_it"]["value"] == pytest.approx(2.0)
    assert document["contenders"]["flags 1"]["over_plain"]["value"] == pytest.approx(2.5)
    assert document["contenders"]["flags 1"]["profile_over_it"] is None, "they took no turns"
    assert (profile["num_spec_steps"], profile["num_draft_tokens"], profile["num_accepted_draft_tokens"]) == (
        12,
        24,
        16,
    )
    assert (profile["identical"], profile["texts"]) == (4, 4)
    assert profile["end_to_end"]["over_plain"]["value"] < 2.0
    flags = document["contenders"]["flags 1"]["settings"]["flags"]
    assert flags == "--spec-type ngram-simple --model-draft export/draft.gguf"
    assert "invalid argument" in document["left_out"]["flags 2"]
    assert len(document["samples"]["profile"]) == 4
    assert Path("bench/export/target.gguf").read_text() == "gpt-2"
    table = Path("bench/bench.txt").read_text()
    assert "llama.cpp (11434 (abc)). Decode phase" in table
    assert "2.00 [2.00, 2.00]" in table
    assert "pre-tokenizer" in table
    assert re.search(r"^flags 1 +--spec-type ngram-simple", table, re.MULTILINE)
    assert re.search(r"^ flags 2 +left out", table, re.MULTILINE)
    verdict = " ".join(table[table.index("verdict") :].split())
    assert "faster than plain decoding with 95 % confidence: flags 1, profile" in verdict


def test_a_different_text_is_an_error(bench: Bench) -> None:
    done = bench("--engine-args", "--wrong")
    refused(done, "4 texts differ", "llama.cpp's own plain decoding")
    assert json.loads(Path("bench/bench.json").read_text())["contenders"]["profile"]["identical"] == 0


def test_settings_of_this_process_are_refused(bench: Bench) -> None:
    refused(bench("--batch-size", "2", "--against", "hf"), "--against, --batch-size", "--engine")
