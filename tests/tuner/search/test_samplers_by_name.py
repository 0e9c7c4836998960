"""Samplers of Optuna by name: each searches the whole space, and the command ends with a profile."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest

from decoding.profile import DraftProfile
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_trials
from tuner.search.storage import sqlite_url

SAMPLER = "optuna:GPSampler"
NUM_TRIALS = 9  # more than the usual drafts, with which each begins


@pytest.mark.filterwarnings("ignore:Some regimes:UserWarning")  # of importances: a rule was tried once
def test_a_sampler_by_name_searches_to_a_profile(run_search: SearchCommand, workplace: Path) -> None:
    result = run_search(study=SAMPLER, trials=str(NUM_TRIALS))
    assert result.exit_code == 0, result.output
    assert DraftProfile.load("profile.yaml").provenance.study == SAMPLER
    database = workplace / "sdtune.db"
    assert len(stored_trials(database, f"tiny/{SAMPLER}")) == NUM_TRIALS
    study = optuna.load_study(study_name=f"tiny/{SAMPLER}", storage=sqlite_url(database))
    assert "kind" in optuna.importance.get_param_importances(study)


@pytest.mark.skipif(find_spec("cmaes") is not None, reason="the package is installed")
def test_a_sampler_without_its_package_says_what_is_missing(run_search: SearchCommand) -> None:
    result = run_search(study="optuna:CmaEsSampler")
    assert result.exit_code == 2
    assert "optuna:CmaEsSampler: it needs a package: pip install cmaes" in result.stderr


def test_a_sampler_that_cannot_search_the_space_is_refused(run_search: SearchCommand) -> None:
    result = run_search(study="optuna:BruteForceSampler")
    assert result.exit_code == 2
    assert "optuna:BruteForceSampler: this sampler cannot search drafts and rules: " in result.stderr
