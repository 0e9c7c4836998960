"""A few cases of each check of `sdtune evaluate hardening`."""

from __future__ import annotations

from pathlib import Path

from decoding.errors import ProfileError
from tests.support.records import record
from tuner.evaluation.hardening.bad_inputs import command_lines, refuse_all
from tuner.evaluation.hardening.fuzzing import read_damaged
from tuner.evaluation.hardening.resumption import changed, unlike
from tuner.evaluation.hardening.run import run_checks
from tuner.evaluation.hardening.settings import HardeningEvaluation
from tuner.progress import Unwatched


def test_few_cases_of_each_check_pass(tmp_path: Path) -> None:
    out = tmp_path / "hardening.json"
    settings = HardeningEvaluation(
        command_lines=1,
        documents=20,
        data_sets=0,
        texts=3,
        threaded_texts=10,
        decoding_threads=4,
        kills=0,
        faults=0,
        out=out,
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


def test_a_lost_a_changed_and_a_doubled_trial_are_found() -> None:
    one, two = record(1.5, number=0), record(1.2, number=1)
    before = {(one.study, 0): one, (two.study, 1): two}
    assert changed(before, before) is None
    assert "is lost" in str(changed(before, {(one.study, 0): one}))
    assert "has changed" in str(changed(before, {**before, (two.study, 1): record(1.3, number=1)}))
    assert unlike(before, before) is None
    assert "2 finished trials of conf_layers, and 1 undisturbed" in str(unlike(before, {(one.study, 0): one}))


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
