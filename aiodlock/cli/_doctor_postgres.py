"""``aiodlock doctor`` for PostgreSQL: version, schema, durability, notifications, and old transactions."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from .. import BackendUnavailable
from ..backends.postgres.connection import FAILURES, Connection, ask, connect, transaction
from ..backends.postgres.schema import READ_ONLY
from ..backends.postgres.sources import check_url
from ._doctor import Finding

_OLDEST = 14
#: A transaction that has been open for so many seconds keeps dead rows in every table.
_LONG = 600
#: The server itself warns from here on, in its log.
_QUEUE_MOST = 0.5
_WITHIN = 5.0
#: One that has written keeps dead rows, too, while it does nothing and has no snapshot.
_OPEN = """
select coalesce(extract(epoch from max(clock_timestamp() - xact_start)), 0)::float8
from pg_stat_activity
where (backend_xmin is not null or backend_xid is not null) and pid <> pg_backend_pid()
"""
#: No session has it any more.
_PREPARED = """
select quote_literal(gid) from pg_prepared_xacts where database = current_database()
and prepared < clock_timestamp() - interval '{} s' order by prepared limit 1
"""
_SEES_ALL = "select pg_has_role('pg_read_all_stats', 'usage')"


async def examine(url: str) -> list[Finding]:
    """Return the findings, in a fixed order.

    :raises BackendUnavailable: the database is unreachable.
    """
    connections: list[Connection] = []
    try:
        for _ in range(2):
            connections.append(await connect(url, _WITHIN, statement_cache_size=0))
        one, other = connections
        read_only = await _value(one, READ_ONLY)
        if read_only:
            what, _, fix = read_only.partition(": ")
            return [Finding("server", "error", what, "Nothing can be acquired here.", fix)]
        return [
            await _version(one),
            await _schema(one),
            await _durability(one),
            await _notifications(one, other),
            await _transactions(one),
        ]
    except FAILURES as failed:
        where = check_url("--url", url)
        raise BackendUnavailable(f"{where}: {failed or type(failed).__name__}") from failed
    finally:
        for connection in connections:
            connection.terminate()


async def _value(connection: Connection, sql: str) -> Any:
    async def fetch() -> Any:
        async with transaction(connection):  # behind a pooler, one session for all of it
            return await connection.fetchval(sql)

    return await ask(connection, fetch(), _WITHIN)


async def _version(connection: Connection) -> Finding:
    number = int(await _value(connection, "show server_version_num")) // 10_000
    found = f"PostgreSQL {await _value(connection, 'show server_version')}"
    if number < _OLDEST:
        return Finding(
            "server",
            "error",
            found,
            f"aiodlock is tested with PostgreSQL {_OLDEST} and later.",
            "Upgrade the server.",
        )
    return Finding("server", "ok", found)


async def _schema(connection: Connection) -> Finding:
    version = await _value(connection, "select version from aiodlock.hello()")
    durability = await _value(connection, "select durability from aiodlock.hello()")
    found = f"schema aiodlock, version {version}, {durability}"
    if durability == "unlogged":
        return Finding(
            "schema",
            "note",
            found,
            "A crash or a failover empties the tables. Nothing is granted then until the longest lease of "
            "before has ended.",
            "To keep leases over a crash: drop schema aiodlock cascade, then aiodlock init.",
        )
    return Finding("schema", "ok", found)


async def _durability(connection: Connection) -> Finding:
    off = [
        f"{name} is off"
        for name in ("fsync", "synchronous_commit")
        if await _value(connection, f"show {name}") == "off"
    ]
    if off:
        return Finding(
            "commits",
            "warning",
            " and ".join(off),
            "A crash of the server can forget grants that clients were told of: two holders.",
            "Switch it on, for the role of aiodlock at least.",
        )
    names = await _value(connection, "show synchronous_standby_names")
    if not names or await _value(connection, "show synchronous_commit") == "local":
        return Finding(
            "commits",
            "note",
            "on the disk; no standby is waited for",
            "A failover to a standby can lose the last grants. Tokens refuse the older holder's writes.",
            "Name standbys in synchronous_standby_names if locks must survive a failover, and leave "
            "synchronous_commit on.",
        )
    return Finding("commits", "ok", f"on the disk; a commit waits for {names}")


async def _notifications(one: Connection, other: Connection) -> Finding:
    used = await _value(one, "select pg_notification_queue_usage()")
    if used >= _QUEUE_MOST:
        return Finding(
            "notifications",
            "warning",
            f"their queue is {used:.0%} full",
            "From 90 % on nobody is notified: a waiter learns of its turn with its next extension. A "
            "session that has listened keeps the queue while its transaction stays open.",
            "End that session: the server's log names its process.",
        )
    channel, heard = f"aiodlock_doctor_{secrets.token_hex(6)}", asyncio.Event()
    await ask(one, one.add_listener(channel, lambda *_: heard.set()), _WITHIN)
    await ask(other, other.execute(f"select pg_notify('{channel}', '')"), _WITHIN)
    try:
        async with asyncio.timeout(1.0):
            await heard.wait()
    except TimeoutError:
        return Finding(
            "notifications",
            "warning",
            "do not arrive",
            "Waiters poll every second instead. The URL probably leads to a pooler in transaction mode.",
            "Give Client(listen_source=…) a URL that goes around the pooler.",
        )
    return Finding("notifications", "ok", f"arrive; their queue is {used:.0%} full")


async def _transactions(connection: Connection) -> Finding:
    prepared = await _value(connection, _PREPARED.format(_LONG))
    if prepared:
        return Finding(
            "transactions",
            "warning",
            f"{prepared} is prepared, and neither committed nor rolled back",
            "The server keeps dead rows of all tables for it: locks become slower.",
            f"COMMIT PREPARED {prepared}, or ROLLBACK PREPARED {prepared}.",
        )
    oldest = await _value(connection, _OPEN)
    if oldest < _LONG and not await _value(connection, _SEES_ALL):
        return Finding(
            "transactions",
            "note",
            f"the oldest of this role is {oldest:.0f} s old; those of others are hidden from it",
            "If one stays open, the server keeps dead rows of all tables for it: locks become slower.",
            "To see them: GRANT pg_read_all_stats TO the_role, or run doctor as a role that has it.",
        )
    if oldest < _LONG:
        return Finding("transactions", "ok", f"the oldest is {oldest:.0f} s old")
    return Finding(
        "transactions",
        "warning",
        f"the oldest is {oldest:.0f} s old",
        "The server keeps dead rows of all tables for it: locks become slower.",
        "End it, and set idle_in_transaction_session_timeout.",
    )
