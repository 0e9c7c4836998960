"""Observations of production servers in the database of the service: a bounded number for each search, and the verdict on each.

Texts are read apart from what is judged: the verdict needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tuner.drift.contract import DriftState, Kept, ObservationReport, ObservedRequest, ObservedText, ObservedWindow
from tuner.leases.table import create_tables

MOST_WINDOWS, MOST_REQUESTS = 10_000, 1_000
"""Observations that are kept for a search; older ones are deleted. A server has 10,000 windows in about an hour of decoding."""

WINDOW, REQUEST, TEXT = "window", "request", "text"
_METADATA = sa.MetaData()
_OBSERVATIONS = sa.Table(
    "sdtune_observations",
    _METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("search", sa.String(16), nullable=False),
    sa.Column("kind", sa.String(8), nullable=False),
    sa.Column("server", sa.String(32), nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
    sa.UniqueConstraint("search", "kind", "server", "number"),
    sa.Index("sdtune_observations_latest", "search", "kind", "id"),
)
_VERDICTS = sa.Table(
    "sdtune_drift",
    _METADATA,
    sa.Column("search", sa.String(16), primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
)
_INSERT: Mapping[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class ObservationStore:
    """The observations of one database. Its tables are made if they are missing."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._insert = _INSERT[engine.dialect.name]
        create_tables(engine, _METADATA)

    def keep(self, search: str, report: ObservationReport, *, most_texts: int = 0) -> None:
        """Keep what is new in a report, and delete what is too old. What was reported before is not kept twice.

        Of the texts, `most_texts` are kept.
        """
        with self._engine.begin() as connection:
            for kind, found, most in (
                (WINDOW, report.windows, MOST_WINDOWS),
                (REQUEST, report.requests, MOST_REQUESTS),
                (TEXT, report.texts, most_texts),
            ):
                if not found:
                    continue
                self._add(connection, search, kind, report.server, found)
                of_kind = (_OBSERVATIONS.c.search == search) & (_OBSERVATIONS.c.kind == kind)
                ids = sa.select(_OBSERVATIONS.c.id).where(of_kind).order_by(_OBSERVATIONS.c.id.desc())
                newest_too_old = connection.scalar(ids.offset(most).limit(1))
                if newest_too_old is not None:
                    connection.execute(sa.delete(_OBSERVATIONS).where(of_kind, _OBSERVATIONS.c.id <= newest_too_old))

    def _add(
        self,
        connection: sa.Connection,
        search: str,
        kind: str,
        server: str,
        found: Sequence[ObservedWindow | ObservedRequest | ObservedText],
    ) -> None:
        rows = [
            {"search": search, "kind": kind, "server": server, "number": each.number, "facts": each.model_dump_json()}
            for each in found
        ]
        connection.execute(self._insert(_OBSERVATIONS).on_conflict_do_nothing(), rows)

    def kept(self, search: str) -> Kept:
        """Return what is kept for a search; of its texts the number."""
        columns = _OBSERVATIONS.c
        rows = sa.select(columns.kind, columns.server, columns.facts).where(
            columns.search == search, columns.kind.in_([WINDOW, REQUEST])
        )
        texts = sa.select(sa.func.count()).where(columns.search == search, columns.kind == TEXT)
        with self._engine.connect() as connection:
            found = connection.execute(rows.order_by(columns.id)).all()
            num_texts = connection.scalar(texts) or 0
        return Kept(
            [(row.server, ObservedWindow.model_validate_json(row.facts)) for row in found if row.kind == WINDOW],
            [ObservedRequest.model_validate_json(row.facts) for row in found if row.kind == REQUEST],
            num_texts,
        )

    def texts(self, search: str) -> list[ObservedText]:
        """Return the texts that are kept for a search, the oldest first."""
        columns = _OBSERVATIONS.c
        rows = sa.select(columns.facts).where(columns.search == search, columns.kind == TEXT)
        with self._engine.connect() as connection:
            found = connection.scalars(rows.order_by(columns.id)).all()
        return [ObservedText.model_validate_json(facts) for facts in found]

    def forget(self, search: str, judged: Iterable[str]) -> None:
        """Delete all observations of a search, texts included, and the verdicts on the profiles of the searches `judged`."""
        with self._engine.begin() as connection:
            connection.execute(sa.delete(_OBSERVATIONS).where(_OBSERVATIONS.c.search == search))
            connection.execute(sa.delete(_VERDICTS).where(_VERDICTS.c.search.in_(list(judged))))

    def note(self, search: str, state: DriftState) -> None:
        """Store the verdict on the profile of a search."""
        values = {"search": search, "state": state.model_dump_json()}
        statement = self._insert(_VERDICTS).values(values)
        with self._engine.begin() as connection:
            connection.execute(
                statement.on_conflict_do_update(index_elements=["search"], set_={"state": values["state"]})
            )

    def states(self, searches: Iterable[str]) -> dict[str, DriftState]:
        """Return the latest verdicts on the profiles of these searches, where there are any."""
        wanted = sa.select(_VERDICTS).where(_VERDICTS.c.search.in_(list(searches)))
        with self._engine.connect() as connection:
            return {row.search: DriftState.model_validate_json(row.state) for row in connection.execute(wanted)}
