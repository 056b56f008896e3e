"""redis-py's own lock: redis/redis-py, tests/test_asyncio/test_lock.py and tests/test_lock.py.

There every `Lock` object is an owner of its own; here that is what `owner=` makes of it.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import AcquireTimeout, Client, Lock, LockError, LockLost, NotHeld, WouldBlock

from ..scenes import BRIEF, PATIENCE, SOON, held_elsewhere, is_held, takes, until
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)


@pytest.fixture
def one(client: Client) -> Lock:
    return client.lock("foo", owner="one")


@pytest.fixture
def two(client: Client) -> Lock:
    return client.lock("foo", owner="two")


async def test_lock_is_there_until_it_is_released(client: Client, one: Lock) -> None:
    """test_lock, test_lock_token: the owner's own string is what the store shows."""
    lease = await one.acquire_nowait()
    (holder,) = (await client.inspect("foo")).holders
    assert (holder.owner, holder.token) == ("one", lease.token)
    await one.release()
    assert (await client.inspect("foo")).holders == ()
    assert not is_held(lease)


async def test_locked_tells_about_anybody(one: Lock, two: Lock) -> None:
    """test_locked."""
    assert await one.locked() is False
    await one.acquire_nowait()
    assert await one.locked() is True
    assert await two.locked() is True
    await one.release()
    assert await one.locked() is False


async def test_lease_tells_about_its_own_hold_alone(one: Lock, two: Lock) -> None:
    """test_owned, test_owned_with_decoded_responses."""
    first = await one.acquire_nowait()
    assert is_held(first)
    await one.release()
    assert not is_held(first)
    second = await two.acquire_nowait()
    assert not is_held(first)
    assert is_held(second)
    await two.release()
    assert not is_held(second)


async def test_two_owners_compete(one: Lock, two: Lock) -> None:
    """test_competing_locks."""
    for mine, other in ((one, two), (two, one)):
        await mine.acquire_nowait()
        with pytest.raises(WouldBlock):
            await other.acquire_nowait()
        await mine.release()


@pytest.mark.parametrize("ttl", [100, 95.5])
async def test_ttl_is_what_was_asked_for(client: Client, ttl: float) -> None:
    """test_timeout, test_float_timeout."""
    lease = await client.lock("foo", ttl=ttl).acquire_nowait()
    (holder,) = (await client.inspect("foo")).holders
    assert 80 < (holder.remaining or 0.0) <= ttl
    assert 80 < lease.remaining() <= ttl
    await lease.release()


async def test_waiting_ends_with_the_timeout_and_not_before(one: Lock, two: Lock) -> None:
    """test_blocking_timeout, test_high_sleep_small_blocking_timeout."""
    async with one, takes(at_least=0.99 * BRIEF, at_most=BRIEF + SOON):
        with pytest.raises(AcquireTimeout):
            await two.acquire(timeout=BRIEF)


async def test_block_holds_and_releases(client: Client, two: Lock) -> None:
    """test_context_manager."""
    async with client.lock("foo", timeout=PATIENCE) as lease:
        assert lease.held
        assert await two.locked()
    assert not await two.locked()


async def test_block_is_not_entered_without_the_lock(client: Client, one: Lock) -> None:
    """test_context_manager_raises_when_locked_not_acquired, test_lock_error_gives_correct_lock_name."""
    entered = False
    async with held_elsewhere(one):
        with pytest.raises(LockError) as refused:
            async with client.lock("foo", timeout=BRIEF):
                entered = True
    assert refused.value.name == "foo"
    assert not entered


async def test_releasing_what_was_never_acquired_is_an_error_that_names_the_lock(
    one: Lock,
) -> None:
    """test_releasing_unlocked_lock_raises_error."""
    with pytest.raises(LockError) as refused:
        await one.release()
    assert isinstance(refused.value, NotHeld)
    assert refused.value.name == "foo"


async def test_releasing_what_another_holds_by_now_is_an_error_once(
    client: Client, one: Lock, two: Lock
) -> None:
    """test_releasing_lock_no_longer_owned_raises_error: though it failed, the hold is forgotten."""
    await one.acquire_nowait()
    await client.break_lock("foo")
    other = await two.acquire()
    with pytest.raises(LockLost):
        await one.release()
    with pytest.raises(NotHeld):
        await one.release()
    assert is_held(other)
    assert await two.locked()
    await other.release()


async def test_block_whose_lock_another_holds_by_now_ends_with_an_error(
    client: Client, two: Lock
) -> None:
    """test_context_manager_reacquiring_lock_no_longer_owned_raises_error."""

    async def body() -> None:
        async with client.lock("foo", on_lost="flag"):
            await client.break_lock("foo")
            async with two:
                pass

    with pytest.raises(LockLost):
        await body()


async def test_extending_moves_the_deadline_to_the_new_ttl(client: Client) -> None:
    """test_extend_lock, test_extend_lock_float, test_extend_lock_replace_ttl."""
    lease = await client.lock("foo", ttl=50).acquire_nowait()
    assert 40 < lease.remaining() <= 50
    await lease.extend(100.0)
    assert 90 < lease.remaining() <= 100
    (holder,) = (await client.inspect("foo")).holders
    assert 90 < (holder.remaining or 0.0) <= 100
    await lease.release()


async def test_extending_what_is_released_is_an_error(one: Lock) -> None:
    """test_extending_unlocked_lock_raises_error, test_reacquiring_unlocked_lock_raises_error."""
    lease = await one.acquire_nowait()
    await lease.release()
    for ttl in (10, None):
        with pytest.raises(LockError) as refused:
            await lease.extend(ttl)
        assert isinstance(refused.value, NotHeld)


async def test_extending_what_another_holds_by_now_is_an_error(
    client: Client, one: Lock, two: Lock
) -> None:
    """test_extending_lock_no_longer_owned_raises_error, test_reacquiring_lock_no_longer_owned_..."""
    lease = await one.acquire_nowait()
    await client.break_lock("foo")
    async with two as other:
        for ttl in (10, None):
            with pytest.raises(LockLost):
                await lease.extend(ttl)
        assert other.held
    with pytest.raises(LockLost):
        await lease.release()


async def test_extending_without_a_ttl_starts_the_present_one_anew(client: Client) -> None:
    """test_reacquire_lock."""
    lease = await client.lock("foo", ttl=20, auto_extend=False).acquire_nowait()
    await lease.extend()  # a request that waited starts shorter, one that did not has it all
    await until(lambda: lease.remaining() < 19.5)
    before = lease.remaining()
    await lease.extend()
    assert before < lease.remaining() <= 20
    await lease.release()


async def test_lease_is_handed_to_another_task(one: Lock) -> None:
    """test_lock_token_thread_local_false, and that of a lock whose token is not thread-local."""
    lease = await one.acquire_nowait()

    async def finish() -> None:
        await lease.extend()
        await lease.release()

    await asyncio.create_task(finish())
    assert not await one.locked()
