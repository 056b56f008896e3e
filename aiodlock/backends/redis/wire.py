"""One open connection that all tasks of a client share: commands out, replies back in order.

A redis-py connection does the connecting. Once it is up, its transport is handed to ``TransportWire``
(an ``asyncio.Protocol`` around hiredis's reader), which has no task and no stream between the socket
and the waiting futures. A connection without a transport (fakeredis) is read by ``DriverWire``.

A command is written at once when nothing is in flight. Otherwise, those of one turn of the event loop are
written together, sixteen at a time. Of thousands, a thousand are on their way, and the rest waits here, so
that the extension of a lease need not be behind them all. A caller that is cancelled only abandons its
future: the reply is read and dropped, the order of the others is not disturbed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from ..._agenda import NEVER
from ..._patience import Patience
from ..base import Unanswered
from .refusals import ReplyError

#: After so many commands the wire writes without waiting for the end of the turn: the server can begin.
_WRITE_AT = 16
#: So many commands are on their way at most, besides urgent ones. A server is done with them in some 0.1 s;
#: and if a round trip takes as long, it gets 10,000 per second.
_WINDOW = 1000
#: So many replies are taken in one turn: after a stall thousands may come in one packet, and each of them
#: wakes a task.
_SLICE: Final = range(200)
_NOTHING: Final = object()


class Callback:
    """Stands where a future would, and hands the reply on at once: no task awaits it.

    A reply that comes after it was said to be unanswered goes to ``on_late``, if there is one.
    """

    __slots__ = ("_loop", "_on_late", "_on_reply")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_reply: Callable[[Any], object],
        on_late: Callable[[Any], object] | None = None,
    ) -> None:
        self._loop = loop
        self._on_reply: Callable[[Any], object] | None = on_reply
        self._on_late = on_late

    def done(self) -> bool:
        return self._on_reply is None and self._on_late is None

    def set_result(self, reply: Any) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is None:
            on_reply, self._on_late = self._on_late, None
            if isinstance(reply, Unanswered):
                return
        elif not isinstance(reply, Unanswered):
            self._on_late = None
        if on_reply is None:
            return
        try:
            on_reply(reply)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            # As with a future's callback: this connection and the other replies are not affected.
            what = {"message": f"{on_reply!r} failed", "exception": error}
            self._loop.call_exception_handler(what)

    set_exception = set_result


class Awaited:
    """Reads a reply as it comes, also when the task that waits for it has gone on, and wakes that task."""

    __slots__ = ("_on_read", "answered")

    def __init__(self, on_read: Callable[[Any], object] | None) -> None:
        self._on_read = on_read
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        if self._on_read is not None:
            self._on_read(reply)
        if not self.answered.done():
            self.answered.set_result(reply)

    def set_exception(self, error: Any, /) -> None:
        if not self.answered.done():
            fail(self.answered, error)

    def take(self, result: Any) -> None:
        """Take a result, or the exception that stands for it."""
        (self.set_exception if isinstance(result, Exception) else self.set_result)(result)


class Reader(Protocol):
    """What a reply is given to: a future, or what stands for it and makes no future for each command."""

    def done(self) -> bool: ...

    def set_result(self, reply: Any, /) -> None: ...

    def set_exception(self, error: Any, /) -> None: ...


class Wire:
    """What both kinds of wire share: which caller waits for which reply, and what a lost connection means.

    Mutable state: ``_out`` (packed commands of this turn), ``_waiting`` (a future, or what stands for it,
    per command sent), ``_held`` (commands that wait until fewer are on their way), ``answers`` (how
    many replies and messages came back, so that silence can be told), ``_lease`` (the shortest that hung on
    an answer lately), ``_timed`` (the reader whose reply is a sample of how long replies take, and when it
    was asked for; ``_to_time``: the next command's is one), ``_limited`` (replies that are awaited for so
    long only, and until when) with one timer ``_limit`` for the oldest of them, which is not moved when
    that one is answered; ``lost`` (done when it is over).

    :param patience: how long a reply may take; it learns from the replies.
    :param longest: seconds; without any reply for a third of this the connection counts as dead.
    """

    def __init__(
        self,
        patience: Patience,
        on_message: Callable[[Any], None] | None = None,
        *,
        longest: float = NEVER,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._waiting: deque[Reader] = deque()
        self._held: deque[tuple[bytes, Reader]] = deque()
        self._on_message = on_message
        self.patience: Patience = patience
        self._lease = self._longest = longest
        self._timed: tuple[Reader, float] | None = None
        self._to_time = False
        self.answers: int = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._limited: deque[tuple[float, Reader]] = deque()
        self._limit: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[Exception] = self._loop.create_future()
        #: Names of the scripts that had to be sent again, with their source, on this wire.
        self.reloaded: set[str] = set()

    def send(
        self, *command: bytes | str | int, later: bool = False, within: float | None = None
    ) -> asyncio.Future[Any]:
        """Send one command; see ``send_packed``."""
        return self.send_packed(hiredis.pack_command(command), later=later, within=within)  # type: ignore[arg-type]

    def send_packed(
        self, command: bytes, *, later: bool = False, within: float | None = None
    ) -> asyncio.Future[Any]:
        """Send one command in RESP; the future gives its reply, or raises ReplyError or Unanswered.

        :param later: nobody waits for the reply, so it is written with what this turn still brings.
        :param within: seconds after which it counts as unanswered. All users of one wire should
            name about the same, since the oldest is looked at first.
        """
        reply: asyncio.Future[Any] = self._loop.create_future()
        self.put(command, reply, later=later, within=within)
        return reply

    def put(
        self,
        command: bytes,
        reader: Reader,
        *,
        later: bool = False,
        within: float | None = None,
        lease: float = NEVER,
        urgent: bool = False,
    ) -> float:
        """Send one command in RESP, and give its reply to ``reader``; see ``send_packed``.

        Return until when that is waited for, on the loop's clock.

        :param lease: how long the lease is that hangs on it (seconds).
        :param urgent: it passes the commands that wait until fewer are on their way.
        """
        if self.lost.done():
            self._fail(reader, Unanswered("the connection is closed"))
            return 0.0
        out, waiting = self._out, self._waiting
        if self._watchdog is None:
            self._watch_anew()
        if len(waiting) >= _WINDOW and not urgent:
            self._held.append((command, reader))
        else:
            if later or len(out) != len(waiting):
                self._post(command)
            elif out:
                # Nothing is in flight: write now, together with what would go out at the end of this turn.
                self._out = []
                self._write(b"".join((*out, command)))
            else:
                self._write(command)
            waiting.append(reader)
            if self._to_time:
                self._timed, self._to_time = (reader, self._loop.time()), False
        if lease < self._lease:
            self._lease = lease
            self._watch_anew()
        if within is None:
            return NEVER
        until = self._loop.time() + within
        self._limited.append((until, reader))
        if self._limit is None:
            self._limit = self._loop.call_at(until, self._on_limit)
        return until

    def _fail(self, reader: Reader, error: Exception) -> None:
        if isinstance(reader, Callback):
            # The caller of this method may be in the middle of something.
            self._loop.call_soon(reader.set_exception, error)
        else:
            fail(reader, error)

    def post(self, *command: bytes | str | int) -> None:
        """Send one command whose reply arrives as a message."""
        self._post(hiredis.pack_command(command))  # type: ignore[arg-type]

    def _post(self, command: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        if len(self._out) >= _WRITE_AT:
            self._flush()

    @property
    def peer(self) -> object:
        """The address of the server, where there is one."""
        return None

    def close(self, reason: Exception | None = None) -> None:
        """Break the connection. What is in flight fails as unanswered."""
        if self.lost.done():
            return
        reason = reason or Unanswered("the connection was closed")
        self.lost.set_result(reason)
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._limit is not None:
            self._limit.cancel()
        self._limited.clear()
        self._timed = None  # its exception's traceback holds frames, and one of them this object
        waiting, self._waiting = [*self._waiting, *(reply for _, reply in self._held)], deque()
        self._held.clear()
        for reply in waiting:
            if not reply.done():
                error = Unanswered("the connection was lost before the reply came")
                error.__cause__ = reason
                self._fail(reply, error)

    async def closed(self) -> None:
        """Close, and wait until nothing of it is left."""
        self.close()

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if data and not self.lost.done():
            self._write(data)

    def _write(self, data: bytes) -> None:
        raise NotImplementedError

    def _receive(self, reply: Any) -> None:
        self.answers += 1
        if self._on_message is not None:
            self._on_message(reply)
            return
        if not self._waiting:
            self.close(Unanswered(f"a reply that nobody asked for: {reply!r:.80}"))
            return
        waiter = self._waiting.popleft()
        if self._timed is not None and self._timed[0] is waiter:
            self.patience.answered(self._loop.time() - self._timed[1])
            # Quick replies are many, and one in a while tells as much as all of them.
            self._timed, self._to_time = None, not self.patience.is_short
        if self._held:  # first: what this reply leads to is behind them
            self._send_held()
        limited = self._limited
        if limited and limited[0][1] is waiter:
            limited.popleft()
        if waiter.done():
            return
        if isinstance(reply, Exception):
            fail(waiter, ReplyError(str(reply)))
        else:
            waiter.set_result(reply)

    def _send_held(self) -> None:
        while self._held and len(self._waiting) < _WINDOW:
            command, reply = self._held.popleft()
            self._post(command)
            self._waiting.append(reply)

    def _on_limit(self) -> None:
        limited, moment = self._limited, self._loop.time()
        while limited and (limited[0][1].done() or limited[0][0] <= moment):
            _, reply = limited.popleft()
            if not reply.done():
                fail(reply, Unanswered("no reply in time"))
                self._to_time = self._timed is None
        self._limit = self._loop.call_at(limited[0][0], self._on_limit) if limited else None

    def _watch_anew(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._to_time = self._timed is None
        silence = self.patience.silence(self._lease)
        self._watchdog = self._loop.call_later(silence, self._watch, self.answers, silence)

    def _watch(self, answers_before: int, silence: float) -> None:
        self._watchdog, self._lease = None, self._longest
        if not self._waiting:
            return
        if self.answers == answers_before:
            self.patience.ran_out()
            self.close(Unanswered(f"no reply within {silence:.3g} s"))
            return
        self._watch_anew()


def fail(reply: Reader, error: BaseException) -> None:
    reply.set_exception(error)
    if isinstance(reply, asyncio.Future):
        reply.exception()  # its reader may be gone: asyncio need not log that


class TransportWire(Wire, asyncio.Protocol):
    """On the transport of a connection that redis-py has opened.

    Mutable state: ``_paused`` (nothing is read until the replies that were read are taken).
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        patience: Patience,
        on_message: Callable[[Any], None] | None = None,
        *,
        longest: float = NEVER,
    ) -> None:
        super().__init__(patience, on_message, longest=longest)
        self._paused = False
        self._reader = hiredis.Reader(
            notEnoughData=_NOTHING, protocolError=ReplyError, replyError=ReplyError
        )
        # Kept because a StreamWriter closes its transport when it is collected.
        self._writer = writer
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]
        self._transport.set_protocol(self)
        self._transport.resume_reading()

    @property
    def peer(self) -> object:
        return self._transport.get_extra_info("peername")

    def _write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        # As ``_take``, without a call: each acquire and release comes by here.
        reader = self._reader
        reader.feed(data)
        try:
            for _ in _SLICE:
                if (reply := reader.gets()) is _NOTHING:
                    return
                self._receive(reply)
        except ReplyError as broken:
            self.close(broken)
        if not self.lost.done():
            self._paused = True
            self._transport.pause_reading()
            self._loop.call_soon(self._take_on)

    def _take(self) -> bool:
        """Take a slice of the replies that were read; return whether there may be more of them."""
        gets = self._reader.gets
        try:
            for _ in _SLICE:
                if (reply := gets()) is _NOTHING:
                    return False
                self._receive(reply)
        except ReplyError as broken:
            self.close(broken)
        return not self.lost.done()

    def _take_on(self) -> None:
        if not self._paused:
            return
        if self._take():
            self._loop.call_soon(self._take_on)
            return
        self._paused = False
        if not self.lost.done():
            self._transport.resume_reading()

    def _on_limit(self) -> None:
        if self._paused:  # what is waited for may be among them
            self._limit = self._loop.call_later(0.0, self._on_limit)
        else:
            super()._on_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        while self._paused:  # what has come before its end counts
            self._paused = self._take()
        self.close(exc or Unanswered("the server closed the connection"))

    def close(self, reason: Exception | None = None) -> None:
        super().close(reason)
        self._transport.abort()


class DriverWire(Wire):
    """On redis-py's own reading and writing, for connections that have no transport."""

    def __init__(
        self,
        connection: AbstractConnection,
        patience: Patience,
        on_message: Callable[[Any], None] | None = None,
        *,
        longest: float = NEVER,
    ) -> None:
        super().__init__(patience, on_message, longest=longest)
        self._connection = connection

    def _write(self, data: bytes) -> None:
        self._connection._writer.writelines([data])  # type: ignore[union-attr]

    async def read(self) -> None:
        """Read replies until the connection is over."""
        try:
            while not self.lost.done():
                try:
                    reply: Any = await self._connection.read_response(disconnect_on_error=False)
                except NoScriptError as refused:  # redis-py has cut the code off
                    reply = ReplyError(f"NOSCRIPT {refused}")
                except ResponseError as refused:
                    reply = refused
                self._receive(reply)
        except (RedisError, OSError) as broken:
            self.close(broken)

    async def closed(self) -> None:
        self.close()
        await self._connection.disconnect(nowait=True)


def open_wire(
    connection: AbstractConnection,
    patience: Patience,
    on_message: Callable[[Any], None] | None = None,
    *,
    longest: float = NEVER,
) -> Wire:
    """Take over a connected redis-py connection."""
    writer = connection._writer
    if not isinstance(writer, asyncio.StreamWriter):
        return DriverWire(connection, patience, on_message, longest=longest)
    wire = TransportWire(writer, patience, on_message, longest=longest)
    # It would warn of an open connection, and close ours, when it is collected.
    connection._writer = connection._reader = None
    return wire
