"""Conversations for a model without a chat template: paragraphs labelled with the roles, in the search and in the server."""

from __future__ import annotations

from collections.abc import Iterable

LABELS = {"system": "System", "user": "User", "assistant": "Assistant"}
"""Labels of roles; other roles are written with a capital."""


def paragraphs(turns: Iterable[tuple[str, str]]) -> str:
    """Return turns, each a role and a text, as paragraphs."""
    return "\n\n".join(f"{LABELS.get(role, role.capitalize())}: {text}" for role, text in turns)


def asking(turns: Iterable[tuple[str, str]]) -> str:
    """Return turns as paragraphs, and the label of the reply that is to be written."""
    return f"{paragraphs(turns)}\n\n{LABELS['assistant']}:"
