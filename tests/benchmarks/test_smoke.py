"""A short run of each benchmark on a tiny model: `pytest -n 0 -m benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.demo_model import train
from benchmarks.demo_model.corpus import LIBRARY, Corpus
from benchmarks.steps import run_step
from benchmarks.widening import Widths, widen
from decoding.drafts import SuffixDraft
from tests.support.engine_stub import write_llama_cpp
from tests.support.heads import write_heads
from tests.support.paths import DEMO
from tests.support.profiles import save_profile
from tests.support.tiny import WORDS, save_tiny_checkpoint, tiny_llama, tiny_target

pytestmark = pytest.mark.benchmarks
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder: a tiny model, 40 prompts of two tasks, and a cache of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_tiny_checkpoint(tmp_path / "model")
    rows = [
        {"prompt": " ".join(WORDS[(7 * row + 3 * word) % 62] for word in range(8)), "task": "ab"[row % 2]}
        for row in range(40)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def run(here: Path) -> Run:
    """Return a function that runs a benchmark and returns its results."""

    def run(name: str, *arguments: str, **settings: object) -> dict[str, Any]:
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        found = run_step(
            f"benchmarks.{name}", *arguments, *given, results=here / "results" / f"{name}.json", timeout=900
        )
        assert not isinstance(found.get("failed"), str), (here / "results" / f"{name}.log").read_text()
        return found

    return run


def test_a_step_that_fails_says_why(here: Path) -> None:
    assert run_step("benchmarks.steps", results=here / "nothing.json") == {"failed": "exit status 0: no output"}
    assert "exit status 1" in run_step("benchmarks.absent", results=here / "nothing.json")["failed"]


SEARCH = ("--model", "model", "--dataset", "prompts.jsonl", "--threads", "1")
SIZES = {"tuning_prompts": 4, "held_out_prompts": 4, "prompts_per_trial": 4, "max_new_tokens": 12}


def test_kinds(here: Path, run: Run) -> None:
    write_heads(tiny_target(), here / "heads", [2])
    found = run(
        "kinds",
        *SEARCH,
        "--max-tokens",
        "3",
        "--bits",
        "8",
        "--skip-sets",
        "8",
        heads="heads",
        category_column="task",
        **SIZES,
    )
    rows = {row["kind"]: row for row in found["kinds"]}
    assert {"prompt lookup", "suffix automaton", "int8", "exit", "exit with head"} < set(rows)
    assert all(row["identical"] == row["prompts"] for row in rows.values())
    assert rows["int8"]["MiB"] > rows["exit"]["MiB"]
    assert {each["kind"] for each in found["additions"]} >= {"lookup", "exit", "int8"}
    assert (here / "results" / "kinds.csv").read_text().count("\n") == len(rows) + 1


def test_rules(here: Path, run: Run) -> None:
    save_profile(here / "profile.yaml", "model", SuffixDraft())
    data = ("--profile", "profile.yaml", "--dataset", "prompts.jsonl", "--threads", "1")
    found = run("rules", *data, "--max-tokens", "2", tuning_prompts=4, held_out_prompts=6, max_new_tokens=12)
    rows = {row["rule"]: row for row in found["table"]}
    assert {"fixed 1", "fixed 2", "ada_edl", "the profile's own"} < set(rows)
    assert sum("*" in row["all"] for row in rows.values()) == 1
    assert all(row["identical"] == row["prompts"] for row in rows.values())


def test_llama_cpp(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(write_llama_cpp(here / "llama.cpp")))
    save_profile(here / "profile.yaml", "model", SuffixDraft())
    (here / "Q8_0").mkdir()
    found = run("llama_cpp", "Q8_0", "--profile", "profile.yaml", *SEARCH, **SIZES)
    rows = {row["contender"]: row for row in found["rows"]}
    assert rows["profile"]["identical"] == rows["profile"]["prompts"]
    assert rows["Q8_0"]["identical"] == 0, "the stub's texts are its own"
    assert set(found["samples"]) == set(rows)


def test_predictions(here: Path, run: Run) -> None:
    options = ("--configurations", "5", "--prompts", "3", "--max-tokens", "3")
    found = run("predictions", *SEARCH, *options, category_column="task", **SIZES)
    rows = {row["configurations"]: row for row in found["accuracy"]}
    assert rows["all"]["count"] == 5
    assert rows["all"]["median error"] >= 0
    assert {"all, corrected by all others", "all: cost of a round", "category a"} <= set(rows)
    assert (here / "results" / "predictions.csv").read_text().count("\n") == 6


def test_searches(here: Path, run: Run) -> None:
    found = run("searches", "joint", "swift", "odd_layers", *SEARCH, "--trials", "2", "--seeds", "1", **SIZES)
    rows = {row["search"]: row for row in found["table"]}
    assert (rows["joint"]["trials"], rows["swift"]["trials"], rows["odd_layers"]["trials"]) == (2, 2, 1)
    assert all(row["not identical"] == 0 for row in rows.values())
    assert (here / "results" / "searches.csv").read_text().count("\n") == 6


def test_suite(here: Path, run: Run) -> None:
    tasks = ("--tasks", "a=prompts.jsonl#task=a", "--methods", "conf_layers", "odd_layers", "absent")
    sizes = {**SIZES, "prompts_per_trial": 2, "trials": 1, "finalists": 1}
    found = run("suite", "--models", "tiny=model", *tasks, "--threads", "1", "--out", "suite", **sizes)
    assert [row["method"] for row in found["table"]] == ["conf_layers", "odd_layers"]
    assert all(row["not lossless"] == 0 for row in found["table"])
    (failed,) = found["failed"]
    assert "unknown study 'absent'" in failed["cause"]


def test_demo_model_is_trained_and_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(LIBRARY / name for name in ("copy.py", "bisect.py", "heapq.py"))
    monkeypatch.setattr(train, "library_corpus", lambda with_tests: Corpus(files[:2], files[2:]))
    tiny = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "mlp_size": 16, "vocabulary_size": 300, "context": 64}
    sizes = {**tiny, "max_positions": 64, "steps": 4, "batch_size": 1, "checkpoint_every": 2}
    options = [part for key, value in sizes.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    monkeypatch.setattr("sys.argv", ["train", *options, "--no-tests", "--out", "trained"])
    train.main()
    found = json.loads((here / "trained" / "training.json").read_text())
    assert found["held_out"]["nats_per_token"] > 0
    assert json.loads((here / "trained" / "held_out_files.json").read_text()) == ["heapq.py"]
    assert AutoModelForCausalLM.from_pretrained("trained", trust_remote_code=False).config.num_hidden_layers == 3


@pytest.mark.parametrize("kind", ["prose", "tables", "asserts", "fills"])
def test_demo_prompts_are_those_of_the_repository(here: Path, kind: str) -> None:
    from benchmarks.demo_model.prompts import KINDS

    written = [json.loads(line)["prompt"] for line in (DEMO / f"{kind}.jsonl").read_text().splitlines()]
    assert list(KINDS[kind](32, 0)) == written


def test_a_widened_model_computes_what_its_source_computes() -> None:
    source, wide = tiny_llama(3), Widths(96, 200, 12, 3, 24, 4, 200)
    widened = widen(source, wide, dtype=torch.float32)
    assert Widths.of(widened.config) == wide
    tokens = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = source(tokens).logits, widened(tokens).logits
    assert (found[..., 64:].amax(-1) < found[..., :64].amax(-1) - 10).all(), "padding is never chosen"
    torch.testing.assert_close(found[..., :64], wanted, rtol=1e-4, atol=1e-3)
