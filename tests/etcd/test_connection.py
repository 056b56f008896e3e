"""Calls over HTTP/2: against another implementation, and against bytes that break the rules."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import hyperframe.frame as theirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodlock.backends.etcd import connection as ours
from aiodlock.backends.etcd import framing as f
from aiodlock.backends.etcd.connection import Connection, connect
from aiodlock.backends.etcd.exchange import Exchange, Flow, Lost, NotSent, Status
from aiodlock.backends.etcd.headers import Headers
from aiodlock.backends.etcd.link import Link
from aiodlock.backends.etcd.sources import read_url

from ..scenes import PATIENCE, bounded

_HEAD = [(":status", "200"), ("content-type", "application/grpc")]
_OK = [("grpc-status", "0"), ("grpc-message", "")]


def _packed(message: bytes) -> bytes:
    return struct.pack("!BI", 0, len(message)) + message


class Server(asyncio.Protocol):
    """The other side, by the package ``h2``. What it does with a request is the test's.

    Mutable state: ``requests`` (headers and bytes by stream), ``unsent`` (bytes by stream, and what follows
    them), ``reset`` (streams that the client has ended), ``most`` (streams open at a time).
    """

    def __init__(self, on_request: Callable[[Server, int], object]) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.requests: dict[int, tuple[dict[str, str], bytearray]] = {}
        self.unsent: dict[int, tuple[bytearray, list[tuple[str, str]]]] = {}
        self.reset: list[int] = []
        self.open: set[int] = set()
        self.most = 0
        self.confirms = True
        self.closed = asyncio.Event()
        self._on_request = on_request

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived(stream_id=int() as stream):
                    headers = {n.decode(): v.decode() for n, v in event.headers or ()}
                    self.requests[stream] = headers, bytearray()
                    self.open.add(stream)
                    self.most = max(self.most, len(self.open))
                case h2.events.DataReceived(stream_id=int() as stream):
                    self.requests[stream][1].extend(event.data or b"")
                    if self.confirms:
                        size = event.flow_controlled_length or 0
                        self.h2.acknowledge_received_data(size, stream)
                case h2.events.StreamEnded(stream_id=int() as stream):
                    self._on_request(self, stream)
                case h2.events.StreamReset(stream_id=int() as stream):
                    self.reset.append(stream)
                    self.open.discard(stream)
                case h2.events.WindowUpdated():
                    self.send()
        self.flush()

    def answer(
        self,
        stream: int,
        *messages: bytes,
        head: list[tuple[str, str]] = _HEAD,
        trailers: list[tuple[str, str]] = _OK,
    ) -> None:
        """Answer, as the windows allow."""
        self.h2.send_headers(stream, head)
        data = bytearray(b"".join(map(_packed, messages)))
        self.unsent[stream] = data, trailers
        self.send()

    def send(self) -> None:
        for stream, (data, trailers) in list(self.unsent.items()):
            while data:
                room = self.h2.local_flow_control_window(stream)
                room = min(room, self.h2.max_outbound_frame_size)
                if room <= 0:
                    break
                self.h2.send_data(stream, bytes(data[:room]))
                del data[:room]
            if not data:
                del self.unsent[stream]
                self.open.discard(stream)
                self.h2.send_headers(stream, trailers, end_stream=True)
        self.flush()


def _echo(server: Server, stream: int) -> None:
    server.answer(stream, bytes(server.requests[stream][1][5:]))


Made = tuple[Connection, Server]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Any]]:
    """Give a factory of connections, each to a server of its own."""
    listeners: list[asyncio.Server] = []
    made: list[Made] = []

    async def make_one(on_request: Callable[[Server, int], object] = _echo) -> Made:
        servers: list[Server] = []

        def serve() -> Server:
            servers.append(Server(on_request))
            return servers[0]

        loop = asyncio.get_running_loop()
        listener = await loop.create_server(serve, "127.0.0.1", 0)
        listeners.append(listener)
        port = listener.sockets[0].getsockname()[1]
        connection = await connect("127.0.0.1", port, None)
        made.append((connection, servers[0]))
        return made[-1]

    yield make_one
    for connection, server in made:
        connection.close(Lost("the test is over"))
        await connection.until_closed(1.0)
        server.transport.abort()
        await server.closed.wait()
    for listener in listeners:
        listener.close()


async def _call(
    connection: Connection, message: bytes, path: str = "/service/Call", **options: Any
) -> bytes:
    heard: list[bytes] = []
    call = connection.begin(path, heard.append, message, **options)
    async with bounded(20.0):
        await call.ended
    (answer,) = heard
    return answer


async def _until(condition: Callable[[], object]) -> None:
    async with bounded(20.0):
        while not condition():
            await asyncio.sleep(0.001)


# -- calls -----------------------------------------------------------------------------------------


async def test_call_is_answered(make: Any) -> None:
    connection, server = await make()
    assert await _call(connection, b"hello", within=2.0, metadata=(("token", "t"),)) == b"hello"
    assert await _call(connection, b"") == b""
    headers, _ = server.requests[1]
    port = connection._transport.get_extra_info("peername")[1]
    assert headers == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/service/Call",
        ":authority": f"127.0.0.1:{port}",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "aiodlock",
        "grpc-timeout": "2000m",
        "token": "t",
    }
    assert not connection.calls


@pytest.mark.parametrize("size", [70_000, 3_000_000])
async def test_message_larger_than_the_windows_goes_there_and_back(make: Any, size: int) -> None:
    connection, _ = await make()
    message = random.Random(size).randbytes(size)
    assert await _call(connection, message) == message


async def test_windows_of_many_streams_and_of_all_together_are_kept(make: Any) -> None:
    connection, _ = await make()
    messages = [bytes([n]) * 200_000 for n in range(60)]
    assert await asyncio.gather(*(_call(connection, one) for one in messages)) == messages


async def test_request_waits_for_the_servers_window(make: Any) -> None:
    connection, server = await make()
    server.confirms = False
    call = asyncio.create_task(_call(connection, bytes(100_000)))
    await _until(lambda: server.requests and len(server.requests[1][1]) == f.WINDOW)
    server.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    server.h2.increment_flow_control_window(99_005)  # of the connection
    server.flush()
    await asyncio.sleep(0.02)
    assert len(server.requests[1][1]) == f.WINDOW  # that of the stream is below zero
    server.h2.increment_flow_control_window(99_005, 1)
    server.flush()
    assert await call == bytes(100_000)


async def test_no_more_calls_at_a_time_than_the_server_allows(make: Any) -> None:
    waiting: list[int] = []
    connection, server = await make(lambda _, stream: waiting.append(stream))
    server.h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    server.flush()
    await _until(lambda: connection._settings.calls == 2)
    calls = [asyncio.create_task(_call(connection, b"%d" % n)) for n in range(7)]
    await asyncio.sleep(0)
    given_up = connection.begin("/p", print, b"x")
    await _until(lambda: len(waiting) == 2)
    assert connection.calls == 8
    connection.cancel(given_up, Lost("no answer in time"))
    with pytest.raises(NotSent, match="in time"):
        await given_up.ended
    while not all(call.done() for call in calls):
        if waiting:
            _echo(server, waiting.pop(0))
        await asyncio.sleep(0.001)
    assert server.most == 2
    assert [call.result() for call in calls] == [b"%d" % n for n in range(7)]


async def test_stream_hears_and_sends_until_it_is_cancelled(make: Any) -> None:
    connection, server = await make()
    heard: list[bytes] = []
    call = connection.begin("/watch", heard.append)
    for n in range(3):
        connection.send(call, b"create %d" % n)
    await _until(lambda: server.requests and server.requests[1][1].endswith(b"create 2"))
    server.h2.send_headers(1, _HEAD)
    for part in (_packed(b"one") + _packed(b"tw")[:3], _packed(b"tw")[3:], _packed(b"three")):
        server.h2.send_data(1, part)
        server.flush()
        await asyncio.sleep(0)
    await _until(lambda: heard == [b"one", b"tw", b"three"])
    assert not call.ended.done()
    connection.cancel(call)
    await _until(lambda: server.reset == [1])
    with pytest.raises(Lost):
        connection.send(call, b"x")
    # What arrives for it later is nobody's.
    assert await _call(connection, b"y") == b"y"


async def test_long_stream_is_told_that_its_messages_were_taken(make: Any) -> None:
    connection, server = await make()
    heard: list[bytes] = []
    connection.begin("/watch", heard.append)
    await _until(lambda: server.requests)
    server.h2.send_headers(1, _HEAD)
    server.unsent[1] = bytearray(_packed(bytes(50_000)) * 400), _OK  # 20 MB
    server.send()
    await _until(lambda: len(heard) == 400)


async def test_call_that_is_cancelled_ends_at_the_server(make: Any) -> None:
    connection, server = await make(lambda *_: None)
    call = connection.begin("/p", print, b"x")
    await _until(lambda: server.requests)
    connection.cancel(call, Lost("no answer in time"))
    with pytest.raises(Lost, match="in time"):
        await call.ended
    await _until(lambda: server.reset == [1])


# -- how calls end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("only_trailers", [True, False])
async def test_status_and_its_text_are_told(make: Any, only_trailers: bool) -> None:
    status = [("grpc-status", "5"), ("grpc-message", "lease not found: %C3%A4 %25")]

    def refuse(server: Server, stream: int) -> None:
        if only_trailers:
            server.h2.send_headers(stream, [*_HEAD, *status], end_stream=True)
        else:
            server.answer(stream, b"part", trailers=status)

    connection, _ = await make(refuse)
    with pytest.raises(Status, match=r"lease not found: ä %$") as refused:
        await _call(connection, b"x")
    assert refused.value.code == 5


@pytest.mark.parametrize(
    ("head", "trailers", "code", "text"),
    [
        ([(":status", "502"), ("content-type", "text/html")], [("x", "y")], 14, "HTTP status 502"),
        ([(":status", "200"), ("content-type", "text/html")], [("x", "y")], 2, "HTTP status 200"),
        (_HEAD, [("x", "y")], 2, "no status"),
        (_HEAD, [("grpc-status", "many")], 2, "no status"),
    ],
)
async def test_answer_of_no_grpc_server_is_told(
    make: Any, head: Any, trailers: Any, code: int, text: str
) -> None:
    connection, _ = await make(lambda s, n: s.answer(n, b"x", head=head, trailers=trailers))
    with pytest.raises(Status, match=text) as refused:
        await _call(connection, b"x")
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("!BI", 1, 2) + b"xx", "compressed"),
        (struct.pack("!BI", 0, 1 << 31), "of 2147483648 bytes"),
        (struct.pack("!BI", 0, 5) + b"xx", "no end"),
    ],
)
async def test_message_that_cannot_be_read_ends_its_call_alone(
    make: Any, data: bytes, text: str
) -> None:
    def answer(server: Server, stream: int) -> None:
        if stream > 1:
            return _echo(server, stream)
        server.h2.send_headers(stream, _HEAD)
        server.unsent[stream] = bytearray(data), _OK
        return server.send()

    connection, _ = await make(answer)
    with pytest.raises(Status, match=text):
        await _call(connection, b"x")
    assert await _call(connection, b"y") == b"y"


async def test_error_of_who_listens_ends_its_call_alone(make: Any) -> None:
    connection, _ = await make()
    call = connection.begin("/p", lambda message: 1 / 0, b"x")
    with pytest.raises(ZeroDivisionError):
        await call.ended
    assert await _call(connection, b"y") == b"y"


async def test_long_and_remembered_headers_are_read(make: Any) -> None:
    texts = ["ä" * 500, "x" * 20_000, "", "x" * 3000, "y" * 3000, "x" * 3000]

    def answer(server: Server, stream: int) -> None:
        number = stream // 2
        server.h2.encoder.header_table_size = [4096, 0, 100, 4096][number % 4]
        server.h2.send_headers(stream, [(":status", "103"), ("link", "x")])
        text = [("grpc-message", texts[number]), ("x" * (number + 1), "z")]
        server.answer(stream, head=_HEAD + text, trailers=[("grpc-status", "9"), *text])

    connection, _ = await make(answer)
    for text in texts:
        with pytest.raises(Status) as refused:
            await _call(connection, b"x")
        assert str(refused.value) == text


@pytest.mark.parametrize(("code", "error"), [(7, NotSent), (2, Lost), (8, Lost), (0, Lost)])
async def test_stream_that_the_server_ends_fails_its_call(
    make: Any, code: int, error: type[Exception]
) -> None:
    connection, _ = await make(lambda server, stream: server.h2.reset_stream(stream, code))
    with pytest.raises(error):
        await _call(connection, b"x")
    assert not connection.calls
    assert not connection.over.done()


async def test_going_away_is_told_and_what_was_begun_is_answered(make: Any) -> None:
    connection, server = await make(lambda *_: None)
    calls = [connection.begin("/p", print, b"x") for _ in range(3)]
    await _until(lambda: len(server.requests) == 3)
    server.h2.close_connection(last_stream_id=3, additional_data=b"shutdown")
    # The package writes nothing after that; a server does.
    answers = theirs.HeadersFrame(3, flags=["END_HEADERS", "END_STREAM"])
    answers.data = b"\x88" + f_literal(b"content-type", b"application/grpc")
    answers.data += f_literal(b"grpc-status", b"0")
    server.flush()
    server.transport.write(answers.serialize())
    with pytest.raises(NotSent, match="shutdown"):
        await calls[2].ended
    await calls[1].ended
    assert "shutdown" in str(await connection.over)
    with pytest.raises(NotSent):
        connection.begin("/p", print, b"x")
    server.transport.close()
    with pytest.raises(Lost):
        await calls[0].ended


def f_literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def test_cut_connection_fails_its_calls(make: Any) -> None:
    connection, server = await make(lambda *_: None)
    calls = [connection.begin("/p", print, b"x") for _ in range(3)]
    await _until(lambda: len(server.requests) == 3)
    server.transport.abort()
    for call in calls:
        with pytest.raises(Lost):
            await call.ended
    assert connection.over.done()
    assert not connection.calls


async def test_stream_numbers_end_and_the_connection_with_them(make: Any) -> None:
    connection, _ = await make()
    connection._next = f.LAST_STREAM
    assert await _call(connection, b"last") == b"last"
    with pytest.raises(NotSent, match="worn out"):
        connection.begin("/p", print, b"x")


# -- signs of life -----------------------------------------------------------------------------------


async def test_ping_is_answered(make: Any) -> None:
    connection, server = await make()
    pongs: list[bytes] = []
    receive = server.h2.receive_data

    def listening(data: bytes) -> Any:
        events = receive(data)
        pongs.extend(e.ping_data for e in events if isinstance(e, h2.events.PingAckReceived))
        return events

    server.h2.receive_data = listening
    server.h2.ping(b"12345678")
    server.flush()
    await _until(lambda: pongs == [b"12345678"])
    assert not connection.over.done()


async def test_server_that_gives_no_sign_of_life_is_given_up(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "PING_AFTER", 0.02)
    monkeypatch.setattr(ours, "PONG_WITHIN", 0.1)
    silent, server = await make(lambda *_: None)
    call = silent.begin("/p", print, b"x")
    lively, _ = await make(lambda *_: None)
    other = lively.begin("/p", print, b"x")
    await _until(lambda: server.requests)
    server.transport.pause_reading()
    with pytest.raises(Lost, match="sign of life"):
        await call.ended
    assert not other.ended.done()  # its server answers the ping


# -- broken rules ------------------------------------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack("!BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream)
    return head + payload


def _bomb() -> bytes:
    """Few bytes that say much: headers that the table knows, again and again."""
    encoder = hpack.Encoder()
    known = encoder.encode([("x", "y" * 4000)])
    return known + encoder.encode([("x", "y" * 4000)]) * 1000  # one byte each


_SETTINGS = _frame(4, 0, 0)
_HEADERS = _frame(1, 4, 1, b"\x88" + f_literal(b"content-type", b"application/grpc"))
_BROKEN = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/2"),
    "no settings first": (_frame(6, 0, 0, bytes(8)), "settings"),
    "confirmation first": (_frame(4, 1, 0), "settings"),
    "large frame": (_SETTINGS + b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", "16385 bytes"),
    "settings of a stream": (_frame(4, 0, 1), "must be zero"),
    "odd settings": (_frame(4, 0, 0, bytes(5)), "Invalid SETTINGS"),
    "confirmation with settings": (_SETTINGS + _frame(4, 1, 0, bytes(6)), "SETTINGS ack"),
    "large window": (_frame(4, 0, 0, struct.pack("!HI", 4, 1 << 31)), "window"),
    "small frames": (_frame(4, 0, 0, struct.pack("!HI", 5, 100)), "frames of 100"),
    "data for none": (_SETTINGS + _frame(0, 0, 0), "must be non-zero"),
    "data before headers": (_SETTINGS + _frame(0, 0, 1, b"x"), "before headers"),
    "data of a later stream": (_SETTINGS + _frame(0, 0, 9, b"x"), "never begun"),
    "headers of the server's": (_SETTINGS + _frame(1, 4, 2, b"\x88"), "never begun"),
    "end of a later stream": (_SETTINGS + _frame(3, 0, 9, bytes(4)), "never begun"),
    "much padding": (_SETTINGS + _HEADERS + _frame(0, 8, 1, b"\x05abcd"), "Padding"),
    "no padding": (_SETTINGS + _frame(0, 8, 1), "Padding"),
    "no priority": (_SETTINGS + _frame(1, 0x24, 1, b"ab"), "Priority"),
    "short ping": (_SETTINGS + _frame(6, 0, 0, b"1234567"), "8 byte length: got 7"),
    "short end": (_SETTINGS + _frame(3, 0, 1, b"1"), "actual length 1"),
    "short goaway": (_SETTINGS + _frame(7, 0, 0, b"1"), "GOAWAY"),
    "no more window": (_SETTINGS + _frame(8, 0, 0, bytes(4)), "increment must be"),
    "too much window": (_SETTINGS + _frame(8, 0, 0, b"\x7f\xff\xff\xff"), "too large"),
    "too much of a stream": (_SETTINGS + _frame(8, 0, 1, b"\x7f\xff\xff\xff"), "too large"),
    "promise": (_SETTINGS + _frame(5, 4, 1, b"\0\0\0\2"), "push"),
    "promise of nothing": (_SETTINGS + _frame(5, 4, 1, bytes(4)), "PUSH_PROMISE"),
    "continuation of nothing": (_SETTINGS + _frame(9, 4, 1), "continued"),
    "continuation of another": (_SETTINGS + _frame(1, 0, 1) + _frame(9, 4, 3), "continued"),
    "no continuation": (_SETTINGS + _frame(1, 0, 1) + _frame(6, 0, 0, bytes(8)), "continued"),
    "endless headers": (_SETTINGS + _frame(1, 0, 1) + _frame(9, 0, 1, bytes(16000)) * 5, "no end"),
    "endless nothing": (_SETTINGS + _frame(1, 0, 1) + _frame(9, 0, 1) * 8000, "no end"),
    "header bomb": (_SETTINGS + _frame(1, 4, 1, _bomb()), "larger than"),
    "endless number": (_SETTINGS + _frame(1, 4, 1, b"\xff" + b"\x80" * 99), "cannot be read"),
    "number of nothing": (_SETTINGS + _frame(1, 4, 1, b"\xbe"), "cannot be read"),
    "large table": (_SETTINGS + _frame(1, 4, 1, b"\x3f\xe2\x1f"), "cannot be read"),
    "late size of the table": (_SETTINGS + _frame(1, 4, 1, b"\x88\x20"), "cannot be read"),
    "text without end": (_SETTINGS + _frame(1, 4, 1, b"\x00\x03ab"), "cannot be read"),
    "bad Huffman": (_SETTINGS + _frame(1, 4, 1, b"\x00\x81\x00\x00"), "cannot be read"),
    "headers between": (_SETTINGS + _HEADERS + _HEADERS, "between"),
    "headers without status": (_SETTINGS + _frame(1, 4, 1, f_literal(b"a", b"b")), "status"),
    "unreadable headers": (_SETTINGS + _frame(1, 4, 1, b"\xff\xff"), "cannot be read"),
    "too much data": (_SETTINGS + _HEADERS + _frame(0, 0, 1, bytes(16384)) * 600, "allowed"),
}


class Peer(asyncio.Protocol):
    """A server that answers the first request with these bytes, whatever they are.

    Mutable state: ``received``.
    """

    def __init__(self, answer: bytes, *, bytewise: bool = False) -> None:
        self.received = bytearray()
        self.closed = asyncio.Event()
        self._answer = answer
        self._bytewise = bytewise

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        if _frame(0, 1, 1, _packed(b"x")) in self.received:  # the request is whole
            self._say()

    def _say(self) -> None:
        size = 1 if self._bytewise else len(self._answer)
        part, self._answer = self._answer[:size], self._answer[size:]
        if part and not self.transport.is_closing():
            self.transport.write(part)
            asyncio.get_running_loop().call_soon(self._say)


@asynccontextmanager
async def _meeting(peer: Peer) -> AsyncIterator[Connection]:
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: peer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        _, connection = await loop.create_connection(lambda: Connection("peer"), "127.0.0.1", port)
        try:
            yield connection
        finally:
            connection.close(Lost("the test is over"))
            await connection.until_closed(5.0)
            peer.transport.abort()
            await peer.closed.wait()


@pytest.mark.parametrize("broken", _BROKEN)
async def test_broken_rule_ends_the_connection_and_is_told(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, text = _BROKEN[broken]
    peer = Peer(data)
    if broken == "too much data":  # who takes everything at once never gets that much
        monkeypatch.setattr(Flow, "confirmed", lambda _: 0)
        monkeypatch.setattr(Exchange, "on_data", lambda *_, **__: None)
    async with _meeting(peer) as connection:
        call = connection.begin("/p", lambda _: None, b"x")
        with pytest.raises(Lost, match=text):
            async with bounded(20.0):
                await call.ended
        assert text in str(connection.over.result())
        if connection.ready.exception() is not None:
            with pytest.raises(Lost, match=text):
                await connection.ready
        await _until(lambda: b"\x00\x00\x08\x07" in peer.received)  # GOAWAY


async def test_what_is_not_known_is_ignored() -> None:
    extra = (
        _frame(77, 255, 1, b"abc")
        + _frame(2, 0, 1, bytes(5))
        + _frame(4, 0, 0, struct.pack("!HI", 99, 5))
    )

    padded = b"\x02" + bytes(5) + _HEADERS[9:] + b"pp"
    answer = _SETTINGS + extra + _frame(1, 0x2C, 1, padded)
    answer += _frame(0, 8, 1, b"\x03" + _packed(b"yes") + b"ppp")
    answer += _frame(1, 5, 1, f_literal(b"grpc-status", b"0"))
    async with _meeting(Peer(answer, bytewise=True)) as connection:
        assert await _call(connection, b"x", path="/p") == b"yes"


async def test_server_that_says_nothing_is_no_connection() -> None:
    peer = Peer(b"")
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: peer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connect("127.0.0.1", port, None)
        await asyncio.wait_for(peer.closed.wait(), PATIENCE)


# -- frames ------------------------------------------------------------------------------------------


async def test_headers_longer_than_a_frame_are_continued(make: Any) -> None:
    connection, server = await make()
    token = "".join(random.Random(1).choices("abcdefghijklmnop", k=60_000))
    server.h2.decoder.max_header_list_size = 1 << 20
    assert await _call(connection, b"x", metadata=(("token", token),)) == b"x"
    assert server.requests[1][0]["token"] == token


async def test_token_is_kept_by_no_proxy() -> None:
    block = Headers("http", "there").pack("/p", None, (("token", "secret"),))
    headers = {header[0]: header for header in hpack.Decoder().decode(block, raw=True)}
    assert isinstance(headers[b"token"], hpack.NeverIndexedHeaderTuple)
    assert not isinstance(headers[b"te"], hpack.NeverIndexedHeaderTuple)


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from([b":status", b"grpc-status", b"x", b""]),
                    st.binary(max_size=200),
                ),
                max_size=8,
            ),
            st.booleans(),
            st.sampled_from([None, 0, 60, 500, 4096]),
        ),
        max_size=8,
    )
)
def test_headers_that_were_read_before_mean_what_they_say_now(
    messages: list[tuple[list[tuple[bytes, bytes]], bool, int | None]],
) -> None:
    known, encoder = Headers("http", "there"), hpack.Encoder()
    for headers, huffman, size in messages:
        if size is not None:
            encoder.header_table_size = size
        for _ in range(3):  # from the second time on the table knows them
            assert known.read(encoder.encode(headers, huffman=huffman)) == headers


@pytest.mark.parametrize("seed", range(20))
def test_frames_of_another_implementation_are_read_in_any_pieces(seed: int) -> None:
    chance = random.Random(seed)
    out, expected = b"", []
    for _ in range(20):
        stream, body = chance.randrange(1, 99), chance.randbytes(chance.randrange(1, 50))
        padding = chance.choice([0, 0, 3])
        flags = ["END_STREAM"] + (["PADDED"] if padding else [])
        kind = chance.choice([0, 1, 9])
        if kind == 0:
            out += theirs.DataFrame(stream, body, pad_length=padding, flags=flags).serialize()
        elif kind == 1:
            frame = theirs.HeadersFrame(stream, body, pad_length=padding, flags=flags)
            frame.flags.add("END_HEADERS")
            out += frame.serialize()
        else:
            kind, cut = 1, chance.randrange(1, 51)
            frame = theirs.HeadersFrame(stream, body[:cut], pad_length=padding, flags=flags)
            out += frame.serialize()
            out += theirs.ContinuationFrame(stream, b"").serialize()
            out += theirs.ContinuationFrame(stream, body[cut:], flags=["END_HEADERS"]).serialize()
        expected.append((kind, stream, body))
    reader = f.Reader()
    found: list[tuple[int | None, int, bytes]] = []
    while out:
        size = chance.choice([1, 2, 9, 30, 1000])
        for one in reader.feed(out[:size]):
            assert isinstance(one, theirs.DataFrame | theirs.HeadersFrame)
            found.append((one.type, one.stream_id, one.data))
        out = out[size:]
    assert found == expected


async def test_endpoint_that_fails_while_the_client_is_left_begins_no_other() -> None:
    link = Link(*read_url("etcd://127.0.0.1:1"))
    running = asyncio.create_task(link.run())
    await link.opened()
    assert link._tasks is not None

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            link.failed(link.generation, Lost("cut"))

    link._tasks.create_task(fail_when_cancelled())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
