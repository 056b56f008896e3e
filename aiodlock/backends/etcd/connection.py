"""A connection of HTTP/2, as far as calls of gRPC need it. (Above 400 lines: its state has one owner.)

It is of asyncio alone, without a thread: so nothing of it runs in a child that was forked. What breaks a
rule of the protocol ends the connection, and each call on it is told why.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

from hpack import Decoder, Encoder, HPACKError
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
from .exchange import Exchange, Header, Lost, NotSent, pack
from .framing import ProtocolError

#: The server may send so many bytes ahead: on one stream, and on all together.
_STREAM_WINDOW, _WINDOW = 1 << 20, 1 << 23
#: After so long without a byte the server is asked for a sign of life; grpc-go takes more than one in
#: five seconds for an attack. The connection is lost so long after that (seconds).
PING_AFTER, PONG_WITHIN = 10.0, 5.0
_NEVER_LIMITED = 1 << 31
#: All headers of one message together, as HPACK counts them.
_MOST_HEADERS = 1 << 16
#: grpc-go sends a ping with every answer, to measure the way. What is owed to it goes along with the next
#: call, or so much later (seconds), instead of being a packet of its own.
_PONG_SOON = 0.05


class Connection(asyncio.Protocol):
    """A connection to one server.

    ``over`` is done, with the reason, as soon as no more calls can begin. Those that were begun may
    still be answered then. ``ready`` is done when the server has sent its settings.

    Mutable state: ``_transport``; ``_calls`` by stream; ``_queued`` (calls that wait for others to end);
    ``_next`` (stream); ``_window`` (the server takes so many bytes more), and what its settings say:
    ``_first_window``, ``_largest``, ``_most``; ``_unconfirmed`` (received bytes that the server was not
    told to send again); ``_heard_at``, ``_pinged_at``, ``_timer``
    (signs of life); ``_owed`` (answers to pings, which go out with the next bytes); ``_blocks`` (headers as
    bytes, by what they say), ``_read`` (the other way round); ``_closed`` (why it is closed), ``_gone``
    (set when the transport is closed, too).
    """

    def __init__(self, authority: str, scheme: str = "http") -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[Exception] = self._loop.create_future()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._authority = authority
        self._scheme = scheme
        self._transport: asyncio.Transport | None = None
        self._reader = f.Reader()
        self._decoder = Decoder(_MOST_HEADERS)
        # It remembers nothing, so what it has written once can be sent again.
        self._encoder = Encoder()
        self._encoder.header_table_size = 0
        self._no_table = self._encoder.encode(())
        self._calls: dict[int, Exchange] = {}
        self._queued: deque[Exchange] = deque()
        self._next = 1
        self._window = self._first_window = f.WINDOW
        self._largest = f.LARGEST
        self._most = _NEVER_LIMITED
        self._unconfirmed = 0
        self._heard_at = self._loop.time()
        self._pinged_at = 0.0
        self._owed = b""
        self._timer: asyncio.TimerHandle | None = None
        self._blocks: dict[tuple[object, ...], bytes] = {}
        self._read: dict[bytes, list[Header]] = {}
        self._closed: Exception | None = None
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Connection to {self._authority} with {len(self._calls)} calls>"

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
            self._block(path, within, metadata),
            heard,
            cast("asyncio.Future[None]", self._loop.create_future()),
        )
        if message is not None:
            call.unsent += pack(message)
            call.finishing = True
        if len(self._calls) < self._most:
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

    def _block(
        self, path: str, within: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> bytes:
        key = path, within, metadata
        block = self._blocks.get(key)
        if block is None:
            timeout = (
                () if within is None else (("grpc-timeout", f"{max(1, round(within * 1000))}m"),)
            )
            headers = (
                (":method", "POST"),
                (":scheme", self._scheme),
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "aiodlock"),
                *timeout,
                *((*secret, True) for secret in metadata),  # no proxy may remember it
            )
            if len(self._blocks) > 64:  # tokens of users end
                self._blocks.clear()
            block = self._blocks[key] = self._encoder.encode(headers)
        return block

    def _start(self, call: Exchange) -> None:
        call.id, self._next = self._next, self._next + 2
        call.window = self._first_window
        self._calls[call.id] = call
        # In one piece: most calls are one packet.
        self._write(self._head(call) + self._data(call))
        if self._next > f.LAST_STREAM:
            self._end(NotSent("the connection is worn out"))

    def _head(self, call: Exchange) -> bytes:
        """Return a call's headers as frames, which data will follow."""
        largest = self._largest
        block = self._no_table + call.block if call.id == 1 else call.block
        out, kind = b"", f.HEADERS
        while len(block) > largest:
            out += f.frame(kind, 0, call.id, block[:largest])
            block, kind = block[largest:], f.CONTINUATION
        return out + f.frame(kind, f.END_HEADERS, call.id, block)

    def _start_queued(self) -> None:
        while self._queued and len(self._calls) < self._most and not self.over.done():
            self._start(self._queued.popleft())

    def _data(self, call: Exchange) -> bytes:
        """Return what the server takes now of what a call has to send."""
        out = b""
        while not call.finished:
            room = min(self._window, call.window, self._largest)
            part = bytes(call.unsent[: max(0, room)])
            if not part and (call.unsent or not call.finishing):
                break
            del call.unsent[: len(part)]
            self._window -= len(part)
            call.window -= len(part)
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
        if self._closed is None:
            self._closed = reason
            self._write(GoAwayFrame(error_code=code).serialize())
            if self._transport is not None:
                self._transport.close()
        self._end(reason)
        self._fail_all(reason)
        if self._timer is not None:
            self._timer.cancel()

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

    def _fail_all(self, reason: Exception) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Lost(str(reason)))

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self.close(Lost("the server speaks no HTTP/2"))
            return
        settings = {SettingsFrame.ENABLE_PUSH: 0, SettingsFrame.INITIAL_WINDOW_SIZE: _STREAM_WINDOW}
        ours = SettingsFrame(settings=settings).serialize()
        self._write(f.PREFACE + ours + _window_update(0, _WINDOW - f.WINDOW))
        self._timer = self._loop.call_later(PONG_WITHIN, self._look_for_life)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.close(
            Lost(f"the connection was closed: {exc}" if exc else "the connection was closed")
        )
        self._gone.set()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for frame in self._reader.feed(data):
                if self._closed is not None:
                    return
                self._take(frame)
        except ProtocolError as wrong:
            self.close(Lost(f"the server broke a rule of HTTP/2: {wrong}"), wrong.code)
        except HPACKError as wrong:
            self.close(
                Lost(f"the server sent headers that cannot be read: {wrong}"), f.COMPRESSION_ERROR
            )

    def _look_for_life(self) -> None:
        silent = self._loop.time() - max(self._heard_at, self._pinged_at)
        if self._pinged_at > self._heard_at:
            if silent >= PONG_WITHIN:
                self.close(Lost(f"the server gave no sign of life for {PING_AFTER + silent:.0f} s"))
                return
        elif self._calls and silent >= PING_AFTER:
            self._pinged_at = self._loop.time()
            self._write(PingFrame(opaque_data=b"aiodlock").serialize())
        self._timer = self._loop.call_later(PONG_WITHIN, self._look_for_life)

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
        headers = self._headers(frame.data)  # in any case: it changes the table
        call = self._call(frame.stream_id)
        if call is not None:
            last = "END_STREAM" in frame.flags
            call.on_headers(headers, last=last)
            self._after(call, last=last)

    def _headers(self, block: bytes) -> list[Header]:
        """Return what the bytes say. A server answers each call with the same few, of its table alone."""
        if (known := self._read.get(block)) is not None:
            return known
        headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, True)]
        if not all(0x80 < byte < 0xFF for byte in block):
            self._read.clear()  # the table may have changed
        elif len(self._read) < 16:
            self._read[block] = headers
        return headers

    def _on_data(self, frame: DataFrame) -> None:
        stream, length = frame.stream_id, frame.flow_controlled_length
        self._unconfirmed += length
        if self._unconfirmed > _WINDOW:
            raise ProtocolError("more data than was allowed", f.FLOW_CONTROL_ERROR)
        if self._unconfirmed >= _WINDOW // 2:
            self._write(_window_update(0, self._unconfirmed))
            self._unconfirmed = 0
        call = self._call(stream)
        if call is None:
            return
        call.unconfirmed += length
        if call.unconfirmed > _STREAM_WINDOW:
            raise ProtocolError("more data on a stream than was allowed", f.FLOW_CONTROL_ERROR)
        last = "END_STREAM" in frame.flags
        call.on_data(frame.data, last=last)
        if call.unconfirmed >= _STREAM_WINDOW // 2 and not last and not call.ended.done():
            self._write(_window_update(stream, call.unconfirmed))
            call.unconfirmed = 0
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
            self._window += more
            if self._window > f.LARGEST_WINDOW:
                raise ProtocolError("a window is too large", f.FLOW_CONTROL_ERROR)
            self._send_more()
            return
        call = self._call(stream)
        if call is not None:
            call.window += more
            if call.window > f.LARGEST_WINDOW:
                raise ProtocolError("a stream's window is too large", f.FLOW_CONTROL_ERROR)
            self._write(self._data(call))

    def _on_settings(self, settings: dict[int, int]) -> None:
        self._most = settings.get(SettingsFrame.MAX_CONCURRENT_STREAMS, self._most)
        self._largest = settings.get(SettingsFrame.MAX_FRAME_SIZE, self._largest)
        if not f.LARGEST <= self._largest < 1 << 24:
            raise ProtocolError(f"frames of {self._largest} bytes")
        before = self._first_window
        self._first_window = settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, before)
        for call in self._calls.values():
            call.window += self._first_window - before
        windows = (self._first_window, *(call.window for call in self._calls.values()))
        if max(windows) > f.LARGEST_WINDOW:
            raise ProtocolError("a stream's window is too large", f.FLOW_CONTROL_ERROR)
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
