"""redis-fifo-lock: gaussian/redis-fifo-lock, tests/adversarial/** and tests/test_async_integration.py.

The nearest relative: a fair lock on Redis streams. Its names: crash-detection window (here the ttl), fence
(token), abandoned (a holder that nobody extends any more).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import redis.asyncio

from aiodlock import (
    AcquireTimeout,
    BackendUnavailable,
    Client,
    Lease,
    Lock,
    LockLost,
    NotHeld,
    WouldBlock,
)

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    LASTING,
    is_held,
    soon,
    until,
    until_free,
    until_outlived,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

TTL = 0.3
PATIENCE = 40.0


class Monitor:
    """Who is inside at this moment, and the tokens in the order in which they came in."""

    def __init__(self) -> None:
        self.inside = 0
        self.tokens: list[int] = []
        self.names: list[str] = []

    async def hold(self, lock: Lock, name: str = "", seconds: float = 0.0) -> None:
        async with lock as lease:
            await self.watch(lease, name, lambda: asyncio.sleep(seconds))

    async def watch(self, lease: Lease, name: str, work: Callable[[], object]) -> None:
        self.inside += 1
        assert self.inside == 1, f"{name} came in beside another"
        self.tokens.append(lease.token)
        self.names.append(name)
        try:
            doing = work()
            if asyncio.iscoroutine(doing):
                await doing
            assert lease.held
        finally:
            self.inside -= 1

    def assert_in_order_of_tokens(self, number: int) -> None:
        assert len(self.tokens) == number
        assert self.tokens == sorted(set(self.tokens))


# -- adversarial/test_mutual_exclusion.py ----------------------------------------------------------


async def test_holds_far_longer_than_the_ttl_never_overlap(client: Client) -> None:
    """test_long_hold_never_overlaps, test_hold_far_beyond_the_recovery_window."""
    monitor, lock = Monitor(), client.lock("a", ttl=LASTING)

    async def work(name: str) -> None:
        async with lock as lease:
            await monitor.watch(lease, name, lambda: until_outlived(lease))

    await asyncio.gather(*(work(str(number)) for number in range(2)))
    monitor.assert_in_order_of_tokens(2)


async def test_burst_lets_everybody_in_one_at_a_time(client: Client) -> None:
    """test_burst_acquire_grants_exactly_one, test_high_contention_100_coroutines."""
    monitor, lock = Monitor(), client.lock("a")
    await asyncio.wait_for(
        asyncio.gather(*(monitor.hold(lock, str(number)) for number in range(100))), PATIENCE
    )
    monitor.assert_in_order_of_tokens(100)
    await until_free(client, "a")


async def test_grants_follow_the_arrival_at_the_server(
    client: Client, make_client: MakeClient
) -> None:
    """test_fifo_follows_server_arrival, test_separate_instances_contend_for_one_lock_name."""
    monitor = Monitor()
    locks = [(await make_client()).lock("a") for _ in range(6)]
    async with client.lock("a"):
        tasks = []
        for number, lock in enumerate(locks):
            tasks.append(asyncio.create_task(monitor.hold(lock, str(number))))
            await until_waiting(client, "a", number + 1)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert monitor.names == [str(number) for number in range(6)]
    monitor.assert_in_order_of_tokens(6)


async def test_random_holds_waits_and_timeouts_never_overlap(client: Client) -> None:
    """test_randomized_operations_never_overlap."""
    monitor, lock, chance = Monitor(), client.lock("a", ttl=LASTING), random.Random(1)
    held = 0

    async def work() -> None:
        nonlocal held
        for _ in range(2):
            await asyncio.sleep(chance.uniform(0, 0.1))
            seconds = chance.choice([0.03, 0.15, LASTING * 1.1])
            try:
                lease = await lock.acquire(timeout=chance.choice([None, 0.3, 60]))
            except (AcquireTimeout, BackendUnavailable):  # the latter when the machine stalls
                continue
            async with lease:
                await monitor.watch(lease, "", lambda: asyncio.sleep(seconds))  # noqa: B023
            held += 1

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(4))), PATIENCE)
    monitor.assert_in_order_of_tokens(held)
    await until_free(client, "a")


async def test_those_who_gave_up_leave_nothing_in_the_way(client: Client) -> None:
    """test_abandoned_waiters_do_not_wedge_the_gate, test_concurrent_acquire_with_timeouts."""
    lock = client.lock("a")
    lease = await lock.acquire()

    async def give_up() -> None:
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=BRIEF)

    async def get_in() -> None:
        async with client.lock("a", timeout=PATIENCE):
            pass

    patient = asyncio.create_task(get_in())
    await asyncio.gather(*(asyncio.create_task(give_up()) for _ in range(6)))
    assert len((await client.inspect("a")).waiters) == 1
    await lease.release()
    await soon(patient)
    await until_free(client, "a")


async def test_holder_that_is_no_longer_extended_is_replaced(
    client: Client, make_client: MakeClient
) -> None:
    """test_crashed_holder_is_reclaimed, test_single_dead_holder_recovery, and of several in a row."""
    leases = []
    for number in range(3):
        lock = client.lock("a", ttl=TTL, auto_extend=False, owner=str(number))
        leases.append(await asyncio.wait_for(lock.acquire(), PATIENCE))  # never released
    async with (await make_client()).lock("a", timeout=PATIENCE) as successor:
        assert successor.token > max(lease.token for lease in leases)
        assert not any(is_held(lease) for lease in leases)
    for lease in leases:
        with pytest.raises(LockLost):
            await lease.release()


@pytest.mark.scripted
async def test_queue_is_empty_when_all_have_left(client: Client, store: Store) -> None:
    """test_queue_drains_to_empty; unlike test_real_redis_stream_growth, which keeps each entry."""
    monitor, lock = Monitor(), client.lock("a")
    for _ in range(2):
        await asyncio.gather(*(monitor.hold(lock) for _ in range(10)))
    await until_free(client, "a")
    keys = await (await store.raw()).keys("*")
    assert len(keys) == 1, "only the last token stays"
    assert await (await store.raw()).pttl(keys[0]) > 0


# -- adversarial/test_lease_lifecycle.py -----------------------------------------------------------


async def test_release_that_is_repeated_after_others_came_and_went_tells_of_no_loss(
    client: Client,
) -> None:
    """test_replayed_release_after_interleaved_cycle_is_not_stale, test_concurrent_release_same_..."""
    first = await client.lock("a").acquire()
    await first.release()
    async with client.lock("a"):
        pass
    with pytest.raises(NotHeld):
        await first.release()
    assert first.lost is None


async def test_extension_on_its_way_while_releasing_tells_of_no_loss(client: Client) -> None:
    """test_clean_release_never_reports_loss."""
    lock = client.lock("a", ttl=LASTING)
    for _ in range(20):
        lease = await lock.acquire()
        extending = asyncio.create_task(lease.extend())
        await asyncio.sleep(0)
        await lease.release()
        await asyncio.wait([extending])
        assert isinstance(extending.exception(), NotHeld | None)
        assert lease.lost is None


async def test_inspect_tells_what_the_lease_does(client: Client) -> None:
    """test_hold_context_manager_acquires_and_releases: stats()."""
    async with client.lock("a", timeout=PATIENCE) as lease:
        info = await client.inspect("a")
        (holder,) = info.holders
        assert (holder.owner, holder.token, info.waiters) == (lease.owner, lease.token, ())
    info = await client.inspect("a")
    assert (info.holders, info.waiters) == ((), ())


async def test_release_of_a_lapsed_lease_tells_of_the_loss(client: Client) -> None:
    """test_release_of_a_genuinely_lost_lease_raises, test_release_of_a_lapsed_hold_raises_lease_..."""
    lease = await client.lock("a", ttl=TTL, auto_extend=False, owner="one").acquire()
    async with client.lock("a", owner="two"):
        with pytest.raises(LockLost):
            await lease.release()
        assert await client.lock("a").locked()


# -- adversarial/test_consumer_patterns.py ---------------------------------------------------------


@pytest.mark.real_store
@pytest.mark.parametrize("decode", [True, False])
async def test_all_holds_on_the_callers_client_whether_it_decodes_or_not(
    store: Store, make_client: MakeClient, decode: bool
) -> None:
    """test_exclusion_and_fifo_on_the_consumers_client, test_crash_recovery_on_the_consumers_client."""
    monitor = Monitor()
    async with redis.asyncio.Redis.from_url(store.url, decode_responses=decode) as ready:
        client = await make_client(url=ready)
        lock, tasks = client.lock("a"), []
        async with client.lock("a", owner="holder"):
            for number in range(5):
                tasks.append(asyncio.create_task(monitor.hold(lock, str(number))))
                await until_waiting(client, "a", number + 1)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        dead = await client.lock("a", ttl=TTL, auto_extend=False, owner="dead").acquire()
        await asyncio.wait_for(monitor.hold(lock), PATIENCE)
        assert not is_held(dead)
        await until_free(client, "a")
    monitor.assert_in_order_of_tokens(6)


async def test_second_release_does_not_free_it_for_a_third(client: Client) -> None:
    """test_duplicate_release_does_not_steal_from_the_live_holder."""
    first = await client.lock("a", owner="one").acquire()
    await first.release()
    holder = await client.lock("a", owner="two").acquire()
    with pytest.raises(NotHeld):
        await first.release()
    with pytest.raises(WouldBlock):
        await client.lock("a", owner="three").acquire_nowait()
    assert is_held(holder)
    await holder.release()


async def test_release_by_one_who_had_lost_it_does_not_free_it(client: Client) -> None:
    """test_release_after_recovery_does_not_steal_from_the_successor."""
    dead = await client.lock("a", ttl=TTL, auto_extend=False, owner="one").acquire()
    successor = await client.lock("a", owner="two").acquire()
    with pytest.raises(LockLost):
        await dead.release()
    with pytest.raises(WouldBlock):
        await client.lock("a", owner="three").acquire_nowait()
    assert is_held(successor)
    await successor.release()


async def test_lease_outlives_the_task_that_acquired_it_and_is_released_by_another(
    client: Client,
) -> None:
    """test_acquire_and_release_in_different_tasks_across_many_windows."""
    monitor, lock = Monitor(), client.lock("a", ttl=LASTING)
    lease = await asyncio.create_task(lock.acquire())
    waiter = asyncio.create_task(monitor.hold(lock))
    await until_waiting(client, "a")
    await until_outlived(lease)
    assert monitor.names == []
    await asyncio.create_task(lease.release())
    await soon(waiter)


async def test_cancelled_acquires_leave_nothing(client: Client) -> None:
    """test_cancelled_acquires_leave_no_residue."""
    async with client.lock("a"):
        parked = [asyncio.create_task(client.lock("a").acquire()) for _ in range(6)]
        await until_waiting(client, "a", 6)
        for task in parked:
            task.cancel()
        await asyncio.wait(parked)
        assert all(task.cancelled() for task in parked)
        assert (await client.inspect("a")).waiters == ()
    async with client.lock("a", timeout=PATIENCE):
        pass


async def test_lock_that_is_never_released_costs_the_others_their_timeouts_alone(
    client: Client,
) -> None:
    """test_unreleased_lock_is_survivable: until its holder is gone."""
    stranded = await client.lock("a", ttl=LASTING, max_hold=1.5 * LASTING).acquire()

    async def attempt() -> None:
        with pytest.raises(AcquireTimeout):
            await client.lock("a").acquire(timeout=BRIEF)

    await asyncio.gather(*(asyncio.create_task(attempt()) for _ in range(6)))
    async with client.lock("a", timeout=PATIENCE, owner="other"):
        assert not is_held(stranded)
    await until_free(client, "a")


async def test_storm_of_timeouts_and_new_attempts_goes_on_without_overlap(client: Client) -> None:
    """test_timeout_retry_storm_makes_progress_without_overlap."""
    monitor, lock = Monitor(), client.lock("a")
    passed = given_up = 0
    enough = asyncio.Event()

    async def storm() -> None:
        nonlocal passed, given_up
        timeout = 0.05
        while not enough.is_set():
            try:
                lease = await lock.acquire(timeout=timeout)
            except (
                AcquireTimeout,
                BackendUnavailable,
            ):  # the latter when the machine stalls so long
                given_up += 1
                timeout *= 1.5  # on a machine that is busy enough, nobody is served in 50 ms
                continue
            async with lease:
                await monitor.watch(lease, "", lambda: asyncio.sleep(0.02))
            passed += 1
            timeout = 0.05

    tasks = [asyncio.create_task(storm()) for _ in range(8)]
    await until(lambda: passed >= 20 and given_up >= 20, within=PATIENCE)
    enough.set()
    await asyncio.gather(*tasks)
    monitor.assert_in_order_of_tokens(passed)
    await until_free(client, "a")


async def test_names_do_not_wait_for_each_other(client: Client) -> None:
    """test_many_lock_names_share_one_client_without_interfering."""
    all_inside = asyncio.Barrier(8)

    async def hold(name: str) -> None:
        for _ in range(3):
            async with client.lock(name):
                await asyncio.wait_for(all_inside.wait(), PATIENCE)

    await asyncio.gather(*(hold(f"n{number}") for number in range(8)))


async def test_lease_that_a_living_process_forgot_is_released(client: Client) -> None:
    """test_lock_abandoned_by_a_still_running_process_is_reclaimable: its bound is max_hold's, or gc's."""
    stranded = await asyncio.create_task(client.lock("a").acquire())
    await asyncio.sleep(0)  # the loop forgets what it has handed on
    with pytest.warns(ResourceWarning, match="forgotten while held"):
        del stranded
    async with client.lock("a", timeout=PATIENCE, owner="other"):
        pass


# -- adversarial/test_holdset.py -------------------------------------------------------------------


async def test_entering_again_joins_the_hold_until_the_last_release(
    client: Client, make_client: MakeClient
) -> None:
    """test_reentry_joins_the_hold, test_concurrent_acquires_coalesce_onto_one_lease (an owner)."""
    lock, other = client.lock("a", owner="scope"), (await make_client()).lock("a")
    first, second = await asyncio.gather(
        asyncio.create_task(lock.acquire()), asyncio.create_task(lock.acquire())
    )
    assert first.token == second.token
    assert (await client.inspect("a")).holders[0].count == 2
    await first.release()
    with pytest.raises(WouldBlock):
        await other.acquire_nowait()
    await second.release()
    async with other:
        pass


async def test_leaving_the_scope_releases_all_its_names(make_client: MakeClient) -> None:
    """test_aclose_sweeps_every_held_name."""
    scope, other = await make_client(), await make_client()
    leases = [await scope.lock(name).acquire() for name in ("a", "b", "b")]
    await scope.__aexit__(None, None, None)
    for name in ("a", "b"):
        async with other.lock(name, timeout=PATIENCE):
            pass
    assert not any(is_held(lease) for lease in leases)


async def test_failed_attempt_leaves_nothing_at_its_scope(make_client: MakeClient) -> None:
    """test_failed_first_acquire_wakes_joiners_and_leaves_no_residue."""
    one, two = await make_client(), await make_client()

    async def attempt() -> None:
        with pytest.raises(AcquireTimeout):
            await two.lock("a", owner="two").acquire(timeout=BRIEF)

    async with one.lock("a"):
        await asyncio.gather(attempt(), attempt())
        assert (await one.inspect("a")).waiters == ()
    async with two.lock("a", owner="two", timeout=PATIENCE):
        pass
