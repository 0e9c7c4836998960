"""What the service accepts: the keys that a client decides, within the operator's limits, and models and data sets of its lists.

Whatever names a file, a program, a flag, an address or a store is the worker's or the operator's. The model is loaded as
`sdtune search` loads it: code of a repository is never run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from decoding.documents.strict_yaml import Duration, shortened, suggest, validate
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.service.contract import SearchRequest, ServiceError

OF_THE_SERVICE = (
    *("storage", "tracking_uri", "experiment", "heads", "out", "device", "threads", "workers", "ray"),
    *("deploy_to", "engine_home", "engine_args"),
)
"""Keys of a configuration that the service and its workers decide: whatever names a file, a program, an address or a store."""
FILES_IN_STUDIES = frozenset({"head", "head_sha256"})
"""Keys of drafts in the settings of studies that name files: no request has them."""

_DURATION: TypeAdapter[float] = TypeAdapter(Duration)
_COUNT: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1)])
ID_LENGTH = 16
JOBS = "jobs"
"""The limit on the unfinished searches of one client, beside those on settings."""
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        JOBS: 20,
        "timeout": 24 * 3600.0,
        "trials": 1000,
        "max_new_tokens": 4096,
        "max_prompt_tokens": 131_072,
        "tuning_prompts": 1000,
        "held_out_prompts": 1000,
        "finalists": 64,
        "batch_size": 128,
        "distillation.timeout": 24 * 3600.0,
        "distillation.prompts": 20_000,
        "distillation.samples": 64,
        "distillation.prompt_tokens": 8192,
        "distillation.response_tokens": 2048,
        "distillation.steps": 20_000,
        "distillation.batch_size": 128,
        "distillation.writing_batch_size": 512,
        "distillation.heads_at_once": 256,
        "distillation.checkpoint_every": 1_000_000,
        "studies": 100_000,
    }
)
"""Largest values that a request may give, unless the operator says otherwise: by key, and `studies` for any number in the settings
of studies but seeds. `trials` holds for their `max_trials` too."""


@dataclass(frozen=True)
class Allowed:
    """Models and data sets by name, or folders in which all are allowed; and the operator's limits."""

    models: Sequence[str]
    datasets: Sequence[str]
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)


def limits_of(given: Sequence[str]) -> Mapping[str, float]:
    """Return the limits, changed by `KEY=VALUE` texts. Raises `ConfigError` for an unknown key or a wrong value."""
    limits = dict(LIMITS)
    for text in given:
        key, _, value = text.partition("=")
        if key not in LIMITS:
            raise ConfigError(f"--limit: unknown key {shortened(key)}; {suggest(key, LIMITS)}")
        try:
            limits[key] = _DURATION.validate_python(value) if key.endswith("timeout") else _COUNT.validate_python(value)
        except ValueError:
            wanted = "a duration such as 90s, 10m or 1.5h" if key.endswith("timeout") else "a number from 1"
            raise ConfigError(f"--limit {key}: {shortened(value)} is not {wanted}") from None
    return limits


def admitted(request: SearchRequest, allowed: Allowed) -> SearchConfig:
    """Return the configuration of a request, with existing paths resolved and a limit on its time.

    Raises `ServiceError` in one line for one that is not accepted.
    """
    if own := sorted(set(request.config) & set(OF_THE_SERVICE)):
        raise ServiceError(f"{', '.join(own)}: the service and its workers decide this; leave it out")
    try:
        config = validate(SearchConfig, request.config, source="config", error=ConfigError)
    except ConfigError as cause:
        raise ServiceError(str(cause)) from None
    if own := sorted(FILES_IN_STUDIES.intersection(_keys(request.config.get("studies", {})))):
        raise ServiceError(f"studies: {', '.join(own)}: the service and its workers decide this; leave it out")
    if config.revision is not None and (".." in config.revision or config.revision.startswith("/")):
        raise ServiceError(f"revision: {shortened(config.revision)} is no name of a revision")
    _check_limits(config, request.config, allowed.limits)
    return _resolved(config, allowed)


def _keys(value: Any) -> Iterator[str]:
    for key, inside in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        if isinstance(key, str):
            yield key
        yield from _keys(inside)


def _check_limits(config: SearchConfig, given: Mapping[str, Any], limits: Mapping[str, float]) -> None:
    for key, most in limits.items():
        owner: Any = config.distillation if key.startswith("distillation.") else config
        value = getattr(owner, key.rpartition(".")[2]) if key not in (JOBS, "studies") else None
        if value is not None and value > most:
            raise ServiceError(f"{key}: {shortened(value)} is above the limit of this service, {most:.10g}")
    for name, settings in given.get("studies", {}).items():
        for key, value in _numbers(settings):
            most = limits["trials" if key == "max_trials" else "studies"]
            if key != "seed" and abs(value) > most:
                raise ServiceError(
                    f"studies.{name}: {key}: {shortened(value)} is above the limit of this service, {most:.10g}"
                )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value at any depth, each with the key that it is under."""
    if isinstance(value, int | float):
        yield key, value
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield from _numbers(inside, name)
    elif isinstance(value, list):
        for inside in value:
            yield from _numbers(inside, key)


def _resolved(config: SearchConfig, allowed: Allowed) -> SearchConfig:
    """Return the configuration with its models and data sets as the worker will find them. Raises `ServiceError` for others."""
    names: dict[str, Any] = {
        "model": _named("model", config.model, allowed.models),
        "dataset": _named("dataset", config.dataset, allowed.datasets),
    }
    if config.distillation.training_dataset is not None:
        name = _named("training_dataset", config.distillation.training_dataset, allowed.datasets)
        names["distillation"] = config.distillation.model_copy(update={"training_dataset": name})
    if config.timeout is None:
        names["timeout"] = allowed.limits["timeout"]
    return config.model_copy(update=names)


def _named(what: str, name: str, allowed: Sequence[str]) -> str:
    """Return a name that is allowed; a path as where it leads, so that neither `..` nor a link nor another folder changes it."""
    try:
        path = Path(name).resolve(strict=True)
    except (OSError, ValueError):
        path = None
    folders = (Path(each).resolve() for each in allowed if Path(each).exists())
    if path is not None and any(path == each or path.is_relative_to(each) for each in folders):
        return str(path)
    if path is None and name in allowed:
        return name
    raise ServiceError(
        f"{what}: {shortened(name)} is not on the list of this service; it has {', '.join(allowed) or 'none'}"
    )


def submitted(config: SearchConfig) -> dict[str, Any]:
    """Return what of an admitted configuration a job keeps: what the client gave, as JSON has it."""
    return config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_SERVICE))


def identity(config: SearchConfig, queue: str) -> str:
    """Return the id of a search: a hash of everything that decides its result, so that submitting twice is one job.

    A data set in a file counts by its contents, a model by its name and revision.
    """
    settings = config.model_dump(mode="json", exclude=set(OF_THE_SERVICE))
    names = (config.dataset, config.distillation.training_dataset)
    files = [Path(name) for name in names if name is not None and Path(name).is_file()]
    contents = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
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
