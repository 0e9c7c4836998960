"""Several texts in one pass, each at a place of its own: rows of tensors, padded on the right to the widest.

The last place of the memory is no text's: there goes what padding writes, and what a text writes that takes no part but lies
between two that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.cache import KVCache, Storage
from decoding.runners.contract import Inputs, Outputs, Part, PassOfOne
from decoding.runners.masks import MaskKinds


@dataclass(frozen=True)
class Rows:
    """Which texts of a memory a pass goes over, and how wide and how far it is."""

    first: int
    num_rows: int
    width: int
    places: int
    """How many places of the memory it reads."""

    @classmethod
    def of(cls, passes: Mapping[int, PassOfOne], fewest: int = 1) -> Rows:
        """As few rows as there are from the first text that takes part to the last, and as few positions as they need.

        If these are less than `fewest`, of a memory that has as many, the rows beside them are there without taking part.
        """
        last = max(passes)
        first = min(*passes, max(last + 1 - fewest, 0))
        ends = [each.start + each.width for each in passes.values()]
        num_rows = max(last + 1 - first, fewest)
        return cls(first, num_rows, max(each.width for each in passes.values()), max(ends))


def compute_together(
    part: Part, passes: Mapping[int, PassOfOne], memory: Storage, mask_kinds: MaskKinds, rows: Rows
) -> dict[int, Outputs]:
    """Run `part` once over `rows` of `memory`; what comes of it for each of the texts in `passes`."""
    device = next(iter(passes.values())).token_ids.device
    asked = [passes.get(row) for row in range(rows.first, rows.first + rows.num_rows)]
    starts, widths = zip(*((each.start, each.width) if each else (0, 0) for each in asked), strict=True)
    start, width = torch.tensor([starts, widths], device=device)
    last, steps = (width - 1).clamp_min(0), torch.arange(rows.width, device=device)
    # Padding stands, and looks, where the last token does.
    positions = start[:, None] + torch.minimum(steps, last[:, None])
    slots = torch.where(steps < width[:, None], start[:, None] + steps, memory.capacity - 1)
    cache = KVCache(len(memory.layers), memory.capacity, memory)
    window = memory.window
    window.rows = slice(rows.first, rows.first + rows.num_rows)
    window.start, window.end = max(starts), rows.places
    window.begin(slots, last, slots.gather(1, last[:, None]), mask_kinds.masks(positions, rows.places))
    try:
        outputs = part.compute(
            Inputs(
                token_ids=_stacked({row: each.token_ids for row, each in passes.items()}, rows, dim=-1),
                positions=positions,
                cache=cache,
                logits_to_keep=0,
                states=_stacked_states(passes, rows),
                last=last,
                masks=window.masks,
            )
        )
    finally:
        window.end_pass()
    return {row: _of_row(outputs, row - rows.first, each) for row, each in passes.items()}


def _stacked_states(passes: Mapping[int, PassOfOne], rows: Rows) -> Tensor | None:
    states = {row: each.states for row, each in passes.items() if each.states is not None}
    return _stacked(states, rows, dim=-2) if states else None


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


def _of_row(outputs: Outputs, index: int, own: PassOfOne) -> Outputs:
    """What the text in row `index` of a pass gets of it."""
    first = own.width - 1 if own.last_only else 0
    states = outputs.states
    if states is not None:
        states = states.narrow(-3, index, 1).narrow(-2, 0, min(own.width, states.shape[-2]))
    return Outputs(outputs.logits[index, first : own.width], states)


def of_one(outputs: Outputs) -> Outputs:
    """What comes of a pass over a single text, without the dimension of texts."""
    return Outputs(outputs.logits[0], outputs.states)
