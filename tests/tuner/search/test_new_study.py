"""A new study is one file and one line of the registry: `sdtune search` then runs, limits and reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.profile import DraftProfile
from studies.contract import TrialRecord
from studies.samplers import SAMPLERS
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_records


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLERS, "one_block", "tests.support.toy_study:OneBlock")


def _records(workplace: Path) -> list[TrialRecord]:
    return stored_records(workplace / "sdtune.db", "tiny/one_block")


def _set(workplace: Path, settings: str) -> None:
    config = workplace.parent / "small.yaml"
    config.write_text(f"{config.read_text()}studies: {{one_block: {settings}}}\n")


def test_new_study_is_searched_and_limited(run_search: SearchCommand, workplace: Path) -> None:
    _set(workplace, "{lowest: 2, max_trials: 2}")
    result = run_search(study="one_block", trials=None)
    assert result.exit_code == 0, result.output
    assert "one_block: 2 trials done" in result.stderr
    first = _records(workplace)
    assert [record.study for record in first] == ["one_block"] * 2
    assert all(record.measurement is not None and record.measurement.is_lossless for record in first)
    assert {record.notes["block"] for record in first} <= {2, 3, 4}
    assert "one_block" in result.stdout
    assert DraftProfile.load("profile.yaml").provenance.study == "one_block"


def test_settings_of_a_new_study_are_checked(run_search: SearchCommand, workplace: Path) -> None:
    _set(workplace, "{lowest: 5}")
    result = run_search(study="one_block")
    assert result.exit_code == 2
    assert "studies.one_block: lowest: block 5 of 6 layers is the last" in result.stderr
