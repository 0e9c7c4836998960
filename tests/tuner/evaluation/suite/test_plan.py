"""The cells of a suite: their order, the ones that are chosen, and when a result still counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.suites import search_found
from tuner.errors import ConfigError
from tuner.evaluation.suite.bench_cell import BenchCell
from tuner.evaluation.suite.contract import CellSize, Place, record_of
from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.heads_cell import HeadsCell
from tuner.evaluation.suite.plan import cells_of, chosen
from tuner.evaluation.suite.records import CellRecord
from tuner.evaluation.suite.search_cell import SearchCell


def place(out: Path, **changes: Any) -> Place:
    document: dict[str, Any] = {
        "models": {"m": {"model": "somewhere"}},
        "tasks": {"math": {"dataset": "math.jsonl"}, "qa": {"dataset": "qa.jsonl"}},
        "methods": ["swift"],
        "baselines": ["hf"],
        "search": {"max_new_tokens": 10, "tuning_prompts": 6, "held_out_prompts": 4, "timeout": "60s"},
    }
    return Place(Suite.model_validate({**document, **changes}), out)


def ids(suite: Place) -> list[str]:
    return [cell.id for cell in cells_of(suite)]


def finish(cell: SearchCell, **facts: Any) -> None:
    record = {"status": "ok", "seconds": 1.0, "result": search_found().model_dump(mode="json"), **facts}
    cell.place.records.write(CellRecord(id=cell.id, key=cell.key(), **record))


def test_a_task_is_searched_and_compared_before_the_next(tmp_path: Path) -> None:
    expected = ["m/float32/math/swift", "m/float32/math/bench", "m/float32/qa/swift", "m/float32/qa/bench"]
    assert ids(place(tmp_path)) == expected


def test_transfer_compares_after_all_searches_of_a_precision(tmp_path: Path) -> None:
    suite = place(tmp_path, transfer=["swift"], precisions=["float32", "bfloat16"])
    first = ["math/swift", "qa/swift", "math/bench", "qa/bench"]
    assert ids(suite) == [f"m/{precision}/{rest}" for precision in ("float32", "bfloat16") for rest in first]


def test_searches_in_one_precision_give_the_drafts_of_all(tmp_path: Path) -> None:
    suite = place(
        tmp_path, precisions=["bfloat16", "float32"], search_precision="float32", tasks={"qa": {"dataset": "q"}}
    )
    assert ids(suite) == ["m/float32/qa/swift", "m/float32/qa/bench", "m/bfloat16/qa/bench"]
    assert BenchCell(suite, "m", "bfloat16", "qa").searches()["swift"].precision == "float32"


def test_searches_on_one_data_set_serve_all_tasks(tmp_path: Path) -> None:
    suite = place(tmp_path, tuning={"dataset": "mixed.jsonl"}, methods=["swift", "exit_layer"])
    searches = ["m/float32/tuning/swift", "m/float32/tuning/exit_layer"]
    assert ids(suite) == ["m/heads", *searches, "m/float32/math/bench", "m/float32/qa/bench"]
    cells = BenchCell(suite, "m", "float32", "qa").searches()
    assert {name: cell.id for name, cell in cells.items()} == dict(zip(["swift", "exit_layer"], searches, strict=True))
    assert cells["swift"].config().dataset == "mixed.jsonl"
    assert [config.dataset for config in HeadsCell(suite, "m").task_configs()] == [
        "math.jsonl",
        "qa.jsonl",
        "mixed.jsonl",
    ]


def test_plain_decoding_by_the_own_runner_takes_part_once(tmp_path: Path) -> None:
    suite = place(tmp_path, baselines=["plain-static", "plain-eager", "hf"])
    assert BenchCell(suite, "m", "float32", "qa").baselines == ("plain-static", "hf")
    suite = place(tmp_path, baselines=["plain-static", "plain-eager"], search={"runner": "static"})
    assert BenchCell(suite, "m", "float32", "qa").baselines == ("plain-eager",)


def test_heads_come_first_where_a_method_wants_them(tmp_path: Path) -> None:
    assert ids(place(tmp_path, methods=["swift", "exit_layer"]))[0] == "m/heads"
    searches = {"max_new_tokens": 10, "distill": "never"}
    assert "m/heads" not in ids(place(tmp_path, methods=["exit_layer"], search=searches))


def test_a_pattern_chooses_cells(tmp_path: Path) -> None:
    cells = cells_of(place(tmp_path))
    assert [cell.id for cell in chosen(cells, ["*/math/*"])] == ["m/float32/math/swift", "m/float32/math/bench"]
    with pytest.raises(ConfigError, match="no cell has such an id"):
        chosen(cells, ["*/maths/*"])


def test_a_result_counts_for_its_settings_alone(tmp_path: Path) -> None:
    cell = SearchCell(place(tmp_path), "m", "float32", "math", "swift")
    finish(cell)
    assert record_of(cell.place, cell) is not None
    longer = SearchCell(place(tmp_path, search={"max_new_tokens": 20}), "m", "float32", "math", "swift")
    assert record_of(longer.place, longer) is None


def test_a_comparison_is_made_again_when_another_draft_takes_part(tmp_path: Path) -> None:
    suite = place(tmp_path)
    bench = BenchCell(suite, "m", "float32", "math")
    before = bench.key()
    finish(bench.searches()["swift"], status="failed", result=None, cause="no trial")
    assert bench.key() == before
    finish(bench.searches()["swift"])
    assert bench.key() != before


def test_the_size_of_a_cell_follows_from_its_settings(tmp_path: Path) -> None:
    search, bench = cells_of(place(tmp_path))[:2]
    assert search.size() == CellSize(tokens=(6 + 4) * 10, seconds=60.0)
    assert bench.size() == CellSize(tokens=3 * 4 * 10)  # plain, generate and swift on each held-out prompt
    unlimited = place(tmp_path, search={"max_new_tokens": 10})
    assert not cells_of(unlimited)[0].size().is_limited
