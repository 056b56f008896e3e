"""Processes that hold or wait are killed: for how long they stand in the way of readers and writers.

Moments are of the server's clock, as it has written them into records and tokens. The cases of Redisson's
fair lock (RedissonFairLockTest) are each named where they are; they are told in our words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from aiodlock import AcquireTimeout, BackendUnavailable, Client, Lease, Lock

from .. import forked
from ..conftest import MakeClient
from ..protocol.direct import Direct
from ..scenes import (
    BRIEF,
    LASTING,
    STARTING,
    cancelled,
    granted_at,
    held_elsewhere,
    stalls,
    until_outlived,
    until_waiting,
)
from ..servers import Store
from .history import monitored

Stand = Callable[..., Awaitable[asyncio.subprocess.Process]]

NAME = "name"
#: Far longer than a machine stalls: nothing but a death ends a lease here.
TTL = 1.5
#: How late the next one may be in, on the server's clock.
LATE = 0.1
#: Whoever is not the head finds out with its own extension that those in front are dead.
FOUND_OUT = TTL / 3

pytestmark = pytest.mark.stores("valkey9", "redis70")


@pytest.fixture
async def stand(real_store: Store) -> AsyncIterator[Stand]:
    """Give a starter of processes that ask for the name in these modes, and stay."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(
        *modes: str, ttl: float = TTL, waiter_ttl: float = TTL
    ) -> asyncio.subprocess.Process:
        process = await forked.start(
            "tests.integration.standing",
            real_store.url,
            NAME,
            *(str(ttl), str(waiter_ttl), *modes),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), STARTING) == b"standing\n"
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def waiters_end(store: Store, first: int = 0, last: int | None = None) -> float:
    """Return when the leases of these waiters have all ended unless they are extended.

    Each is extended at times of its own: the one in front may be the last to end.
    """
    direct = Direct(await store.raw(), NAME)
    ids = (await direct.queue())[first : (first if last is None else last) + 1]
    waiters = await direct.waiters()
    return max(waiters[id].deadline for id in ids) / 1000


async def holders_end(store: Store) -> float:
    """Return when the first lease of the holders ends unless it is extended."""
    holders = await Direct(await store.raw(), NAME).holders()
    return min(holder.deadline for holder in holders.values()) / 1000


def asking(lock: Lock) -> asyncio.Task[Lease]:
    return asyncio.create_task(lock.acquire())


async def released(*leases: Lease) -> None:
    for lease in leases:
        await lease.release()


# -- readers ---------------------------------------------------------------------------------------


async def test_readers_standing_together_come_in_by_the_script_run_that_the_writer_left_with(
    make_client: MakeClient, store: Store
) -> None:
    clients = [await make_client() for _ in range(3)]
    async with monitored(store, NAME) as history:
        writer = await clients[0].lock(NAME).acquire()
        readers = []
        for number in range(6):
            readers.append(asking(clients[number % 3].rwlock(NAME).read))
            await until_waiting(clients[0], NAME, number + 1)
        next_writer = asking(clients[0].rwlock(NAME).write)
        await until_waiting(clients[0], NAME, 7)
        late_reader = asking(clients[1].rwlock(NAME).read)
        await until_waiting(clients[0], NAME, 8)
        await writer.release()
        leases = await asyncio.gather(*readers)
        assert not next_writer.done()
        await released(*leases)
        await released(await next_writer)
        await released(await late_reader)
    first, *six, second, last = history.granted()
    assert [life.mode for life in six] == ["s"] * 6
    assert {life.run for life in six} == {six[0].run}, "more than one script run let them in"
    assert six[0].granted == first.left, "that run was not the leave"
    assert first.run < six[0].run < second.run < last.run


async def test_dead_reader_among_live_ones_delays_a_writer_by_its_own_ttl(
    stand: Stand, client: Client, store: Store, notifications: bool
) -> None:
    async with held_elsewhere(client.rwlock(NAME).read):
        process = await stand("shared")
        writer = asking(client.lock(NAME))
        await until_waiting(client, NAME)
        await kill(process)
        ends_at = await holders_end(store)
    async with stalls() as stalled:
        lease = await writer
        assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
    await lease.release()


async def test_readers_are_extended_alone_and_together(make_client: MakeClient) -> None:
    client = await make_client(ttl=LASTING, waiter_ttl=LASTING)
    pair = client.rwlock(NAME)
    async with held_elsewhere(pair.write):
        waiting = [asking(pair.read) for _ in range(3)]
        await until_waiting(client, NAME, 3)
    at_once = asking(pair.read)
    leases = await asyncio.gather(*waiting, at_once)
    writer = asking(pair.write)
    await until_waiting(client, NAME)
    await asyncio.gather(*(until_outlived(lease) for lease in leases))
    assert all(lease.held for lease in leases)
    assert not writer.done()
    await released(*leases)
    await released(await writer)


async def test_dead_writer_among_waiting_readers_holds_them_back_for_its_own_lease(
    stand: Stand, make_client: MakeClient, store: Store, notifications: bool
) -> None:
    client = await make_client(waiter_ttl=TTL)
    async with held_elsewhere(client.rwlock(NAME).read):
        process = await stand("exclusive")
        readers = []
        for number in range(3):
            readers.append(asking(client.rwlock(NAME).read))
            await until_waiting(client, NAME, number + 2)
        await kill(process)
        ends_at = await waiters_end(store)
        async with stalls() as stalled:
            leases = await asyncio.gather(*readers)
            for lease in leases:
                assert ends_at <= granted_at(lease) <= ends_at + FOUND_OUT + LATE + stalled()
    await released(*leases)


async def test_dead_writer_that_is_granted_holds_readers_back_no_longer(
    stand: Stand, make_client: MakeClient, store: Store, notifications: bool
) -> None:
    client = await make_client(waiter_ttl=TTL)
    async with held_elsewhere(client.rwlock(NAME).read):
        process = await stand("exclusive")
        readers = [asking(client.rwlock(NAME).read) for _ in range(3)]
        await until_waiting(client, NAME, 4)
        await kill(process)
        ends_at = await waiters_end(store)
    async with stalls() as stalled:
        for lease in await asyncio.gather(*readers):
            assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
            await lease.release()


# -- Redisson's fair lock ----------------------------------------------------------------------------


async def test_leases_that_nobody_releases_end_in_order_of_arrival(client: Client) -> None:
    """Redisson, testLeaseTimeout and testExpire: five leases that end by themselves, one by one."""
    ttl = 0.8
    lock = client.lock(NAME, ttl=ttl, auto_extend=False)
    tasks = []
    for _ in range(5):
        tasks.append(asking(lock))
        await asyncio.sleep(0)  # each request is sent by its first step, in order
    async with stalls() as stalled:
        leases = await asyncio.gather(*tasks)
        moments = [granted_at(lease) for lease in leases]
        assert moments == sorted(moments)
        assert moments[-1] - moments[0] <= 4 * (ttl + LATE) + stalled()
    for lease in leases:
        await lease.wait_lost()
        with pytest.raises(Exception, match="expired"):
            await lease.release()


async def test_attempts_that_time_out_do_not_put_off_those_who_come_later(
    stand: Stand, make_client: MakeClient, store: Store
) -> None:
    """Redisson, testWaitTimeoutDrift: each attempt pushed the deadlines of the queue into the future."""
    client = await make_client(waiter_ttl=TTL)
    async with held_elsewhere(client.lock(NAME)):

        async def try_in_vain() -> None:
            for _ in range(10):
                # Unavailable: on a busy machine the time may be over before the server has answered.
                with pytest.raises((AcquireTimeout, BackendUnavailable)):
                    await client.lock(NAME).acquire(timeout=0.02)

        await asyncio.gather(*(try_in_vain() for _ in range(3)))
        process = await stand("exclusive")  # the last one dies before it can clean up
        await kill(process)
        ends_at = await waiters_end(store)
        last = asking(client.lock(NAME))
        await until_waiting(client, NAME, 2)
    async with stalls() as stalled:
        lease = await last
        assert granted_at(lease) <= ends_at + LATE + stalled()
    await lease.release()


async def test_first_waiter_that_dies_costs_its_own_lease_however_many_try_behind_it(
    stand: Stand, make_client: MakeClient, store: Store
) -> None:
    """Redisson, testFirstThreadDeathTimeoutDrift and testLockAcquiredTimeoutDrift."""
    client = await make_client(waiter_ttl=TTL)
    async with held_elsewhere(client.lock(NAME)):
        await kill(await stand("exclusive"))
        ends_at = await waiters_end(store)
        behind = []
        for number in range(5):
            behind.append(asking(client.lock(NAME)))
            await until_waiting(client, NAME, number + 2)
    async with stalls() as stalled:
        for task in behind:
            lease = await task
            assert granted_at(lease) <= ends_at + LATE + stalled()
            await lease.release()


async def test_time_until_the_turn_does_not_grow_with_those_who_wait(
    stand: Stand, make_client: MakeClient, store: Store
) -> None:
    """Redisson, testAcquireFailedTimeoutDrift_Descrete: each waiter was told 5 s more than the one before.

    Behind a holder that dies, the fourth of four waiters, one of whom withdraws, is in as soon as the
    three have passed: the holder's lease is all that is waited for.
    """
    client = await make_client(waiter_ttl=10)
    process = await stand("exclusive")
    waiting = []
    for number in range(4):
        waiting.append(asking(client.lock(NAME)))
        await until_waiting(client, NAME, number + 1)
    await kill(process)
    ends_at = await holders_end(store)
    await cancelled(waiting.pop(1))
    async with stalls() as stalled:
        for task in waiting:
            lease = await task
            assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
            await lease.release()


@pytest.mark.parametrize("dead", [["exclusive"], ["shared", "exclusive", "shared"]])
async def test_waiter_that_dies_while_another_holds_costs_the_one_behind_at_most_its_lease(
    stand: Stand, make_client: MakeClient, store: Store, dead: list[str]
) -> None:
    """Redisson, testLockAcquiredTimeoutDrift_Descrete and testLockAcquiredBooleanTimeoutDrift_Descrete.

    The first waiter comes to hold and releases; the second is dead; the third is not kept waiting for
    more than what was left of the second's lease. Behind several dead the third is not the head when the
    first of them is granted, so that nobody tells it when their leases end.
    """
    found_out = FOUND_OUT if len(dead) > 1 else 0.0
    client = await make_client(waiter_ttl=TTL)
    async with held_elsewhere(client.lock(NAME)):
        first = asking(client.lock(NAME))
        await until_waiting(client, NAME)
        process = await stand(*dead)
        third = asking(client.lock(NAME))
        await until_waiting(client, NAME, len(dead) + 2)
        await kill(process)
        ends_at = await waiters_end(store, 1, len(dead))
    async with stalls() as stalled:
        await (await first).release()
        lease = await third
        assert granted_at(lease) <= ends_at + found_out + LATE + stalled()
    await lease.release()


async def test_holder_and_two_waiters_abandoned_cost_the_third_one_lease_and_a_third(
    stand: Stand, make_client: MakeClient, store: Store, notifications: bool
) -> None:
    """Redisson, testAbandonedTimeoutDrift_Descrete: there each abandoned head cost its own wait."""
    client = await make_client(waiter_ttl=TTL)
    process = await stand("exclusive", "exclusive", "exclusive")
    third = asking(client.lock(NAME))
    await until_waiting(client, NAME, 3)
    await kill(process)
    ends_at = max(await holders_end(store), await waiters_end(store, 0, 1))
    async with stalls() as stalled:
        lease = await third
        assert granted_at(lease) <= ends_at + FOUND_OUT + LATE + stalled()
    await lease.release()


async def test_try_that_timed_out_leaves_nothing_that_keeps_the_next_one_out(
    client: Client,
) -> None:
    """Redisson, testTryLockNonDelayed."""
    async with held_elsewhere(client.lock(NAME)):
        with pytest.raises(AcquireTimeout):
            await client.lock(NAME).acquire(timeout=BRIEF)
    await (await client.lock(NAME).acquire_nowait()).release()


async def test_time_out_behind_a_dead_holder_is_as_long_as_it_says(
    stand: Stand, client: Client
) -> None:
    """Redisson, testTryLockWait: three seconds behind a process that died took 2.99 to 3.1."""
    await kill(await stand("exclusive", ttl=30))
    clock = asyncio.get_running_loop().time
    async with stalls() as stalled:
        began = clock()
        with pytest.raises(AcquireTimeout):
            await client.lock(NAME).acquire(timeout=BRIEF)
        assert BRIEF <= clock() - began <= BRIEF + LATE + stalled()


async def test_process_that_starts_again_waits_for_its_own_ghosts_one_lease_at_most(
    stand: Stand, make_client: MakeClient, store: Store
) -> None:
    """Redisson issues 4595, 4929 and 6150: after a restart, the lock was never had again.

    The dead held, and waited for their next turns; the restarted process stands behind all of them.
    """
    process = await stand("exclusive", *["exclusive"] * 9)
    await kill(process)
    ends_at = max(await holders_end(store), await waiters_end(store, 0, 8))
    restarted = await make_client(ttl=TTL, waiter_ttl=TTL)
    async with stalls() as stalled:
        lease = await restarted.lock(NAME).acquire()
        assert granted_at(lease) <= ends_at + FOUND_OUT + LATE + stalled()
    await lease.release()
