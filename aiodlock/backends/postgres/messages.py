"""The messages of all tasks to PostgreSQL: those of one turn of the event loop share a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..base import Unanswered
from .connection import ANSWER_WITHIN, FAILURES, POOLED, Connection, Link, sqlstate_of, will_pass

#: An answer may take twice as long after each time in which none came, up to this (seconds).
_LONGEST_ANSWER = 16.0
#: How much later than it was due a missing answer is looked for once more (seconds).
_LAST_LOOK = 0.05
#: How many messages go out in one call at the most. Their names stay locked until it is committed, and each
#: locked name takes a place in the server's table of locks. Few, so that the client prepares the next call
#: while the server works on one; more when the server mostly waits for its disk.
_MOST, _MOST_WHEN_SLOW = 32, 128
#: Calls of many messages that take longer, on average, are slow (seconds).
_SLOW = 0.005
#: After so many calls of one message in a row, the next one does not wait for further messages.
_ALONE = 8


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
        self._within = ANSWER_WITHIN
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
            if len(batch) > 1 and _is_final(connection, failed):
                # Nothing was carried out, because of one of them: each by itself.
                for one in batch:
                    await self._send(connection, [one])
            else:
                self._failed(connection, failed, [answer for _, answer in batch])
            return
        if len(batch) >= _MOST:
            # Some calls only release, and wait for nothing: so the average of about ten counts.
            self._took += (now() - started - self._took) / 10
        self._within = ANSWER_WITHIN
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
            self._within = ANSWER_WITHIN
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
        else:
            # If the loop stood still, the answer may have come, and is read before this.
            self._timer = loop.call_later(_LAST_LOOK, self._end_silence, loop, self._late_at)

    def _end_silence(self, loop: asyncio.AbstractEventLoop, late_at: float) -> None:
        self._timer = None
        if not self._busy or self._late_at != late_at:
            self._look_at_clock(loop)  # it was answered
        elif self.link.connection is self._on:
            self.link.give_up(TimeoutError(f"no answer for {self._within:g} s"))
            self._within = min(2 * self._within, _LONGEST_ANSWER)
        elif self._on is not None:
            self._on.terminate()

    def _failed(
        self, connection: Connection, failed: Exception, answers: Sequence[asyncio.Future[Any]]
    ) -> None:
        where, error = self.link.described, BackendError
        if not _is_refused(connection, failed):
            # The server may have committed before the connection was lost.
            error, message = Unanswered, f"{where}: {self.link.failure or failed}"
            self._give_up(connection, failed)
        elif will_pass(failed):
            error, message = BackendUnavailable, f"{where} is not ready: {failed}"
            if sqlstate_of(failed) == "25006":  # a standby now: another server is the primary
                self._give_up(connection, failed)
        elif sqlstate_of(failed).startswith(POOLED):
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


def _is_refused(connection: Connection, failed: Exception) -> bool:
    """Whether the server has answered, and nothing was carried out."""
    if not isinstance(failed, asyncpg.PostgresError) or connection.is_closed():
        return False
    return not sqlstate_of(failed).startswith(("08", "57P"))


def _is_final(connection: Connection, failed: Exception) -> bool:
    """Whether the server would refuse the same call again."""
    if not _is_refused(connection, failed) or will_pass(failed):
        return False
    return not sqlstate_of(failed).startswith(POOLED)


def _fail(answers: Sequence[asyncio.Future[Any]], error: BackendError) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(type(error)(str(error)))
            answer.exception()  # perhaps nobody waits any more
