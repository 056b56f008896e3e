"""The client's end of a session: what ``asyncpg.Connection`` is to the backend, without the bytes.

As there, one query at a time is under way; what was asked of a connection that breaks fails, and notices
and notifications are told in turns of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from .postgres_tables import Row


async def connect(
    url: str,
    within: float,
    on_answer: Callable[[], object] = lambda: None,
    **options: object,
) -> Any:
    """Stand in for ``aiodlock.backends.postgres.connection.connect``, with a URL of one host."""
    parts = urlsplit(url)
    async with asyncio.timeout(within):
        _, connection = await asyncio.get_running_loop().create_connection(
            SimConnection, parts.hostname or "", parts.port or 5432
        )
        on_answer()
        try:
            role = await connection.greet()
            if ("target_session_attrs", "read-write") in parse_qsl(
                parts.query
            ) and role == "standby":
                raise asyncpg.TargetServerAttributeNotMatched("none of the hosts match read-write")
        except BaseException:
            connection.terminate()
            raise
    return connection


class SimConnection(asyncio.Protocol):
    """What is used of asyncpg's connections.

    Mutable state: ``_answer`` (of the query that is under way), ``_asked`` (how many there were),
    ``_closed``, and who is told of what.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._answer: asyncio.Future[Any] | None = None
        self._asked = 0
        self._closed = False
        self._pid = 0
        self._listeners: dict[str, list[Callable[..., object]]] = {}
        self._on_terminated: list[Callable[..., object]] = []
        self._on_log: list[Callable[..., object]] = []

    def __repr__(self) -> str:
        return f"<SimConnection {self._pid}>"

    # -- asyncio.Protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: Any) -> None:
        match data:
            case ("welcome", pid, role):
                self._pid = pid
                self._set(role)
            case ("answer", serial, value, notices):
                self._tell_log(notices)
                if serial == self._asked:
                    self._set(value)
            case ("error", serial, (code, text), notices):
                self._tell_log(notices)
                if serial == self._asked:
                    self._fail(_error(code, text))
            case ("fatal", code, text) if not self._pid:
                self._fail(_error(code, text))  # later asyncpg waits for what never comes
            case ("notice", function):
                self._tell_log([function])
            case ("notified", pid, channel, payload):
                for listener in self._listeners.get(channel, ()):
                    self._loop.call_soon(listener, self, pid, channel, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()

    def _tell_log(self, notices: list[str]) -> None:
        for function in notices:
            message = SimpleNamespace(server_source_function=function)
            for listener in self._on_log:
                self._loop.call_soon(listener, self, message)

    def _set(self, value: object) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(value)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail(
            asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        )
        listeners, self._on_terminated = self._on_terminated, []
        for listener in listeners:
            self._loop.call_soon(listener, self)

    # -- asyncpg.Connection --------------------------------------------------------------------------

    async def greet(self) -> str:
        """Log in; return what the server is."""
        role: str = await self._wait_for(lambda: self._say(0, "login", ()))
        return role

    async def _ask(self, sql: str, *args: object) -> Any:
        if self._closed:
            raise asyncpg.InterfaceError("connection is closed")
        if self._answer is not None:
            raise asyncpg.InterfaceError("another operation is in progress")
        self._asked += 1
        return await self._wait_for(lambda: self._say(self._asked, sql, args))

    async def _wait_for(self, say: Callable[[], None]) -> Any:
        self._answer = self._loop.create_future()
        say()
        try:
            return await self._answer
        except asyncio.CancelledError:
            if self._asked:  # asyncpg would have the server cancel it, from a task of its own
                process = self._transport._stream.process
                process.failures.append(f"an await of {self!r} was cancelled")
            raise
        finally:
            self._answer = None

    def _say(self, serial: int, sql: str, args: tuple[object, ...]) -> None:
        self._transport._stream.write((serial, sql, args))

    def fetchval(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]:
        return self._ask(query, *arguments)

    def fetch(self, query: str, *arguments: object) -> Coroutine[Any, Any, list[Any]]:
        return self._ask(query, *arguments)

    async def fetchrow(self, query: str, *arguments: object) -> Any:
        answer = await self._ask(query, *arguments)
        return answer if isinstance(answer, Row) else (answer,)

    async def prepare(self, query: str, *, name: str) -> Any:
        return SimpleNamespace(fetchrow=partial(self.fetchrow, query))

    def execute(self, query: str, *arguments: object) -> Coroutine[Any, Any, str]:
        return self._ask(query, *arguments)

    async def add_listener(self, channel: str, callback: Callable[..., object]) -> None:
        if channel not in self._listeners:
            await self._ask(f"LISTEN {channel}")
        self._listeners.setdefault(channel, []).append(callback)

    async def remove_listener(self, channel: str, callback: Callable[..., object]) -> None:
        listeners = self._listeners.get(channel, [])
        if callback in listeners:
            listeners.remove(callback)
        if not listeners and self._listeners.pop(channel, None) is not None:
            await self._ask(f"UNLISTEN {channel}")

    def add_termination_listener(self, callback: Callable[..., object]) -> None:
        self._on_terminated.append(callback)

    def add_log_listener(self, callback: Callable[..., object]) -> None:
        self._on_log.append(callback)

    def get_server_pid(self) -> int:
        return self._pid

    def is_closed(self) -> bool:
        return self._closed

    def terminate(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._close()


def _error(code: str, text: str) -> Exception:
    error: Exception = asyncpg.PostgresError.new({"C": code, "S": "ERROR", "M": text})
    return error
