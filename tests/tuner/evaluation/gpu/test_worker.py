"""The worker runs all steps in order, also after a failed one; as a process it obeys its supervisor."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decoding.decoder import plain_decoder
from decoding.target import Target
from tests.support.families import target_of
from tests.support.paths import ROOT
from tuner.contest.contest import Prompts
from tuner.contest.own_decoding import OwnDecoding
from tuner.evaluation.gpu.contract import OutOfTimeError, Result
from tuner.evaluation.gpu.plan import steps_named
from tuner.evaluation.gpu.process import LOG, PROGRAM, ProcessWorker
from tuner.evaluation.gpu.records import StepRecords
from tuner.evaluation.gpu.report import table
from tuner.evaluation.gpu.shared import Shared
from tuner.evaluation.gpu.side_by_side import SideBySide
from tuner.evaluation.gpu.supervisor import Ended, Finished, Started
from tuner.evaluation.gpu.worker import SPOILT_STATUS, attempt, run_steps
from tuner.measuring.recording import Recorder

SOON = 300.0
"""Seconds to wait for an event of a process."""


@dataclass(frozen=True)
class Step:
    name: str
    work: Callable[[], Result]
    question: str = "?"
    limit_seconds: float = 10.0
    pessimistic_seconds: float = 9.0

    def run(self, shared: Shared, seconds: float) -> Result:
        return self.work()

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        yield str(result)


class Slow(OwnDecoding):
    """Plain decoding that is interrupted when it is asked for the nth time; the first lap of four is not timed."""

    def __init__(self, target: Target, interrupted_at: int | None = None) -> None:
        super().__init__(plain_decoder(target), frozenset(), "plain", {})
        self._left = interrupted_at

    def write(self, prompts: Prompts, max_new_tokens: int, recorder: Recorder) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        super().write(prompts, max_new_tokens, recorder)


class AnsweringShared(Shared):
    """Shared objects on a device that answers until it is spoilt."""

    is_spoilt = False

    def device_answers(self) -> bool:
        return not self.is_spoilt


@pytest.fixture
def shared(tmp_path: Path) -> AnsweringShared:
    return AnsweringShared(tmp_path, "cpu", "demo")


def failing() -> Result:
    raise ValueError("no such\nkernel image")


def test_a_failure_is_recorded_with_its_cause_and_place_and_the_next_step_runs(
    tmp_path: Path, shared: AnsweringShared
) -> None:
    said: list[tuple[str, str]] = []
    records = StepRecords(tmp_path)
    steps = [Step("one", failing), Step("two", lambda: {"value": 2})]
    ends = dict.fromkeys(("one", "two"), time.time() + SOON)
    assert run_steps(steps, shared, records, ends, lambda what, name: said.append((what, name))) == 0
    first, second = records.read("one"), records.read("two")
    assert first is not None
    assert second is not None
    assert first.status == "failed"
    assert first.cause.startswith("ValueError: no such kernel image (at test_worker.py:")
    assert (second.status, second.result) == ("ok", {"value": 2})
    assert said == [("started", "one"), ("finished", "one"), ("started", "two"), ("finished", "two")]


def test_a_spoilt_device_ends_the_process_after_the_record(tmp_path: Path, shared: AnsweringShared) -> None:
    def spoil() -> Result:
        shared.is_spoilt = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    records, ends = StepRecords(tmp_path), dict.fromkeys(("one", "two"), time.time() + SOON)
    status = run_steps([Step("one", spoil), Step("two", dict)], shared, records, ends, lambda what, name: None)
    assert status == SPOILT_STATUS
    assert records.unfinished(["one", "two"]) == ("one", "two")
    assert records.read("two") is None


def test_warnings_of_a_step_are_kept_once_each(shared: AnsweringShared) -> None:
    def warn() -> Result:
        for message in ("a pass cannot be recorded", "a pass cannot be recorded", "another"):
            warnings.warn(message, stacklevel=1)
        return {}

    assert attempt(Step("one", warn), shared, 10.0).warnings == ("a pass cannot be recorded", "another")


def test_an_interrupted_step_keeps_the_part_of_its_result_that_it_has(shared: AnsweringShared) -> None:
    def interrupted() -> Result:
        raise KeyboardInterrupt

    def early() -> Result:
        raise OutOfTimeError({"best_so_far": "exit at 2"})

    nothing, part = (attempt(Step("one", work), shared, 10.0) for work in (interrupted, early))
    assert (nothing.status, nothing.result) == ("given up", None)
    assert (part.status, part.result) == ("given up", {"best_so_far": "exit at 2"})


def test_an_interrupted_comparison_keeps_the_prompts_that_all_have_continued(
    tmp_path: Path, shared: AnsweringShared
) -> None:
    target = target_of("llama")
    contenders = {"plain": Slow(target), "other": Slow(target, interrupted_at=7)}
    prompts = [(3, 1, 4), (1, 5, 9, 2), (6, 5, 3)]

    def compare() -> Result:
        return SideBySide(target, contenders, prompts, max_new_tokens=6).figures()

    record = attempt(Step("rates", compare), shared, 10.0)
    assert record.status == "given up"
    assert record.result is not None
    assert {name: each["texts"] for name, each in record.result["interrupted"].items()} == {"plain": 2, "other": 2}
    assert all(
        each["identical"] == 2 and each["tokens_per_second"] > 0 for each in record.result["interrupted"].values()
    )
    records = StepRecords(tmp_path)
    records.write(record)
    shown = io.StringIO()
    Console(file=shown, width=170).print(table(steps_named(["rates"]), records))
    assert "GIVEN UP: out of time" in shown.getvalue()
    assert "identical 2/2 + 0 ties, interrupted" in shown.getvalue()


PROCESS = """
import json, os, signal, sys, time
order = json.loads(sys.argv[1])
def say(**event): print(json.dumps(event), flush=True)
signal.signal(signal.SIGINT, {on_interrupt})  # before anyone can know that it has started
try:
    say(started="one")
    {body}
except KeyboardInterrupt: pass
say(finished="one")
"""


def process(tmp_path: Path, body: str, on_interrupt: str = "signal.default_int_handler") -> ProcessWorker:
    """Start a process that runs `body` as its only step; an interrupt ends the step, as in the worker, unless it is ignored."""
    program = PROCESS.format(body=body, on_interrupt=on_interrupt)
    worker = ProcessWorker(tmp_path, {"steps": ["one"]}, (sys.executable, "-c", program))
    assert worker.wait(SOON) == Started("one")
    return worker


def test_a_process_reports_its_steps_and_its_end(tmp_path: Path) -> None:
    worker = process(tmp_path, "print('to the log', file=sys.stderr)")
    assert worker.wait(SOON) == Finished("one")
    assert worker.wait(SOON) == Ended("the process ended (exit status 0): to the log")
    worker.kill()
    assert (tmp_path / LOG).read_text() == "to the log\n"


def test_a_death_is_reported_with_its_signal_and_last_words(tmp_path: Path) -> None:
    worker = process(
        tmp_path, "print('Segfault soon', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert worker.wait(SOON) == Ended("the process ended (killed by SIGSEGV): Segfault soon")


def test_an_interrupt_reaches_the_step_as_ctrl_c_does(tmp_path: Path) -> None:
    worker = process(tmp_path, "time.sleep(600)")
    assert worker.wait(0.2) is None
    worker.interrupt()
    assert worker.wait(SOON) == Finished("one")


def test_a_process_that_ignores_the_interrupt_is_killed_with_what_it_started(tmp_path: Path) -> None:
    body = "import subprocess; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    worker = process(tmp_path, body, on_interrupt="signal.SIG_IGN")
    worker.interrupt()
    assert worker.wait(0.2) is None
    worker.kill()
    assert worker.wait(SOON) == Ended("the process ended (killed by SIGKILL)")


def test_the_worker_s_program_runs_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real process, from an order to a record: the step that needs no model."""
    monkeypatch.chdir(ROOT)
    order = {
        "out": str(tmp_path),
        "device": "cpu",
        "preset": "demo",
        "threads": 1,
        "steps": ["environment"],
        "deadlines": {"environment": time.time() + SOON},
    }
    worker = ProcessWorker(tmp_path, order, PROGRAM)
    assert worker.wait(SOON) == Started("environment")
    assert worker.wait(SOON) == Finished("environment")
    ended = worker.wait(SOON)
    assert isinstance(ended, Ended)
    assert "exit status 0" in ended.reason
    record = json.loads((tmp_path / "steps" / "environment.json").read_text())
    assert record["result"]["versions"]["torch"]


SUPERVISOR = """
import subprocess, sys, time
worker = "import os; from tuner.evaluation.gpu.process import end_with; parent = os.getppid(); "
worker += "print('up', flush=True); end_with(parent)"
subprocess.Popen([sys.executable, "-c", worker], process_group=0)
time.sleep(600)
"""


def test_a_worker_ends_when_its_supervisor_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write to one pipe: it ends when the last of them is gone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        supervisor.kill()
        assert supervisor.stdout.read() == ""
