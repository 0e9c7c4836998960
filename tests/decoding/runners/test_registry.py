"""Every registered runner resolves to a class of its own name, and its name alone tells it apart anywhere else."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from decoding.profile import Decoding
from decoding.runners import PLAIN_RUNNER, RUNNERS, bit_exact_runners, has_bit_exact_mode
from decoding.runners.eager import EagerRunner
from decoding.target import Target
from tests.support.tiny import tiny_llama


class ToyRunner(EagerRunner):
    name = "toy"


@pytest.mark.parametrize("name", RUNNERS)
def test_every_entry_is_a_class_of_that_name(name: str) -> None:
    runner = pkgutil.resolve_name(RUNNERS[name])
    assert runner.name == name
    assert has_bit_exact_mode(name) is runner.has_bit_exact_mode


def test_plain_runner_is_registered_and_bit_exact_runners_are_found() -> None:
    assert PLAIN_RUNNER in RUNNERS
    assert bit_exact_runners() == ("static",)


def test_a_registered_runner_is_built_and_recorded_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNNERS, "toy", f"{__name__}:ToyRunner")
    target = Target(tiny_llama(), "toy")
    assert isinstance(target.runner, ToyRunner)
    assert Decoding(runner=target.runner.name).runner == "toy"


def test_names_are_known_without_torch() -> None:
    asked = "import sys; from decoding.runners import RUNNERS, check_runner_name; check_runner_name('eager')"
    subprocess.run([sys.executable, "-c", f"{asked}; assert 'torch' not in sys.modules"], check=True)
