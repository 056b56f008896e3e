"""python-redis-lock: ionelmc/python-redis-lock, tests/test_redis_lock.py.

Its `id` is our `owner=`, `expire` our ttl, `auto_renewal` our auto_extend, `reset` our break_lock.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import AcquireTimeout, Client, LockLost, NotHeld, WouldBlock

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

PATIENCE = 40.0


async def test_attempt_beside_a_holder_fails(client: Client, make_client: MakeClient) -> None:
    """test_simple, test_plain, test_no_block, test_timeout."""
    other = (await make_client()).lock("foobar")
    async with client.lock("foobar"):
        with pytest.raises(WouldBlock):
            await other.acquire_nowait()
        with pytest.raises(AcquireTimeout):
            await other.acquire(timeout=BRIEF)
    async with other:
        pass


async def test_lease_that_is_not_extended_ends(client: Client) -> None:
    """test_timeout_expire, test_expire, test_expire_without_timeout, test_no_auto_renewal."""
    first = await client.lock("a", ttl=LASTING, auto_extend=False, owner="one").acquire()
    second = client.lock("a", owner="two")
    with pytest.raises(WouldBlock):
        await second.acquire_nowait()
    async with second:
        assert not is_held(first)
    with pytest.raises(LockLost):
        await first.release()


async def test_lease_that_is_extended_does_not_end(client: Client) -> None:
    """test_timeout_expire_with_renewal, test_auto_renewal."""
    lock = client.lock("a", ttl=LASTING)
    async with held_elsewhere(lock) as lease:
        waiter = asyncio.create_task(lock.acquire())
        await until_outlived(lease)
        assert not waiter.done()
    await (await waiter).release()


@pytest.mark.parametrize("timeout", [-1, -0.001])
async def test_negative_timeout_is_refused(client: Client, timeout: float) -> None:
    """test_invalid_timeout, and that of 0, which here tries once."""
    with pytest.raises(ValueError):
        await client.lock("a").acquire(timeout=timeout)
    await client.lock("a").acquire(timeout=0)
    await client.lock("a").release()


async def test_lease_is_extended_by_more_than_it_had_and_by_its_own_ttl(client: Client) -> None:
    """test_extend, test_extend_lock_default_expire."""
    async with client.lock("a", ttl=100) as lease:
        assert lease.remaining() <= 100
        await lease.extend(1000)
        assert lease.remaining() > 100
    async with client.lock("a", ttl=20, auto_extend=False) as lease:
        await until(lambda: lease.remaining() < 19.5)
        before = lease.remaining()
        await lease.extend()
        assert before < lease.remaining() <= 20


async def test_another_object_of_the_same_owner_is_in_at_once(client: Client) -> None:
    """test_extend_another_instance, test_given_id, test_double_acquire: in, and counted, not refused."""
    first = await client.lock("a", ttl=100, owner="me").acquire()
    second = await client.lock("a", owner="me").acquire_nowait()
    await second.extend(1000)
    assert second.token == first.token
    assert ((await client.inspect("a")).holders[0].remaining or 0.0) > 100
    await first.release()
    assert is_held(second)
    await client.lock("a", owner="me").release()
    for lease in (first, second):
        with pytest.raises(NotHeld):
            await lease.release()
    await until_free(client, "a")


async def test_another_owner_cannot_extend_or_release(client: Client) -> None:
    """test_extend_another_instance_different_id_fail, test_bogus_release."""
    async with client.lock("a", ttl=100, owner="me"):
        with pytest.raises(NotHeld):
            await client.lock("a", owner="other").release()
        assert await client.lock("a").locked()
        assert ((await client.inspect("a")).holders[0].remaining or 0.0) <= 100


async def test_many_clients_never_overlap(make_client: MakeClient) -> None:
    """test_no_overlap, test_no_overlap2."""
    inside, start = 0, asyncio.Barrier(40)

    async def work(client: Client) -> None:
        nonlocal inside
        await start.wait()
        async with client.lock("a"):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    clients = [await make_client() for _ in range(4)]
    await asyncio.wait_for(asyncio.gather(*(work(clients[n % 4]) for n in range(40))), PATIENCE)


async def test_reset_frees_it_and_lets_the_waiter_in(client: Client) -> None:
    """test_reset, test_reset_signalizes."""
    lease = await client.lock("a", owner="one").acquire()
    waiter = asyncio.create_task(client.lock("a", owner="two").acquire())
    await until_waiting(client, "a")
    await client.break_lock("a")
    await (await soon(waiter)).release()
    with pytest.raises(LockLost):
        await lease.release()


async def test_reset_of_all_is_a_loop_over_the_locks(client: Client) -> None:
    """test_reset_all, test_reset_all_signalizes."""
    names = ["one", "two"]
    leases = [await client.lock(name, owner="me").acquire() for name in names]

    async def enter_all() -> None:
        for name in names:
            await (await client.lock(name).acquire()).release()

    waiter = asyncio.create_task(enter_all())
    await until_waiting(client, "one")
    async for info in client.locks():
        await client.break_lock(info.name)
    await soon(waiter)
    for lease in leases:
        with pytest.raises(LockLost):
            await lease.release()


async def test_owner_is_the_string_that_was_given_and_the_store_tells_it(client: Client) -> None:
    """test_owner_id, test_get_owner_id, test_token."""
    assert (await client.inspect("a")).holders == ()
    async with client.lock("a", owner="foobar-identifier") as lease:
        assert lease.owner == "foobar-identifier"
        assert (await client.inspect("a")).holders[0].owner == "foobar-identifier"
    async with client.lock("a") as lease:
        assert (await client.inspect("a")).holders[0].owner == lease.owner


@pytest.mark.parametrize("owner", [object(), b"a", 1])
async def test_owner_that_is_no_text_is_refused(client: Client, owner: object) -> None:
    """test_given_id."""
    with pytest.raises(TypeError):
        client.lock("a", owner=owner)  # type: ignore[arg-type]


@pytest.mark.scripted
async def test_what_stays_after_a_release_or_a_reset_expires(client: Client, store: Store) -> None:
    """test_signal_cleanup_on_release, test_signal_cleanup_on_reset, test_signal_cleanup_on_reset_all."""
    await client.lock("a").acquire()
    await client.lock("a").release()
    lease = await client.lock("a").acquire()
    await client.break_lock("a")
    with pytest.raises(LockLost):
        await lease.release()
    raw = await store.raw()
    left = await raw.keys("*")
    assert len(left) == 2, "the last token, and for a while the note that its grant was broken"
    assert all([await raw.pttl(key) > 0 for key in left])


async def test_extending_stops_when_the_lease_is_collected(client: Client) -> None:
    """test_auto_renewal_stops_after_gc."""
    lease = await asyncio.create_task(client.lock("a", ttl=LASTING).acquire())
    await asyncio.sleep(0)  # the loop forgets what it has handed on
    with pytest.warns(ResourceWarning):
        del lease
    async with client.lock("a", owner="other", timeout=PATIENCE):
        pass


def test_source_that_is_no_client_is_refused() -> None:
    """test_strict_check."""
    with pytest.raises(TypeError):
        Client(object())  # type: ignore[arg-type]
