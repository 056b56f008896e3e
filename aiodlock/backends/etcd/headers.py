"""The headers of calls, as HPACK packs them."""

from __future__ import annotations

from hpack import Decoder, Encoder

from . import framing as f
from .exchange import Header

#: All headers of one message together, as HPACK counts them.
_MOST_HEADERS = 1 << 16


class Headers:
    """Those of one connection, in both directions.

    Mutable state, besides the server's table: ``_blocks`` (headers as bytes, by what they say), ``_read``
    (the other way round).
    """

    def __init__(self, scheme: str, authority: str) -> None:
        self.authority: str = authority
        self._scheme = scheme
        self._decoder = Decoder(_MOST_HEADERS)
        # It remembers nothing, so what it has written once can be sent again.
        self._encoder = Encoder()
        self._encoder.header_table_size = 0
        self._no_table = self._encoder.encode(())
        self._blocks: dict[tuple[object, ...], bytes] = {}
        self._read: dict[bytes, list[Header]] = {}

    def pack(self, path: str, within: float | None, metadata: tuple[tuple[str, str], ...]) -> bytes:
        """Return the headers of a call."""
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
                (":authority", self.authority),
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

    def frames(self, stream: int, block: bytes, largest: int) -> bytes:
        """Return a call's headers as frames, which data will follow."""
        if stream == 1:
            block = self._no_table + block
        out, kind = b"", f.HEADERS
        while len(block) > largest:
            out += f.frame(kind, 0, stream, block[:largest])
            block, kind = block[largest:], f.CONTINUATION
        return out + f.frame(kind, f.END_HEADERS, stream, block)

    def read(self, block: bytes) -> list[Header]:
        """Return what the bytes say. A server answers each call with the same few, of its table alone."""
        if (known := self._read.get(block)) is not None:
            return known
        headers = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, True)]
        if not all(0x80 < byte < 0xFF for byte in block):
            self._read.clear()  # the table may have changed
        elif len(self._read) < 16:
            self._read[block] = headers
        return headers
