"""asyncio's own Lock and Semaphore: python/cpython, Lib/test/test_asyncio/test_locks.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from aiodlock import Client, Lease, Lock, Semaphore, WouldBlock

from ..scenes import held_elsewhere, soon, until, until_free, until_waiting
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)


@pytest.fixture
def lock(client: Client) -> Lock:
    return client.lock("a")


def _has_entered(entered: list[int], number: int) -> bool:
    return entered == list(range(number))


async def _is_free(lock: Lock) -> bool:
    return not await lock.locked()


async def _until_semaphore_waits(client: Client, name: str, number: int) -> None:
    async def queued() -> bool:
        return len((await client._core.inspect("semaphore", name)).waiters) == number

    await until(queued, f"{number} waiting")


# -- Lock ------------------------------------------------------------------------------------------


async def test_result_of_acquire_is_true_and_need_not_be_kept(lock: Lock) -> None:
    """LockTests.test_lock, test_release_no_waiters: as locks are used whose acquire returns a bool."""
    assert await lock.acquire()  # type: ignore[truthy-bool]
    assert await lock.locked()
    await lock.release()
    assert not await lock.locked()
    assert await lock.acquire() is not None
    assert await lock.locked()
    await lock.release()
    if not await lock.acquire():  # type: ignore[truthy-bool]
        pytest.fail("not acquired")
    assert await lock.locked()
    await lock.release()
    await lock.acquire()
    assert await lock.locked()
    await lock.release()


async def test_variable_that_is_given_another_value_leaves_the_lock_with_its_task(
    lock: Lock,
) -> None:
    lease: Lease | None = await lock.acquire()
    assert lease is not None
    lease = None
    assert lease is None
    assert await lock.locked()
    await lock.release()
    assert await _is_free(lock)


async def test_only_async_with_enters_a_lock(lock: Lock) -> None:
    """LockTests.test_lock_by_with_statement: neither `with lock` nor `await lock`."""
    anything: Any = lock
    with pytest.raises(TypeError), anything:
        pass
    with pytest.raises(TypeError):
        await anything
    assert not await lock.locked()


async def test_block_holds_the_lock(lock: Lock) -> None:
    """LockTests.test_context_manager."""
    async with lock:
        assert await lock.locked()
    assert not await lock.locked()


async def test_waiters_get_in_one_by_one_in_order(client: Client, lock: Lock) -> None:
    """LockTests.test_acquire."""
    entered: list[int] = []
    may_go_on = [asyncio.Event() for _ in range(3)]

    async def enter(number: int) -> bool:
        if await lock.acquire():  # type: ignore[truthy-bool]
            entered.append(number)
            await may_go_on[number].wait()
            await lock.release()
        return True

    tasks = []
    async with lock:
        for number in range(2):
            tasks.append(asyncio.create_task(enter(number)))
            await until_waiting(client, "a", number + 1)
        assert entered == []
    await until(lambda: entered == [0])
    tasks.append(asyncio.create_task(enter(2)))
    await until_waiting(client, "a", 2)
    for number in range(3):
        await until(partial(_has_entered, entered, number + 1))
        may_go_on[number].set()
    assert await asyncio.gather(*tasks) == [True, True, True]


async def test_cancelled_waiter_leaves_the_queue(client: Client, lock: Lock) -> None:
    """LockTests.test_acquire_cancel."""
    async with held_elsewhere(lock):
        task = asyncio.create_task(lock.acquire())
        await until_waiting(client, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.inspect("a")).waiters == ()


@pytest.mark.parametrize("first", ["release", "cancel"])
async def test_release_and_cancellation_of_the_next_at_once_let_the_third_in(
    client: Client, lock: Lock, first: str
) -> None:
    """LockTests.test_cancel_race, test_cancel_release_race, test_finished_waiter_cancelled."""
    may_go_on = asyncio.Event()

    async def hold() -> None:
        async with lock:
            await may_go_on.wait()

    async def enter() -> None:
        async with lock:
            pass

    holder = asyncio.create_task(hold())
    await until(lock.locked)
    second = asyncio.create_task(enter())
    await until_waiting(client, "a")
    third = asyncio.create_task(enter())
    await until_waiting(client, "a", 2)
    if first == "release":
        may_go_on.set()
        await asyncio.sleep(0)
        second.cancel()
    else:
        second.cancel()
        may_go_on.set()
    await soon(asyncio.gather(holder, third))
    await asyncio.wait([second])
    await until_free(client, "a")


async def test_release_of_what_was_not_acquired_is_a_runtime_error(lock: Lock) -> None:
    """LockTests.test_release_not_acquired."""
    with pytest.raises(RuntimeError):
        await lock.release()


async def test_repr_names_the_class(lock: Lock, client: Client) -> None:
    """LockTests.test_repr, SemaphoreTests.test_repr: without I/O, so not whether it is locked."""
    assert repr(lock).startswith("<Lock 'a' exclusive ")
    assert repr(client.semaphore("a", 7)).startswith("<Semaphore 'a' limit=7 ")


@pytest.mark.parametrize("what", ["lock", "multilock"])
async def test_waiting_coroutine_that_is_closed_leaves_the_queue(
    client: Client, lock: Lock, what: str
) -> None:
    """Beside LockTests.test_acquire_cancel: as a task that is collected while it waits is closed."""
    waiting = (lock if what == "lock" else client.multilock("0", "a")).acquire()
    async with held_elsewhere(lock):
        driver = asyncio.ensure_future(_Steps(waiting))
        await until_waiting(client, "a")
        driver.cancel()
        await asyncio.wait([driver])
        waiting.close()
        await until_free(client, "0")
        await until(partial(_nobody_waits, client))


class _Steps:
    """Run a coroutine in the task that awaits this; a cancellation leaves it as it stands.

    What a future raises is thrown in here as well. The coroutine asks its future itself.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, object]) -> None:
        self._steps = coroutine.__await__()

    def __await__(self) -> Generator[Any, None, None]:
        for future in self._steps:
            with suppress(Exception):
                yield future


async def _nobody_waits(client: Client) -> bool:
    return not (await client.inspect("a")).waiters


# -- Semaphore -------------------------------------------------------------------------------------


@pytest.fixture
def one(client: Client) -> Semaphore:
    return client.semaphore("s", 1)


@pytest.mark.parametrize("limit", [-1, 0])
async def test_initial_value_below_one_is_a_value_error(client: Client, limit: int) -> None:
    """SemaphoreTests.test_semaphore_value; and 0, which nobody could ever acquire."""
    with pytest.raises(ValueError):
        client.semaphore("s", limit)


async def test_semaphore_is_locked_when_no_place_is_free(client: Client) -> None:
    """SemaphoreTests.test_semaphore, test_acquire: not as soon as somebody is inside."""
    semaphore = client.semaphore("s", 3)
    assert not await semaphore.locked()
    for _ in range(2):
        await semaphore.acquire()
        assert not await semaphore.locked()
    await semaphore.acquire()
    assert await semaphore.locked()
    with pytest.raises(WouldBlock):
        await semaphore.acquire_nowait()
    await semaphore.release()
    assert not await semaphore.locked()
    for _ in range(2):
        await semaphore.release()
    assert not await semaphore.locked()


async def test_one_gets_in_for_each_release(client: Client) -> None:
    """SemaphoreTests.test_acquire."""
    semaphore = client.semaphore("s", 3)
    leases = [await semaphore.acquire() for _ in range(3)]
    entered: list[int] = []
    everybody_may_go = asyncio.Event()

    async def enter(number: int) -> None:
        async with semaphore:
            entered.append(number)
            await everybody_may_go.wait()

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(enter(number)))
        await _until_semaphore_waits(client, "s", number + 1)
    for number, lease in enumerate(leases):
        await lease.release()
        await until(partial(_has_entered, entered, number + 1))
        await _until_semaphore_waits(client, "s", 3 - number)
    everybody_may_go.set()
    await soon(asyncio.gather(*tasks))
    assert entered == [0, 1, 2, 3]
    assert not await semaphore.locked()


async def test_cancelled_waiter_of_a_semaphore_leaves_the_queue(
    client: Client, one: Semaphore
) -> None:
    """SemaphoreTests.test_acquire_cancel."""
    async with one:
        task = asyncio.create_task(one.acquire())
        await _until_semaphore_waits(client, "s", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until_semaphore_waits(client, "s", 0)


@pytest.mark.parametrize("cancelled", [{0, 1}, {0}, {1}])
async def test_waiters_cancelled_before_they_run_pass_their_turn_on(
    client: Client, one: Semaphore, cancelled: set[int]
) -> None:
    """SemaphoreTests.test_acquire_cancel_before_awoken, test_acquire_hang, test_acquire_no_hang."""

    async def enter() -> None:
        async with one:
            pass

    tasks = []
    async with one:
        for number in range(4):
            tasks.append(asyncio.create_task(enter()))
            await _until_semaphore_waits(client, "s", number + 1)
        for number in cancelled:
            tasks[number].cancel()
    left = [task for number, task in enumerate(tasks) if number not in cancelled]
    await soon(asyncio.gather(*left))
    await asyncio.wait(tasks)
    await soon(enter())
    assert not await one.locked()


async def test_release_of_a_place_that_was_not_taken_is_an_error(one: Semaphore) -> None:
    """SemaphoreTests.test_release_not_acquired, of BoundedSemaphore: it makes no place."""
    with pytest.raises(RuntimeError):
        await one.release()
    async with one:
        assert await one.locked()


async def test_who_releases_and_comes_again_is_behind_who_waits(
    client: Client, one: Semaphore
) -> None:
    """SemaphoreTests.test_acquire_fifo_order, test_acquire_fifo_order_2."""
    order: list[str] = []
    number_waiting = 0

    async def twice(name: str) -> None:
        for time in (1, 2):
            async with one:
                order.append(f"{name}{time}")
                await asyncio.sleep(0.01)

    async def start(name: str) -> None:
        nonlocal number_waiting
        tasks.append(asyncio.create_task(twice(name)))
        number_waiting += 1
        await _until_semaphore_waits(client, "s", number_waiting)

    tasks = list[asyncio.Task[None]]()
    async with one:
        for name in "abc":
            await start(name)
    await soon(asyncio.gather(*tasks))
    assert order == ["a1", "b1", "c1", "a2", "b2", "c2"]


async def test_first_that_is_cancelled_changes_nothing_about_the_others_order(
    client: Client,
) -> None:
    """SemaphoreTests.test_acquire_fifo_order_3."""
    semaphore, entered = client.semaphore("s", 2), list[int]()
    leases = [await semaphore.acquire() for _ in range(2)]

    async def enter(number: int) -> None:
        async with semaphore:
            entered.append(number)

    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(enter(number)))
        await _until_semaphore_waits(client, "s", number + 1)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await leases[0].release()
    await soon(asyncio.gather(*tasks[1:]))
    assert entered == [1, 2]
    await leases[1].release()
