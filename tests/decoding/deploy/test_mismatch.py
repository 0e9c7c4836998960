"""Profiles on models and machines other than those that they were tuned for: errors, warnings, or plain decoding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel

from decoding.deploy import OnMismatch, ProfileDecoder, load_decoder
from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError, ProfileWarning, TargetMismatchError, UnsupportedRunnerError
from decoding.profile import Decoding
from tests.support.families import build
from tests.support.profiles import measured, profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
HERE = {"torch": torch.__version__, "transformers": transformers.__version__}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def _warnings_of(decoder: ProfileDecoder, model: PreTrainedModel, times: int = 2) -> list[str]:
    """Return the messages of all warnings of calls; every call is counted, whatever Python's filters show."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            expected = model.generate(PROMPT, **GREEDY)
            assert torch.equal(model.generate(PROMPT, custom_generate=decoder, **GREEDY), expected)
    assert all(issubclass(each.category, ProfileWarning) for each in caught)
    assert all("\n" not in str(each.message) for each in caught)
    return [str(each.message) for each in caught]


def test_same_setting_is_not_warned_of(model: LlamaForCausalLM) -> None:
    profile = profile_of(model, figures=measured("cpu (1 thread)", HERE), device="cpu")
    assert _warnings_of(load_decoder(profile), model) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "device cpu, not cuda"),
        ({"dtype": "bfloat16"}, "dtype float32, not bfloat16"),
        ({"figures": measured("cpu (4 threads)", HERE)}, "1 thread, not 4"),
        ({"figures": measured("cpu (1 thread)", HERE | {"torch": "2.1.0"})}, f"torch {torch.__version__}, not 2.1.0"),
        (
            {"figures": measured("cpu (1 thread)", HERE | {"transformers": "5.0.0"})},
            f"transformers {transformers.__version__}, not 5.0.0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_setting_is_warned_of_once(model: LlamaForCausalLM, changes: dict[str, Any], words: str) -> None:
    (message,) = _warnings_of(load_decoder(profile_of(model, **changes)), model)
    assert words in message
    assert "'tiny'" in message


@pytest.mark.parametrize("on_mismatch", ["warn", "plain"])
def test_other_weights_are_warned_of_once(model: LlamaForCausalLM, on_mismatch: OnMismatch) -> None:
    other = tiny_llama(seed=1)
    with pytest.raises(TargetMismatchError, match="other weights"):
        other.generate(PROMPT, custom_generate=load_decoder(profile_of(model)), **GREEDY)
    decoder = load_decoder(profile_of(model), on_mismatch=on_mismatch)
    (message,) = _warnings_of(decoder, other)
    assert "other weights" in message
    assert decoder.last_generation is not None
    drafted = decoder.last_generation.num_drafted
    assert (drafted == 0, "decoding plainly" in message) == (on_mismatch == "plain", on_mismatch == "plain")


def test_model_with_another_number_of_layers_is_decoded_plainly(model: LlamaForCausalLM) -> None:
    (message,) = _warnings_of(load_decoder(profile_of(model), on_mismatch="plain"), tiny_llama(4))
    assert "another configuration" in message
    with pytest.raises(TargetMismatchError, match="the model has 4 layers"):
        tiny_llama(4).generate(PROMPT, custom_generate=load_decoder(profile_of(model), on_mismatch="warn"), **GREEDY)


def _with_missing_head(model: LlamaForCausalLM, folder: Path) -> Path:
    draft = EarlyExit(exit_layer=3, head="head.safetensors", head_sha256="0" * 64)
    profile_of(model, draft).save(folder / "profile.yaml")
    return folder / "profile.yaml"


def test_missing_head_is_decoded_plainly_if_asked_for(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = _with_missing_head(model, tmp_path)
    for on_mismatch in ("error", "warn"):
        with pytest.raises(ExitHeadError, match="it belongs beside the profile"):
            load_decoder(path, on_mismatch=on_mismatch)
    decoder = load_decoder(path, on_mismatch="plain")
    (message,) = _warnings_of(decoder, model)
    assert "it belongs beside the profile" in message
    assert decoder.plain_because is not None
    assert "it belongs beside the profile" in decoder.plain_because


def test_one_model_fits_and_the_next_does_not(model: LlamaForCausalLM) -> None:
    decoder = load_decoder(profile_of(model), on_mismatch="plain")
    assert _warnings_of(decoder, model) == []
    assert decoder.plain_because is None
    assert len(_warnings_of(decoder, tiny_llama(seed=1))) == 1
    assert decoder.plain_because is not None
    assert _warnings_of(decoder, model) == []
    assert decoder.plain_because is None


@pytest.mark.usefixtures("uncompiled")
def test_runner_that_cannot_run_the_model_is_named_once() -> None:
    bloom = build("bloom")
    profile = profile_of(bloom)
    static = profile.model_copy(update={"decoding": Decoding(runner="static")})
    (message,) = _warnings_of(load_decoder(static), bloom)
    assert "does not run with the runner 'static'" in message
    exact = profile.model_copy(update={"decoding": Decoding(runner="static", exact_width=4)})
    with pytest.raises(UnsupportedRunnerError):
        load_decoder(exact, on_mismatch="warn").decoder_for(bloom)
    (message,) = _warnings_of(load_decoder(exact, on_mismatch="plain"), bloom)
    assert "decoding plainly" in message


def test_profile_of_a_batch_and_a_prefill_decode_plainly_too(model: LlamaForCausalLM) -> None:
    other = tiny_llama(seed=1)
    decoder = load_decoder(profile_of(model), on_mismatch="plain")
    with pytest.warns(ProfileWarning, match="decoding plainly"):
        decoder.prepare(other, shortest=4, longest=16)
    settings = {**GREEDY, "pad_token_id": 1}
    found = decoder.generate(other, PROMPT.repeat(2, 1), **settings)
    assert torch.equal(found, other.generate(PROMPT, **settings).repeat(2, 1))
