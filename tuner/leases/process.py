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
    started: int | None = None
    """Clock ticks from the start of the machine to that of the process, which tell it from a later one of the same `pid`; None
    where the system does not say."""

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), _place(), os.getpid(), _started(os.getpid()))

    @classmethod
    def from_text(cls, text: str) -> Process:
        """Return the process that `to_text` wrote."""
        return cls(**json.loads(text))

    def to_text(self) -> str:
        """Return the process as JSON."""
        return json.dumps(asdict(self))

    def has_ended(self) -> bool | None:
        """Return whether this was a process here that no longer runs; None where that cannot be known, as on another machine."""
        if self.place != _place():
            return None
        try:
            os.kill(self.pid, 0)  # signal 0 only asks
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        started = _started(self.pid)
        return None if self.started is None or started is None else started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _place() -> str:
    """Return what two processes share if their process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()  # no Linux


def _started(pid: int) -> int | None:
    """Return the ticks from the start of the machine to that of a process, -1 if it has ended and waits to be reaped.

    None where the system does not say: no Linux, or a process of another user.
    """
    try:
        # The name of the program stands first, in parentheses, and may hold anything.
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return -1 if state in "ZX" else int(fields[18])
