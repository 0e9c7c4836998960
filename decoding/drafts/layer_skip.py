"""Draft with sublayers of the target left out (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916), or quantised."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainSerializer, model_validator

from decoding.drafts.contract import Bits, BitWidth, DraftDocument, IdsBelow
from decoding.drafts.lookup import LookupBefore

# Far above any real model: a slip such as 12-1500000000 is refused before the range is expanded.
MOST_LAYERS = 10_000


def parse_indices(value: Any) -> Any:
    """Return layer indices from `[7, 9, "12-15"]` or the string `"7,9,12-15"`: ascending, without duplicates.

    Raises ValueError for anything else.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        raise ValueError(f"must be a list of layer indices such as [7, 9, 12-15], got {value!r}")
    return tuple(sorted({index for part in parts for index in _expand(part)}))


def _expand(part: Any) -> range:
    if isinstance(part, int) and not isinstance(part, bool) and part < 0:
        raise ValueError(f"a layer index counts from 0, got {part}")
    written = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(part).strip())
    if written is None:
        raise ValueError(f"must hold layer indices such as 7 or 12-15, got {part!r}")
    first, last = int(written[1]), int(written[2] or written[1])
    if last < first:
        raise ValueError(f"the range {part!r} runs backwards")
    if last >= MOST_LAYERS:
        raise ValueError(f"a layer index is below {MOST_LAYERS}, got {part!r}")
    return range(first, last + 1)


def format_indices(indices: tuple[int, ...]) -> list[int | str]:
    """Return the inverse of `parse_indices`: runs of three or more indices become `first-last`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [item for run in runs for item in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else run)]


def compact_indices(indices: tuple[int, ...]) -> str:
    """Return indices for a table, such as `7,9,12-15`, or `-` for none."""
    return ",".join(str(item) for item in format_indices(indices)) or "-"


Layers = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_indices, json_schema_input_type=list[int | str] | str),
    PlainSerializer(format_indices, return_type=list[int | str]),
]
"""A document key that holds layer indices."""


class LayerSkip(DraftDocument):
    """Draft with these attention and MLP sublayers left out (0-based block indices), the others quantised if `bits` are given.

    With bits, nothing need be left out: the whole model with quantised weights is a draft.
    """

    kind: Literal["layer_skip"] = "layer_skip"
    skip_attention: Layers = ()
    skip_mlp: Layers = ()
    bits: Bits = None
    ids_below: IdsBelow = None
    lookup: LookupBefore = None
    runs_model: ClassVar[bool] = True

    @model_validator(mode="after")
    def _fewer_ids_are_quantised(self) -> LayerSkip:
        if self.ids_below is not None and self.bits is None:
            raise ValueError("ids_below belongs to a quantised draft: give bits, or leave it out")
        return self

    @classmethod
    def blocks(cls, indices: list[int] | tuple[int, ...], *, bits: BitWidth | None = None) -> LayerSkip:
        return cls(skip_attention=tuple(indices), skip_mlp=tuple(indices), bits=bits)

    @property
    def first_skipped(self) -> int | None:
        """Index of the first block with a skipped sublayer, or None if nothing is skipped."""
        return min((*self.skip_attention, *self.skip_mlp), default=None)

    @property
    def skips_any(self) -> bool:
        return self.first_skipped is not None

    @property
    def name(self) -> str:
        return "skip set" if self.skips_any or not self.bits else "model"

    @property
    def phrase(self) -> str:
        """The skipped sublayers; the whole model with quantised weights is a self-draft."""
        if self.bits and not self.skips_any:
            return "self-draft"
        if self.skip_attention == self.skip_mlp:
            return f"skip layers {compact_indices(self.skip_attention)}"
        return f"skip attention {compact_indices(self.skip_attention)}, MLP {compact_indices(self.skip_mlp)}"

    @property
    def own_columns(self) -> dict[str, Any]:
        return {
            "skip_attention": compact_indices(self.skip_attention),
            "skip_mlp": compact_indices(self.skip_mlp),
            "num_skipped_sublayers": len(self.skip_attention) + len(self.skip_mlp),
        }

    def check(self, num_layers: int) -> None:
        highest = max((*self.skip_attention, *self.skip_mlp), default=0)
        if highest >= num_layers:
            raise ValueError(f"draft skips layer {highest}, but the target has layers 0 to {num_layers - 1}")

    def skipped(self, num_layers: int) -> LayerSkip:
        return self.having(lookup=None)

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the first skip; 0 if nothing is skipped, or if all blocks are quantised."""
        return 0 if self.bits else self.first_skipped or 0
