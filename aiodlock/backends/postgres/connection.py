"""Connections to PostgreSQL that are kept up, and the one that messages go out on, together.

asyncpg answers one query at a time on a connection, and cancelling one asks the server to stop it, which would hit
everything in the same call. So queries run in a task of the backend's, and callers wait for futures.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import asyncpg

from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered

_logger = logging.getLogger("aiodlock")

_CONNECT_TIMEOUT = 2.0
_LONGEST_CONNECT_TIMEOUT = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: How long one call waits for the connection; its caller decides whether to try again.
_WAIT_UP = 0.5
#: How long an answer may take before the connection counts as dead.
_SILENCE = 2.0
_LONGEST_SILENCE = 16.0
#: Messages that go out in one call at the most: the names of a call are locked together until it is committed.
_MOST = 500

#: Refusals that will pass, by SQLSTATE: read-only, out of resources, timeouts and cancellations, starting or stopping.
_WILL_PASS = ("25006", "53", "55P03", "57", "40", "08")
#: Of those, the ones for which another server may be the right one.
_WRONG_SERVER = ("25006", "57P")


def will_pass(refused: asyncpg.PostgresError) -> bool:
    """Tell whether the same call may succeed later."""
    return (refused.sqlstate or "").startswith(_WILL_PASS)


def described(source: str) -> str:
    """Return where a URL leads, without a password."""
    parts = urlsplit(source)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Prepare(Protocol):
    async def __call__(self, connection: asyncpg.Connection) -> None: ...


class Link:
    """One connection that is made again when it is lost.

    Mutable state: ``connection`` (None while there is none), ``failure`` (why), ``_up`` (set while there is one),
    ``_lost`` (set when it was lost), ``_hurry`` (set when somebody cannot wait for the pause).
    """

    def __init__(self, source: str, prepare: Callable[[asyncpg.Connection], Awaitable[None]]) -> None:
        self._source = source
        self.described: str = described(source)
        self._prepare = prepare
        self.connection: asyncpg.Connection | None = None
        self.failure: Exception | None = None
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_up = False

    async def run(self) -> None:
        """Keep the connection up until cancelled. Raises BackendError when it is refused at first."""
        pause, timeout = _FIRST_PAUSE, _CONNECT_TIMEOUT
        while True:
            try:
                await self._connect(timeout)
                pause, timeout = _FIRST_PAUSE, _CONNECT_TIMEOUT
                await self._lost.wait()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as failed:
                self.failure = failed
                refused = isinstance(failed, asyncpg.PostgresError) and not will_pass(failed)
                if refused and not self._was_up:
                    raise BackendError(f"{self.described}: {failed}") from failed
                timeout = min(2 * timeout, _LONGEST_CONNECT_TIMEOUT)
            except BackendError as failed:
                self.failure = failed
                if not self._was_up:
                    raise
            finally:
                self._drop()
            self._hurry.clear()
            try:
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            connection = await asyncpg.connect(self._source, timeout=timeout)
            try:
                self._lost.clear()
                connection.add_termination_listener(
                    lambda gone: loop.call_soon_threadsafe(self._on_terminated, gone)
                )
                self.connection = connection
                await self._prepare(connection)
            except BaseException:
                connection.terminate()
                self.connection = None
                raise
        self.failure = None
        self._was_up = True
        self._up.set()

    def _on_terminated(self, gone: Any) -> None:
        if self.connection is not None and self.connection is gone:
            self._lost.set()

    def _drop(self) -> None:
        self._up.clear()
        connection, self.connection = self.connection, None
        if connection is not None:
            if self.failure is None:
                self.failure = ConnectionError("the connection was lost")
            connection.terminate()

    def close(self, why: Exception | None = None) -> None:
        """Give the present connection up; another one is made."""
        if why is not None:
            self.failure = why
        self._lost.set()

    async def wait_up(self, *, hurry: bool = False) -> asyncpg.Connection:
        """Return the connection, or raise BackendUnavailable after half a second."""
        if hurry:
            self._hurry.set()
        try:
            async with asyncio.timeout(_WAIT_UP):
                while self.connection is None or not self._up.is_set():
                    await self._up.wait()
        except TimeoutError:
            raise BackendUnavailable(
                f"no connection to {self.described}: {self.failure or 'not answered yet'}"
            ) from self.failure
        return self.connection

    async def first_up(self) -> None:
        await self._up.wait()


class Messages:
    """The messages of all tasks. What was asked for while a call was on its way goes out in the next one.

    Mutable state: ``_waiting`` (message and future, not sent yet), ``_some`` (set when there are any),
    ``_silence`` (how long an answer may take now).
    """

    def __init__(self, link: Link, call: Callable[[asyncpg.Connection, list[str]], Awaitable[list[str]]]) -> None:
        self.link = link
        self._call = call
        self._waiting: list[tuple[str, asyncio.Future[str]]] = []
        self._queries: list[tuple[str, tuple[object, ...], asyncio.Future[list[Any]]]] = []
        self._some = asyncio.Event()
        self._silence = _SILENCE
        self.on_heard: Callable[[list[str]], object] = lambda messages: None

    def submit(self, message: str) -> asyncio.Future[str]:
        """Send a message with the next call; the future gets its answer."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, answer))
        self._some.set()
        return answer

    async def query(self, sql: str, *arguments: object) -> list[Any]:
        """Run a query between two calls, and return its rows."""
        rows: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queries.append((sql, arguments, rows))
        self._some.set()
        return await rows

    async def _run_queries(self, connection: asyncpg.Connection) -> None:
        queries, self._queries = self._queries, []
        for sql, arguments, rows in queries:
            try:
                async with asyncio.timeout(self._silence):
                    found = await connection.fetch(sql, *arguments)
            except asyncpg.PostgresError as refused:
                self._fail([("", rows)], self.translate(refused))
            except (OSError, TimeoutError, asyncpg.InterfaceError) as failed:
                self.link.close(failed)
                self._fail([("", rows)], Unanswered(f"{self.link.described}: {failed}"))
            else:
                if not rows.done():
                    rows.set_result(found)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._some.wait()
            connection = self.link.connection
            if connection is None or not self.link._up.is_set():
                self._fail(self._take(len(self._waiting)), BackendUnavailable(f"no connection to {self.link.described}"))
                queries, self._queries = self._queries, []
                for *_, rows in queries:
                    self._fail([("", rows)], BackendUnavailable(f"no connection to {self.link.described}"))
                continue
            if self._queries:
                await self._run_queries(connection)
            batch = self._take(_MOST)
            if not batch:
                continue
            try:
                async with asyncio.timeout(self._silence):
                    answers = await self._call(connection, [message for message, _ in batch])
            except asyncpg.PostgresError as refused:
                self._fail(batch, self.translate(refused))
                if (refused.sqlstate or "").startswith(_WRONG_SERVER):
                    self.link.close(refused)
                if connection.is_closed():
                    self.link.close(refused)
            except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as failed:
                self.link.close(failed)
                self._fail(batch, Unanswered(f"{self.link.described}: the connection was lost: {failed}"))
            except TimeoutError:
                silent = TimeoutError(f"no answer for {self._silence:g} s")
                self._silence = min(2 * self._silence, _LONGEST_SILENCE)
                self.link.close(silent)
                self._fail(batch, Unanswered(f"{self.link.described}: {silent}"))
            except asyncio.CancelledError:
                self._fail(batch, Unanswered(f"{self.link.described}: the client was left"))
                raise
            else:
                self._silence = _SILENCE
                for (_, answer), text in zip(batch, answers, strict=False):
                    if not answer.done():
                        answer.set_result(text)
                if len(answers) > len(batch):
                    self.on_heard(answers[len(batch) :])

    def _take(self, most: int) -> list[tuple[str, asyncio.Future[str]]]:
        batch, self._waiting = self._waiting[:most], self._waiting[most:]
        if not self._waiting:
            self._some.clear()
        return batch

    @staticmethod
    def _fail(batch: Sequence[tuple[str, asyncio.Future[Any]]], error: BackendError) -> None:
        for _, answer in batch:
            if not answer.done():
                answer.set_exception(type(error)(str(error)))
                answer.exception()  # nobody may be waiting any more

    def translate(self, refused: asyncpg.PostgresError) -> BackendError:
        """Return what the caller is told: the whole call was rolled back, so nothing was carried out."""
        where = self.link.described
        if will_pass(refused):
            return BackendUnavailable(f"{where} is not ready: {refused}")
        return BackendError(f"{where} refused: {refused}")


class Listening:
    """The connection that hears notifications. It is watched: a listener may die without a word.

    Mutable state: ``_channels`` (what is listened to, and who hears it).
    """

    def __init__(self, source: str, on_up: Callable[[], object], every: float = 5.0) -> None:
        self.link = Link(source, self._listen_again)
        self._on_up = on_up
        self._every = every
        self._channels: dict[str, list[Callable[[str], object]]] = {}
        self._changed = asyncio.Event()

    def listen(self, channel: str, heard: Callable[[str], object]) -> Callable[[], object]:
        """Have ``heard`` called with each payload; return what ends that."""
        self._channels.setdefault(channel, []).append(heard)
        self._changed.set()

        def stop() -> None:
            hearers = self._channels.get(channel, [])
            if heard in hearers:
                hearers.remove(heard)

        return stop

    async def _listen_again(self, connection: asyncpg.Connection) -> None:
        for channel in self._channels:
            await connection.add_listener(channel, self._on_notification)

    def _on_notification(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        for heard in list(self._channels.get(channel, ())):
            heard(payload)

    async def run(self) -> None:
        """Watch until cancelled; ``link.run`` runs beside it."""
        listening: tuple[Any, set[str]] = (None, set())
        while True:
            await self.link._up.wait()
            connection = self.link.connection
            if connection is None:
                await asyncio.sleep(0)
                continue
            if listening[0] is not connection:
                listening = (connection, set(self._channels))
                self._on_up()
            try:
                async with asyncio.timeout(_SILENCE):
                    for channel in self._channels.keys() - listening[1]:
                        await connection.add_listener(channel, self._on_notification)
                        listening[1].add(channel)
                    await connection.fetchval("select 1")
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as failed:
                self.link.close(failed)
                await asyncio.sleep(0)
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout(self._every):
                    await self._changed.wait()
            except TimeoutError:
                pass
