"""`--timeout` is all the time of a search: whole searches in simulated time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from decoding.probe import probe
from decoding.profile import DraftProfile
from studies.samplers.joint import PoolSurveys
from tests.support.simulated_time import SimulatedTime
from tuner.bench.config import BenchConfig
from tuner.bench.task import prepare_bench
from tuner.config import SearchConfig
from tuner.errors import SearchError
from tuner.inputs.models import load
from tuner.inputs.prompts import Prompt
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.review.document import SearchResult
from tuner.search import run
from tuner.search.run import search
from tuner.search.task import Task, open_budget, prepare
from tuner.stage_clock import Stage, StageClock

BLOCK = 0.01
"""Seconds of a block's run: six of them make a pass of 0.06 s, and 12 tokens 0.7 s."""
TOLERANCE = 1.05
"""Overrun that is allowed: a lap, a prompt and a trial are not interrupted."""


class Told(Progress):
    """Progress that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


RunTimed = Callable[..., tuple[SearchResult, SimulatedTime, Told]]


@pytest.fixture
def run_timed(
    workplace: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A whole search of the default study in simulated time; returns its result, the time and what was said."""

    def run(timeout: float | None, **settings: Any) -> tuple[SearchResult, SimulatedTime, Told]:
        with pytest.MonkeyPatch.context() as patches:
            simulated, progress = SimulatedTime(BLOCK), Told()
            config = SearchConfig.model_validate(
                {
                    "model": str(checkpoint),
                    "dataset": str(prompts_file),
                    "max_new_tokens": 10,
                    "tuning_prompts": 12,
                    "held_out_prompts": 12,
                    "prompts_per_trial": 4,
                    "distill": "never",
                    "experiment": "timed",
                    "tracking_uri": f"sqlite:///{workplace.parent / 'mlflow.db'}",
                    "study": ["conf_layers"],
                    "studies": {"conf_layers": {"draft_length": {"rule": "fixed", "max_tokens": 2}}},
                    **({} if timeout is None else {"timeout": timeout}),
                    **settings,
                }
            )
            loaded = load(config.model)
            simulated.charge(loaded.model.model.layers)
            patches.setattr("tuner.search.task.probe", probe)  # each search pays for its own
            clock = simulated.replace_clocks(patches)
            task = prepare(config, progress, loaded=loaded, budget=open_budget(config, clock))
            return search(task, progress), simulated, progress

    return run


def test_a_search_is_refused_ends_in_time_and_goes_on(run_timed: RunTimed) -> None:
    """Four runs one after another, as each begins with what the one before it left: too short, enough, spent, and longer."""
    with pytest.raises(SearchError, match=r"--timeout 20 s is too short for this model: .* give --timeout 50s"):
        run_timed(20)

    first, simulated, told = run_timed(60)
    assert simulated.now <= 60 * TOLERANCE, "what was refused costs the next search nothing"
    _check_a_search_in_time(first, simulated, told)

    with pytest.raises(
        SearchError, match=r"of --timeout 60 s were spent by earlier runs.*--timeout \S+ goes on.*another --experiment"
    ) as refused:
        run_timed(60, finalists=2)
    assert "\n" not in str(refused.value)
    again, simulated, told = run_timed(60)
    assert again == first.model_copy(update={"trials": ()})
    assert simulated.now < 10, "only what loading and checking take"
    assert "its result stands" in told.lines[-1]

    result, simulated, told = run_timed(120)
    assert "of them by earlier runs" in told.lines[0]
    assert simulated.now <= (120 - sum(first.stages.values())) * TOLERANCE
    assert result.cost.trials > first.cost.trials


def _check_a_search_in_time(result: SearchResult, simulated: SimulatedTime, told: Told) -> None:
    assert result.cost.trials >= 1
    assert result.confirmed.num_prompts >= 6
    assert any("of 12 held-out prompts, to keep within --timeout" in cut for cut in result.cuts)
    assert told.lines[0].startswith("--timeout 60 s for everything (estimate): ")
    assert sum(result.stages.values()) == pytest.approx(simulated.now)
    assert result.stages[Stage.PLAIN] > 0
    assert result.stages[Stage.TRIALS] > 0
    assert DraftProfile.load(Path("profile.yaml")).target.num_layers == 6


def test_in_a_short_search_trials_get_fewer_prompts_and_the_best_is_confirmed_without_a_race(
    run_timed: RunTimed,
) -> None:
    result, simulated, _ = run_timed(30)
    assert simulated.now <= 30 * TOLERANCE
    assert result.cost.trials >= 1
    assert (result.winner.study, result.race) == ("conf_layers", ())
    assert result.confirmed.num_prompts >= 6
    assert "tried on 3 of 4 tuning prompts a trial, to keep within --timeout" in result.cuts


def test_a_single_finalist_is_confirmed_without_a_race(run_timed: RunTimed) -> None:
    result, _, _ = run_timed(None, trials=1)
    assert (result.winner.study, result.race) == ("conf_layers", ())
    assert result.confirmed.num_prompts == 12


def test_bench_and_export_of_a_search_that_was_cut_use_prompts_that_it_never_saw(
    run_timed: RunTimed, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.run.objection", lambda *_, **__: None)  # a winner, whatever the figures
    seen: list[Prompt] = []
    open_bench = run.open_bench

    def watched(task: Task, prompts: Sequence[Prompt], *rest: Any, **options: Any) -> Bench:
        if not seen:
            seen.extend(prompts)
        return open_bench(task, prompts, *rest, **options)

    monkeypatch.setattr(run, "open_bench", watched)
    result, _, _ = run_timed(60, group_column="file")
    assert any("of 12 held-out prompts" in cut for cut in result.cuts)
    tuned_on = {prompt.token_ids for prompt in seen}
    assert len(tuned_on) == 12
    columns: dict[str, Any] = {"group_column": "file"}
    bench = prepare_bench(BenchConfig(profile=Path("profile.yaml"), dataset=str(prompts_file), **columns), Progress())
    assert bench.split == "held out by the search that made the profile"
    assert len(bench.measured) == 12
    assert tuned_on.isdisjoint(prompt.token_ids for prompt in bench.measured)


def test_the_last_study_has_a_trial_even_if_its_share_is_too_short_for_one(run_timed: RunTimed) -> None:
    result, simulated, _ = run_timed(62, study=["conf_layers", "draft_length"])
    assert "draft_length" in {each.study for each in result.rivals}
    assert simulated.now <= 62 * TOLERANCE


JOINT: dict[str, Any] = {
    "study": ["joint"],
    "studies": {"joint": {"num_surveyed": 20, "max_tokens": 4, "num_drafts": 2, "kinds": ["skip_set", "lookup"]}},
}


def _slow_surveys(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[slice]:
    """Let every survey take so long, as on a busy machine, and return the sequences of each."""
    surveyed: list[slice] = []
    survey = PoolSurveys._survey

    def slow(self: PoolSurveys, sequences: slice, exits: Any) -> Any:
        surveyed.append(sequences)
        time.perf_counter.__self__.now += seconds  # type: ignore[attr-defined]  # the simulated time
        return survey(self, sequences, exits)

    monkeypatch.setattr(PoolSurveys, "_survey", slow)
    return surveyed


def test_surveys_stop_at_their_share(run_timed: RunTimed, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed = _slow_surveys(monkeypatch, 40.0)
    result, simulated, _ = run_timed(150, **JOINT)
    assert len(surveyed) == 1, "the second one would have taken the time of the trials"
    assert result.cost.trials >= 1
    assert simulated.now <= 150 * TOLERANCE


def test_long_surveys_leave_trials_as_much_as_race_and_confirmation(
    run_timed: RunTimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slow_surveys(monkeypatch, 60.0)
    result, _, _ = run_timed(180, **JOINT)
    assert result.stages[Stage.CHOOSING] > 60
    after = (Stage.RACE, Stage.CONFIRMATION, Stage.STOCK)
    assert result.stages[Stage.TRIALS] > sum(result.stages[stage] for stage in after)


def test_a_search_whose_surveys_take_all_its_time_ends_with_a_profile(
    run_timed: RunTimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up the trials, not the result: plain decoding needs no trial."""
    surveyed = _slow_surveys(monkeypatch, 140.0)
    result, _, _ = run_timed(150, **JOINT)
    assert (result.winner.study, result.cost.trials, len(surveyed)) == ("plain", 0, 1)
    assert result.confirmed.num_prompts >= 6
    assert not DraftProfile.load(Path("profile.yaml")).draft.drafts
    assert any("no trial was finished in time" in cut for cut in result.cuts)


def test_what_no_search_could_keep_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SearchConfig(model="no-such-model", dataset="no-such-file.jsonl", timeout=3)
    with pytest.raises(SearchError, match=r"--timeout 3.0 s is too short .* give --timeout"):
        open_budget(config, StageClock())


def test_time_that_is_spent_while_loading_is_noticed_at_once(
    workplace: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    config = SearchConfig(model=str(checkpoint), dataset=str(prompts_file), timeout=30)

    def slow(*given: Any, **settings: Any) -> Any:
        now[0] += 29.0
        return load(*given, **settings)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("tuner.search.task.load", slow)
    monkeypatch.setattr("tuner.search.task.probe", lambda model, **settings: pytest.fail("nothing more is tried"))
    with pytest.raises(SearchError, match=r"--timeout 30 s is too short for this model: 29 s are spent"):
        prepare(config, Progress(), budget=open_budget(config, StageClock()))
