"""A folder with a small search, and the jobs of a service, for tests that need no more of either."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.small_search import SearchPlace
    from tuner.service.jobs import Jobs


@pytest.fixture
def place(tmp_path: Path, _tracking_template: Path) -> SearchPlace:
    from benchmarks.small_search import SearchPlace

    place = SearchPlace.made(tmp_path)
    shutil.copy(_tracking_template, place.database("tracking"))
    return place


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    from tuner.service.jobs import Jobs

    jobs = Jobs(f"sqlite:///{tmp_path / 'service.db'}")
    yield jobs
    jobs.close()
