"""Whether the packages of the extra `service` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from tuner.errors import ConfigError

PACKAGES = ("dbos", "fastapi", "httpx2", "jinja2", "prometheus_client", "uvicorn")
"""Modules of the extra."""


def check_installed() -> None:
    """Raise `ConfigError`, which says what to install, if a package is missing."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"the tuning service is not installed (no {', '.join(missing)}): pip install 'sdtune[service]'"
        )
