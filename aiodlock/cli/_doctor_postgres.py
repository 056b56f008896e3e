"""``aiodlock doctor`` for PostgreSQL: version, schema, durability, notifications, and old transactions."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from .. import BackendUnavailable
from .._clock import now
from ..backends.postgres.connection import (
    FAILURES,
    Connection,
    ask,
    connect,
    direct,
    one_host_each,
    transaction,
    without_attributes,
)
from ..backends.postgres.dialing import Host
from ..backends.postgres.history import History, history_at
from ..backends.postgres.schema import READ_ONLY
from ..backends.postgres.sources import check_url
from ._finding import Finding

_OLDEST = 14
#: A transaction that has been open for so many seconds keeps dead rows in every table.
_LONG = 600
#: The server itself warns from here on, in its log.
_QUEUE_MOST = 0.5
_WITHIN = 5.0
#: A standby that is behind, and has got nothing for so long, stands still.
_FOLLOWS_WITHIN = 3.0
#: Bytes of the log; null on a primary.
_HAS = """
select case when pg_is_in_recovery()
  then (greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'::pg_lsn)::bigint end
"""
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
        newest, hosts = await _hosts(url)
        for _ in range(2):
            connections.append(await connect(newest, _WITHIN, statement_cache_size=0))
        one, other = connections
        read_only = await _value(one, READ_ONLY)
        if read_only:
            what, _, fix = read_only.partition(": ")
            return [Finding("server", "error", what, "Nothing can be acquired here.", fix)]
        return [
            *hosts,
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


@dataclass(frozen=True, slots=True)
class _Look:
    """What one host says of itself.

    :param history: a primary's.
    :param has: how many bytes of the log a standby has.
    :param failed: why it says nothing.
    """

    host: Host
    history: History | None = None
    has: int | None = None
    failed: str = ""


async def _hosts(url: str) -> tuple[str, list[Finding]]:
    """Return the URL of the newest primary, and what there is to tell of several hosts."""
    urls = one_host_each(url)
    if len(urls) == 1:
        return url, []
    looks = await asyncio.gather(*map(_look, map(Host, one_host_each(without_attributes(url)))))
    primaries = [
        (one.history, number) for number, one in enumerate(looks) if one.history is not None
    ]
    silent = [_silent(one) for one in looks if one.failed]
    if not primaries:
        return url, silent
    newest, number = max(primaries, key=lambda one: one[0].rank)
    best = looks[number].host
    others = [
        f"{looks[n].host.where} ({why})"
        for history, n in primaries
        if (why := history.conflict(newest))
    ]
    told = f"{best.where} is the primary, on timeline {newest.timeline}"
    finding = Finding("hosts", "ok", told)
    if others:
        finding = Finding(
            "hosts",
            "error",
            f"{told}; others take writes, too: {', '.join(others)}",
            "A client that reaches only one of those takes it for the primary: two holders.",
            "Stop them, and make standbys of them again (pg_rewind, or pg_basebackup).",
        )
    # Asked after the standbys, the primary has all that they can have of it. What it had before does not.
    primary = await _look(best)
    if primary.history is None:
        return urls[number], [finding, *silent, *([_silent(primary)] if primary.failed else [])]
    written = primary.history.flushed
    standbys = await asyncio.gather(
        *(_standby(one, written) for one in looks if one.has is not None)
    )
    return urls[number], [finding, *filter(None, standbys), *silent]


async def _look(host: Host) -> _Look:
    try:
        connection = await connect(host.url, _WITHIN, statement_cache_size=0)
        try:
            history = await history_at(connection, _WITHIN)
            return _Look(host, history, None if history else await _value(connection, _HAS))
        finally:
            connection.terminate()
    except FAILURES as failed:
        return _Look(host, failed=str(failed) or type(failed).__name__)


def _silent(look: _Look) -> Finding:
    return Finding(
        f"host {look.host.where}",
        "warning",
        f"does not answer: {look.failed}",
        "While it is away, no failover can lead to it, and each new connection may take a second longer.",
        "Look at this server and its log, or take it out of the URL.",
    )


async def _standby(look: _Look, written: int) -> Finding | None:
    """Tell of a standby that does not follow the primary."""
    has, told = look.has or 0, ""
    if has > written:
        told = f"has {has - written} bytes of the log that the primary does not have"
    elif has < written and not await _moves(look.host, has):
        told = f"stands still, {written - has} bytes behind the primary"
    if not told:
        return None
    return Finding(
        f"host {look.host.where}",
        "error" if has > written else "warning",
        f"a standby that {told}",
        "A standby that has diverged does not follow the primary, and can confirm commits that it does not "
        "have: a failover to it gives two holders.",
        "Read its log. If that says 'forked off', or 'is not in this server's history', stop it, and make "
        "it anew (pg_rewind, or pg_basebackup).",
    )


async def _moves(host: Host, has: int) -> bool:
    """Return whether a standby gets more of the log, or becomes something else."""
    until = now() + _FOLLOWS_WITHIN
    while (await _look(host)).has == has:
        if now() > until:
            return False
        await asyncio.sleep(0.1)
    return True


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
    if not await _value(connection, "select count(*) from pg_stat_replication"):
        return Finding(
            "commits",
            "error",
            f"a commit waits for {names}, and no standby is connected",
            "Nothing is granted or extended until one is.",
            "Start a standby. Without one in synchronous_standby_names, a failover can lose grants.",
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
    if not await ask(one, direct(one), _WITHIN):
        return Finding(
            "notifications",
            "note",
            "not examined: the URL leads to a pooler",
            "Clients listen to nothing through a pooler, since it lends its sessions to others. Without "
            "listen_source, waiters poll every second.",
            "Give Client(listen_source=…) a URL that goes around the pooler; or the same URL, if each "
            "client has a session of its own there.",
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
