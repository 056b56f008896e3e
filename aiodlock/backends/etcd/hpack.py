"""HPACK (RFC 7541): the headers of HTTP/2. Pure: no I/O.

What is sent is written out, with names from the static table at the most: a peer has nothing to remember
of it. What is received may use all there is, because the server chooses.
"""

from __future__ import annotations

from collections import deque

from .hpack_tables import BY_LENGTH, STATIC

Header = tuple[bytes, bytes]

#: What one header costs in a table beside its bytes.
_OVERHEAD = 32
#: A number may take so many bytes after the first one.
_LONGEST_NUMBER = 5
_END_OF_TEXT = 256
_SHORTEST_CODE, _LONGEST_CODE = 5, 30
#: All headers of one message together, as the tables count them.
_MOST = 1 << 18

#: "The table of what was sent has no room": true whatever the peer allows, so it is said once.
NO_TABLE = b"\x20"


class MalformedHeaders(ValueError):
    """The bytes are no headers. Nothing that follows on the connection can be read either."""


# -- writing ---------------------------------------------------------------------------------------


def encode(headers: list[Header], secret: frozenset[bytes] = frozenset()) -> bytes:
    """Return the headers as bytes.

    :param secret: names whose values no proxy may remember.
    """
    out = bytearray()
    for name, value in headers:
        if (whole := _STATIC_AT.get((name, value))) is not None:
            _put_number(out, 0x80, 7, whole)
            continue
        first = 0x10 if name in secret else 0x00
        index = _STATIC_NAMES.get(name, 0)
        _put_number(out, first, 4, index)
        if not index:
            _put_text(out, name)
        _put_text(out, value)
    return bytes(out)


def _put_number(out: bytearray, first: int, bits: int, number: int) -> None:
    most = (1 << bits) - 1
    if number < most:
        out.append(first | number)
        return
    out.append(first | most)
    number -= most
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _put_text(out: bytearray, text: bytes) -> None:
    _put_number(out, 0x00, 7, len(text))
    out += text


# -- reading ---------------------------------------------------------------------------------------


class Decoder:
    """What the peer's headers mean.

    Mutable state: ``_table`` (the newest first), ``_used`` and ``_size`` (in bytes, as tables count
    them), ``_seen`` (blocks that were read since the table changed last, and what they said).
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._size = most
        self._used = 0
        self._table: deque[Header] = deque()
        self._seen: dict[bytes, list[Header]] = {}

    def decode(self, block: bytes) -> list[Header]:
        """Return the headers of a block.

        :raises MalformedHeaders: if it is none.
        """
        # A server answers each call with the same few bytes.
        if (known := self._seen.get(block)) is not None:
            return known
        found: list[Header] = []
        at, end, size, same = 0, len(block), 0, True
        while at < end:
            first = block[at]
            if first & 0x80:
                index, at = _number(block, at, 7)
                header = self._at(index)
            elif first & 0xE0 == 0x20:
                if found:
                    raise MalformedHeaders("the table's size changes within headers")
                size_now, at = _number(block, at, 5)
                self._resize(size_now)
                same = False
                continue
            else:
                remembered = bool(first & 0x40)
                index, at = _number(block, at, 6 if remembered else 4)
                if index:
                    name = self._at(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                header = name, value
                if remembered:
                    self._add(header)
                    same = False
            size += len(header[0]) + len(header[1]) + _OVERHEAD
            if size > _MOST:
                raise MalformedHeaders(f"more than {_MOST} bytes of headers")
            found.append(header)
        if not same:
            self._seen.clear()
        elif len(self._seen) < 16:
            self._seen[block] = found
        return found

    def _at(self, index: int) -> Header:
        if 1 <= index <= len(STATIC):
            return STATIC[index - 1]
        try:
            if index:
                return self._table[index - len(STATIC) - 1]
        except IndexError:
            pass
        raise MalformedHeaders(f"nothing has the number {index}")

    def _add(self, header: Header) -> None:
        self._used += len(header[0]) + len(header[1]) + _OVERHEAD
        self._table.appendleft(header)
        self._evict()

    def _resize(self, size: int) -> None:
        if size > self._most:
            raise MalformedHeaders(f"a table of {size} bytes, and {self._most} are allowed")
        self._size = size
        self._evict()

    def _evict(self) -> None:
        while self._used > self._size:
            name, value = self._table.pop()
            self._used -= len(name) + len(value) + _OVERHEAD


def _number(data: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    number = data[at] & most
    at += 1
    if number < most:
        return number, at
    for shift in range(0, 7 * _LONGEST_NUMBER, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise MalformedHeaders("a number has no end")


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(data):
        raise MalformedHeaders("a text is missing")
    coded = data[at] & 0x80
    size, at = _number(data, at, 7)
    text = data[at : at + size]
    if len(text) < size:
        raise MalformedHeaders("a text has no end")
    return (_from_huffman(text) if coded else text), at + size


def _from_huffman(data: bytes) -> bytes:
    out = bytearray()
    code = length = 0
    for byte in data:
        for bit in (7, 6, 5, 4, 3, 2, 1, 0):
            code = code << 1 | byte >> bit & 1
            length += 1
            if length < _SHORTEST_CODE:
                continue
            symbol = _SYMBOLS.get((length, code))
            if symbol is not None:
                if symbol == _END_OF_TEXT:
                    raise MalformedHeaders("a text is said to end before its end")
                out.append(symbol)
                code = length = 0
            elif length >= _LONGEST_CODE:
                raise MalformedHeaders("not a code of Huffman's")
    # What is left of the last byte: the beginning of the code that ends a text, which is ones.
    if length > 7 or code != (1 << length) - 1:
        raise MalformedHeaders("a text is not filled up with ones")
    return bytes(out)


# -- tables ----------------------------------------------------------------------------------------


def _codes() -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    code, before = 0, min(BY_LENGTH)
    for length, symbols in sorted(BY_LENGTH.items()):
        code <<= length - before
        before = length
        for symbol in symbols:
            found[length, code] = symbol
            code += 1
    return found


#: The symbol of each code, which is a length and a number.
_SYMBOLS: dict[tuple[int, int], int] = _codes()
#: The number of each header with a value in the static table (appendix A), and the first of each name.
_STATIC_AT: dict[Header, int] = {header: at for at, header in enumerate(STATIC, 1)}
_STATIC_NAMES: dict[bytes, int] = {name: at for at, (name, _) in reversed([*enumerate(STATIC, 1)])}
