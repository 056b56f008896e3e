"""The frames of HTTP/2 (RFC 9113): bytes to frames and back. Pure: no I/O.

What breaks a rule of the form alone is found here: lengths, numbers of streams, padding, the order of
CONTINUATION. What a frame means for a stream is the connection's matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

# Settings.
TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
CONCURRENT: Final = 3
INITIAL_WINDOW: Final = 4
FRAME_SIZE: Final = 5

# Errors.
NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

#: As long a payload is taken; the protocol has it so unless a setting says otherwise.
LARGEST: Final = 16_384
WINDOW: Final = 65_535
LARGEST_WINDOW: Final = 2**31 - 1
LAST_STREAM: Final = 2**31 - 1
#: The headers of one message, as they arrive: nobody may send them without end.
_MOST_HEADERS = 1 << 16

_HEAD = struct.Struct("!HBBBI")
_SETTING = struct.Struct("!HI")
_NUMBER = struct.Struct("!I")
_TWO_NUMBERS = struct.Struct("!II")

#: Payloads of one length alone.
_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
#: Frames that belong to a stream, and frames that belong to none.
_OF_A_STREAM = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION))
_OF_NONE = frozenset((SETTINGS, PING, GOAWAY))


class ProtocolError(Exception):
    """The peer has broken a rule. The connection cannot be used any more."""

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code: int = code


class Frame(NamedTuple):
    """A frame without its padding. HEADERS are whole: what CONTINUATION has brought is in them.

    ``length`` is what counts for flow control: with the padding.
    """

    kind: int
    flags: int
    stream: int
    payload: bytes
    length: int


class Reader:
    """Frames out of bytes as they come.

    Mutable state: ``_unread``, ``_headers`` (of which CONTINUATION is still to come) with ``_begun``, its
    first frame.
    """

    def __init__(self) -> None:
        self._unread = bytearray()
        self._begun: Frame | None = None
        self._headers = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now.

        :raises ProtocolError: at the first one that breaks a rule.
        """
        unread = self._unread
        unread += data
        at, end = 0, len(unread)
        try:
            while end - at >= 9:
                high, low, kind, flags, stream = _HEAD.unpack_from(unread, at)
                length = high << 8 | low
                if length > LARGEST:
                    raise ProtocolError(
                        f"a frame of {length} bytes: this is no HTTP/2, or more than was allowed",
                        FRAME_SIZE_ERROR,
                    )
                if end - at - 9 < length:
                    break
                payload = bytes(unread[at + 9 : at + 9 + length])
                at += 9 + length
                frame = self._frame(kind, flags, stream & 0x7FFFFFFF, payload)
                if frame is not None:
                    yield frame
        finally:
            del unread[:at]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> Frame | None:
        length = len(payload)
        begun = self._begun
        if (begun is not None) != (kind == CONTINUATION) or (begun and begun.stream != stream):
            raise ProtocolError("headers are not continued as they were begun")
        if kind in _LENGTHS and length != _LENGTHS[kind]:
            raise ProtocolError(f"a frame of kind {kind} with {length} bytes", FRAME_SIZE_ERROR)
        if (kind in _OF_A_STREAM and not stream) or (kind in _OF_NONE and stream):
            raise ProtocolError(f"a frame of kind {kind} for stream {stream}")
        if kind in (DATA, HEADERS) and flags & (PADDED | WITH_PRIORITY):
            payload = _without_padding(kind, flags, payload)
        if kind == HEADERS and not flags & END_HEADERS:
            self._begun = Frame(kind, flags, stream, b"", 0)
            self._headers += payload
            return None
        if begun is not None:
            self._headers += payload
            if len(self._headers) > _MOST_HEADERS:
                raise ProtocolError("headers have no end", ENHANCE_YOUR_CALM)
            if not flags & END_HEADERS:
                return None
            self._begun, payload = None, bytes(self._headers)
            self._headers.clear()
            return Frame(HEADERS, begun.flags, stream, payload, len(payload))
        return Frame(kind, flags, stream, payload, length)


def _without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    padding = 0
    if flags & PADDED:
        if not payload:
            raise ProtocolError("a frame without the length of its padding", FRAME_SIZE_ERROR)
        padding, payload = payload[0], payload[1:]
    if kind == HEADERS and flags & WITH_PRIORITY:
        if len(payload) < 5:
            raise ProtocolError("headers without their priority", FRAME_SIZE_ERROR)
        payload = payload[5:]
    if padding > len(payload):
        raise ProtocolError("more padding than there are bytes")
    return payload[: len(payload) - padding]


# -- writing ---------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def headers(stream: int, block: bytes, largest: int) -> bytes:
    """Return the frames of a message's headers, which data will follow."""
    kind, out = HEADERS, bytearray()
    while len(block) > largest:
        out += frame(kind, 0, stream, block[:largest])
        kind, block = CONTINUATION, block[largest:]
    return bytes(out + frame(kind, END_HEADERS, stream, block))


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return a frame with these settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in pairs))


def window_update(stream: int, more: int) -> bytes:
    """Return the frame that allows so many bytes more."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(more))


def rst_stream(stream: int, code: int) -> bytes:
    """Return the frame that ends a stream."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(code: int) -> bytes:
    """Return the frame that ends a connection. A server opens no streams, so the last one is 0."""
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(0, code))


# -- reading payloads ------------------------------------------------------------------------------


def read_number(payload: bytes) -> int:
    """Return the number of a WINDOW_UPDATE or a RST_STREAM."""
    number: int = _NUMBER.unpack(payload)[0]
    return number


def read_goaway(payload: bytes) -> tuple[int, int, str]:
    """Return the last stream that was looked at, the error, and what the peer says about it."""
    if len(payload) < 8:
        raise ProtocolError("GOAWAY is too short", FRAME_SIZE_ERROR)
    last, code = _TWO_NUMBERS.unpack_from(payload)
    return last & 0x7FFFFFFF, code, payload[8:200].decode(errors="replace")


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings, each of which is in its bounds."""
    if len(payload) % 6:
        raise ProtocolError("SETTINGS are not pairs", FRAME_SIZE_ERROR)
    found = list(_SETTING.iter_unpack(payload))
    for what, value in found:
        if what == INITIAL_WINDOW and value > LARGEST_WINDOW:
            raise ProtocolError(f"a window of {value} bytes", FLOW_CONTROL_ERROR)
        if what == FRAME_SIZE and not LARGEST <= value < 1 << 24:
            raise ProtocolError(f"frames of {value} bytes")
    return found
