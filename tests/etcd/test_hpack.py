"""Headers as another implementation writes and reads them."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiodlock.backends.etcd.hpack import NO_TABLE, Decoder, MalformedHeaders, encode

_NAMES = st.sampled_from([b":status", b"content-type", b"grpc-status", b"grpc-message", b"x", b""])
_HEADERS = st.lists(st.tuples(_NAMES, st.binary(max_size=200)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(
        st.tuples(_HEADERS, st.booleans(), st.sampled_from([None, 0, 60, 500, 4096])), max_size=8
    )
)
@example(messages=[([(b"x", bytes(range(256)))], True, None)])
@example(messages=[([(b"x", b"y")], False, None), ([(b"x", b"y")], False, 0), ([], False, 4096)])
def test_headers_of_another_encoder_are_read(
    messages: list[tuple[list[tuple[bytes, bytes]], bool, int | None]],
) -> None:
    theirs, ours = hpack.Encoder(), Decoder()
    for headers, huffman, size in messages:
        if size is not None:
            theirs.header_table_size = size
        # Twice: the second time the table knows them.
        for _ in range(2):
            assert ours.decode(theirs.encode(headers, huffman=huffman)) == headers


@settings(max_examples=60, deadline=None)
@given(headers=_HEADERS)
def test_headers_are_read_by_another_decoder(headers: list[tuple[bytes, bytes]]) -> None:
    theirs = hpack.Decoder()
    theirs.max_allowed_table_size = 0
    block = NO_TABLE + encode(headers)
    assert [(bytes(n), bytes(v)) for n, v in theirs.decode(block, raw=True)] == headers


def test_token_is_kept_by_no_proxy() -> None:
    block = encode([(b"token", b"secret"), (b"te", b"trailers")], frozenset([b"token"]))
    first, second = hpack.Decoder().decode(block)
    assert isinstance(first, hpack.NeverIndexedHeaderTuple)
    assert not isinstance(second, hpack.NeverIndexedHeaderTuple)


@settings(max_examples=300, deadline=None)
@given(block=st.binary(max_size=60))
@example(block=b"\xff\xff\xff\xff\xff\xff\xff\xff")
@example(block=b"\x00\x81\xff\x01y")
def test_other_bytes_are_refused_as_another_decoder_refuses_them(block: bytes) -> None:
    theirs = hpack.Decoder()
    theirs.max_allowed_table_size = 4096
    try:
        expected = [(bytes(n), bytes(v)) for n, v in theirs.decode(block, raw=True)]
    except hpack.HPACKError:
        expected = None
    try:
        found = Decoder().decode(block)
    except MalformedHeaders:
        return  # it may be stricter
    assert found == expected


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (b"\x80", "number 0"),
        (b"\xbe", "number 62"),
        (b"\x00", "missing"),
        (b"\x00\x03ab", "no end"),
        (b"\x3f\xe2\x1f", "allowed"),
        (b"\x82\x20", "within"),
        (b"\x00\x81\x00\x00", "ones"),
        (b"\x00\x84\xff\xff\xff\xff\x00", "ends? "),
        (b"\xff\x80\x80\x80\x80\x80\x80", "no end"),
    ],
)
def test_what_is_wrong_with_a_block_is_told(block: bytes, text: str) -> None:
    with pytest.raises(MalformedHeaders, match=text):
        Decoder().decode(block)


def test_headers_without_end_are_refused() -> None:
    theirs = hpack.Encoder()
    theirs.header_table_size = 4096
    block = theirs.encode([(b"x", b"y" * 4000)])
    again = theirs.encode([(b"x", b"y" * 4000)])  # one byte
    decoder = Decoder()
    decoder.decode(block)
    with pytest.raises(MalformedHeaders, match="bytes of headers"):
        decoder.decode(again * 1000)
