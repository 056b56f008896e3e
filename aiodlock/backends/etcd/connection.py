"""A connection of HTTP/2, as far as calls of gRPC need it. (Above 400 lines: its state has one owner.)

It is of asyncio alone, without a thread: so nothing of it runs in a child that was forked. What breaks a
rule of the protocol ends the connection, and each call on it is told why.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from hpack import HPACKError
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from . import framing as f
from .exchange import STREAM_WINDOW, WINDOW, Exchange, Flow, Lost, NotSent, pack
from .framing import ProtocolError
from .headers import Headers

#: After so long without a byte the server is asked for a sign of life; grpc-go takes more than one in
#: five seconds for an attack. The connection is lost so long after that (seconds).
PING_AFTER, PONG_WITHIN = 10.0, 5.0
#: grpc-go sends a ping with every answer, to measure the way. What is owed to it goes along with the next
#: call, or so much later (seconds), instead of being a packet of its own.
_PONG_SOON = 0.05


@dataclass(slots=True)
class _Settings:
    """What the server lets a client do: ``calls`` at a time, bytes in a ``frame``, and ahead on a stream
    (``window``)."""

    calls: int = 1 << 31
    frame: int = f.LARGEST
    window: int = f.WINDOW

    def take(self, told: dict[int, int]) -> None:
        """Some have changed."""
        self.calls = told.get(SettingsFrame.MAX_CONCURRENT_STREAMS, self.calls)
        self.frame = told.get(SettingsFrame.MAX_FRAME_SIZE, self.frame)
        self.window = told.get(SettingsFrame.INITIAL_WINDOW_SIZE, self.window)
        if not f.LARGEST <= self.frame < 1 << 24:
            raise ProtocolError(f"frames of {self.frame} bytes")
        if self.window > f.LARGEST_WINDOW:
            raise ProtocolError("a window is too large", f.FLOW_CONTROL_ERROR)


class _Keepalive:
    """Whether a server that owes answers is there still.

    Mutable state: ``heard_at`` (when anything came last), ``_pinged_at``, ``_timer``.

    :param ping: asks for a sign of life, unless none is needed: then it returns False.
    :param lost: is called with the reason when none has come.
    """

    def __init__(self, ping: Callable[[], bool], lost: Callable[[str], object]) -> None:
        self._ping = ping
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.heard_at: float = self._loop.time()
        self._pinged_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look from time to time, from now on."""
        self._timer = self._loop.call_later(PONG_WITHIN, self._look)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        silent = self._loop.time() - max(self.heard_at, self._pinged_at)
        if self._pinged_at > self.heard_at:
            if silent >= PONG_WITHIN:
                self._lost(f"the server gave no sign of life for {PING_AFTER + silent:.0f} s")
                return
        elif silent >= PING_AFTER and self._ping():
            self._pinged_at = self._loop.time()
        self.begin()


class Connection(asyncio.Protocol):
    """A connection to one server.

    ``over`` is done, with the reason, as soon as no more calls can begin. Those that were begun may
    still be answered then. ``ready`` is done when the server has sent its settings.

    Mutable state: ``_transport``; ``_calls`` by stream; ``_queued`` (calls that wait for others to end);
    ``_next`` (stream); ``_flow`` of all of them together; ``_settings`` (the server's); ``_owed`` (answers
    to pings, which go out with the next bytes); ``_closed``, ``_gone`` (set when the transport is closed,
    too).
    """

    def __init__(self, authority: str, scheme: str = "http") -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[Exception] = self._loop.create_future()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = f.Reader()
        self._headers = Headers(scheme, authority)
        self._calls: dict[int, Exchange] = {}
        self._queued: deque[Exchange] = deque()
        self._next = 1
        self._flow = Flow(f.WINDOW, WINDOW)
        self._settings = _Settings()
        self._keepalive = _Keepalive(self._ping, lambda why: self.close(Lost(why)))
        self._owed = b""
        self._closed = False
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Connection to {self._headers.authority} with {len(self._calls)} calls>"

    @property
    def calls(self) -> int:
        """How many calls are not over yet."""
        return len(self._calls) + len(self._queued)

    # -- calls -----------------------------------------------------------------------------------

    def begin(
        self,
        path: str,
        heard: Callable[[bytes], object],
        message: bytes | None = None,
        *,
        within: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Exchange:
        """Begin a call. ``heard`` gets each message of the server's.

        :param message: the only one that will be sent; without it ``send`` sends any number.
        :param within: the server need not answer later (seconds).
        :raises NotSent: if the connection takes no more calls.
        """
        if self.over.done():
            raise NotSent(str(self.over.result()))
        call = Exchange(
            self._headers.pack(path, within, metadata),
            heard,
            cast("asyncio.Future[None]", self._loop.create_future()),
        )
        if message is not None:
            call.unsent += pack(message)
            call.finishing = True
        if len(self._calls) < self._settings.calls:
            self._start(call)
        else:
            self._queued.append(call)
        return call

    def send(self, call: Exchange, message: bytes) -> None:
        """Send one more message.

        :raises Lost: if the call is over.
        """
        if call.ended.done():
            raise Lost("the stream has ended")
        call.unsent += pack(message)
        if call.id:
            self._write(self._data(call))

    def cancel(self, call: Exchange, error: Exception | None = None) -> None:
        """End a call here, with this error. What it was to do may be done all the same."""
        if call.id:
            if self._calls.pop(call.id, None) is not None:
                self._write(RstStreamFrame(call.id, f.CANCEL).serialize())
                self._start_queued()
        elif call in self._queued:
            self._queued.remove(call)
            error = NotSent(str(error))
        call.end(error or Lost("the call was given up"))

    def _start(self, call: Exchange) -> None:
        call.id, self._next = self._next, self._next + 2
        call.flow.room = self._settings.window
        self._calls[call.id] = call
        # In one piece: most calls are one packet.
        head = self._headers.frames(call.id, call.block, self._settings.frame)
        self._write(head + self._data(call))
        if self._next > f.LAST_STREAM:
            self._end(NotSent("the connection is worn out"))

    def _start_queued(self) -> None:
        while self._queued and len(self._calls) < self._settings.calls and not self.over.done():
            self._start(self._queued.popleft())

    def _data(self, call: Exchange) -> bytes:
        """Return what the server takes now of what a call has to send."""
        out = b""
        while not call.finished:
            room = min(self._flow.room, call.flow.room, self._settings.frame)
            part = bytes(call.unsent[: max(0, room)])
            if not part and (call.unsent or not call.finishing):
                break
            del call.unsent[: len(part)]
            self._flow.room -= len(part)
            call.flow.room -= len(part)
            call.finished = call.finishing and not call.unsent
            out += f.frame(f.DATA, f.END_STREAM if call.finished else 0, call.id, part)
        return out

    def _send_more(self) -> None:
        for call in list(self._calls.values()):
            if call.unsent:
                self._write(self._data(call))

    def _write(self, data: bytes) -> None:
        # Nothing here waits for a transport that is full: the server's windows bound what is in it.
        if data and self._transport is not None:
            if self._owed:
                data, self._owed = self._owed + data, b""
            self._transport.write(data)

    def _owe(self, data: bytes) -> None:
        if not self._owed:
            self._loop.call_later(_PONG_SOON, self._pay)
        self._owed += data

    def _pay(self) -> None:
        owed, self._owed = self._owed, b""
        self._write(owed)

    # -- the end ---------------------------------------------------------------------------------

    def _end(self, reason: Exception) -> None:
        """Take no more calls."""
        if not self.over.done():
            self.over.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(reason)
            self.ready.exception()
        queued, self._queued = self._queued, deque()
        for call in queued:
            call.end(NotSent(str(reason)))

    def close(self, reason: Exception, code: int = f.NO_ERROR) -> None:
        """Close at once. Calls that are not over end with this reason."""
        if not self._closed:
            self._closed = True
            self._write(GoAwayFrame(error_code=code).serialize())
            if self._transport is not None:
                self._transport.close()
        self._end(reason)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Lost(str(reason)))
        self._keepalive.end()

    def abort(self) -> None:
        """Do not wait for what the peer leaves unread."""
        if self._transport is not None:
            self._transport.abort()

    async def until_idle(self, within: float) -> None:
        """Wait until no call is left, so long at most."""
        calls = [call.ended for call in (*self._calls.values(), *self._queued)]
        if calls:
            await asyncio.wait(calls, timeout=within)

    async def until_closed(self, within: float) -> None:
        """Wait until the transport is closed; after so long do not wait for what the peer leaves unread."""
        try:
            async with asyncio.timeout(within):
                await self._gone.wait()
        except TimeoutError:
            self.abort()
            await self._gone.wait()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.close(Lost("the server speaks no HTTP/2"))
            return
        settings = {SettingsFrame.ENABLE_PUSH: 0, SettingsFrame.INITIAL_WINDOW_SIZE: STREAM_WINDOW}
        ours = SettingsFrame(settings=settings).serialize()
        self._write(f.PREFACE + ours + _window_update(0, WINDOW - f.WINDOW))
        self._keepalive.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.close(
            Lost(f"the connection was closed: {exc}" if exc else "the connection was closed")
        )
        self._gone.set()

    def data_received(self, data: bytes) -> None:
        self._keepalive.heard_at = self._loop.time()
        try:
            for frame in self._reader.feed(data):
                if self._closed:
                    return
                self._take(frame)
        except ProtocolError as wrong:
            self.close(Lost(f"the server broke a rule of HTTP/2: {wrong}"), wrong.code)
        except HPACKError as wrong:
            self.close(
                Lost(f"the server sent headers that cannot be read: {wrong}"), f.COMPRESSION_ERROR
            )

    def _ping(self) -> bool:
        if self._calls:
            self._write(PingFrame(opaque_data=b"aiodlock").serialize())
        return bool(self._calls)

    # -- frames ----------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        stream = frame.stream_id
        if not self.ready.done() and not (
            isinstance(frame, SettingsFrame) and "ACK" not in frame.flags
        ):
            raise ProtocolError("it does not begin with its settings")
        match frame:
            case DataFrame():
                self._on_data(frame)
            case HeadersFrame():
                self._on_headers(frame)
            case RstStreamFrame():
                call = self._call(stream)
                if call is not None:
                    call.on_reset(frame.error_code)
                    del self._calls[stream]
                    self._start_queued()
            case WindowUpdateFrame():
                self._on_window(stream, frame.window_increment)
            case SettingsFrame():
                if "ACK" not in frame.flags:
                    self._on_settings(frame.settings)
            case PingFrame():
                if "ACK" not in frame.flags:
                    self._owe(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]).serialize())
            case GoAwayFrame():
                self._on_goaway(frame)
            case PushPromiseFrame():
                raise ProtocolError("a promise to push, which was forbidden")
        # Of PRIORITY nothing follows here, and what is not known has to be ignored.

    def _call(self, stream: int) -> Exchange | None:
        """Return the call on a stream; None if it is over."""
        call = self._calls.get(stream)
        if call is None and (stream >= self._next or not stream % 2):
            raise ProtocolError(f"stream {stream} was never begun")
        return call

    def _on_headers(self, frame: HeadersFrame) -> None:
        headers = self._headers.read(frame.data)  # in any case: it changes the table
        call = self._call(frame.stream_id)
        if call is not None:
            last = "END_STREAM" in frame.flags
            call.on_headers(headers, last=last)
            self._after(call, last=last)

    def _on_data(self, frame: DataFrame) -> None:
        stream, length = frame.stream_id, frame.flow_controlled_length
        self._flow.received(length)
        if more := self._flow.confirmed():
            self._write(_window_update(0, more))
        call = self._call(stream)
        if call is None:
            return
        call.flow.received(length)
        last = "END_STREAM" in frame.flags
        call.on_data(frame.data, last=last)
        if not last and not call.ended.done() and (more := call.flow.confirmed()):
            self._write(_window_update(stream, more))
        self._after(call, last=last)

    def _after(self, call: Exchange, *, last: bool) -> None:
        """The server's side of a call may have ended."""
        if not call.ended.done() or self._calls.pop(call.id, None) is None:
            return
        if not (last and call.finished):
            # It answered without waiting for the rest, or what it sends means nothing any more.
            self._write(RstStreamFrame(call.id, f.CANCEL).serialize())
        self._start_queued()

    def _on_window(self, stream: int, more: int) -> None:
        if not stream:
            self._flow.widen(more)
            self._send_more()
            return
        call = self._call(stream)
        if call is not None:
            call.flow.widen(more)
            self._write(self._data(call))

    def _on_settings(self, settings: dict[int, int]) -> None:
        before = self._settings.window
        self._settings.take(settings)
        for call in self._calls.values():
            call.flow.widen(self._settings.window - before)
        self._write(SettingsFrame(flags=["ACK"]).serialize())
        if not self.ready.done():
            self.ready.set_result(None)
        self._start_queued()
        self._send_more()

    def _on_goaway(self, frame: GoAwayFrame) -> None:
        """The server ends the connection; calls after the last one it looked at were not carried out."""
        text = frame.additional_data[:192].decode(errors="replace")
        why = f" (error {frame.error_code}){f': {text}' if text else ''}"
        reason = Lost(f"the server ends the connection{why}")
        self._end(reason)
        for stream, call in list(self._calls.items()):
            if stream > frame.last_stream_id & f.LAST_STREAM:
                del self._calls[stream]
                call.end(NotSent(str(reason)))


def _window_update(stream: int, more: int) -> bytes:
    return WindowUpdateFrame(stream, more).serialize()


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    *,
    address: str | None = None,
    accepted: Callable[[], object] = lambda: None,
) -> Connection:
    """Return a connection whose server has answered.

    :param address: the one to dial, of those of the host's name.
    :param accepted: is called when the machine has answered, a round trip before the server does.
    :raises OSError: if there is none, ``CallFailed`` if what answers is no server of HTTP/2.
    """
    loop = asyncio.get_running_loop()
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _, connection = await loop.create_connection(
        lambda: Connection(authority, "http" if tls is None else "https"),
        address or host,
        port,
        ssl=tls,
        server_hostname=host if tls is not None else None,
    )
    accepted()
    try:
        await connection.ready
    except BaseException:
        connection.close(Lost("the connection was given up"))
        connection.abort()
        raise
    return connection
