"""A PostgreSQL server for the tests, where it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import postgres as server
from tuner.errors import ConfigError


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server that answers on a socket file only; yield the address of its database. Skip where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(server.postgres())
        except ConfigError as missing:
            pytest.skip(str(missing))
        yield url
