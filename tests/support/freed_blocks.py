"""A program for a process of its own: which share of freed blocks it keeps, as JSON, under each rule of `tuner.freed_memory`.

The test runner's process is no place for it: its heap has free blocks from earlier tests, which are used again without any
growth of the process, and other threads allocate meanwhile.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from tuner.freed_memory import LARGE, freed_blocks_kept, large_blocks_given_back

NUM_BLOCKS, BLOCK = 24, 2 * LARGE
SMALL = 2**16
"""Bytes of what stays between the blocks."""


def resident() -> int:
    """Bytes of the process's memory that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def share_kept() -> float:
    """Use and free large blocks between small ones, which stay; return the share of them that the process has kept."""
    before = resident()
    blocks, small = [], []
    for _ in range(NUM_BLOCKS):
        blocks.append(torch.ones(BLOCK, dtype=torch.uint8))
        small.append(torch.ones(SMALL, dtype=torch.uint8))
    blocks.clear()
    return (resident() - before - len(small) * SMALL) / (NUM_BLOCKS * BLOCK)


def main() -> None:
    torch.ones(BLOCK, dtype=torch.uint8)  # torch's own start-up
    whole = NUM_BLOCKS * BLOCK
    with large_blocks_given_back():
        given_back = share_kept()
        before = resident()
        with freed_blocks_kept():
            kept = share_kept()
        left_after_it = (resident() - before) / whole
        share_kept()  # may use the holes that were left, and keep them until the end
    left_at_the_end = (resident() - before) / whole
    as_usual = share_kept()
    with large_blocks_given_back():
        left_at_the_next = (resident() - before) / whole
    found = {"given_back": given_back, "kept": kept, "left_after_it": left_after_it, "left_at_the_end": left_at_the_end}
    print(json.dumps(found | {"as_usual": as_usual, "left_at_the_next": left_at_the_next}))


if __name__ == "__main__":
    main()
