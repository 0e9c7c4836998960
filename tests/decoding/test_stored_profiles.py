"""Profiles as they were written before drafts had parts: each still loads, says the same of itself, and is written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from decoding.drafts import KINDS
from decoding.errors import ProfileError
from decoding.profile import DraftProfile

PROFILE = f"""\
schema: sdtune/v1
name: stored
target: {{model: tiny, revision: null, architecture: LlamaForCausalLM, num_layers: 6, dtype: float32, device: null,
  config_sha256: {"c" * 64}, weights_sha256: {"d" * 64}, tokenizer_sha256: null}}
draft: DRAFT
draft_length: {{rule: fixed, max_tokens: 4, persistent: false}}
decoding: {{temperature: 0.0, prefix_reuse: true, runner: eager}}
measured: null
provenance: null
"""
HEAD = f"head: h.safetensors, head_sha256: {'a' * 64}"
STORED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "{kind: layer_skip, skip_attention: [2-4], skip_mlp: [3]}": (
        "skip attention 2-4, MLP 3",
        "skip set",
        {"skip_attention": "2-4", "skip_mlp": "3", "num_skipped_sublayers": 4},
    ),
    "{kind: layer_skip, skip_attention: [], skip_mlp: [], bits: 8}": (
        "self-draft in int8",
        "quantised model",
        {"skip_attention": "-", "skip_mlp": "-", "num_skipped_sublayers": 0, "bits": 8},
    ),
    "{kind: layer_skip, skip_attention: [], skip_mlp: [], bits: 8, ids_below: 16384}": (
        "self-draft in int8 from ids below 16,384 and the text's",
        "quantised model",
        {"skip_attention": "-", "skip_mlp": "-", "num_skipped_sublayers": 0, "bits": 8, "ids_below": 16384},
    ),
    (
        f"{{kind: early_exit, exit_layer: 2, {HEAD}, bits: 4, lookup: "
        "{method: suffix_automaton, min_match: 1, max_spec_factor: 2.0, min_token_prob: 0.3, max_tokens: 10}}"
    ): (
        "suffix automaton (matches from 1, factor 2, probability 0.3, 10 tokens), then early exit at layer 2 (trained head) "
        "in int4",
        "quantised exit with head",
        {
            "exit_layer": 2,
            "exit_head": "block",
            "bits": 4,
            "lookup.method": "suffix_automaton",
            "lookup.min_match": 1,
            "lookup.max_spec_factor": 2.0,
            "lookup.min_token_prob": 0.3,
            "lookup.max_tokens": 10,
        },
    ),
    (
        "{kind: early_exit, exit_layer: 3, head: null, head_sha256: null, "
        "lookup: {max_ngram: 4, min_ngram: 2, max_tokens: 7}}"
    ): (
        "prompt lookup (n-grams of 4 to 2, 7 tokens), then early exit at layer 3 (no head)",
        "exit",
        {
            "exit_layer": 3,
            "exit_head": "none",
            "lookup.max_ngram": 4,
            "lookup.min_ngram": 2,
            "lookup.max_tokens": 7,
        },
    ),
    f"{{kind: early_exit, exit_layer: 3, {HEAD}}}": (
        "early exit at layer 3 (trained head)",
        "exit with head",
        {"exit_layer": 3, "exit_head": "block"},
    ),
    "{kind: prompt_lookup, max_ngram: 5, min_ngram: 2}": (
        "prompt lookup (n-grams of 5 to 2)",
        "lookup alone",
        {"lookup.max_ngram": 5, "lookup.min_ngram": 2},
    ),
    "{kind: suffix_automaton, min_match: 2, max_spec_factor: 1.5, min_token_prob: 0.2}": (
        "suffix automaton (matches from 2, factor 1.5, probability 0.2)",
        "suffix automaton alone",
        {"lookup.min_match": 2, "lookup.max_spec_factor": 1.5, "lookup.min_token_prob": 0.2},
    ),
    "{kind: none}": ("plain decoding", "plain decoding", {}),
}


def test_a_stored_draft_loads_and_says_the_same(tmp_path: Path) -> None:
    for text in STORED:
        stored = tmp_path / "stored.yaml"
        stored.write_text(PROFILE.replace("DRAFT", text), encoding="utf-8")
        profile = DraftProfile.load(stored)
        assert (profile.draft.describe(), profile.draft.label, profile.draft.columns()) == STORED[text]
        profile.save(tmp_path / "again.yaml")
        assert yaml.safe_load((tmp_path / "again.yaml").read_text(encoding="utf-8")) == yaml.safe_load(
            stored.read_text()
        )
        assert DraftProfile.load(tmp_path / "again.yaml") == profile


@pytest.mark.parametrize("part", ["tree: {shape: fixed, leaves: 3}", "draft_vocabulary: 500"])
def test_a_draft_with_a_retired_part_is_refused_in_one_line(part: str, tmp_path: Path) -> None:
    stored = tmp_path / "stored.yaml"
    stored.write_text(PROFILE.replace("DRAFT", f"{{kind: early_exit, exit_layer: 3, {part}}}"), encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"unknown key 'draft\.{part.partition(':')[0]}'; valid: bits, .*lookup$"):
        DraftProfile.load(stored)


def test_every_kind_is_stored() -> None:
    assert {yaml.safe_load(text)["kind"] for text in STORED} == KINDS.keys()
