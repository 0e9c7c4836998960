"""Loading of models: what is refused before weights are read, and models spread over several devices."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.errors import UnsupportedRunnerError
from decoding.target import Target
from tests.support.tiny import save_tiny_checkpoint, tiny_llama
from tuner.errors import ConfigError
from tuner.inputs import models
from tuner.inputs.models import load


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "model")


def quantise(checkpoint: Path, settings: dict[str, Any], part: str | None = None) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    (config if part is None else config.setdefault(part, {}))["quantization_config"] = settings
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "fp8"}, r"quantised \(fp8\), which has not been tried with sdtune: give"),
        ({"load_in_4bit": True}, r"\(bitsandbytes\)"),
    ],
)
def test_quantised_checkpoint_is_refused_before_weights_are_read(
    checkpoint: Path, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise(checkpoint, settings)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _never)
    with pytest.raises(ConfigError, match=words) as refused:
        load(str(checkpoint))
    assert "\n" not in str(refused.value)


def test_spread_model_needs_accelerate(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _never)
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="spread needs accelerate, which is not installed"):
        load(str(checkpoint), device="spread")


@pytest.mark.parametrize(
    ("placed", "has_gpu", "fits"),
    [
        ({"layers.0": 0, "layers.1": 1}, True, True),
        ({"layers.0": 0, "layers.1": "cpu"}, True, False),
        ({"layers.0": "cpu", "layers.1": "disk"}, False, False),
    ],
)
def test_spread_model_that_does_not_fit_is_refused(
    checkpoint: Path, placed: dict[str, Any], has_gpu: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(name: str, **options: Any) -> Any:
        assert options["device_map"] == "auto"
        model = tiny_llama()
        model.hf_device_map = placed
        return model, {"missing_keys": [], "mismatched_keys": []}

    monkeypatch.setattr(models, "find_spec", lambda name: object())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    if fits:
        assert load(str(checkpoint), device="spread").model.hf_device_map == placed
        return
    with pytest.raises(ConfigError, match="does not fit on the devices at hand"):
        load(str(checkpoint), device="spread")


def test_only_the_eager_runner_takes_a_model_on_several_devices() -> None:
    model = tiny_llama()
    model.model.layers[3].to(torch.device("meta"))
    with pytest.raises(UnsupportedRunnerError, match="the weights are on cpu and meta, and only the runner 'eager'"):
        Target(model, "static")


def _never(*args: Any, **options: Any) -> Any:
    raise AssertionError("weights were read")


def test_threads_load_one_after_another_and_leave_transformers_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny_checkpoint(tmp_path)
    (tie_weights, inside, most) = PreTrainedModel.tie_weights, [0], [0]
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def slowly(*given: Any, **named: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], *inside)
        time.sleep(0.05)
        try:
            return from_pretrained(*given, **named)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", slowly)
    with ThreadPoolExecutor(3) as threads:
        assert len(list(threads.map(load, [str(tmp_path)] * 3))) == 3
    assert most == [1]
    assert PreTrainedModel.tie_weights is tie_weights
