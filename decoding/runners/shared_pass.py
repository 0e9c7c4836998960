"""Several texts in one pass, each at a place of its own: rows of tensors, padded on the right to the widest.

The last place of the memory is no text's: there goes what padding writes, and what a text writes that takes no part but lies
between two that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.runners.contract import Inputs, Outputs, Part, PassRequest
from decoding.runners.masks import MaskKinds


@dataclass(frozen=True)
class Rows:
    """Which texts of a memory a pass goes over, and how wide and how far it is."""

    first: int
    num_rows: int
    width: int
    places: int
    """How many places of the memory it reads."""
    resumes: bool
    """Whether it is given states to resume from."""

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], fewest: int = 1) -> Rows:
        """As few rows as there are from the first text that takes part to the last, and as few positions as they need.

        If these are less than `fewest`, of a memory that has as many, the rows beside them are there without taking part.
        """
        last = max(passes)
        first = min(*passes, max(last + 1 - fewest, 0))
        ends = [each.start + each.width for each in passes.values()]
        num_rows = max(last + 1 - first, fewest)
        resumes = any(each.states is not None for each in passes.values())
        return cls(first, num_rows, max(each.width for each in passes.values()), max(ends), resumes)


@dataclass
class RowInputs:
    """What a pass over rows is computed from: everything on the device, so that it can be recorded."""

    token_ids: Tensor
    """[rows, width]."""
    start: Tensor
    """[rows]: the place of each text's first token."""
    widths: Tensor
    """[rows]: how many positions are no padding; 0 for a text that takes no part."""
    states: Tensor | None
    """Known states [.., rows, width, hidden] that the part resumes from."""

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], rows: Rows) -> RowInputs:
        """Those of the texts in `passes`, below one another."""
        device = next(iter(passes.values())).token_ids.device
        asked = [passes.get(row) for row in range(rows.first, rows.first + rows.num_rows)]
        starts, widths = zip(*((each.start, each.width) if each else (0, 0) for each in asked), strict=True)
        start, width = torch.tensor([starts, widths], device=device)
        token_ids = _stacked({row: each.token_ids for row, each in passes.items()}, rows, dim=-1)
        states = {row: each.states for row, each in passes.items() if each.states is not None}
        return cls(token_ids, start, width, _stacked(states, rows, dim=-2) if states else None)

    def copied(self) -> RowInputs:
        """The same in memory that may be written in any mode."""
        with torch.inference_mode(False):
            states = None if self.states is None else self.states.clone()
            return RowInputs(self.token_ids.clone(), self.start.clone(), self.widths.clone(), states)

    def fill(self, other: RowInputs) -> None:
        """Take what another pass of the same shape is given, in the memory that this one has."""
        for kept, given in ((self.token_ids, other.token_ids), (self.start, other.start), (self.widths, other.widths)):
            kept.copy_(given)
        if self.states is not None and other.states is not None:
            self.states.copy_(other.states)


def compute_rows(part: Part, given: RowInputs, cache: KVCache, mask_kinds: MaskKinds, rows: Rows) -> Outputs:
    """Run `part` once over `rows` of the memory that `cache` lies in: what comes of all of them. Waits for nothing."""
    start, widths = given.start[:, None], given.widths[:, None]
    last, steps = (given.widths - 1).clamp_min(0), torch.arange(rows.width, device=given.start.device)
    # Padding stands, and looks, where the last token does.
    positions = start + torch.minimum(steps, last[:, None])
    slots = torch.where(steps < widths, start + steps, cache.storage.capacity - 1)
    window = cache.window
    window.rows = slice(rows.first, rows.first + rows.num_rows)
    window.start, window.end = rows.places - rows.width, rows.places
    window.begin(slots, last, slots.gather(1, last[:, None]), mask_kinds.masks(positions, rows.places))
    try:
        return part.compute(
            Inputs(
                token_ids=given.token_ids,
                positions=positions,
                cache=cache,
                logits_to_keep=0,
                states=given.states,
                last=last,
                masks=window.masks,
            )
        )
    finally:
        window.end_pass()


def split_rows(outputs: Outputs, passes: Mapping[int, PassRequest], rows: Rows) -> dict[int, Outputs]:
    """What each of the texts in `passes` gets of what came of all."""
    return {row: _of_row(outputs, row - rows.first, each) for row, each in passes.items()}


def _stacked(values: Mapping[int, Tensor], rows: Rows, dim: int) -> Tensor:
    """`values` of single texts, [.., 1, up to width, ..] with their positions along `dim`, below one another; zeros elsewhere."""
    example = next(iter(values.values()))
    shape = list(example.shape)
    shape[dim], shape[dim - 1] = rows.width, rows.num_rows
    stacked = example.new_zeros(shape)
    for row, value in values.items():
        place = stacked.narrow(dim - 1, row - rows.first, 1).narrow(dim, 0, value.shape[dim])
        place.copy_(value)
    return stacked


def _of_row(outputs: Outputs, index: int, own: PassRequest) -> Outputs:
    """What the text in row `index` of a pass gets of it."""
    first = own.width - 1 if own.last_only else 0
    states = outputs.states
    if states is not None:
        states = states.narrow(-3, index, 1).narrow(-2, 0, min(own.width, states.shape[-2]))
    return Outputs(outputs.logits[index, first : own.width], states)


def of_one(outputs: Outputs) -> Outputs:
    """What comes of a pass over a single text, without the dimension of texts."""
    return Outputs(outputs.logits[0], outputs.states)
