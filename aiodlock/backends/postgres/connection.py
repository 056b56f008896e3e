"""A connection to PostgreSQL that is kept up.

asyncpg answers one query at a time. When an await of it is cancelled, it asks the server to cancel the
query, from a task of its own. Here many callers share a query. So no await of asyncpg is ever cancelled: to
give up means to close the connection, which ends the await at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import asyncpg

from ..._errors import BackendError, BackendUnavailable

_logger = logging.getLogger("aiodlock")

_T = TypeVar("_T")

_CONNECT_WITHIN = 2.0
_LONGEST_CONNECT = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: How long a call waits for the connection; its caller decides whether to try again.
_WAIT_UP = 0.5

#: How long an answer may take before the connection counts as dead (seconds).
ANSWER_WITHIN = 2.0

#: How long the server waits for the next step of a transaction (ms). Less than ANSWER_WITHIN, because those
#: who wait for its locks must not take the server for dead.
_IDLE_MOST = 1000

#: Have the server look once a second whether its client is still there, also while a call waits for a
#: lock: else each call that was given up keeps a session. For the session, or for this transaction alone.
LOOK_FOR_CLIENT, _LOOK_FOR_CLIENT_LOCALLY = (
    f"select set_config('client_connection_check_interval', '1s', {local}) where version() ~ 'linux' "
    "and current_setting('client_connection_check_interval', true) is not null"
    for local in ("false", "true")
)

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


class Connection(Protocol):
    """What is used of asyncpg's connections."""

    def fetchval(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def fetch(self, query: str, *arguments: object) -> Coroutine[Any, Any, list[Any]]: ...
    def fetchrow(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def execute(self, query: str, *arguments: object) -> Coroutine[Any, Any, str]: ...
    def add_listener(
        self, channel: str, callback: Callable[..., object]
    ) -> Coroutine[Any, Any, None]: ...
    def remove_listener(
        self, channel: str, callback: Callable[..., object]
    ) -> Coroutine[Any, Any, None]: ...
    def add_termination_listener(self, callback: Callable[..., object]) -> None: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...


def will_pass(failed: Exception) -> bool:
    """Tell whether the same may succeed later."""
    return not isinstance(failed, asyncpg.PostgresError) or sqlstate_of(failed).startswith(
        _WILL_PASS
    )


def sqlstate_of(failed: Exception) -> str:
    """Return the server's code of a refusal; empty for every other failure."""
    return getattr(failed, "sqlstate", None) or ""


async def connect(url: str, within: float, **options: object) -> Connection:
    """Connect to the first host of a URL that can be used.

    Each host has ``within`` seconds of its own. asyncpg has one timeout for all of them, so one that says
    nothing would keep from those behind it.
    """
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
            task.exception()  # it is told that the connection was closed
    if silent:
        raise TimeoutError(f"no answer for {within:g} s")
    if connection.is_closed() and task.exception() is not None:
        raise ConnectionError(f"the connection was lost: {task.exception()}") from task.exception()
    return task.result()


@asynccontextmanager
async def transaction(connection: Connection) -> AsyncIterator[None]:
    """A transaction of several steps. Between two of them this process may be paused, or cut off from the
    server. So the server ends the session then: else the transaction would keep its locks."""
    await connection.execute(
        f"begin; set local idle_in_transaction_session_timeout = {_IDLE_MOST}; {_LOOK_FOR_CLIENT_LOCALLY}"
    )
    try:
        yield
    except BaseException:
        if not connection.is_closed():
            await connection.execute("rollback")
        raise
    await connection.execute("commit")


class Link:
    """One connection, made again when it is lost.

    ``prepare`` runs on each new connection before it counts as up, ``on_up`` after that (with False the
    first time). Mutable state: ``connection`` (None while there is none), ``failure`` (why there is none),
    ``pooled`` (it goes through a pooler), ``was_up``, and the events ``_up``, ``_lost`` and ``_hurry``.
    """

    def __init__(
        self,
        source: str,
        described: str,
        *,
        pooled: bool,
        prepare: Callable[[Connection], Awaitable[None]],
        on_up: Callable[[bool], object],
    ) -> None:
        self.described: str = described
        self.connection: Connection | None = None
        self.failure: Exception | None = None
        self.pooled: bool = pooled
        self.was_up: bool = False
        self._source = source
        self._prepare = prepare
        self._on_up = on_up
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Keep the connection up until cancelled.

        :raises BackendError: the server refuses for good, before it was ever up.
        """
        pause, within = _FIRST_PAUSE, _CONNECT_WITHIN
        while True:
            try:
                connection = await self._connect(within)
            except (*FAILURES, BackendError) as failed:
                self.failure = failed if str(failed) else TimeoutError("no answer in time")
                self._see_final(failed)
                if isinstance(failed, TimeoutError):
                    within = min(2 * within, _LONGEST_CONNECT)
            else:
                pause, within = _FIRST_PAUSE, _CONNECT_WITHIN
                try:
                    await self._stay(connection)
                finally:
                    self._drop(connection)
            self._hurry.clear()
            try:
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self, within: float) -> Connection:
        self._lost.clear()
        cache = {"statement_cache_size": 0} if self.pooled else {}
        connection = await connect(self._source, within, **cache)
        try:
            connection.add_termination_listener(self._on_terminated)
            await self._prepare(connection)
        except asyncpg.PostgresError as refused:
            connection.terminate()
            self._see_pooler(refused)
            raise
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _see_final(self, failed: Exception) -> None:
        """Raise unless the next try may succeed, or the client is in use."""
        if self.was_up or isinstance(failed, BackendUnavailable):
            return
        if isinstance(failed, BackendError):
            raise failed
        if isinstance(failed, asyncpg.ClientConfigurationError):
            raise BackendError(f"{self.described} cannot be used: {failed}") from failed
        if not will_pass(failed) and not sqlstate_of(failed).startswith(POOLED):
            raise BackendError(f"{self.described} refused: {failed}") from failed

    async def _stay(self, connection: Connection) -> None:
        self.connection, self.failure = connection, None
        before, self.was_up = self.was_up, True
        self._up.set()
        self._on_up(before)
        await self._lost.wait()
        self._log_loss()

    def _log_loss(self) -> None:
        why = self.failure or "closed by the server"
        extra = {"event": "no_connection"}
        _logger.warning("the connection to %s was lost: %s", self.described, why, extra=extra)

    def _drop(self, connection: Connection) -> None:
        self._up.clear()
        self.connection = None
        if self.failure is None:
            self.failure = ConnectionError("the connection was lost")
        connection.terminate()

    def _see_pooler(self, failed: Exception) -> None:
        if sqlstate_of(failed).startswith(POOLED):
            self.pooled = True

    def _on_terminated(self, _: object) -> None:
        self._lost.set()

    def give_up(self, why: Exception) -> None:
        """Close the present connection; another one is made."""
        if self.connection is not None:
            self.failure = why
            self._see_pooler(why)
            self.connection.terminate()
            self.connection = None
            self._up.clear()
        self._lost.set()

    async def wait_up(self, *, hurry: bool = False) -> None:
        """Return when it is up, or raise BackendUnavailable after half a second.

        :param hurry: try to connect at once.
        """
        if hurry:
            self._hurry.set()
        try:
            async with asyncio.timeout(_WAIT_UP):
                while self.connection is None:
                    await self._up.wait()
        except TimeoutError:
            raise self.unavailable() from self.failure

    def unavailable(self) -> BackendUnavailable:
        """Return the error of a call that was not sent."""
        return BackendUnavailable(
            f"no connection to {self.described}: {self.failure or 'not answered yet'}"
        )

    async def first_up(self) -> None:
        """Return when it is up."""
        await self._up.wait()
