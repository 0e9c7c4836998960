"""A process that runs a command in a session of its own, and ends it when its own standard input closes.

The parent holds the other end: whatever ends the parent, a signal that cannot be caught too, ends the command.
Standard library only, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

PATIENCE_SECONDS = 15.0
"""Seconds between the request to end and the end by force."""


def main(command: list[str]) -> int:
    """Run `command` until it ends or standard input closes; return its exit status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(process.pid,), daemon=True).start()
    status = process.wait()
    _signal(process.pid, signal.SIGKILL)  # what it has started itself
    return status


def _end_with_input(group: int) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _signal(group, signal.SIGTERM)
    threading.Event().wait(PATIENCE_SECONDS)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
