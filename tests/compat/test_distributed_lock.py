"""madelson/DistributedLock (C#): src/DistributedLock.Tests/AbstractTestCases/**.

Its handles are our leases, its `TryAcquire` our `acquire_nowait` or a short timeout. Its locks are never
reentrant, so what it nests is done here by other owners.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from aiodlock import AcquireTimeout, Client, Lock, LockLost, NotHeld, WouldBlock

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    LASTING,
    SOON,
    cancelled,
    held_elsewhere,
    is_held,
    settled,
    soon,
    takes,
    until,
    until_outlived,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

PATIENCE = 40.0


async def _is_refused(lock: Lock) -> bool:
    """Tell whether another task than ours is refused."""

    async def attempt() -> bool:
        try:
            lease = await lock.acquire_nowait()
        except WouldBlock:
            return True
        await lease.release()
        return False

    return await asyncio.create_task(attempt())


# -- DistributedLockCoreTestCases ------------------------------------------------------------------


async def test_lock_excludes_others_until_its_release_and_no_other_name(client: Client) -> None:
    """BasicTest, BasicAsyncTest."""
    first, second = client.lock("one"), client.lock("two")
    async with first:
        assert await _is_refused(first)
        assert not await _is_refused(second)
    assert not await _is_refused(first)


@pytest.mark.parametrize("timeout", [-2, float("inf"), float("nan"), 2**40])
async def test_timeouts_out_of_range_are_refused(client: Client, timeout: float) -> None:
    """TestBadArguments, TestReaderWriterLockBadArguments."""
    pair = client.rwlock("a")
    for lock in (pair.read, pair.write):
        with pytest.raises(ValueError):
            await lock.acquire(timeout=timeout)
    with pytest.raises(ValueError):
        client.lock("a", timeout=timeout)


async def test_second_release_leaves_the_next_holder_alone(client: Client) -> None:
    """TestDisposeHandleIsIdempotent: leaving a block is; a release by hand tells."""
    first = await client.lock("a").acquire()
    async with first:
        await first.release()
    second = await client.lock("a").acquire()
    with pytest.raises(NotHeld):
        await first.release()
    assert is_held(second)
    await second.release()


async def test_waiting_ends_with_its_timeout(client: Client) -> None:
    """TestTimeouts."""
    async with held_elsewhere(client.lock("a")):
        async with takes(at_least=0.99 * BRIEF, at_most=BRIEF + SOON):
            with pytest.raises(TimeoutError) as over:
                await client.lock("a").acquire(timeout=BRIEF)
        assert isinstance(over.value, AcquireTimeout)


async def test_waiting_ends_with_its_cancellation(client: Client) -> None:
    """CancellationTest, TestCanceledAlreadyThrowsForSyncAndDoesNotThrowForAsync."""
    lock = client.lock("a")
    async with held_elsewhere(lock):
        waiter = asyncio.create_task(lock.acquire())
        await until_waiting(client, "a")
        await cancelled(waiter)
    before = asyncio.create_task(lock.acquire())
    await cancelled(before)
    assert not await lock.locked()


async def test_hundred_tasks_are_inside_one_at_a_time(client: Client) -> None:
    """TestParallelism."""
    inside = 0

    async def work(lock: Lock) -> int:
        nonlocal inside
        async with lock:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.002)
            inside -= 1
            return inside

    left = await asyncio.wait_for(
        asyncio.gather(*(work(client.lock("a")) for _ in range(100))), PATIENCE
    )
    assert left == [0] * 100


@pytest.mark.parametrize("name", ["\\\\\\\\\\", "\\" * 512, "a" * 512, "/", ".", "a b", "{a}b"])
async def test_names_need_not_be_made_safe(client: Client, name: str) -> None:
    """TestGetSafeName."""
    async with client.lock(name, timeout=PATIENCE):
        pass


async def test_names_differ_by_case(client: Client) -> None:
    """TestLockNamesAreCaseSensitive, TestGetSafeLockNameIsCaseSensitive."""
    async with client.lock("hash_a"):
        for other in ("hash_A", "HASH_a", "Hash_a"):
            assert not await _is_refused(client.lock(other))
    long = "a" * 511
    async with client.lock(long + "a"):
        assert not await _is_refused(client.lock(long + "A"))


async def test_holder_hears_of_its_loss_whenever_it_begins_to_listen(client: Client) -> None:
    """TestHandleLostTriggersCorrectly, TestHandleLostReturnsAlreadyCanceledIfHandleAlreadyLost."""
    lease = await client.lock("a").acquire()
    listening = asyncio.create_task(lease.wait_lost())
    await settled(client)
    assert not listening.done()
    await client.break_lock("a")
    assert (await soon(listening)).reason == "broken"
    assert (await soon(lease.wait_lost())).reason == "broken"
    with pytest.raises(LockLost):
        await lease.release()


async def test_lease_is_released_while_somebody_listens_for_its_loss(client: Client) -> None:
    """TestCanSafelyDisposeWhileMonitoring."""
    lease = await client.lock("a").acquire()
    listening = asyncio.create_task(lease.wait_lost())
    await asyncio.sleep(0)
    await lease.release()
    with pytest.raises(NotHeld):
        await soon(listening)
    assert lease.lost is None


async def test_abandoned_lease_is_released_when_it_is_collected(client: Client) -> None:
    """TestLockAbandonment."""
    lock = client.lock("a")
    leases = [await asyncio.create_task(lock.acquire())]
    await asyncio.sleep(0)  # the loop forgets what it has handed on
    with pytest.warns(ResourceWarning):
        del leases

    async def is_free() -> bool:
        return not await lock.locked()

    await until(is_free)


_TAKER = """
import asyncio, sys, aiodlock

async def main(url, name):
    async with aiodlock.Client(url) as client:
        async with client.lock(name, ttl=2.0) as lease:
            print(lease.token, flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.real_store
@pytest.mark.parametrize("end", ["done", "SIGTERM", "SIGKILL"])
async def test_lock_of_another_process_comes_free_however_that_ends(
    store: Store, make_client: MakeClient, end: str
) -> None:
    """TestCrossProcess, TestCrossProcessAbandonment, TestCrossProcessAbandonmentWithKill."""
    client, name = await make_client(), "cross-process"
    pipe = asyncio.subprocess.PIPE
    taker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TAKER, store.url, name, stdin=pipe, stdout=pipe
    )
    assert taker.stdin is not None
    assert taker.stdout is not None
    try:
        token = int(await asyncio.wait_for(taker.stdout.readline(), PATIENCE))
        with pytest.raises(WouldBlock):
            await client.lock(name).acquire_nowait()
        waiter = asyncio.create_task(client.lock(name).acquire(timeout=PATIENCE))
        await until_waiting(client, name)
        if end == "done":
            taker.stdin.write(b"done\n")
        else:
            taker.send_signal(signal.Signals[end])
        lease = await waiter
        assert lease.token > token
        await lease.release()
    finally:
        taker.stdin.close()  # ends it, if nothing else has
        await asyncio.wait_for(taker.wait(), PATIENCE)


# -- DistributedReaderWriterLockCoreTestCases ------------------------------------------------------


async def test_many_readers_or_one_writer(client: Client) -> None:
    """TestMultipleReadersSingleWriter."""
    pairs = [client.rwlock("a", owner=owner) for owner in ("one", "two", "three")]
    first, second = [await pair.read.acquire_nowait() for pair in pairs[:2]]
    assert await _is_refused(pairs[2].write)
    writer = asyncio.create_task(pairs[2].write.acquire())
    await until_waiting(client, "a")
    await first.release()
    await settled(client)
    assert not writer.done()
    await second.release()
    lease = await soon(writer)
    assert await _is_refused(pairs[0].write)
    await lease.release()
    assert not await _is_refused(pairs[0].write)


async def test_waiting_writer_keeps_new_readers_out(client: Client) -> None:
    """TestWriterTrumpsReader."""
    pair = client.rwlock("a")
    async with pair.read:
        writer = asyncio.create_task(pair.write.acquire())
        await until_waiting(client, "a")
        assert await _is_refused(pair.read)
    await (await soon(writer)).release()


# -- DistributedSemaphoreCoreTestCases -------------------------------------------------------------


@pytest.mark.parametrize("limit", [5, 23, 1_000_000])
async def test_limit_is_what_was_asked_for(client: Client, limit: int) -> None:
    """TestMaxCount, TestHighTicketCount."""
    semaphore = client.semaphore("s", limit)
    assert semaphore.limit == limit
    leases = [await semaphore.acquire(timeout=PATIENCE) for _ in range(5)]
    for lease in leases:
        await lease.release()


async def test_semaphore_reaches_its_limit_and_never_passes_it(client: Client) -> None:
    """TestConcurrencyHandling, TestSemaphoreParallelism."""
    inside, seen, full = 0, set[int](), asyncio.Event()

    async def work() -> None:
        nonlocal inside
        semaphore = client.semaphore("s", 3)
        for _ in range(5):
            async with semaphore:
                inside += 1
                seen.add(inside)
                if inside == 3:
                    full.set()
                await (
                    full.wait()
                )  # a store may take longer to let the next one in than a body lasts
                await asyncio.sleep(0.005)
                inside -= 1

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(10))), PATIENCE)
    assert seen == {1, 2, 3}


async def test_drained_semaphore_refuses_until_a_place_is_free(client: Client) -> None:
    """TestDrain."""
    first, second = client.semaphore("s", 4), client.semaphore("s", 4)
    leases = [await first.acquire()]
    await (await second.acquire()).release()
    leases += [await first.acquire() for _ in range(3)]
    for semaphore in (first, second):
        with pytest.raises(WouldBlock):
            await semaphore.acquire_nowait()
    await leases.pop().release()
    leases.append(await second.acquire_nowait())
    for lease in leases:
        await lease.release()


# -- Redis -----------------------------------------------------------------------------------------


async def test_lock_is_extended_for_as_long_as_it_is_held(client: Client) -> None:
    """RedisExtensionTestCases.TestCanExtendLock."""
    lock = client.lock("a", ttl=LASTING)
    async with lock as lease:
        waiter = asyncio.create_task(lock.acquire())
        await until_outlived(lease)
        assert not waiter.done()
    await (await soon(waiter)).release()


async def test_prefix_and_name_are_never_mixed_up(make_client: MakeClient) -> None:
    """TestAcquireWithLockPrefix: prefix P and name N are another lock than name PN, and than N."""
    plain, prefixed = await make_client(), await make_client(prefix="P")
    async with prefixed.lock("N"), plain.lock("N"), plain.lock("PN"):
        assert await _is_refused(prefixed.lock("N"))
