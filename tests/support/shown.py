"""Renderables as text, and what a reader of a terminal must find in them."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, RenderableType

TERMINAL = 80
"""Columns of a terminal, and of a log."""


def shown(renderable: RenderableType, width: int = TERMINAL) -> str:
    """Return what is printed on a terminal of `width` columns."""
    text = io.StringIO()
    Console(width=width, color_system=None, file=text).print(renderable, highlight=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def check_readable(renderable: RenderableType, rows: Sequence[tuple[str, str]], width: int = TERMINAL) -> None:
    """Check that each name of `rows` is printed whole, on one line with the beginning of its first figure, and nothing is cut."""
    text = shown(renderable, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for name, figure in rows:
        named = [line.split(name, 1) for line in text.splitlines() if name in line]
        assert any(not before.strip() and figure in after for before, after in named), (
            f"{name!r}, {figure!r} not in\n{text}"
        )
