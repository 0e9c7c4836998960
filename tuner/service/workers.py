"""The table of workers: which live, where, and with which search.

Whether a process has ended is known on its own machine, where no clock is asked. Elsewhere a worker counts as dead when it has been
silent for `GRACE_SECONDS` by the database's clock, as the clocks of several machines differ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa
from filelock import FileLock, Timeout

from tuner.databases import attempt
from tuner.service.contract import WorkerCard

BEAT_SECONDS = 15.0
"""Seconds between two signs of life."""
GRACE_SECONDS = 60.0
"""Seconds of silence after which a worker of another machine counts as dead: some missed beats, not a slow disk."""
_LOCK = (0x73647475, 1)
"""Key of the lock in PostgreSQL. Searches have keys of one number, which are others."""

_WORKERS = sa.Table(
    "sdtune_workers",
    sa.MetaData(),
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started", sa.BigInteger),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("beat", sa.Float(53), nullable=False),
)


@dataclass(frozen=True)
class Process:
    """A process on some machine, so that another can tell whether it still runs."""

    host: str
    """Name of the machine, to show."""
    place: str
    """The machine since its last start and, in a container, the container: where `pid` is unique."""
    pid: int
    started: int | None
    """Clock ticks from the start of the machine to that of the process, which tell it from a later one of the same `pid`; None
    where the system does not say."""

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), _place(), os.getpid(), _started(os.getpid()))

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


class Workers:
    """The workers of one database. All methods raise SQLAlchemy's errors, at once if the database does not answer."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        attempt(lambda: _WORKERS.metadata.create_all(engine))

    def add(self, name: str, device: str, queue: str, process: Process | None = None) -> None:
        """Add a worker that has no search yet; it is this process unless another is given."""
        row = {
            **asdict(process or Process.current()),
            "name": name,
            "device": device,
            "queue": queue,
            "beat": self._now,
        }
        self._changed(sa.insert(_WORKERS).values(row))

    def beat(self, name: str) -> bool:
        """Give a sign of life; return False if the worker was taken for dead, and its search queued again."""
        return self._changed(sa.update(_WORKERS).where(_WORKERS.c.name == name).values(beat=self._now))

    def tell(self, name: str, job: str | None) -> None:
        """Store which search a worker runs, for `GET /v1/workers`."""
        self._changed(sa.update(_WORKERS).where(_WORKERS.c.name == name).values(job=job))

    def remove(self, name: str) -> None:
        self._changed(sa.delete(_WORKERS).where(_WORKERS.c.name == name))

    def cards(self) -> list[WorkerCard]:
        """Return all workers by name, also those that died and were not cleared away yet."""
        wanted = sa.select(_WORKERS, (self._now - _WORKERS.c.beat).label("silent")).order_by(_WORKERS.c.name)
        with self._engine.connect() as connection:
            return [_card(row) for row in connection.execute(wanted)]

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield whether no other process is in this block; none can enter it before this one has left it, or has ended."""
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as connection:
                yield bool(connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(*_LOCK))))
            return
        lock = FileLock(f"{Path(str(self._engine.url.database)).resolve()}-workers.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _changed(self, statement: sa.Insert | sa.Update | sa.Delete) -> bool:
        with self._engine.begin() as connection:
            return connection.execute(statement).rowcount == 1

    @property
    def _now(self) -> sa.ColumnElement[float]:
        """Seconds since 1970 by the database's clock."""
        if self._engine.dialect.name == "sqlite":
            return sa.literal_column("((julianday('now') - 2440587.5) * 86400.0)", sa.Float)
        return sa.literal_column("extract(epoch from clock_timestamp())::double precision", sa.Float)


def _card(row: sa.Row) -> WorkerCard:
    ended = Process(row.host, row.place, row.pid, row.started).has_ended()
    silent = max(0.0, float(row.silent))
    alive = silent <= GRACE_SECONDS if ended is None else not ended
    return WorkerCard(
        name=row.name,
        host=row.host,
        device=row.device,
        queue=row.queue,
        job=row.job,
        silent_seconds=silent,
        alive=alive,
    )


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
