"""The messages of etcd's v3 API that this client sends and reads, and their protobuf form.

Over 400 lines: one class for each message of the API that is used.

They are written by hand, for two reasons. Generated classes work only with the protobuf runtimes that their
generator allows, which would tie every user of the package to some of them. And they have no types of
their own. ``tests/etcd/test_messages.py`` holds each class here against classes that protobuf's own
compiler makes.

Fields that a server adds later are skipped. Numbers are etcd's (``rpc.proto``, ``kv.proto``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final, Literal, TypeVar

_Kind = Literal["int", "bool", "bytes", "text", "message"]
_M = TypeVar("_M", bound="Message")

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_UNSIGNED = 1 << 64
#: A transaction in a transaction has a range with keys in it: that is six.
_DEEPEST = 16


class Malformed(ValueError):
    """The bytes are no message."""


class Message:
    """A message. Its fields are those of the dataclass that each subclass is."""

    __slots__ = ()

    def encode(self) -> bytes:
        """Return the message as bytes."""
        out = bytearray()
        for name, tag, kind, repeated, default in _plan(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if repeated:
                for item in value:
                    _put(out, tag, kind, item)
            elif value is not None and value != default:
                _put(out, tag, kind, value)
        return bytes(out)

    @classmethod
    def decode(cls: type[_M], data: bytes, depth: int = 0) -> _M:
        """Return the message that the bytes are.

        :param depth: in how many other messages it stands.
        :raises Malformed: if they are none.
        """
        if depth > _DEEPEST:
            raise Malformed("messages stand in each other without end")
        found: dict[str, Any] = {}
        known = _by_number(cls)  # type: ignore[arg-type]
        at, end = 0, len(data)
        while at < end:
            tag, at = _varint(data, at)
            wire = tag & 7
            value: Any
            if wire == _VARINT:
                value, at = _varint(data, at)
            elif wire == _SIZED:
                size, at = _varint(data, at)
                if at + size > end:
                    raise Malformed("the message ends within a field")
                value = data[at : at + size]
                at += size
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
                continue  # none of ours
            else:
                raise Malformed(f"wire type {wire}")
            about = known.get(tag >> 3)
            if about is None:
                continue
            name, kind, repeated, of = about
            if (wire == _VARINT) != (kind in ("int", "bool")):
                raise Malformed(f"{cls.__name__}.{name} has wire type {wire}")
            if kind == "int":
                value = value - _UNSIGNED if value >> 63 else value
            elif kind == "bool":
                value = bool(value)
            elif kind == "text":
                value = value.decode(errors="replace")
            elif kind == "message":
                value = _TYPES[of].decode(value, depth + 1)
            if repeated:
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
        return cls(**found)


def _put(out: bytearray, tag: bytes, kind: _Kind, value: Any) -> None:
    out += tag
    if kind == "int" or kind == "bool":
        _put_varint(out, int(value) % _UNSIGNED)
        return
    if kind == "message" or kind == "text":
        value = value.encode()
    _put_varint(out, len(value))
    out += value


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while (byte := data[at]) > 0x7F:
            value |= (byte & 0x7F) << shift
            at += 1
            shift += 7
            if shift > 63:
                raise Malformed("a number is longer than ten bytes")
    except IndexError:
        raise Malformed("the message ends within a number") from None
    return (value | byte << shift) % _UNSIGNED, at + 1


def _field(number: int, kind: _Kind, default: Any, *, repeated: bool = False, of: str = "") -> Any:
    about = {"number": number, "kind": kind, "repeated": repeated, "of": of}
    if repeated:
        return field(default_factory=list, metadata=about)
    return field(default=default, metadata=about)


def _int(number: int, default: int | None = 0) -> Any:
    """Return a field; of a ``oneof``, where 0 is something else than nothing, the default is None."""
    return _field(number, "int", default)


def _bool(number: int) -> Any:
    return _field(number, "bool", False)


def _bytes(number: int) -> Any:
    return _field(number, "bytes", b"")


def _text(number: int) -> Any:
    return _field(number, "text", "")


def _message(number: int, of: str) -> Any:
    return _field(number, "message", None, of=of)


def _messages(number: int, of: str) -> Any:
    return _field(number, "message", None, repeated=True, of=of)


@cache
def _plan(cls: type[Any]) -> tuple[tuple[str, bytes, _Kind, bool, Any], ...]:
    """Return each field's name, tag (its number and wire type), kind, whether it repeats, and default."""
    plan = []
    for f in sorted(fields(cls), key=lambda one: one.metadata["number"]):
        kind, tag = f.metadata["kind"], bytearray()
        wire = _VARINT if kind in ("int", "bool") else _SIZED
        _put_varint(tag, f.metadata["number"] << 3 | wire)
        plan.append((f.name, bytes(tag), kind, f.metadata["repeated"], f.default))
    return tuple(plan)


@cache
def _by_number(cls: type[Any]) -> dict[int, tuple[str, _Kind, bool, str]]:
    return {
        f.metadata["number"]: (
            f.name,
            f.metadata["kind"],
            f.metadata["repeated"],
            f.metadata["of"],
        )
        for f in fields(cls)
    }


# -- keys and values -------------------------------------------------------------------------------


@dataclass(slots=True)
class Header(Message):
    """``cluster_id``: the same for all members. ``revision``: the store's when the answer was made. Every
    write makes it one larger.

    ``raft_term``: of the last entry that the member had carried out then.
    """

    cluster_id: int = _int(1)
    revision: int = _int(3)
    raft_term: int = _int(4)


@dataclass(slots=True)
class KeyValue(Message):
    """A key: with the revisions in which it was made and written last, and the lease that it ends with."""

    key: bytes = _bytes(1)
    create_revision: int = _int(2)
    mod_revision: int = _int(3)
    version: int = _int(4)
    value: bytes = _bytes(5)
    lease: int = _int(6)


@dataclass(slots=True)
class RangeRequest(Message):
    """``range_end``: empty for one key, else the first key behind those that are meant."""

    key: bytes = _bytes(1)
    range_end: bytes = _bytes(2)
    limit: int = _int(3)
    revision: int = _int(4)
    keys_only: bool = _bool(8)
    count_only: bool = _bool(9)


@dataclass(slots=True)
class RangeResponse(Message):
    """``count``: how many there are, whatever the limit."""

    header: Header | None = _message(1, "Header")
    kvs: list[KeyValue] = _messages(2, "KeyValue")
    more: bool = _bool(3)
    count: int = _int(4)


@dataclass(slots=True)
class PutRequest(Message):
    """Write one key."""

    key: bytes = _bytes(1)
    value: bytes = _bytes(2)
    lease: int = _int(3)


@dataclass(slots=True)
class DeleteRangeRequest(Message):
    """Delete one key, or all from ``key`` up to ``range_end``."""

    key: bytes = _bytes(1)
    range_end: bytes = _bytes(2)


# -- transactions ----------------------------------------------------------------------------------

EQUAL: Final = 0
GREATER: Final = 1
LESS: Final = 2
NOT_EQUAL: Final = 3

VERSION: Final = 0
CREATE: Final = 1
MOD: Final = 2
LEASE: Final = 4


@dataclass(slots=True)
class Compare(Message):
    """What has to be true of each key of a range. A key that is not there has revisions of 0; so has a
    range without keys."""

    result: int = _int(1)
    target: int = _int(2)
    key: bytes = _bytes(3)
    version: int | None = _int(4, None)
    create_revision: int | None = _int(5, None)
    mod_revision: int | None = _int(6, None)
    lease: int | None = _int(8, None)
    range_end: bytes = _bytes(64)


@dataclass(slots=True)
class RequestOp(Message):
    """One step of a transaction: exactly one of these."""

    request_range: RangeRequest | None = _message(1, "RangeRequest")
    request_put: PutRequest | None = _message(2, "PutRequest")
    request_delete_range: DeleteRangeRequest | None = _message(3, "DeleteRangeRequest")
    request_txn: TxnRequest | None = _message(4, "TxnRequest")


@dataclass(slots=True)
class ResponseOp(Message):
    """The answer to one step. What is written or deleted says nothing that is needed."""

    response_range: RangeResponse | None = _message(1, "RangeResponse")
    response_txn: TxnResponse | None = _message(4, "TxnResponse")


@dataclass(slots=True)
class TxnRequest(Message):
    """If all comparisons are true the steps of ``success`` are carried out, else those of ``failure``."""

    compare: list[Compare] = _messages(1, "Compare")
    success: list[RequestOp] = _messages(2, "RequestOp")
    failure: list[RequestOp] = _messages(3, "RequestOp")


@dataclass(slots=True)
class TxnResponse(Message):
    """Which of the two was carried out, and the answer to each step."""

    header: Header | None = _message(1, "Header")
    succeeded: bool = _bool(2)
    responses: list[ResponseOp] = _messages(3, "ResponseOp")

    @property
    def revision(self) -> int:
        """The store's when it was carried out."""
        assert self.header is not None
        return self.header.revision

    def found(self, step: int = 0) -> list[KeyValue]:
        """Return what this step has read; nothing if it did not read."""
        read = self.responses[step].response_range
        return [] if read is None else read.kvs


def fits(request: Message, answer: Message) -> bool:
    """Whether the answer to a transaction has what was asked for: it is read without looking."""
    if not (isinstance(request, TxnRequest) and isinstance(answer, TxnResponse)):
        return True
    steps = request.success if answer.succeeded else request.failure
    if len(steps) != len(answer.responses):
        return False
    for step, its in zip(steps, answer.responses, strict=True):
        if step.request_range is not None and its.response_range is None:
            return False
        if step.request_txn is not None and (
            its.response_txn is None or not fits(step.request_txn, its.response_txn)
        ):
            return False
    return True


# -- watching --------------------------------------------------------------------------------------

PUT: Final = 0
DELETE: Final = 1


@dataclass(slots=True)
class Event(Message):
    """A key was written or deleted: ``kv.mod_revision`` says when."""

    type: int = _int(1)
    kv: KeyValue | None = _message(2, "KeyValue")


@dataclass(slots=True)
class WatchCreateRequest(Message):
    """Tell every change from ``start_revision`` on."""

    key: bytes = _bytes(1)
    range_end: bytes = _bytes(2)
    start_revision: int = _int(3)
    watch_id: int = _int(7)


@dataclass(slots=True)
class WatchCancelRequest(Message):
    """End one watch."""

    watch_id: int = _int(1)


@dataclass(slots=True)
class WatchRequest(Message):
    """Exactly one of these."""

    create_request: WatchCreateRequest | None = _message(1, "WatchCreateRequest")
    cancel_request: WatchCancelRequest | None = _message(2, "WatchCancelRequest")


@dataclass(slots=True)
class WatchResponse(Message):
    """What a watch has to tell. ``compact_revision``: it asked for revisions that the store has
    forgotten."""

    header: Header | None = _message(1, "Header")
    watch_id: int = _int(2)
    created: bool = _bool(3)
    canceled: bool = _bool(4)
    compact_revision: int = _int(5)
    cancel_reason: str = _text(6)
    events: list[Event] = _messages(11, "Event")


# -- leases ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class LeaseGrantRequest(Message):
    """Make a lease of so many seconds. With ``id`` 0 the server chooses one."""

    ttl: int = _int(1)
    id: int = _int(2)


@dataclass(slots=True)
class LeaseGrantResponse(Message):
    """The lease: ``ttl`` may be larger than was asked for."""

    header: Header | None = _message(1, "Header")
    id: int = _int(2)
    ttl: int = _int(3)
    error: str = _text(4)


@dataclass(slots=True)
class LeaseRevokeRequest(Message):
    """End a lease now, with all its keys."""

    id: int = _int(1)


@dataclass(slots=True)
class LeaseRevokeResponse(Message):
    """The lease has ended."""

    header: Header | None = _message(1, "Header")


@dataclass(slots=True)
class LeaseKeepAliveRequest(Message):
    """Renew a lease."""

    id: int = _int(1)


@dataclass(slots=True)
class LeaseKeepAliveResponse(Message):
    """The lease lives for ``ttl`` more seconds; 0: there is no such lease."""

    header: Header | None = _message(1, "Header")
    id: int = _int(2)
    ttl: int = _int(3)


@dataclass(slots=True)
class LeaseTimeToLiveRequest(Message):
    """Tell what is left of a lease, and its keys if wanted."""

    id: int = _int(1)
    keys: bool = _bool(2)


@dataclass(slots=True)
class LeaseTimeToLiveResponse(Message):
    """What is left in seconds; -1: there is no such lease."""

    header: Header | None = _message(1, "Header")
    id: int = _int(2)
    ttl: int = _int(3)
    granted_ttl: int = _int(4)
    keys: list[bytes] = _field(5, "bytes", None, repeated=True)


# -- the server ------------------------------------------------------------------------------------


@dataclass(slots=True)
class StatusRequest(Message):
    """Tell how the member is."""


@dataclass(slots=True)
class StatusResponse(Message):
    """``leader``: 0 when there is none. ``errors``: the alarms that are on."""

    header: Header | None = _message(1, "Header")
    version: str = _text(2)
    db_size: int = _int(3)
    leader: int = _int(4)
    errors: list[str] = _field(8, "text", None, repeated=True)
    is_learner: bool = _bool(10)


@dataclass(slots=True)
class AuthenticateRequest(Message):
    """Ask for a token."""

    name: str = _text(1)
    password: str = _text(2)


@dataclass(slots=True)
class AuthenticateResponse(Message):
    """The token to send with every call."""

    header: Header | None = _message(1, "Header")
    token: str = _text(2)


_TYPES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in globals().copy().values()
    if isinstance(cls, type) and issubclass(cls, Message)
}
