"""`sdtune show`: a profile on one screen."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from decoding.draft_length import AdaEdl
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.profile import (
    DatasetFacts,
    DraftProfile,
    Exactness,
    Interval,
    Measured,
    ProfileOrigin,
    Rates,
    SearchCost,
    TargetIdentity,
)
from tests.support.paths import ROOT
from tests.support.shown import shown
from tuner.cli.show import profile_panel


def _profile(measured: dict[str, Any] | None = None, **parts: Any) -> DraftProfile:
    facts = {"architecture": "LlamaForCausalLM", "dtype": "float32", "config_sha256": "a", "weights_sha256": "b"}
    figures: dict[str, Any] = {
        "speedup": Interval(value=1.41, ci95=(1.36, 1.46)),
        "tokens_per_second": Rates(draft=148.2, plain=105.1),
        "draft_acceptance_rate": 0.86,
        "tokens_per_round": 3.4,
        "exact": Exactness(prompts=32, identical=31, ties=1),
        "search": SearchCost(trials=64, seconds=412.0),
        "device": "a device",
        "versions": {"torch": "2.13.0"},
        "dataset": DatasetFacts(
            name="code", fingerprint="f", tuning_prompts=32, held_out_prompts=32, max_new_tokens=96
        ),
    }
    values: dict[str, Any] = {
        "name": "demo",
        "target": TargetIdentity(model="m", num_layers=12, **facts),
        "draft": LayerSkip(skip_attention=(3, 4), skip_mlp=(4, 11)),
        "draft_length": AdaEdl(),
        "measured": Measured(**{**figures, **(measured or {})}),
        "provenance": ProfileOrigin(created="2026-01-01", study="conf_layers", git_revision="abc", mlflow_run_id="123"),
    }
    return DraftProfile(**{**values, **parts})


def _text(profile: DraftProfile, width: int = 80) -> str:
    return shown(profile_panel(profile), width)


def test_a_profile_is_one_screen_that_says_it_all() -> None:
    text = _text(_profile())
    assert len(text.splitlines()) <= 30
    for words in (
        *("1.41x, 95 % interval 1.36 to 1.46", "148.2", "31 of 32", "1 numerical ties", "64 trials, 412 s", "AdaEDL"),
        *(
            "    layer 0    5    10",
            "attention ###..#######",
            "      MLP ####.######.",
            "git revision abc, MLflow run 123",
        ),
    ):
        assert words in text
    for words in ("in lockstep", "machine was busy", "proposed by"):
        assert words not in text


HEAD = EarlyExit(exit_layer=4, head="demo.exit_head_4.safetensors", head_sha256="a" * 64)


@pytest.mark.parametrize(
    ("profile", "words", "unsaid"),
    [
        (_profile({"batch_size": 8}), ["8 prompts in lockstep"], "busy"),
        (
            _profile({"noise": ("decoding waited for a processor for 40% of its time",)}),
            ["Ship, but measure again: the machine was busy", "waited for a processor for 40%"],
            "lockstep",
        ),
        (
            _profile(provenance=ProfileOrigin(created="c", study="joint", origin="conf_layers (x, lambda -0.1)")),
            ["by joint", "conf_layers (x, lambda -0.1)"],
            "revision",
        ),
        (
            _profile(name="[/red] one", draft=PlainDecoding(), measured=None),
            ["[/red] one", "plain decoding"],
            "ada_edl",
        ),
        (
            _profile({"search": SearchCost(trials=64, seconds=412.0, distillation_seconds=90.0)}, draft=HEAD),
            [
                *(
                    "early exit at layer 4 (trained head)",
                    "demo.exit_head_4.safetensors",
                    "412 s; 90 s to distil exit heads",
                ),
                "attention ####........",
            ],
            "no head",
        ),
        (_profile(draft=EarlyExit(exit_layer=4)), ["early exit at layer 4 (no head)"], "distil"),
        (_profile(draft=PromptLookup(min_ngram=2)), ["prompt lookup (n-grams of 3 to 2)", "AdaEDL"], "####"),
        (
            _profile(draft=EarlyExit(exit_layer=4, lookup=Lookup())),
            [
                "prompt lookup (n-grams of 3 to 1, 10 tokens), then early exit at layer 4 (no head)",
                "attention ####........",
            ],
            "trained",
        ),
    ],
)
def test_what_is_particular_to_a_profile_is_said(profile: DraftProfile, words: list[str], unsaid: str) -> None:
    text = _text(profile, 120)
    assert [each for each in words if each not in text] == []
    assert unsaid not in text


def test_a_profile_is_shown_at_once_without_torch() -> None:
    profile = ROOT / "configs/demo/result/profile.yaml"
    code = f"import sys; sys.modules['torch'] = None; from tuner.cli.main import main; main(['show', {str(profile)!r}])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "SelfDraft" in shown.splitlines()[-1]  # the command for vLLM, in one line
