"""What the process of a device must load and be, so that what it does can be compared with what this process would do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from decoding.documents.strict_yaml import Document
from decoding.fingerprint import Fingerprint, fingerprint
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.inputs.environment import device_name, versions
from tuner.inputs.models import Loaded, load

COMPARED_PACKAGES = ("sdtune", "torch", "transformers")
"""Packages whose versions must be those of this process."""


class ModelSpec(Document):
    """The model and the device of one command."""

    model: str
    revision: str | None
    dtype: str
    device_type: str
    """`cpu` or `cuda`; a process sees one GPU."""
    threads: int
    config_sha256: str
    weights_sha256: str
    """Of the model; see `Fingerprint`."""
    device_name: str
    precision: str
    versions: dict[str, str]
    """What the device must have, for its results to be compared with the others."""

    @classmethod
    def of(cls, config: SearchConfig, model: PreTrainedModel, identity: Fingerprint, **others: Any) -> Self:
        """Return the spec of the model that this process has loaded; `others` are the further fields of a derived spec."""
        folder = Path(config.model)
        return cls(
            model=str(folder.resolve()) if folder.exists() else config.model,
            revision=config.revision,
            dtype=config.dtype,
            device_type=model.device.type,
            threads=torch.get_num_threads(),
            config_sha256=identity.config_sha256,
            weights_sha256=identity.weights_sha256,
            device_name=device_name(model.device),
            precision=str(model.dtype),
            versions=versions(),
            **others,
        )

    def loaded(self) -> Loaded:
        """Load the model in the process of a device.

        Raises `SdtuneError` if it cannot be loaded, and `ConfigError` if model, device or versions are not those wanted.
        """
        torch.set_num_threads(self.threads)
        loaded = load(self.model, revision=self.revision, dtype=self.dtype, device=self.device_type)
        self.check(
            {
                "device_name": device_name(loaded.model.device),
                "precision": str(loaded.model.dtype),
                **vars(fingerprint(loaded.model)),
                **versions(),
            }
        )
        return loaded

    def check(self, found: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if what was `found` on a device is not what is wanted."""
        wanted: dict[str, Any] = {
            "device_name": self.device_name,
            "precision": self.precision,
            "config_sha256": self.config_sha256,
            "weights_sha256": self.weights_sha256,
            **{package: self.versions[package] for package in COMPARED_PACKAGES},
        }
        differing = [key for key, value in wanted.items() if found.get(key) != value]
        if differing:
            said = "; ".join(
                f"{key.replace('_', ' ')} {found.get(key)!s:.60} in place of {wanted[key]!s:.60}" for key in differing
            )
            raise ConfigError(f"trials on it could not be compared with the others: {said}")
