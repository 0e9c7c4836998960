"""The registry of draft kinds: every entry is complete, and documents answer consistently."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from decoding.drafters.build import build_drafter
from decoding.drafts import (
    KINDS,
    Draft,
    EarlyExit,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from studies.prediction.predictors import DraftPredictor
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
]


def test_every_entry_joins_a_document_a_drafter_and_a_predictor() -> None:
    for name in KINDS:
        kind = KINDS[name]
        assert kind.document.model_fields["kind"].default == name
        assert callable(kind.load_drafter())
        assert issubclass(kind.load_predictor(), DraftPredictor)


def test_every_kind_is_among_the_drafts_of_this_test() -> None:
    assert {draft.kind for draft in DRAFTS} == KINDS.keys()


def test_skipped_sublayers_are_known_of_drafts_that_run_the_model() -> None:
    for draft in DRAFTS:
        draft.check(6)
        if draft.runs_model:
            skip = draft.skipped(6)
            assert (skip.parts.lookup, dict(skip.files)) == (None, {})
            assert skip.num_shared_blocks == draft.num_shared_blocks
        else:
            assert draft.num_shared_blocks == 0
            with pytest.raises(ValueError, match="runs no part of the model"):
                draft.skipped(6)


def test_parts_are_the_fields_that_the_kind_has() -> None:
    for draft in DRAFTS:
        wanted: dict[str, Any] = {"bits": 8, "lookup": Lookup(max_tokens=4)}
        for name, part in wanted.items():
            without = draft.having(**{name: None})
            assert name not in without.model_dump()
            if name not in draft.takes:
                assert without == draft
                with pytest.raises(ValueError, match=f"a draft of kind '{draft.kind}' takes no {name}"):
                    draft.having(**{name: part})
                continue
            changed = draft.having(**{name: part})
            assert getattr(changed.parts, name) == getattr(changed, name) == part
            assert type(draft).model_validate(changed.model_dump()) == changed
            others = {other: None for other in draft.takes if other != name}
            assert changed.having(**others).columns().keys() > draft.having(**others, **{name: None}).columns().keys()
        with pytest.raises(TypeError, match="branches"):
            draft.having(branches=2)


def test_only_plain_decoding_has_no_drafter() -> None:
    cases: list[Draft] = [draft for draft in DRAFTS if not draft.files]
    for draft in cases:
        assert (build_drafter(tiny_target(6), draft) is None) == (not draft.drafts)


def test_reading_a_profile_imports_neither_torch_nor_studies() -> None:
    code = "import sys, decoding.profile; print({'torch', 'transformers', 'studies'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
