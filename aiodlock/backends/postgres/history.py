"""Which database a connection leads to, and which of its histories.

A standby that is promoted begins a new timeline, and so a history of its own. The old primary may be still
there, or come back. The newest history is the one that counts. Two standbys that were promoted apart from
each other have timelines of the same number: of these the one counts on which a client of aiodlock has
called first. So all clients that reach both agree.

A copy on the same server has the rows of its original, also those of the history. So where these rows are
belongs to what is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from .connection import FAILURES, Connection, ask, one_row

#: The table of histories and its database, by their numbers: a copy has another table (of the schema, by
#: pg_restore), or is in another database (CREATE DATABASE … TEMPLATE).
PLACE = (
    "'aiodlock.history'::pg_catalog.regclass::pg_catalog.oid || '/' || pg_catalog.split_part("
    "pg_catalog.pg_relation_filepath('aiodlock.history'), '/', -2)"
)
_HELLO = f"select h.*, {PLACE} as place from aiodlock.hello() h"


@dataclass(frozen=True, slots=True)
class History:
    """What ``aiodlock.hello`` says.

    :param system: the database cluster's identifier, and where the rows are.
    :param timeline: of the log that is being written.
    :param id: made at random on that timeline, and where the rows are.
    :param born_us: when the id was made, in microseconds of the server's clock.
    :param flushed: so many bytes of the log are on the disk.
    :param asked_after: so many bytes of this history were known when this was asked. What was heard since
        of a newer state says nothing of this one: the answers of two connections may overtake each other.
    """

    system: str
    timeline: int
    id: str
    born_us: int
    flushed: int
    asked_after: int = 0

    @property
    def rank(self) -> tuple[int, int, str]:
        """The larger one counts."""
        return self.timeline, -self.born_us, self.id

    def conflict(self, known: Self) -> str:
        """Say why this does not count beside the known one; "" when it does."""
        if self.system != known.system:
            return (
                "it is another database, a copy, or its schema was made anew: "
                f"system {self.system}, known {known.system}"
            )
        if self.id == known.id:
            missing = self.asked_after - self.flushed
            return f"it is an older state: {missing} bytes are missing" if missing > 0 else ""
        if self.rank > known.rank:
            return ""
        if self.timeline == known.timeline:
            return (
                f"two servers were promoted to timeline {self.timeline}, and the other one counts"
            )
        return f"it was the primary before: timeline {self.timeline}, known {known.timeline}"

    def after(self, known: Self) -> Self:
        """Return the newer one."""
        if self.id == known.id and self.flushed < known.flushed:
            return replace(self, flushed=known.flushed)
        return self


def history_of(row: Mapping[str, Any], known: History | None) -> History | None:
    """Return the history that ``aiodlock.hello`` told of; None on a standby.

    :param known: what was known when it was asked.
    """
    if row["history"] is None:
        return None
    history = f"{row['history']}/{row['place']}"
    return History(
        f"{row['system']}/{row['place']}",
        row["timeline"],
        history,
        row["born_us"],
        int(row["flushed"]),
        known.flushed if known is not None and known.id == history else 0,
    )


async def history_at(
    connection: Connection, within: float, known: History | None = None, *, direct: bool = False
) -> History | None:
    """Ask for the history; None where it is not told.

    :param known: what is known now.
    :param direct: no pooler is between. Else nothing is left in the session.
    """
    hello = one_row(connection, None if direct else within, _HELLO)
    try:
        return history_of(await ask(connection, hello, within), known)
    except FAILURES:
        if connection.is_closed():
            raise
        return None  # there is no such function, or it is not this role's
