"""Messages that are put together from packed pieces are those that hiredis packs."""

from __future__ import annotations

import hiredis
import pytest

from aiodlock._model import StoreRequest, Terms
from aiodlock.backends.redis.calls import Calls, ClientChannel
from aiodlock.backends.redis.keys import base_of, keys_of, name_of
from aiodlock.backends.redis.packing import pack_extend
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE
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


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_acquire(calls: Calls, name: str, wait: bool) -> None:
    for request in _requests(name) * 2:
        names, arguments = calls._acquiring(request, wait)
        whole = ("EVALSHA", ACQUIRE.sha, ACQUIRE.number_of_keys, *names, *arguments)
        packed = calls._packing.acquire(request, wait, calls._acquiring)
        assert packed == hiredis.pack_command(whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_leave(calls: Calls, name: str, late: bool, lost: bool) -> None:
    for request in _requests(name) * 2:
        names, arguments = calls._leaving(request, late, lost)
        whole = ("EVALSHA", LEAVE.sha, LEAVE.number_of_keys, *names, *arguments)
        packed = calls._packing.leave(request, late, lost, calls._leaving)
        assert packed == hiredis.pack_command(whole)  # type: ignore[arg-type]


def test_pieces_are_kept_for_a_bounded_number_of_names(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.redis.packing._MOST_PACKED", 10)
    for number in range(100):
        for request in _requests(f"name {number}"):
            calls._packing.acquire(request, True, calls._acquiring)
            calls._packing.leave(request, False, False, calls._leaving)
    assert len(calls._packing._acquires) <= 10
    assert len(calls._packing._leaves) <= 10


@pytest.mark.parametrize("length", [0.05, 10.0, 86_400.0])
@pytest.mark.parametrize("name", NAMES)
def test_extend(calls: Calls, name: str, length: float) -> None:
    for request in _requests(name):
        names, arguments = calls._extending(request, length)
        whole = ("EVALSHA", EXTEND.sha, EXTEND.number_of_keys, *names, *arguments)
        base, speaking = names[0].removesuffix(":state"), arguments[3:]
        packed = pack_extend(base, request, round(length * 1000), speaking)
        assert packed == hiredis.pack_command(whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_base_is_what_all_keys_of_a_name_begin_with(name: str) -> None:
    keys = keys_of("p", "lock", name)
    assert base_of("p", "lock", name) == keys.base
    assert all(key.startswith(f"{keys.base}:") for key in keys)
    assert name_of(keys.state) == ("lock", name)
