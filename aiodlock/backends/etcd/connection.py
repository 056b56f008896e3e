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

from . import frames as f
from .exchange import Exchange, Lost, NotSent, pack
from .frames import Frame, ProtocolError
from .hpack import NO_TABLE, Decoder, MalformedHeaders, encode

#: The server may send so many bytes ahead: on one stream, and on all together.
_STREAM_WINDOW, _WINDOW = 1 << 20, 1 << 23
#: After so long without a byte the server is asked for a sign of life; grpc-go takes more than one in
#: five seconds for an attack. The connection is lost so long after that (seconds).
PING_AFTER, PONG_WITHIN = 10.0, 5.0
_NEVER_LIMITED = 1 << 31
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
    told to send again); ``_said`` (whether headers were sent); ``_heard_at``, ``_pinged_at``, ``_timer``
    (signs of life); ``_owed`` (answers to pings, which go out with the next bytes); ``_blocks`` (headers as
    bytes, by what they say); ``_closed`` (why it is closed), ``_gone`` (set when the transport is closed,
    too).
    """

    def __init__(self, authority: str, scheme: str = "http") -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[Exception] = self._loop.create_future()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._authority = authority.encode()
        self._scheme = scheme.encode()
        self._transport: asyncio.Transport | None = None
        self._reader = f.Reader()
        self._decoder = Decoder()
        self._calls: dict[int, Exchange] = {}
        self._queued: deque[Exchange] = deque()
        self._next = 1
        self._window = self._first_window = f.WINDOW
        self._largest = f.LARGEST
        self._most = _NEVER_LIMITED
        self._unconfirmed = 0
        self._said = False
        self._heard_at = self._loop.time()
        self._pinged_at = 0.0
        self._owed = b""
        self._timer: asyncio.TimerHandle | None = None
        self._blocks: dict[tuple[object, ...], bytes] = {}
        self._closed: Exception | None = None
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Connection to {self._authority.decode()} with {len(self._calls)} calls>"

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
                self._write(f.rst_stream(call.id, f.CANCEL))
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
            headers = [
                (b":method", b"POST"),
                (b":scheme", self._scheme),
                (b":path", path.encode()),
                (b":authority", self._authority),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
                (b"user-agent", b"aiodlock"),
            ]
            if within is not None:
                headers.append((b"grpc-timeout", b"%dm" % max(1, round(within * 1000))))
            headers += [(name.encode(), value.encode()) for name, value in metadata]
            secret = frozenset(name.encode() for name, _ in metadata)
            if len(self._blocks) > 64:  # tokens of users end
                self._blocks.clear()
            block = self._blocks[key] = encode(headers, secret)
        return block

    def _start(self, call: Exchange) -> None:
        call.id, self._next = self._next, self._next + 2
        call.window = self._first_window
        block = call.block
        if not self._said:
            self._said, block = True, NO_TABLE + block
        self._calls[call.id] = call
        # In one piece: most calls are one packet.
        self._write(f.headers(call.id, block, self._largest) + self._data(call))
        if self._next > f.LAST_STREAM:
            self._end(NotSent("the connection is worn out"))

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
            self._write(f.goaway(code))
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
        ours = f.settings((f.ENABLE_PUSH, 0), (f.INITIAL_WINDOW, _STREAM_WINDOW))
        self._write(f.PREFACE + ours + f.window_update(0, _WINDOW - f.WINDOW))
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
        except MalformedHeaders as wrong:
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
            self._write(f.frame(f.PING, 0, 0, b"aiodlock"))
        self._timer = self._loop.call_later(PONG_WITHIN, self._look_for_life)

    # -- frames ----------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        kind, flags, stream, payload, length = frame
        if not self.ready.done() and (kind != f.SETTINGS or flags & f.ACK):
            raise ProtocolError("it does not begin with its settings")
        if kind == f.DATA:
            self._on_data(flags, stream, payload, length)
        elif kind == f.HEADERS:
            headers = self._decoder.decode(payload)  # in any case: it changes the table
            call = self._call(stream)
            if call is not None:
                last = bool(flags & f.END_STREAM)
                call.on_headers(headers, last=last)
                self._after(call, last=last)
        elif kind == f.RST_STREAM:
            call = self._call(stream)
            if call is not None:
                call.on_reset(f.read_number(payload))
                del self._calls[stream]
                self._start_queued()
        elif kind == f.WINDOW_UPDATE:
            self._on_window(stream, f.read_number(payload) & f.LARGEST_WINDOW)
        elif kind == f.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == f.PING:
            if not flags & f.ACK:
                self._owe(f.frame(f.PING, f.ACK, 0, payload))
        elif kind == f.GOAWAY:
            self._on_goaway(*f.read_goaway(payload))
        elif kind == f.PUSH_PROMISE:
            raise ProtocolError("a promise to push, which was forbidden")
        # Of PRIORITY nothing follows here, and what is not known has to be ignored.

    def _call(self, stream: int) -> Exchange | None:
        """Return the call on a stream; None if it is over."""
        call = self._calls.get(stream)
        if call is None and (stream >= self._next or not stream % 2):
            raise ProtocolError(f"stream {stream} was never begun")
        return call

    def _on_data(self, flags: int, stream: int, payload: bytes, length: int) -> None:
        self._unconfirmed += length
        if self._unconfirmed > _WINDOW:
            raise ProtocolError("more data than was allowed", f.FLOW_CONTROL_ERROR)
        if self._unconfirmed >= _WINDOW // 2:
            self._write(f.window_update(0, self._unconfirmed))
            self._unconfirmed = 0
        call = self._call(stream)
        if call is None:
            return
        call.unconfirmed += length
        if call.unconfirmed > _STREAM_WINDOW:
            raise ProtocolError("more data on a stream than was allowed", f.FLOW_CONTROL_ERROR)
        last = bool(flags & f.END_STREAM)
        call.on_data(payload, last=last)
        if call.unconfirmed >= _STREAM_WINDOW // 2 and not last and not call.ended.done():
            self._write(f.window_update(stream, call.unconfirmed))
            call.unconfirmed = 0
        self._after(call, last=last)

    def _after(self, call: Exchange, *, last: bool) -> None:
        """The server's side of a call may have ended."""
        if not call.ended.done() or self._calls.pop(call.id, None) is None:
            return
        if not (last and call.finished):
            # It answered without waiting for the rest, or what it sends means nothing any more.
            self._write(f.rst_stream(call.id, f.CANCEL))
        self._start_queued()

    def _on_window(self, stream: int, more: int) -> None:
        if not more:
            raise ProtocolError("a window grows by nothing")
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

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & f.ACK:
            if payload:
                raise ProtocolError("a confirmation with settings", f.FRAME_SIZE_ERROR)
            return
        for what, value in f.read_settings(payload):
            if what == f.CONCURRENT:
                self._most = value
            elif what == f.FRAME_SIZE:
                self._largest = value
            elif what == f.INITIAL_WINDOW:
                more, self._first_window = value - self._first_window, value
                for call in self._calls.values():
                    call.window += more
                    if call.window > f.LARGEST_WINDOW:
                        raise ProtocolError("a stream's window is too large", f.FLOW_CONTROL_ERROR)
        self._write(f.frame(f.SETTINGS, f.ACK, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self._start_queued()
        self._send_more()

    def _on_goaway(self, last: int, code: int, text: str) -> None:
        """The server ends the connection; calls after the last one it looked at were not carried out."""
        reason = Lost(f"the server ends the connection (error {code}){f': {text}' if text else ''}")
        self._end(reason)
        for stream, call in list(self._calls.items()):
            if stream > last:
                del self._calls[stream]
                call.end(NotSent(str(reason)))


async def connect(
    host: str, port: int, tls: ssl.SSLContext | None, *, address: str | None = None
) -> Connection:
    """Return a connection whose server has answered.

    :param address: the one to dial, of those of the host's name.
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
    try:
        await connection.ready
    except BaseException:
        connection.close(Lost("the connection was given up"))
        connection.abort()
        raise
    return connection
