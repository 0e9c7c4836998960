"""Several sequences in one pass, each at its own position, right-padded to the widest.

The last slot of the storage belongs to no sequence. Padding writes there, and so does an idle row between two active
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.runners.contract import Inputs, Outputs, Part, PassRequest, Written, judged, one_token, write_by
from decoding.runners.masks import MaskKinds


def staged(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of the host as a tensor on `device`, without waiting for the device.

    The copy goes through pinned memory, which torch does not use again before the copy has ended.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


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
    num_tokens: int = 1
    """Number of tokens that each sequence drafts, one position each; 1 in a pass that returns logits."""
    fixed_shape: bool = False
    """True if width and slots are those of one of few shapes."""

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], min_rows: int = 1, num_tokens: int = 1) -> Rows:
        """Return the smallest range of rows and positions that covers `passes`, each repeated for `num_tokens`.

        The range has at least `min_rows` rows, of which the storage must have as many; additional rows are idle.
        """
        last = max(passes)
        first = min(*passes, max(last + 1 - min_rows, 0))
        ends = [each.start + each.width + num_tokens - 1 for each in passes.values()]
        num_rows = max(last + 1 - first, min_rows)
        resumes = any(each.states is not None for each in passes.values())
        width, looks = max(each.width for each in passes.values()), any(each.looks for each in passes.values())
        return cls(first, num_rows, width, max(ends), resumes, looks, num_tokens)

    @property
    def inputs(self) -> Rows:
        """These rows without what does not change the shapes of the inputs."""
        return replace(self, num_slots=0, looks=False, num_tokens=1)


@dataclass
class RowInputs:
    """The inputs of a shared pass, all on the device, so that it can be recorded."""

    token_ids: Tensor
    """[rows, width]."""
    spans: Tensor
    """[2, rows]: the position of each sequence's first token, and its number of positions without padding, 0 if idle."""
    states: Tensor | None
    """Known states [.., rows, width, hidden] that the part resumes from."""

    @property
    def start(self) -> Tensor:
        """The position [rows] of each sequence's first token in the pass."""
        return self.spans[0]

    @property
    def widths(self) -> Tensor:
        """The number of positions [rows] without padding; 0 for an idle row."""
        return self.spans[1]

    @classmethod
    def of(cls, passes: Mapping[int, PassRequest], rows: Rows) -> RowInputs:
        """Stack the inputs of the sequences in `passes`, with one copy from the host; padding repeats what is there."""
        device = next(iter(passes.values())).token_ids.device
        asked = [passes.get(row) for row in range(rows.first, rows.first + rows.num_rows)]
        states = {row: each.states for row, each in passes.items() if each.states is not None}
        tokens = {row: each.token_ids for row, each in passes.items()}
        starts, widths = zip(*((each.start, each.width) if each else (0, 0) for each in asked), strict=True)
        of_tokens = _padded_index({row: each.width for row, each in passes.items()}, rows)
        of_states = _padded_index({row: each.shape[-2] for row, each in states.items()}, rows)
        given = staged([*starts, *widths, *of_tokens, *of_states], device)
        spans, token_index, state_index = given.split([2 * rows.num_rows, len(of_tokens), len(of_states)])
        return cls(
            _stacked(tokens, token_index, rows, dim=-1),
            spans.view(2, -1),
            _stacked(states, state_index, rows, dim=-2) if states else None,
        )

    def copied(self) -> RowInputs:
        """Return a copy in memory that is writable in any mode."""
        with torch.inference_mode(False):
            states = None if self.states is None else self.states.clone()
            return RowInputs(self.token_ids.clone(), self.spans.clone(), states)

    def fill(self, other: RowInputs) -> None:
        """Copy the inputs of another pass of the same shape into this memory."""
        self.token_ids.copy_(other.token_ids)
        self.spans.copy_(other.spans)
        if self.states is not None and other.states is not None:
            self.states.copy_(other.states)


def compute_in_window(
    part: Part,
    cache: KVCache,
    token_ids: Tensor,
    slots: Tensor,
    last: Tensor,
    last_slot: Tensor,
    positions: Tensor,
    masks: tuple[Tensor, ...],
    logits_to_keep: int | Tensor = 0,
    states: Tensor | None = None,
    *,
    fixed_shape: bool,
) -> Outputs:
    """Run a pass whose slots and masks are tensors; `last` is the index of the last position, `last_slot` its slot."""
    window = cache.window
    window.begin(slots, last, last_slot, masks)
    try:
        return part.compute(Inputs(token_ids, positions, cache, logits_to_keep, states, last, masks, fixed_shape))
    finally:
        window.end_pass()


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
    masks = mask_kinds.masks(positions, rows.num_slots)
    last_slot = slots.gather(1, last[:, None])
    outputs = compute_in_window(
        part,
        cache,
        given.token_ids,
        slots,
        last,
        last_slot,
        positions,
        masks,
        states=given.states,
        fixed_shape=rows.fixed_shape,
    )
    # For all rows at once, not one by one in each sequence's loop.
    drafted = part.verifies and rows.width > 1
    return judged(outputs, given.token_ids, last, drafted=drafted, looks=rows.looks)


def split_rows(outputs: Outputs, passes: Mapping[int, PassRequest], rows: Rows) -> dict[int, Outputs]:
    return {row: _of_row(outputs, row - rows.first, each) for row, each in passes.items()}


def compute_chains(part: Part, given: RowInputs, cache: KVCache, mask_kinds: MaskKinds, rows: Rows) -> Written:
    """Let `part` write `rows.num_tokens` greedy tokens after one token of each row, without waiting for the device.

    Return the tokens [rows, num_tokens] and the states of all rows.
    """

    def step(token_ids: Tensor, index: int) -> Written:
        moved = torch.stack([given.start + index, given.widths])
        outputs = compute_rows(part, RowInputs(token_ids, moved, None), cache, mask_kinds, rows)
        return one_token(outputs)

    return write_by(step, given.token_ids, rows.num_tokens)


def split_chains(written: Written, passes: Mapping[int, PassRequest], rows: Rows) -> dict[int, Written]:
    """Return what each sequence in `passes` has written."""

    def of_row(index: int) -> Written:
        states = None if written.states is None else written.states.narrow(-3, index, 1)
        return Written(written.token_ids[index], states)

    return {row: of_row(row - rows.first) for row in passes}


def _padded_index(widths: Mapping[int, int], rows: Rows) -> list[int]:
    """Return for each row and position its index in the rows' values one after another; padding has some index."""
    index, end = [0] * (rows.num_rows * rows.width) if widths else [], 0
    for row, width in widths.items():
        first = (row - rows.first) * rows.width
        index[first : first + width] = range(end, end + width)
        end += width
    return index


def _stacked(values: Mapping[int, Tensor], index: Tensor, rows: Rows, dim: int) -> Tensor:
    """Stack `values` [.., 1, up to width, ..] of single sequences along the dimension before `dim`."""
    in_a_row = torch.cat(list(values.values()), dim=dim).index_select(dim, index)
    return in_a_row.unflatten(dim, (rows.num_rows, rows.width)).squeeze(dim - 2)


def _of_row(outputs: Outputs, index: int, own: PassRequest) -> Outputs:
    states = outputs.states
    if states is not None:
        states = states.narrow(-3, index, 1).narrow(-2, 0, min(own.width, states.shape[-2]))
    return outputs.of_row(index, own.width, states, last_only=own.last_only)
