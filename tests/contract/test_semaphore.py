"""Semaphores: the same queue with several holders, under keys of their own."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import AcquireTimeout, Client, LockLost, Semaphore, WouldBlock

from ..scenes import BRIEF, PATIENCE, until, until_free
from ..servers import ALL, CLUSTER, POSTGRES, REPLICATED, SENTINEL, ZOOKEEPER

# A quorum has no one place that could count: it refuses them.
pytestmark = pytest.mark.stores(*ALL, *POSTGRES, *ZOOKEEPER, CLUSTER, SENTINEL, REPLICATED)


async def test_at_most_limit_hold_at_a_time(client: Client) -> None:
    semaphore = client.semaphore("a", 3)
    three_are_in = asyncio.Barrier(3)
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with semaphore:
            inside += 1
            assert inside <= 3
            await three_are_in.wait()
            assert inside <= 3
            inside -= 1

    await asyncio.gather(*(work() for _ in range(12)))


async def test_it_is_not_reentrant(client: Client) -> None:
    semaphore = client.semaphore("a", 1)
    async with semaphore:
        with pytest.raises(WouldBlock):
            await semaphore.acquire_nowait()
        with pytest.raises(AcquireTimeout):
            await semaphore.acquire(timeout=BRIEF)


async def test_lock_of_the_same_name_is_another_thing(client: Client) -> None:
    async with client.semaphore("a", 1), client.lock("a", timeout=PATIENCE):
        assert len((await client.inspect("a")).holders) == 1


async def test_waiters_come_in_in_order(client: Client) -> None:
    semaphore = client.semaphore("a", 2)
    first, second = await semaphore.acquire(), await semaphore.acquire()
    # Two may hold together, so it is the grants that have an order, and not the bodies' first steps.
    tokens: dict[int, int] = {}

    async def work(number: int) -> None:
        async with semaphore as lease:
            tokens[number] = lease.token

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(work(number)))
        await asyncio.sleep(0)  # each request is sent by its first step, in order
    await first.release()
    await second.release()
    await asyncio.gather(*tasks)
    assert sorted(tokens, key=lambda number: tokens[number]) == list(range(5))


async def test_differing_limit_is_a_value_error(client: Client) -> None:
    async with client.semaphore("a", 2):
        with pytest.raises(ValueError, match="limit 2"):
            await client.semaphore("a", 3).acquire()
    async with client.semaphore("a", 3, timeout=PATIENCE):
        pass
    await until_free(client, "a")


async def test_bad_limits_are_refused(client: Client) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError):
            client.semaphore("a", wrong)
    for wrong_type in (True, 1.0, "1", None):
        with pytest.raises(TypeError):
            client.semaphore("a", wrong_type)  # type: ignore[arg-type]


async def test_places_that_a_lock_delay_closes_count_as_taken(client: Client) -> None:
    semaphore = client.semaphore("s", 2, ttl=0.2, lock_delay=30, auto_extend=False)
    leases = [await semaphore.acquire() for _ in range(2)]
    for lease in leases:
        await lease.wait_lost()
    await until(lambda: _nobody_holds(semaphore), "the end of both")
    assert await semaphore.locked()
    with pytest.raises(WouldBlock):
        await semaphore.acquire_nowait()
    for lease in leases:
        with pytest.raises(LockLost):
            await lease.release()


async def _nobody_holds(semaphore: Semaphore) -> bool:
    info = await semaphore.inspect()
    return not info.holders
