"""The shapes that passes of fixed shapes may have: every other one is padded to the next."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Widths of a pass, ascending, and steps of the places that it reads."""

    widths: tuple[int, ...]
    places: int
    """Reads are of a multiple of this many places: fewer shapes against fewer places read in vain."""
    all_rows: bool = False
    """Whether a pass of several texts goes over all rows of their memory, those that take no part among them: fewer shapes against
    fewer rows computed in vain."""

    @property
    def widest(self) -> int:
        """The most positions of a pass of fixed shape."""
        return self.widths[-1]

    def width(self, width: int) -> int:
        """The narrowest bucket for a pass of `width` positions, at most `widest`."""
        return self.widths[bisect_left(self.widths, width)]

    def reach(self, end: int) -> int:
        """How many places to read so that the first `end` are among them: steps grow with the text, to stay few."""
        reach = self.places
        while reach < end:
            reach += max(self.places, reach // 4 // self.places * self.places)
        return reach

    def capacity(self, capacity: int) -> int:
        """The places that a cache of `capacity` positions needs, padding included."""
        return self.reach(capacity + self.widest)


EXACT_WIDTHS = tuple(range(1, 66))
"""Where a pass costs by its width, as on a CPU, none is padded. 65 are the last token and the longest draft of any rule."""
PADDED_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 65)
"""Where a recording is kept for each width and wider passes cost hardly more."""

CPU_BUCKETS = Buckets(EXACT_WIDTHS, places=64)
GPU_BUCKETS = Buckets(PADDED_WIDTHS, places=256, all_rows=True)
