"""Where the data of a finished search come from: its run in MLflow, a profile that names the run, or a file.

What imports torch waits until the source is known to be one, so that a wrong name costs less than a second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from decoding.profile import DraftProfile
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.review.document import SearchReview

REVIEW_NAME = "search.json"


def find_review(source: str, tracking_uri: str) -> SearchReview:
    """Return the data of the search that `source` names: the id of its run, the path of its profile, or of a search.json.

    Raises `ConfigError` for a source without such data, and `TrackingError` if the store cannot be used.
    """
    path = Path(source)
    if path.suffix == ".json":
        return _parsed(_read(path), source)
    run_id = _run_of(path) if path.exists() else source
    if re.fullmatch(r"[0-9a-f]{32}", run_id) is None:
        raise ConfigError(f"{source} is neither a profile, nor the id of a run, nor a {REVIEW_NAME}")

    from tuner.tracking import read_artifact

    text = read_artifact(tracking_uri, run_id, REVIEW_NAME)
    if text is None:
        raise ConfigError(f"the run {run_id} in {tracking_uri} has no {REVIEW_NAME}: it is no finished search")
    return _parsed(text, source)


def _run_of(profile: Path) -> str:
    origin = DraftProfile.load(profile).provenance
    if origin is None or origin.mlflow_run_id is None:
        raise ConfigError(f"the profile {profile} names no MLflow run: give the id of the search's run")
    return origin.mlflow_run_id


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {getattr(cause, 'strerror', None) or 'it is no text'}") from None


def _parsed(text: str, source: str) -> SearchReview:
    from tuner.review.document import SearchReview

    try:
        return SearchReview.model_validate_json(text)
    except ValidationError as failure:
        where = ".".join(map(str, failure.errors(include_url=False)[0]["loc"])) or "its start"
        raise ConfigError(f"{source} holds no data of a search of this version: wrong at {where}") from None
