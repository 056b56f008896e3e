"""Curator's recipes on ZooKeeper (Java): apache/curator, curator-recipes/src/test/.../recipes/locks/**.

TestInterProcessMutexBase, TestInterProcessMutex, TestInterProcessReadWriteLock(Base),
TestInterProcessSemaphore and TestInterProcessMultiMutex. Its threads are our tasks. Downgrading beside a
waiting writer is in tests/contract/test_published.py.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from aiodlock import (
    AcquireTimeout,
    Client,
    DeadlockError,
    Lock,
    LockLost,
    MultiLock,
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
    until_cancelled,
    until_free,
    until_held,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

PATIENCE = 40.0


@pytest.fixture(params=["lock", "multilock"])
def mutex(request: pytest.FixtureRequest, client: Client) -> Lock | MultiLock:
    """Both are put through the same tests, as TestInterProcessMultiMutex does with its own."""
    return client.lock("a") if request.param == "lock" else client.multilock("a", "b")


# -- TestInterProcessMutexBase ---------------------------------------------------------------------


@pytest.mark.real_store
async def test_waiter_gets_in_after_the_server_was_stopped_and_started(
    store: Store, make_client: MakeClient
) -> None:
    """testWaitingProcessKilledServer, and testAcquireAfterLostServer of the semaphore."""
    server = store.server
    assert server is not None
    client = await make_client()
    lock, passed, tasks = client.lock("a", ttl=LASTING), list[int](), list[asyncio.Task[None]]()

    async def work(number: int) -> None:
        async with lock:
            passed.append(number)

    async def work_while_the_server_stops() -> None:
        async with lock:
            tasks.extend(asyncio.create_task(work(number)) for number in range(3))
            await until_waiting(client, "a", 3)
            await asyncio.to_thread(server.kill)
            await until_cancelled()

    with pytest.raises(LockLost):
        await work_while_the_server_stops()
    await asyncio.to_thread(server.start)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert sorted(passed) == [0, 1, 2]


async def test_waiter_gets_in_when_the_holders_session_is_killed(
    client: Client, mutex: Lock | MultiLock
) -> None:
    """testKilledSession."""
    entered: list[int] = []

    async def work(number: int) -> None:
        async with mutex:
            entered.append(number)
            await asyncio.sleep(PATIENCE)

    first, second = asyncio.create_task(work(1)), asyncio.create_task(work(2))
    await until(lambda: len(entered) == 1)
    await until_waiting(client, "a")
    await client.break_lock("a")
    await until(lambda: len(entered) == 2)
    second.cancel()
    first.cancel()
    await asyncio.wait([first, second])
    await until_free(client, "a", "b")


@pytest.mark.scripted
async def test_names_without_holders_leave_nothing_that_stays(
    client: Client, store: Store, mutex: Lock | MultiLock
) -> None:
    """testContainerCleanup, testChildReaperCleansUpLockNodes: what is left expires by itself."""

    async def work() -> None:
        async with mutex:
            await asyncio.sleep(0.002)

    await asyncio.gather(*(work() for _ in range(10)))
    await until_free(client, "a", "b")
    raw = await store.raw()
    left = [key for key in await raw.keys("*") if await raw.pttl(key) < 0]
    assert left == []


async def test_prefix_keeps_names_apart(make_client: MakeClient) -> None:
    """testWithNamespace."""
    one, two = await make_client(prefix="one"), await make_client(prefix="two")
    async with one.lock("a"), two.lock("a", timeout=PATIENCE):
        pass


async def test_ten_tasks_are_inside_one_at_a_time(mutex: Lock | MultiLock) -> None:
    """testReentrantSingleLock."""
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with mutex:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.005)
            inside -= 1

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(10))), PATIENCE)


async def test_task_enters_again_and_another_does_not(
    client: Client, mutex: Lock | MultiLock
) -> None:
    """testReentrant, testReentrant2Threads: it is free after the last release, not before."""

    async def is_refused() -> None:
        with pytest.raises(AcquireTimeout):
            await mutex.acquire(timeout=BRIEF)

    first = await mutex.acquire(timeout=PATIENCE)
    second = await mutex.acquire(timeout=PATIENCE)
    await asyncio.create_task(is_refused())
    third = await mutex.acquire(timeout=PATIENCE)
    for lease in (third, second):
        await lease.release()
        assert first.held
        await asyncio.create_task(is_refused())
    await first.release()
    await until_free(client, "a", "b")


async def test_second_client_has_it_when_the_first_has_left(make_client: MakeClient) -> None:
    """test2Clients."""
    one, two = await make_client(), await make_client()
    lease = await one.lock("a").acquire(timeout=PATIENCE)
    second = asyncio.create_task(two.lock("a").acquire(timeout=PATIENCE))
    await until_waiting(one, "a")
    await lease.release()
    other = await soon(second)
    assert (is_held(lease), is_held(other)) == (False, True)
    await other.release()


async def test_holder_that_is_asked_to_leave_hears_it(client: Client) -> None:
    """TestInterProcessMutex.testRevoking: there a request to the holder; here it has no say."""
    lease = await client.lock("a").acquire()
    revoked = asyncio.create_task(lease.wait_lost())
    (holder,) = (await client.inspect("a")).holders
    assert holder.token == lease.token
    assert await client.break_lock("a") == 1
    async with client.lock("a", owner="other", timeout=PATIENCE):
        assert (await soon(revoked)).reason == "broken"
    with pytest.raises(LockLost):
        await lease.release()


# -- TestInterProcessMultiMutex --------------------------------------------------------------------


async def test_one_release_that_fails_does_not_keep_the_others(client: Client) -> None:
    """testSomeReleasesFail."""
    leases = await client.multilock("a", "b").acquire()
    await client.break_lock("b")
    with pytest.raises(LockLost):
        await leases.release()
    await until_free(client, "a", "b")


async def test_none_is_kept_when_one_cannot_be_acquired(client: Client) -> None:
    """testSomeLocksFailToLock."""
    async with client.rwlock("b").read:
        acquiring = asyncio.create_task(client.multilock("a", "b").acquire(timeout=PATIENCE))
        await until_held(client, "a")
        acquiring.cancel()
        await asyncio.wait([acquiring])
        await until_free(client, "a")
        with pytest.raises(DeadlockError):
            await client.multilock("a", "b").acquire()
        await until_free(client, "a")


# -- TestInterProcessReadWriteLock -----------------------------------------------------------------


async def test_participants_are_known(client: Client) -> None:
    """testGetParticipantNodes."""
    pair, leave = client.rwlock("a"), asyncio.Event()

    async def hold(lock: Lock) -> None:
        async with lock:
            await leave.wait()

    tasks = [asyncio.create_task(hold(pair.read)) for _ in range(20)]
    await until(lambda: _number_of_holders(client, 20))
    tasks += [asyncio.create_task(hold(pair.write)) for _ in range(8)]
    await until_waiting(client, "a", 8)
    info = await client.inspect("a")
    assert [holder.mode for holder in info.holders] == ["shared"] * 20
    assert [waiter.mode for waiter in info.waiters] == ["exclusive"] * 8
    leave.set()
    await asyncio.gather(*tasks)


async def _number_of_holders(client: Client, number: int) -> bool:
    return len((await client.inspect("a")).holders) == number


async def test_reader_may_not_become_a_writer(client: Client) -> None:
    """testThatUpgradingIsDisallowed: at once, instead of after its timeout."""
    pair = client.rwlock("a")
    async with pair.read:
        with pytest.raises(DeadlockError):
            await pair.write.acquire(timeout=PATIENCE)


async def test_writer_may_read_beside_itself_and_nobody_else_may(client: Client) -> None:
    """testDowngrading, testThatDowngradingRespectsThreads."""
    pair = client.rwlock("a")

    async def is_refused() -> None:
        with pytest.raises(AcquireTimeout):
            await pair.read.acquire(timeout=BRIEF)

    write = await pair.write.acquire()
    await asyncio.create_task(is_refused())
    read = await pair.read.acquire(timeout=PATIENCE)
    await write.release()
    await read.release()
    await until_free(client, "a")


async def test_readers_and_writers_come_in_in_order_of_arrival(make_client: MakeClient) -> None:
    """TestInterProcessReadWriteLockBase.testOrdering: 3 readers, writer, 2 readers, writer, reader."""
    client = await make_client()
    inside: set[int] = set()
    leave = {number: asyncio.Event() for number in range(1, 9)}

    async def work(number: int) -> None:
        pair = (await make_client()).rwlock("a")
        async with pair.write if number in (4, 7) else pair.read:
            inside.add(number)
            await leave[number].wait()
            inside.remove(number)

    tasks = [asyncio.create_task(work(number)) for number in (1, 2, 3)]
    await until(lambda: inside == {1, 2, 3})
    for waiting, number in enumerate((4, 5, 6, 7, 8), start=1):
        tasks.append(asyncio.create_task(work(number)))
        await until_waiting(client, "a", waiting)
    for leaving, entering in (({1, 2, 3}, {4}), ({4}, {5, 6}), ({5, 6}, {7}), ({7}, {8})):
        assert inside == leaving
        for number in leaving:
            leave[number].set()
        await until(lambda entering=entering: inside == entering)  # type: ignore[misc]
    leave[8].set()
    await asyncio.gather(*tasks)


async def test_writer_gets_in_against_constant_readers(make_client: MakeClient) -> None:
    """TestInterProcessReadWriteLockBase.testWriterAgainstConstantReaders."""
    enough = asyncio.Event()

    async def read() -> None:
        pair = (await make_client()).rwlock("a")
        while not enough.is_set():
            async with pair.read:
                await asyncio.sleep(0.01)

    readers = [asyncio.create_task(read()) for _ in range(8)]
    client = await make_client()
    await until_held(client, "a")
    for _ in range(10):
        async with client.rwlock("a", timeout=PATIENCE).write:
            await asyncio.sleep(0.001)
    enough.set()
    await asyncio.gather(*readers)


async def test_random_readers_and_writers_never_meet(make_client: MakeClient) -> None:
    """testBasic."""
    inside = most = 0

    async def work(seed: int) -> None:
        nonlocal inside, most
        client, chance = await make_client(), random.Random(seed)
        pair = client.rwlock("a", timeout=PATIENCE)
        for _ in range(20):
            writes = chance.random() < 0.1
            async with pair.write if writes else pair.read:
                inside += 1
                most = max(most, inside)
                assert not writes or inside == 1
                await asyncio.sleep(chance.uniform(0.001, 0.003))
                assert not writes or inside == 1
                inside -= 1

    await asyncio.gather(*(work(seed) for seed in range(8)))
    assert most > 1


# -- TestInterProcessSemaphore ---------------------------------------------------------------------


async def test_leaving_a_client_gives_its_places_back(make_client: MakeClient) -> None:
    """testClientClose."""
    one, two = await make_client(), await make_client()
    await (await two.semaphore("s", 1).acquire(timeout=PATIENCE)).release()
    lease = await one.semaphore("s", 1).acquire(timeout=PATIENCE)
    await one.__aexit__(None, None, None)
    async with two.semaphore("s", 1, timeout=PATIENCE):
        assert not is_held(lease)


async def test_half_of_the_clients_are_inside_and_all_come_in(make_client: MakeClient) -> None:
    """testRelease1AtATime, testMaxPerSession, testReleaseInChunks."""
    inside = most = uses = 0

    async def work() -> None:
        nonlocal inside, most, uses
        async with (await make_client()).semaphore("s", 5, timeout=PATIENCE):
            inside, uses = inside + 1, uses + 1
            most = max(most, inside)
            assert inside <= 5
            await until(lambda: most == 5)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(10)))
    assert (uses, most) == (10, 5)


async def test_place_is_given_to_one_at_a_time(client: Client) -> None:
    """testThreads, testSimple, testSimple2: the fourth of three is refused until one leaves."""
    leases = [await client.semaphore("s", 3).acquire(timeout=PATIENCE) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(AcquireTimeout):
            await client.semaphore("s", 3).acquire(timeout=BRIEF)
    await leases.pop(0).release()
    leases.append(await client.semaphore("s", 3).acquire(timeout=PATIENCE))
    with pytest.raises(WouldBlock):
        await client.semaphore("s", 3).acquire_nowait()
    for lease in leases:
        await lease.release()


@pytest.mark.scripted
async def test_waiter_whose_record_was_deleted_still_gets_in_and_leaves_nothing(
    client: Client, store: Store
) -> None:
    """testNoOrphanedNodes."""
    lock = client.lock("a", ttl=LASTING)
    async with held_elsewhere(lock):
        waiter = asyncio.create_task(lock.acquire(timeout=PATIENCE))
        await until_waiting(client, "a")
        raw = await store.raw()
        gone = [key for key in await raw.keys("*") if await raw.type(key) == "stream"]
        await raw.delete(*gone)
    await (await waiter).release()
    await until_free(client, "a")
    async with client.lock("a", timeout=PATIENCE):
        pass
