"""Several sequences in one pass, each at its own position, right-padded to the widest.

The last slot of the storage belongs to no sequence. Padding writes there, and so does an idle row between two active
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.runners.contract import Inputs, Outputs, Part, PassRequest, judge
from decoding.runners.masks import MaskKinds


@dataclass(frozen=True)
class Rows:
    """The rows of a storage that a shared pass covers, with its width and slots."""

    first: int
    num_rows: int
    width: int
    num_slots: int
    """Number of slots that the pass reads."""
    resumes: bool
    """True if the pass resumes from known states."""
    looks: bool = False
    """True if the pass computes the confidence of its logits."""

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], min_rows: int = 1) -> Rows:
        """Return the smallest range of rows and positions that covers `passes`.

        The range has at least `min_rows` rows, of which the storage must have as many; additional rows are idle.
        """
        last = max(passes)
        first = min(*passes, max(last + 1 - min_rows, 0))
        ends = [each.start + each.width for each in passes.values()]
        num_rows = max(last + 1 - first, min_rows)
        resumes = any(each.states is not None for each in passes.values())
        width, looks = max(each.width for each in passes.values()), any(each.looks for each in passes.values())
        return cls(first, num_rows, width, max(ends), resumes, looks)


@dataclass
class RowInputs:
    """The inputs of a shared pass, all on the device, so that it can be recorded."""

    token_ids: Tensor
    """[rows, width]."""
    start: Tensor
    """[rows]: the position of each sequence's first token in the pass."""
    widths: Tensor
    """[rows]: the number of positions without padding; 0 for an idle row."""
    states: Tensor | None
    """Known states [.., rows, width, hidden] that the part resumes from."""

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], rows: Rows) -> RowInputs:
        """Stack the inputs of the sequences in `passes`."""
        device = next(iter(passes.values())).token_ids.device
        asked = [passes.get(row) for row in range(rows.first, rows.first + rows.num_rows)]
        starts, widths = zip(*((each.start, each.width) if each else (0, 0) for each in asked), strict=True)
        start, width = torch.tensor([starts, widths], device=device)
        token_ids = _stacked({row: each.token_ids for row, each in passes.items()}, rows, dim=-1)
        states = {row: each.states for row, each in passes.items() if each.states is not None}
        return cls(token_ids, start, width, _stacked(states, rows, dim=-2) if states else None)

    def copied(self) -> RowInputs:
        """Return a copy in memory that is writable in any mode."""
        with torch.inference_mode(False):
            states = None if self.states is None else self.states.clone()
            return RowInputs(self.token_ids.clone(), self.start.clone(), self.widths.clone(), states)

    def fill(self, other: RowInputs) -> None:
        """Copy the inputs of another pass of the same shape into this memory."""
        for kept, given in ((self.token_ids, other.token_ids), (self.start, other.start), (self.widths, other.widths)):
            kept.copy_(given)
        if self.states is not None and other.states is not None:
            self.states.copy_(other.states)


def compute_rows(part: Part, given: RowInputs, cache: KVCache, mask_kinds: MaskKinds, rows: Rows) -> Outputs:
    """Run `part` once over `rows` of the storage of `cache`, without waiting for the device.

    Return the outputs of all rows.
    """
    start, widths = given.start[:, None], given.widths[:, None]
    last, steps = (given.widths - 1).clamp_min(0), torch.arange(rows.width, device=given.start.device)
    # Padding has the position, and thus the mask, of the last token.
    positions = start + torch.minimum(steps, last[:, None])
    slots = torch.where(steps < widths, start + steps, cache.storage.capacity - 1)
    window = cache.window
    window.rows = slice(rows.first, rows.first + rows.num_rows)
    window.start, window.end = rows.num_slots - rows.width, rows.num_slots
    window.begin(slots, last, slots.gather(1, last[:, None]), mask_kinds.masks(positions, rows.num_slots))
    try:
        outputs = part.compute(
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
    # For all rows at once, not one by one in each sequence's loop.
    drafted = part.verifies and rows.width > 1
    return replace(outputs, judged=judge(outputs.logits, given.token_ids, last, drafted=drafted, looks=rows.looks))


def split_rows(outputs: Outputs, passes: Mapping[int, PassRequest], rows: Rows) -> dict[int, Outputs]:
    """Return the outputs of each sequence in `passes`."""
    return {row: _of_row(outputs, row - rows.first, each) for row, each in passes.items()}


def _stacked(values: Mapping[int, Tensor], rows: Rows, dim: int) -> Tensor:
    """Stack `values` [.., 1, up to width, ..] of single sequences, padded with zeros along `dim`."""
    example = next(iter(values.values()))
    shape = list(example.shape)
    shape[dim], shape[dim - 1] = rows.width, rows.num_rows
    stacked = example.new_zeros(shape)
    for row, value in values.items():
        target = stacked.narrow(dim - 1, row - rows.first, 1).narrow(dim, 0, value.shape[dim])
        target.copy_(value)
    return stacked


def _of_row(outputs: Outputs, index: int, own: PassRequest) -> Outputs:
    """Return the outputs of the sequence in row `index` of a pass."""
    states = outputs.states
    if states is not None:
        states = states.narrow(-3, index, 1).narrow(-2, 0, min(own.width, states.shape[-2]))
    return replace(outputs.of_row(index, own.width, last_only=own.last_only), states=states)


def unbatch(outputs: Outputs) -> Outputs:
    """Return the outputs of a single-sequence pass without the batch dimension."""
    return Outputs(outputs.logits[0], outputs.states)
