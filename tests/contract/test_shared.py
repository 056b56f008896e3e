"""Shared and exclusive in one queue, with what others have published about theirs."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import Client, DeadlockError, Lock

from ..conftest import MakeClient
from .scenes import cancelled, held_elsewhere, until, until_free, until_waiting


async def test_reentrance_as_in_aiorwlock(client: Client) -> None:
    """aiorwlock: a reader enters again though a writer waits; a writer may read, and write again."""
    rwlock = client.rwlock("a")
    async with rwlock.read:
        writer = asyncio.create_task(_pass(rwlock.write))
        await until_waiting(client, "a")
        async with rwlock.read:
            pass
    await writer
    async with rwlock.write, rwlock.write, rwlock.read:
        pass
    await until_free(client, "a")


async def test_upgrade_is_refused_as_in_aiorwlock(client: Client) -> None:
    """aiorwlock: "Cannot upgrade RWLock from read to write"."""
    rwlock = client.rwlock("a")
    async with rwlock.read:
        with pytest.raises(DeadlockError, match="release the shared hold"):
            await rwlock.write.acquire()


async def test_cancelled_writer_lets_readers_pass_as_in_aiorwlock(client: Client) -> None:
    """aiorwlock: a writer that is cancelled while waiting does not keep those behind it out."""
    rwlock = client.rwlock("a")
    async with held_elsewhere(rwlock.read):
        writer: asyncio.Task[object] = asyncio.create_task(_pass(rwlock.write))
        await until_waiting(client, "a")
        reader = asyncio.create_task(_pass(rwlock.read))
        await until_waiting(client, "a", 2)
        await cancelled(writer)
        await asyncio.wait_for(reader, 2.0)


async def test_downgrade_lets_readers_in_and_no_writer(client: Client) -> None:
    rwlock = client.rwlock("a")
    write, read = await rwlock.write.acquire(), await rwlock.read.acquire()
    reader = asyncio.create_task(_pass(rwlock.read))
    await until_waiting(client, "a")
    writer = asyncio.create_task(_pass(rwlock.write))
    await until_waiting(client, "a", 2)
    await write.release()
    await asyncio.wait_for(reader, 2.0)
    assert not writer.done()
    await read.release()
    await writer


async def test_downgrade_keeps_an_earlier_writer_out(client: Client) -> None:
    """curator#1138: a writer that was queued before the downgrade got in beside the reader."""
    rwlock = client.rwlock("a")
    write = await rwlock.write.acquire()
    writer = asyncio.create_task(_pass(rwlock.write))
    await until_waiting(client, "a")
    read = await rwlock.read.acquire()
    await write.release()
    (waiter,) = (await client.inspect("a")).waiters
    assert waiter.mode == "exclusive"
    assert read.held
    await read.release()
    await asyncio.wait_for(writer, 2.0)


async def test_reader_and_writer_behind_a_writer_both_get_in(client: Client) -> None:
    """kazoo#649: released, the reader and the later writer waited for each other."""
    rwlock = client.rwlock("a")
    async with held_elsewhere(rwlock.write):
        reader = asyncio.create_task(_pass(rwlock.read))
        await until_waiting(client, "a")
        writer = asyncio.create_task(_pass(rwlock.write))
        await until_waiting(client, "a", 2)
    await asyncio.wait_for(asyncio.gather(reader, writer), 2.0)


async def test_later_reader_does_not_pass_a_writer(client: Client) -> None:
    rwlock = client.rwlock("a")
    async with held_elsewhere(rwlock.read):
        writer = asyncio.create_task(_pass(rwlock.write))
        await until_waiting(client, "a")
        reader = asyncio.create_task(_pass(rwlock.read))
        await until_waiting(client, "a", 2)
        assert [w.mode for w in (await client.inspect("a")).waiters] == ["exclusive", "shared"]
    await asyncio.gather(writer, reader)


async def test_abandoned_head_costs_one_waiter_ttl(make_client: MakeClient, client: Client) -> None:
    """Redisson's fair lock: heads whose process is gone, and timeouts that drift with their number."""
    ghosts = [await make_client(waiter_ttl=0.5) for _ in range(3)]
    async with held_elsewhere(client.lock("a")):
        tasks = []
        for number, ghost in enumerate(ghosts):
            tasks.append(asyncio.create_task(_pass(ghost.lock("a"))))
            await until_waiting(client, "a", number + 1)
        for ghost in ghosts:
            assert ghost._session is not None
            ghost._session.extender.extend_now = lambda place: None  # type: ignore[method-assign]
            for place in ghost._session.places.values():
                ghost._session.extender.forget(place)
        mine = asyncio.create_task(_pass(client.lock("a")))

        async def alone() -> bool:
            return len((await client.inspect("a")).waiters) == 1

        await until(alone, "the ghosts being gone")
    await asyncio.wait_for(mine, 1.0)
    for task in tasks:
        await cancelled(task)


async def _pass(lock: Lock) -> None:
    async with lock:
        pass
