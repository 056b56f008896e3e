"""Messages that are templates with holes are, when these are filled, those that hiredis packs."""

from __future__ import annotations

import hiredis
import pytest

from aiodlock._model import ENDED, RAN_OUT, StoreRequest, Terms
from aiodlock.backends.redis.calls import Calls, ClientChannel
from aiodlock.backends.redis.keys import base_of, keys_of, name_of
from aiodlock.backends.redis.messages import Call
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE, Script
from aiodlock.backends.redis.server import Server
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.redis.source import Source

NAMES = ["order:42", "ключ", "{}\r\n$3\r\n", "\0", "%", "🔒" * 128]


@pytest.fixture
def calls() -> Calls:
    settings = Settings("p", token_retention=60.0, unavailable_after=30.0)
    server = Server(Source.from_url("redis://localhost:1"), settings, "label")
    return Calls(server, ClientChannel(server.to_clients))


def _requests(name: str) -> list[StoreRequest]:
    return [
        StoreRequest(
            id, Terms("lock", name, "exclusive", 0, ttl, 10.0, delay, 0.0, None, True), owner
        )
        for id, owner in [("host-1-a-9", "thost-1-a-9"), ("host-1-a-10", "u%C3%A4" * 60)]
        for ttl, delay in [(30.0, 0.0), (1.5, 2.0)]
    ]


def _words(packed: bytes, script: Script) -> list[bytes]:
    """Read the words of a call; the sizes in front of them are right."""
    reader = hiredis.Reader()
    reader.feed(packed)
    words: list[bytes] = reader.gets()
    assert reader.gets() is False, "there is no more of it"
    assert words[:2] == [b"EVALSHA", script.sha]
    assert packed == hiredis.pack_command(tuple(words))  # type: ignore[arg-type]
    return words


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_acquire(calls: Calls, name: str, wait: bool) -> None:
    for request in _requests(name) * 2:
        keys, terms = keys_of("p", "lock", name), request.terms
        whole = Call.of(
            ACQUIRE,
            (*keys[:4], keys.marker + request.id),
            (
                *(request.id, "x", request.owner),
                *(round(1000 * length) for length in (terms.ttl, 10.0, terms.lock_delay)),
                *("label", "p:2:client:", 60000, "PUBLISH", "wait" if wait else "nowait", "", ""),
            ),
        )
        packed = calls.messages.acquire(request, wait)
        _words(packed, ACQUIRE)
        assert packed == whole.packed


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_leave(calls: Calls, name: str, late: bool, lost: bool) -> None:
    for request in _requests(name) * 2:
        keys = keys_of("p", "lock", name)
        request.end = RAN_OUT if lost else ENDED
        whole = Call.of(
            LEAVE,
            (*keys[:4], keys.marker + request.id, keys.broken),
            (
                *(request.id, "p:2:client:", 60000, "PUBLISH"),
                60000 if late else 0,
                request.end.word,
            ),
        )
        packed = calls.messages.leave(request, late)
        _words(packed, LEAVE)
        assert packed == whole.packed


def test_templates_are_kept_for_a_bounded_number_of_names(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.redis.messages._MOST_TEMPLATES", 10)
    for number in range(100):
        for request in _requests(f"name {number}"):
            calls.messages.acquire(request, True)
            calls.messages.leave(request, False)
    assert len(calls.messages._acquires) <= 10
    assert len(calls.messages._leaves) <= 10


@pytest.mark.parametrize("length", [0.05, 10.0, 86_400.0])
@pytest.mark.parametrize("name", NAMES)
def test_extend(calls: Calls, name: str, length: float) -> None:
    for request in _requests(name):
        whole = calls.messages._extend_by_word(request, length)
        packed = calls.messages.extend(request, length)
        _words(packed, EXTEND)
        assert packed == whole.packed


@pytest.mark.parametrize("script", [ACQUIRE, EXTEND, LEAVE])
def test_call_with_the_source_says_the_same(script: Script) -> None:
    call = Call.of(script, ("key", "order:ä"), ("one", b"\r\n$7\r\nEVALSHA\r\n", 3))
    reader = hiredis.Reader()
    reader.feed(call.with_source)
    words = reader.gets()
    assert reader.gets() is False
    assert words[:2] == [b"EVAL", script.source]
    assert words[2:] == _words(call.packed, script)[2:]


@pytest.mark.parametrize("name", NAMES)
def test_base_is_what_all_keys_of_a_name_begin_with(name: str) -> None:
    keys = keys_of("p", "lock", name)
    assert base_of("p", "lock", name) == keys.base
    assert all(key.startswith(f"{keys.base}:") for key in keys)
    assert name_of(keys.state) == ("lock", name)
