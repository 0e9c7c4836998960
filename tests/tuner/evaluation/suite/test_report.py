"""Tables of a suite from results on disk, without a model."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.suites import bench_found, search_found
from tuner.bench.contenders import PLAIN
from tuner.evaluation.suite.bench_cell import BenchCell
from tuner.evaluation.suite.contract import Cell, Place
from tuner.evaluation.suite.document import Suite
from tuner.evaluation.suite.plan import cells_of
from tuner.evaluation.suite.records import CellRecord
from tuner.evaluation.suite.report import overall_figures, suite_csv, suite_json, suite_report, width
from tuner.evaluation.suite.result import BenchFound, SearchFound
from tuner.progress import Unwatched

PLAIN_SECONDS = [2.0, 2.2, 1.8, 2.0]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A suite in which `joint` gains on math and loses on qa, where its search keeps plain decoding."""
    suite = Suite.model_validate(
        {
            "models": {"m": {"model": "somewhere"}},
            "tasks": {"math": {"dataset": "math.jsonl"}, "qa": {"dataset": "qa.jsonl"}},
            "methods": ["joint"],
            "baselines": ["hf"],
            "transfer": ["joint"],
            "search": {"distill": "never"},
        }
    )
    place = Place(suite, tmp_path)
    benches = {task: BenchCell(place, "m", "float32", task) for task in suite.tasks}
    for task, claims in (("math", True), ("qa", False)):
        done(benches[task].searches()["joint"], search_found(claims_speedup=claims))
    done(benches["math"], compared(joint=2.0, moved=1.25, tuned_on="qa"))
    done(benches["qa"], compared(joint=0.8, moved=1.0, tuned_on="math"))
    return place


def done(cell: Cell, result: SearchFound | BenchFound) -> None:
    record = CellRecord(id=cell.id, key=cell.key(), status="ok", seconds=1.0, result=result.model_dump(mode="json"))
    cell.place.records.write(record)  # type: ignore[attr-defined]


def compared(*, joint: float, moved: float, tuned_on: str) -> BenchFound:
    """A comparison in which every prompt has the same speed-ups."""
    factors = {PLAIN: 1.0, "hf": 0.5, "joint": joint, f"joint@{tuned_on}": moved}
    return bench_found({name: [each / factor for each in PLAIN_SECONDS] for name, factor in factors.items()})


def shown(place: Place) -> str:
    text, report = io.StringIO(), suite_report(place, cells_of(place))
    Console(width=width(report), file=text, color_system=None).print(report)
    return text.getvalue()


def row(text: str, title: str, name: str) -> list[str]:
    """The cells of a line in the table below `title`."""
    lines = text[text.index(title) :].splitlines()
    return next(line for line in lines[1:] if line.strip().startswith(name)).split()


def test_the_table_has_tasks_and_their_geometric_mean(place: Place) -> None:
    cells = row(shown(place), "decode speed-up over plain decoding", "joint")
    assert cells[1:] == [
        "2.00",
        "[2.00,",
        "2.00]",
        "0.80",
        "[0.80,",
        "0.80]*",
        *["1.26", "[1.26,", "1.26]"],
        *AS_DECIDED,
    ]


AS_DECIDED = ["1.41", "[1.41,", "1.41]"]
"""Twice as fast on math, and plain decoding on qa, as the searches decided."""


def test_other_references_have_tables_of_their_own(place: Place) -> None:
    text = shown(place)
    assert row(text, "speed-up over transformers' generate", "joint")[1] == "4.00"
    end_to_end = sum(s + 0.5 for s in PLAIN_SECONDS) / sum(s / 2 + 0.5 for s in PLAIN_SECONDS)
    assert row(text, "end-to-end speed-up", "joint")[1] == f"{end_to_end:.2f}"
    assert row(text, "acceptance length", "joint")[1:] == ["1.00", "1.00"]
    assert row(text, "identical to plain", "joint")[1:] == ["4/4", "4/4"]


def test_no_cell_of_a_wide_table_is_broken(tmp_path: Path) -> None:
    tasks = {f"a-task-with-a-long-name-{number}": {"dataset": f"{number}.jsonl"} for number in range(5)}
    methods = ["joint", "exit_layer"]
    document = {"models": {"m": {"model": "somewhere"}}, "tasks": tasks, "methods": methods, "baselines": []}
    place = Place(Suite.model_validate({**document, "search": {"distill": "never"}}), tmp_path)
    for number, task in enumerate(tasks):
        bench = BenchCell(place, "m", "float32", task)
        for method in methods:
            done(bench.searches()[method], search_found())
        factors = {PLAIN: 1.0, "joint": 12.5} | ({"exit_layer": 12.5} if number else {})
        done(bench, bench_found({name: [each / factor for each in PLAIN_SECONDS] for name, factor in factors.items()}))
    line = row(shown(place), "decode speed-up over plain decoding", "exit_layer")
    assert line[1:] == ["-", *4 * ["12.50", "[12.50,", "12.50]"], *2 * ["12.50", "[12.50,", "12.50]", "(4", "tasks)"]]


def test_a_method_that_found_nothing_better_than_plain_decoding_has_its_figures(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = BenchCell(place, "m", "float32", "qa")
    done(bench.searches()["joint"], search_found(claims_speedup=False).model_copy(update={"is_measurable": False}))
    held = bench_found({PLAIN: PLAIN_SECONDS, "joint@math": PLAIN_SECONDS})
    monkeypatch.setattr("tuner.evaluation.suite.contest.hold", lambda *given, **named: held)
    done(bench, BenchFound.model_validate(bench.run(Unwatched())))
    assert row(shown(place), "decode speed-up over plain decoding", "joint")[4:7] == ["1.00", "[1.00,", "1.00]*"]
    lines = csv.DictReader(io.StringIO(suite_csv(place)))
    own = next(line for line in lines if (line["task"], line["tuned_on"]) == ("qa", "qa"))
    assert (own["method"], float(own["decode_over_plain"]), own["keeps_plain"]) == ("joint", 1.0, "True")


def test_the_transfer_table_has_the_task_of_tuning_in_its_rows(place: Place) -> None:
    text = shown(place)
    assert row(text, "where it was not tuned", "math")[1::3] == ["2.00", "1.00", "1.00"]
    assert row(text, "where it was not tuned", "qa")[1::3] == ["1.25", "0.80", "1.25"]


def test_it_says_where_nothing_beats_plain_decoding(place: Place) -> None:
    text = shown(place)
    assert "qa: nothing beats plain decoding with 95 % confidence; the best is joint, 0.80" in text
    assert "math: nothing beats" not in text


def test_it_says_which_prompts_were_left_out(place: Place) -> None:
    bench = BenchCell(place, "m", "float32", "qa")
    found = compared(joint=0.8, moved=1.0, tuned_on="math")
    done(bench, found.model_copy(update={"facts": {**found.facts, "prompt_notes": ["1 of 9 prompts are too long"]}}))
    text = shown(place)
    assert "qa: 1 of 9 prompts are too long" in text
    assert "math: 1 of 9" not in text


def test_failures_and_missing_cells_are_named(place: Place) -> None:
    bench = BenchCell(place, "m", "float32", "qa")
    failed = {"status": "failed", "seconds": 1.0, "cause": "no such dataset"}
    place.records.write(CellRecord(id=bench.id, key=bench.key(), **failed))  # type: ignore[arg-type]
    (place.records.folder("m/float32/qa/joint") / "record.json").unlink()
    text = shown(place)
    assert "3 of 4 cells have not run yet" in text  # both comparisons counted with the draft that is gone
    bench = BenchCell(place, "m", "float32", "qa")
    place.records.write(CellRecord(id=bench.id, key=bench.key(), **failed))  # type: ignore[arg-type]
    assert "m/float32/qa/bench failed: no such dataset" in shown(place)


def test_the_csv_has_a_line_per_task_and_contender_with_the_names_of_aiperf(place: Place) -> None:
    lines = list(csv.DictReader(io.StringIO(suite_csv(place))))
    moved = next(line for line in lines if (line["task"], line["tuned_on"]) == ("qa", "math"))
    assert (moved["method"], float(moved["decode_over_plain"]), moved["keeps_plain"]) == ("joint", 1.0, "False")
    names = {"time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput_per_user"}
    assert names | {"mean_acceptance_length", "num_spec_steps", "end_to_end_over_generate_low"} <= set(moved)
    assert len(lines) == 2 * 4


def test_the_json_has_every_cell_and_the_means(place: Place) -> None:
    document = suite_json(place, cells_of(place))
    assert document["cells"]["m/float32/math/joint"]["status"] == "ok"
    means: dict[str, Any] = {line["method"]: line for line in overall_figures(place)}
    assert means["joint"]["decode"]["value"] == pytest.approx(1.6**0.5)
    assert means["joint"]["decode_as_decided"]["value"] == pytest.approx(2**0.5)
