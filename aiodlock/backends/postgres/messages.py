"""The messages of all tasks to PostgreSQL: those of one turn of the event loop share a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias

import asyncpg

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._patience import LEAST, LONGEST, Patience
from ..base import Unanswered
from .connection import (
    FAILURES,
    GONE,
    OF_THE_MESSAGE,
    POOLED,
    STUCK,
    Connection,
    sqlstate_of,
    will_pass,
    words_of,
)
from .link import Link
from .silence import Silence

#: How many messages go out in one call at the most. Their names stay locked until it is committed, and each
#: locked name takes a place in the server's table of locks. Few, so that the client prepares the next call
#: while the server works on one; more when the server mostly waits for its disk.
_MOST, _MOST_WHEN_SLOW = 32, 128
#: Calls of many messages that take longer, on average, are slow (seconds).
_SLOW = 0.005
#: After so many calls of one message in a row, the next one does not wait for further messages.
_ALONE = 8
#: So many characters go out in one call at the most: an answer has about as many. It must fit into what a
#: connection takes without a reader, else a client that is paused would keep its names locked.
_MOST_TEXT = 16_000


class Message(NamedTuple):
    """A line for ``turn``.

    :param lease: the length of the lease that hangs on the answer, in seconds.
    """

    text: str
    lease: float | None = None


class OtherHistory(Exception):
    """The server is not the one that this client knows, or its functions are of another version."""


class NotReplicated(Exception):
    """The server has committed without its standby: it may forget that. Somebody has ended the wait."""


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
    meanwhile), ``_closed``, ``_broken`` (why nothing can be sent any more), ``_stopped`` (set when a call
    has ended, and no other one begins), ``_took`` (how long a call of many messages takes on average).

    :param on_answer: called for each call that was answered.
    """

    def __init__(
        self,
        link: Link,
        call: Callable[[Connection, list[Message]], Coroutine[Any, Any, list[str]]],
        on_heard: Callable[[Sequence[str]], object],
        on_answer: Callable[[], object],
    ) -> None:
        self.link: Link = link
        self.patience: Patience = Patience(LEAST, LONGEST)
        self._silence = Silence(self.patience, self._on_silence)
        self._call = call
        self._on_heard = on_heard
        self._on_answer = on_answer
        self._waiting: list[tuple[Message, asyncio.Future[str]]] = []
        self._queries: list[tuple[_Query, asyncio.Future[Any]]] = []
        self._busy = self._due = self._closed = False
        self._alone = 0
        self._broken: BaseException | None = None
        self._stopped = asyncio.Event()
        self._took = 0.0

    def submit(self, message: Message) -> asyncio.Future[str]:
        """Send a message with the next call; the future gets its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._waiting.append((message, answer))
        self._wake(loop)
        return answer

    def query(self, query: _Query) -> asyncio.Future[Any]:
        """Run a query after the messages that were submitted before; the future gets what it returns."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._queries.append((query, answer))
        self._wake(loop)
        return answer

    async def run(self) -> None:
        """Send until cancelled; perhaps once more."""
        self._closed = self._due = False
        if self._broken is None:
            self._stopped.clear()
        try:
            await self._stopped.wait()
        finally:
            self._closed = True
            while self._busy:
                # Not cancelled, because asyncpg would answer that with a task of its own: see above.
                self._stopped.clear()
                self.link.give_up(ConnectionError("the client was left"))
                try:
                    await self._stopped.wait()
                except asyncio.CancelledError:
                    continue
            self._fail_all(self.link.unavailable())
            self._silence.close()
        if self._broken is not None:
            raise self._broken

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            self._fail_all(self.link.unavailable())
        elif self._busy:
            self._alone = 0
            if self.link.connection is None:
                self._fail_all(self.link.unavailable())
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
        # One alone: what extends leases does not wait for all that people ask.
        queries = self._queries[:1]
        del self._queries[:1]
        most = _MOST_WHEN_SLOW if self._took > _SLOW else _MOST
        messages = _fitting(self._waiting[:most])
        del self._waiting[: len(messages)]
        self._busy = True
        self._alone = self._alone + 1 if len(messages) == 1 else 0
        _Run(self._carry(connection, messages, queries), self._on_over)

    def _on_over(self, failed: BaseException | None) -> None:
        self._busy = False
        self._silence.forget()
        if failed is not None:
            self._closed, self._broken = True, failed
            self._fail_all(self.link.unavailable())
        if self._closed:
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
        leases = [message.lease for message, _ in batch if message.lease is not None]
        self._silence.begin(connection, [answer for _, answer in batch], min(leases, default=None))
        started = now()
        try:
            answers = await self._call(connection, [message for message, _ in batch])
        except (*FAILURES, OtherHistory, NotReplicated) as failed:
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
        self._answered(connection, now() - started)
        _pass_on(answers, batch)
        if len(answers) > len(batch):
            self._on_heard(answers[len(batch) :])

    async def _run_query(
        self, connection: Connection, query: _Query, answer: asyncio.Future[Any]
    ) -> None:
        if self.link.connection is not connection:
            _fail([answer], self.link.unavailable())
            return
        self._silence.begin(connection, [answer])
        started = now()
        try:
            result = await query(connection)
        except (*FAILURES, OtherHistory) as failed:
            self._failed(connection, failed, [answer])
        else:
            self._answered(connection, now() - started)
            if not answer.done():
                answer.set_result(result)

    def _answered(self, connection: Connection, took: float) -> None:
        self._silence.end(took)
        self.link.trust(connection)
        self._on_answer()

    def _on_silence(
        self, connection: Connection, silent: TimeoutError, answers: Sequence[asyncio.Future[Any]]
    ) -> None:
        """The answer may be on its way. It is for nobody then: whoever asks again has a message with the
        same id."""
        if self.link.connection is not connection:
            return  # it is given up already
        self.patience.ran_out()
        self.link.doubt(connection, silent)
        _fail(answers, Unanswered(f"{self.link.described}: {silent}"))
        self._fail_all(self.link.unavailable())

    def _failed(
        self, connection: Connection, failed: Exception, answers: Sequence[asyncio.Future[Any]]
    ) -> None:
        where, code, why = self.link.described, sqlstate_of(failed), words_of(failed)
        error: type[BackendError] = BackendUnavailable
        if isinstance(failed, NotReplicated):
            self.link.trust(connection)
            error, message = Unanswered, f"{where}: {why}"
        elif isinstance(failed, OtherHistory):
            message = f"{where}: {why}"
            self._give_up(connection, failed)
        elif not _is_refused(connection, failed):
            # The server may have committed before the connection was lost.
            error, message = Unanswered, f"{where}: {self.link.failure or why}"
            self._give_up(connection, failed)
        elif code.startswith(OF_THE_MESSAGE) and not will_pass(failed):
            error, message = BackendError, f"{where} refused: {why}"
        elif will_pass(failed):
            message = f"{where} is not ready: {why}"
            if code == "25006":  # a standby now: another server is the primary
                self._give_up(connection, failed)
        else:
            # The client was let in before: what is withdrawn may be given back, and what is missing be made
            # again. A new connection tells what is wrong.
            message = f"{where} refuses for now: {why}"
            if code.startswith((*POOLED, *GONE, STUCK)):
                self._give_up(connection, failed)
        _fail(answers, error(message))

    def _give_up(self, connection: Connection, why: Exception) -> None:
        if self.link.connection is connection:
            self.link.give_up(why)

    def _fail_all(self, error: BackendError) -> None:
        waiting, self._waiting = self._waiting, []
        queries, self._queries = self._queries, []
        _fail([answer for _, answer in (*waiting, *queries)], error)


def _pass_on(answers: Sequence[str], batch: Sequence[tuple[Message, asyncio.Future[str]]]) -> None:
    for text, (_, answer) in zip(answers, batch, strict=False):
        if not answer.done():
            answer.set_result(text)


def _is_refused(connection: Connection, failed: Exception) -> bool:
    """Whether the server has answered, and nothing was carried out."""
    if not isinstance(failed, asyncpg.PostgresError) or connection.is_closed():
        return False
    return not sqlstate_of(failed).startswith(("08", "57P"))


def _is_final(connection: Connection, failed: Exception) -> bool:
    """Whether the server would refuse the same call again."""
    if not _is_refused(connection, failed) or will_pass(failed):
        return False
    return sqlstate_of(failed).startswith(OF_THE_MESSAGE)


def _fitting(
    waiting: Sequence[tuple[Message, asyncio.Future[str]]],
) -> list[tuple[Message, asyncio.Future[str]]]:
    """Return the first ones, as many as may go out in one call."""
    length = 0
    fitting: list[tuple[Message, asyncio.Future[str]]] = []
    for one in waiting:
        length += len(one[0].text)
        if fitting and length > _MOST_TEXT:
            break
        fitting.append(one)
    return fitting


def _fail(answers: Sequence[asyncio.Future[Any]], error: BackendError) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(type(error)(str(error)))
            answer.exception()  # perhaps nobody waits any more
