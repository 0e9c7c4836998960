"""What a search has measured on held-out prompts, and its result: a run of it again neither repeats nor chooses among them."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from studies.contract import Candidate
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.errors import SearchError, without_password
from tuner.search.decision import Confirmed
from tuner.search.outcome import SearchResult
from tuner.search.race import Finalist
from tuner.search.storage import FINISHED, StudyStore
from tuner.search.task import settings_sha256

CONFIRMED, WINNERS = "confirmed", "confirmed_winners"
"""Notes of an experiment: measurements by candidate, and the winners so far in order."""
_RESULTS: TypeAdapter[SearchResult] = TypeAdapter(SearchResult)


class Confirmations:
    """Measurements on the held-out prompts by all runs of a search, on disk after each."""

    def __init__(self, store: StudyStore) -> None:
        self._store = store
        self.known = {key: Measurement.model_validate(each) for key, each in (store.noted(CONFIRMED) or {}).items()}
        """By candidate."""

    def keep(self, confirmed: Confirmed) -> None:
        """Store the measurement of a candidate, in place of an earlier part of it."""
        self.known[confirmed.trial.candidate.key] = confirmed.measurement
        self._store.keep(CONFIRMED, {key: each.model_dump(mode="json") for key, each in self.known.items()})

    def count(self, winner: Candidate) -> int:
        """Return how many winners have been confirmed on these prompts, this one included."""
        winners = self._store.noted(WINNERS) or []
        if winner.key not in winners:
            self._store.keep(WINNERS, [*winners, winner.key])
            return len(winners) + 1
        return len(winners)


def keep_result(store: StudyStore, settings: str, result: SearchResult) -> None:
    """Store the result of a whole run."""
    finished = datetime.now(UTC).isoformat(sep=" ", timespec="minutes")
    kept = {"settings": settings, "finished": finished}
    store.keep(FINISHED, {**kept, "result": _RESULTS.dump_python(result, mode="json", by_alias=True)})


def finished_result(store: StudyStore, settings: str) -> tuple[SearchResult, str] | None:
    """Return the result of an earlier run of the same command and when it finished; None if there is none that can be read."""
    noted = store.noted(FINISHED)
    if noted is None or noted["settings"] != settings or (result := _read(noted)) is None:
        return None
    return result, noted["finished"]


def earlier_race(store: StudyStore, num_trials: int) -> list[Finalist]:
    """Return the finalists of the last whole run, if no trial was added since: another race would be another draw."""
    noted = store.noted(FINISHED)
    result = None if noted is None else _read(noted)
    return list(result.race) if result is not None and result.cost.num_trials == num_trials else []


def _read(noted: dict[str, Any]) -> SearchResult | None:
    try:
        return _RESULTS.validate_python(noted["result"])
    except ValidationError:  # of another version: its confirmations still count
        return None


def write_stored(config: SearchConfig) -> SearchResult:
    """Write the profile of a search that other hosts have ended, and return its result. Raises `SearchError` without one."""
    store = StudyStore(config.storage, config.resolved_experiment())
    try:
        found = finished_result(store, settings_sha256(config))
    finally:
        store.close()
    if found is None:
        raise SearchError(f"no result is stored in {without_password(config.storage)}")
    for name in found[0].profile.draft.files:
        if not (copy := config.out.parent / name).exists():
            shutil.copy(config.heads / name, copy)
    found[0].profile.save(config.out)
    return found[0]
