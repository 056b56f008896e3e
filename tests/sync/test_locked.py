"""``@client.locked`` for functions that are not async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiodlock import sync

# A script takes fakeredis too long for sixty threads.
pytestmark = pytest.mark.stores("memory", "redis62", "redis70", "valkey9")


def test_calls_from_threads_exclude_each_other(threads: sync.Client) -> None:
    inside, most = 0, 0

    @threads.locked("order:{order_id}", timeout=30)
    def pay(order_id: int) -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        (info,) = threads.locks()
        inside -= 1
        return info.name

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(pay, [7] * 24)) == {"order:7"}
    assert most == 1
    assert pay.__name__ == "pay"


def test_methods_and_recursion(threads: sync.Client) -> None:
    class Shop:
        @threads.locked("stock:{item}")
        def take(self, item: str, deep: int = 0) -> int:
            return self.take(item, deep - 1) + 1 if deep else 0

    assert Shop().take("a", 3) == 3
    assert not threads.lock("stock:a").locked()


def test_what_is_refused(threads: sync.Client) -> None:
    async def work() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    def takes(a: Any) -> None: ...

    with pytest.raises(TypeError, match=r"aiodlock\.Client"):
        threads.locked("x")(work)
    with pytest.raises(TypeError, match="generator"):
        threads.locked("x")(generator)
    with pytest.raises(ValueError, match="not a parameter"):
        threads.locked("{b}")(takes)
    with pytest.raises(TypeError, match="timeout="):
        threads.locked("x", blocking_timeout=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="must be a str"):
        threads.locked("{a}")(takes)(True)


async def _coroutine() -> None: ...


async def _numbers() -> AsyncIterator[int]:
    yield 1


@contextmanager
def _manager() -> Iterator[None]:
    yield


@asynccontextmanager
async def _async_manager() -> AsyncIterator[None]:
    yield


class _Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


LATER: dict[str, Callable[[], Any]] = {
    "coroutine": _coroutine,
    "generator": lambda: (number for number in (1, 2)),
    "async generator": _numbers,
    "manager": _manager,
    "async manager": _async_manager,
    "future": Future,
    "awaitable": _Awaitable,
}


@pytest.mark.parametrize("what", LATER)
def test_what_would_run_when_the_lock_is_released_already_is_refused(
    threads: sync.Client, what: str
) -> None:
    made = LATER[what]

    @functools.wraps(made)
    def job() -> Any:
        returned.append(made())
        return returned[-1]

    del job.__wrapped__
    returned: list[Any] = []
    for decorate in (threads.locked("x"), threads.once_per("x", keep=60)):
        with pytest.raises(TypeError, match="released already"):
            decorate(job)()
        assert not threads.lock("x").locked()
    assert not threads.forget("x")
    if what == "coroutine":
        assert all(inspect.getcoroutinestate(one) == "CORO_CLOSED" for one in returned)
    if what == "generator":
        assert all(inspect.getgeneratorstate(one) == "GEN_CLOSED" for one in returned)
    if what == "future":
        assert all(one.cancelled() for one in returned)


def test_what_is_a_value_is_returned(threads: sync.Client, tmp_path: Path) -> None:
    opened = threads.locked("x")(lambda: (tmp_path / "x").open("w"))()
    opened.close()
    assert threads.locked("x")(lambda: [1])() == [1]
