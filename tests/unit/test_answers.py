"""Errors that say what to do instead."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any, get_origin

import pytest
import redis

import aiodlock
from aiodlock import sync
from aiodlock._options import (
    CLIENTS_ELSEWHERE,
    CLOSING_ELSEWHERE,
    LEASES_ELSEWHERE,
    LOCKS_ELSEWHERE,
)

client = aiodlock.Client("memory://")
threads = sync.Client("memory://")


@pytest.mark.parametrize(
    ("keyword", "answer"),
    [
        ("blocking", "acquire_nowait"),
        ("blocking_timeout", "timeout="),
        ("sleep", "notified"),
        ("thread_local", "owner="),
        ("raise_on_release_error", "LockLost"),
        ("expire", "ttl="),
        ("lock_timeout", "ttl="),
        ("tll", "did you mean 'ttl'"),
        ("nonsense", "unexpected keyword argument 'nonsense'"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        client.lock,
        client.rwlock,
        client.election,
        client.multilock,
        client.locked,
        lambda name, **options: client.semaphore(name, 2, **options),
        threads.lock,
        threads.rwlock,
        threads.election,
        threads.multilock,
        threads.locked,
        lambda name, **options: threads.semaphore(name, 2, **options),
    ],
)
def test_keywords_of_other_libraries_are_answered(
    call: Callable[..., Any], keyword: str, answer: str
) -> None:
    with pytest.raises(TypeError, match=answer) as error:
        call("x", **{keyword: 1})
    assert repr(keyword) in str(error.value)


async def test_acquire_answers_too() -> None:
    calls: list[Callable[..., Any]] = [
        client.lock("x").acquire,
        client.multilock("x").acquire,
        client.semaphore("x", 2).acquire,
    ]
    for call in calls:
        with pytest.raises(TypeError, match="acquire_nowait"):
            await call(blocking=False)
    calls = [threads.lock("x").acquire, threads.multilock("x").acquire]
    for call in calls:
        with pytest.raises(TypeError, match="timeout= is how long"):
            call(blocking_timeout=5)


@pytest.mark.parametrize(
    ("attribute", "answer"),
    [(name, re.escape(answer)) for name, answer in LOCKS_ELSEWHERE.items()],
)
@pytest.mark.parametrize("locks", [client, threads])
def test_a_method_that_the_lease_has_is_named(
    locks: aiodlock.Client | sync.Client, attribute: str, answer: str
) -> None:
    for lock in (locks.lock("x"), locks.rwlock("x").read, locks.semaphore("x", 2)):
        with pytest.raises(AttributeError, match=answer):
            getattr(lock, attribute)
        assert not hasattr(lock, "nonsense")
        assert attribute not in dir(lock)


@pytest.mark.parametrize(
    ("kind", "elsewhere"),
    [
        (aiodlock.Client, CLIENTS_ELSEWHERE | CLOSING_ELSEWHERE),
        (sync.Client, CLIENTS_ELSEWHERE),
        (aiodlock.Lease, LEASES_ELSEWHERE),
        (sync.Lease, LEASES_ELSEWHERE),
    ],
)
def test_attributes_of_other_clients_and_leases_are_answered(
    kind: Any, elsewhere: dict[str, str]
) -> None:
    for attribute, answer in elsewhere.items():
        with pytest.raises(AttributeError, match=re.escape(answer)) as error:
            getattr(kind, attribute)
        assert f"'{kind.__name__}' object has no attribute {attribute!r}" in str(error.value)


async def test_acquire_without_a_keyword_is_answered() -> None:
    for call in (client.lock("x").acquire, client.multilock("x").acquire):
        with pytest.raises(TypeError, match="keywords only, and got False: acquire_nowait"):
            await call(False)  # type: ignore[arg-type]
    for of_a_thread in (threads.lock("x").acquire, threads.multilock("x").acquire):
        with pytest.raises(TypeError, match=r"keywords only, and got True: .*timeout=5"):
            of_a_thread(True)  # type: ignore[arg-type]


async def test_extend_answers_too() -> None:
    def in_a_thread() -> None:
        with threads.lock("x") as lease, pytest.raises(TypeError, match="sets the time left"):
            lease.extend(5, additional_time=5)  # type: ignore[arg-type]

    async with client, client.lock("x") as lease:
        with pytest.raises(TypeError, match="leave it out"):
            await lease.extend(5, replace_ttl=True)  # type: ignore[arg-type]
    await asyncio.to_thread(in_a_thread)


def test_a_client_of_redis_py_that_blocks_is_named() -> None:
    blocking = redis.Redis()
    for source in (blocking, [blocking] * 3):
        with pytest.raises(TypeError, match=r"redis\.client\.Redis.*aiodlock\.sync"):
            aiodlock.Client(source)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not redis\.connection\.ConnectionPool"):
        aiodlock.Client(blocking.connection_pool)  # type: ignore[arg-type]
    assert "localhost:6379" in repr(sync.Client(blocking))


async def test_a_client_says_what_it_is_doing() -> None:
    mine = aiodlock.Client("memory://")
    assert repr(mine).endswith(" closed>")
    opening = asyncio.create_task(mine.__aenter__())
    await asyncio.sleep(0)
    assert repr(mine).endswith(" opening>")
    with pytest.raises(RuntimeError, match="being entered by another task"):
        await mine.__aenter__()
    await opening
    assert repr(mine).endswith(" open>")
    with pytest.raises(RuntimeError, match="open> is entered already"):
        await mine.__aenter__()
    closing = asyncio.create_task(mine.__aexit__(None, None, None))
    await asyncio.sleep(0)
    assert repr(mine).endswith(" closing>")
    with pytest.raises(RuntimeError, match="still being left"):
        await mine.__aenter__()
    await closing
    assert repr(mine).endswith(" closed>")


def test_the_options_of_threads_are_those_of_tasks() -> None:
    from aiodlock.sync import _options as typed

    def options(call: Callable[..., Any]) -> set[str]:
        parameters = inspect.signature(call).parameters.values()
        return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}

    def typed_in(kind: object) -> set[str]:
        return set((get_origin(kind) or kind).__annotations__)

    assert options(aiodlock.Client.__init__) == typed_in(typed.ClientOptions)
    assert options(aiodlock.Client.lock) == typed_in(typed.LockOptions)
    without = {"owner", "linger"}
    assert options(aiodlock.Client.lock) - without == typed_in(typed.OwnerlessOptions)
    without = {"timeout"}
    assert options(aiodlock.Client.lock) - without == typed_in(typed.UnnamedOptions)
