"""The packages that the benchmark of a GPU needs: `python -m tuner.evaluation.gpu.packages` names the missing ones.

Imports the standard library only, so that it answers on a machine where most of them are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "click": "click",
        "datasets": "datasets",
        "greenlet": "greenlet",
        "jinja2": "jinja2",
        "mlflow": "mlflow",
        "optuna": "optuna",
        "plotly": "plotly",
        "psutil": "psutil",
        "pydantic": "pydantic",
        "yaml": "pyyaml",
        "rich": "rich",
        "safetensors": "safetensors",
        "sklearn": "scikit-learn",
        "scipy": "scipy",
        "sqlalchemy": "sqlalchemy",
        "torch": "torch",
        "transformers": "transformers",
    }
)
"""Names for `pip` by the names that are imported."""


def missing_packages() -> tuple[str, ...]:
    """Return the names, for `pip`, of the packages that cannot be found. Nothing is imported."""
    return tuple(package for module, package in NEEDED.items() if find_spec(module) is None)


def refusal() -> str | None:
    """Return one line that names all missing packages, or None."""
    missing = missing_packages()
    return f"packages are missing: {' '.join(missing)}; pip install {' '.join(missing)}" if missing else None


if __name__ == "__main__":
    sys.exit(refusal())
