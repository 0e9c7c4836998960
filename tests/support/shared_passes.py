"""The passes over several sequences, as they happen; a chain of drafts counts as one pass for each of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from decoding.cache.kv_cache import Storage
from decoding.runners.contract import Outputs, Part, PassRequest, Written
from decoding.target import Target

Note = Callable[[Part, dict[int, tuple[int, int]]], object]
"""Receives the part and, by row, the first position and the width of one pass."""


def watch_shared_passes(target: Target, patch: pytest.MonkeyPatch, note: Note) -> None:
    """Report each shared pass of `target` from now on."""
    runner: Any = target.runner
    run, write = runner.run_shared_pass, runner.write_together

    def watched_run(part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        note(part, {row: (each.start, each.width) for row, each in passes.items()})
        return run(part, passes, memory)

    def watched_write(
        part: Part, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int
    ) -> dict[int, Written]:
        written: dict[int, Written] = write(part, passes, memory, num_tokens)
        for index in range(next(iter(written.values())).token_ids.shape[0]):
            note(part, {row: (each.start + index, 1) for row, each in passes.items()})
        return written

    patch.setattr(runner, "run_shared_pass", watched_run)
    patch.setattr(runner, "write_together", watched_write)
