"""Settings of each engine, from a plan, without a model."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed, TopProbability
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft, SuffixLookup
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.measured import measured
from tuner.errors import ExportError
from tuner.export.engines.contract import Engine
from tuner.export.engines.registry import ENGINES, load_engine
from tuner.export.losses import DraftCost, losses_text
from tuner.export.plan import FixedLength, NgramSettings, Plan, fixed_length, lookup_of
from tuner.export.shape import DraftShape

SHAPE = DraftShape((0, 1), has_head=True, num_target_layers=6)
LOOKUP = NgramSettings(3, 2, 8)


def _profile(draft: Draft, rule: DraftLengthRule | None = None, **figures: Any) -> DraftProfile:
    target = TargetIdentity(
        model="m", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
    )
    found = measured(**figures) if figures else None
    return DraftProfile(name="p", target=target, draft=draft, draft_length=rule or Fixed(), measured=found)


def _plan(**changes: Any) -> Plan:
    plan = Plan(
        profile=_profile(EarlyExit(exit_layer=2)),
        model="/models/a b",
        dtype="float32",
        out=Path("/exports/one"),
        shape=SHAPE,
        length=FixedLength(4, "as asked"),
        threshold=None,
        lookup=None,
    )
    return replace(plan, **changes)


def test_vllm() -> None:
    files = load_engine("vllm").files(_plan())
    assert json.loads(files["speculative_config.json"]) == {
        "method": "draft_model",
        "model": "/exports/one/draft",
        "num_speculative_tokens": 4,
    }
    assert "vllm serve '/models/a b'" in files["launch.sh"]
    alone = load_engine("vllm").files(_plan(shape=None, lookup=LOOKUP))["speculative_config.json"]
    assert json.loads(alone) == {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }


def test_a_profile_of_batches_becomes_a_schedule() -> None:
    plan = _plan(profile=_profile(EarlyExit(exit_layer=2), batch_size=8))
    settings = json.loads(load_engine("vllm").files(plan)["speculative_config.json"])
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 8, 4]]
    settings = yaml.safe_load(load_engine("trtllm").files(plan)["config.yaml"])
    assert settings["speculative_config"]["draft_len_schedule"] == {1: 4}


def test_engines_by_data_file() -> None:
    """Each has the settings of both sorts of drafts, with the model's and the draft's paths quoted."""
    plan = _plan(out=Path("/exports/it's one"))
    settings = yaml.safe_load(load_engine("trtllm").files(plan)["config.yaml"])["speculative_config"]
    assert settings == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "/exports/it's one/draft",
    }
    alone = _plan(shape=None, lookup=LOOKUP)
    settings = yaml.safe_load(load_engine("trtllm").files(alone)["config.yaml"])["speculative_config"]
    assert settings == {"decoding_type": "NGram", "max_draft_len": 8, "max_matching_ngram_size": 3}
    launch = shlex.split(load_engine("sglang").files(plan)["launch.sh"].replace("\\\n", ""))
    given = dict(pairwise(launch))
    assert given["--model-path"] == "/models/a b"
    assert given["--speculative-draft-model-path"] == "/exports/it's one/draft"
    assert (given["--speculative-num-steps"], given["--speculative-num-draft-tokens"]) == ("4", "5")
    assert "--speculative-num-draft-tokens 9" in load_engine("sglang").files(alone)["launch.sh"]
    launch = shlex.split(load_engine("mlx").files(plan)["launch.sh"].replace("\\\n", ""))
    assert dict(pairwise(launch))["--draft-model"] == "/exports/it's one/draft"
    assert load_engine("mlx").looks_up_alone is False


def test_a_data_file_with_a_wrong_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "candle.yaml").write_text("title: Candle\nversion: '1'\ndraft_modell: {files: {}}\n", encoding="utf-8")
    monkeypatch.setattr("tuner.export.engines.registry.resources.files", lambda package: tmp_path)
    with pytest.raises(ExportError, match=r"engine candle.*draft_model"):
        load_engine("candle")


def test_llama_cpp_keeps_lookup_threshold_and_bits() -> None:
    files = load_engine("llama.cpp").files(_plan(lookup=LOOKUP, threshold=0.2, bits=8))
    assert "spec-type = ngram-simple,draft-simple\n" in files["preset.ini"]
    assert "spec-ngram-simple-size-n = 3\n" in files["preset.ini"]
    assert "spec-draft-p-min = 0.2\n" in files["preset.ini"]
    assert "--model-draft /exports/one/draft-Q8_0.gguf" in files["launch.sh"]
    assert "--outtype q8_0 /exports/one/draft --outfile /exports/one/draft-Q8_0.gguf" in files["convert.sh"]


def test_llama_cpp_quantises_the_whole_model_as_its_own_draft() -> None:
    plan = _plan(shape=DraftShape(tuple(range(6)), has_head=False, num_target_layers=6), bits=4)
    assert not plan.needs_draft_folder
    convert = load_engine("llama.cpp").files(plan)["convert.sh"]
    assert convert.count("convert_hf_to_gguf") == 1
    assert "llama-quantize /exports/one/target.gguf /exports/one/draft-Q4_0.gguf Q4_0" in convert


def test_transformers() -> None:
    engine = load_engine("hf")
    settings = engine.draft_generation(_plan(threshold=0.3))
    assert settings["num_assistant_tokens"] == 4
    assert settings["assistant_confidence_threshold"] == 0.3
    assert engine.draft_generation(_plan())["assistant_confidence_threshold"] == 0.0
    alone = json.loads(engine.files(_plan(shape=None, lookup=LOOKUP))["lookup.json"])
    assert alone == {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}


@pytest.mark.parametrize(
    ("rule", "asked", "has_threshold", "expected"),
    [
        (Fixed(max_tokens=5), None, False, 5),
        (AdaEdl(max_tokens=10), None, False, 6),  # (2.86 - 1) / 0.3
        (AdaEdl(max_tokens=4), None, False, 4),
        (AdaEdl(max_tokens=10), 3, False, 3),
        (TopProbability(max_tokens=10), None, True, 10),
    ],
)
def test_the_fixed_length_is_the_measured_mean(
    rule: DraftLengthRule, asked: int | None, has_threshold: bool, expected: int
) -> None:
    profile = _profile(EarlyExit(exit_layer=2), rule, tokens_per_round=2.86, draft_acceptance_rate=0.3)
    assert fixed_length(profile, asked, has_threshold=has_threshold).num_tokens == expected


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_lost_is_named(name: str) -> None:
    engine = load_engine(name)
    draft = LayerSkip(skip_attention=(3, 4), skip_mlp=(3, 4), lookup=Lookup(max_ngram=3, min_ngram=2, max_tokens=8))
    profile = _profile(draft, AdaEdl(max_tokens=10), tokens_per_round=2.86, draft_acceptance_rate=0.3)
    length = fixed_length(profile, None, has_threshold=False)
    plan = _plan(profile=profile, length=length, lookup=lookup_of(profile, engine, length))
    text = losses_text(plan, engine, DraftCost(3 * 2**20, 512.0, 40), ())
    assert "always 6 tokens (the profile's rounds drafted 6.20 tokens on average, copies included)" in text
    fate = "changed" if engine.looks_up_first else "lost"
    assert f"| lookup before the draft | prompt lookup (n-grams of 3 to 2, 8 tokens) | {fate} |" in text
    assert "| verification | resumes after 3 blocks | lost |" in text
    assert "adds 3.0 MiB" in text
    assert "0.50 KiB" in text
    assert f"It does not transfer: measure it in {engine.title}." in text


def test_a_draft_that_the_engine_quantises_is_a_changed_one() -> None:
    engine, draft = load_engine("llama.cpp"), LayerSkip(bits=8)
    whole = DraftShape(tuple(range(6)), has_head=False, num_target_layers=6)
    text = losses_text(_plan(profile=_profile(draft), shape=whole, bits=8), engine, None, ())
    assert "| draft | self-draft in int8 | changed | the whole model, 6 layers |" in text
    assert "a copy of the model, quantised by the engine to 8 bits" in text
    assert "Q8_0 rounds otherwise" in text
    text = losses_text(_plan(profile=_profile(draft), bits=8), engine, DraftCost(2**20, 512.0, 40), ())
    assert "in the precision of the export before the engine quantises it" in text


def test_a_suffix_automaton_becomes_the_engine_s_own() -> None:
    profile = _profile(SuffixDraft(max_spec_factor=1.5, min_token_prob=0.4))

    def plan(name: str) -> Plan:
        return _plan(
            profile=profile, shape=None, lookup=lookup_of(profile, load_engine(name), FixedLength(9, "as asked"))
        )

    settings = json.loads(load_engine("vllm").files(plan("vllm"))["speculative_config.json"])
    assert settings == {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_min_token_prob": 0.4,
        "num_speculative_tokens": 9,
    }
    settings = yaml.safe_load(load_engine("trtllm").files(plan("trtllm"))["config.yaml"])["speculative_config"]
    assert settings == {"decoding_type": "SA", "max_draft_len": 9, "max_matching_ngram_size": -1}
    assert "--speculative-num-draft-tokens 10" in load_engine("sglang").files(plan("sglang"))["launch.sh"]
    own = "| kept | the engine's own suffix automaton |"
    assert all(own in losses_text(plan(name), load_engine(name), None, ()) for name in ("vllm", "trtllm", "sglang"))


def test_n_grams_stand_for_a_suffix_automaton_where_an_engine_has_none() -> None:
    length = FixedLength(9, "as asked")
    profile = _profile(SuffixDraft(min_match=2))
    found = lookup_of(profile, load_engine("hf"), length)
    assert found == NgramSettings(5, 2, 9)
    text = losses_text(_plan(profile=profile, shape=None, lookup=found), load_engine("hf"), None, ())
    assert "| changed | n-grams of 5 to 2 tokens |" in text
    first = _profile(EarlyExit(exit_layer=2, lookup=SuffixLookup(max_tokens=6)))
    assert lookup_of(first, load_engine("llama.cpp"), length) == NgramSettings(2, 2, 6)
    assert lookup_of(first, load_engine("vllm"), length) is None, "it has no copies before a draft model"


def test_copies_without_a_counterpart_are_refused() -> None:
    length = FixedLength(4, "as asked")
    with pytest.raises(ExportError, match=r"mlx-lm has no prompt lookup.*llama.cpp"):
        lookup_of(_profile(PromptLookup()), load_engine("mlx"), length)
    found = lookup_of(_profile(PromptLookup(max_ngram=4, min_ngram=2)), load_engine("vllm"), length)
    assert found == NgramSettings(4, 2, 4)


class _Config:
    def __init__(self, model_type: str) -> None:
        self.model_type = model_type


@pytest.mark.parametrize("name", ["acme-eagle3-exit6", "eagle-one", "my-DFlash", "dspark"])
def test_vllm_refuses_a_path_that_names_another_method(name: str) -> None:
    with pytest.raises(ExportError, match="another --out"):
        load_engine("vllm").check(_plan(out=Path("/exports") / name), _Config("llama"))


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_families_with_multi_token_prediction_are_refused(name: str) -> None:
    engine: Engine = load_engine(name)
    engine.check(_plan(), _Config("qwen3"))
    with pytest.raises(ExportError, match="multi-token prediction"):
        engine.check(_plan(), _Config("deepseek_v3"))
