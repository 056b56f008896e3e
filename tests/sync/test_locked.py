"""``@client.locked`` for functions that are not async."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
