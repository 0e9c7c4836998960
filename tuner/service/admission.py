"""What the service accepts: a configuration whose model and data sets are on its lists, and that names no file of its own.

The model is loaded as `sdtune search` loads it: code of a repository is never run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.documents.strict_yaml import validate
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.service.contract import SearchRequest, ServiceError

OF_THE_SERVICE = (
    "storage",
    "tracking_uri",
    "experiment",
    "heads",
    "out",
    "device",
    "threads",
    "executor",
    "ray_address",
    "ray_label",
    "ray_devices",
    "repeats",
)
"""Keys of a configuration that the service and its workers decide."""
ID_LENGTH = 16


@dataclass(frozen=True)
class Allowed:
    """Names of models and data sets, and folders in which all are allowed."""

    models: Sequence[str]
    datasets: Sequence[str]

    def check(self, config: SearchConfig) -> None:
        """Raise `ServiceError` if the configuration names a model or a data set that is not allowed."""
        _check("model", config.model, self.models)
        wanted = (config.dataset, config.shots_dataset, config.distillation.training_dataset)
        for dataset in wanted:
            if dataset is not None:
                _check("dataset", dataset, self.datasets)


def _check(what: str, name: str, allowed: Sequence[str]) -> None:
    if name in allowed:
        return
    try:
        path = Path(name).resolve(strict=True)
    except (OSError, ValueError):
        path = None
    # A path counts by where it leads, so that neither `..` nor a link leaves the folder.
    if path is not None and any(path.is_relative_to(Path(each).resolve()) for each in allowed if Path(each).is_dir()):
        return
    raise ServiceError(
        f"{what}: {name[:200]!r} is not on the list of this service; it has {', '.join(allowed) or 'none'}"
    )


def admitted(request: SearchRequest, allowed: Allowed) -> SearchConfig:
    """Return the configuration of a request. Raises `ServiceError` in one line for one that is not accepted."""
    if own := sorted(set(request.config) & set(OF_THE_SERVICE)):
        raise ServiceError(f"{', '.join(own)}: the service decides this; leave it out")
    try:
        config = validate(SearchConfig, request.config, source="config", error=ConfigError)
    except ConfigError as cause:
        raise ServiceError(str(cause)) from None
    allowed.check(config)
    return config


def identity(config: SearchConfig, queue: str) -> str:
    """Return the id of a search: a hash of everything that decides its result, so that submitting twice is one job.

    A data set in a file counts by its contents, a model by its name and revision.
    """
    settings = config.model_dump(mode="json", exclude=set(OF_THE_SERVICE))
    dataset = Path(config.dataset)
    contents = hashlib.sha256(dataset.read_bytes()).hexdigest() if dataset.is_file() else None
    whole = json.dumps({"config": settings, "queue": queue, "contents": contents}, sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:ID_LENGTH]


def placed(config: Mapping[str, Any], job: str, *, database: str, tracking_uri: str, folder: Path) -> SearchConfig:
    """Return the configuration of a job with the places that the service has for it."""
    own = {
        "storage": database,
        "tracking_uri": tracking_uri,
        "experiment": f"{Path(str(config['model'])).name}-{Path(str(config['dataset'])).stem}-{job}",
        "heads": str(folder / "heads"),
        "out": str(folder / "profile.yaml"),
    }
    return validate(SearchConfig, {**config, **own}, source="job", error=ConfigError)
