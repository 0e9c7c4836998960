"""The identity of a process, so that another process can tell whether it still runs."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process on some machine."""

    host: str
    """Name of the machine, to show."""
    place: str
    """The machine since its last start and, in a container, the container: where `pid` is unique."""
    pid: int

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), _place(), os.getpid())

    @classmethod
    def from_text(cls, text: str) -> Process:
        """Return the process that `to_text` wrote."""
        return cls(**json.loads(text))

    def to_text(self) -> str:
        """Return the process as JSON."""
        return json.dumps(asdict(self))

    def has_ended(self) -> bool:
        """Return True if this was a process here and no longer runs. Of other machines nothing is known, so False."""
        if self.place != _place():
            return False
        try:
            os.kill(self.pid, 0)  # signal 0 only asks
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _place() -> str:
    """Return what two processes share if their process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()  # no Linux
