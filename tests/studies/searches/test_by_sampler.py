"""Optuna's samplers by name over the whole space: each runs and resumes; a wrong one is refused in one line."""

from __future__ import annotations

from importlib.util import find_spec

import optuna
import pytest

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip
from studies.contract import Candidate, Problem
from studies.samplers import sampler_names
from studies.searches.by_sampler import BySampler
from studies.searches.registry import load_study
from tests.support.tiny import tiny_target

TRIALS = 14
CANNOT = {"optuna:BruteForceSampler"} | (set() if find_spec("cmaes") else {"optuna:CmaEsSampler"})


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(tiny_target(6), (), (), earlier={}, seed=3)


def planted(candidate: Candidate) -> float:
    """Early exits are the fastest, the more so the earlier, and short drafts are better than long ones."""
    draft = candidate.draft
    best = 2.0 - 0.1 * draft.exit_layer if isinstance(draft, EarlyExit) else 1.0 + 0.2 * draft.runs_model
    return best - 0.01 * candidate.draft_length.max_tokens


def begun(study: BySampler) -> optuna.Study:
    setup = study.setup()
    stored = optuna.create_study(direction="maximize", sampler=setup.sampler)
    for start in setup.starts:
        stored.enqueue_trial(dict(start))
    return stored


def run(study: BySampler, stored: optuna.Study, trials: int) -> list[Candidate]:
    found = []
    for _ in range(trials):
        trial = stored.ask()
        found.append(study.propose(trial)[0])
        stored.tell(trial, planted(found[-1]))
    return found


RUNNING = sorted({"tpe", "random", *(f"optuna:{name}" for name in sampler_names())} - CANNOT)


@pytest.mark.filterwarnings("ignore:Some regimes for parameter")
@pytest.mark.parametrize("name", RUNNING)
def test_every_sampler_searches_the_whole_space(name: str, problem: Problem) -> None:
    made = load_study(name)
    study = made(problem, made.Settings(bits=(), rules=("fixed", "top_probability")))
    assert isinstance(study, BySampler)
    stored = begun(study)
    found = run(study, stored, TRIALS)
    assert study.name == name
    assert len({each.draft.kind for each in found}) >= 4
    importances = optuna.importance.get_param_importances(stored)
    assert {"kind", "rule"} < set(importances)
    again = [trial.params for trial in stored.trials]
    assert all(
        study.space.suggest(optuna.trial.FixedTrial(each)) == one for each, one in zip(again, found, strict=True)
    )


@pytest.mark.parametrize("name", ["tpe", "random", "optuna:NSGAIISampler", "optuna:GPSampler"])
def test_a_resumed_search_continues_as_if_never_stopped(name: str, problem: Problem) -> None:
    settings = load_study(name).Settings(bits=(), rules=("fixed",))
    study, resumed = (load_study(name)(problem, settings) for _ in range(2))
    assert isinstance(study, BySampler)
    assert isinstance(resumed, BySampler)
    whole = run(study, begun(study), 16)
    first = load_study(name)(problem, settings)
    assert isinstance(first, BySampler)
    stored = begun(first)
    run(first, stored, 12)
    stored.sampler = resumed.setup().sampler
    assert run(resumed, stored, 4) == whole[12:]


def test_known_candidates_are_measured_first(problem: Problem) -> None:
    known = Candidate(draft=LayerSkip.blocks((2, 4)), draft_length=Fixed(max_tokens=5))
    made = load_study("tpe")
    study = made(problem, made.Settings(candidates=(known,)))
    assert isinstance(study, BySampler)
    assert run(study, begun(study), 1) == [known]
    unknown = known.model_copy(update={"draft": EarlyExit(exit_layer=2, head="h.safetensors", head_sha256="a" * 64)})
    with pytest.raises(ValueError, match="the search does not consider the draft 'exit at 2, trained head'"):
        made(problem, made.Settings(candidates=(known, unknown))).setup()


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
        load_study(name)
    assert "\n" not in str(refusal.value)


def test_a_sampler_that_cannot_search_drafts_says_why(problem: Problem) -> None:
    made = load_study("optuna:BruteForceSampler")
    with pytest.raises(
        ValueError, match=r"optuna:BruteForceSampler: this sampler cannot search drafts and rules: .+"
    ) as why:
        made(problem, made.Settings())
    assert "\n" not in str(why.value)
