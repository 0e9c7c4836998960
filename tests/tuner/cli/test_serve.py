"""`sdtune serve`: from the command line to the texts that clients get."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import PromptLookup
from decoding.profile import DraftProfile
from decoding.serving.app import create_app
from decoding.serving.service import Service
from decoding.target import Target
from decoding.text import Ending
from tests.support.profiles import measured, save_profile
from tests.support.refusals import refused
from tests.support.tiny import save_tiny_checkpoint
from tuner.cli.main import main
from tuner.inputs.models import load


@pytest.mark.parametrize(
    ("flag", "drafts", "has_profile"),
    [("--set=always_draft=yes", True, True), ("--plain", False, False)],
)
def test_a_profile_is_served(
    flag: str, drafts: bool, has_profile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_checkpoint(tmp_path / "model")
    path = save_profile(tmp_path / "copies.yaml", model, PromptLookup())
    DraftProfile.load(path).model_copy(update={"measured": measured()}).save(path)
    answers: list[Any] = []

    def serve(service: Service, **_: object) -> None:
        """Stand in for uvicorn: answer requests until the command would end."""
        with TestClient(create_app(service)) as client:
            body = {"prompt": "w3 w9 w4", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answers.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            answers.append(client.get("/metrics").text)
            chat = {"messages": [{"role": "user", "content": "w3 w9"}], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
            answers.append(usage["prompt_tokens"])

    monkeypatch.setattr("decoding.serving.run.serve", serve)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}w1 {{ m.content }} w2 w2{% endfor %}")
    (tmp_path / "none.jinja").write_text("{{ raise_exception('no user') }}")
    template = [] if drafts else ["--chat-template", str(tmp_path / "chat.jinja")]
    flags = ["--port", str(port), "--max-length", "120", flag, *template]
    result = CliRunner().invoke(main, ["serve", str(path), *flags])
    assert result.exit_code == 0, result.output
    wrong = CliRunner().invoke(main, ["serve", str(path), "--chat-template", str(tmp_path / "none.jinja"), *flags[:2]])
    refused(wrong, "chat_template", "none.jinja does not take a user's message: no user")
    assert ("plain decoding" if flag == "--plain" else "prompt lookup") in result.output
    text, metrics, num_prompt_tokens = answers
    loaded = load(str(model), dtype="float32", device="cpu")
    written = "User: w3 w9\n\nAssistant:"
    assert num_prompt_tokens == (len(loaded.tokenizer(written)["input_ids"]) if drafts else 5)
    tokens = plain_decoder(Target(loaded.model)).generate(
        Request(loaded.tokenizer("w3 w9 w4")["input_ids"], Ending(12))
    )
    assert text == loaded.tokenizer.decode(tokens.tokens, skip_special_tokens=True)
    assert f'sdtune:drafting{{model_name="{model}"}} {float(drafts)}' in metrics
    assert ("sdtune:profile_speedup_low{" in metrics) is has_profile
