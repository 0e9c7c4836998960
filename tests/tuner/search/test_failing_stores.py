"""A search whose stores fail after its second trial ends with one line; the same command resumes it, and the winner is the same.

`benchmarks.hardening` does this with real disks, with MLflow's store and for longer.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import lock
from decoding.drafts import Draft
from decoding.profile import DraftProfile
from decoding.rounds import Round
from tests.support.benches import charge
from tests.support.commands import SearchCommand
from tests.support.quick_search import miss_the_dead_soon
from tests.support.refusals import refused
from tests.support.stored_trials import stored_records
from tuner.cli.terminal import TerminalProgress
from tuner.measuring.contender import PriceList

STRIKES_AFTER = 2
STUDY = "conf_layers"


def _price(draft: Draft, record: Round) -> float:
    """Drafts are faster than plain decoding, and each has its own price, so that one wins."""
    if not draft.drafts:
        return 9.0 * len(record.tokens)
    skip = draft.skipped(6)
    return len(record.tokens) * (1.0 + 0.01 * sum((*skip.skip_attention, *skip.skip_mlp)))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Let no file grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def locked_database(folder: Path) -> Iterator[None]:
    """Let another process lock the trials."""
    with lock(folder / "sdtune.db", 60.0) as holder:
        yield
        holder.kill()


@pytest.fixture(scope="module")
def winners() -> list[object]:
    """Winners of the searches so far: the first was undisturbed."""
    return []


@pytest.mark.parametrize("fault", [None, full_disk, locked_database], ids=lambda each: each and each.__name__)
def test_nothing_is_lost_and_the_same_command_resumes(
    run_search: SearchCommand,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], AbstractContextManager[None]] | None,
    winners: list[object],
) -> None:
    charge(monkeypatch, PriceList(_price))
    monkeypatch.setattr("tuner.search.storage.LOCK_SECONDS", 0.2)
    miss_the_dead_soon(monkeypatch)
    if fault is not None:
        with ExitStack() as over, monkeypatch.context() as patches:
            trials, shown = list[object](), TerminalProgress.trial

            def trial(self: TerminalProgress, *given: Any) -> None:
                trials.append(given)
                if len(trials) == STRIKES_AFTER:
                    over.enter_context(fault(workplace))
                shown(self, *given)

            patches.setattr(TerminalProgress, "trial", trial)
            stopped = run_search(study=STUDY)
        refused(stopped, "cannot use the storage")
    before = [] if fault is None else stored_records(workplace / "sdtune.db")
    assert len(before) >= (0 if fault is None else STRIKES_AFTER)
    result = run_search(study=STUDY)
    assert result.exit_code == 0, result.output
    assert stored_records(workplace / "sdtune.db")[: len(before)] == before
    winners.append(DraftProfile.load("profile.yaml").model_dump(include={"draft", "draft_length"}))
    assert winners[-1] == winners[0]
