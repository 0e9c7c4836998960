"""A model's folder or name on the hub, looked at before transformers is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path

from decoding.errors import one_line
from tuner.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
"""File that makes a folder an adapter of PEFT, such as LoRA's."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What may be a name on the hub: gpt2, or owner/name."""


def check_folder(name: str) -> None:
    """Raise `ConfigError` if `name` is a file, a path to nowhere, or a folder without a config.json or with an adapter in it."""
    path = Path(name)
    if path.suffix.lower() == ".gguf" or (path.is_dir() and _only_gguf(path)):
        raise ConfigError(
            f"{name} is in llama.cpp's format GGUF, which sdtune does not read: give the checkpoint that it was converted from "
            "(the `convert.sh` of `sdtune export --to llama.cpp` makes GGUF)"
        )
    if path.is_dir() and (path / ADAPTER_CONFIG).is_file() and not _has_weights(path):
        raise ConfigError(
            f"{name} is an adapter (LoRA), not a model: merge it into {_base_of(path)} first, with peft's `merge_and_unload` and "
            "`save_pretrained`, and give that folder"
        )
    if path.is_file():
        raise ConfigError(f"{name} is a file: give the folder of the model, which has a config.json")
    if path.exists() and not (path / "config.json").exists():
        raise ConfigError(f"{name} is not a model folder: it has no config.json, which `save_pretrained` writes")
    if not path.exists() and _HUB_ID.fullmatch(name) is None:
        raise ConfigError(f"no such model: there is no folder {name}, and a name on the hub is owner/name")


def check_weights(name: str) -> None:
    """Raise `ConfigError` if `name` is a folder without weights; its configuration alone tells the sizes."""
    if Path(name).is_dir() and not _has_weights(Path(name)):
        raise ConfigError(f"{name} is not a model folder: it has no weights, such as model.safetensors")


def _only_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    """Return True if a folder has weights of a model, an adapter's aside."""
    found = (path.name for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}"))
    return any(not name.startswith("adapter_") for name in found)


def _base_of(folder: Path) -> str:
    """Return the model that an adapter was trained for, as its configuration names it."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        found = None  # the message goes without it
    return str(found or "its base model")


CONFIG_FILE = "config.json"
MAIN = "main"
"""The revision that is meant if none is given."""


def check_on_hub(name: str, revision: str | None = None) -> None:
    """Raise `ConfigError` if the model `name` is no folder, not in the hub's cache, and cannot be had from the hub.

    One request without retries, for the head of its config.json: an unreachable hub costs seconds, not a minute.
    """
    if Path(name).exists():
        return

    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    # The cache answers with another object for a file that is known to be missing.
    try:
        if isinstance(try_to_load_from_cache(name, CONFIG_FILE, revision=revision), str):
            return
        get_hf_file_metadata(hf_hub_url(name, CONFIG_FILE, revision=revision or MAIN))
    except Exception as cause:  # of the hub, of the HTTP client below it, and of names that no repository has
        raise ConfigError(
            f"no such model: {name} is neither a model folder nor available from the hub ({type(cause).__name__}: "
            f"{one_line(cause)[:200]})"
        ) from None
