"""Faults of disks and databases, made by the process that is to meet them.

They are real: the kernel refuses to write, and another process holds the lock.
"""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Fault = Callable[[], object]
FILLER = "filler"
BLOCK = 4096
WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

_CAPABILITY_VERSION = 0x20080522
"""`_LINUX_CAPABILITY_VERSION_3` of linux/capability.h: 64 bits, as two words."""
_OVERRIDES = 0b111 << 1
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER: what lets root pass over permissions."""
_LOCKER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
database.execute("ROLLBACK")
"""


def fill(folder: Path) -> None:
    """Fill the disk of `folder` to the last block."""
    with (folder / FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(BLOCK))


def make_room(folder: Path) -> None:
    """Take the filling away."""
    (folder / FILLER).unlink()


def lock(database: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Let another process lock a SQLite file for readers and writers, for `seconds` from now; return that process."""
    process = subprocess.Popen([sys.executable, "-c", _LOCKER, database, str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"locked\n":
        raise RuntimeError(f"{database} could not be locked")
    return process


def forbid_writing(folder: Path) -> None:
    """Take the right to write in `folder` away from all, and root's right to write all the same from this thread."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~WRITE_BITS)
    _set_overrides(allowed=False)


def allow_writing(folder: Path) -> None:
    """Give the owner the right to write in `folder`."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be written in `folder` by this thread while the context lasts."""
    forbid_writing(folder)
    try:
        yield
    finally:
        _set_overrides(allowed=True)
        allow_writing(folder)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _set_overrides(*, allowed: bool) -> None:
    """Switch root's rights over permissions for this thread; nothing for other users, who have none."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_CAPABILITY_VERSION, 0), (_Sets * 2)()
    for call in (libc.capget, libc.capset):
        if call(ctypes.byref(header), sets) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if allowed:
            sets[0].effective |= sets[0].permitted & _OVERRIDES
        else:
            sets[0].effective &= ~_OVERRIDES
