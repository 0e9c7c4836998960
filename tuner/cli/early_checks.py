"""Checks of names and paths that need no torch, made before it is imported: a typing error costs less than a second."""

from __future__ import annotations

from pathlib import Path

from decoding.profile import DraftProfile
from tuner.inputs.datasets import refuse_unknown
from tuner.inputs.model_folder import check_folder


def check_names(*, model: str | None = None, dataset: str | None = None, profile: Path | None = None) -> None:
    """Raise `SdtuneError` for a model or dataset that is surely not there, or a profile that cannot be read."""
    if profile is not None:
        DraftProfile.load(profile)
    if model is not None:
        check_folder(model)
    if dataset is not None:
        refuse_unknown(dataset)
