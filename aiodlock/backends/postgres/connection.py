"""Connections to PostgreSQL that are kept up: one for messages, one for notifications.

Over 400 lines: dialing, batches, their answers and losses share one connection's state.

asyncpg answers one query at a time. When an await of it is cancelled, it asks the server to cancel the
query, from a task of its own. Here many callers share a query. So no await of asyncpg is ever cancelled: to
give up means to close the connection, which ends the await at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered

_logger = logging.getLogger("aiodlock")

_T = TypeVar("_T")

_CONNECT_WITHIN = 2.0
_LONGEST_CONNECT = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: How long a call waits for the connection; its caller decides whether to try again.
_WAIT_UP = 0.5
#: How long an answer may take before the connection counts as dead; longer after each such time.
_ANSWER_WITHIN, _LONGEST_ANSWER = 2.0, 16.0
#: How many messages go out in one call at the most. Their names stay locked until it is committed, and each
#: locked name takes a place in the server's table of locks. Few, so that the client prepares the next call
#: while the server works on one; more when the server mostly waits for its disk.
_MOST, _MOST_WHEN_SLOW = 32, 128
#: Calls of many messages that take longer, on average, are slow (seconds).
_SLOW = 0.005
#: After so many calls of one message in a row, the next one does not wait for further messages.
_ALONE = 8
#: How often the listening connection is asked whether it is there.
_WATCH_EVERY = 5.0

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
#: Refusals that will pass, by SQLSTATE: read-only, transaction rolled back, out of resources, lock not
#: available, cancelled or shutting down, connection failures.
_WILL_PASS = ("25006", "40", "53", "55P03", "57", "08")
#: A pooler has handed the session to another client: prepared statements are not where they were made.
_POOLED = ("26000", "42P05")


class Connection(Protocol):
    """What is used of asyncpg's connections."""

    def fetchval(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def fetch(self, query: str, *arguments: object) -> Coroutine[Any, Any, list[Any]]: ...
    def fetchrow(self, query: str, *arguments: object) -> Coroutine[Any, Any, Any]: ...
    def execute(self, query: str, *arguments: object) -> Coroutine[Any, Any, str]: ...
    def transaction(self) -> AbstractAsyncContextManager[object]: ...
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
    return not isinstance(failed, asyncpg.PostgresError) or _sqlstate(failed).startswith(_WILL_PASS)


def _sqlstate(failed: Exception) -> str:
    return getattr(failed, "sqlstate", None) or ""


async def ask(connection: Connection, query: Coroutine[Any, Any, _T], within: float) -> _T:
    """Return a query's answer. Give the connection up after ``within`` seconds, and when cancelled."""
    task = asyncio.ensure_future(query)
    try:
        await asyncio.wait({task}, timeout=within)
    finally:
        if not task.done():
            connection.terminate()
            await asyncio.wait({task})
            task.exception()  # it is told that the connection was closed
    if connection.is_closed() and task.exception() is not None:
        raise ConnectionError(f"the connection was lost: {task.exception()}") from task.exception()
    return task.result()


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
        connection: Connection = await asyncpg.connect(self._source, timeout=within, **cache)
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
        if not will_pass(failed) and not _sqlstate(failed).startswith(_POOLED):
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
        if _sqlstate(failed).startswith(_POOLED):
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


class Message(NamedTuple):
    """A line for ``turn``; and the statement, with further arguments, for when it goes alone."""

    text: str
    alone: str
    arguments: tuple[object, ...] = ()


_Query: TypeAlias = Callable[[Connection], Coroutine[Any, Any, Any]]


class _Run:
    """A coroutine that runs without a task: its first step at once, each further one when a future is done.

    A task would begin a turn of the event loop later, and could be cancelled.
    """

    __slots__ = ("_call", "_on_over", "_step")

    def __init__(
        self, call: Coroutine[Any, Any, None], on_over: Callable[[BaseException | None], object]
    ) -> None:
        self._call = call
        self._on_over = on_over
        self._step = self._go_on  # bound once
        self._go_on(None)

    def _go_on(self, _: object) -> None:
        try:
            future = self._call.send(None)
        except StopIteration:
            self._on_over(None)
        except (Exception, asyncio.CancelledError) as failed:
            self._on_over(failed)
        else:
            if future is None:  # it gives way for a turn
                asyncio.get_running_loop().call_soon(self._step, None)
            else:
                future._asyncio_future_blocking = False  # as a task does: its await was seen
                future.add_done_callback(self._step)


class Messages:
    """The messages of all tasks. While a call is on its way, messages gather for the next one.

    Mutable state: ``_waiting`` (messages that were not sent yet, and the futures of their answers),
    ``_queries`` (the same for queries), ``_busy`` (a call is on its way), ``_due`` (the next one begins in
    the next turn of the event loop), ``_alone`` (so many calls in a row were one message, and none came
    meanwhile), ``_closed``, ``_broken`` (why nothing can be sent any more), the events ``_stopped`` (that
    is so) and ``_over`` (a call has ended), ``_took`` (how long a call of many messages takes on average),
    ``_within`` (how long an answer may take now), ``_on`` and ``_late_at`` (the present call's connection,
    and until when its answer may take), ``_timer``.
    """

    def __init__(
        self,
        link: Link,
        call: Callable[[Connection, list[Message]], Coroutine[Any, Any, list[str]]],
        on_heard: Callable[[Sequence[str]], object],
    ) -> None:
        self.link: Link = link
        self._call = call
        self._on_heard = on_heard
        self._waiting: list[tuple[Message, asyncio.Future[str]]] = []
        self._queries: list[tuple[_Query, asyncio.Future[Any]]] = []
        self._busy = self._due = self._closed = False
        self._alone = 0
        self._broken: BaseException | None = None
        self._over = asyncio.Event()
        self._stopped = asyncio.Event()
        self._took = 0.0
        self._within = _ANSWER_WITHIN
        self._on: Connection | None = None
        self._late_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, message: Message) -> asyncio.Future[str]:
        """Send a message with the next call; the future gets its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._waiting.append((message, answer))
        self._wake(loop)
        return answer

    async def query(self, query: _Query) -> Any:
        """Run a query after the messages that were submitted before; return what it does."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._queries.append((query, answer))
        self._wake(loop)
        return await answer

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            await self._stopped.wait()
        finally:
            self._closed = True
            while self._busy:
                # Not cancelled, because asyncpg would answer that with a task of its own: see above.
                self._over.clear()
                self.link.give_up(ConnectionError("the client was left"))
                try:
                    await self._over.wait()
                except asyncio.CancelledError:
                    continue
            self._fail_all(self.link.unavailable())
            if self._timer is not None:
                self._timer.cancel()
        if self._broken is not None:
            raise self._broken

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            self._fail_all(self.link.unavailable())
        elif self._busy:
            self._alone = 0
        elif self._alone >= _ALONE:
            self._next()  # whoever else comes in this turn waits for the next call
        elif not self._due:
            self._due = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        if self._busy or self._closed or not (self._waiting or self._queries):
            return
        connection = self.link.connection
        if connection is None:
            self._fail_all(self.link.unavailable())
            return
        queries, self._queries = self._queries, []
        most = _MOST_WHEN_SLOW if self._took > _SLOW else _MOST
        messages, self._waiting = self._waiting[:most], self._waiting[most:]
        self._busy = True
        self._alone = self._alone + 1 if len(messages) == 1 else 0
        _Run(self._carry(connection, messages, queries), self._on_over)

    def _on_over(self, failed: BaseException | None) -> None:
        self._busy = False
        self._over.set()
        if failed is not None:
            self._closed, self._broken = True, failed
            self._fail_all(self.link.unavailable())
            self._stopped.set()
        self._next()

    async def _carry(
        self,
        connection: Connection,
        messages: list[tuple[Message, asyncio.Future[str]]],
        queries: list[tuple[_Query, asyncio.Future[Any]]],
    ) -> None:
        if messages:
            await self._send(connection, messages)
        for query, answer in queries:
            await self._run_query(connection, query, answer)

    async def _send(
        self, connection: Connection, batch: list[tuple[Message, asyncio.Future[str]]]
    ) -> None:
        self._must_answer(connection)
        started = now()
        try:
            answers = await self._call(connection, [message for message, _ in batch])
        except FAILURES as failed:
            self._failed(connection, failed, [answer for _, answer in batch])
            return
        if len(batch) >= _MOST:
            # Some calls only release, and wait for nothing: so the average of about ten counts.
            self._took += (now() - started - self._took) / 10
        self._within = _ANSWER_WITHIN
        for text, (_, future) in zip(answers, batch, strict=False):
            if not future.done():
                future.set_result(text)
        if len(answers) > len(batch):
            self._on_heard(answers[len(batch) :])

    async def _run_query(
        self, connection: Connection, query: _Query, answer: asyncio.Future[Any]
    ) -> None:
        self._must_answer(connection)
        try:
            result = await query(connection)
        except FAILURES as failed:
            self._failed(connection, failed, [answer])
        else:
            self._within = _ANSWER_WITHIN
            if not answer.done():
                answer.set_result(result)

    def _must_answer(self, connection: Connection) -> None:
        """Give the connection up unless the call that begins now is answered in time."""
        loop = asyncio.get_running_loop()
        self._on, self._late_at = connection, loop.time() + self._within
        if self._timer is None:
            # One timer for all calls: where it comes too early, it is set again.
            self._timer = loop.call_at(self._late_at, self._look_at_clock, loop)

    def _look_at_clock(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._busy:
            return
        if loop.time() < self._late_at:
            self._timer = loop.call_at(self._late_at, self._look_at_clock, loop)
        elif self.link.connection is self._on:
            self.link.give_up(TimeoutError(f"no answer for {self._within:g} s"))
            self._within = min(2 * self._within, _LONGEST_ANSWER)
        elif self._on is not None:
            self._on.terminate()

    def _failed(
        self, connection: Connection, failed: Exception, answers: Sequence[asyncio.Future[Any]]
    ) -> None:
        where, error = self.link.described, BackendError
        refused = isinstance(failed, asyncpg.PostgresError) and not connection.is_closed()
        if not refused or _sqlstate(failed).startswith(("08", "57P")):
            # The server may have committed before the connection was lost.
            error, message = Unanswered, f"{where}: {self.link.failure or failed}"
            self._give_up(connection, failed)
        elif will_pass(failed):
            error, message = BackendUnavailable, f"{where} is not ready: {failed}"
            if _sqlstate(failed) == "25006":  # a standby now: another server is the primary
                self._give_up(connection, failed)
        elif _sqlstate(failed).startswith(_POOLED):
            error, message = BackendUnavailable, f"{where} is a pooler: {failed}"
            self._give_up(connection, failed)
        else:
            message = f"{where} refused: {failed}"
        _fail(answers, error(message))

    def _give_up(self, connection: Connection, why: Exception) -> None:
        if self.link.connection is connection:
            self.link.give_up(why)

    def _fail_all(self, error: BackendError) -> None:
        waiting, self._waiting = self._waiting, []
        queries, self._queries = self._queries, []
        _fail([answer for _, answer in (*waiting, *queries)], error)


def _fail(answers: Sequence[asyncio.Future[Any]], error: BackendError) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(type(error)(str(error)))
            answer.exception()  # perhaps nobody waits any more


class Listening:
    """The connection that hears notifications. It is watched, because a listener may die without a sign.

    Mutable state: ``_heard_by`` (whom the payloads of each channel go to), ``_listened`` (the channels that
    the present connection listens to), ``_changed`` (set when these two differ).
    """

    def __init__(
        self,
        source: str,
        described: str,
        *,
        on_up: Callable[[], Awaitable[None]],
    ) -> None:
        self.link: Link = Link(
            source, described, pooled=False, prepare=self._prepare, on_up=lambda _: None
        )
        self._on_up = on_up
        self._heard_by: dict[str, list[Callable[[str], object]]] = {}
        self._listened: set[str] = set()
        self._changed = asyncio.Event()

    def listen(self, channel: str, heard: Callable[[str], object]) -> Callable[[], None]:
        """Have ``heard`` called with each payload, and with an empty one when the server listens from now
        on: what was sent before is not told. Return what ends that."""
        self._heard_by.setdefault(channel, []).append(heard)
        self._changed.set()

        def stop() -> None:
            hearers = self._heard_by.get(channel, [])
            if heard in hearers:
                hearers.remove(heard)
            if not hearers and self._heard_by.pop(channel, None) is not None:
                self._changed.set()

        return stop

    async def _prepare(self, connection: Connection) -> None:
        self._listened = set()
        await self._listen_to_all(connection)

    async def _listen_to_all(self, connection: Connection) -> None:
        for channel in self._heard_by.keys() - self._listened:
            await ask(connection, connection.add_listener(channel, self._hear), _ANSWER_WITHIN)
            self._listened.add(channel)
            self._hear(None, 0, channel, "")
        for channel in self._listened - self._heard_by.keys():
            await ask(connection, connection.remove_listener(channel, self._hear), _ANSWER_WITHIN)
            self._listened.discard(channel)

    def _hear(self, _: object, __: int, channel: str, payload: object) -> None:
        for heard in list(self._heard_by.get(channel, ())):
            heard(str(payload))

    async def run(self) -> None:
        """Watch until cancelled. ``link.run`` runs beside it."""
        known: Connection | None = None
        while True:
            await self.link.first_up()
            connection = self.link.connection
            if connection is None:
                await asyncio.sleep(0)
                continue
            try:
                self._changed.clear()
                if known is not connection:
                    known = connection
                    await self._on_up()
                await self._listen_to_all(connection)
                await ask(connection, _alive(connection), _ANSWER_WITHIN)
            except FAILURES as failed:
                self.link.give_up(failed)
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(_WATCH_EVERY):
                    await self._changed.wait()
            except TimeoutError:
                pass


async def _alive(connection: Connection) -> None:
    await connection.execute("select 1")
