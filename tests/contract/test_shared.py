"""Shared and exclusive in one queue; test_published has more of it."""

from __future__ import annotations

import asyncio

import pytest

import aiodlock
from aiodlock import Client, Lock

from ..conftest import MakeClient
from ..scenes import cancelled, held_elsewhere, keeper_of, soon, until, until_free, until_waiting


async def test_downgrade_lets_readers_in_and_no_writer(client: Client) -> None:
    rwlock = client.rwlock("a")
    write, read = await rwlock.write.acquire(), await rwlock.read.acquire()
    reader = asyncio.create_task(_pass(rwlock.read))
    await until_waiting(client, "a")
    writer = asyncio.create_task(_pass(rwlock.write))
    await until_waiting(client, "a", 2)
    await write.release()
    await soon(reader)
    assert not writer.done()
    await read.release()
    await writer


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
    """As in Redisson's testAbandonedTimeoutDrift_Descrete, on every store; see tests/integration."""
    ghosts = [await make_client(waiter_ttl=0.5) for _ in range(3)]
    async with held_elsewhere(client.lock("a")):
        tasks = []
        for number, ghost in enumerate(ghosts):
            tasks.append(asyncio.create_task(_pass(ghost.lock("a"))))
            await until_waiting(client, "a", number + 1)
        for ghost in ghosts:
            keeper = keeper_of(ghost)
            # Also when an extension is under way: its answer would plan the next one.
            setattr(keeper, "_schedule", lambda place: None)  # noqa: B010
            for place in keeper.places.values():
                keeper.forget(place)
        mine = asyncio.create_task(_pass(client.lock("a")))

        async def alone() -> bool:
            return len((await client.inspect("a")).waiters) == 1

        await until(alone, "the ghosts being gone")
    await soon(mine)
    for task in tasks:
        await cancelled(task)


async def _pass(lock: Lock) -> None:
    async with lock:
        pass


async def test_exclusive_hold_is_entered_again_also_behind_a_later_shared_one(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("x")
    async with both.write as first, both.read, both.write as again:
        assert again.token == first.token
    await until_free(client, "x")


async def test_lost_shared_hold_of_a_block_is_told_also_to_who_asks_exclusively(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("name", ttl=0.1, auto_extend=False, on_lost="flag")
    with pytest.raises(aiodlock.LockLost):  # noqa: PT012
        async with both.read as lease:
            await lease.wait_lost()
            with pytest.raises(aiodlock.LockLost):
                await both.write.acquire()


async def test_lost_shared_hold_without_a_block_is_no_obstacle_to_asking_exclusively(
    client: aiodlock.Client,
) -> None:
    both = client.rwlock("name", ttl=0.1, auto_extend=False)
    lease = await both.read.acquire()
    await lease.wait_lost()
    async with both.write:
        pass
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
