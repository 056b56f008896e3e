"""A connection to PostgreSQL that is kept up.

asyncpg answers one query at a time. When an await of it is cancelled, it asks the server to cancel the
query, from a task of its own. Here many callers share a query. So no await of asyncpg is ever cancelled: to
give up means to close the connection, which ends the await at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import asyncpg

_T = TypeVar("_T")

#: For how long the server may say nothing at all until a connection counts as dead (seconds).
SILENT_MOST = 10.0

#: How long the server waits for the next step of a transaction, at the least (ms): its names are locked
#: meanwhile. A step takes a round trip, so this follows what was learned of them.
_IDLE_LEAST = 1000

#: Have the server look once a second whether its client is still there, also while a call waits for a
#: lock: else each call that was given up keeps a session. And have it say that a commit did not wait for
#: its standby. For the session, or for this transaction alone; where a condition holds.
_SETTINGS = (
    "select pg_catalog.set_config('client_min_messages', 'warning', {local}) where {condition}; "
    "select pg_catalog.set_config('client_connection_check_interval', '1s', {local}) "
    "where pg_catalog.version() ~ 'linux' and {condition} "
    "and pg_catalog.current_setting('client_connection_check_interval', true) is not null"
)
_LOCAL_SETTINGS = _SETTINGS.format(local="true", condition="true")

#: Everything that asyncpg raises when a server refuses, or a connection cannot be made or used.
#: InternalClientError also where no host is what target_session_attrs asks for, as for a moment in a
#: switch-over.
FAILURES = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
#: Refusals that will pass, by SQLSTATE: read-only, transaction rolled back, out of resources, no room for
#: notifications, lock not available, cancelled or shutting down, connection failures.
_WILL_PASS = ("25006", "40", "53", "54000", "55P03", "57", "08")
#: With these another host of the URL may do.
_NEXT_HOST = (OSError, asyncpg.CannotConnectNowError, asyncpg.InternalClientError)
#: Options of a URL that name a file of TLS.
_FILES = ("sslrootcert", "sslcrl", "sslcert", "sslkey")
#: A pooler has handed the session to another client: prepared statements are not where they were made.
POOLED = ("26000", "42P05")
#: The session is in a transaction that was not left, or has left one: of no use any more.
STUCK = "25P"
#: What is used is not there, or not what it was: the schema was upgraded, or dropped.
GONE = ("42883", "42P01", "3F000", "XX000", "0A000")
#: What a message itself may be refused for: what stands in it, or how long it is.
OF_THE_MESSAGE = ("22", "54")


class Connection(Protocol):
    """What is used of asyncpg's connections."""

    def fetchval(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def fetch(self, query: str, *arguments: object) -> Coroutine[Any, Any, list[Any]]: ...
    def fetchrow(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def prepare(self, query: str, *, name: str) -> Coroutine[Any, Any, Any]: ...
    def execute(self, query: str, *arguments: object) -> Coroutine[Any, Any, str]: ...
    def add_listener(
        self, channel: str, callback: Callable[..., object]
    ) -> Coroutine[Any, Any, None]: ...
    def remove_listener(
        self, channel: str, callback: Callable[..., object]
    ) -> Coroutine[Any, Any, None]: ...
    def add_termination_listener(self, callback: Callable[..., object]) -> None: ...
    def add_log_listener(self, callback: Callable[..., object]) -> None: ...
    def get_server_pid(self) -> int: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...


def will_pass(failed: Exception) -> bool:
    """Tell whether the same may succeed later."""
    return not isinstance(failed, asyncpg.PostgresError) or sqlstate_of(failed).startswith(
        _WILL_PASS
    )


def words_of(failed: Exception) -> str:
    """Return what a failure says, on one line: a server's refusal has its details and hints on others."""
    return " ".join(str(failed).split())


def sqlstate_of(failed: Exception) -> str:
    """Return the server's code of a refusal; empty for every other failure."""
    return getattr(failed, "sqlstate", None) or ""


class _Watched:
    """The event loop, for asyncpg to dial in: tells that there is a connection, and of the first answer.
    Those that come next, until the server has let the client in, are seen by asyncpg alone."""

    def __init__(self, on_answer: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_answer = on_answer

    def __getattr__(self, name: str) -> Any:
        # asyncpg keeps this for its loop: what is asked for is found at once from now on.
        setattr(self, name, found := getattr(self._loop, name))
        return found

    async def create_connection(self, factory: Any, *args: Any, **options: Any) -> Any:
        def watched() -> Any:
            return _First(factory(), self._on_answer)

        transport, first = await self._loop.create_connection(watched, *args, **options)
        self._on_answer()
        return transport, first.protocol


class _First:
    """Stands in front of a protocol until the first bytes have come."""

    def __init__(self, protocol: Any, on_answer: Callable[[], object]) -> None:
        self.protocol = protocol
        self._on_answer = on_answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.protocol, name)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._on_answer()
        self._transport.set_protocol(self.protocol)
        self.protocol.data_received(data)


async def connect(
    url: str, within: float, on_answer: Callable[[], object] | None = None, **options: object
) -> Connection:
    """Connect to the first host of a URL that can be used.

    Each host has ``within`` seconds of its own. asyncpg has one timeout for all of them, so one that says
    nothing would keep from those behind it.

    :param on_answer: is called when there is a connection, and at the first answer.
    """
    if on_answer is not None:
        options["loop"] = _Watched(on_answer)
    failure: Exception | None = None
    for one in one_host_each(url):
        try:
            connection: Connection = await asyncpg.connect(one, timeout=within, **options)
        except _NEXT_HOST as failed:
            # The silence counts: the caller waits longer the next time.
            if not isinstance(failure, TimeoutError):
                failure = failed
        else:
            return connection
    assert failure is not None
    if isinstance(failure, OSError) and not isinstance(failure, ConnectionError | TimeoutError):
        _check_files(url)
    raise failure


def _check_files(url: str) -> None:
    """Name a file of TLS that cannot be read: what asyncpg raises does not.

    :raises asyncpg.ClientConfigurationError: there is one.
    """
    told = dict(parse_qsl(urlsplit(url).query))
    for option in _FILES:
        path = told.get(option) or os.environ.get(f"PG{option.upper()}")
        if path:
            try:
                open(path, "rb").close()
            except OSError as wrong:
                raise asyncpg.ClientConfigurationError(f"{option}: {wrong}") from wrong


def one_host_each(url: str) -> list[str]:
    """Return a URL for each host that a URL names, in their order."""
    parts = urlsplit(url)
    user, at, netloc = parts.netloc.rpartition("@")
    if netloc:
        return [parts._replace(netloc=user + at + host).geturl() for host in netloc.split(",")]
    query = dict(parse_qsl(parts.query))
    hosts, ports = (query.get(word, "").split(",") for word in ("host", "port"))
    if len(ports) == 1:
        ports *= len(hosts)
    if len(hosts) == 1 or len(ports) != len(hosts):
        return [url]
    return [
        parts._replace(query=urlencode({**query, "host": host, "port": port})).geturl()
        for host, port in zip(hosts, ports, strict=True)
    ]


def without_attributes(url: str) -> str:
    """Return a URL that leads to standbys, too."""
    parts = urlsplit(url)
    query = [one for one in parse_qsl(parts.query) if one[0] != "target_session_attrs"]
    return parts._replace(query=urlencode(query)).geturl()


async def ask(connection: Connection, query: Coroutine[Any, Any, _T], within: float) -> _T:
    """Return a query's answer. Give the connection up after ``within`` seconds, and when cancelled."""
    task = asyncio.ensure_future(query)
    silent = False
    try:
        await asyncio.wait({task}, timeout=within)
    finally:
        if not task.done():
            silent = True
            connection.terminate()
            await asyncio.wait({task})
        task.exception()  # nobody asks for it when the connection was given up, or the caller was cancelled
    if silent:
        raise TimeoutError(f"no answer for {within:g} s")
    if connection.is_closed() and task.exception() is not None:
        raise ConnectionError(f"the connection was lost: {task.exception()}") from task.exception()
    return task.result()


@asynccontextmanager
async def transaction(connection: Connection, idle: float = 0.0) -> AsyncIterator[None]:
    """A transaction of several steps. Between two of them this process may be paused, or cut off from the
    server. So the server ends the session then: else the transaction would keep its locks.

    The server may refuse each step, also the first and the last one. Then the transaction is left; if even
    that fails, the connection is closed: behind a pooler it would stay in that transaction for good.

    :param idle: the seconds that the server shall wait for the next step; a second at the least.
    """
    most = max(_IDLE_LEAST, round(idle * 1000))
    try:
        await connection.execute(
            f"begin; set local idle_in_transaction_session_timeout = {most}; {_LOCAL_SETTINGS}"
        )
        yield
        done = await connection.execute("commit")
    except BaseException:
        await _leave_transaction(connection)
        raise
    if done != "COMMIT":
        raise asyncpg.TransactionRollbackError(f"the transaction was not committed: {done}")


async def one_row(connection: Connection, idle: float | None, sql: str, *arguments: object) -> Any:
    """Return the row that a query answers with.

    asyncpg prepares a statement and runs it in two steps. Behind a pooler the session may change between
    them, and is lent to others later. So the session is kept meanwhile, and the statement has no name.

    :param idle: behind a pooler, how long one step may take (seconds); else None.
    """
    if idle is None:
        return await connection.fetchrow(sql, *arguments)
    async with transaction(connection, idle):
        statement = await connection.prepare(sql, name="")
        return await statement.fetchrow(*arguments)


async def _leave_transaction(connection: Connection) -> None:
    if connection.is_closed():
        return
    try:
        await connection.execute("rollback")
    except FAILURES:
        connection.terminate()


async def direct(connection: Connection) -> bool:
    """Tell whether no pooler is between. If so, change the settings of the session.

    A pooler gives its clients process numbers of its own. It lends a session to others, too: so nothing
    must stay in one. This is one message, and its answer a number of rows.
    """
    same = f"pg_catalog.pg_backend_pid() = {connection.get_server_pid():d}"
    settings = _SETTINGS.format(local="false", condition=same)
    # A client may have nothing to ask for long. If its session was ended, it would only begin the next one.
    settings += f"; select pg_catalog.set_config('idle_session_timeout', '0', false) where {same}"
    return await connection.execute(f"{settings}; select where {same}") == "SELECT 1"
