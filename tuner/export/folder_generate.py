"""Generate with the profile in the model's folder; `sdtune export --to folder` copies this file to `custom_generate/generate.py`.

transformers runs a copy of it from a cache, so the folder is known by the model's name only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers.utils import cached_file

from decoding.deploy import ProfileDecoder, load_decoder
from decoding.profile import DraftProfile

PROFILE = "profile.yaml"
FOLDERS = 4


@lru_cache(maxsize=FOLDERS)
def decoder_of(name: str) -> ProfileDecoder:
    """Return the decoder of a folder, or of a repository on the hub, whose files are fetched."""
    path = cached_file(name, PROFILE)
    for head in DraftProfile.load(path).draft.files:
        cached_file(name, head)
    return load_decoder(path)


def generate(inputs: Any = None, *, model: Any, custom_generate: Any = None, **arguments: Any) -> Any:
    """Return what the model's own `generate` returns, decoded as the profile says; `streamer` and `stop_strings` work too.

    The decoder calls `model.generate` with itself as `custom_generate`. That is this function again, if the model was loaded with
    `trust_remote_code`, and then it is the class's `generate` that is wanted.
    """
    if custom_generate is not None:
        return type(model).generate(model, inputs, custom_generate=custom_generate, **arguments)
    return decoder_of(model.name_or_path).generate(model, inputs, **arguments)
