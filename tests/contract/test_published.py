"""What others have published about their locks of two modes, each case with its source.

aiorwlock: aio-libs/aiorwlock, tests/test_rwlock.py and tests/test_corner_cases.py. The cases of Redisson's
fair lock need processes that die: tests/integration/test_deaths.py.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import Client, DeadlockError, Lock, NotHeld, ReadWriteLock

from ..scenes import PATIENCE, cancelled, held_elsewhere, until, until_free, until_waiting

SOON = 5.0


async def _pass(lock: Lock) -> None:
    async with lock:
        pass


@pytest.fixture
def pair(client: Client) -> ReadWriteLock:
    return client.rwlock("a")


# -- aiorwlock: who is inside together -------------------------------------------------------------


async def test_many_readers_are_inside_at_the_same_time(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: test_many_readers, test_reader_recursion. All five are, each of them twice."""
    inside = asyncio.Barrier(5)

    async def read() -> None:
        async with pair.read, pair.read:
            await asyncio.wait_for(inside.wait(), SOON)

    await asyncio.gather(*(read() for _ in range(5)))
    await until_free(client, "a")


@pytest.mark.parametrize("inner", ["write", "read"])
async def test_writers_are_inside_one_at_a_time_however_often_each_enters(
    client: Client, pair: ReadWriteLock, inner: str
) -> None:
    """aiorwlock: test_writer_recursion, test_writer_then_reader_recursion, test_get_write_then_read."""
    inside: list[int] = []

    async def write(number: int) -> None:
        async with pair.write as first:
            async with pair.write if inner == "write" else pair.read as second:
                assert inside == []
                assert second.token == first.token
                inside.append(number)
                await asyncio.sleep(0)
                inside.remove(number)

    await asyncio.gather(*(write(number) for number in range(5)))
    await until_free(client, "a")


async def test_readers_and_writers_are_never_inside_together(pair: ReadWriteLock) -> None:
    """aiorwlock: test_readers_writers."""
    readers = writers = 0
    together = asyncio.Event()

    async def read() -> None:
        nonlocal readers
        async with pair.read:
            readers += 1
            if readers == 5:
                together.set()
            await together.wait()
            assert writers == 0
            await asyncio.sleep(0.002)
            readers -= 1

    async def write() -> None:
        nonlocal writers
        async with pair.write:
            writers += 1
            assert (readers, writers) == (0, 1)
            await asyncio.sleep(0.002)
            writers -= 1

    first = [asyncio.create_task(read()) for _ in range(5)]
    await asyncio.wait_for(together.wait(), PATIENCE)
    more = (work() for _ in range(5) for work in (write, read))
    await asyncio.gather(*first, *more)


async def test_writer_gets_in_though_readers_keep_coming(pair: ReadWriteLock) -> None:
    """aiorwlock: test_writer_success and its variants. Here after each reader once, at the most."""
    enough, reads = asyncio.Event(), 0

    async def read() -> None:
        nonlocal reads
        while not enough.is_set():
            async with pair.read:
                reads += 1

    tasks = [asyncio.create_task(read()) for _ in range(5)]
    await until(lambda: reads > 0)
    for _ in range(2):
        await asyncio.wait_for(_pass(pair.write), SOON)
    enough.set()
    await asyncio.gather(*tasks)


async def test_reader_waits_for_the_writer_and_then_has_it(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: test_write_read_lock_multiple_tasks, test_read_locked, test_write_locked."""
    async with pair.write:
        reader = asyncio.create_task(_pass(pair.read))
        await until_waiting(client, pair.name)
        assert not reader.done()
        assert await pair.read.locked()
    await asyncio.wait_for(reader, SOON)
    assert not await pair.write.locked()


# -- aiorwlock: re-entrance, upgrade, release -------------------------------------------------------------


async def test_reader_enters_again_though_a_writer_waits(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: test_reader_recursion, whose tasks stand beside writers in test_readers_writers."""
    async with pair.read:
        writer = asyncio.create_task(_pass(pair.write))
        await until_waiting(client, "a")
        async with asyncio.timeout(SOON), pair.read, pair.read:
            assert not writer.done()
    await writer


async def test_upgrade_is_refused_at_once(pair: ReadWriteLock) -> None:
    """aiorwlock: test_writer_recursion_fail, "Cannot upgrade RWLock from read to write"."""
    done = []

    async def upgrade(number: int) -> None:
        async with pair.read:
            with pytest.raises(RuntimeError, match="release the shared hold") as refused:
                await pair.write.acquire()
            assert isinstance(refused.value, DeadlockError)
            done.append(number)

    await asyncio.wait_for(asyncio.gather(*(upgrade(number) for number in range(5))), SOON)
    assert len(done) == 5


async def test_downgrade_leaves_a_reader_that_may_not_write(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: test_read_upgrade_write_release."""
    write = await pair.write.acquire()
    reads = [await pair.read.acquire() for _ in range(3)]
    await reads.pop().release()
    assert write.held
    await write.release()
    assert [holder.mode for holder in (await client.inspect("a")).holders] == ["shared"]
    with pytest.raises(RuntimeError):
        await pair.write.acquire()
    for read in reads:
        assert read.held
        await read.release()
    await until_free(client, "a")


async def test_release_of_what_is_not_held_is_an_error(pair: ReadWriteLock) -> None:
    """aiorwlock: test_release_unlocked."""
    for lock in (pair.read, pair.write):
        with pytest.raises(RuntimeError) as refused:
            await lock.release()
        assert isinstance(refused.value, NotHeld)


# -- aiorwlock: cancellation -------------------------------------------------------------


async def test_writer_that_waits_beside_both_modes_of_another_is_cancelled_in_vain(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: test_get_write_then_read_and_write_again. It never was inside."""
    async with pair.write, pair.read:
        other = asyncio.create_task(_pass(pair.write))
        await until_waiting(client, "a")
        await cancelled(other)
        assert (await client.inspect("a")).waiters == ()
    await asyncio.wait_for(_pass(pair.write), SOON)


@pytest.mark.parametrize("before", ["release", "hand-off"])
async def test_writer_cancelled_as_it_is_let_in_wakes_the_next(
    client: Client, pair: ReadWriteLock, before: str
) -> None:
    """aiorwlock: test_writers_deadlock (and python/cpython#1031): cancelled without waking the next."""
    reader = await pair.read.acquire()
    first = asyncio.create_task(_pass(pair.write))
    await until_waiting(client, "a")
    second = asyncio.create_task(_pass(pair.write))
    await until_waiting(client, "a", 2)
    if before == "release":
        release = asyncio.create_task(reader.release())
        await asyncio.sleep(0)
        first.cancel()
        await release
    else:
        await reader.release()
        first.cancel()
    await asyncio.wait_for(second, SOON)
    await asyncio.wait([first])
    await until_free(client, "a")


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_waiter_cancelled_right_after_the_release_lets_the_other_in(
    client: Client, pair: ReadWriteLock, mode: str
) -> None:
    """aiorwlock: test_readers_cancel."""
    lock = pair.read if mode == "read" else pair.write
    async with pair.write:
        first = asyncio.create_task(_pass(lock))
        await until_waiting(client, "a")
        second = asyncio.create_task(_pass(lock))
        await until_waiting(client, "a", 2)
    first.cancel()
    await asyncio.wait_for(second, SOON)
    await asyncio.wait([first])
    await until_free(client, "a")


async def test_cancelled_writer_lets_the_readers_behind_it_in(
    client: Client, pair: ReadWriteLock
) -> None:
    """aiorwlock: as test_writers_deadlock, with readers behind the writer and one still inside."""
    async with held_elsewhere(pair.read):
        writer: asyncio.Task[object] = asyncio.create_task(_pass(pair.write))
        await until_waiting(client, "a")
        readers = [asyncio.create_task(_pass(pair.read)) for _ in range(3)]
        await until_waiting(client, "a", 4)
        await cancelled(writer)
        await asyncio.wait_for(asyncio.gather(*readers), SOON)


# -- kazoo, Curator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [("read", "write"), ("read", "write", "read", "write")])
async def test_readers_and_writers_behind_a_writer_all_get_in(
    client: Client, pair: ReadWriteLock, behind: tuple[str, ...]
) -> None:
    """kazoo#649: a reader watched the writer that had come after it, and they waited for each other."""
    entered: list[int] = []

    async def enter(number: int, lock: Lock) -> None:
        async with lock:
            entered.append(number)

    async with held_elsewhere(pair.write):
        tasks = []
        for number, mode in enumerate(behind):
            lock = pair.read if mode == "read" else pair.write
            tasks.append(asyncio.create_task(enter(number, lock)))
            await until_waiting(client, "a", number + 1)
    await asyncio.wait_for(asyncio.gather(*tasks), SOON)
    assert entered == list(range(len(behind)))


async def test_downgrade_keeps_an_earlier_writer_out(client: Client, pair: ReadWriteLock) -> None:
    """curator#1138: a writer that was queued before the downgrade got in beside the reader."""
    write = await pair.write.acquire()
    writer = asyncio.create_task(_pass(pair.write))
    await until_waiting(client, "a")
    read = await pair.read.acquire()
    await write.release()
    info = await client.inspect("a")
    assert [holder.mode for holder in info.holders] == ["shared"]
    assert [waiter.mode for waiter in info.waiters] == ["exclusive"]
    assert read.held
    assert not writer.done()
    await read.release()
    await asyncio.wait_for(writer, SOON)


async def test_reader_checks_and_writes_and_reads_on_as_curators_users_do(
    client: Client, pair: ReadWriteLock
) -> None:
    """curator#1138: read, see that it is stale, write, downgrade, read on; five at the same time."""
    fresh, writers, refreshed = False, 0, 0

    async def refresh() -> None:
        nonlocal fresh, writers, refreshed
        async with pair.read:
            assert writers == 0
            if fresh:
                return
        async with pair.write:
            writers += 1
            assert writers == 1
            if not fresh:
                await asyncio.sleep(0.002)
                fresh, refreshed = True, refreshed + 1
            read = await pair.read.acquire()
            writers -= 1
        await asyncio.sleep(0.002)
        assert (writers, fresh) == (0, True)
        assert read.held
        await read.release()

    await asyncio.wait_for(asyncio.gather(*(refresh() for _ in range(5))), 2 * SOON)
    assert refreshed == 1
    await until_free(client, "a")
