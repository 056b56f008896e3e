"""What is asked of the known database, and of no other: each statement asks, too, whether it is that one.

Behind a pooler, or after an upgrade, that may change between two statements. So a statement answers with
null, and does nothing, if the functions have another version, or the log another history.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from .._identity import Known
from .connection import Connection, one_row
from .history import PLACE, History
from .link import Link
from .messages import Message, Messages, NotReplicated, OtherHistory
from .schema import VERSION

#: The function of the server that says that a commit was not waited for by its standby. Its text may be in
#: any language.
_NO_STANDBY = "SyncRepWaitForLSN"
_ANOTHER = "another server answers now, or the schema has another version"


def is_known(version: str, history: str) -> str:
    """Return the condition that the server has this version and this history.

    It is no function, because that would cost a third of what a call of ``turn`` costs.
    """
    return (
        f"aiodlock.version() = {version} and exists (select from aiodlock.history h "
        f"where h.id || '/' || {PLACE} = {history} and h.timeline = ('x' || pg_catalog.left("
        "pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8))::bit(32)::integer)"
    )


def checked(expression: str, first: int) -> str:
    """Return a statement that evaluates an expression only if the server is the known one.

    :param first: the number of the first of two further parameters: the version and the history.
    """
    return f"select case when {is_known(f'${first}', f'${first + 1}')} then {expression} end"


def rows_of(sql: str, parameters: int) -> str:
    """Return a statement with the rows of a query, as JSON."""
    rows = f"(select coalesce(pg_catalog.json_agg(q), '[]') from ({sql}) q)"
    return checked(rows, parameters + 1)


TURN = checked("aiodlock.turn($1, $2, $3)", 4)


class Calls:
    """Sends messages and queries to the database. Mutable state: ``_unsafe`` (the connections on which a
    commit has not waited for its standby).

    :param label: the client's.
    :param retention: for how long a free name's last token is kept (ms).
    :param on_heard: is called with what the database says besides the answers.
    """

    def __init__(
        self,
        link: Link,
        known: Known[History],
        *,
        prefix: str,
        label: str,
        retention: int,
        on_heard: Callable[[Sequence[str]], object],
    ) -> None:
        self.messages: Messages = Messages(link, self._carry, on_heard, known.heard)
        self.prefix: str = prefix
        self.label: str = label
        self._link = link
        self._known = known
        self._retention = retention
        self._unsafe: set[Connection] = set()

    async def up(self, *, hurry: bool = False) -> None:
        """Wait for a connection if there is none."""
        if self._link.connection is None:
            await self._link.wait_up(hurry=hurry)

    def key(self, kind: str, name: str) -> str:
        """Return what a name is called in the tables."""
        return f"{self.prefix}:{kind[0]}:{quote(name, safe='')}"

    def turn(self, message: str) -> asyncio.Future[str]:
        """Send a message that may change anything of its name."""
        return self.messages.submit(Message(message))

    def start(self, sql: str, *arguments: object) -> asyncio.Future[str]:
        """Send a query; the future gets its rows, as JSON."""
        statement = rows_of(sql, len(arguments))
        return self.messages.query(lambda connection: self._ask(connection, statement, *arguments))

    async def rows(self, sql: str, *arguments: object) -> list[dict[str, Any]]:
        """Return a query's rows."""
        rows: list[dict[str, Any]] = json.loads(await self.start(sql, *arguments))
        return rows

    async def notify(self, channel: str, text: str) -> None:
        """Notify all who listen, in one round trip."""

        async def notify(connection: Connection) -> None:
            version, history = self._who
            known = is_known(str(version), "'" + history.replace("'", "''") + "'")
            sql = f"select pg_catalog.pg_notify('{channel}', '{text}') where {known}"
            if await connection.execute(sql) != "SELECT 1":
                raise OtherHistory(_ANOTHER)

        await self.messages.query(notify)

    async def _carry(self, connection: Connection, messages: list[Message]) -> list[str]:
        text = "\n".join([one.text for one in messages])
        answers = await self._ask(connection, TURN, self.label, self._retention, text)
        if connection in self._unsafe:
            self._unsafe.discard(connection)
            raise NotReplicated("the wait for the standby was ended, and the commit may be lost")
        return answers.split("\n")

    async def _ask(self, connection: Connection, statement: str, *arguments: object) -> str:
        idle = self.messages.patience.learned if self._link.dialer.pooled else None
        row = await one_row(connection, idle, statement, *arguments, *self._who)
        answer: str | None = row[0]
        if answer is None:
            raise OtherHistory(_ANOTHER)
        return answer

    @property
    def _who(self) -> tuple[int, str]:
        """Which version and which history the server must have."""
        known = self._known.value
        return VERSION, known.id if known is not None else ""

    def on_log(self, connection: Any, message: Any) -> None:
        """The server says something besides its answers."""
        if getattr(message, "server_source_function", None) == _NO_STANDBY:
            self._unsafe.add(connection)
