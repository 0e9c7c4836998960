"""Comparison of searches on a tiny model: runs, held-out samples, resuming, refusals."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from decoding.draft_length import BetaThompson, Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.rounds import Round
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import PromptSample
from studies.searches.registry import compared_searches
from tests.support.benches import bench_on, charge
from tests.support.records import candidate
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.evaluation.searches.compare import HELD_OUT_FILE
from tuner.evaluation.searches.held_out import CHUNK, HeldOutSamples
from tuner.evaluation.searches.rivals import rivals
from tuner.measuring.clock import PriceList
from tuner.measuring.cost_table import measure_cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Unwatched

Compare = Callable[..., Result]
RESULTS = ["held_out.jsonl", "searches.csv", "searches.db", "searches.json", "searches.png"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_costs: None) -> Path:
    """Return an empty working directory, without an MLflow store, which takes seconds to create."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return here


@pytest.fixture
def compare(workplace: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Return the comparison of two searches by default, with two seeds and two trials, without the picture."""
    monkeypatch.setattr(
        "tuner.evaluation.searches.report.searches_picture", lambda found, file: file.write(b"no picture")
    )
    text = "max_new_tokens: 12\ntuning_prompts: 6\nheld_out_prompts: 4\nprompts_per_trial: 2\ngroup_column: file\n"
    (workplace.parent / "small.yaml").write_text(f"model: {checkpoint}\ndataset: {prompts_file}\n{text}")

    def run(*searches: str, **changes: str | None) -> Result:
        small = str(workplace.parent / "small.yaml")
        flags: dict[str, str | None] = {"config": small, "seeds": "2", "budget-trials": "2", "out": "found"}
        flags |= {key.replace("_", "-"): value for key, value in changes.items()}
        given = [part for key, value in flags.items() if value is not None for part in (f"--{key}", value)]
        named = [part for name in searches or ("random", "tpe") for part in ("--search", name)]
        return CliRunner().invoke(main, ["evaluate", "searches", *given, *named])

    return run


def _price(draft: Draft, record: Round) -> float:
    seconds = 1e-3 * len(record.tokens)
    if not draft.drafts:
        return seconds
    num_skipped = len(draft.skip_attention) + len(draft.skip_mlp) if isinstance(draft, LayerSkip) else 0
    return seconds / (0.9 + 0.1 * num_skipped)


class Clockwork:
    """Decode at made-up prices, where each skipped sublayer adds 0.1 to the speed-up; count trials and samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials: list[list[int]] = []
        """Prompts of each trial, as rows of the tuning set."""
        self.held_out = 0
        self.stop_at_trial = self.stop_at_sample = 10_000
        measure, side_by_side = Bench.measure, Bench.side_by_side

        def counted(bench: Bench, each: Candidate, indices: Any, on_sample: Any) -> Any:
            if len(self.trials) == self.stop_at_trial:
                raise KeyboardInterrupt
            self.trials.append([bench.baseline.rows[index] for index in indices])
            self.is_trial = True
            try:
                return measure(bench, each, indices, on_sample)
            finally:
                self.is_trial = False

        def together(bench: Bench, candidates: Any, indices: Any, on_sample: Any) -> Any:
            def seen(sample: PromptSample) -> None:
                if not self.is_trial:
                    if self.held_out == self.stop_at_sample:
                        raise KeyboardInterrupt
                    self.held_out += 1
                on_sample(sample)

            return side_by_side(bench, candidates, indices, seen)

        self.is_trial = False
        charge(monkeypatch, PriceList(_price))
        monkeypatch.setattr(Bench, "measure", counted)
        monkeypatch.setattr(Bench, "side_by_side", together)


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    return Clockwork(monkeypatch)


def written(folder: str = "found") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(folder, "searches.json").read_text())
    return document


def test_two_searches_with_two_seeds(
    compare: Compare, clockwork: Clockwork, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sdtune", "evaluate", "searches"])
    result = compare()
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("found").iterdir()) == RESULTS
    assert [path.name for path in workplace.iterdir()] == ["found"]
    found = written()
    assert found["provenance"]["command"]
    assert [(run["search"], run["seed"], run["trials"]) for run in found["runs"]] == [
        *(("random", seed, 2) for seed in (0, 1)),
        *(("tpe", seed, 2) for seed in (0, 1)),
    ]
    assert {"torch", "transformers", "sdtune"} <= set(found["provenance"]["versions"])
    assert found["searches"]["tpe"]["settings"]["method"] == "tpe"
    assert str(workplace) not in Path("found", "searches.json").read_text()
    assert len({tuple(rows) for rows in clockwork.trials}) == 2, "an order of the tuning prompts for each seed"
    began = [line.split(",")[0].split()[-1] for line in result.stderr.splitlines() if ", run " in line]
    assert began == ["random", "tpe", "tpe", "random"], "which search is first moves on"
    with Path("found", "searches.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert float(first["seconds"]) < float(second["seconds"])
        # The made-up speed-up depends on the draft alone, so held-out figures equal those of the trials.
        best = max(float(first["tuning_speedup"]), float(second["tuning_speedup"] or 0))
        assert float(second["incumbent_held_out_speedup"]) == pytest.approx(best, abs=1e-4)
        assert int(first["tokens"]) == 2 * 22
    for search, figures in found["results"].items():
        assert figures["identical"] == figures["texts"] == 8
        assert figures["speedup"]["value"] == pytest.approx(np.mean(figures["speedup_of_each_seed"]))
        assert search in result.stdout
    finals = [run["final"] for run in found["runs"]]
    assert all(final in [each["candidate"] for each in found["held_out"]] for final in finals)
    assert all([sample["prompt"] for sample in each["samples"]] == [0, 1, 2, 3] for each in found["held_out"])


def test_a_finished_comparison_is_read_and_a_longer_one_resumes(compare: Compare, clockwork: Clockwork) -> None:
    assert compare("random").exit_code == 0
    first, num_trials, num_samples = written(), len(clockwork.trials), clockwork.held_out
    assert num_trials == 4
    again = compare("random")
    assert again.exit_code == 0, again.output
    assert (len(clockwork.trials), clockwork.held_out) == (num_trials, num_samples)
    assert {**written(), "provenance": ""} == {**first, "provenance": ""}
    assert "random, seed 1: 2 stored trials, nothing left to do" in again.stderr
    longer = compare("random", budget_trials="3")
    assert longer.exit_code == 0, longer.output
    assert len(clockwork.trials) == num_trials + 2
    assert "random, seed 0: 2 stored trials, resuming" in longer.stderr
    assert compare("random", budget_trials="1").exit_code == 0
    assert len(clockwork.trials) == num_trials + 2
    assert [run["trials"] for run in written()["runs"]] == [1] * 2, (
        "only the trials of the longer run within the budget count"
    )


def test_a_run_killed_in_a_trial_resumes_after_the_last_one(compare: Compare, clockwork: Clockwork) -> None:
    clockwork.stop_at_trial = 3
    killed = compare(seeds="1")
    assert killed.exit_code == 130
    assert "stopped; the same command resumes" in killed.stderr
    assert sorted(path.name for path in Path("found").iterdir()) == ["held_out.jsonl", "searches.db"]
    clockwork.stop_at_trial = 10_000
    result = compare(seeds="1")
    assert result.exit_code == 0, result.output
    assert len(clockwork.trials) == 4
    assert [run["trials"] for run in written()["runs"]] == [2] * 2


def test_a_run_killed_on_held_out_prompts_measures_the_rest(compare: Compare, clockwork: Clockwork) -> None:
    assert compare("odd_layers", "random", seeds="1", out="whole").exit_code == 0
    num_samples, num_candidates = clockwork.held_out, len(written("whole")["held_out"])
    assert num_samples == 4 * num_candidates
    clockwork.held_out, clockwork.stop_at_sample = 0, num_candidates + 1
    assert compare("odd_layers", "random", seeds="1").exit_code == 130
    clockwork.stop_at_sample = 10_000
    assert compare("odd_layers", "random", seeds="1").exit_code == 0
    # Samples are stored once all candidates have decoded a prompt, so one sample of the interrupted prompt is lost.
    assert clockwork.held_out == num_samples + 1
    assert sorted(str(each["candidate"]) for each in written()["held_out"]) == sorted(
        str(each["candidate"]) for each in written("whole")["held_out"]
    )


def test_a_search_that_finishes_early_keeps_its_best(compare: Compare, clockwork: Clockwork) -> None:
    result = compare("odd_layers", "random", seeds="1")
    assert result.exit_code == 0, result.output
    odd, random = written()["runs"]
    assert (odd["trials"], odd["finished_early"]) == (1, True)
    assert (random["trials"], random["finished_early"]) == (2, False)
    assert odd["held_out_speedup"] == pytest.approx(1.3), "two blocks, four sublayers"
    assert "finished early and kept its best; seed 0: the odd blocks are measured" in result.stdout
    assert compare("odd_layers", "random", seeds="1").exit_code == 0
    assert written()["runs"][0]["ended"] == odd["ended"]


def test_each_run_of_a_predicting_search_measures_its_costs(
    compare: Compare, clockwork: Clockwork, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def measure(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return measure_cost_table(*args, **{**options, "budget_seconds": 0.0})

    monkeypatch.setattr("tuner.measuring.cost_cache.measure_cost_table", measure)
    with (workplace.parent / "small.yaml").open("a") as file:
        file.write("studies: {joint: {num_surveyed: 4, max_tokens: 2, num_drafts: 1, rules: [fixed]}}\n")
    result = compare("joint", budget_trials="1")
    assert result.exit_code == 0, result.output
    assert len(calls) == 2
    assert all(0 < run["preparation_seconds"] < run["seconds"] for run in written()["runs"])


def test_studies_with_nothing_to_try_are_refused(
    compare: Compare, clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.searches.skip_sets.study.SkipSets.finished", lambda study: "there is nothing to try")
    refused(compare("random"), "no search finished a trial within 2 trials: random: there is nothing to try")


def test_a_study_that_cannot_be_created_is_refused(
    compare: Compare, clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(problem: Any, settings: Any, kept: Any) -> Any:
        raise ValueError("the model's context has no room for a draft")

    monkeypatch.setattr("studies.searches.skip_sets.study.SkipSets.create", create)
    refused(compare("random"), "search random: the model's context has no room for a draft")


def test_a_budget_of_tokens_counts_decoded_tokens(compare: Compare, clockwork: Clockwork) -> None:
    # A trial decodes two prompts, 11 tokens each after the first, with and without drafts: the third trial exceeds 100.
    result = compare("random", seeds="1", budget_trials=None, budget_tokens="100")
    assert result.exit_code == 0, result.output
    (run,) = written()["runs"]
    assert (run["trials"], run["tokens"], run["ended"]) == (2, 100, "its 100 tokens are spent")
    assert len(clockwork.trials) == 3


def test_earlier_seconds_count_against_the_budget(compare: Compare, clockwork: Clockwork) -> None:
    clockwork.stop_at_trial = 1
    assert compare("random", seeds="1", budget="1h").exit_code == 130
    from tuner.search.budget import Budget
    from tuner.search.storage import StudyStore, sqlite_url

    spent = StudyStore(sqlite_url(Path("found/searches.db")), "random/seed 0").spent_seconds()
    seen: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        honest = Budget.exhausted

        def look(budget: Budget, num_trials: int) -> str | None:
            seen.append(budget.spent_seconds)
            return honest(budget, num_trials)

        patch.setattr(Budget, "exhausted", look)
        clockwork.stop_at_trial = 10_000
        assert compare("random", seeds="1", budget="1h").exit_code == 0
    assert seen[0] == pytest.approx(spent)
    assert spent > 0


def test_wrong_input_is_refused_in_one_line(
    compare: Compare, clockwork: Clockwork, workplace: Path, checkpoint: Path
) -> None:
    refused(compare("swfit"), "unknown search 'swfit'", "did you mean 'swift'?", "odd_layers, predicted, random")
    refused(compare("draft_length"), "unknown search 'draft_length'")
    refused(compare(config=None, model=str(checkpoint)), "which dataset?")
    refused(compare(budget="soon"), "budget: must be a duration")
    refused(compare(budget_tokens="0"), "--budget-tokens")
    refused(compare(out="no/such"), "cannot create the folder no/such")
    (workplace / "file").write_text("")
    refused(compare(out="file"), "cannot create the folder file")
    few = compare("random", seeds="1", budget_trials=None, budget_tokens="1", out="few")
    refused(few, "the budget of 1 tokens is too small for a single trial", "the smallest first trial 44 tokens")
    assert compare("random", seeds="1").exit_code == 0
    refused(compare("random", max_prompts=None, held_out_prompts="5"), "found holds a comparison with another data")
    refused(compare("random", budget="1h"), "with another budget in seconds", "give another --out")
    with (workplace.parent / "small.yaml").open("a") as file:
        file.write("studies: {skip_sets: {skip_ratio: 0.3}, joint: {kinds: [exit_head]}}\n")
    refused(compare("random"), "was a search with another space", "another --out")
    Path("found", HELD_OUT_FILE).write_text("{}\n")
    refused(compare("random"), f"{HELD_OUT_FILE} does not hold the held-out samples")


def test_names_map_to_studies_with_settings() -> None:
    given = {"skip_sets": {"skip_ratio": 0.3, "swift": {"window": 8, "round_length": 7}}, "joint": {"num_exits": 1}}
    config = SearchConfig(model="m", dataset="d", studies=given)
    found = {rival.name: rival for rival in rivals(["swift_batched", "swift", "joint", "swift"], config)}
    assert list(found) == ["swift_batched", "swift", "joint"]
    batched = found["swift_batched"].settings.model_dump()
    plain = found["swift"].settings.model_dump()
    assert (batched["skip_ratio"], batched["swift"]["window"]) == (0.3, 8)
    assert (batched["swift"]["round_length"], batched["swift"]["until_better"]) == (100, False)
    assert (plain["swift"]["round_length"], plain["swift"]["until_better"]) == (7, True)
    assert found["joint"].settings.model_dump()["num_exits"] == 1
    everything = rivals([], config)
    assert [rival.name for rival in everything] == list(compared_searches())
    assert everything[0].name == "joint"
    assert set(compared_searches()) >= {
        "swift",
        "draft_verify",
        "tpe",
        "random",
        "odd_layers",
        "conf_layers",
        "exit_layer",
        "joint",
    }
    assert not {"skip_sets", "draft_length"} & set(compared_searches())
    told = " ".join(CliRunner().invoke(main, ["evaluate", "searches", "--help"]).output.split())
    assert all(name in told.partition("Searches to compare:")[2] for name in compared_searches())


def test_held_out_samples_come_in_chunks_with_warmed_up_rules(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", partial(_cheap_costs))
    prompts = [tuple((index * 7 + position * 5) % 60 + 2 for position in range(5 + index)) for index in range(3)]
    bench = bench_on(target, prompts, max_new_tokens=12)
    together: list[int] = []
    honest = Bench.side_by_side

    def side_by_side(bench: Bench, candidates: Any, indices: Any, on_sample: Any) -> Any:
        together.append(len(candidates))
        return honest(bench, candidates, indices, on_sample)

    monkeypatch.setattr(Bench, "side_by_side", side_by_side)
    adaptive = candidate((3,), BetaThompson())
    wanted = [*(candidate((2,), Fixed(max_tokens=length)) for length in range(1, CHUNK + 2)), adaptive]
    measured = HeldOutSamples(tmp_path / "t.jsonl", {"model": "a"})
    measured.complete(wanted, bench, lambda each: bench.warm_up_rule(each, [0]), Unwatched())
    assert together == [CHUNK, 2]
    assert all(len(each.samples) == 3 for each in measured.measurements().values())
    assert measured.warmed_up(wanted[0]) == wanted[0]
    warmed_up = measured.warmed_up(adaptive).draft_length
    assert isinstance(warmed_up, BetaThompson)
    assert warmed_up.costs is not None
    again = HeldOutSamples(tmp_path / "t.jsonl", {"model": "a"})
    again.complete(wanted, bench, _never, Unwatched())
    assert len(together) == 2
    assert again.measurements() == measured.measurements()
    with pytest.raises(ConfigError, match="with another data and model: give another --out"):
        HeldOutSamples(tmp_path / "t.jsonl", {"model": "b", "data": "c"})


def _cheap_costs(*args: Any, **how: Any) -> Any:
    from decoding.draft_length import RoundCosts

    return RoundCosts(draft_step=0.1, verify=(1.0,) * 65)


def _never(each: Candidate) -> Candidate:
    raise AssertionError("warmed up before")
