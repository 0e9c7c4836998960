"""Precision of a draft as a document: the bits of its weights.

A quantised draft runs the model's own linear layers with rounded weights, and shares the target's keys and values; the whole
model verifies with its own weights (the idea of QuantSpec, arXiv 2502.10424, and of QSpec, arXiv 2410.11305; our formulation).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

BitWidth = Literal[8, 4]
"""The precisions of a quantised draft."""

Bits = Annotated[
    BitWidth | None,
    Field(
        exclude_if=lambda bits: bits is None,
        description="bits of the draft's weights (8 or 4); the model's own weights without it",
    ),
]
"""A document key that most drafts leave out: they run the model's own weights."""


def describe_quantised(bits: BitWidth | None, draft: str = "") -> str:
    """Return the phrase of a draft with its precision first: `int8`, or `int8, skip 3,7`; `draft` itself without bits."""
    return ", ".join(part for part in (f"int{bits}" if bits else "", draft) if part)


def label_quantised(bits: BitWidth | None, label: str) -> str:
    """Return the label of a draft, such as `quantised exit`; `label` itself without bits."""
    return f"quantised {label}" if bits else label
