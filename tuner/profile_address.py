"""Profiles given as addresses in a model registry, where a command takes the path of a profile.

Imports the standard library only, so that `--help` stays fast.
"""

from __future__ import annotations

import os
from typing import Any

DEFAULT_STORE = "sqlite:///mlflow.db"
"""The MLflow store that a search uses by default."""


def local_profile(given: Any) -> Any:
    """Return the path of the downloaded profile for an address such as `models:/NAME@champion`, and anything else as it is.

    The registry is that of `MLFLOW_TRACKING_URI`, or the store that a search uses by default. Raises `ProfileError` if it does not
    have the profile.
    """
    if not str(given).startswith("models:/"):
        return given

    from decoding.deploy.registry import fetch_profile

    return fetch_profile(str(given), tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE))
