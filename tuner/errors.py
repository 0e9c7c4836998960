"""Errors that a user can fix, each of one line, and addresses as such lines show them."""

from __future__ import annotations

import re

from decoding.errors import SdtuneError


class ConfigError(SdtuneError):
    """Unusable setting, configuration file, model or device."""


class DatasetError(SdtuneError):
    """Dataset that cannot be read or has too few usable prompts."""


class StorageError(SdtuneError):
    """Trial storage that cannot be used, or holds a different search of that name."""


class StorageOutageError(StorageError):
    """Trial storage that does not answer now. The same work may go on later."""


class TrackingError(SdtuneError):
    """MLflow tracking store that cannot be used."""


class TrackingOutageError(TrackingError):
    """MLflow tracking store that does not answer now. The same work may go on later."""


class PromotionError(SdtuneError):
    """Profile that is not better than what it would replace."""


class MemoryShortageError(SdtuneError):
    """Work that does not fit in the memory of the device."""


class SearchError(SdtuneError):
    """Search that ended without a result."""


class ExportError(SdtuneError):
    """Profile that an engine cannot express, or an export that cannot be written."""


class EngineError(SdtuneError):
    """Engine that is not found, does not start, or fails."""


_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/\s]*@")
"""The password in an address; it may hold an `@`, as everything up to the last one belongs to it."""


def without_password(text: str) -> str:
    """Return the text with the password of each address in it masked."""
    return _PASSWORD.sub(r"\1:***@", text)
