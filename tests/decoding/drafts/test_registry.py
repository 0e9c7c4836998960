"""The registry of draft kinds: every entry is complete, and documents answer consistently."""

from __future__ import annotations

import subprocess
import sys

import pytest

from decoding.drafters.build import build_drafter
from decoding.drafts import (
    KINDS,
    Draft,
    EarlyExit,
    FeatureHeadDraft,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from studies.prediction.contract import DraftPredictor
from tests.support.tiny import tiny_target

DRAFTS: list[Draft] = [
    PlainDecoding(),
    PromptLookup(),
    SuffixDraft(),
    LayerSkip.blocks((2, 3)),
    LayerSkip(skip_mlp=(1,), lookup=Lookup()),
    LayerSkip(skip_mlp=(1,), lookup=SuffixLookup()),
    EarlyExit(exit_layer=3),
    EarlyExit(exit_layer=3, head="h.safetensors", head_sha256="a" * 64, lookup=Lookup()),
    FeatureHeadDraft(head="h.safetensors", head_sha256="a" * 64, lookup=Lookup()),
]


@pytest.mark.parametrize("name", KINDS)
def test_every_entry_joins_a_document_a_drafter_and_a_predictor(name: str) -> None:
    kind = KINDS[name]
    assert kind.document.model_fields["kind"].default == name
    assert callable(kind.load_drafter())
    assert issubclass(kind.load_predictor(), DraftPredictor)


def test_every_kind_is_among_the_drafts_of_this_test() -> None:
    assert {draft.kind for draft in DRAFTS} == KINDS.keys()


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.describe())
def test_lookup_is_added_and_removed(draft: Draft) -> None:
    without = draft.without_lookup()
    assert without.lookup_first is None
    if draft.takes_lookup:
        assert without.with_lookup(Lookup(max_tokens=4)).lookup_first == Lookup(max_tokens=4)
        assert draft.lookup_first is None or without.with_lookup(draft.lookup_first) == draft
    else:
        with pytest.raises(ValueError, match="no lookup can come before"):
            draft.with_lookup(Lookup())


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.describe())
def test_skipped_sublayers_are_known_of_drafts_that_run_the_model(draft: Draft) -> None:
    draft.check(6)
    if draft.runs_model:
        skip = draft.skipped(6)
        assert (skip.lookup_first, dict(skip.files)) == (None, {})
        assert skip.num_shared_blocks == draft.num_shared_blocks
    else:
        assert draft.num_shared_blocks == 0
        with pytest.raises(ValueError, match="runs no part of the model"):
            draft.skipped(6)


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.describe())
def test_files_are_renamed(draft: Draft) -> None:
    assert draft.has_head == bool(draft.files)
    renamed = draft.with_file_names({name: f"new.{name}" for name in draft.files})
    assert dict(renamed.files) == {f"new.{name}": sha256 for name, sha256 in draft.files.items()}


@pytest.mark.parametrize("draft", [draft for draft in DRAFTS if not draft.files], ids=lambda draft: draft.describe())
def test_only_plain_decoding_has_no_drafter(draft: Draft) -> None:
    assert (build_drafter(tiny_target(6), draft) is None) == (not draft.drafts)


def test_reading_a_profile_imports_neither_torch_nor_studies() -> None:
    code = "import sys, decoding.profile; print({'torch', 'transformers', 'studies'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
