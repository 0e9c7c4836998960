"""The profile: read strictly, written whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from transformers import AutoModelForCausalLM

from decoding.deploy.custom_generate import check_target
from decoding.documents.strict_yaml import dump
from decoding.draft_length import RULES
from decoding.drafts import (
    LayerSkip,
    PlainDecoding,
    compact_indices,
    format_indices,
    parse_indices,
)
from decoding.errors import ProfileError
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.paths import DEMO


def _profile(**changes: Any) -> DraftProfile:
    target = TargetIdentity(
        model="m", architecture="A", num_layers=24, dtype="float32", config_sha256="a", weights_sha256="b"
    )
    draft = LayerSkip(skip_attention=(7, 9, 12, 13, 14, 15), skip_mlp=(12, 13))
    return DraftProfile(**{"name": "demo", "target": target, "draft": draft, **changes})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for rule, kind in RULES.items():
        profile = _profile(draft_length={"rule": rule, "max_tokens": 3, "persistent": True})
        profile.save(tmp_path / "p.yaml")
        loaded = DraftProfile.load(tmp_path / "p.yaml")
        assert loaded == profile
        assert type(loaded.draft_length) is kind


def test_figures_and_provenance_are_loaded_to_the_last_digit(tmp_path: Path) -> None:
    measured = {
        "speedup": {"value": 1.1 + 2.2, "ci95": (1e-05, 20.0 / 3.0)},
        "tokens_per_second": {"draft": 1e8 / 3, "plain": 0.1},
        "acceptance_rate": 0.7,
        "tokens_per_round": 3.0,
        "exact": {"prompts": 4, "identical": 3, "ties": 1},
        "search": {"trials": 2, "seconds": 0.5},
        "device": "cpu: é",
        "versions": {"torch": "2.13.0", "python": "3.11"},
        "dataset": {
            "name": "d",
            "fingerprint": "0e12",
            "tuning_prompts": 1,
            "held_out_prompts": 1,
            "max_new_tokens": 8,
        },
    }
    provenance = {"created": "2026-01-02T03:04:05+00:00", "study": "conf_layers", "git_revision": "1234567"}
    profile = _profile(measured=measured, provenance=provenance, draft=PlainDecoding())
    profile.save(tmp_path / "p.yaml")
    assert DraftProfile.load(tmp_path / "p.yaml") == profile
    assert "batch_size" not in (tmp_path / "p.yaml").read_text(), "as in profiles from before there were batches"
    of_batches = _profile(measured={**measured, "batch_size": 8}, provenance=provenance, draft=PlainDecoding())
    of_batches.save(tmp_path / "p.yaml")
    loaded = DraftProfile.load(tmp_path / "p.yaml")
    assert loaded.measured is not None
    assert loaded.measured.batch_size == 8
    jsonschema.validate(loaded.model_dump(mode="json", by_alias=True), DraftProfile.json_schema())


def test_runs_of_layers_are_written_as_ranges(tmp_path: Path) -> None:
    _profile().save(tmp_path / "p.yaml")
    data = yaml.safe_load((tmp_path / "p.yaml").read_text())
    assert data["draft"] == {"kind": "layer_skip", "skip_attention": [7, 9, "12-15"], "skip_mlp": [12, 13]}
    assert data["schema"] == "sdtune/v1"


def test_reading_indices_is_the_inverse_of_writing_them() -> None:
    for indices in ((), (0,), (1, 2), (0, 1, 2), (3, 5, 6, 7, 20)):
        assert parse_indices(format_indices(indices)) == indices
        assert compact_indices(indices) == "-" or parse_indices(compact_indices(indices)) == indices
    assert parse_indices("12-15, 9,7,13") == (7, 9, 12, 13, 14, 15), "in any order, and twice"
    assert LayerSkip.model_validate({"skip_attention": "3,1"}) == LayerSkip(skip_attention=(1, 3))


def test_the_json_schema_takes_a_profile_and_refuses_a_wrong_one() -> None:
    schema = DraftProfile.json_schema()
    good = _profile().model_dump(mode="json", by_alias=True)
    jsonschema.validate(good, schema)
    nameless = {key: value for key, value in good.items() if key != "name"}
    unversioned = {key: value for key, value in good.items() if key != "schema"}
    for wrong in (
        nameless,
        unversioned,
        {**good, "extra": 1},
        {**good, "schema": "sdtune/v2"},
        {**good, "draft": {"kind": "guess"}},
        {**good, "draft_length": {"rule": "fixed", "max_tokens": 0}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


WRONG_LINES = [
    ("schema: sdtune/v1", "schema: sdtune/v2", "schema is 'sdtune/v2', this version of sdtune reads 'sdtune/v1'"),
    ("schema: sdtune/v1\n", "", "schema is None"),
    ("name: demo", "nme: demo", "unknown key 'nme'; did you mean 'name'"),
    ("kind: layer_skip", "kind: layer_skp", "draft.kind: unknown value 'layer_skp'; did you mean 'layer_skip'"),
    ("rule: fixed", "rule: fixt", "draft_length.rule: unknown value 'fixt'; did you mean 'fixed'"),
    ("rule: fixed", "rule: fixed, gamma: 1", "unknown key 'draft_length.gamma'"),
    ("max_tokens: 8", "max_tokens: 0", "draft_length.max_tokens: .*greater than or equal to 1"),
    ("12-15", "12-24", "draft skips layer 24, but the target has layers 0 to 23"),
    ("12-15", "15-12", "runs backwards"),
    ("12-15", "-3", "layer"),
    ("12-15", "12-", "draft.skip_attention: must hold layer indices such as 7 or 12-15, got '12-'"),
    ("12-15", "1-2-3", "draft.skip_attention: must hold layer indices such as 7 or 12-15, got '1-2-3'"),
    ("12-15", "12-150000000000", "draft.skip_attention: a layer index is below 10000"),
    ("12-15", "12.0", "draft.skip_attention: must hold layer indices"),
    ("skip_mlp: [12, 13]", "skip_mlp: 12", "draft.skip_mlp: must be a list of layer indices"),
    ("rule: fixed, ", "", "key 'draft_length.rule' is missing"),
    ("runner: eager", "runner: fast", "decoding.runner: unknown runner 'fast'; valid: eager, static"),
    ("temperature: 0.0", "temprature: 0.0", "unknown key 'decoding.temprature'; did you mean 'temperature'"),
    ("num_layers: 24", "num_layers: many", "target.num_layers: .*valid integer.*'many'"),
    ("name: demo", "name: 2026-13-01", "not valid YAML: month must be in 1..12"),
    ("name: demo", "name: demo\nname: again", "duplicate key 'name'"),
    ("name: demo", "name: [demo", "not valid YAML"),
]


def test_a_wrong_profile_is_one_line_with_file_key_and_correction(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    _profile().save(path)
    right = path.read_text()
    for old, new, message in WRONG_LINES:
        assert old in right
        path.write_text(right.replace(old, new))
        with pytest.raises(ProfileError, match=message) as refused:
            DraftProfile.load(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)


HASH = "a" * 64
BESIDE = "name of a .safetensors file beside the profile"
WRONG_DRAFTS: list[tuple[dict[str, Any], str]] = [
    ({"exit_layer": 24}, "draft exits at layer 24, but it must be 1 to 23"),
    ({"exit_layer": 0}, "draft.exit_layer: input should be greater than or equal to 1"),
    ({"exit_layer": 8, "head": "h.safetensors"}, "head and head_sha256, both or neither"),
    ({"exit_layer": 8, "head_sha256": HASH}, "head and head_sha256, both or neither"),
    *(
        ({"exit_layer": 8, "head": head, "head_sha256": HASH}, BESIDE)
        for head in ("", "../h", "/h", "h.pt", "a\\h.safetensors", ".safetensors")
    ),
    ({"exit_layer": 8, "head": "a\nh.safetensors", "head_sha256": HASH}, "draft.head: must be one line"),
    ({"exit_layer": 8, "head": "h.safetensors", "head_sha256": "a"}, "draft.head_sha256: string should match pattern"),
    ({"exit_layer": 3, "lookup": {"min_ngram": 4}}, "draft.lookup: min_ngram must be at most"),
    ({"kind": "prompt_lookup", "max_ngram": 2, "min_ngram": 3}, "min_ngram must be at most max_ngram, got 3 and 2"),
    ({"kind": "prompt_lookup", "min_ngram": 0}, "draft.min_ngram: input should be greater than or equal to 1"),
    ({"kind": "prompt_lookup", "max_ngram": 33}, "draft.max_ngram: input should be less than or equal to 32"),
    ({"kind": "prompt_lookup", "max_tokens": 4}, "unknown key 'draft.max_tokens'"),
    ({"kind": "layer_skip", "lookup": {"max_tokens": 65}}, "draft.lookup.max_tokens: input should be less than"),
    ({"kind": "layer_skip", "lookup": {"tokens": 5}}, "unknown key 'draft.lookup.tokens'; did you mean 'max_tokens'"),
    ({"kind": "layer_skip", "lookup": True}, "draft.lookup: input should be a valid dictionary"),
    ({"kind": "layer_skip", "lookup": {"method": "sam"}}, "draft.lookup.method: input should be 'suffix_automaton'"),
    ({"kind": "layer_skip", "bits": 16}, "draft.bits: input should be 8 or 4"),
    ({"kind": "layer_skip", "bits": "8"}, "draft.bits: input should be 8 or 4"),
    ({"kind": "none", "lookup": {}}, "unknown key 'draft.lookup'"),
    ({"kind": "suffix_automaton", "max_spec_factor": 0}, "draft.max_spec_factor: input should be greater than 0"),
]


def test_wrong_drafts_are_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(dump(_profile()))
    for draft, message in WRONG_DRAFTS:
        (tmp_path / "p.yaml").write_text(yaml.safe_dump({**data, "draft": {"kind": "early_exit", **draft}}))
        with pytest.raises(ProfileError, match=re.escape(message)):
            DraftProfile.load(tmp_path / "p.yaml")


def test_the_committed_result_of_the_demo_is_for_the_model_that_ships() -> None:
    demo = DEMO
    profile = DraftProfile.load(demo / "result" / "profile.yaml")
    check_target(profile, AutoModelForCausalLM.from_pretrained(demo / "model"))
    assert profile.measured is not None
    assert profile.measured.threads == 1
    assert profile.measured.exact.identical == profile.measured.exact.prompts


def _measured(**changes: Any) -> dict[str, Any]:
    """Return the figures of a profile as plain data; `changes` replace values by their dotted names."""
    figures = {
        "speedup": {"value": 1.5, "ci95": [1.4, 1.6]},
        "tokens_per_second": {"draft": 15.0, "plain": 10.0},
        "end_to_end": {
            "speedup": {"value": 1.4, "ci95": [1.3, 1.5]},
            "tokens_per_second": {"draft": 14.0, "plain": 10.0},
            "time_to_first_token_seconds": {"draft": 0.1, "plain": 0.1},
        },
        "categories": {"math": {"prompts": 8, "speedup": {"value": 1.5, "ci95": [1.4, 1.6]}}},
        "stock": {"hf": {"prompts": 8, "profile_over_it": {"value": 2.0, "ci95": [1.9, 2.1]}}},
        "draft_acceptance_rate": 0.5,
        "tokens_per_round": 2.0,
        "exact": {"prompts": 24, "identical": 23, "ties": 1},
        "search": {"trials": 3, "seconds": 10.0},
        "device": "cpu (1 thread)",
        "versions": {},
        "dataset": {
            "name": "d",
            "fingerprint": "f",
            "tuning_prompts": 8,
            "held_out_prompts": 8,
            "max_new_tokens": 24,
        },
    }
    for dotted, value in changes.items():
        *folders, key = dotted.split("__")
        place: Any = figures
        for folder in folders:
            place = place[folder]
        place[key] = value
    return figures


WRONG_FIGURES: list[tuple[str, Any]] = [
    ("exact__identical", 99),
    ("exact__ties", -5),
    ("exact__prompts", -1),
    ("exact__prompts", 10**400),
    ("draft_acceptance_rate", 7),
    ("draft_acceptance_rate", -0.1),
    ("mean_acceptance_length", 1e300),
    ("speedup__value", float("nan")),
    ("speedup__value", float("inf")),
    ("speedup__value", 1e300),
    ("speedup__value", 0),
    ("speedup__ci95", [1.6, 1.4]),
    ("speedup__ci95", [1.6, 1.7]),
    ("speedup__ci95", [-1, 1.7]),
    ("speedup__ci95", [1.4, float("inf")]),
    ("tokens_per_second__draft", -1),
    ("tokens_per_second__draft", 0),
    ("tokens_per_second__plain", 1e300),
    ("tokens_per_round", float("nan")),
    ("end_to_end__speedup__value", 1e300),
    ("end_to_end__time_to_first_token_seconds__draft", -1),
    ("categories__math__prompts", -1),
    ("categories__math__speedup__ci95", [2, 3]),
    ("stock__hf__profile_over_it__value", -2),
    ("search__trials", -1),
    ("search__seconds", float("inf")),
    ("dataset__held_out_prompts", -1),
]


def test_figures_that_cannot_have_been_measured_are_refused(tmp_path: Path) -> None:
    data, path = yaml.safe_load(dump(_profile())), tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({**data, "measured": _measured()}))
    DraftProfile.load(path)
    for key, value in WRONG_FIGURES:
        path.write_text(yaml.safe_dump({**data, "measured": _measured(**{key: value})}))
        with pytest.raises(ProfileError, match=f"measured.{key.split('__')[0]}") as refused:
            DraftProfile.load(path)
        assert "\n" not in str(refused.value)


OBEYED = [
    ("name", '"\\e]0;pwn\\a\\e[2J"'),
    ("name", '"a\\nb"'),
    ("name", '"a\\u202eb"'),
    ("name", '"a\\x9bb"'),
    ("name", '"a\\ud800"'),
    ('"\\e[2J"', "1"),
    ("provenance", '{created: "\\e[2J", study: s}'),
    ("provenance", '{created: "now", study: s, origin: "\\x00"}'),
]


def test_text_that_a_terminal_would_obey_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    _profile().save(path)
    lines = path.read_text().splitlines()
    for key, value in OBEYED:
        path.write_text("\n".join([*(line for line in lines if not line.startswith(f"{key}:")), f"{key}: {value}"]))
        with pytest.raises(ProfileError) as refused:
            DraftProfile.load(path)
        assert str(refused.value).isprintable()
