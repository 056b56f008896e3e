"""Messages that are put together from packed pieces are those that hiredis packs."""

from __future__ import annotations

import hiredis
import pytest

from aiodlock._model import Request
from aiodlock.backends.redis.backend import RedisBackend
from aiodlock.backends.redis.keys import base_of, keys_of, name_of
from aiodlock.backends.redis.packing import pack_extend
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE
from aiodlock.backends.redis.source import Source

NAMES = ["order:42", "ключ", "{}\r\n$3\r\n", "\0", "%", "🔒" * 128]


@pytest.fixture
def backend() -> RedisBackend:
    source = Source.from_url("redis://localhost:1")
    return RedisBackend(source, prefix="p", token_retention=60.0, unavailable_after=30.0)


def _requests(name: str) -> list[Request]:
    return [
        Request(id, "lock", name, "exclusive", 0, owner, ttl, 10.0, delay)
        for id, owner in [("host-1-a-9", "thost-1-a-9"), ("host-1-a-10", "u%C3%A4" * 60)]
        for ttl, delay in [(30.0, 0.0), (1.5, 2.0)]
    ]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_acquire(backend: RedisBackend, name: str, wait: bool) -> None:
    for request in _requests(name) * 2:
        names, arguments = backend._acquiring(request, wait)
        whole = ("EVALSHA", ACQUIRE.sha, ACQUIRE.number_of_keys, *names, *arguments)
        packed = backend._packing.acquire(request, wait, backend._acquiring)
        assert packed == hiredis.pack_command(whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_leave(backend: RedisBackend, name: str, late: bool, lost: bool) -> None:
    for request in _requests(name) * 2:
        names, arguments = backend._leaving(request, late, lost)
        whole = ("EVALSHA", LEAVE.sha, LEAVE.number_of_keys, *names, *arguments)
        packed = backend._packing.leave(request, late, lost, backend._leaving)
        assert packed == hiredis.pack_command(whole)  # type: ignore[arg-type]


def test_pieces_are_kept_for_a_bounded_number_of_names(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock.backends.redis.packing._MOST_PACKED", 10)
    for number in range(100):
        for request in _requests(f"name {number}"):
            backend._packing.acquire(request, True, backend._acquiring)
            backend._packing.leave(request, False, False, backend._leaving)
    assert len(backend._packing._acquires) <= 10
    assert len(backend._packing._leaves) <= 10


@pytest.mark.parametrize("length", [0.05, 10.0, 86_400.0])
@pytest.mark.parametrize("name", NAMES)
def test_extend(backend: RedisBackend, name: str, length: float) -> None:
    for request in _requests(name):
        names, arguments = backend._extending(request, length)
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
