"""What the steps measure and report, on tiny models and without a GPU."""

from __future__ import annotations

import importlib.util
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.contract import Outputs, Written
from decoding.runners.static import StaticRunner
from decoding.target import Target
from tests.support.fake_graphs import FakeGraphs
from tests.support.paths import ROOT
from tests.support.stale_recorder import Stale
from tests.support.tiny import tiny_llama
from tuner.cli.main import main
from tuner.errors import ConfigError
from tuner.evaluation.gpu.passes import WIDTHS, compare_passes
from tuner.evaluation.gpu.plan import PLAN
from tuner.evaluation.gpu.recorder import TimedRecorder
from tuner.evaluation.gpu.records import StepRecord, StepRecords
from tuner.evaluation.gpu.report import LONGEST_LINE, document, table
from tuner.evaluation.gpu.shared import Shared
from tuner.evaluation.gpu.steps.attention import AttentionBackends
from tuner.evaluation.gpu.steps.benching import ProfileBench
from tuner.evaluation.gpu.steps.features import pays
from tuner.evaluation.gpu.steps.replays import ReplayError, refuse_differences
from tuner.evaluation.gpu.steps.searching import search_config

MOST_CHARACTERS = 12_000
"""Output that comes back whole from the machine that the plan is for."""
CONTEXT = 20


def static(recorder: object) -> Target:
    """Return a tiny model whose passes are recorded, in the shapes of a GPU."""
    runner = partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder)
    return Target(tiny_llama(4), runner)


def test_recorded_passes_of_every_shape_agree_with_eager_ones() -> None:
    recorder = TimedRecorder(FakeGraphs())
    found = compare_passes(static(recorder), Target(tiny_llama(4)), (CONTEXT,))
    assert found["differing"] == []
    assert found["worst"] < 1e-4
    assert found["shapes"] == 2 * len(WIDTHS) + 4, "whole passes, their last positions, a draft step, and three chains"
    assert recorder.num_recorded == len(recorder.seconds) > 0


def test_replays_that_compute_nothing_are_found() -> None:
    """The first run of a shape is right, the replays are not."""
    target = static(FakeGraphs())
    target.runner._recorder = Stale((Outputs, Written))  # type: ignore[attr-defined] # after the check of a new target
    found = compare_passes(target, Target(tiny_llama(4)), (CONTEXT,))
    assert len(found["differing"]) > len(WIDTHS)
    assert all(f"after {CONTEXT} tokens" in each for each in found["differing"])
    with pytest.raises(ReplayError, match="comparisons with eager passes fail: "):
        refuse_differences({**found, "batches": None})


def test_any_difference_refuses() -> None:
    good = {"differing": [], "texts": {"plain": True}, "batches": None}
    assert refuse_differences(good) == good
    for bad in ({"texts": {"plain": False}}, {"batches": "other logits"}, {"differing": ["2 positions"]}):
        with pytest.raises(ReplayError, match="1 comparisons"):
            refuse_differences({**good, **bad})


@pytest.mark.parametrize(
    ("value", "low", "lossless", "expected"),
    [(1.05, 1.01, True, True), (1.01, 1.005, True, False), (1.05, 0.99, True, False), (1.5, 1.4, False, False)],
)
def test_a_feature_pays_if_it_is_worthwhile_certain_and_lossless(
    value: float, low: float, lossless: bool, expected: bool
) -> None:
    assert pays({"value": value, "ci95": [low, 2.0]}, lossless=lossless) is expected


def test_attention_is_timed_by_every_backend_that_runs(tmp_path: Path) -> None:
    step = AttentionBackends(contexts=(16, 32), calls=2)
    result = step.run(Shared(tmp_path, "cpu", "demo"), 10.0)
    assert [(row["context"], row["width"]) for row in result["rows"]] == [(16, 1), (16, 5), (32, 1), (32, 5)]
    for row in result["rows"]:
        assert row["microseconds"]["math"] > 0
        assert "cudnn" in row["failed"], "a CPU has no such backend, and the reason is told"
    assert len(list(step.lines(result))) == 4


def test_the_search_is_configured_for_the_model_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shared = Shared(tmp_path, "cpu", "demo")
    config = search_config(shared, 50.0)
    assert config.studies == {"joint": {"exit_layers": [2, 5, 8, 10]}}
    assert (config.runner, config.timeout) == ("static", 50.0)
    # The heads are the widened model's, and a second process finds them.
    written = {path.name: path.stat().st_mtime_ns for path in shared.heads_folder.iterdir()}
    assert sorted(written) == [f"exit_head_{layer}.safetensors" for layer in (10, 2, 5, 8)]
    again = Shared(tmp_path, "cpu", "demo")
    assert {path.name: path.stat().st_mtime_ns for path in again.heads_folder.iterdir()} == written
    assert again.description.endswith("8 of 32 layers are identities, 4,096 of 8,192 tokens are padding)")


def test_a_bench_needs_the_profile_of_a_search(tmp_path: Path) -> None:
    bench = next(step for step in PLAN if isinstance(step, ProfileBench))
    with pytest.raises(ConfigError, match="the search wrote none"):
        bench.run(Shared(tmp_path, "cpu", "demo"), 10.0)


def test_tiny_models_are_random_but_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = (Shared(tmp_path, "cpu", "demo").tiny() for _ in range(2))
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_report_tells_failures_warnings_and_what_was_not_run(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    facts = {"status": "failed", "cause": "out of memory", "warnings": ("a pass cannot be recorded",)}
    records.write(StepRecord(name="rates", seconds=3.2, **facts))
    shown = io.StringIO()
    Console(file=shown, width=170).print(table(PLAN, records))
    assert "FAILED: out of memory" in shown.getvalue()
    assert "warning: a pass cannot be recorded" in shown.getvalue()
    found = document(PLAN, records, preset="demo", not_run=["search"])
    steps = {each["name"]: each for each in found["steps"]}
    assert steps["rates"]["cause"] == "out of memory"
    assert steps["search"]["cause"] == "no time was left: run the same command again"
    assert steps["switch"]["status"] == "not run"


def test_the_table_is_short_even_if_everything_fails_at_length(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    for step in PLAN:
        facts = {"status": "failed", "cause": "x" * 600, "warnings": ("y" * 600,) * 9}
        records.write(StepRecord(name=step.name, seconds=100.0, **facts))
    shown = io.StringIO()
    Console(file=shown, width=170).print(table(PLAN, records))
    lines = shown.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= LONGEST_LINE + 40
    assert sum(len(line.rstrip()) + 1 for line in lines) < MOST_CHARACTERS


def test_missing_packages_are_named_at_once_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name in ("mlflow", "sklearn") else found(name, package)

    monkeypatch.setattr("tuner.evaluation.gpu.packages.find_spec", without)
    refused = CliRunner().invoke(main, ["evaluate", "gpu", "--device", "cpu"])
    assert refused.exit_code == 2
    (line,) = refused.stderr.strip().splitlines()
    assert "packages are missing: mlflow scikit-learn; pip install mlflow scikit-learn" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "rate"], "unknown step 'rate'; did you mean 'rates'"),
        (["--device", "nowhere"], "no device 'nowhere'"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["evaluate", "gpu", "--device", "cpu", *flags])
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (tmp_path / "gpu").exists()


def test_a_folder_without_the_demo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["evaluate", "gpu", "--device", "cpu"])
    assert refused.exit_code == 2
    assert "run the command in a checkout of sdtune" in refused.stderr
