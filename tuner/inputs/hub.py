"""A model on the hub, looked for before transformers is imported."""

from __future__ import annotations

from pathlib import Path

from decoding.errors import one_line
from tuner.errors import ConfigError

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
