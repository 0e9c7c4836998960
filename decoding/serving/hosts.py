"""By which host names clients may address a server: a web page whose own name leads here must not read the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address

from decoding.errors import SdtuneError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


class HostNameError(SdtuneError):
    """What cannot be a host name."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address that is listened on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_names(host: str, allowed: Sequence[str] = ()) -> list[str]:
    """Return the names that a request to a server on `host` may give in its Host header, for `TrustedHostMiddleware`.

    On other addresses than loopback clients have a key, which no web page knows: any name then, unless some are `allowed`.
    """
    for name in allowed:
        if not NAME.fullmatch(name):
            raise HostNameError(f"{name!r} is no host name: give one without a port, as in api.example.com")
    if not allowed and not is_loopback(host):
        return ["*"]
    return [*LOOPBACK, f"[{host}]" if ":" in host else host, *allowed]
