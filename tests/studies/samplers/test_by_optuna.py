"""Optuna's samplers by name over the whole space: each runs and resumes; a wrong one is refused in one line."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import optuna
import pytest

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip
from studies.contract import Candidate, Problem
from studies.samplers import load_sampler
from studies.samplers.by_optuna import sampler_names
from tests.support.tiny import tiny_target
from tests.support.trying import Trying

TRIALS = 14
CANNOT = {"optuna:BruteForceSampler"} | (set() if find_spec("cmaes") else {"optuna:CmaEsSampler"})


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(tiny_target(6), (), (), earlier={}, seed=3)


def planted(candidate: Candidate, notes: dict[str, Any]) -> float:
    """Early exits are the fastest, the more so the earlier, and short drafts are better than long ones."""
    draft = candidate.draft
    best = 2.0 - 0.1 * draft.exit_layer if isinstance(draft, EarlyExit) else 1.0 + 0.2 * draft.runs_model
    return best - 0.01 * candidate.draft_length.max_tokens


def begun(name: str, problem: Problem, **settings: Any) -> Trying:
    made = load_sampler(name)
    return Trying(made(problem, made.Settings.model_validate(settings)))


RUNNING = sorted({"tpe", "random", *(f"optuna:{name}" for name in sampler_names())} - CANNOT)


@pytest.mark.filterwarnings("ignore:Some regimes for parameter")
@pytest.mark.parametrize("name", RUNNING)
def test_every_sampler_searches_the_whole_space(name: str, problem: Problem) -> None:
    study = begun(name, problem, bits=(), rules=("fixed", "top_probability"))
    assert study.sampler.name == name
    found = [record.candidate for record in study.run(TRIALS, planted)]
    assert len({each.draft.kind for each in found}) >= 4
    assert {"kind", "rule"} < set(optuna.importance.get_param_importances(study.study))
    again = [study.sampler.space.suggest(optuna.trial.FixedTrial(trial.params)) for trial in study.study.trials]
    assert again == found


@pytest.mark.parametrize("name", ["tpe", "optuna:NSGAIISampler"])
def test_a_resumed_search_continues_as_if_never_stopped(name: str, problem: Problem) -> None:
    whole = begun(name, problem, bits=(), rules=("fixed",)).run(16, planted)
    first = begun(name, problem, bits=(), rules=("fixed",))
    first.run(12, planted)
    resumed = begun(name, problem, bits=(), rules=("fixed",)).sampler
    assert Trying(resumed, first.study).run(4, planted) == whole[12:]


def test_known_candidates_are_measured_first(problem: Problem) -> None:
    known = Candidate(draft=LayerSkip.blocks((2, 4)), draft_length=Fixed(max_tokens=5))
    assert begun("tpe", problem, candidates=(known,)).suggest() == known
    unknown = known.model_copy(update={"draft": EarlyExit(exit_layer=2, head="h.safetensors", head_sha256="a" * 64)})
    with pytest.raises(
        ValueError, match="the search does not consider the draft 'early exit at layer 2 \\(trained head\\)'"
    ):
        begun("tpe", problem, candidates=(known, unknown))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optuna:GridSampler", "optuna:GridSampler: it needs more than a seed; valid: .*GPSampler"),
        ("optuna:BaseSampler", "needs more than a seed"),
        ("optuna:gp", "optuna:gp: Optuna has no such sampler; valid: .*TPESampler"),
        ("optuna:", "Optuna has no such sampler"),
        ("gp", "unknown study 'gp'; valid: conf_layers, .* optuna:NAME for a sampler of Optuna"),
        ("predictd", "unknown study"),
    ],
)
def test_a_wrong_name_is_refused_with_those_that_there_are(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        load_sampler(name)
    assert "\n" not in str(refusal.value)


def test_a_sampler_that_cannot_search_drafts_says_why(problem: Problem) -> None:
    with pytest.raises(
        ValueError, match=r"optuna:BruteForceSampler: this sampler cannot search drafts and rules: .+"
    ) as why:
        begun("optuna:BruteForceSampler", problem)
    assert "\n" not in str(why.value)
