"""Locks in PostgreSQL: what is sent to the functions of ``schema.sql``, and what their answers mean.

Two connections: one for the messages of all tasks, which go out together, one call for each turn of the event
loop; and one that listens.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Any
from urllib.parse import quote, unquote

import anyio
import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import (
    Capabilities,
    Gone,
    Granted,
    HolderInfo,
    Left,
    LockInfo,
    Mode,
    Refused,
    Request,
    WaiterInfo,
    Waiting,
)
from ..base import Listener, Unanswered
from .connection import Link, Listening, Messages
from .schema import VERSION, quoted

_logger = logging.getLogger("aiodlock")

#: For how long a marker refuses late duplicates, at the least, and a break is remembered (seconds).
_SHORTEST_MARKER = 60.0
_SWEEP_EVERY = 60.0
_SWEEP_MOST = 1000
#: How far this process's clock and the server's may drift apart within one lease.
_DRIFT_SHARE, _DRIFT = 0.01, 0.002


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _key(kind: str, name: str) -> str:
    return f"{kind[0]}:{quote(name, safe='')}"


def _kind_and_name(key: str) -> tuple[str, str]:
    kind = "lock" if key[0] == "l" else "semaphore"
    return kind, unquote(key[2:])


class PostgresBackend:
    """One database. The functions decide; this sends, and reads the answers."""

    def __init__(
        self,
        source: str,
        *,
        prefix: str,
        token_retention: float,
        unavailable_after: float,
        listen_source: str | None = None,
    ) -> None:
        self.capabilities: Capabilities = Capabilities()
        self.label: str = make_label()
        self._schema = prefix
        self._retention = _ms(token_retention)
        self._marker_ttl = _ms(max(unavailable_after, _SHORTEST_MARKER))
        self._turn = f"select {quoted(prefix)}.turn($1, $2, $3)"
        self._messages = Messages(Link(source, self._meet), self._call)
        self._messages.on_heard = self._on_heard
        self._listening = Listening(listen_source or source, self._on_listening)
        self._listener: Listener | None = None
        self._heard_once = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PostgresBackend {self._messages.link.described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        self._listener = listener
        self._listening.listen(_channel(self.label), lambda payload: self._on_heard([payload]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._messages.link.run)
            tasks.start_soon(self._messages.run)
            tasks.start_soon(self._listening.link.run)
            tasks.start_soon(self._listening.run)
            await self._messages.link.first_up()
            await self._heard_once.wait()
            ready()
            while True:
                await asyncio.sleep(_SWEEP_EVERY * random.uniform(0.5, 1.5))
                await self._sweep()

    async def _meet(self, connection: asyncpg.Connection) -> None:
        """See that the schema is there, in the version that this client knows."""
        try:
            hello = await connection.fetchrow(f"select * from {quoted(self._schema)}.hello()")
        except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError) as missing:
            raise BackendError(
                f"{self._messages.link.described} has no schema {self._schema!r} of aiodlock: make it once "
                "with 'aiodlock init --url postgresql://…'"
            ) from missing
        if hello["version"] != VERSION:
            raise BackendError(
                f"{self._messages.link.described}: schema {self._schema!r} has version {hello['version']}, and "
                f"this aiodlock needs {VERSION}: run 'aiodlock init', or use the aiodlock that made it"
            )
        if self._listener is not None:
            self._listener.on_look(None)

    def _on_listening(self) -> None:
        self._heard_once.set()
        if self._listener is not None:
            self._listener.on_look(None)  # notices may have been missed

    async def _sweep(self) -> None:
        try:
            await self._query(f"select {quoted(self._schema)}.sweep($1)", _SWEEP_MOST)
        except BackendError as failed:
            _logger.debug("sweeping failed: %s", failed)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for link in (self._messages.link, self._listening.link):
            if link.connection is None and link.failure is not None:
                return link.failure
        return None

    async def _call(self, connection: asyncpg.Connection, messages: list[str]) -> list[str]:
        answers: list[str] = await connection.fetchval(
            self._turn, self.label, self._retention, messages
        )
        return answers

    def _on_heard(self, messages: Sequence[str]) -> None:
        listener = self._listener
        if listener is None:
            return
        for message in messages:
            match message.split(" "):
                case ["granted", request_id, key, token]:
                    listener.on_granted(request_id, int(token), key)
                case ["look", request_id, _]:
                    listener.on_look(request_id)
                case ["broken", request_id, _]:
                    listener.on_broken(request_id)
                case _:
                    _logger.warning("a notification of the wrong shape ignored: %.200r", message)

    # -- requests --------------------------------------------------------------------------------

    async def _up(self, *, hurry: bool = False) -> asyncpg.Connection:
        return self._messages.link.connection or await self._messages.link.wait_up(hurry=hurry)

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        request.sent_on = await self._up(hurry=not wait)
        sent = now()
        message = "\t".join(
            (
                "acquire",
                _key(request.kind, request.name),
                request.id,
                _wire_mode(request),
                request.owner,
                str(_ms(request.ttl)),
                str(_ms(request.waiter_ttl)),
                str(_ms(request.lock_delay)),
                "wait" if wait else "nowait",
            )
        )
        try:
            answer = await self._messages.submit(message)
        except Unanswered:
            request.ambiguous = True
            raise
        request.sent_on = None
        outcome = _outcome(answer, sent)
        assert not isinstance(outcome, Left)
        return outcome

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [self._extend(request, length) for request, length in batch]

    def _extend(self, request: Request, length: float) -> Awaitable[Granted | Waiting | Gone]:
        sent = now()
        key = _key(request.kind, request.name)
        answer = self._messages.submit(
            f"extend\t{key}\t{request.id}\t{_ms(length)}\t{request.owner}"
        )
        return _Answer(answer, sent)

    def server_of(self, request: Request) -> object:
        return None

    def _leaving(self, request: Request, lost: bool) -> str:
        connection = self._messages.link.connection
        late = request.ambiguous or (
            request.sent_on is not None and request.sent_on is not connection
        )
        marker = self._marker_ttl if late else 0
        key = _key(request.kind, request.name)
        return f"leave\t{key}\t{request.id}\t{marker}\t{'lost' if lost else 'ended'}"

    async def leave(
        self, request: Request, *, lost: bool = False, within: float | None = None
    ) -> Left:
        async with asyncio.timeout(within):
            await self._up()
            return _left(await self._messages.submit(self._leaving(request, lost)))

    def leave_later(
        self, request: Request, done: Callable[[Left | BackendError], object], *, lost: bool = False
    ) -> bool:
        if self._messages.link.connection is None:
            return False

        def on_answer(answer: asyncio.Future[str]) -> None:
            try:
                done(_left(answer.result()))
            except BackendError as failed:
                done(failed)

        self._messages.submit(self._leaving(request, lost)).add_done_callback(on_answer)
        return True

    async def leave_unknown(self, request_id: str, where: str) -> None:
        await self._up()
        _left(await self._messages.submit(f"leave\t{where}\t{request_id}\t0\tended"))

    async def settle(self) -> None:
        """Every answer is waited for by a call."""

    def watch(self, request: Request, watching: bool) -> None:
        """The database cannot tell when a deadline has passed: the head looks at that moment."""

    def announce(self, kind: str, name: str) -> None:
        """Tell whoever observes the name that its holder has changed."""
        self._messages.submit(f"announce\t{_key(kind, name)}")

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        channel = _channel(f"changes {_key(kind, name)}")
        return self._listening.listen(channel, lambda payload: changed())

    # -- for people ------------------------------------------------------------------------------

    async def _query(self, sql: str, *arguments: object) -> list[Any]:
        return await self._messages.query(sql, *arguments)

    async def inspect(self, kind: str, name: str) -> LockInfo:
        await self._up(hurry=True)
        rows = await self._query(
            f"select * from {quoted(self._schema)}.inspect($1)", _key(kind, name)
        )
        return _info(name, rows)

    async def names(self, match: str) -> AsyncIterator[str]:
        await self._up(hurry=True)
        for row in await self._query(f"select * from {quoted(self._schema)}.names() as key"):
            kind, name = _kind_and_name(row["key"])
            if kind == "lock" and fnmatch.fnmatchcase(name, match):
                yield name

    async def break_lock(self, name: str) -> int:
        await self._up(hurry=True)
        answer = await self._messages.submit(
            f"break\t{_key('lock', name)}\t{_ms(_SHORTEST_MARKER)}"
        )
        return int(answer.split(" ")[1])


class _Answer:
    """The answer to an extension. Unlike a coroutine it may be dropped."""

    __slots__ = ("_answer", "_sent")

    def __init__(self, answer: asyncio.Future[str], sent: float) -> None:
        self._answer = answer
        self._sent = sent

    def __await__(self) -> Generator[Any, None, Granted | Waiting | Gone]:
        text = yield from self._answer
        outcome = _outcome(text, self._sent)
        assert not isinstance(outcome, Left | Refused)
        return outcome


def _deadline(sent: float, left_ms: str) -> float:
    left = int(left_ms) / 1000
    return sent + left - (left * _DRIFT_SHARE + _DRIFT)


def _outcome(answer: str, sent: float) -> Granted | Waiting | Refused | Gone:
    match answer.split(" "):
        case ["granted" | "held", token, left]:
            return Granted(int(token), _deadline(sent, left))
        case ["waiting", left, look, floor]:
            look_at = now() + int(look) / 1000 if int(look) >= 0 else None
            return Waiting(_deadline(sent, left), look_at, int(floor))
        case ["busy"]:
            return Refused("busy")
        case ["deadlock"]:
            return Refused("deadlock")
        case ["limit", used]:
            return Refused("limit", int(used[1:] or 0))
        case ["gone", ("broken" | "expired" | "taken_over" | "gone") as reason]:
            return Gone(reason)
        case ["closed", *left]:
            raise BackendUnavailable(
                "the server has crashed, and its unlogged tables are empty: nothing is granted until every lease "
                f"of before has ended, in {int(left[0]) / 1000 if left and left[0] else '?'} s"
            )
    raise BackendError(f"an answer of the wrong shape: {answer!r:.200}")


def _left(answer: str) -> Left:
    match answer.split(" "):
        case ["released"]:
            return Left("released")
        case ["withdrawn"]:
            return Left("withdrawn")
        case ["gone", ("broken" | "expired" | "gone") as reason]:
            return Left("gone", reason)
    raise BackendError(f"an answer of the wrong shape: {answer!r:.200}")


def _info(name: str, rows: Sequence[Any]) -> LockInfo:
    holders: dict[tuple[str, str], HolderInfo] = {}
    waiters: list[WaiterInfo] = []
    token, closed = 0, 0.0
    for what, owner, mode, own_token, left_ms, client in rows:
        if what == "name":
            token, closed = own_token, left_ms / 1000
            continue
        shown_mode: Mode = "exclusive" if mode == "x" else "shared"
        shown = unquote(owner[1:]) if owner.startswith("u") else owner[1:]
        if what == "waiter":
            waiters.append(WaiterInfo(shown, shown_mode, len(waiters), left_ms / 1000, client))
            continue
        before = holders.get((owner, mode))
        holders[owner, mode] = HolderInfo(
            owner=shown,
            mode=shown_mode,
            token=own_token,
            count=before.count + 1 if before else 1,
            remaining=max(left_ms / 1000, before.remaining if before else 0.0),
            client=client,
        )
    return LockInfo(name, tuple(holders.values()), tuple(waiters), token, closed)


def _wire_mode(request: Request) -> str:
    if request.limit:
        return f"s{request.limit}"
    return "x" if request.mode == "exclusive" else "s"


def _channel(client: str) -> str:
    return "aiodlock_" + hashlib.md5(client.encode(), usedforsecurity=False).hexdigest()


def make_label() -> str:
    """Return a name for one client: where it runs, and something that no other has."""
    return f"{quote(socket.gethostname(), safe='')}-{os.getpid()}-{secrets.token_hex(6)}"
