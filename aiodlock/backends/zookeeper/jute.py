"""What is said to a ZooKeeper server, and what it answers, in its own encoding (jute).

A ``Call`` is one request: its opcode, its encoded body, and how its answer is read. All integers are
big-endian. A buffer or a text is its length as an int, then its bytes; the length -1 stands for none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_TWO_INTS = struct.Struct(">ii")
_REPLY = struct.Struct(">iqi")
_STAT = struct.Struct(">qqqqiiiqiiq")
_OPERATION = struct.Struct(">i?i")
_END_OF_OPERATIONS = _OPERATION.pack(-1, True, -1)

# Opcodes.
CREATE, DELETE, EXISTS, GET_DATA, SET_DATA = 1, 2, 3, 4, 5
SYNC, PING, GET_CHILDREN2, CHECK, MULTI = 9, 11, 12, 13, 14
CREATE2, CREATE_CONTAINER, AUTH, SET_WATCHES, SASL, CLOSE = 15, 19, 100, 101, 102, -11
GET_EPHEMERALS = 103
_FAILED = -1

# Numbers of messages that are no ordinary requests.
EVENT_XID, PING_XID, AUTH_XID, SET_WATCHES_XID = -1, -2, -4, -8

# Errors.
CONNECTION_LOSS, MARSHALLING, UNIMPLEMENTED, OPERATION_TIMEOUT = -4, -5, -6, -7
NO_NODE, NO_AUTH, NODE_EXISTS, NOT_EMPTY = -101, -102, -110, -111
SESSION_EXPIRED, INVALID_ACL, AUTH_FAILED, SESSION_MOVED = -112, -114, -115, -118
LOCAL_SESSION = -120
#: What servers refuse for a moment, and what they refuse because of who asks.
FOR_NOW = frozenset((OPERATION_TIMEOUT, -13, -14, -66, -119, -122, -127))
OF_USERS = frozenset((NO_AUTH, INVALID_ACL, AUTH_FAILED, -124))
_ERRORS = {
    -1: "system error",
    -2: "another operation of the transaction failed",
    -3: "data inconsistency",
    CONNECTION_LOSS: "connection loss",
    MARSHALLING: "the message could not be read",
    UNIMPLEMENTED: "not implemented",
    OPERATION_TIMEOUT: "operation timeout",
    -8: "bad arguments",
    -12: "no such session",
    -13: "new configuration has no quorum",
    -14: "another reconfiguration is under way",
    -100: "error of the servers' interface",
    -66: "throttled",
    NO_NODE: "no such node",
    NO_AUTH: "not permitted by the node's ACL",
    -103: "bad version",
    -108: "an ephemeral node has no children",
    NODE_EXISTS: "the node exists",
    NOT_EMPTY: "the node has children",
    SESSION_EXPIRED: "the session has expired",
    -113: "invalid callback",
    INVALID_ACL: "invalid ACL",
    AUTH_FAILED: "authentication failed",
    SESSION_MOVED: "the session has moved to another server",
    -119: "the server is read-only",
    LOCAL_SESSION: "a local session has no ephemeral nodes: the servers have localSessionsEnabled=true, "
    "and need localSessionsUpgradingEnabled=true besides",
    -121: "no such watch",
    -122: "the request took too long",
    -123: "reconfiguration is disabled",
    -124: "the servers take clients with SASL alone",
    -125: "quota exceeded",
    -127: "throttled",
}

# How a node is created.
PERSISTENT, EPHEMERAL, SEQUENTIAL, CONTAINER = 0, 1, 2, 4

# What happened to a watched node.
CREATED, DELETED, CHANGED, CHILDREN_CHANGED = 1, 2, 3, 4


class ZooKeeperError(Exception):
    """A server's answer that is no success."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{_ERRORS.get(code, 'error')} ({code})")
        self.code = code


class Unreadable(Exception):
    """The bytes are no message of ZooKeeper's."""


class Acl(NamedTuple):
    """Who may do what with a node. ``permissions``: 1 read, 2 write, 4 create, 8 delete, 16 administer."""

    permissions: int
    scheme: str
    id: str


ANYONE = Acl(31, "world", "anyone")
#: Whoever has authenticated in the way in which the creator has.
CREATOR = Acl(31, "auth", "")


class Stat(NamedTuple):
    """What a server knows of a node. Times are milliseconds of the leader's clock."""

    created: int
    modified: int
    created_at: int
    modified_at: int
    version: int
    children_version: int
    acl_version: int
    ephemeral_owner: int
    data_length: int
    children: int
    children_modified: int


class Event(NamedTuple):
    """A watch has fired: ``kind`` is one of CREATED, DELETED, CHANGED, CHILDREN_CHANGED."""

    kind: int
    state: int
    path: str


class Welcome(NamedTuple):
    """The answer to the first message of a connection. ``timeout`` 0: there is no such session any more."""

    timeout: int
    session: int
    password: bytes


class Reader:
    """Reads values one after the other."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self._at = at

    def unpack(self, shape: struct.Struct) -> tuple[int, ...]:
        """Return the values of a shape."""
        values = shape.unpack_from(self._data, self._at)
        self._at += shape.size
        return values

    def int(self) -> int:
        """Return an int."""
        (value,) = self.unpack(_INT)
        return value

    def buffer(self) -> bytes:
        """Return a buffer; none is empty."""
        length = self.int()
        if length <= 0:
            return b""
        self._at += length
        if self._at > len(self._data):
            raise struct.error("a buffer is longer than its message")
        return self._data[self._at - length : self._at]

    def text(self) -> str:
        """Return a text."""
        return self.buffer().decode()

    def texts(self) -> list[str]:
        """Return a list of texts."""
        return [self.text() for _ in range(self.int())]

    def stat(self) -> Stat:
        """Return a Stat."""
        return Stat(*self.unpack(_STAT))


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``commits``: the answer proves that a majority of the servers has written it."""

    opcode: int
    body: bytes
    read: Callable[[Reader], T]
    commits: bool = False


_NONE = _INT.pack(-1)


def _text(value: str) -> bytes:
    return _buffer(value.encode()) if value else _NONE


def _buffer(value: bytes) -> bytes:
    return _INT.pack(len(value)) + value


def _texts(values: Sequence[str]) -> bytes:
    return _INT.pack(len(values)) + b"".join(map(_text, values))


def _path_and_watch(path: str, watch: bool) -> bytes:
    return _text(path) + (b"\x01" if watch else b"\x00")


def _create_body(path: str, data: bytes, flags: int, acl: Sequence[Acl]) -> bytes:
    rights = b"".join(_INT.pack(one.permissions) + _text(one.scheme) + _text(one.id) for one in acl)
    return b"".join((_text(path), _buffer(data), _INT.pack(len(acl)), rights, _INT.pack(flags)))


def _nothing(reader: Reader) -> None:
    """Read an answer that has no body."""


# -- requests --------------------------------------------------------------------------------------


def create(path: str, data: bytes, flags: int, acl: Sequence[Acl] = (ANYONE,)) -> Call[str]:
    """Make a node; the answer is its path, with the number that SEQUENTIAL adds."""
    return Call(CREATE, _create_body(path, data, flags, acl), Reader.text, commits=True)


def create2(
    path: str, data: bytes, flags: int, acl: Sequence[Acl] = (ANYONE,)
) -> Call[tuple[str, Stat]]:
    """Make a node; the answer also has its Stat. Servers delete a CONTAINER that has become empty."""
    opcode = CREATE_CONTAINER if flags == CONTAINER else CREATE2
    return Call(opcode, _create_body(path, data, flags, acl), _read_created, commits=True)


def _read_created(reader: Reader) -> tuple[str, Stat]:
    return reader.text(), reader.stat()


def delete(path: str, version: int = -1) -> Call[None]:
    """Delete a node without children."""
    return Call(DELETE, _text(path) + _INT.pack(version), _nothing, commits=True)


def exists(path: str, *, watch: bool = False) -> Call[Stat]:
    """Ask for a node's Stat. With ``watch`` the server tells once when the node comes, changes or goes."""
    return Call(EXISTS, _path_and_watch(path, watch), Reader.stat)


def get_data(path: str, *, watch: bool = False) -> Call[tuple[bytes, Stat]]:
    """Read a node. With ``watch`` the server tells once when it is changed or deleted."""
    return Call(GET_DATA, _path_and_watch(path, watch), _read_data)


def _read_data(reader: Reader) -> tuple[bytes, Stat]:
    return reader.buffer(), reader.stat()


def set_data(path: str, data: bytes, version: int = -1) -> Call[Stat]:
    """Write a node."""
    body = _text(path) + _buffer(data) + _INT.pack(version)
    return Call(SET_DATA, body, Reader.stat, commits=True)


def get_children(path: str, *, watch: bool = False) -> Call[tuple[list[str], Stat]]:
    """List a node's children. With ``watch`` the server tells once when one comes or goes."""
    return Call(GET_CHILDREN2, _path_and_watch(path, watch), _read_children)


def _read_children(reader: Reader) -> tuple[list[str], Stat]:
    return reader.texts(), reader.stat()


def get_ephemerals(prefix: str) -> Call[list[str]]:
    """List the session's own ephemeral nodes whose paths begin so. Servers before 3.6 do not know it: they
    answer UNIMPLEMENTED and close the connection."""
    return Call(GET_EPHEMERALS, _text(prefix), Reader.texts)


def sync(path: str) -> Call[str]:
    """Have the server catch up with its leader before it answers what is asked next."""
    return Call(SYNC, _text(path), Reader.text)


def check(path: str, version: int = -1) -> Call[None]:
    """Let a transaction fail when the node does not exist. Only for ``multi``."""
    return Call(CHECK, _text(path) + _INT.pack(version), _nothing)


def multi(calls: Sequence[Call[Any]]) -> Call[list[object]]:
    """Do all or nothing. The answer has one result per call.

    :raises Aborted: (from reading) when one of them cannot be done.
    """
    parts = [_OPERATION.pack(call.opcode, False, -1) + call.body for call in calls]
    return Call(MULTI, b"".join(parts) + _END_OF_OPERATIONS, _read_results, commits=True)


class Aborted(ZooKeeperError):
    """A transaction was not done. ``index`` is the call that could not be, ``code`` says why."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.index: int = next(number for number, code in enumerate(codes) if code)
        super().__init__(codes[self.index])


#: What the answer to each call inside a transaction looks like.
_RESULTS: dict[int, Callable[[Reader], object]] = {
    CREATE: Reader.text,
    CREATE2: _read_created,
    DELETE: _nothing,
    SET_DATA: Reader.stat,
    CHECK: _nothing,
    _FAILED: Reader.int,
}


def _read_results(reader: Reader) -> list[object]:
    results: list[object] = []
    codes: list[int] = []
    while True:
        opcode, done, _ = reader.unpack(_OPERATION)
        if done:
            break
        result = _RESULTS[opcode](reader)
        results.append(result)
        if opcode == _FAILED:
            assert isinstance(result, int)
            codes.append(result)
    if any(codes):
        raise Aborted(codes)
    if codes:
        raise struct.error("a transaction failed for no reason")
    return results


def set_watches(
    relative_to: int, data: Sequence[str], existing: Sequence[str], children: Sequence[str]
) -> Call[None]:
    """Set the watches of the last connection on this one; the server tells at once what was missed."""
    body = _LONG.pack(relative_to) + _texts(data) + _texts(existing) + _texts(children)
    return Call(SET_WATCHES, body, _nothing)


def auth(scheme: str, credentials: bytes) -> Call[None]:
    """Authenticate this connection."""
    return Call(AUTH, _INT.pack(0) + _text(scheme) + _buffer(credentials), _nothing)


def sasl(token: bytes) -> Call[bytes]:
    """Answer the server's challenge; the first token is empty."""
    return Call(SASL, _buffer(token), Reader.buffer)


PING_CALL: Call[None] = Call(PING, b"", _nothing)
CLOSE_CALL: Call[None] = Call(CLOSE, b"", _nothing)


# -- frames ----------------------------------------------------------------------------------------


def frame(xid: int, call: Call[Any]) -> bytes:
    """Return a request as it goes over the wire."""
    return b"".join((_INT.pack(8 + len(call.body)), _TWO_INTS.pack(xid, call.opcode), call.body))


#: A longer message is a mistake, or not ZooKeeper's (bytes).
_LONGEST_MESSAGE = 1 << 28
#: Milliseconds that a first message has room for.
LONGEST_TIMEOUT = 2**31 - 1


def hello(last_seen: int, timeout: int, session: int, password: bytes) -> bytes:
    """Return the first message of a connection: for a new session (0), or to go on with one.

    :param last_seen: the newest transaction that the client knows of. A server that is behind refuses.
    :param timeout: of the session, in milliseconds, up to ``LONGEST_TIMEOUT``.
    """
    body = b"".join(
        (
            _INT.pack(0),
            _LONG.pack(last_seen),
            _INT.pack(timeout),
            _LONG.pack(session),
            _buffer(password),
            b"\x00",  # a read-only server will not do
        )
    )
    return _buffer(body)


def decoded(read: Callable[[Reader], T], reader: Reader) -> T:
    """Return what ``read`` reads: each message goes through here, and nothing but these is raised.

    :raises Unreadable: it is no such message. :raises ZooKeeperError: it is a refusal.
    """
    try:
        return read(reader)
    except (struct.error, KeyError, UnicodeDecodeError) as wrong:
        raise Unreadable(repr(wrong)) from wrong


def read_welcome(reader: Reader) -> Welcome:
    """Read the answer to ``hello``."""
    reader.int()
    timeout = reader.int()
    (session,) = reader.unpack(_LONG)
    return Welcome(max(timeout, 0), session, reader.buffer())


class Reply(NamedTuple):
    """The head of an answer, and its body."""

    xid: int
    zxid: int
    code: int
    body: Reader


def read_reply(reader: Reader) -> Reply:
    """Read the head of an answer."""
    xid, zxid, code = reader.unpack(_REPLY)
    return Reply(xid, zxid, code, reader)


def read_event(reader: Reader) -> Event:
    """Read what a watch tells."""
    kind, state = reader.unpack(_TWO_INTS)
    return Event(kind, state, reader.text())


def split(data: bytearray) -> list[bytes]:
    """Cut the complete frames off the front of what was received.

    :raises Unreadable: what follows has no length that a message can have.
    """
    frames, at, received = [], 0, len(data)
    while received - at >= 4:
        (length,) = _INT.unpack_from(data, at)
        if not 0 <= length <= _LONGEST_MESSAGE:
            raise Unreadable(f"a message of {length} bytes")
        end = at + 4 + length
        if end > received:
            break
        frames.append(bytes(data[at + 4 : end]))
        at = end
    if at:
        del data[:at]
    return frames
