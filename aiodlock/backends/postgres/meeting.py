"""The first questions on a new connection: what is there, and may it be used?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from .._identity import Known
from .connection import Connection, ask, one_row
from .dialing import Host, Prepared
from .history import PLACE, History, history_of
from .installing import install
from .schema import READ_ONLY, VERSION, missing, wrong_version

#: How long the installation may take, which waits for that of others (seconds).
_INSTALL_WITHIN = 4.0
_HELLO = f"""
select v.oldest, v.newest, h.*, {PLACE} as place, a.backend_start, ({READ_ONLY}) as read_only
from aiodlock.versions() v cross join aiodlock.hello() h
left join pg_catalog.pg_stat_activity a on a.pid = pg_catalog.pg_backend_pid()
"""


class Meeting:
    """Examines connections for messages.

    :param create: make the schema if it is not there.
    :param on_log: is called with what the server says besides its answers.
    """

    def __init__(
        self,
        described: str,
        create: bool,
        known: Known[History],
        on_log: Callable[[Any, Any], object],
    ) -> None:
        self._described = described
        self._create = create
        self._known = known
        self._on_log = on_log

    async def meet(self, connection: Connection, host: Host, pooled: bool) -> Prepared:
        """Check that the server can be written to, and has the schema in the right version."""
        connection.add_log_listener(self._on_log)
        within, known, sent = host.patience.learned, self._known.value, now()
        idle = within if pooled else None
        try:
            row = await self._greet(connection, within, idle)
        except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError) as absent:
            await self._see_version(connection, within, idle)
            if not self._create:
                raise BackendError(missing(self._described)) from absent
            # Only here: with a lock of all who install, and rights that a client need not have.
            await ask(connection, install(connection), max(within, _INSTALL_WITHIN))
            sent = now()
            row = await self._greet(connection, within, idle)
        took = now() - sent
        if row["read_only"]:
            raise BackendUnavailable(f"{self._described} {row['read_only']}")
        if row["oldest"] is None or not row["oldest"] <= VERSION <= row["newest"]:
            raise BackendError(f"{self._described}: {wrong_version(row['version'])}")
        session = None
        if not pooled and row["backend_start"] is not None:
            session = connection.get_server_pid(), row["backend_start"]
        return Prepared(history_of(row, known), session, took)

    async def _greet(self, connection: Connection, within: float, idle: float | None) -> Any:
        """Return what the server and the schema say of themselves."""
        try:
            return await ask(connection, one_row(connection, idle, _HELLO), within)
        except asyncpg.InsufficientPrivilegeError as refused:
            raise BackendError(
                f"{self._described}: this role may not use the schema aiodlock ({refused}). The owner of "
                "the schema has to run: GRANT USAGE ON SCHEMA aiodlock TO the_role; "
                "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA aiodlock TO the_role"
            ) from refused

    async def _see_version(self, connection: Connection, within: float, idle: float | None) -> None:
        """Raise if there is a schema of another version, or if no schema can be made here."""
        (read_only,) = await ask(connection, one_row(connection, idle, READ_ONLY), within)
        if read_only:
            raise BackendUnavailable(f"{self._described} {read_only}")
        for sql in (
            "select newest from aiodlock.versions()",
            "select version from aiodlock.hello()",  # before version 11
        ):
            try:
                (found,) = await ask(connection, one_row(connection, idle, sql), within)
            except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
                continue
            if found != VERSION:
                raise BackendError(f"{self._described}: {wrong_version(found)}")
