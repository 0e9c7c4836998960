"""Processes that are not this one."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from tuner.leases.process import Process


def ended_process() -> Process:
    """Return a process of this machine that has ended."""
    done = subprocess.Popen(["true"])
    done.wait()
    return replace(Process.current(), pid=done.pid)
