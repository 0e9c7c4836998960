"""`sdtune jobs` against services that lie, and what commands print of texts of others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from rich.console import Console

from tests.support.service import listening
from tuner.cli.main import main
from tuner.cli.terminal import TerminalProgress, print_facts, print_sample, visible
from tuner.inputs.prompts import Prompt

JOB = "0123456789abcdef"
HEAD = b"the bytes of a head"
ESCAPE = "\x1b]0;pwned\x07\x1b[2J\x9b1m\u202e"
SEARCH = {"id": JOB, "state": "finished", "queue": "q", "model": "m", "dataset": "d", "created_seconds": 0.0}


def profile(head: str = "profile.exit-2.safetensors", sha256: str = hashlib.sha256(HEAD).hexdigest()) -> dict[str, Any]:
    target = {"model": "m", "architecture": "a", "num_layers": 4, "dtype": "float32"}
    return {
        "schema": "sdtune/v1",
        "name": "served",
        "target": {**target, "config_sha256": "0", "weights_sha256": "0"},
        "draft": {"kind": "early_exit", "exit_layer": 2, "head": head, "head_sha256": sha256},
    }


@contextmanager
def answering(files: list[str], given: dict[str, Any], head: bytes = HEAD, **search: Any) -> Iterator[str]:
    """Run a service whose one search has this profile and these files."""
    app = FastAPI()
    result = {"profile": yaml.safe_dump(given), "files": files, "claims_speedup": True, "rows": [], "mlflow_run": "r"}

    @app.get("/v1/searches/{job}/result")
    def _(job: str) -> Any:
        return {**result, "report": f"tables {ESCAPE}\nend"}

    @app.get("/v1/searches/{job}/files/{number}")
    def _(job: str, number: int) -> Response:
        return Response(head)

    @app.get("/v1/searches")
    def _() -> Any:
        return [{**SEARCH, **search}]

    with listening(app) as address:
        yield address


def jobs(address: str, *given: object) -> Result:
    return CliRunner().invoke(main, ["jobs", "--address", address, *map(str, given)])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_profile_and_its_heads_are_fetched_and_again_and_nothing_else_is_written(tmp_path: Path) -> None:
    named = profile()["draft"]["head"]
    with answering(["conftest.py", named, "../.bashrc"], profile()) as address:
        for _ in range(2):
            fetched = jobs(address, "fetch", JOB, "--out", tmp_path / "profile.yaml")
            assert fetched.exit_code == 0, fetched.output
        other = jobs(address, "fetch", JOB, "--out", tmp_path / "other.yaml")
    assert other.exit_code == 0, "the head is the same"
    assert set(contents(tmp_path)) == {"profile.yaml", "other.yaml", named}
    assert contents(tmp_path)[named] == HEAD
    assert "tables \\x1b]0;pwned\\x07\\x1b[2J\\x9b1m\\u202e\nend" in fetched.output


@pytest.mark.parametrize("name", ["conftest.py", "../x.safetensors", "a\x1b.safetensors"])
def test_a_profile_that_names_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with answering([name], profile(name)) as address:
        refused = jobs(address, "fetch", JOB, "--out", tmp_path / "profile.yaml")
    assert refused.exit_code == 2
    assert refused.output.count("\n") == 1
    assert refused.output[:-1].isprintable()
    assert not contents(tmp_path)


def test_a_head_with_other_contents_or_none_is_refused(tmp_path: Path) -> None:
    named = profile()["draft"]["head"]
    for files, head, why in (([named], b"another", "its contents differ"), ([], HEAD, "the service has no")):
        with answering(files, profile(), head) as address:
            refused = jobs(address, "fetch", JOB, "--out", tmp_path / "profile.yaml")
        assert refused.exit_code == 2
        assert why in refused.output
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    "there",
    [{"profile.exit-2.safetensors": b"trained for a night"}, {"profile.yaml": b"schema: sdtune/v1\nname: mine\n"}],
)
def test_what_another_wrote_is_not_replaced(tmp_path: Path, there: dict[str, bytes]) -> None:
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with answering([profile()["draft"]["head"]], profile()) as address:
        refused = jobs(address, "fetch", JOB, "--out", tmp_path / "profile.yaml")
    assert refused.exit_code == 2
    assert "is there already" in refused.output
    assert contents(tmp_path) == there


def test_a_link_at_the_place_of_a_head_is_not_followed(tmp_path: Path) -> None:
    named = profile()["draft"]["head"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / named).symlink_to(tmp_path / "elsewhere")
    with answering([named], profile()) as address:
        refused = jobs(address, "fetch", JOB, "--out", tmp_path / "out" / "profile.yaml")
    assert refused.exit_code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_service_says_is_printed_visibly() -> None:
    with answering([], profile(), state="failed", error=ESCAPE, model=ESCAPE, dataset=ESCAPE) as address:
        listed, as_data = jobs(address, "list"), jobs(address, "list", "--json")
    assert listed.exit_code == 0
    assert json.loads(as_data.output)[0]["error"] == ESCAPE
    assert listed.output[:-1].isprintable()
    assert as_data.output.isascii()
    assert listed.output.count("\\x1b]0;pwned") == 3


def test_an_answer_that_is_none_of_a_service_is_an_error_in_one_line() -> None:
    with answering([], profile(), state=ESCAPE) as address:
        listed = jobs(address, "list")
        absent = jobs(address, "cancel", JOB)
        no_name = jobs(address, "cancel", ESCAPE)
    for refused in (listed, absent, no_name):
        assert refused.exit_code == 2
        assert refused.output.count("\n") == 1
        assert refused.output[:-1].isprintable()


def test_a_watch_waits_for_a_service_whose_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    answers = iter([(200, "running"), (503, ""), (200, "finished")])

    @app.get("/v1/searches/{job}")
    def _(job: str) -> Any:
        status, state = next(answers)
        return JSONResponse({**SEARCH, "state": state}, status)

    monkeypatch.setattr("tuner.service.client.WATCH_SECONDS", 0.0)
    with listening(app) as address:
        watched = jobs(address, "watch", JOB)
    assert watched.exit_code == 0, watched.output
    assert [line.split()[1] for line in watched.output.splitlines()] == ["running", "finished"]


def test_the_token_goes_to_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    proxy = FastAPI()

    @proxy.middleware("http")
    async def _(request: Request, call_next: Any) -> Response:
        asked.append(request.headers.get("authorization", ""))
        return Response(json.dumps([SEARCH]))

    monkeypatch.setenv("SDTUNE_SERVICE_TOKEN", "secret")
    with listening(proxy) as elsewhere, answering([], profile()) as address:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, elsewhere)
        assert jobs(address, "list").exit_code == 0
        assert jobs("http://service.invalid:8400", "list").exit_code == 2, "it would need a proxy"
        assert jobs(address.replace("http:", "https:"), "list").exit_code == 2, "it has no certificate"
    assert not asked


def test_what_a_data_set_says_is_printed_visibly(capsys: pytest.CaptureFixture[str]) -> None:
    class Tokenizer:
        def decode(self, _: object) -> str:
            return f"a\n{ESCAPE}"

    prompt = Prompt(0, (1,), ESCAPE, category=ESCAPE)
    print_sample(Console(width=200), [prompt], Tokenizer())
    print_facts(Console(width=200), prompts=ESCAPE)
    with TerminalProgress(Console(width=200)) as progress:
        progress.say(ESCAPE)
    printed = capsys.readouterr().out
    assert printed.count("\\x1b]0;pwned") == 4
    assert printed.replace("\n", "").isprintable()
    assert visible("Größe 速度\u3000🚀\ta\nb", lines=True) == "Größe 速度\u3000🚀\\ta\nb"


def test_keys_are_set_on_the_command_line(tmp_path: Path) -> None:
    app, received = FastAPI(), []

    @app.post("/v1/searches")
    def _(body: dict[str, Any]) -> Any:
        received.append(body["config"])
        return SEARCH

    path = tmp_path / "search.yaml"
    path.write_text("model: m\ndataset: d\ntrials: 9\nstudies: {joint: {patience: 3}}\n")
    with listening(app) as address:
        done = jobs(address, "submit", path, "--set", "trials=2", "--set", "studies.joint.max_tokens=4")
    assert done.exit_code == 0, done.output
    assert received == [
        {"model": "m", "dataset": "d", "trials": 2, "studies": {"joint": {"patience": 3, "max_tokens": 4}}}
    ]
