"""Types of the fixtures that run commands."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

# `sdtune search` with flags as keyword arguments; None removes a flag.
SearchCommand = Callable[..., Result]
