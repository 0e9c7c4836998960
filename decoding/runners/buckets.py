"""The shapes of fixed-shape passes: any other width is padded to the next bucket."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Pass widths, in ascending order, and the granularity of cache reads."""

    widths: tuple[int, ...]
    slot_step: int
    """Reads cover a multiple of this number of slots: a trade-off between few shapes and few wasted reads."""
    all_rows: bool = False
    """True if a shared pass always covers all rows of the storage, idle ones included: fewer shapes, more wasted rows."""
    most_positions: int | None = None
    """Maximum number of positions of a shared pass, over all its rows; None for any number.

    A recording keeps the logits of all of them: 65 positions of 16 rows with a vocabulary of 128k take 267 MB.
    """

    @property
    def widest(self) -> int:
        """Maximum width of a fixed-shape pass."""
        return self.widths[-1]

    def fits(self, width: int, num_rows: int = 1) -> bool:
        """Return True if a pass of `width` positions in each of `num_rows` rows has a fixed shape."""
        if width > self.widest:
            return False
        return num_rows == 1 or self.most_positions is None or num_rows * self.width(width) <= self.most_positions

    def width(self, width: int) -> int:
        """Return the narrowest bucket for a pass of `width` positions, at most `widest`."""
        return self.widths[bisect_left(self.widths, width)]

    def reach(self, end: int) -> int:
        """Return how many slots to read to cover the first `end`.

        Steps grow with the sequence, to keep the number of shapes small.
        """
        reach = self.slot_step
        while reach < end:
            reach += max(self.slot_step, reach // 4 // self.slot_step * self.slot_step)
        return reach

    def capacity(self, capacity: int) -> int:
        """Return the slots that a cache of `capacity` positions needs, padding included."""
        return self.reach(capacity + self.widest)


EXACT_WIDTHS = tuple(range(1, 66))
"""Every width, for devices where a pass's cost grows with its width, as on a CPU.

65 is the last token plus the longest draft of any rule.
"""
PADDED_WIDTHS = (1, 2, 4, 8, 16, 32, 65)
"""Few widths, for devices that keep a recording per width and where wider passes cost hardly more.

Up to some hundred positions, a GPU takes as long for a pass as it takes to read the weights.
"""

CPU_BUCKETS = Buckets(EXACT_WIDTHS, slot_step=64)
GPU_BUCKETS = Buckets(PADDED_WIDTHS, slot_step=256, all_rows=True, most_positions=512)
