"""Each message to ZooKeeper, byte for byte beside kazoo's, and each answer read as kazoo reads it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kazoo.protocol import serialization as kazoo
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL, Id

from aiodlock.backends.base import Unanswered
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.connection import Connection
from aiodlock.backends.zookeeper.sasl import DigestMd5, SaslError

_KAZOO_ACL = (ACL(31, Id("world", "anyone")),)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_LONGS = st.integers(-(2**63), 2**63 - 1)
_INTS = st.integers(-(2**31), 2**31 - 1)
_STATS = st.tuples(
    _LONGS, _LONGS, _LONGS, _LONGS, _INTS, _INTS, _INTS, _LONGS, _INTS, _INTS, _LONGS
)

#: One call of ours and the same one of kazoo's, for a path and data.
_CALLS: dict[str, Callable[[str, bytes], tuple[jute.Call[Any], Any]]] = {
    "create": lambda path, data: (
        jute.create(path, data, jute.EPHEMERAL | jute.SEQUENTIAL),
        kazoo.Create(path, data, _KAZOO_ACL, 3),
    ),
    "create with rights": lambda path, data: (
        jute.create(path, data, jute.PERSISTENT, (jute.CREATOR, jute.ANYONE)),
        kazoo.Create(path, data, (ACL(31, Id("auth", "")), *_KAZOO_ACL), 0),
    ),
    "create2": lambda path, data: (
        jute.create2(path, data, jute.EPHEMERAL),
        kazoo.Create2(path, data, _KAZOO_ACL, 1),
    ),
    "delete": lambda path, data: (jute.delete(path), kazoo.Delete(path, -1)),
    "exists": lambda path, data: (jute.exists(path), kazoo.Exists(path, None)),
    "exists, watched": lambda path, data: (
        jute.exists(path, watch=True),
        kazoo.Exists(path, print),
    ),
    "getData": lambda path, data: (jute.get_data(path), kazoo.GetData(path, None)),
    "getData, watched": lambda path, data: (
        jute.get_data(path, watch=True),
        kazoo.GetData(path, print),
    ),
    "setData": lambda path, data: (jute.set_data(path, data), kazoo.SetData(path, data, -1)),
    "getChildren2": lambda path, data: (
        jute.get_children(path),
        kazoo.GetChildren2(path, None),
    ),
    "getChildren2, watched": lambda path, data: (
        jute.get_children(path, watch=True),
        kazoo.GetChildren2(path, print),
    ),
    "sync": lambda path, data: (jute.sync(path), kazoo.Sync(path)),
    "auth": lambda path, data: (
        jute.auth("digest", data or b"a"),
        kazoo.Auth(0, "digest", (data or b"a").decode()),
    ),
    "sasl": lambda path, data: (jute.sasl(data), kazoo.SASL(data)),
    "multi": lambda path, data: (
        jute.multi(
            (
                jute.check(path, 3),
                jute.create(path, data, jute.EPHEMERAL),
                jute.set_data(path, data, 7),
                jute.delete(path, 9),
            )
        ),
        kazoo.Transaction(
            (
                kazoo.CheckVersion(path, 3),
                kazoo.Create(path, data, _KAZOO_ACL, 1),
                kazoo.SetData(path, data, 7),
                kazoo.Delete(path, 9),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", _CALLS)
@settings(max_examples=20)
@given(path=_TEXTS, data=_TEXTS.map(str.encode))
def test_request_is_encoded_as_kazoo_encodes_it(name: str, path: str, data: bytes) -> None:
    ours, theirs = _CALLS[name](path, data)
    body = bytes(theirs.serialize())
    assert ours.opcode == theirs.type
    assert ours.body == body
    # As ConnectionHandler._submit frames it.
    framed = struct.pack(">iii", 8 + len(body), 77, theirs.type) + body
    assert jute.frame(77, ours) == framed


@given(path=_TEXTS, data=_TEXTS.map(str.encode))
def test_container_is_created_as_kazoo_creates_other_nodes(path: str, data: bytes) -> None:
    """kazoo has no call for it. The message is that of create2 with another opcode and flag."""
    ours = jute.create2(path, data, jute.CONTAINER)
    assert ours.opcode == 19
    assert ours.body == bytes(kazoo.Create2(path, data, _KAZOO_ACL, 4).serialize())


@given(seen=_LONGS, data=st.lists(_TEXTS), existing=st.lists(_TEXTS), children=st.lists(_TEXTS))
def test_watches_are_set_again_as_zookeepers_own_description_has_it(
    seen: int, data: list[str], existing: list[str], children: list[str]
) -> None:
    """kazoo has no call for it. ``zookeeper.jute``: a long, and three vectors of ustrings."""
    ours = jute.set_watches(seen, data, existing, children)
    body = struct.pack(">q", seen)
    for paths in (data, existing, children):
        body += struct.pack(">i", len(paths)) + b"".join(map(kazoo.write_string, paths))
    assert (ours.opcode, ours.body) == (101, body)


def test_ping_and_close_are_kazoos() -> None:
    assert (kazoo.PingInstance.type, kazoo.CloseInstance.type) == (jute.PING, jute.CLOSE)
    assert jute.PING_CALL.body == jute.CLOSE_CALL.body == b""


@given(seen=_LONGS, timeout=_INTS, session=_LONGS, password=st.binary(min_size=1, max_size=16))
def test_first_message_is_kazoos(seen: int, timeout: int, session: int, password: bytes) -> None:
    body = bytes(kazoo.Connect(0, seen, timeout, session, password, False).serialize())
    assert jute.hello(seen, timeout, session, password) == struct.pack(">i", len(body)) + body


@given(timeout=_INTS, session=_LONGS, password=st.binary(min_size=1, max_size=16))
def test_its_answer_is_read_as_kazoo_reads_it(timeout: int, session: int, password: bytes) -> None:
    data = struct.pack(">iiqi", 0, timeout, session, len(password)) + password + b"\x00"
    theirs, _ = kazoo.Connect.deserialize(data, 0)
    ours = jute.read_welcome(jute.Reader(data))
    assert (ours.timeout, ours.session, ours.password) == (
        max(theirs.time_out, 0),
        theirs.session_id,
        theirs.passwd,
    )


@given(_STATS)
def test_stat_has_kazoos_fields_in_order(values: tuple[int, ...]) -> None:
    data = struct.pack(">qqqqiiiqiiq", *values)
    assert tuple(jute.Reader(data).stat()) == tuple(ZnodeStat._make(values))
    assert tuple(kazoo.Exists.deserialize(data, 0)) == tuple(jute.Reader(data).stat())


@given(_TEXTS, _STATS)
def test_answers_are_read_as_kazoo_reads_them(text: str, values: tuple[int, ...]) -> None:
    encoded = text.encode()
    one = struct.pack(">i", len(encoded)) + encoded
    stat = struct.pack(">qqqqiiiqiiq", *values)
    assert jute.create("/", b"", 0).read(jute.Reader(one)) == kazoo.Create.deserialize(one, 0)
    if text:  # kazoo has None for an empty buffer
        data, told = kazoo.GetData.deserialize(one + stat, 0)
        assert jute.get_data("/").read(jute.Reader(one + stat)) == (data, tuple(told))
    listed = struct.pack(">i", 2) + one + one + stat
    children, told = kazoo.GetChildren2.deserialize(listed, 0)
    assert jute.get_children("/").read(jute.Reader(listed)) == (children, tuple(told))


def _results(*results: tuple[int, bytes]) -> bytes:
    parts = [struct.pack(">i?i", opcode, False, 0) + body for opcode, body in results]
    return b"".join(parts) + struct.pack(">i?i", -1, True, -1)


def test_results_of_a_transaction_are_read_as_kazoo_reads_them() -> None:
    path = struct.pack(">i", 2) + b"/a"
    stat = struct.pack(">qqqqiiiqiiq", *range(11))
    data = _results(
        (jute.CHECK, b""), (jute.CREATE, path), (jute.SET_DATA, stat), (jute.DELETE, b"")
    )
    theirs = kazoo.Transaction.deserialize(data, 0)
    ours = jute.multi(()).read(jute.Reader(data))
    assert ours[1] == theirs[1] == "/a"
    assert ours[2] == theirs[2] == tuple(range(11))
    assert len(ours) == len(theirs) == 4


@pytest.mark.parametrize("codes", [(0, -110), (-101, -2), (0, 0, -111, -2)])
def test_transaction_that_was_not_done_tells_what_could_not_be(codes: tuple[int, ...]) -> None:
    data = _results(*((-1, struct.pack(">i", code)) for code in codes))
    theirs = kazoo.Transaction.deserialize(data, 0)
    with pytest.raises(jute.Aborted) as aborted:
        jute.multi(()).read(jute.Reader(data))
    index = next(index for index, code in enumerate(codes) if code)
    assert (aborted.value.index, aborted.value.code) == (index, codes[index])
    assert theirs[index].code == codes[index]


@given(xid=_INTS, zxid=_LONGS, code=_INTS)
def test_head_of_an_answer_is_read_as_kazoo_reads_it(xid: int, zxid: int, code: int) -> None:
    data = struct.pack(">iqi", xid, zxid, code)
    theirs, _ = kazoo.ReplyHeader.deserialize(data, 0)
    assert jute.read_reply(jute.Reader(data))[:3] == (theirs.xid, theirs.zxid, theirs.err)


@given(kind=st.integers(1, 4), state=_INTS, path=_TEXTS)
def test_event_is_read_as_kazoo_reads_it(kind: int, state: int, path: str) -> None:
    encoded = path.encode()
    data = struct.pack(">iii", kind, state, len(encoded)) + encoded
    theirs, _ = kazoo.Watch.deserialize(data, 0)
    assert tuple(jute.read_event(jute.Reader(data))) == tuple(theirs)


@given(st.lists(st.binary(max_size=20)), st.integers(0, 200))
def test_frames_are_cut_wherever_packets_end(frames: list[bytes], cut: int) -> None:
    sent = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
    unread, found = bytearray(), []
    for packet in (sent[:cut], sent[cut:]):
        unread += packet
        found += jute.split(unread)
    assert found == frames
    assert not unread


def test_frame_of_a_negative_length_is_refused() -> None:
    with pytest.raises(jute.Unreadable):
        jute.split(bytearray(b"\xff\xff\xff\xff"))


def test_buffer_longer_than_its_message_is_refused() -> None:
    with pytest.raises(struct.error):
        jute.Reader(b"\x00\x00\x00\x09abc").buffer()


def test_sasl_answers_a_challenge_as_the_standard_says() -> None:
    # Computed by hand from RFC 2831, section 2.1.2.1.
    import hashlib

    def md5(data: bytes) -> bytes:
        return hashlib.md5(data).digest()

    challenge = b'realm="zk-sasl-md5",nonce="abc",charset=utf-8,algorithm=md5-sess'
    exchange = DigestMd5("alice", 'se"cret')
    said = exchange.respond(challenge, nonce="xyz").decode()
    first = md5(md5(b'alice:zk-sasl-md5:se"cret') + b":abc:xyz").hex()

    def proof(method: str) -> str:
        second = md5(f"{method}:zookeeper/zk-sasl-md5".encode()).hex()
        return md5(f"{first}:abc:00000001:xyz:auth:{second}".encode()).hex()

    assert f"response={proof('AUTHENTICATE')}" in said
    exchange.check(f"rspauth={proof('')}".encode())
    with pytest.raises(SaslError):
        exchange.check(b"rspauth=0123")


def test_sasl_refuses_what_is_no_challenge() -> None:
    with pytest.raises(SaslError):
        DigestMd5("a", "b").respond(b"")


async def test_answer_that_cannot_be_read_leaves_nobody_waiting() -> None:
    connection = Connection("here", lambda event: None, lambda sent: None)
    connection._welcome.set_result(jute.Welcome(4000, 1, bytes(16)))
    answers = [connection.submit(jute.exists("/one")), connection.submit(jute.exists("/two"))]
    connection.data_received(struct.pack(">iiqi", 16 + 2, 1, 7, 0) + b"??")
    connection.connection_lost(None)
    for answer in answers:
        with pytest.raises(Unanswered):
            await asyncio.wait_for(answer, 5.0)
