"""A server with two profiles, in process: texts stay plain decoding's, and the metrics name the arms."""

from __future__ import annotations

import logging
import math

import pytest
from starlette.testclient import TestClient

from decoding.arms.arm import Arm
from decoding.arms.chooser import ArmChooser, Promise
from decoding.arms.decoder import ArmedDecoder
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, PromptLookup
from decoding.rounds import Round
from decoding.serving.app import create_app
from decoding.serving.run import ServerLimits, new_service
from decoding.text import Ending
from tests.support.tiny import tiny_target, tiny_tokenizer

KEY = {"Authorization": "Bearer key"}
IMPOSSIBLE = Promise(1e6, 1e6, 1e6)


def test_two_profiles_and_plain_rounds_serve_one_text() -> None:
    target, tokenizer = tiny_target(), tiny_tokenizer()
    used: set[str] = set()
    arms = [
        Arm("skip", Decoder(target, LayerSkip.blocks((3, 4)), Fixed(max_tokens=3)), IMPOSSIBLE),
        Arm("copy", Decoder(target, PromptLookup(), Fixed(max_tokens=4)), IMPOSSIBLE),
    ]
    served = ArmedDecoder(arms, chooser=ArmChooser([None, None], seed=3), listener=lambda name, _: used.add(name))
    service = new_service(served, tokenizer, "tiny", ServerLimits(num_rows=2, max_length=120))
    prompts = ["w3 w9 w4", "w5 w5", "w8 w1"]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    plain = [plain_decoder(target).generate(Request(each, Ending(70))).tokens for each in ids]
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in plain]
    with TestClient(create_app(service, api_key="key")) as client:
        body = {"prompt": prompts, "max_tokens": 70, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            choices = client.post("/v1/completions", json=body, headers=KEY).json()["choices"]
            assert [choice["text"] for choice in choices] == expected
        metrics = client.get("/metrics").text
        assert client.get("/health").json() == {"status": "ok", "speedup_alarm": False}
        served.chooser.is_below_promise = True
        assert client.get("/health").json()["speedup_alarm"] is True
        assert 'sdtune:speedup_alarm{model_name="tiny"} 1.0' in client.get("/metrics").text
    assert client.get("/health").status_code == 503
    assert used >= {"plain", "skip"}
    for arm in ("plain", "skip", "copy"):
        assert f'sdtune:arm{{arm="{arm}",model_name="tiny"}}' in metrics
    assert 'sdtune:arm_speedup{arm="copy",model_name="tiny"}' in metrics


def test_an_alarm_is_logged_when_it_is_raised_and_when_it_is_cleared(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(tiny_target(), LayerSkip.blocks((3, 4)), Fixed(max_tokens=3))
    served = ArmedDecoder([Arm("skip", decoder, Promise(1.5, 1.4, 1.6))])

    def decode(num_windows: int, tokens: int) -> None:
        before = served.chooser.is_below_promise
        for _ in range(9 * num_windows):
            length = tokens if served.chooser.arm else 1
            served.observe(1, [Round((1,) * length, 3, length - 1, 1.0, 0.5)], 1.0)
            if served.chooser.is_below_promise is not before:
                return

    with caplog.at_level(logging.WARNING):
        decode(400, 1)
        assert served.chooser.is_below_promise
        decode(400, 2)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "speed-ups are below the intervals of the profiles",
        "speed-ups are within the intervals of the profiles again",
    ]
    assert math.isfinite(served.chooser.speedups()[0])
