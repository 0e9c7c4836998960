"""The token ids of sequences on the device: of one sequence, or of a batch whose writes are done together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.runners.shared_pass import staged


class OwnTokens:
    """The token ids of a sequence by itself; no write is ever pending."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.ids = torch.zeros((1, capacity), dtype=torch.long, device=device)

    def write(self, start: int, token_ids: Tensor) -> None:
        """Write tokens [n] of the device from position `start` on."""
        self.ids[0, start : start + token_ids.shape[0]] = token_ids

    def write_from_host(self, start: int, token_ids: Sequence[int]) -> None:
        """Write tokens of the host from position `start` on, without waiting for the device."""
        self.write(start, staged(token_ids, self.ids.device))

    def finish(self) -> None:
        """Do nothing."""


class BatchTokens:
    """The token ids of a batch, [rows, capacity]. Writes of all rows are collected and done in a few operations.

    No position is written twice before `finish`, because a pass comes between a draft and its correction.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self._ids = torch.zeros((num_rows, capacity), dtype=torch.long, device=device)
        self._host: list[tuple[int, int]] = []
        self._device: list[tuple[int, Tensor]] = []

    def row(self, index: int) -> TokenRow:
        return TokenRow(self, index, self._ids[index : index + 1])

    def write(self, row: int, start: int, token_ids: Tensor) -> None:
        """Note that tokens [n] of the device are to be written."""
        self._device.append((row * self._ids.shape[1] + start, token_ids))

    def write_from_host(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Note that tokens of the host are to be written."""
        first = row * self._ids.shape[1] + start
        self._host += [(first + index, token) for index, token in enumerate(token_ids)]

    def finish(self) -> None:
        """Do the writes of all rows: one copy to the device, and one write."""
        if not self._host and not self._device:
            return
        slots = [slot for slot, _ in self._host]
        slots += [first + index for first, values in self._device for index in range(values.shape[0])]
        given = staged([*slots, *(token for _, token in self._host)], self._ids.device)
        values = torch.cat([given[len(slots) :], *(values for _, values in self._device)])
        self._ids.view(-1).index_copy_(0, given[: len(slots)], values)
        self._host.clear()
        self._device.clear()


class TokenRow:
    """The token ids of one sequence of a batch: the same, but writes are pending until `finish`; a pass finishes them too."""

    def __init__(self, batch: BatchTokens, row: int, ids: Tensor) -> None:
        self.ids = ids
        self.batch, self._row = batch, row

    def write(self, start: int, token_ids: Tensor) -> None:
        self.batch.write(self._row, start, token_ids)

    def write_from_host(self, start: int, token_ids: Sequence[int]) -> None:
        self.batch.write_from_host(self._row, start, token_ids)

    def finish(self) -> None:
        self.batch.finish()
