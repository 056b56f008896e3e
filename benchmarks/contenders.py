"""Who is measured. Each contender makes a worker for a name: ``await worker(n)`` locks it n times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import redis
import redis.asyncio

import aiodlock

Worker = Callable[[int], Awaitable[None]]
MakeWorker = Callable[[str], Worker]
Contender = Callable[[str], AbstractAsyncContextManager[MakeWorker]]


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[MakeWorker]:
    """Two round trips of ``return 1`` on the wire that aiodlock uses: the limit."""
    async with aiodlock.Client(url) as client:
        backend: Any = client._use().backend
        wire = await backend._link.wait_up()
        sha = await wire.send("SCRIPT", "LOAD", "return 1")

        def worker_for(_: str) -> Worker:
            async def work(count: int) -> None:
                for _ in range(count):
                    await wire.send("EVALSHA", sha, "0")
                    await wire.send("EVALSHA", sha, "0")

            return work

        yield worker_for


@asynccontextmanager
async def _ours(url: str, **options: Any) -> AsyncIterator[MakeWorker]:
    async with aiodlock.Client(url) as client:

        def worker_for(name: str) -> Worker:
            lock = client.lock(name, **options)

            async def work(count: int) -> None:
                for _ in range(count):
                    async with lock:
                        pass

            return work

        yield worker_for


def ours(url: str) -> AbstractAsyncContextManager[MakeWorker]:
    """The default: the release is confirmed."""
    return _ours(url)


def ours_unconfirmed(url: str) -> AbstractAsyncContextManager[MakeWorker]:
    """``confirm_release=False``: one awaited round trip."""
    return _ours(url, confirm_release=False)


@asynccontextmanager
async def redis_py(url: str) -> AsyncIterator[MakeWorker]:
    async with redis.asyncio.Redis.from_url(url) as client:

        def worker_for(name: str) -> Worker:
            async def work(count: int) -> None:
                lock = client.lock(f"redis-py:{name}", timeout=30)
                for _ in range(count):
                    async with lock:
                        pass

            return work

        yield worker_for


@asynccontextmanager
async def redis_fifo_lock(url: str) -> AsyncIterator[MakeWorker]:
    from redis_fifo_lock import FifoLock  # type: ignore[import-untyped, unused-ignore]

    async with redis.asyncio.Redis.from_url(url) as client:

        def worker_for(name: str) -> Worker:
            lock = FifoLock(client, f"fifo-{name}")

            async def work(count: int) -> None:
                for _ in range(count):
                    async with lock.hold():
                        pass

            return work

        yield worker_for


@asynccontextmanager
async def pottery(url: str) -> AsyncIterator[MakeWorker]:
    from pottery import AIORedlock

    async with redis.asyncio.Redis.from_url(url) as client:

        def worker_for(name: str) -> Worker:
            async def work(count: int) -> None:
                for _ in range(count):
                    lock = AIORedlock(key=name, masters={client}, auto_release_time=30)
                    async with lock:
                        pass

            return work

        yield worker_for


@asynccontextmanager
async def python_redis_lock(url: str) -> AsyncIterator[MakeWorker]:
    """Synchronous: a thread for each worker."""
    import redis_lock  # type: ignore[import-untyped, unused-ignore]

    with redis.Redis.from_url(url) as client:

        def worker_for(name: str) -> Worker:
            def block(count: int) -> None:
                for _ in range(count):
                    with redis_lock.Lock(client, name, expire=30):
                        pass

            async def work(count: int) -> None:
                await asyncio.to_thread(block, count)

            return work

        yield worker_for


OURS: dict[str, Contender] = {
    "aiodlock": ours,
    "aiodlock, confirm_release=False": ours_unconfirmed,
}
PEERS: dict[str, Contender] = {
    "redis-py Lock": redis_py,
    "redis-fifo-lock": redis_fifo_lock,
    "pottery AIORedlock": pottery,
    "python-redis-lock (threads)": python_redis_lock,
}
LIMIT: dict[str, Contender] = {"two raw EVALSHA": raw}
