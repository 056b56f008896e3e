"""The messages written by hand are those that protobuf's own compiler makes of the same fields."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodlock.backends.etcd import messages
from aiodlock.backends.etcd.messages import Malformed, Message

pytest.importorskip("grpc_tools")

_INT64 = st.integers(-(2**63), 2**63 - 1)
_KINDS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "bytes": st.binary(max_size=300),
    "text": st.text(max_size=40),
}
#: An enumeration's number, in etcd's files.
_SMALL = {"result", "target", "type"}
_UNSIGNED = {"cluster_id", "leader", "raft_term"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile ``v3.proto``."""
    directory = tmp_path_factory.mktemp("protobuf")
    source = Path(__file__).parent
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            *(f"-I{source}", f"--python_out={directory}", "v3.proto"),
        ],
        check=True,
    )
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module("v3_pb2")
    finally:
        sys.path.remove(str(directory))


def _some(cls: type[Message], depth: int = 3) -> st.SearchStrategy[Message]:
    """Return messages of a class. Of a ``oneof`` at most one member is set, as protobuf has it."""
    given_fields: dict[str, st.SearchStrategy[Any]] = {}
    members: list[str] = []
    for f in fields(cls):  # type: ignore[arg-type]
        kind = f.metadata["kind"]
        inner: st.SearchStrategy[Any]
        if kind == "message":
            if depth == 0:
                continue
            inner = _some(messages._TYPES[f.metadata["of"]], depth - 1)
        elif kind == "int":
            inner = st.integers(0, 2) if f.name in _SMALL else _INT64
            inner = st.integers(0, 2**63 - 1) if f.name in _UNSIGNED else inner
        else:
            inner = _KINDS[kind]
        if f.metadata["repeated"]:
            given_fields[f.name] = st.lists(inner, max_size=3)
        elif f.default is None and f.name not in ("header", "kv"):
            members.append(f.name)
            given_fields[f.name] = inner
        else:
            given_fields[f.name] = inner
    if not members:
        return st.builds(cls, **given_fields)
    plain = {name: one for name, one in given_fields.items() if name not in members}
    return st.one_of(
        st.builds(cls, **plain),
        *(st.builds(cls, **plain, **{name: given_fields[name]}) for name in members),
    )


@pytest.mark.parametrize("name", sorted(messages._TYPES.keys() - {"Message"}))
def test_message_is_what_protobuf_makes_of_it(generated: Any, name: str) -> None:
    cls = messages._TYPES[name]

    @settings(max_examples=40)
    @given(_some(cls))
    def check(message: Message) -> None:
        theirs = getattr(generated, name).FromString(message.encode())
        assert theirs.SerializeToString(deterministic=True) == message.encode()
        assert cls.decode(theirs.SerializeToString()) == message

    check()


def test_fields_of_a_later_version_are_skipped(generated: Any) -> None:
    status = generated.StatusResponse(version="3", raft_index=2**64 - 1, leader=7)
    known = messages.StatusResponse(version="3", leader=7)
    assert messages.StatusResponse.decode(status.SerializeToString()) == known
    # Field 99, in each of the four forms.
    for unknown in (
        b"\x98\x06\x05",
        b"\x99\x06" + bytes(8),
        b"\x9a\x06\x02hi",
        b"\x9d\x06" + bytes(4),
    ):
        assert messages.Header.decode(unknown + b"\x18\x05") == messages.Header(revision=5)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_bytes_that_are_no_message_raise_malformed_alone(data: bytes) -> None:
    for cls in (messages.TxnResponse, messages.WatchResponse, messages.LeaseTimeToLiveResponse):
        try:
            cls.decode(data)
        except Malformed:
            pass
