"""Redisson (Java): redisson/redisson, redisson/src/test/java/org/redisson/Redisson*LockTest.java.

RedissonLockTest, RedissonReadWriteLockTest, RedissonMultiLockTest, RedissonFencedLockTest and
RedissonSemaphoreTest. Its threads are our tasks, a lease time without watchdog our `auto_extend=False`.
The cases of its fair lock need processes that die: tests/integration/test_deaths.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aiodlock import (
    AcquireTimeout,
    BackendUnavailable,
    Client,
    Lease,
    Lock,
    LockLost,
    NotHeld,
    ReadWriteLock,
    WouldBlock,
)

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    LASTING,
    held_elsewhere,
    is_held,
    soon,
    until,
    until_free,
    until_outlived,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

TTL = 0.4
PATIENCE = 40.0


@pytest.fixture
def pair(client: Client) -> ReadWriteLock:
    return client.rwlock("a")


async def _try(lock: Lock) -> bool:
    """`tryLock` and `unlock` in another thread."""

    async def attempt() -> bool:
        try:
            async with await lock.acquire_nowait():
                return True
        except WouldBlock:
            return False

    return await asyncio.create_task(attempt())


@asynccontextmanager
async def _abandoned(client: Client, lock: Callable[[Client], Lock]) -> AsyncIterator[Lease]:
    """Hold a lease that ends by itself, and is not released before the end of the test."""
    lease = await asyncio.create_task(lock(client).acquire())
    yield lease
    with pytest.raises(LockLost):
        await lease.release()


# -- RedissonLockTest ------------------------------------------------------------------------------


@pytest.mark.scripted
async def test_many_names_share_one_subscription_and_leave_none(
    client: Client, store: Store
) -> None:
    """testSubscriptionsPerConnection, testSinglePubSub: a channel per client, not per waiter."""
    chance, counter = random.Random(1), 0

    async def work() -> None:
        nonlocal counter
        async with client.lock(f"lock-{chance.randrange(5)}"):
            await asyncio.sleep(chance.uniform(0, 0.002))
            counter += 1

    raw = await store.raw()
    before = await raw.pubsub_channels()
    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(200))), PATIENCE)
    assert counter == 200
    assert await raw.pubsub_channels() == before


@pytest.mark.real_store
async def test_attempt_fails_when_the_server_is_gone(store: Store, make_client: MakeClient) -> None:
    """testRedisFailed."""
    assert store.server is not None
    client = await make_client(close_timeout=0.1)
    await asyncio.to_thread(store.server.kill)
    for attempt in (client.lock("a").acquire_nowait(), client.lock("a").acquire(timeout=0.5)):
        with pytest.raises(BackendUnavailable):
            await attempt


async def test_waiting_takes_as_long_as_asked_for(client: Client) -> None:
    """testTryLockWait."""
    clock = asyncio.get_running_loop().time
    async with held_elsewhere(client.lock("a")):
        began = clock()
        with pytest.raises(AcquireTimeout):
            await client.lock("a").acquire(timeout=BRIEF)
        assert clock() - began >= 0.99 * BRIEF


async def test_forced_unlock_frees_it_and_the_holder_is_told(client: Client) -> None:
    """testForceUnlock."""
    lease = await client.lock("a").acquire()
    assert await client.break_lock("a") == 1
    assert not await client.lock("a").locked()
    assert await client.break_lock("a") == 0
    with pytest.raises(LockLost):
        await lease.release()


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_lease_that_has_ended_lets_the_next_in_and_cannot_be_released(
    client: Client, mode: str
) -> None:
    """testExpire; of the read-write lock testExpireRead, testExpireWrite, testAutoExpire."""

    def make(client: Client) -> Lock:
        pair = client.rwlock("a", ttl=TTL, auto_extend=False)
        return pair.write if mode == "exclusive" else pair.read

    async with _abandoned(client, make) as lease:
        writer = client.rwlock("a", timeout=PATIENCE).write
        async with writer:
            assert not is_held(lease)


async def test_remaining_time_is_told(client: Client) -> None:
    """testRemainTimeToLive."""
    lease = await client.lock("a", ttl=60).acquire()
    assert 30 < lease.remaining() <= 60
    await lease.release()
    assert lease.remaining() == 0.0
    lease = await client.lock("a").acquire()
    assert 15 < lease.remaining() <= 30
    await lease.release()


async def test_holder_is_known_to_itself_and_not_to_another_task(client: Client) -> None:
    """testIsHeldByCurrentThread, testIsHeldByCurrentThreadOtherThread, testUnlockFail."""
    lock = client.lock("a")

    async def may_not_release() -> None:
        with pytest.raises(NotHeld):
            await lock.release()

    await may_not_release()
    async with lock as lease:
        assert lease.held
        await asyncio.create_task(may_not_release())
        assert is_held(lease)
    assert not is_held(lease)
    await asyncio.create_task(may_not_release())


async def test_locked_is_known_to_everybody(client: Client) -> None:
    """testIsLocked, testIsLockedOtherThread."""
    lock = client.lock("a")
    assert not await lock.locked()
    async with lock:
        assert await asyncio.create_task(client.lock("a").locked())
    assert not await asyncio.create_task(client.lock("a").locked())


async def test_every_acquisition_counts(client: Client) -> None:
    """testGetHoldCount, testHoldCount, testReentrancy, testLockUnlock: the store counts a named owner's."""
    for lock in (client.lock("a", owner="one"), client.rwlock("b", owner="one").read):
        for number in (1, 2):
            await lock.acquire_nowait()
            assert (await client.inspect(lock.name)).holders[0].count == number
        for number in (1, 0):
            await lock.release()
            holders = (await client.inspect(lock.name)).holders
            assert sum(holder.count for holder in holders) == number
        with pytest.raises(NotHeld):
            await lock.release()


async def test_entered_twice_it_is_still_held_after_one_release(client: Client) -> None:
    """testReentrancy."""
    lock = client.lock("a")
    await lock.acquire_nowait()
    await lock.acquire_nowait()
    await lock.release()
    assert not await _try(lock)
    await lock.release()
    assert await _try(lock)


async def test_several_clients_are_inside_one_at_a_time(make_client: MakeClient) -> None:
    """testConcurrencyLoop_MultiInstance, testConcurrency_MultiInstance, ..._SingleInstance; semaphores."""
    counter = 0

    async def work(client: Client, kind: str) -> None:
        nonlocal counter
        for _ in range(10):
            async with client.lock("a") if kind == "lock" else client.semaphore("a", 1):
                before = counter
                await asyncio.sleep(0.001)
                counter = before + 1

    for kind in ("lock", "semaphore"):
        counter = 0
        await asyncio.gather(*[work(await make_client(), kind) for _ in range(8)])
        assert counter == 80


# -- RedissonFencedLockTest ------------------------------------------------------------------------


async def test_token_increases_however_it_is_acquired(client: Client) -> None:
    """testTokenIncrease: not by one each, as a counter's, but it survives the counter's loss."""
    lock, tokens = client.lock("a"), []
    for acquire in (lock.acquire, lock.acquire_nowait, client.rwlock("a").read.acquire):
        lease = await acquire()
        tokens.append(lease.token)
        await lease.release()
        assert lease.token == tokens[-1]
    assert tokens == sorted(set(tokens))


# -- RedissonMultiLockTest -------------------------------------------------------------------------


async def test_multilock_is_held_until_it_is_released(client: Client) -> None:
    """testLockUnlock."""
    leases = await client.multilock("a", "b", "c", ttl=10).acquire()
    assert all(is_held(lease) for lease in leases.values())
    await leases.release()
    assert not any(is_held(lease) for lease in leases.values())


async def test_one_of_ten_gets_all_at_first(client: Client) -> None:
    """testWaitAndLeaseTimeouts, test: the others get none of the names meanwhile."""
    inside = 0

    async def work() -> None:
        nonlocal inside
        try:
            async with client.multilock("a", "b", "c", timeout=0):
                inside += 1
                await all_tried.wait()
        except AcquireTimeout:
            await all_tried.wait()

    all_tried = asyncio.Barrier(10)
    await asyncio.gather(*(work() for _ in range(10)))
    assert inside == 1
    await until_free(client, "a", "b", "c")


async def test_second_waits_for_all_names_of_the_first(client: Client) -> None:
    """testMultiThreads."""

    async def work() -> None:
        async with client.multilock("c", "b", "a"):
            pass

    async with client.multilock("a", "b", "c"):
        task = asyncio.create_task(work())
        await until_waiting(client, "a")
        assert not task.done()
    await soon(task)


# -- RedissonReadWriteLockTest ---------------------------------------------------------------------


@pytest.mark.parametrize("second", ["shorter", "released"])
async def test_writer_waits_for_the_last_reader_and_no_longer(client: Client, second: str) -> None:
    """testReadLockExpiration, testReadLockLeaseTimeout, testReadLockLeaseTimeoutDiffThreadsRRW."""

    def reader(ttl: float) -> Lock:
        return client.rwlock("a", ttl=ttl, auto_extend=False).read

    clock = asyncio.get_running_loop().time
    began = clock()
    longest = await asyncio.create_task(reader(2 * TTL).acquire())
    if second == "released":
        other = await asyncio.create_task(reader(60).acquire())
        await other.release()
    else:
        other = await asyncio.create_task(reader(TTL / 2).acquire())
    async with client.rwlock("a", timeout=PATIENCE).write:
        assert clock() - began >= 2 * TTL * 0.95
        assert not is_held(longest)
    for lease in (longest,) if second == "released" else (longest, other):
        with pytest.raises(LockLost):
            await lease.release()


async def test_readers_behind_a_writer_come_in_when_its_lease_ends(client: Client) -> None:
    """testReadLockLeaseTimeoutDiffThreadsWRR."""
    both = asyncio.Barrier(2)

    async def read() -> None:
        async with client.rwlock("a").read:
            await both.wait()

    async with _abandoned(client, lambda c: c.lock("a", ttl=TTL, auto_extend=False)):
        await asyncio.wait_for(asyncio.gather(read(), read()), PATIENCE)


async def test_fifty_readers_are_extended(client: Client) -> None:
    """testReadLockExpirationRenewal, testReadWriteTTL."""
    pair, enough = client.rwlock("a", ttl=LASTING), asyncio.Event()
    leases: list[Lease] = []

    async def read() -> None:
        async with pair.read as lease:
            leases.append(lease)
            await enough.wait()

    readers = [asyncio.create_task(read()) for _ in range(50)]
    await until(lambda: len(leases) == 50)
    await until_outlived(leases[-1])
    assert all(lease.held for lease in leases)
    enough.set()
    await asyncio.gather(*readers)


@pytest.mark.parametrize("name", ["{test}:abc:key", "a{b", "}{", "{}"])
async def test_braces_in_a_name_do_no_harm(client: Client, name: str) -> None:
    """testName."""
    pair = client.rwlock(name)

    async def read() -> None:
        for _ in range(5):
            async with pair.read:
                pass

    await asyncio.gather(*(read() for _ in range(10)))
    async with pair.write:
        assert await client.lock(name).locked()


async def test_writer_entered_again_starts_no_shorter_lease(client: Client) -> None:
    """testWriteLockExpiration: the outermost options stay."""
    outer = client.lock("a", ttl=10, auto_extend=False)
    async with outer as lease, client.lock("a", ttl=TTL, auto_extend=False) as inner:
        assert inner.ttl == lease.ttl == 10
        assert inner.remaining() > TTL
        assert not await _try(outer)


async def test_writer_reads_inside_and_stays_a_writer(pair: ReadWriteLock) -> None:
    """testWR, testInCluster."""
    async with pair.write as write:
        async with pair.read:
            assert not await _try(pair.read)
        assert write.held
        assert not await _try(pair.read)
    assert await _try(pair.write)


async def test_writer_that_releases_first_stays_a_reader(pair: ReadWriteLock) -> None:
    """testWriteReadReentrancy."""
    write = await pair.write.acquire()
    read = await pair.read.acquire_nowait()
    assert not await _try(pair.read)
    await write.release()
    assert not await _try(pair.write)
    assert await _try(pair.read)
    await read.release()
    assert await _try(pair.write)


async def test_readers_behind_a_writer_come_in_together(client: Client) -> None:
    """testWriteRead."""
    all_inside = asyncio.Barrier(20)

    async def read() -> None:
        async with client.rwlock("a").read:
            await soon(all_inside.wait())

    async with client.rwlock("a").write:
        tasks = [asyncio.create_task(read()) for _ in range(20)]
        await until_waiting(client, "a", 20)
    await asyncio.gather(*tasks)


async def test_last_reader_lets_the_writer_in(pair: ReadWriteLock) -> None:
    """testMultiRead, testWriteLock."""
    first = await pair.read.acquire()
    async with held_elsewhere(pair.read):
        assert not await _try(pair.write)
        await first.release()
        assert not await _try(pair.write)
        assert await pair.read.locked()
    assert await _try(pair.write)
    assert not await pair.write.locked()


async def test_forced_unlock_is_of_all_holders_whatever_their_mode(
    client: Client, pair: ReadWriteLock
) -> None:
    """testForceUnlock, of one mode there."""
    for lock, number in ((pair.read, 2), (pair.write, 1)):
        leases = [await asyncio.create_task(lock.acquire()) for _ in range(number)]
        assert await client.break_lock("a") == number
        assert not await lock.locked()
        for lease in leases:
            with pytest.raises(LockLost):
                await lease.release()


async def test_random_readers_and_writers_of_many_clients_all_pass(
    make_client: MakeClient,
) -> None:
    """testConcurrencyLoop_MultiInstance, testConcurrency_MultiInstance, ..._SingleInstance."""
    chance, passed, writers = random.Random(2), 0, 0

    async def work(client: Client) -> None:
        nonlocal passed, writers
        pair = client.rwlock("a")
        for _ in range(10):
            writes = chance.random() < 0.5
            async with pair.write if writes else pair.read:
                writers += writes
                assert writers == int(writes)
                await asyncio.sleep(0.001)
                writers -= writes
                passed += 1

    await asyncio.gather(*[work(await make_client()) for _ in range(8)])
    assert passed == 80


# -- RedissonSemaphoreTest -------------------------------------------------------------------------


async def test_waiter_gets_the_place_that_is_released(client: Client) -> None:
    """testBlockingAcquire, testReleaseAcquire."""
    semaphore = client.semaphore("s", 1)
    lease = await semaphore.acquire()
    waiter = asyncio.create_task(semaphore.acquire())
    with pytest.raises(AcquireTimeout):
        await semaphore.acquire(timeout=BRIEF)
    await lease.release()
    second = await soon(waiter)
    with pytest.raises(WouldBlock):
        await semaphore.acquire_nowait()
    await second.release()


async def test_dead_holders_places_come_back(client: Client) -> None:
    """RedissonPermitExpirableSemaphoreTest.testExpire; a plain RSemaphore loses them for ever."""
    semaphore = client.semaphore("s", 2, ttl=TTL, auto_extend=False)
    leases = [await semaphore.acquire() for _ in range(2)]
    async with client.semaphore("s", 2, timeout=PATIENCE):
        pass
    for lease in leases:
        await lease.wait_lost()  # the place that came back may be that of the first one alone
        with pytest.raises(LockLost):
            await lease.release()
