"""One call of gRPC: a stream of HTTP/2 with messages in both directions, and a status at its end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote_to_bytes

from . import framing as f
from .framing import ProtocolError

#: Its name and its value.
Header = tuple[bytes, bytes]

# Of gRPC's statuses those that mean something here.
OK: Final = 0
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
FAILED_PRECONDITION: Final = 9
OUT_OF_RANGE: Final = 11
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
UNAUTHENTICATED: Final = 16

#: What a status of HTTP's means that no gRPC server has sent (a proxy did).
_OF_HTTP = {
    400: INTERNAL,
    401: UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: UNIMPLEMENTED,
    429: UNAVAILABLE,
    502: UNAVAILABLE,
    503: UNAVAILABLE,
    504: UNAVAILABLE,
}
#: The server may send so many bytes ahead: on one stream, and on all together.
STREAM_WINDOW, WINDOW = 1 << 20, 1 << 23
#: A longer message is a mistake (bytes).
_LONGEST_MESSAGE = 1 << 28
_HEAD = struct.Struct("!BI")


class CallFailed(Exception):
    """The call has no answer."""


class NotSent(CallFailed):
    """The server has certainly not looked at it."""


class Lost(CallFailed):
    """The server may have carried it out: the connection or the stream broke, or time was over."""


class Status(CallFailed):
    """The server answered with an error.

    :ivar code: gRPC's.
    :ivar http: the status of HTTP, if the answer was no answer of gRPC's; else 0.
    """

    def __init__(self, code: int, text: str, http: int = 0) -> None:
        super().__init__(text)
        self.code: int = code
        self.http: int = http


def pack(message: bytes) -> bytes:
    """Return a message as it stands on a stream."""
    return _HEAD.pack(0, len(message)) + message


class Flow:
    """Flow control, of one stream or of all of a connection together.

    Mutable state: ``room`` (the server takes so many bytes more), ``_unconfirmed`` (received bytes that it
    was not told to send again).

    :param window: how many bytes the server may send ahead.
    """

    __slots__ = ("_unconfirmed", "_window", "room")

    def __init__(self, room: int, window: int) -> None:
        self.room: int = room
        self._window = window
        self._unconfirmed = 0

    def widen(self, more: int) -> None:
        """The server takes so many bytes more, or fewer."""
        self.room += more
        if self.room > f.LARGEST_WINDOW:
            raise ProtocolError("a window is too large", f.FLOW_CONTROL_ERROR)

    def received(self, length: int) -> None:
        """The server has sent so many bytes."""
        self._unconfirmed += length
        if self._unconfirmed > self._window:
            raise ProtocolError("more data than was allowed", f.FLOW_CONTROL_ERROR)

    def confirmed(self) -> int:
        """Return how many bytes the server is told to send again; 0 while that is not worth a frame."""
        if self._unconfirmed < self._window // 2:
            return 0
        more, self._unconfirmed = self._unconfirmed, 0
        return more


class Exchange:
    """One call.

    Mutable state: ``id`` of its stream (0: not begun); ``ended`` (done when the call is over: with an
    exception unless the server's status is OK). Of what is sent: ``unsent``, ``finishing`` (nothing follows
    it), ``finished``. Of what is received: ``_unread``, ``_begun`` (headers have come) and ``_http`` (their
    status, if it is an error). Of both: ``flow``, without room until it begins.
    """

    __slots__ = (
        "_begun",
        "_heard",
        "_http",
        "_unread",
        "block",
        "ended",
        "finished",
        "finishing",
        "flow",
        "id",
        "unsent",
    )

    def __init__(
        self, block: bytes, heard: Callable[[bytes], object], ended: asyncio.Future[None]
    ) -> None:
        self.id: int = 0
        self.block: bytes = block
        self.ended: asyncio.Future[None] = ended
        self.unsent: bytearray = bytearray()
        self.finishing: bool = False
        self.finished: bool = False
        self.flow: Flow = Flow(0, STREAM_WINDOW)
        self._heard = heard
        self._unread = bytearray()
        self._begun = False
        self._http = 0

    def on_headers(self, headers: list[Header], *, last: bool) -> None:
        """Take headers, or what stands behind the messages."""
        found = dict(headers)
        if self._begun and not last:
            raise ProtocolError("headers between the messages")
        if not self._begun:
            status = found.get(b":status", b"")
            if not status.isdigit():
                raise ProtocolError("headers without a status")
            if status[:1] == b"1" and not last:
                return  # more will follow
            self._begun = True
            if status != b"200":
                self._http = int(status)
            elif not found.get(b"content-type", b"").startswith(b"application/grpc"):
                self._http = 200
        if last:
            self._finish(found)

    def on_data(self, data: bytes, *, last: bool) -> None:
        """Take bytes of messages."""
        if not self._begun:
            raise ProtocolError("data before headers")
        if not self._http:
            self._take(data)
        if last:
            self._finish({})

    def _take(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        at, end = 0, len(unread)
        while end - at >= _HEAD.size:
            packed, length = _HEAD.unpack_from(unread, at)
            if packed:
                self.end(Status(INTERNAL, "a compressed message, which nobody has asked for"))
                return
            if length > _LONGEST_MESSAGE:
                self.end(Status(INTERNAL, f"a message of {length} bytes"))
                return
            if end - at - _HEAD.size < length:
                break
            at += _HEAD.size
            try:
                self._heard(bytes(unread[at : at + length]))
            except Exception as failed:  # whoever waits for the end hears it
                self.end(failed)
            if self.ended.done():
                return
            at += length
        del unread[:at]

    def _finish(self, found: dict[bytes, bytes]) -> None:
        status = found.get(b"grpc-status", b"")
        if status.isdigit() and len(status) < 4:
            code = int(status)
            text = unquote_to_bytes(found.get(b"grpc-message", b"")).decode(errors="replace")
            if code:
                self.end(Status(code, text))
            elif self._unread:
                self.end(Status(INTERNAL, "the last message has no end"))
            else:
                self.end(None)
        elif self._http:
            code = _OF_HTTP.get(self._http, UNKNOWN)
            text = f"answered as no gRPC server does: HTTP status {self._http}"
            self.end(Status(code, text, self._http))
        else:
            self.end(Status(UNKNOWN, "the answer has no status"))

    def on_reset(self, code: int) -> None:
        """The server has ended the stream."""
        if code == f.REFUSED_STREAM:
            self.end(NotSent("the server takes no more calls"))
        else:
            self.end(Lost(f"the server has ended the stream (error {code})"))

    def leave_behind(self, error: Exception) -> None:
        """Nobody waits any more: whoever did is told so. An answer that comes late ends it all the same."""
        waiting, self.ended = self.ended, self.ended.get_loop().create_future()
        if not waiting.done():
            waiting.set_exception(error)
            waiting.exception()

    def end(self, error: Exception | None) -> None:
        """Be over."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # it may be that nobody asks any more
