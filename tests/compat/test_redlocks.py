"""Locks after Redlock: joanvila/aioredlock, tests/ut/** and tests/acceptance/test_aioredlock.py;
brainix/pottery, tests/test_redlock.py and tests/test_aioredlock.py; and py-sherlock/sherlock,
tests/integration/test_lock.py and tests/test_lock.py.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import (
    AcquireTimeout,
    Client,
    Lock,
    LockError,
    LockLost,
    NotHeld,
    WouldBlock,
)

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    LASTING,
    PATIENCE,
    held_elsewhere,
    is_held,
    soon,
    until,
    until_free,
    until_outlived,
    until_waiting,
)
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

TTL = 0.3


async def _until_free(lock: Lock) -> None:
    async def is_free() -> bool:
        return not await lock.locked()

    await until(is_free)


# -- aioredlock ------------------------------------------------------------------------------------


async def test_lease_is_valid_from_the_grant_to_the_release(client: Client) -> None:
    """acceptance: test_simple_aioredlock_one_instance; ut: test_lock, test_unlock, test_is_locked."""
    lock = client.lock("resource")
    assert await lock.locked() is False
    lease = await lock.acquire()
    assert lease.name == "resource"
    assert is_held(lease)
    assert await lock.locked() is True
    await lease.extend()
    assert is_held(lease)
    await lease.release()
    assert not is_held(lease)
    assert await lock.locked() is False


async def test_two_names_are_two_locks(client: Client) -> None:
    """acceptance: test_aioredlock_two_locks_on_different_resources_one_instance."""
    one, two = client.lock("one"), client.lock("two")
    first = await one.acquire()
    assert (await one.locked(), await two.locked()) == (True, False)
    second = await two.acquire()
    await first.release()
    assert (await one.locked(), await two.locked()) == (False, True)
    await second.release()


async def test_second_on_one_name_is_an_error_and_disturbs_nothing(client: Client) -> None:
    """acceptance: test_aioredlock_two_locks_on_same_resource_one_instance."""
    first = await client.lock("a", owner="one").acquire()
    with pytest.raises(LockError):
        await client.lock("a", owner="two", timeout=BRIEF).acquire()
    assert is_held(first)
    await first.release()
    await until_free(client, "a")


@pytest.mark.parametrize("option", ["ttl", "timeout", "margin", "lock_delay", "max_hold"])
@pytest.mark.parametrize("value", [-1, "string", float("nan")])
async def test_bad_values_are_refused(client: Client, option: str, value: object) -> None:
    """ut: test_initialization_with_invalid_params, test_validator."""
    with pytest.raises((TypeError, ValueError)):
        client.lock("a", **{option: value})  # type: ignore[arg-type]


async def test_name_that_is_no_text_is_a_type_error(client: Client) -> None:
    """ut: test_is_locked_type_error."""
    with pytest.raises(TypeError):
        client.lock(12345)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await client.inspect(12345)  # type: ignore[arg-type]


async def test_acquire_that_is_cancelled_by_a_timeout_around_it_leaves_nothing(
    client: Client,
) -> None:
    """ut: test_cancel_lock_."""
    async with held_elsewhere(client.lock("a")):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.lock("a").acquire(), 0.1)
        assert (await client.inspect("a")).waiters == ()


async def test_extending_what_is_released_is_a_runtime_error(client: Client) -> None:
    """ut: test_extend_lock."""
    lease = await client.lock("a").acquire()
    await lease.extend()
    await lease.release()
    with pytest.raises(RuntimeError):
        await lease.extend()


async def test_acquired_lease_is_a_context_manager(client: Client) -> None:
    """ut: test_context_manager: `async with await lock_manager.lock(...)`."""
    async with await client.lock("a").acquire() as lease:
        assert lease.held
        await lease.extend()
    assert not is_held(lease)
    assert not await client.lock("a").locked()


async def test_leaving_the_client_gives_up_all_it_holds(make_client: MakeClient) -> None:
    """ut: test_destroy_lock_manager."""
    one, two = await make_client(), await make_client()
    leases = [await one.lock(name).acquire() for name in ("a", "b")]
    await one.__aexit__(None, None, None)
    await until_free(two, "a", "b")
    assert not any(is_held(lease) for lease in leases)


async def test_lease_is_extended_over_several_ttls(client: Client) -> None:
    """ut: test_auto_extend."""
    async with client.lock("a", ttl=LASTING) as lease:
        for _ in range(2):
            await until_outlived(lease)
        assert lease.held


# -- pottery ---------------------------------------------------------------------------------------


async def test_lease_that_is_not_extended_ends_by_itself(client: Client) -> None:
    """test_acquire_and_time_out, test_acquired, test_acquire_same_lock_twice_non_blocking_..."""
    lock = client.lock("a", ttl=LASTING, auto_extend=False, owner="one")
    lease = await lock.acquire()
    with pytest.raises(WouldBlock):
        await client.lock("a", owner="two").acquire_nowait()
    assert await lock.locked()
    await _until_free(lock)
    assert not is_held(lease)
    with pytest.raises(LockLost):
        await lease.release()


async def test_second_waits_for_the_end_of_the_first_lease(client: Client) -> None:
    """test_acquire_same_lock_twice_blocking_without_timeout."""
    clock = asyncio.get_running_loop().time
    began = clock()
    first = await client.lock("a", ttl=TTL, auto_extend=False, owner="one").acquire()
    async with client.lock("a", owner="two"):
        assert clock() - began >= TTL * 0.95
    with pytest.raises(LockLost):
        await first.release()


@pytest.mark.parametrize("timeout", [0, BRIEF])
async def test_second_gives_up_at_its_timeout(client: Client, timeout: float) -> None:
    """test_acquire_same_lock_twice_blocking_with_timeout."""
    async with held_elsewhere(client.lock("a")):
        with pytest.raises(AcquireTimeout):
            await client.lock("a").acquire(timeout=timeout)
        assert await client.lock("a").locked()


async def test_release_is_once(client: Client) -> None:
    """test_locked_acquire_and_release, test_release_unlocked_lock, test_release_same_lock_twice."""
    lock = client.lock("a")
    with pytest.raises(NotHeld):
        await lock.release()
    await lock.acquire()
    assert await lock.locked()
    await lock.release()
    assert not await lock.locked()
    with pytest.raises(NotHeld, match="'a'"):
        await lock.release()


@pytest.mark.parametrize("on_lost", ["cancel", "flag"])
async def test_block_that_outlasts_its_lease_ends_with_an_error(
    client: Client, on_lost: str
) -> None:
    """test_context_manager_time_out_before_exit, ..._acquired_time_out_before_exit."""
    lock = client.lock("a", ttl=LASTING, auto_extend=False, on_lost=on_lost)  # type: ignore[arg-type]

    async def body() -> None:
        async with lock:
            assert await lock.locked()
            await _until_free(lock)
            await asyncio.sleep(0)

    with pytest.raises(LockLost):
        await body()
    assert not await lock.locked()


async def test_lost_block_and_the_next_holders_do_not_disturb_each_other(client: Client) -> None:
    """test_default_context_manager_params: the first leaves while the second is inside."""
    first = client.lock("a", ttl=TTL, auto_extend=False, on_lost="flag", owner="one")
    second = client.lock("a", owner="two")

    async def nest() -> None:
        async with first as lost:
            async with second as lease:
                assert (lost.held, lease.held) == (False, True)

    with pytest.raises(LockLost):
        await nest()
    await until_free(client, "a")


async def test_lock_that_does_not_wait_is_not_entered(client: Client) -> None:
    """test_overridden_context_manager_params."""
    entered = False
    async with held_elsewhere(client.lock("a")):
        with pytest.raises(AcquireTimeout):
            async with client.lock("a", timeout=0):
                entered = True
    assert not entered


async def test_lease_has_no_room_for_misspelt_attributes(client: Client) -> None:
    """test_slots, of the lock itself there; test_repr."""
    async with client.lock("printer") as lease:
        with pytest.raises(AttributeError):
            lease.auto_release_time = 3  # type: ignore[attr-defined]
        assert repr(lease).startswith("<Lease 'printer' exclusive token=")


async def test_decorated_functions_run_one_at_a_time(client: Client) -> None:
    """SynchronizeTests.test_synchronize: there is no decorator; three lines make one."""
    inside = 0

    async def func() -> None:
        nonlocal inside
        async with client.lock("synchronized-func", ttl=10):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.02)
            inside -= 1

    await asyncio.gather(*(func() for _ in range(3)))


# -- sherlock --------------------------------------------------------------------------------------


async def test_namespaces_are_prefixes(make_client: MakeClient) -> None:
    """TestRedisLock.test_acquire_with_namespace, test_release_with_namespace."""
    one, two = await make_client(prefix="ns"), await make_client()
    async with one.lock("a"), two.lock("a", timeout=PATIENCE):
        pass
    await until_free(one, "a")


async def test_only_the_holder_may_release(client: Client) -> None:
    """test_acquire_once_only, test_release_own_only, test_release_delete_race_condition."""
    one, two = client.lock("a", owner="one"), client.lock("a", owner="two")
    await one.acquire()
    with pytest.raises(WouldBlock):
        await two.acquire_nowait()
    with pytest.raises(LockError):
        await two.release()
    assert await one.locked()
    await one.release()


async def test_acquire_obeys_its_timeout_without_polling(client: Client) -> None:
    """test_acquire_obeys_timeout, test_acquire_obeys_retry_interval: there is no interval here."""
    async with held_elsewhere(client.lock("a")):
        with pytest.raises(TimeoutError) as over:
            await client.lock("a", timeout=BRIEF).acquire()
        assert isinstance(over.value, LockError)


async def test_collected_lease_frees_the_lock(client: Client) -> None:
    """test_deleting_lock_object_releases_the_lock: the lease here; a Lock holds nothing."""
    lease = await asyncio.create_task(client.lock("a").acquire())
    waiter = asyncio.create_task(client.lock("a").acquire())
    await until_waiting(client, "a")
    with pytest.warns(ResourceWarning):
        del lease
    await (await soon(waiter)).release()


async def test_lock_cannot_be_used_before_its_client_is_open(client: Client) -> None:
    """TestLock.test_lock_does_not_create_proxy_when_backend_is_not_set."""
    lock = Client("memory://").lock("a")
    for call in (lock.acquire(), lock.release(), lock.locked()):
        with pytest.raises(LockError):
            await call
