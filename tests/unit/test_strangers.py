"""What others have written, or sent, is read in one place per store: it is a value, or one kind of
error."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd import recipe
from aiodlock.backends.etcd.connection import Connection as EtcdConnection
from aiodlock.backends.etcd.framing import ProtocolError, Reader
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.about import About, read_about, write_about
from aiodlock.backends.zookeeper.connection import Connection as ZooKeeperConnection
from aiodlock.backends.zookeeper.queue import holders, read_queue, standing

DEEP = b"[" * 100_000
LONG = b"9" * 5000
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
_STRANGE = st.sampled_from(
    [b"", DEEP, LONG, b'"\\ud800"', b"\xff\xfe[1]", b"1e999", b"NaN", b"[1,2,1e999,3,4]", b"{}"]
)
_VALUES = st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode()) | _STRANGE
#: What records have for fields, with any values.
_RECORDS = st.dictionaries(
    st.sampled_from(
        ["mode", "owner", "client", "limit", "order", "note", "lingers", "result", "base64"]
    ),
    _JSON,
).map(lambda fields: json.dumps(fields).encode())


# -- ZooKeeper -----------------------------------------------------------------------------------


@given(_VALUES | st.lists(_JSON, min_size=5, max_size=6).map(lambda one: json.dumps(one).encode()))
@example(b'["t\\ud800", "\\udfff", 1, "", ""]')
@example(b'["u", "c", ' + LONG + b', "", ""]')
@example(b'["u", "c", -5, "", ""]')
def test_data_of_a_node_is_read_whatever_it_is(data: bytes) -> None:
    about = read_about(data)
    for text in (about.owner, about.client, about.note, about.description):
        text.encode()
    assert 0 <= about.token < 2**63


def test_data_of_a_node_is_read_as_it_was_written() -> None:
    about = About("ume", "host-1-a", 17, "note", "what", lingers=True)
    assert read_about(write_about(about)) == about


_PARTS = st.sampled_from(
    ["x", "s", "3", "9" * 5000, "", "-", "0000000001", "-2147483648", "٣", "²", "9" * 19, ":"]
)


@given(st.lists(st.lists(_PARTS, max_size=5).map(":".join) | st.text(max_size=20), max_size=6))
def test_queue_is_read_whatever_stands_in_it(nodes: list[str]) -> None:
    entries = read_queue(nodes)
    holders(entries)
    for entry in entries:
        standing(entries, entry)


_READERS = [
    jute.read_welcome,
    jute.read_reply,
    jute.read_event,
    jute.create("/a", b"", 0).read,
    jute.create2("/a", b"", 0).read,
    jute.exists("/a").read,
    jute.get_data("/a").read,
    jute.get_children("/a").read,
    jute.multi(()).read,
]


@settings(max_examples=300)
@given(st.sampled_from(_READERS), st.binary(max_size=120))
@example(_READERS[-1], b"\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00\x00" + b"\xff" * 13)
def test_message_of_a_server_is_read_or_refused(read: object, data: bytes) -> None:
    with contextlib.suppress(jute.Unreadable, jute.Aborted):
        jute.decoded(read, jute.Reader(data))  # type: ignore[arg-type]


class Wire(asyncio.Transport):
    """Nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    close = abort


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), max_size=4), st.binary(max_size=60))
@example([], b"HTTP/1.1 400 Bad Request\r\n\r\n")
def test_connection_to_zookeeper_raises_nothing_whatever_it_hears(
    frames: list[bytes], rest: bytes
) -> None:
    async def hear() -> None:
        connection = ZooKeeperConnection("there", lambda event: None, lambda sent: None)
        connection.connection_made(Wire())
        asked = connection.submit(jute.get_data("/a"))
        for frame in frames:
            connection.data_received(len(frame).to_bytes(4, "big") + frame)
        connection.data_received(rest)
        connection.connection_lost(None)
        assert asked.done()

    asyncio.run(hear())


# -- etcd ----------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(_VALUES | _RECORDS)
@example(b'{"mode": "exclusive", "owner": "tzz", "client": "\\ud800", "lingers": true}')
@example(b'{"mode": "exclusive", "owner": "tzz", "client": "\xed\xa0\x80"}')
@example(b'{"mode": "exclusive", "owner": "tzz", "client": "c", "limit": ' + LONG + b"}")
@example(b'{"mode": "exclusive", "owner": "tzz", "client": "c", "order": 1e999}')
@example(b'{"result": "\\ud800", "request": "r"}')
@example(b'{"base64": "\\u20ac", "request": "r"}')
def test_value_of_a_key_is_read_or_refused(value: bytes) -> None:
    kv = m.KeyValue(key=b"k", value=value, create_revision=7)
    with contextlib.suppress(ValueError):
        record = recipe.read_record("id", kv)
        recipe.mailbox("prefix", record.client)
        (record.owner + record.note + record.description).encode()
        assert 0 <= record.order < 1 << 63
    with contextlib.suppress(ValueError):
        recipe.read_success(kv)


@given(st.lists(st.tuples(st.binary(max_size=30), _VALUES | _RECORDS), max_size=5))
def test_queue_of_etcd_is_read_whatever_stands_in_it(keys: list[tuple[bytes, bytes]]) -> None:
    own = recipe.Keys.of("p", "lock", "n")
    kvs = [
        m.KeyValue(key=own.base + key, value=value, create_revision=number)
        for number, (key, value) in enumerate(keys)
    ]
    queue = recipe.Queue(own, 9, kvs)
    list(queue.holders())
    queue.waiters()


_ANSWERS = [
    one for one in vars(m).values() if isinstance(one, type) and one.__module__ == m.__name__
]
_ANSWERS = [one for one in _ANSWERS if issubclass(one, m.Message) and one is not m.Message]


@settings(max_examples=300)
@given(st.sampled_from(_ANSWERS), st.binary(max_size=80))
def test_message_of_etcd_is_read_or_refused(kind: type[m.Message], data: bytes) -> None:
    with contextlib.suppress(m.Malformed):
        kind.decode(data)


def test_messages_in_each_other_without_end_are_refused() -> None:
    data = b""
    for _ in range(5000):
        data = m.TxnResponse(responses=[]).encode() + _sized(3, _sized(4, data))
    with pytest.raises(m.Malformed, match="without end"):
        m.TxnResponse.decode(data)


def _sized(number: int, data: bytes) -> bytes:
    out, size = bytearray([number << 3 | 2]), len(data)
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes([size]) + data


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=4), st.booleans())
@example([b"\xff\xff\xff\xff\xff\xff\xff\xff"], True)
@example([b"\x00\x81\xff\x01y"], True)
def test_headers_are_read_or_refused(blocks: list[bytes], whole: bool) -> None:
    async def hear() -> None:
        connection = EtcdConnection("there")
        connection.connection_made(Wire())
        connection.data_received(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        call = connection.begin("/a/b", lambda message: None, b"message")
        for block in blocks:
            head = len(block).to_bytes(3, "big") + (b"\1\4" if whole else b"\1\0")
            connection.data_received(head + bytes([0, 0, 0, 1]) + block)
        connection.connection_lost(None)
        assert call.ended.done()

    asyncio.run(hear())


_FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 1 << 31]),
    st.binary(max_size=60),
)


@settings(max_examples=300)
@given(st.binary(max_size=80) | st.lists(_FRAMES, max_size=6).map(b"".join))
def test_frames_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(Reader().feed(data))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.lists(_FRAMES, max_size=6).map(b"".join), st.booleans())
def test_connection_to_etcd_raises_nothing_whatever_it_hears(data: bytes, begun: bool) -> None:
    async def hear() -> None:
        connection = EtcdConnection("there")
        connection.connection_made(Wire())
        if begun:
            connection.data_received(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        call = connection.begin("/a/b", lambda message: None, b"message")
        connection.data_received(data)
        connection.connection_lost(None)
        assert call.ended.done()

    asyncio.run(hear())
