"""An engine's process: waited for, stopped in any case, and answered for in one line when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_stub import write_llama_cpp
from tuner.engines import guard
from tuner.engines.contract import Launch
from tuner.engines.server import Client, free_port, parse_counters, reason_in, serving
from tuner.errors import EngineError


@pytest.fixture
def server(tmp_path: Path) -> str:
    return str(write_llama_cpp(tmp_path / "llama.cpp") / "build" / "bin" / "llama-server")


def test_the_engine_answers_within_the_context_and_has_ended_after_it(server: str, tmp_path: Path) -> None:
    client = Client(free_port(), "llama.cpp")
    launch = Launch((server, "--port", str(client.port)))
    with serving(launch, client, tmp_path / "log", start_seconds=300):
        assert client.is_healthy()
        assert client.counters()["llamacpp:spec_decode_num_drafts_total"] == 0
    assert not client.is_healthy()


def test_an_engine_that_ends_early_is_reported_with_its_own_words(server: str, tmp_path: Path) -> None:
    client = Client(free_port(), "llama.cpp")
    with (
        pytest.raises(EngineError, match=r"status 1 before it answered: error: invalid argument: --broken"),
        serving(Launch((server, "--broken")), client, tmp_path / "log", start_seconds=300),
    ):
        pass


def test_an_engine_that_never_answers_is_stopped(tmp_path: Path) -> None:
    client = Client(free_port(), "llama.cpp")
    with (
        pytest.raises(EngineError, match="did not answer within 0 s: it wrote nothing"),
        serving(Launch(("sleep", "600")), client, tmp_path / "log", start_seconds=0),
    ):
        pass


def test_the_guard_ends_the_engine_when_its_parent_is_gone() -> None:
    command = [sys.executable, "-I", guard.__file__, "sh", "-c", "echo on; exec sleep 600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.stdin.close()  # what the end of the parent does
        assert process.stdout.read() == b""
        assert process.wait(300) == -15 % 256


def test_counters_are_summed_over_labels() -> None:
    text = '# HELP a b\n# TYPE a counter\na{position="0"} 3\na{position="1"} 2.5\nvllm:b_total{model_name="x y"} 1e3\n'
    assert parse_counters(text) == {"a": 5.5, "vllm:b_total": 1000.0}


def test_a_refused_request_is_reported_in_one_line() -> None:
    with pytest.raises(EngineError, match=r"llama.cpp does not answer /completion: .*refused"):
        Client(free_port(), "llama.cpp").post("/completion", {})


def test_of_several_exceptions_the_first_is_told_with_the_last(tmp_path: Path) -> None:
    """vLLM's later ones say that it is above; what a warning quotes is none."""
    log = tmp_path / "log"
    log.write_text(
        "WARNING [utils.py:1] Found a limit, which can cause `OSError: [Errno 24]`\n"
        "(Worker pid=7) ERROR 11-27 [executor.py:953] Traceback (most recent call last):\n"
        "(Worker pid=7) ERROR 11-27 [executor.py:953]     raise ValueError(\n"
        "(Worker pid=7) ERROR 11-27 [executor.py:953] ValueError: Available memory is less than desired\n"
        "Exception: WorkerProc initialization failed\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    first, last = reason_in(log).split(" | ")
    assert first == "ValueError: Available memory is less than desired"
    assert last.startswith("RuntimeError: Engine core")
