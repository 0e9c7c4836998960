"""Configurations of the searches of a suite, with all files in its folder."""

from __future__ import annotations

from pathlib import Path

from decoding.documents.strict_yaml import validate
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.evaluation.suite.contract import Place

NOMINAL_LAYERS = 8
"""Layers of a model for which studies are asked whether they want exit heads at all."""


def configuration(place: Place, model: str, precision: str, task: str, method: str | None = None) -> SearchConfig:
    """Return the configuration of a search, or of a task if there is no method. Its outputs are still to be named."""
    entry = place.suite.models[model]
    settings = place.suite.settings_of(task, method)
    own = {
        "model": entry.model,
        "revision": entry.revision,
        "dtype": precision,
        "heads": entry.heads or place.out / "heads" / model,
        "tracking_uri": f"sqlite:///{(place.out / 'mlflow.db').absolute()}",
    }
    return validate(SearchConfig, {**settings, **own}, source=f"suite: {task}", error=ConfigError)


def in_folder(config: SearchConfig, folder: Path, experiment: str) -> SearchConfig:
    """Return the configuration with its trials and its profile in `folder`."""
    storage = f"sqlite:///{(folder / 'trials.db').absolute()}"
    return config.model_copy(update={"storage": storage, "experiment": experiment, "out": folder / "profile.yaml"})


def wants_heads(config: SearchConfig) -> bool:
    """Return whether a study of the configuration drafts with exit heads that may be distilled."""
    wanted = (config.study_settings(name).wanted_heads(NOMINAL_LAYERS) for name in config.study)
    return config.distill == "auto" and any(wanted)
