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
from tuner.engines.llama_cpp import LlamaCppServer
from tuner.export.plan import Plan

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


def test_the_export_is_measured_against_the_engines_plain_decoding(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_drafts(engine: LlamaCppServer, plan: Plan, path: Path) -> dict[str, tuple[str, ...]]:
        return {
            "n-grams": ("--spec-type", "ngram-simple", "--model-draft", f"{plan.out}/draft.gguf"),
            "broken": ("--broken",),
        }

    monkeypatch.setattr(LlamaCppServer, "own_drafts", own_drafts)
    done = bench()
    assert done.exit_code == 0, done.output
    document = json.loads(Path("bench/bench.json").read_text())
    assert document["engine_version"] == "11434 (abc)"
    assert list(document["contenders"]) == ["profile", "plain", "n-grams"]
    profile = document["contenders"]["profile"]
    assert profile["over_plain"]["value"] == profile["profile_over_it"]["value"] * 2.0 == pytest.approx(2.0)
    assert document["contenders"]["plain"]["profile_over_it"]["value"] == pytest.approx(2.0)
    assert document["contenders"]["n-grams"]["over_plain"]["value"] == pytest.approx(2.5)
    assert document["contenders"]["n-grams"]["profile_over_it"] is None, "they took no turns"
    assert (profile["num_spec_steps"], profile["num_draft_tokens"], profile["num_accepted_draft_tokens"]) == (
        12,
        24,
        16,
    )
    assert document["export_acceptance"]["engine"] == pytest.approx(16 / 24)
    assert document["export_acceptance"]["transformers"] < 0.5, "the stand-in's texts are not the model's"
    assert (profile["identical"], profile["texts"]) == (4, 4)
    assert profile["end_to_end"]["over_plain"]["value"] < 2.0
    flags = document["contenders"]["n-grams"]["settings"]["flags"]
    assert flags == "--spec-type ngram-simple --model-draft export/draft.gguf"
    assert "invalid argument" in document["left_out"]["broken"]
    assert len(document["samples"]["profile"]) == 4
    assert Path("bench/export/target.gguf").read_text() == "gpt-2"
    table = Path("bench/bench.txt").read_text()
    assert "llama.cpp (11434 (abc)). Decode phase" in table
    assert "2.00 [2.00, 2.00]" in table
    assert "pre-tokenizer" in table
    assert "llama.cpp accepts 66.7% of the export's drafted tokens" in " ".join(table.split())
    assert re.search(r"^n-grams +--spec-type ngram-simple", table, re.MULTILINE)
    assert re.search(r"^ broken +left out", table, re.MULTILINE)
    verdict = " ".join(table[table.index("verdict") :].split())
    assert "faster than plain decoding with 95 % confidence: n-grams, profile" in verdict


def test_a_different_text_is_an_error(bench: Bench) -> None:
    done = bench("--engine-args", "--wrong")
    refused(done, "4 texts differ", "llama.cpp's own plain decoding")
    assert json.loads(Path("bench/bench.json").read_text())["contenders"]["profile"]["identical"] == 0


def test_settings_of_this_process_are_refused(bench: Bench) -> None:
    refused(bench("--batch-size", "2", "--against", "hf"), "--against, --batch-size", "--engine")
