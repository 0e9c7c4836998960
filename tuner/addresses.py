"""Addresses of stores as they are shown: without the password."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/\s]*@")
"""The password in an address; it may hold an `@`, as everything up to the last one belongs to it."""


def without_password(text: str) -> str:
    """Return the text with the password of each address in it masked."""
    return _PASSWORD.sub(r"\1:***@", text)
