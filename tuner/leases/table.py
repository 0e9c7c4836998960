"""A table of leases: a name, the process that holds it, and when that process last said so.

Each change is one conditional statement, so of two processes that take a lease at once one gets it. Whether a process has ended is
known on its own machine, where no clock is asked. Elsewhere it counts as dead when it has been silent for `GRACE_SECONDS` by the
database's clock, as the clocks of several machines differ.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tuner.errors import StorageError
from tuner.leases.heartbeat import Heartbeat
from tuner.leases.process import Process

BEAT_SECONDS = 15.0
"""Seconds between two signs of life."""
GRACE_SECONDS = 60.0
"""Seconds of silence after which a holder counts as dead: some missed beats, not a slow disk."""

LEASES_TABLE = "sdtune_leases"
_GIVEN_UP: set[str] = set()
"""Tokens of leases that this process could not give back, as the database failed: a process that lives on holds them no longer."""

_METADATA = sa.MetaData()
_LEASES = sa.Table(
    LEASES_TABLE,
    _METADATA,
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("beat", sa.Float(53), nullable=False),
)


class LeaseHeldError(StorageError):
    """A lease that another process holds."""

    def __init__(self, name: str, holder: Holder) -> None:
        self.holder = holder
        super().__init__(f"{name} is held by {holder.process}, last heard of {holder.last_heard}")


class LeaseLostError(StorageError):
    """A lease that another process took over, as this one was silent for too long."""


@dataclass(frozen=True)
class Holder:
    """A row of the table."""

    name: str
    token: str
    process: Process
    facts: str
    """What the holder says of itself, as text."""
    silent_seconds: float
    """Seconds since its last sign of life."""

    @property
    def last_heard(self) -> str:
        """How long ago that was, in words."""
        return f"{max(0.0, self.silent_seconds):.0f} s ago"

    def is_dead(self, grace: float) -> bool:
        """Return True if the holder has ended or, where that cannot be known, was silent for longer than `grace` seconds."""
        if self.token in _GIVEN_UP:
            return True
        ended = self.process.has_ended()
        return self.silent_seconds > grace if ended is None else ended


class LeaseTable:
    """The leases of one database."""

    def __init__(
        self,
        engine: sa.Engine,
        *,
        process: Process | None = None,
        grace: float = GRACE_SECONDS,
        beat: float = BEAT_SECONDS,
    ) -> None:
        self._engine = engine
        self._process = process or Process.current()
        self.grace, self._beat_seconds = grace, beat
        create_tables(engine, _METADATA)

    def take(self, name: str, *, facts: str = "", patience: float = 0.0) -> Lease:
        """Return the lease `name`, taken from nobody or from a dead process.

        Waits up to `patience` seconds for a living holder, then raises `LeaseHeldError`.
        """
        token, end = uuid.uuid4().hex, time.monotonic() + patience
        while not self._insert(name, token, facts):
            holder = self.holder(name)
            if holder is None:
                continue  # released since
            if holder.is_dead(self.grace):
                if self._replace(holder, token, facts):
                    break
                continue  # another was faster
            if time.monotonic() >= end:
                raise LeaseHeldError(name, holder)
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
        return Lease(self, name, token, self._beat_seconds)

    def holder(self, name: str) -> Holder | None:
        """Return the holder of a lease, dead or alive, or None."""
        return next(iter(self._rows(_LEASES.c.name == name)), None)

    def holders(self, prefix: str) -> list[Holder]:
        """Return the holders of all leases whose name begins with `prefix`, dead or alive, by name."""
        return self._rows(_LEASES.c.name.startswith(prefix, autoescape=True))

    def is_held(self, name: str, token: str) -> bool:
        """Return True if a living process holds the lease by this token."""
        holder = self.holder(name)
        return holder is not None and holder.token == token and not holder.is_dead(self.grace)

    def drop(self, holder: Holder) -> bool:
        """Remove the lease of a holder, unless it changed hands; return True if it was removed."""
        return self._changed(sa.delete(_LEASES).where(*_of(holder.name, holder.token)))

    def beat(self, name: str, token: str) -> bool:
        """Give a sign of life; return False if the lease is lost."""
        return self._changed(sa.update(_LEASES).where(*_of(name, token)).values(beat=self._now))

    def tell(self, name: str, token: str, facts: str) -> bool:
        """Replace what the holder says of itself, which is a sign of life too; return False if the lease is lost."""
        return self._changed(sa.update(_LEASES).where(*_of(name, token)).values(beat=self._now, facts=facts))

    def release(self, name: str, token: str) -> None:
        """Give the lease back, if it is still held."""
        self._changed(sa.delete(_LEASES).where(*_of(name, token)))

    def _insert(self, name: str, token: str, facts: str) -> bool:
        values = {"name": name, "token": token, "process": self._process.to_text(), "facts": facts, "beat": self._now}
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(_LEASES).values(values))
        except sa.exc.IntegrityError:
            return False
        return True

    def _replace(self, dead: Holder, token: str, facts: str) -> bool:
        """Take a lease from a dead holder, unless it gave a sign of life meanwhile or another took it."""
        silent = self._now - _LEASES.c.beat >= dead.silent_seconds
        values = {"token": token, "process": self._process.to_text(), "facts": facts, "beat": self._now}
        return self._changed(sa.update(_LEASES).where(*_of(dead.name, dead.token), silent).values(values))

    def _rows(self, condition: sa.ColumnElement[bool]) -> list[Holder]:
        columns = (_LEASES.c.name, _LEASES.c.token, _LEASES.c.process, _LEASES.c.facts)
        wanted = sa.select(*columns, (self._now - _LEASES.c.beat).label("silent")).where(condition)
        with self._engine.connect() as connection:
            rows: Sequence[sa.Row] = connection.execute(wanted.order_by(_LEASES.c.name)).all()
        return [Holder(row[0], row[1], Process.from_text(row[2]), row[3], float(row[4])) for row in rows]

    def _changed(self, statement: sa.Update | sa.Delete) -> bool:
        with self._engine.begin() as connection:
            return connection.execute(statement).rowcount == 1

    @property
    def _now(self) -> sa.ColumnElement[float]:
        """Seconds since 1970 by the database's clock; by this machine's where the database's is not known."""
        match self._engine.dialect.name:
            case "sqlite":
                return sa.literal_column("((julianday('now') - 2440587.5) * 86400.0)", sa.Float)
            case "postgresql":
                return sa.literal_column("extract(epoch from clock_timestamp())::double precision", sa.Float)
            case _:
                return sa.literal(time.time(), sa.Float)


class Lease:
    """A lease that this process holds, with a thread that gives signs of life until it is released or forgotten."""

    def __init__(self, table: LeaseTable, name: str, token: str, beat_seconds: float) -> None:
        self._table, self.name, self.token = table, name, token
        self._heartbeat = Heartbeat(self._beat, beat_seconds)

    def _beat(self) -> None:
        self._table.beat(self.name, self.token)

    def tell(self, facts: str) -> None:
        """Replace what the holder says of itself. Raises `LeaseLostError` if another process took the lease."""
        if not self._table.tell(self.name, self.token, facts):
            raise self.lost()

    def check(self) -> None:
        """Raise `LeaseLostError` if another process took the lease."""
        if not self._table.beat(self.name, self.token):
            raise self.lost()

    def lost(self) -> LeaseLostError:
        """Return the error of a lease that another process took."""
        return LeaseLostError(
            f"{self.name} was taken over by another process, as this one was silent for more than {self._table.grace:.0f} s"
        )

    def stop(self) -> None:
        """Give no more signs of life."""
        self._heartbeat.stop()

    def release(self) -> None:
        """Give the lease back."""
        self.stop()
        try:
            self._table.release(self.name, self.token)
        except sa.exc.SQLAlchemyError:
            _GIVEN_UP.add(self.token)
            raise

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()


def create_tables(engine: sa.Engine, metadata: sa.MetaData) -> None:
    """Create the tables that are missing, also while another process does so."""
    attempt(lambda: metadata.create_all(engine))


def attempt(create: Callable[[], None], attempts: int = 5) -> None:
    """Call `create`, again if another process made the same table between its look and its creation."""
    for left in reversed(range(attempts)):
        try:
            return create()
        except (sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError) as cause:
            if not left or not ("exists" in str(cause) or isinstance(cause, sa.exc.IntegrityError)):
                raise
            time.sleep(0.1)
    return None


def _of(name: str, token: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return _LEASES.c.name == name, _LEASES.c.token == token
