"""Drafts that are a list of blocks, and the refusal of those that are none."""

from __future__ import annotations

import pytest

from decoding.drafts import Draft, EarlyExit, LayerSkip
from tuner.errors import ExportError
from tuner.export.shape import DraftShape, reduced, shape_of

HEAD = {"head": "h.safetensors", "head_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("draft", "expected", "sources"),
    [
        (LayerSkip.blocks((1, 3)), DraftShape((0, 2, 4), False, 5), (0, 2, 4)),
        (EarlyExit(exit_layer=2), DraftShape((0, 1), False, 5), (0, 1)),
        (EarlyExit(exit_layer=2, **HEAD), DraftShape((0, 1), True, 5), (0, 1, 4)),
        (LayerSkip(bits=8), DraftShape((0, 1, 2, 3, 4), False, 5), (0, 1, 2, 3, 4)),
    ],
)
def test_the_layers_of_a_draft(draft: Draft, expected: DraftShape, sources: tuple[int, ...]) -> None:
    shape = shape_of(draft, 5)
    assert shape == expected
    assert shape.sources == sources


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (LayerSkip(skip_attention=(1,)), "sublayers.*--to folder"),
        (LayerSkip.blocks((0, 1, 2, 3, 4)), "none of the model's blocks"),
        (LayerSkip(), "the whole model.*llama.cpp"),
    ],
)
def test_drafts_that_are_no_list_of_blocks(draft: Draft, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        shape_of(draft, 5)


def test_what_changes_a_draft_is_dropped_only_on_request() -> None:
    quantised = LayerSkip.blocks((1, 3), bits=8)
    with pytest.raises(ExportError, match=r"int8.*--drop bits"):
        reduced(quantised, (), keeps_bits=False)
    assert reduced(quantised, (), keeps_bits=True) == quantised
    assert reduced(quantised, ("bits",), keeps_bits=True) == LayerSkip.blocks((1, 3))
    fewer = LayerSkip(bits=8, ids_below=16384)
    assert reduced(fewer, (), keeps_bits=True) == LayerSkip(bits=8), "engines choose from all tokens"
