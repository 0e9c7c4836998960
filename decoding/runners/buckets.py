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

    @property
    def widest(self) -> int:
        """Maximum width of a fixed-shape pass."""
        return self.widths[-1]

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
PADDED_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 65)
"""Few widths, for devices that keep a recording per width and where wider passes cost hardly more."""

CPU_BUCKETS = Buckets(EXACT_WIDTHS, slot_step=64)
GPU_BUCKETS = Buckets(PADDED_WIDTHS, slot_step=256, all_rows=True)
