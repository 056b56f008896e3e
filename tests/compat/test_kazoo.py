"""kazoo's recipes on ZooKeeper: python-zk/kazoo, kazoo/tests/test_lock.py and kazoo/tests/test_election.py.

There a lock is given the name of its contender: here that is `owner=`.
"""

from __future__ import annotations

import asyncio

import pytest

from aiodlock import AcquireTimeout, Client, Lock, LockLost, NotHeld, Semaphore, WouldBlock

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    LASTING,
    cancelled,
    held_elsewhere,
    is_held,
    soon,
    until,
    until_free,
    until_waiting,
)
from ..servers import BEYOND

pytestmark = pytest.mark.stores("memory", "valkey9", *BEYOND)

PATIENCE = 40.0


async def contenders(client: Client, name: str) -> list[str]:
    """Who holds and then who waits, in order."""
    info = await client.inspect(name)
    return [holder.owner for holder in info.holders] + [waiter.owner for waiter in info.waiters]


async def _hold(lock: Lock, entered: list[str], until_set: asyncio.Event) -> None:
    async with lock as lease:
        entered.append(lease.owner)
        await until_set.wait()


# -- KazooLockTests --------------------------------------------------------------------------------


async def test_contenders_are_known_by_their_names_and_claim_it_in_order(client: Client) -> None:
    """test_lock_one, test_lock, test_lock_fail_first_call."""
    lock = client.lock("a", owner="test")
    await lock.acquire()
    entered: list[str] = []
    names = [f"contender{number}" for number in range(5)]
    ends = {name: asyncio.Event() for name in names}
    tasks = []
    for number, name in enumerate(names):
        one = client.lock("a", owner=name)
        tasks.append(asyncio.create_task(_hold(one, entered, ends[name])))
        await until_waiting(client, "a", number + 1)
    assert await contenders(client, "a") == ["test", *names]
    await lock.release()
    for number, name in enumerate(names):
        await until(lambda name=name: entered[-1:] == [name])  # type: ignore[misc]
        assert await contenders(client, "a") == names[number:]
        ends[name].set()
    await asyncio.gather(*tasks)
    assert entered == names
    assert await contenders(client, "a") == []


async def test_waiter_gets_in_when_the_holders_record_is_gone(client: Client) -> None:
    """test_lock_reconnect: the holder's session has ended, and it hears of it."""
    lease = await client.lock("a", owner="test", ttl=LASTING).acquire()
    entered, end = list[str](), asyncio.Event()
    one = client.lock("a", owner="contender")
    waiter = asyncio.create_task(_hold(one, entered, end))
    await until_waiting(client, "a")
    assert await contenders(client, "a") == ["test", "contender"]
    await client.break_lock("a")
    with pytest.raises(LockLost):
        await lease.release()
    await until(lambda: entered == ["contender"])
    end.set()
    await waiter


async def test_attempt_without_waiting_leaves_no_contender(client: Client) -> None:
    """test_lock_non_blocking."""
    async with held_elsewhere(client.lock("a", owner="one")):
        with pytest.raises(WouldBlock):
            await client.lock("a", owner="two").acquire_nowait()
        assert await contenders(client, "a") == ["one"]


async def test_waiter_is_cancelled_while_another_client_holds(
    client: Client, make_client: MakeClient
) -> None:
    """test_lock_cancel."""
    other = await make_client()
    async with client.lock("a", owner="one"):
        waiter = asyncio.create_task(other.lock("a", owner="two").acquire())
        await until_waiting(client, "a")
        assert await contenders(client, "a") == ["one", "two"]
        await cancelled(waiter)
        assert await contenders(client, "a") == ["one"]


async def test_one_of_many_gets_it_without_waiting(client: Client) -> None:
    """test_lock_many_threads_no_block."""
    lock, all_tried = client.lock("a"), asyncio.Barrier(20)

    async def attempt() -> bool:
        try:
            lease = await lock.acquire_nowait()
        except WouldBlock:
            await all_tried.wait()
            return False
        async with lease:
            await all_tried.wait()
            return True

    assert sum(await asyncio.gather(*(attempt() for _ in range(20)))) == 1


async def test_many_are_inside_one_at_a_time(client: Client) -> None:
    """test_lock_many_threads."""
    lock, start = client.lock("a"), asyncio.Barrier(20)
    acquired: list[int] = []
    differences: list[int] = []

    async def work() -> None:
        await start.wait()
        async with lock:
            before = len(acquired)
            acquired.append(1)
            await asyncio.sleep(0.005)
            differences.append(len(acquired) - before)

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(20))), PATIENCE)
    assert differences == [1] * 20


async def test_lock_is_acquired_again_after_its_release(client: Client) -> None:
    """test_lock_reacquire, of the semaphore test_basic and test_reacquire."""
    for one in (client.lock("a"), client.semaphore("a", 1)):
        for _ in range(2):
            await one.acquire()
            await one.release()
    await until_free(client, "a")


async def test_waiting_for_what_another_client_holds_times_out(
    client: Client, make_client: MakeClient
) -> None:
    """test_lock_timeout, of the semaphore test_timeout."""
    other = await make_client()
    pairs: list[tuple[Lock | Semaphore, Lock | Semaphore]] = [
        (client.lock("a"), other.lock("a")),
        (client.semaphore("a", 1), other.semaphore("a", 1)),
    ]
    for mine, theirs in pairs:
        async with mine:
            with pytest.raises(AcquireTimeout):
                await theirs.acquire(timeout=BRIEF)


async def test_readers_share_and_no_writer_does(make_client: MakeClient) -> None:
    """test_read_lock."""
    first, second, third = [(await make_client()).rwlock("a") for _ in range(3)]
    async with first.read, second.read:
        with pytest.raises(WouldBlock):
            await third.write.acquire_nowait()


async def test_writer_shares_with_nobody(make_client: MakeClient) -> None:
    """test_write_lock."""
    first, second = [(await make_client()).rwlock("a") for _ in range(2)]
    async with first.write:
        for lock in (second.read, second.write):
            with pytest.raises(WouldBlock):
                await lock.acquire_nowait()


async def test_reader_and_writer_follow_a_writer_in_their_order(client: Client) -> None:
    """test_rw_lock."""
    entered: list[str] = []
    ends = {name: asyncio.Event() for name in ("reader", "writer")}
    locks = {
        "reader": client.rwlock("a", owner="reader").read,
        "writer": client.rwlock("a", owner="writer").write,
    }
    tasks = []
    async with client.rwlock("a", owner="test").write:
        for number, (name, lock) in enumerate(locks.items()):
            tasks.append(asyncio.create_task(_hold(lock, entered, ends[name])))
            await until_waiting(client, "a", number + 1)
        assert await contenders(client, "a") == ["test", "reader", "writer"]
    await until(lambda: entered == ["reader"])
    assert await contenders(client, "a") == ["reader", "writer"]
    ends["reader"].set()
    await until(lambda: entered == ["reader", "writer"])
    assert await contenders(client, "a") == ["writer"]
    ends["writer"].set()
    await asyncio.gather(*tasks)


# -- TestSemaphore ---------------------------------------------------------------------------------


async def test_second_gets_in_when_the_first_leaves(client: Client) -> None:
    """test_lock_one."""
    first, second = client.semaphore("a", 1), client.semaphore("a", 1)
    entered = asyncio.Event()

    async def enter() -> None:
        async with second:
            entered.set()

    lease = await first.acquire()
    task = asyncio.create_task(enter())
    with pytest.raises(AcquireTimeout):
        await second.acquire(timeout=BRIEF)
    assert not entered.is_set()
    await lease.release()
    await soon(task)


async def test_third_of_two_places_is_refused_until_one_is_free(client: Client) -> None:
    """test_non_blocking."""
    one, two, three = [client.semaphore("a", 2) for _ in range(3)]
    first, second = await one.acquire(), await two.acquire()
    with pytest.raises(WouldBlock):
        await three.acquire_nowait()
    await second.release()
    third = await three.acquire()
    assert (is_held(first), is_held(second), is_held(third)) == (True, False, True)
    await first.release()
    await third.release()
    assert not await one.locked()


async def test_refused_attempt_has_nothing_to_release(client: Client) -> None:
    """test_non_blocking_release."""
    semaphore = client.semaphore("a", 1)

    async def attempt() -> None:
        with pytest.raises(WouldBlock):
            await semaphore.acquire_nowait()
        with pytest.raises(NotHeld):
            await semaphore.release()

    async with semaphore:
        await asyncio.create_task(attempt())
        assert await semaphore.locked()


async def test_cancelled_waiter_of_a_semaphore_may_come_again(client: Client) -> None:
    """test_semaphore_cancel, test_acquire_after_cancelled."""
    semaphore = client.semaphore("a", 1)
    async with semaphore:
        waiter = asyncio.create_task(semaphore.acquire())
        with pytest.raises(AcquireTimeout):
            await semaphore.acquire(timeout=BRIEF)
        assert not waiter.done()
        await cancelled(waiter)
    async with client.semaphore("a", 1, timeout=PATIENCE):
        pass


async def test_differing_limits_are_an_error(client: Client) -> None:
    """test_inconsistent_max_leases."""
    async with client.semaphore("a", 1):
        with pytest.raises(ValueError, match="limit 1"):
            await client.semaphore("a", 2).acquire()


async def test_forgotten_place_is_free_when_its_lease_has_ended(
    client: Client, make_client: MakeClient
) -> None:
    """test_handle_session_loss, of a semaphore: `george` waits for the session of `fred` to end."""
    fred = await make_client()
    lease = await fred.semaphore("a", 1, ttl=0.3, auto_extend=False).acquire()
    async with client.semaphore("a", 1, timeout=PATIENCE):
        assert not is_held(lease)
    with pytest.raises(LockLost):
        await lease.release()


# -- test_election.py ------------------------------------------------------------------------------


async def test_candidates_lead_one_after_the_other_in_order(client: Client) -> None:
    """KazooElectionTests.test_election."""
    leaders: list[str] = []
    resign = {name: asyncio.Event() for name in ("one", "two", "three")}

    async def stand(name: str) -> None:
        async with client.election("chair").lead(name):
            leaders.append(name)
            await resign[name].wait()

    async with client.election("chair").lead("first"):
        tasks = []
        for number, name in enumerate(resign):
            tasks.append(asyncio.create_task(stand(name)))
            await until_waiting(client, "chair", number + 1)
        assert leaders == []
    for number, name in enumerate(resign):
        await until(lambda number=number: len(leaders) == number + 1)  # type: ignore[misc]
        assert leaders[-1] == name
        resign[name].set()
    await asyncio.gather(*tasks)


async def test_error_of_the_leader_comes_out_and_the_next_leads(client: Client) -> None:
    """KazooElectionTests.test_bad_func: what the leader does fails."""
    election = client.election("chair", timeout=PATIENCE)

    async def fail() -> None:
        async with election.lead("one"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with election.lead("two"):
        pass
