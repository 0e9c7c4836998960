"""A search that one process begins and another ends: finished steps are not repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import TypeAdapter

from tests.support.benches import charge, per_token
from tests.support.stored_trials import stored_records
from tuner.config import load_config
from tuner.progress import Unwatched
from tuner.search.run import search
from tuner.search.task import prepare

T = TypeVar("T")


class SavedSteps:
    """Steps whose results are kept as JSON."""

    def __init__(self) -> None:
        self.saved: dict[str, str] = {}
        self.ran: list[str] = []
        self.killed_at: str | None = None

    def run(self, name: str, work: Callable[[], T], kind: Any) -> T:
        """See `Steps.run`."""
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        if name == self.killed_at:
            raise SystemExit
        if name not in self.saved:
            self.ran.append(name)
            self.saved[name] = json.dumps(adapter.dump_python(work(), mode="json"))
        return adapter.validate_python(json.loads(self.saved[name]))


def test_a_search_goes_on_where_another_process_was_killed(
    workplace: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge(monkeypatch, per_token(plain=3.0, drafted=1.0))
    for name in ("skipped_layers_picture", "speedup_picture"):
        monkeypatch.setattr(f"tuner.search.reviewing.{name}", lambda *given: given[-1].write_bytes(b"no picture"))
    sizes = {"max_new_tokens": 10, "tuning_prompts": 4, "held_out_prompts": 4, "prompts_per_trial": 2, "trials": 2}
    places = {"model": str(checkpoint), "dataset": str(prompts_file), "group_column": "file", "distill": "never"}
    tracking = f"sqlite:///{workplace.parent / 'mlflow.db'}"
    study = ("conf_layers", "exit_layer")
    config = load_config(None, {**sizes, **places, "study": study, "tracking_uri": tracking, "experiment": "tiny"})
    steps = SavedSteps()
    steps.killed_at = "confirmation"
    with pytest.raises(SystemExit):
        search(prepare(config, Unwatched()), Unwatched(), steps=steps)
    assert steps.ran == ["study conf_layers", "study exit_layer", "race"]
    stored = stored_records(workplace / "sdtune.db")
    steps.killed_at = None
    found = search(prepare(config, Unwatched()), Unwatched(), steps=steps)
    assert steps.ran == ["study conf_layers", "study exit_layer", "race", "confirmation", "stock"]
    assert stored_records(workplace / "sdtune.db") == stored
    assert found.cost.num_trials == len(stored)
    assert set(found.studies) == set(study)
    assert found.profile.measured is not None
    assert found.profile.measured.speedup.value == pytest.approx(3.0)
