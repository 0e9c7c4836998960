"""Checks of names and paths that need no torch, made before it is imported: a typing error costs about a second."""

from __future__ import annotations

from pathlib import Path

from decoding.profile import DraftProfile
from tuner.inputs.datasets import refuse_unknown
from tuner.inputs.hub import check_on_hub
from tuner.inputs.model_folder import check_folder
from tuner.output_paths import check_writable


def check_names(
    *,
    model: str | None = None,
    revision: str | None = None,
    dataset: str | None = None,
    profile: Path | None = None,
    out: Path | None = None,
) -> None:
    """Raise `SdtuneError` for a profile that cannot be read, or a model, dataset or output that is surely not there.

    Without a `model` the profile's is meant. The hub is asked last, as it may take seconds.
    """
    if profile is not None:
        target = DraftProfile.load(profile).target
        model, revision = model or target.model, revision or target.revision
    if model is not None:
        check_folder(model)
    if dataset is not None:
        refuse_unknown(dataset)
    if out is not None:
        check_writable(out)
    if model is not None:
        check_on_hub(model, revision)
