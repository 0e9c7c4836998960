"""What /metrics tells of a server's speed-up, and the alert rule of docs/production.md on it."""

from __future__ import annotations

import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.rounds import Round
from decoding.serving.app import create_app
from decoding.serving.run import ServerLimits, new_service
from decoding.serving.service import Service
from decoding.text import Ending
from tests.support.paths import ROOT
from tests.support.profiles import measured
from tests.support.tiny import tiny_target, tiny_tokenizer

PROMPTS = ["w3 w9 w4", "w5 w5", "w8 w1"]
BODY = {"prompt": PROMPTS, "max_tokens": 100, "temperature": 0, "ignore_eos": True}


def _service(**settings: object) -> Service:
    decoder = Decoder(tiny_target(), LayerSkip.blocks((3, 4)), Fixed(max_tokens=3))
    limits = ServerLimits(num_rows=2, max_length=120)
    return new_service(decoder, tiny_tokenizer(), "tiny", limits, **settings)  # type: ignore[arg-type]


def _samples(client: TestClient) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples by name: value by labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_speed_over_own_plain_rounds_is_measured_and_texts_stay_plain_decodings() -> None:
    service, tokenizer = _service(measured=measured()), tiny_tokenizer()
    plain = plain_decoder(service.decoding.batch.decoder.target)
    tokens = [plain.generate(Request(tokenizer(prompt)["input_ids"], Ending(100))).tokens for prompt in PROMPTS]
    expected = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    with TestClient(create_app(service)) as client:
        for _ in range(60):
            choices = client.post("/v1/completions", json=BODY).json()["choices"]
            assert [choice["text"] for choice in choices] == expected
            samples = _samples(client)
            if len(samples.get("sdtune:speedup", {})) == 2:
                break
        else:
            pytest.fail("no interval after 60 batches")
    loads = [(("model_name", "tiny"), ("requests", load)) for load in ("1", "2-3")]
    assert set(samples["sdtune:speedup"]) == set(loads)
    for load in loads:
        values = [samples[f"sdtune:speedup{suffix}"][load] for suffix in ("_low", "", "_high")]
        assert 0 < values[0] <= values[1] <= values[2]
    name = (("model_name", "tiny"),)
    assert samples["sdtune:num_rounds_total"][name] > samples["vllm:spec_decode_num_drafts_total"][name] > 0
    assert samples["sdtune:profile_speedup_low"] == {loads[0]: 1.4}
    assert samples["sdtune:profile_acceptance_rate"] == {name: 0.5}


def test_the_alert_rule_of_the_documentation_names_what_the_server_has() -> None:
    """Both sides of a comparison have the same labels: Prometheus compares no others."""
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(groups:.*?)```", page, re.DOTALL)
    rules = [rule for group in yaml.safe_load(block)["groups"] for rule in group["rules"]]
    service = _service(measured=measured())
    control = service.decoding.batch.control
    assert control is not None
    for _ in range(400):
        control.observe(1, [Round((1,), 0, 0, 0.0, 0.0)], 1.0)
    with TestClient(create_app(service)) as client:
        client.post("/v1/completions", json=BODY)
        samples = _samples(client)
    assert len(rules) == 2
    for rule in rules:
        names = re.findall(r"\b(?:sdtune|vllm):\w+", rule["expr"])
        assert len(names) >= 2
        labels = [set(samples[name]) for name in names]
        assert set.intersection(*labels), f"nothing to compare in {rule['expr']}"
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= {"model_name", "requests"}
