"""anyio's Lock and Semaphore: agronholm/anyio, tests/test_synchronization.py. In anyio's own scopes."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio.abc import TaskStatus

from aiodlock import Client, Lock, Semaphore, WouldBlock

from ..scenes import PATIENCE, soon, until, until_free, until_waiting
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)


@pytest.fixture(params=["lock", "semaphore"])
def one(request: pytest.FixtureRequest, client: Client) -> Lock | Semaphore:
    """Both are put through the same tests: a semaphore of one place excludes like a lock."""
    return client.lock("a") if request.param == "lock" else client.semaphore("a", 1)


async def _until_blocked(one: Lock | Semaphore, number: int) -> None:
    """As `wait_all_tasks_blocked`, which knows nothing of a server."""

    async def are_waiting() -> bool:
        info = await one.inspect()
        return len(info.waiters) == number

    await until(are_waiting, f"{number} waiting")


@pytest.mark.parametrize("how", ["async with", "acquire and release"])
async def test_second_comes_in_after_the_first(one: Lock | Semaphore, how: str) -> None:
    """TestLock and TestSemaphore: test_contextmanager, test_manual_acquire."""
    results: list[str] = []

    async def task() -> None:
        assert await one.locked()
        if how == "async with":
            async with one:
                results.append("2")
            return
        await one.acquire()
        try:
            results.append("2")
        finally:
            await one.release()

    async with anyio.create_task_group() as tasks:
        async with one:
            tasks.start_soon(task)
            await _until_blocked(one, 1)
            results.append("1")
    assert not await one.locked()
    assert results == ["1", "2"]


async def test_attempt_without_waiting_would_block(one: Lock | Semaphore) -> None:
    """TestLock and TestSemaphore: test_acquire_nowait, test_acquire_nowait_wouldblock."""

    async def attempt() -> None:
        with pytest.raises(WouldBlock):
            await one.acquire_nowait()

    await one.acquire_nowait()
    assert await one.locked()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attempt)
    await one.release()


@pytest.mark.parametrize("release_first", [False, True])
async def test_waiter_whose_scope_is_cancelled_never_comes_in(
    one: Lock | Semaphore, release_first: bool
) -> None:
    """TestLock and TestSemaphore: test_cancel_during_acquire, and test_cancel of old."""
    entered = False

    async def task(*, task_status: TaskStatus[None]) -> None:
        nonlocal entered
        task_status.started()
        async with one:
            entered = True
            await anyio.sleep(PATIENCE)

    lease = await one.acquire()
    async with anyio.create_task_group() as tasks:
        await tasks.start(task)
        await _until_blocked(one, 1)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            if release_first:
                await lease.release()
            else:
                await _until_blocked(one, 0)
                await lease.release()
    assert not entered
    assert not await one.locked()


async def test_waiting_tasks_are_counted(client: Client) -> None:
    """TestLock.test_statistics: inspect tells."""
    lock = client.lock("a")

    async def waiter() -> None:
        async with lock:
            pass

    async with anyio.create_task_group() as tasks:
        assert (await client.inspect("a")).holders == ()
        async with lock:
            assert len((await client.inspect("a")).holders) == 1
            for number in (1, 2):
                tasks.start_soon(waiter)
                await until_waiting(client, "a", number)
    info = await client.inspect("a")
    assert (info.holders, info.waiters) == ((), ())


async def test_cancelled_waiter_does_not_block_the_next(one: Lock | Semaphore) -> None:
    """TestLock and TestSemaphore: test_asyncio_deadlock."""

    async def acquire() -> None:
        async with one:
            await asyncio.sleep(0)

    first, second = asyncio.create_task(acquire()), asyncio.create_task(acquire())
    await asyncio.sleep(0)
    first.cancel()
    await soon(second)
    await asyncio.wait([first])
    assert not await one.locked()


async def test_place_that_is_released_to_a_waiter_is_not_snatched(client: Client) -> None:
    """TestSemaphore.test_acquire_race."""
    semaphore = client.semaphore("s", 1)
    async with anyio.create_task_group() as tasks:
        lease = await semaphore.acquire_nowait()
        leave = anyio.Event()

        async def wait() -> None:
            async with semaphore:
                await leave.wait()

        tasks.start_soon(wait)
        await _until_blocked(semaphore, 1)
        await lease.release()
        with pytest.raises(WouldBlock):
            await semaphore.acquire_nowait()
        leave.set()


async def test_places_are_a_property(client: Client) -> None:
    """TestSemaphore.test_max_value, TestCapacityLimiter.test_bad_init_type and test_bad_init_value."""
    assert client.semaphore("s", 2).limit == 2
    with pytest.raises(TypeError):
        client.semaphore("s", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        client.semaphore("s", 0)


def test_client_and_locks_are_made_outside_of_any_loop() -> None:
    """TestLock and TestSemaphore: test_instantiate_outside_event_loop."""
    client = Client("memory://")
    lock, semaphore = client.lock("a"), client.semaphore("a", 1)

    async def use() -> None:
        async with client, lock, semaphore:
            assert await lock.locked()

    for _ in range(2):
        asyncio.run(use())


@pytest.mark.parametrize("timeout", ["fail_after", "move_on_after"])
async def test_scope_with_a_deadline_ends_the_wait(client: Client, timeout: str) -> None:
    """TestLock.test_cancel, with a deadline instead of a call; the body's own deadline passes too."""
    lock = client.lock("a")

    async def wait() -> None:
        if timeout == "move_on_after":
            with anyio.move_on_after(0.1) as scope:
                await lock.acquire()
            assert scope.cancelled_caught
            return
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.1):
                await lock.acquire()

    async with lock:
        await asyncio.create_task(wait())
        assert (await client.inspect("a")).waiters == ()
    with anyio.move_on_after(0.1) as scope:
        async with lock:
            await anyio.sleep(PATIENCE)
    assert scope.cancelled_caught
    await until_free(client, "a")
