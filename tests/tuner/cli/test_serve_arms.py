"""`sdtune serve` with several profiles: from the command line to the texts that clients get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.testclient import TestClient

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import LayerSkip, PlainDecoding, PromptLookup
from decoding.serving.app import create_app
from decoding.serving.service import Service
from decoding.target import Target
from decoding.text import Ending
from tests.support.profiles import save_profile
from tests.support.tiny import save_tiny_checkpoint
from tuner.cli.main import main
from tuner.evaluation.serving.processes import free_port
from tuner.inputs.models import load

PROMPTS = ["w3 w9 w4", "w5 w5", "w8 w1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def skip(tmp_path: Path, model: Path) -> Path:
    return save_profile(tmp_path / "skip.yaml", model, LayerSkip.blocks((3, 4)))


@pytest.fixture
def copies(tmp_path: Path, model: Path) -> Path:
    return save_profile(tmp_path / "copies.yaml", model, PromptLookup())


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["serve", *map(str, arguments), "--port", str(free_port()), "--max-length", "120"])


def test_the_first_profile_and_each_arm_are_served(
    skip: Path, copies: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []

    def serve(service: Service, **_: object) -> None:
        """Stand in for uvicorn: answer requests until the command would end."""
        with TestClient(create_app(service, api_key=None)) as client:
            body = {"prompt": PROMPTS, "max_tokens": 70, "temperature": 0, "ignore_eos": True}
            for _ in range(2):
                answers.append([each["text"] for each in client.post("/v1/completions", json=body).json()["choices"]])
            answers.append(client.get("/metrics").text)

    monkeypatch.setattr("decoding.serving.run.serve", serve)
    result = invoke(skip, "--arm", copies)
    assert result.exit_code == 0, result.output
    first, second, metrics = answers
    loaded = load(str(model), dtype="float32", device="cpu")
    plain = plain_decoder(Target(loaded.model))
    for text, again, prompt in zip(first, second, PROMPTS, strict=True):
        tokens = plain.generate(Request(loaded.tokenizer(prompt)["input_ids"], Ending(70))).tokens
        assert text == again == loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    arms = {line.split('arm="')[1].split('"')[0] for line in metrics.splitlines() if line.startswith("sdtune:arm{")}
    assert arms == {"plain", "written by a test", "written by a test (2)"}
    assert "serving" in result.output
    assert "prompt lookup" in result.output


def test_what_arms_cannot_be_is_refused_before_a_model_is_loaded(
    skip: Path, copies: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.cli.serve_model.load", lambda *_, **__: pytest.fail("a model is loaded"))
    nothing = save_profile(tmp_path / "plain.yaml", model, PlainDecoding())
    for arguments, reason in (
        ((skip, "--arm", copies, "--plain"), "--arm leaves the choice to the server"),
        ((skip, "--arm", nothing), "plain rounds are an arm already"),
        ((skip, "--arm", tmp_path / "none.yaml"), "none.yaml"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert reason in " ".join(result.output.split())
