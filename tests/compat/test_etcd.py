"""etcd's lock in Python: kragniz/python-etcd3, tests/test_etcd3.py. (gaopeiliang/aioetcd3 tests none.)

There a lease is not extended unless `refresh` is called: here with `auto_extend=False`.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import AcquireTimeout, Client, Lock, LockLost, NotHeld, WouldBlock

from ..conftest import MakeClient
from ..scenes import BRIEF, LASTING, is_held, soon, until_free, until_waiting
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

TTL = 0.4
PATIENCE = 40.0


def _lock(client: Client, owner: str, ttl: float = 10) -> Lock:
    return client.lock("lock-1", ttl=ttl, auto_extend=False, owner=owner)


@pytest.mark.parametrize("timeout", [0, BRIEF])
async def test_second_is_refused_while_the_first_holds(client: Client, timeout: float) -> None:
    """test_lock_acquire, test_lock_double_acquire_release."""
    first = _lock(client, "one")
    lease = await first.acquire()
    assert await first.locked()
    with pytest.raises(AcquireTimeout):
        await _lock(client, "two").acquire(timeout=timeout)
    await lease.release()


async def test_released_lock_is_acquired_again(client: Client) -> None:
    """test_lock_release."""
    lock = _lock(client, "one")
    for timeout in (PATIENCE, None):
        lease = await lock.acquire(timeout=timeout)
        await lock.release()
        assert not await lock.locked()
        assert not is_held(lease)
    with pytest.raises(NotHeld):
        await lock.release()


async def test_lease_that_is_not_refreshed_ends(client: Client) -> None:
    """test_lock_expire, test_lease_expire."""
    lease = await _lock(client, "one", TTL).acquire()
    assert lease.remaining() <= lease.ttl
    await until_free(client, "lock-1")
    assert not is_held(lease)
    with pytest.raises(LockLost):
        await lease.extend()
    with pytest.raises(LockLost):
        await lease.release()


async def test_lease_that_is_refreshed_does_not_end(client: Client) -> None:
    """test_lock_refresh."""
    clock = asyncio.get_running_loop().time
    lease = await _lock(client, "one", LASTING).acquire()
    outlived_at = clock() + LASTING
    while clock() < outlived_at:
        await asyncio.sleep(0.3)
        await lease.extend()
    assert is_held(lease)
    assert await _lock(client, "one").locked()
    await lease.release()


async def test_each_lease_tells_of_itself(client: Client) -> None:
    """test_lock_is_acquired, test_lock_context_manager."""
    async with _lock(client, "two") as second:
        assert second.held
    assert not is_held(second)
    async with _lock(client, "three") as third:
        assert is_held(third)
        assert not is_held(second)


@pytest.mark.parametrize("same_client", [True, False])
async def test_waiter_has_it_when_the_first_lease_ends(
    client: Client, make_client: MakeClient, same_client: bool
) -> None:
    """test_lock_contended, test_lock_acquire_none."""
    other = client if same_client else await make_client()
    first = await _lock(client, "one", TTL).acquire()
    second = await _lock(other, "two").acquire()
    assert (is_held(first), is_held(second)) == (False, True)
    assert second.token > first.token
    await second.release()
    with pytest.raises(LockLost):
        await first.release()


async def test_release_just_before_the_waiter_waits_is_not_missed(client: Client) -> None:
    """test_lock_acquire_with_timeout (python-etcd3#1107), again and again."""
    lock, other = _lock(client, "one"), _lock(client, "two")
    for turns in range(20):
        lease = await lock.acquire()
        waiter = asyncio.create_task(other.acquire(timeout=PATIENCE))
        for _ in range(turns):
            await asyncio.sleep(0)
        await lease.release()
        await (await soon(waiter)).release()


async def test_release_wakes_the_next_in_line_alone(client: Client) -> None:
    """etcd's own client/v3/concurrency waits for its predecessor only: nobody else is woken."""
    leases = [await _lock(client, "one").acquire()]
    waiters = []
    for number in range(3):
        waiters.append(asyncio.create_task(_lock(client, f"waiter-{number}").acquire()))
        await until_waiting(client, "lock-1", number + 1)
    for number, waiter in enumerate(waiters):
        await leases[-1].release()
        leases.append(await soon(waiter))
        assert [other.done() for other in waiters] == [n <= number for n in range(3)]
        with pytest.raises(WouldBlock):
            await _lock(client, "late").acquire_nowait()
    await leases[-1].release()
