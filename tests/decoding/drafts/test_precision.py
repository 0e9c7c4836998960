"""Precision in documents: phrases, labels, columns, and profiles of before that stay as they are."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup

HEAD = {"head": "h.safetensors", "head_sha256": "a" * 64}
DRAFTS: list[tuple[Draft, str, str]] = [
    (LayerSkip(bits=8), "int8", "quantised model"),
    (LayerSkip.blocks((3, 7), bits=8), "int8, skip 3,7", "quantised skip set"),
    (LayerSkip(skip_mlp=(1,), bits=4), "int4, skip attention -, MLP 1", "quantised skip set"),
    (LayerSkip(bits=4, lookup=Lookup()), "lookup (3-1, 10), then int4", "quantised model"),
    (EarlyExit(exit_layer=12, bits=8), "int8, exit at 12, no head", "quantised exit"),
    (EarlyExit(exit_layer=12, bits=8, **HEAD), "int8, exit at 12, trained head", "quantised exit with head"),
]


@pytest.mark.parametrize(("draft", "phrase", "label"), DRAFTS, ids=[phrase for _, phrase, _ in DRAFTS])
def test_precision_is_in_phrase_label_and_columns(draft: Draft, phrase: str, label: str) -> None:
    assert (draft.describe(), draft.label, draft.columns()["bits"]) == (phrase, label, draft.parts.bits)


@pytest.mark.parametrize("draft", [draft for draft, _, _ in DRAFTS], ids=lambda draft: draft.describe())
def test_quantised_draft_shares_no_block_and_survives_a_document(draft: Draft) -> None:
    assert draft.num_shared_blocks == 0
    assert draft.skipped(20).parts.bits == draft.parts.bits
    dumped = draft.model_dump(mode="json")
    assert dumped["bits"] == draft.parts.bits
    assert TypeAdapter(Draft).validate_python(dumped) == draft


@pytest.mark.parametrize("draft", [LayerSkip(), LayerSkip.blocks((3,)), EarlyExit(exit_layer=2)])
def test_drafts_without_bits_are_written_as_before(draft: Draft) -> None:
    assert "bits" not in draft.model_dump(mode="json")
    assert "bits" not in draft.columns()
    assert draft.parts.bits is None
    assert "quantised" not in draft.label


def test_drafts_that_run_no_weights_have_no_precision() -> None:
    assert [draft.parts.bits for draft in (PlainDecoding(), PromptLookup())] == [None, None]


@pytest.mark.parametrize("bits", [2, 16, 0, True, "8"])
def test_other_precisions_are_refused(bits: object) -> None:
    with pytest.raises(ValidationError, match="Input should be 8 or 4"):
        TypeAdapter(Draft).validate_python({"kind": "layer_skip", "bits": bits})
