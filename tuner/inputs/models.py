"""Loading of a model and its tokenizer from a local folder or the hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from decoding.errors import first_line
from decoding.fingerprint import fingerprint, tokenizer_sha256
from decoding.profile import DraftProfile, TargetIdentity
from tuner.errors import ConfigError
from tuner.inputs.checkpoint import readable, refuse_growing_text, refuse_unusable
from tuner.inputs.model_folder import check_folder, check_weights

if TYPE_CHECKING:
    from decoding.target import Target
    from tuner.fields import ProfileSettings


SPREAD = "spread"
"""The device that stands for all GPUs: transformers' `device_map="auto"`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LOADING = threading.RLock()
"""Held while a model is loaded. `from_pretrained` takes `tie_weights` off the class of all models meanwhile: of two threads, the
second puts back what the first had left there, and no later model of the process has its embeddings tied."""


@dataclass(frozen=True)
class Loaded:
    """Model on its device, its tokenizer, and their source."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    revision: str | None


def load(name: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load the model and tokenizer `name`, a folder or a hub id.

    `dtype` auto is float32 on a CPU and the checkpoint's own on an accelerator. Raises `ConfigError` if the model does not
    exist, is not a causal language model or is quantised, if the device does not exist, or if a model that is spread over all
    devices does not fit on them.
    """
    torch_device = resolve_device(device)
    spread = {"device_map": "auto"} if device == SPREAD else {}
    check_folder(name)
    check_weights(name)
    wanted = DTYPES.get(dtype) or (torch.float32 if torch_device.type == "cpu" else "auto")
    with quiet(), readable(name, "is neither a model folder nor available from the hub"):
        refuse_unusable(name, revision)
        refuse_growing_text(name, revision)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=wanted, output_loading_info=True, trust_remote_code=False, **spread
        )
    _refuse_missing_weights(name, report)
    _refuse_no_numbers(name, model)
    _refuse_foreign_tokenizer(name, tokenizer, model)
    loaded_revision = revision or getattr(model.config, "_commit_hash", None)
    if spread:
        _refuse_offloaded(name, model)
    else:
        model = model.to(torch_device)
    return Loaded(model.eval(), tokenizer, name, loaded_revision)


def load_tokenizer(name: str, revision: str | None) -> Any:
    """Load the tokenizer of the model `name` alone; raise `ConfigError` as `load` does."""
    check_folder(name)
    with quiet(), readable(name, "is neither a model folder nor available from the hub"):
        refuse_growing_text(name, revision)
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def load_text_config(name: str, revision: str | None) -> PreTrainedConfig:
    """Load the configuration of a model's text alone; raise `ConfigError` as `load` does."""
    with readable(name, "is neither a model folder nor available from the hub"):
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False).get_text_config()


def auto_dtype(config: PreTrainedConfig) -> str:
    """Return what `load` takes the dtype auto for."""
    on_cpu = resolve_device("auto").type == "cpu"
    return str((not on_cpu and config.dtype) or torch.float32).removeprefix("torch.")


def load_target(profile: DraftProfile, settings: ProfileSettings) -> Loaded:
    """Load the model of a profile as the settings of a command say, and as the profile says where they do not."""
    target = profile.target
    return load(
        settings.model or target.model,
        revision=target.revision,
        dtype=settings.dtype or target.dtype,
        device=settings.device,
    )


def resolve_device(device: str) -> torch.device:
    """Return the torch device; `auto` is CUDA if available, otherwise the CPU, and `spread` the first of all GPUs.

    Raises `ConfigError` if the device does not exist, or for `spread` without accelerate.
    """
    if device == SPREAD and find_spec("accelerate") is None:
        raise ConfigError(
            f"the device {SPREAD} needs accelerate, which is not installed: pip install accelerate, or give one device"
        )
    if device in ("auto", SPREAD):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = "cpu, cuda or auto" if torch.cuda.is_available() else "cpu or auto"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as cause:
        raise ConfigError(f"no device {device!r} on this machine ({first_line(cause)}); try {usable}") from None
    if found.type == "meta":
        raise ConfigError(f"the device {device!r} holds no values; try {usable}")
    return found


def _refuse_missing_weights(name: str, report: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the checkpoint lacks weights or has some of another shape: transformers fills in random ones."""
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ConfigError(
            f"the checkpoint {name} lacks {len(lacking)} weights of its model, such as {lacking[0]}: it is incomplete, or its "
            "config.json describes another model"
        )
    wrong = sorted(str(each[0] if isinstance(each, tuple) else each) for each in report["mismatched_keys"])
    if wrong:
        raise ConfigError(f"the checkpoint {name} has {len(wrong)} weights of another shape, such as {wrong[0]}")


def _refuse_no_numbers(name: str, model: PreTrainedModel) -> None:
    """Raise `ConfigError` for weights that are NaN or infinite: texts would be wrong, and checks fail for reasons of their own."""
    for where, weight in model.named_parameters():
        if weight.dtype in DTYPES.values() and weight.device.type != "meta" and weight.numel():
            # Reads the weight once and makes no copy of it.
            least, greatest = weight.detach().aminmax()
            if not (least.isfinite() and greatest.isfinite()):
                raise ConfigError(f"the checkpoint {name} is damaged: {where} holds NaN or infinite numbers")


def _refuse_foreign_tokenizer(name: str, tokenizer: Any, model: PreTrainedModel) -> None:
    """Raise `ConfigError` if the tokenizer has more tokens than the model; tokens that were added to it may be unused."""
    num_tokens, num_rows = tokenizer.vocab_size, model.get_input_embeddings().weight.shape[0]
    if num_tokens > num_rows:
        raise ConfigError(
            f"the tokenizer of {name} has {num_tokens} tokens and the model only {num_rows}: they do not belong together"
        )


def _refuse_offloaded(name: str, model: PreTrainedModel) -> None:
    """Raise `ConfigError` if parts of a spread model are neither on a GPU nor, without GPUs, on the CPU."""
    placed = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    offloaded = sorted(placed & ({"cpu", "disk"} if torch.cuda.is_available() else {"disk"}))
    if offloaded:
        raise ConfigError(
            f"{name} does not fit on the devices at hand: parts of it would stay on {' and '.join(offloaded)}, and be copied "
            "in every pass"
        )


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off progress bars and log messages of transformers; restore them on exit. One thread at a time, see `LOADING`."""
    with LOADING:
        verbosity = transformers_logging.get_verbosity()
        had_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if had_bars:
                transformers_logging.enable_progress_bar()


def target_identity(loaded: Loaded, target: Target) -> TargetIdentity:
    model = fingerprint(loaded.model)
    return TargetIdentity(
        model=loaded.name,
        revision=loaded.revision,
        architecture=type(loaded.model).__name__,
        num_layers=target.num_layers,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        config_sha256=model.config_sha256,
        weights_sha256=model.weights_sha256,
        tokenizer_sha256=tokenizer_sha256(loaded.tokenizer),
    )
