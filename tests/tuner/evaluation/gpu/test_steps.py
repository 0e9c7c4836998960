"""What the steps measure and report, on tiny models and without a GPU."""

from __future__ import annotations

import importlib.util
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import Tensor

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.drafts import EarlyExit
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.contract import Outputs, Written
from decoding.runners.features import NO_FEATURES
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.fake_graphs import FakeGraphs
from tests.support.families import build
from tests.support.paths import ROOT
from tests.support.recorders import CountingRecorder, unchecked
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
from tuner.evaluation.gpu.steps.attention import (
    CHOSEN,
    HEAD_DIM,
    HEADS,
    KEY_VALUE_HEADS,
    VARLEN,
    AttentionBackends,
    calls_of,
)
from tuner.evaluation.gpu.steps.benching import ProfileBench
from tuner.evaluation.gpu.steps.compiling import Compilation
from tuner.evaluation.gpu.steps.features import FEATURE_STEPS, pays
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
        assert row["microseconds"][CHOSEN] > 0
        assert "cudnn" in row["failed"], "a CPU has no such backend, and the reason is told"
        assert "runs on CUDA only" in row["failed"][VARLEN]
    assert len(list(step.lines(result))) == 4


def test_attention_is_called_as_a_recorded_pass_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and mask of the timed call are those of a model of the same heads in the static runner."""
    seen: list[tuple[object, ...]] = []
    genuine = torch.nn.functional.scaled_dot_product_attention

    def watched(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: object
    ) -> Tensor:
        assert attn_mask is not None
        seen.append((query.shape, key.shape, attn_mask.shape, attn_mask.dtype, sorted(settings)))
        return genuine(query, key, value, attn_mask=attn_mask, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("decoding.target.attention.scaled_dot_product_attention", watched)
    config = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS}
    model = build("llama", num_hidden_layers=1, head_dim=HEAD_DIM, intermediate_size=8, **config)
    with unchecked():
        target = Target(model, partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=CountingRecorder()))
    cache = target.new_cache(64)
    ids = torch.randint(8, (1, 24))
    with torch.inference_mode():
        target.forward(ids[:, :16], cache, 0)
        for width in (1, 5):
            seen.clear()
            target.forward(ids[:, 16 : 16 + width], cache, 16)
            calls_of(torch.device("cpu"), 16, width)[CHOSEN]()
            assert len(seen) == 2
            assert seen[0] == seen[1]


def test_whole_rounds_are_measured_on_a_draft_that_has_them() -> None:
    """The feature changes the replays of its step's draft, which an exit with a head would not."""
    (step,) = [each for each in FEATURE_STEPS if each.feature == "whole_rounds"]
    assert step.rule is not None
    replays = []
    for features in (NO_FEATURES, step.features):
        graphs = FakeGraphs()
        with unchecked():
            target = Target(
                tiny_llama(4),
                partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=graphs, features=features),
            )
        shared = SimpleNamespace(
            exit_draft=EarlyExit(exit_layer=2, head="exit_head_2.safetensors", head_sha256="0" * 64)
        )
        decoder = Decoder(target, step.draft(cast(Shared, shared)), step.rule)
        request = Request(range(5, 15), Ending(16))
        decoder.generate(request)
        before = graphs.num_replayed
        decoder.generate(request)
        replays.append(graphs.num_replayed - before)
    assert replays[1] < replays[0]


def test_the_compiler_s_step_decodes_with_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.runners.static.CompiledBlocks", lambda *_: None)
    monkeypatch.setattr(Shared, "tiny", lambda self: tiny_llama(4))
    shared = Shared(tmp_path, "cpu", "demo")
    shared.__dict__["static"] = Target(tiny_llama(4), "static")
    result = Compilation().run(shared, 10.0)
    assert result["tiny_seconds"] > 0
    assert result["wide_seconds"] > 0
    assert len(list(Compilation().lines(result))) == 1


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
