"""A few cases of each check of `sdtune evaluate hardening`."""

from __future__ import annotations

from pathlib import Path

from decoding.errors import ProfileError
from tuner.evaluation.hardening.bad_inputs import command_lines, refuse_all
from tuner.evaluation.hardening.fuzzing import read_damaged
from tuner.evaluation.hardening.run import run_checks
from tuner.evaluation.hardening.settings import HardeningEvaluation
from tuner.progress import Unwatched


def test_few_cases_of_each_check_pass(tmp_path: Path) -> None:
    out = tmp_path / "hardening.json"
    settings = HardeningEvaluation(
        command_lines=1, documents=20, data_sets=0, texts=3, threaded_texts=10, decoding_threads=4, out=out
    )
    assert run_checks(settings, Unwatched()).succeeded
    assert '"damaged profiles": {' in out.read_text()


def test_failures_are_found(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        raise KeyError(path.read_text())

    tally = read_damaged(
        "x", ["a: 1\n"], read, ProfileError, tmp_path / "x.yaml", num_cases=3, seed=0, progress=Unwatched()
    )
    assert len(tally.failures) == tally.num_cases == 3
    tally, _ = refuse_all(tmp_path, [("--version",)], Unwatched())
    assert "status 0" in tally.failures[0]


def test_every_command_is_among_the_command_lines() -> None:
    lines = command_lines()
    assert len(lines) > 150
    assert {line[0] for line in lines} >= {
        "search",
        "distill",
        "show",
        "generate",
        "export",
        "doctor",
        "bench",
        "evaluate",
    }
