"""All evaluations by name, as `module:class`, imported when they are asked for."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from tuner.evaluation.contract import Evaluation

EVALUATIONS: Mapping[str, str] = MappingProxyType({})
"""To add an evaluation, write its class and name it here."""


def resolve(name: str) -> type[Evaluation]:
    """Import and return the class of an evaluation. Raises KeyError for an unknown name."""
    return pkgutil.resolve_name(EVALUATIONS[name])
