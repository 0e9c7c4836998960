"""Profiles in an MLflow model registry, by addresses such as `models:/NAME@champion`.

The only module of this package that imports MLflow, and only when such an address is given. A registered profile is a folder with
`profile.yaml` and the heads of its draft: YAML and safetensors, no pickle. `sdtune promote` registers one.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from decoding.errors import ProfileError, first_line, how_to_install

PROFILE_NAME = "profile.yaml"
"""Name of the profile in a registered folder."""

_PREFIX = "models:/"
_ADDRESS = re.compile(r"models:/(?P<name>[^/@:]+)(?:@(?P<alias>[^/@:]+)|/(?P<version>\d+))")


def is_address(profile: object) -> bool:
    return isinstance(profile, str | Path) and str(profile).startswith(_PREFIX)


def fetch_profile(address: str | Path, *, tracking_uri: str | None = None, folder: str | Path | None = None) -> Path:
    """Return the path of a registered profile, downloaded with its heads at the first use of each version.

    `address` is `models:/NAME@ALIAS` or `models:/NAME/VERSION`, `tracking_uri` the MLflow server or store, by default MLflow's own
    (`MLFLOW_TRACKING_URI`). Files go to `folder`, by default `sdtune/profiles` under XDG_CACHE_HOME or ~/.cache. Raises
    `ProfileError` for another address, without MLflow, or if the registry does not have the profile.
    """
    parts = _ADDRESS.fullmatch(str(address))
    if parts is None:
        raise ProfileError(
            f"{address} is no address of a registered profile: give models:/NAME@ALIAS or models:/NAME/VERSION"
        )
    mlflow = _mlflow(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow triggers deprecation warnings of its own libraries
        try:
            return _download(mlflow, parts, tracking_uri, Path(folder) if folder else _cache_folder())
        except (mlflow.exceptions.MlflowException, OSError) as cause:
            raise ProfileError(f"cannot fetch {address} from the MLflow registry: {first_line(cause)}") from None


def _mlflow(address: str | Path) -> Any:
    try:
        import mlflow
    except ImportError as cause:
        raise ProfileError(
            f"{address} needs MLflow, which is not installed ({first_line(cause)}): {how_to_install('registry')}"
        ) from None
    return mlflow


def _download(mlflow: Any, parts: re.Match[str], tracking_uri: str | None, root: Path) -> Path:
    client, name = mlflow.MlflowClient(tracking_uri=tracking_uri), parts["name"]
    if parts["alias"] is not None:
        version = client.get_model_version_by_alias(name, parts["alias"])
    else:
        version = client.get_model_version(name, parts["version"])
    # A version never changes; the time of its creation tells registries with the same names apart.
    folder = root / name / f"{version.version}-{version.creation_timestamp}"
    if not (folder / PROFILE_NAME).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            # Not the address itself, for which MLflow would ask its default store. Without `dst_path` a local store would hand out
            # its own folder.
            location = client.get_model_version_download_uri(name, version.version)
            found = mlflow.artifacts.download_artifacts(
                artifact_uri=location, dst_path=str(partial), tracking_uri=tracking_uri
            )
            if not (Path(found) / PROFILE_NAME).exists():
                raise ProfileError(f"models:/{name}/{version.version} has no {PROFILE_NAME}: it is not a profile")
            _put(Path(found), folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder / PROFILE_NAME


def _put(partial: Path, folder: Path) -> None:
    """Rename a downloaded folder, unless another process was faster."""
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / PROFILE_NAME).exists():
            raise


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdtune" / "profiles"
