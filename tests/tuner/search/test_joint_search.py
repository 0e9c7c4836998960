"""The default search, `joint`, from the command to a profile; interrupted and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoding.profile import DraftProfile
from studies.contract import TrialRecord
from studies.prediction.predictors import Prediction
from studies.prediction.proposals import Proposals
from studies.samplers.joint import PoolSource
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_records

SMALL = "studies: {joint: {num_surveyed: 30, max_tokens: 4, num_drafts: 2, num_lookups: 1, kinds: [skip_set, lookup]}}"


@pytest.fixture
def run_joint(run_search: SearchCommand, workplace: Path) -> SearchCommand:
    config = workplace.parent / "small.yaml"
    text = config.read_text().replace("study: [conf_layers, exit_layer, draft_length]\n", "")
    config.write_text(text.replace("trials: 3", "trials: 4") + SMALL + "\n")
    return run_search


def records() -> list[TrialRecord]:
    return stored_records(Path("sdtune.db"), "tiny/joint")


def test_default_search_tries_several_kinds_and_goes_on_with_the_pool_it_had(
    run_joint: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_joint("--trials", "2").exit_code == 0
    before = records()

    def again(*args: Any) -> Any:
        raise AssertionError("all was rated, and the pool is kept")

    def rate_again(proposals: Proposals) -> Iterator[Prediction]:
        again()
        yield from ()

    monkeypatch.setattr(PoolSource, "first", again)
    monkeypatch.setattr(Proposals, "rate", rate_again)
    result = run_joint("--trials", "4")
    assert result.exit_code == 0, result.output
    after = records()
    assert [record.candidate for record in after[:2]] == [record.candidate for record in before]
    assert len({record.candidate.key for record in after}) == 4
    assert all({"predicted_speedup", "corrected_speedup"} <= record.notes.keys() for record in after)
    assert all(record.measurement is not None and record.measurement.is_lossless for record in after)
    assert all(record.origin == record.notes["origin"] != "joint" for record in after)
    shown = " ".join(result.stdout.split())
    assert "joint" in shown
    assert any(f"from {record.origin}" in shown for record in after), "the table says where the winner came from"
    profile = DraftProfile.load(Path("profile.yaml"))
    assert profile.draft.trained_head is None, "heads were not asked for"
