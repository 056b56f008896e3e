"""The frames of HTTP/2: what the package hyperframe leaves to its users.

That is to find frames in a stream of bytes, to put CONTINUATION behind its HEADERS, and to bound both.
What a frame means for a stream is the connection's matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from hyperframe.exceptions import HyperframeError
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

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
_HEAD = 9
#: The headers of one message, as they arrive: nobody may send them without end.
_MOST_HEADERS = 1 << 16


#: Kinds and flags of what each call sends.
DATA, HEADERS, RST_STREAM, CONTINUATION = 0, 1, 3, 9
END_STREAM, END_HEADERS = 1, 4
_LENGTH_AND_KIND = struct.Struct("!IBI")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame as bytes. (One of hyperframe's takes ten times as long to make.)"""
    return _LENGTH_AND_KIND.pack(len(payload) << 8 | kind, flags, stream) + payload


class ProtocolError(Exception):
    """The peer has broken a rule. The connection cannot be used any more."""

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code: int = code


class Reader:
    """Frames out of bytes as they come. HEADERS are whole: what CONTINUATION has brought is in them.

    Mutable state: ``_unread``; ``_begun`` (HEADERS of which CONTINUATION is still to come) with ``_size``,
    its bytes as they arrived.
    """

    def __init__(self) -> None:
        self._unread = b""
        self._begun: HeadersFrame | None = None
        self._size = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now.

        :raises ProtocolError: at the first one that breaks a rule. Nothing more can be read then.
        """
        unread, at = memoryview(self._unread + data), 0
        try:
            while len(unread) - at >= _HEAD:
                frame, length = Frame.parse_frame_header(unread[at : at + _HEAD])
                if length > LARGEST:
                    text = f"a frame of {length} bytes: this is no HTTP/2, or more than was allowed"
                    raise ProtocolError(text, FRAME_SIZE_ERROR)
                end = at + _HEAD + length
                if len(unread) < end:
                    break
                frame.parse_body(unread[at + _HEAD : end])
                at = end
                if (whole := self._join(frame, _HEAD + length)) is not None:
                    yield whole
        except HyperframeError as wrong:
            raise ProtocolError(str(wrong)) from wrong
        self._unread = unread[at:].tobytes()

    def _join(self, frame: Frame, size: int) -> Frame | None:
        """Return the frame, or the HEADERS that it ends; None if something must follow."""
        begun = self._begun
        if begun is None and isinstance(frame, HeadersFrame):
            begun, self._size = frame, 0
        elif isinstance(frame, ContinuationFrame) and begun and begun.stream_id == frame.stream_id:
            begun.data += frame.data
        elif begun is not None or isinstance(frame, ContinuationFrame):
            raise ProtocolError("headers are not continued as they were begun")
        else:
            return frame
        self._size += size  # with the frames' heads: empty ones have no end, too
        if self._size > _MOST_HEADERS:
            raise ProtocolError("headers have no end", ENHANCE_YOUR_CALM)
        whole = "END_HEADERS" in frame.flags
        self._begun = None if whole else begun
        return begun if whole else None
