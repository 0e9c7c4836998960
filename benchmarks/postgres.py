"""A PostgreSQL server for a while, where its programs are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from decoding.errors import how_to_install
from tuner.errors import ConfigError


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server that answers on a socket file only; yield the address of its database.

    It does not wait for its disk, so its figures are those of a server without one. Raises `ConfigError` where it is not installed.
    """
    folder_of_programs = programs()
    if folder_of_programs is None:
        raise ConfigError("PostgreSQL is not installed: no initdb was found")
    if find_spec("psycopg") is None:
        raise ConfigError(f"psycopg is not installed: {how_to_install('postgres')}")
    folder = Path(tempfile.mkdtemp(prefix="sdtune-pg-"))
    user = "postgres" if os.getuid() == 0 else None  # the server refuses to run as root
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        command = [str(folder_of_programs / program), "-D", str(folder / "data"), *arguments]
        with (folder / "log").open("a") as log:  # no pipe: the server would keep it open
            subprocess.run(command, user=user, cwd=folder, stdout=log, stderr=log, check=True)

    try:
        run("initdb", "-U", "postgres", "-A", "trust", "--no-sync")
        run("pg_ctl", "-w", "-o", f"-k {folder} -c listen_addresses='' -c fsync=off", "start")
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def programs() -> Path | None:
    """Return the folder of the server's programs; Debian keeps it off the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
