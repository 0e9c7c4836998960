"""The devices of a search's trials: what another device is told, and that a Ray device measures what this process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studies.contract import TrialRecord
from tests.support.benches import charge, per_token
from tests.support.commands import SearchCommand
from tests.support.here_devices import HereDevices
from tests.support.stored_trials import stored_records
from tuner.executors import ray_cluster


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> HereDevices:
    """A cluster of two devices in this process."""
    charge(monkeypatch, per_token(plain=2.0))
    return HereDevices(monkeypatch)


def _candidates(records: list[TrialRecord]) -> list[tuple[str, str, Any]]:
    return [(each.candidate.key, each.state, each.measurement) for each in records]


def test_one_device_elsewhere_finds_what_this_process_finds(run_search: SearchCommand, here: HereDevices) -> None:
    local = run_search("--study", "conf_layers", "--storage", "sqlite:///local.db")
    assert local.exit_code == 0, local.output
    elsewhere = run_search("--study", "conf_layers", "--executor", "ray", "--ray-devices", "1", "--ray-label", "h")
    assert elsewhere.exit_code == 0, elsewhere.output
    assert here.opened == ["h 0"]
    again = run_search("--study", "conf_layers", "--executor", "ray", "--ray-devices", "1", "--ray-label", "h")
    assert again.exit_code == 0, again.output
    assert here.opened == ["h 0"], "no trial was left, so no device was needed"
    local_records, there = (stored_records(Path(name), "tiny/conf_layers") for name in ("local.db", "sdtune.db"))
    assert _candidates(there) == _candidates(local_records)
    assert {each.notes["device"] for each in there} == {"h 0"}
    assert not any("device" in each.notes for each in local_records)


def test_a_disturbance_is_looked_for_only_on_devices_elsewhere(run_search: SearchCommand) -> None:
    result = run_search("--study", "conf_layers", "--repeats", "1")
    assert result.exit_code == 2
    assert "repeats: settings of Ray devices: give --executor ray as well" in result.output


def test_a_missing_cluster_is_told_before_the_model_is_loaded(
    run_search: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "ray", None)
    monkeypatch.setattr("tuner.search.task.load", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run_search("--executor", "ray")
    assert result.exit_code == 2
    assert "pip install 'sdtune[ray]'" in result.output
