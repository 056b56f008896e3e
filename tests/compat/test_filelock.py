"""filelock's asyncio classes: tox-dev/filelock, tests/test_async_filelock*.py and test_async_read_write.py.

Its lock objects count their own acquisitions; here a task does. What files may do wrong has no counterpart.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodlock import AcquireTimeout, Client, DeadlockError, Lock, NotHeld, ReadWriteLock, WouldBlock

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    cancelled,
    held_elsewhere,
    is_held,
    soon,
    until,
    until_free,
    until_waiting,
)
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)


@pytest.fixture
def lock(client: Client) -> Lock:
    return client.lock("a")


@pytest.fixture(params=["read", "write"])
def mode(request: pytest.FixtureRequest, client: Client) -> Lock:
    """Both modes are put through the same tests."""
    pair = client.rwlock("a")
    return pair.read if request.param == "read" else pair.write


async def _try(lock: Lock) -> bool:
    """Tell whether another task gets in at once."""

    async def attempt() -> bool:
        try:
            async with await lock.acquire_nowait():
                return True
        except WouldBlock:
            return False

    return await asyncio.create_task(attempt())


# -- test_async_filelock.py ------------------------------------------------------------------------


async def test_block_and_acquired_lease_hold_alike(lock: Lock) -> None:
    """test_simple, test_acquire, test_acquire_return_proxy_context_manager."""
    async with lock as lease:
        assert lease.held
        assert not await _try(lock)
    async with await lock.acquire() as lease:
        assert is_held(lease)
        assert not await _try(lock)
    assert await _try(lock)


@pytest.mark.parametrize("way", ["acquire_nowait", "timeout=0", "acquire(timeout=0)", "block"])
async def test_whatever_does_not_wait_is_refused_with_the_name(
    client: Client, lock: Lock, way: str
) -> None:
    """test_non_blocking, test_attempting_to_acquire."""

    async def attempt() -> None:
        if way == "acquire_nowait":
            await lock.acquire_nowait()
        elif way == "timeout=0":
            await client.lock("a", timeout=0).acquire()
        elif way == "acquire(timeout=0)":
            await lock.acquire(timeout=0)
        else:
            async with client.lock("a", timeout=0):
                pass

    async with held_elsewhere(lock) as lease:
        with pytest.raises((WouldBlock, AcquireTimeout), match="'a'"):
            await attempt()
        assert lease.held


async def test_inner_release_keeps_the_lock(lock: Lock) -> None:
    """test_release_nonzero_counter_exit, test_same_instance_reentrant_works."""
    await lock.acquire()
    async with lock:
        pass
    assert not await _try(lock)
    await lock.release()
    assert await _try(lock)


async def test_another_object_of_the_name_is_the_same_lock(client: Client, lock: Lock) -> None:
    """test_singleton_avoids_deadlock: always so here; test_same_task_different_..._raises does not."""
    async with lock as outer, client.lock("a") as inner:
        assert inner.token == outer.token


async def test_only_async_with_enters(lock: Lock) -> None:
    """test_sync_with_raises_not_implemented_error."""
    anything: Any = lock
    with pytest.raises(TypeError), anything:
        pass


async def test_two_names_do_not_conflict(client: Client) -> None:
    """test_different_paths_no_conflict, test_different_tasks_no_false_positive."""
    async with client.lock("a"), client.lock("b"):
        assert not await _try(client.lock("a"))
        assert not await _try(client.lock("b"))


async def test_exception_of_the_body_comes_out_as_it_is(lock: Lock) -> None:
    """test_context_body_only_failure_propagates_body."""
    body = ValueError("body failed")
    with pytest.raises(ValueError, match="body failed") as raised:
        async with lock:
            raise body
    assert raised.value is body
    assert await _try(lock)


async def test_body_and_loss_are_told_together(client: Client) -> None:
    """test_context_group_reports_both_failures: the body's exception, with the loss as a note."""

    async def body() -> None:
        async with client.lock("a", on_lost="flag") as lease:
            await client.break_lock("a")
            await soon(lease.wait_lost())
            raise ValueError

    with pytest.raises(ValueError) as raised:
        await body()
    assert any("broken" in note for note in raised.value.__notes__)


async def test_release_completes_though_it_is_cancelled(client: Client, lock: Lock) -> None:
    """test_release_completes_despite_cancellation."""
    lease = await lock.acquire()
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.wait([releasing])
    await until_free(client, "a")
    assert not is_held(lease)


def test_lock_is_used_on_one_loop_after_another() -> None:
    """test_del_after_loop_close_does_not_raise."""
    client = Client("memory://")
    lock = client.lock("a")

    async def use() -> None:
        async with client:
            await lock.acquire()
            await lock.release()

    for _ in range(2):
        asyncio.run(use())


# -- test_async_filelock_acquire_cancellation.py ---------------------------------------------------


@pytest.mark.parametrize("turns", range(6))
async def test_acquire_that_is_cancelled_at_any_turn_leaves_nothing(
    client: Client, lock: Lock, turns: int
) -> None:
    """test_backend_cancellation_after_acquire_rolls_back, test_acquire_cancellation_before_executor_..."""
    task = asyncio.create_task(lock.acquire())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel("caller canceled")
    await asyncio.wait([task])
    if not task.cancelled():
        await task.result().release()
    await until_free(client, "a")


async def test_cancelled_first_acquire_does_not_take_the_second_ones(
    client: Client, lock: Lock
) -> None:
    """test_acquire_cancellation_does_not_release_later_claim, test_cancelled_queued_acquire_does_..."""
    async with held_elsewhere(lock):
        first = asyncio.create_task(lock.acquire())
        await until_waiting(client, "a")
        second = asyncio.create_task(lock.acquire())
        await until_waiting(client, "a", 2)
        await cancelled(first)
    lease = await soon(second)
    assert is_held(lease)
    assert not await _try(lock)
    await lease.release()


async def test_acquire_that_is_cancelled_twice_leaves_nothing(client: Client, lock: Lock) -> None:
    """test_acquire_repeated_cancellation_waits_for_rollback: the first message comes out."""
    async with held_elsewhere(lock):
        task = asyncio.create_task(lock.acquire())
        await until_waiting(client, "a")
        task.cancel("first cancellation")
        await asyncio.sleep(0)
        task.cancel("second cancellation")
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: _nobody_waits(client))
    assert await _try(lock)


async def _nobody_waits(client: Client) -> bool:
    return not (await client.inspect("a")).waiters


# -- test_async_read_write.py ----------------------------------------------------------------------


async def test_either_mode_nests_and_ends_with_the_outermost(mode: Lock) -> None:
    """test_acquire_release, test_lock_context_manager, test_reentrant, test_nested_context_managers."""
    async with mode as outer:
        async with mode as inner:
            assert inner.token == outer.token
        assert outer.held
    with pytest.raises(RuntimeError, match="does not hold") as refused:
        await mode.release()
    assert isinstance(refused.value, NotHeld)


async def test_reader_may_not_become_a_writer(client: Client) -> None:
    """test_mode_change_prohibited, upgrade; a downgrade is allowed here."""
    pair = client.rwlock("a")
    async with pair.read:
        with pytest.raises(RuntimeError) as refused:
            await pair.write.acquire()
        assert isinstance(refused.value, DeadlockError)
    async with pair.write, pair.read:
        pass


@pytest.mark.parametrize("timeout", [0, BRIEF])
async def test_the_other_mode_is_refused(client: Client, mode: Lock, timeout: float) -> None:
    """test_non_blocking_conflict, test_timeout_expires, test_a_writer_times_out_waiting_for_another_..."""
    pair = client.rwlock("a")
    other = pair.write if mode.mode == "shared" else pair.read
    async with held_elsewhere(mode):
        with pytest.raises(AcquireTimeout):
            await other.acquire(timeout=timeout)


async def test_closed_client_takes_no_more(make_client: MakeClient) -> None:
    """test_close_rejects_later_acquisition, held and not."""
    for held in (False, True):
        client = await make_client()
        lease = await client.rwlock("a").write.acquire() if held else None
        await client.__aexit__(None, None, None)
        with pytest.raises(RuntimeError):
            await client.rwlock("a").read.acquire()
        assert lease is None or not is_held(lease)


async def test_modes_follow_each_other(client: Client) -> None:
    """test_sequential_mode_switch, test_context_manager_uses_instance_defaults."""
    pair = client.rwlock("a", timeout=10.0)
    for lock in (pair.read, pair.write, pair.read):
        async with lock as lease:
            assert lease.mode == lock.mode


async def test_tasks_sharing_a_lock_write_one_at_a_time_and_read_together(client: Client) -> None:
    """test_tasks_sharing_a_lock_take_the_write_lock_one_at_a_time, ..._hold_the_read_lock_together."""
    pair, together = client.rwlock("a"), asyncio.Barrier(2)
    inside = peak = 0

    async def write() -> None:
        nonlocal inside, peak
        async with pair.write:
            inside += 1
            peak = max(peak, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    async def read() -> None:
        async with pair.read:
            await soon(together.wait())

    await asyncio.gather(*(write() for _ in range(20)))
    await asyncio.gather(read(), read())
    assert peak == 1


async def test_another_task_waits_for_the_last_release_of_a_nested_write(client: Client) -> None:
    """The same; and test_release_from_a_task_that_does_not_hold_raises."""
    lock = client.rwlock("a").write
    await lock.acquire()
    await lock.acquire()
    await lock.release()
    assert not await _try(lock)
    with pytest.raises(NotHeld, match="this task does not hold"):
        await asyncio.create_task(lock.release())
    await lock.release()
    assert await _try(lock)


async def test_waiting_writer_goes_ahead_of_new_readers_until_it_is_cancelled(
    client: Client,
) -> None:
    """test_a_waiting_writer_goes_ahead_of_new_readers, test_a_canceled_waiting_writer_lets_readers_in."""
    pair: ReadWriteLock = client.rwlock("a")
    async with pair.read:
        writer = asyncio.create_task(pair.write.acquire())
        await until_waiting(client, "a")
        assert not await _try(pair.read)
        await cancelled(writer)
        assert await _try(pair.read)
        writer = asyncio.create_task(pair.write.acquire())
        await until_waiting(client, "a")
    await (await soon(writer)).release()


@pytest.mark.parametrize("timeout", [None, 0, 1.0])
async def test_acquiring_outside_of_a_task_is_a_runtime_error(
    client: Client, lock: Lock, timeout: float | None
) -> None:
    """test_acquire_outside_a_task_raises."""
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def drive() -> None:
        try:
            lock.acquire(timeout=timeout).send(None)
        except BaseException as error:
            outcome.set_result(error)

    asyncio.get_running_loop().call_soon(drive)
    error = await soon(outcome)
    assert isinstance(error, RuntimeError)
    assert "inside an asyncio task" in str(error)
    assert not await lock.locked()
