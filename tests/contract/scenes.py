"""What the contract tests do again and again: wait for a state, queue a task, hold in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiodlock

PATIENCE = 10.0


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str = "the state") -> None:
    """Look again and again until the condition is true; fail after a while."""
    give_up_at = asyncio.get_running_loop().time() + PATIENCE
    while True:
        result = condition()
        if not isinstance(result, bool):
            result = await result
        if result:
            return
        assert asyncio.get_running_loop().time() < give_up_at, f"{what} never came"
        await asyncio.sleep(0.005)


async def until_free(client: aiodlock.Client, name: str) -> None:
    """Wait until nobody holds the name or waits for it."""

    async def free() -> bool:
        info = await client.inspect(name)
        return not info.holders and not info.waiters

    await until(free, f"{name!r} being free")


async def until_waiting(client: aiodlock.Client, name: str, number: int = 1) -> None:
    """Wait until that many requests are queued for the name."""

    async def queued() -> bool:
        return len((await client.inspect(name)).waiters) == number

    await until(queued, f"{number} waiting for {name!r}")


@asynccontextmanager
async def held_elsewhere(
    lock: aiodlock.Lock | aiodlock.Semaphore,
) -> AsyncIterator[aiodlock.Lease]:
    """Hold the lock in another task for as long as the block lasts."""
    held: asyncio.Future[aiodlock.Lease] = asyncio.get_running_loop().create_future()
    enough = asyncio.Event()

    async def hold() -> None:
        try:
            async with lock as lease:
                held.set_result(lease)
                await enough.wait()
        except BaseException as error:
            if not held.done():
                held.set_exception(error)
            raise

    task = asyncio.create_task(hold())
    try:
        yield await held
    finally:
        enough.set()
        await task


async def cancelled(task: asyncio.Task[object]) -> None:
    """Cancel the task and wait until it is over."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def is_held(lease: aiodlock.Lease) -> bool:
    """Ask anew: a type checker believes that a property keeps the value it was asserted to have."""
    return lease.held
