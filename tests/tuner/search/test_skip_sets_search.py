"""The rival searches with real decoding: measured, stored, and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.target import Target
from studies.contract import Problem, TrialRecord, TrialState
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.searches.skip_sets.study import SkipSets
from tests.support.benches import bench_on
from tests.support.commands import SearchCommand
from tuner.measuring.paired import Bench
from tuner.search.objective import Trials
from tuner.search.storage import StudyStore, sqlite_url

INDICES = range(3)


@pytest.fixture(scope="module")
def bench(target: Target) -> Bench:
    prompts = [tuple((index * 7 + position * 5) % 60 + 2 for position in range(5 + index)) for index in range(4)]
    return bench_on(target, prompts, max_new_tokens=12)


def _run(folder: Path, bench: Bench, method: str, trials: int) -> list[TrialRecord]:
    texts = bench.prompts, bench.continuations
    study = SkipSets(
        Problem(bench.target, *texts, earlier={}, seed=1), SkipSetsSettings.model_validate({"method": method})
    )
    stored = StudyStore(sqlite_url(folder / "trials.db"), "e").open(study, {})
    return Trials(study, stored, bench, INDICES, most=trials).run()[0]


@pytest.mark.parametrize("method", ["random", "swift", "draft_verify", "tpe"])
def test_every_rival_is_measured_by_real_decoding_and_resumed(tmp_path: Path, bench: Bench, method: str) -> None:
    first = _run(tmp_path, bench, method, 2)
    records = _run(tmp_path, bench, method, 4)
    assert [record.model_dump() for record in records[:2]] == [record.model_dump() for record in first]
    assert [record.number for record in records] == [0, 1, 2, 3]
    measured = [record.measurement for record in records]
    assert all(record.state in (TrialState.COMPLETE, TrialState.PRUNED) for record in records)
    assert all(each is not None and each.is_lossless for each in measured)
    assert {record.notes["method"] for record in records} == {method}
    if method == "swift":
        scored = [record.notes.get("num_scored", 0) for record in records]
        assert scored == sorted(scored)
        assert scored[0] == 0 < scored[-1] == sum(len(record.notes["scores"]) for record in records)


def test_odd_layers_take_one_trial(tmp_path: Path, bench: Bench) -> None:
    assert len(_run(tmp_path, bench, "odd_layers", 4)) == 1


def test_a_rival_is_chosen_by_flag_and_file(run_search: SearchCommand, workplace: Path) -> None:
    given = workplace / "rival.yaml"
    given.write_text(
        "max_new_tokens: 12\ntuning_prompts: 4\nheld_out_prompts: 4\nprompts_per_trial: 2\nexperiment: rival\n"
        "studies: {skip_sets: {method: swift, swift: {window: 8, bayes_interval: 2}}}\n"
    )
    result = run_search(config=str(given), study="skip_sets", trials="3")
    assert result.exit_code == 0, result.output
    (study,) = [name for name in ("conf_layers", "exit_layer", "draft_length", "skip_sets") if name in result.stdout]
    assert study == "skip_sets"
