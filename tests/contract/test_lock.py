# ruff: noqa: PT012
"""`Lock`, read-write locks, semaphores, multilocks, elections, and what operators ask."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import (
    BRIEF,
    LASTING,
    SOON,
    bounded,
    cancelled,
    held_elsewhere,
    is_free,
    settled,
    takes,
    until,
    until_cancelled,
    until_free,
    until_held,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


# Lock


async def test_kinds_and_modes(client: aiodlock.Client) -> None:
    lock, both = client.lock("x"), client.rwlock("x")
    assert isinstance(lock, aiodlock.Lock)
    assert isinstance(both, aiodlock.ReadWriteLock)
    assert isinstance(both.read, aiodlock.Lock)
    assert isinstance(both.write, aiodlock.Lock)
    assert (lock.name, lock.mode) == ("x", "exclusive")
    assert (both.read.name, both.read.mode) == ("x", "shared")
    assert (both.write.name, both.write.mode) == ("x", "exclusive")


@pytest.mark.scripted
async def test_a_lock_holds_nothing_until_acquired(store: Store, client: aiodlock.Client) -> None:
    client.lock("x")
    assert not await client.lock("x").locked()
    assert not await (await store.raw()).keys("*")


async def test_lock_of_a_name_is_the_same_as_its_write_lock(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        with pytest.raises(aiodlock.WouldBlock):
            await client.rwlock("x").write.acquire_nowait()
        with pytest.raises(aiodlock.WouldBlock):
            await client.rwlock("x").read.acquire_nowait()


async def test_locked_tells_of_any_mode(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    for holding in (one.rwlock("x").read, one.rwlock("x").write):
        for asking in (one.lock("x"), other.rwlock("x").read, other.rwlock("x").write):
            assert await asking.locked() is False
            async with holding:
                assert await asking.locked() is True


async def test_shared_holders_stand_together(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    async with one.rwlock("x").read as first, other.rwlock("x").read as second:
        assert first.held
        assert second.held
        assert len((await one.inspect("x")).holders) == 2
        with pytest.raises(aiodlock.WouldBlock):
            await one.lock("x", owner="writer").acquire_nowait()


async def test_one_lock_object_gives_each_task_its_own_lease(client: aiodlock.Client) -> None:
    lock = client.rwlock("x").read
    barrier = asyncio.Barrier(5)

    async def work() -> aiodlock.Lease:
        async with lock as lease:
            await barrier.wait()
            return lease

    leases = await asyncio.gather(*(work() for _ in range(5)))
    assert len({id(lease) for lease in leases}) == 5


async def test_leaving_in_the_task_of_the_test_what_a_fixture_entered(
    client: aiodlock.Client,
) -> None:
    lock = client.lock("x")
    lease = await asyncio.create_task(lock.__aenter__())
    await lock.__aexit__(None, None, None)
    assert not lease.held
    assert await is_free(client, "x")


async def test_a_generator_that_is_closed_elsewhere_releases(client: aiodlock.Client) -> None:
    async def items() -> Any:
        async with client.lock("x"):
            yield 1
            yield 2

    generator = items()
    assert await anext(generator) == 1
    assert await client.lock("x").locked()
    await asyncio.create_task(generator.aclose())
    assert await is_free(client, "x")


async def test_lock_release_releases_this_tasks_hold(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    lease = await lock.acquire()
    await lock.release()
    assert not lease.held
    assert await is_free(client, "x")
    with pytest.raises(aiodlock.NotHeld):
        await lock.release()


async def test_lock_acquire_and_release_without_keeping_the_lease(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    await lock.acquire()
    assert await lock.locked()
    await lock.release()
    assert await is_free(client, "x")


async def test_lock_release_works_on_another_object_of_that_name(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await client.lock("x").release()
    assert not lease.held


async def test_lock_release_is_of_that_mode_only(client: aiodlock.Client) -> None:
    both = client.rwlock("x")
    lease = await both.read.acquire()
    with pytest.raises(aiodlock.NotHeld):
        await both.write.release()
    assert lease.held
    await both.read.release()


async def test_timeout_of_acquire_wins_over_that_of_the_lock(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        async with takes(at_most=SOON):
            with pytest.raises(aiodlock.AcquireTimeout):
                await client.lock("x", timeout=60).acquire(timeout=BRIEF)
        waiting = asyncio.create_task(client.lock("x", timeout=0).acquire(timeout=None))
        await until_waiting(client, "x")
        await cancelled(waiting)


async def test_timeout_of_the_lock_counts_in_async_with(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        async with takes(at_least=0.99 * BRIEF, at_most=BRIEF + SOON):
            with pytest.raises(aiodlock.AcquireTimeout):
                async with client.lock("x", timeout=BRIEF):
                    pytest.fail("a body without the lock")
        assert not (await client.inspect("x")).waiters


async def test_timeout_zero_tries_once(client: aiodlock.Client) -> None:
    async with client.lock("x", timeout=0):
        pass
    async with held_elsewhere(client.lock("x")):
        async with takes(at_most=SOON):
            with pytest.raises(aiodlock.AcquireTimeout):
                await client.lock("x").acquire(timeout=0)
        assert not (await client.inspect("x")).waiters


async def test_timeout_none_waits_for_ever(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        waiting = asyncio.create_task(client.lock("x", ttl=LASTING).acquire(timeout=None))
        await until_waiting(client, "x")
        await asyncio.sleep(1.1 * LASTING)
        await until_waiting(client, "x")
        assert not waiting.done()
    await (await waiting).release()


async def test_an_infinite_timeout_waits_or_is_refused(client: aiodlock.Client) -> None:
    try:
        lock = client.lock("x", timeout=float("inf"))
    except ValueError:
        return
    async with lock:
        pass


async def test_unconfirmed_release_frees_the_name(client: aiodlock.Client) -> None:
    lock = client.lock("x", confirm_release=False)
    async with lock as lease:
        pass
    assert not lease.held
    await until_free(client, "x")
    async with lock as again:
        assert again.token > lease.token


@pytest.mark.stores("valkey9")
async def test_unconfirmed_release_does_not_wait_for_the_answer(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client.lock("x", confirm_release=False))
            proxy.stall()
            async with takes(at_most=0.5):  # one that is confirmed waits for a second
                await stack.aclose()
        await proxy.heal()
        await until_free(client, "x")


# Lock-delay


async def test_lock_delay_keeps_the_name_closed_after_a_holder_was_lost(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    async with takes(at_least=0.69, at_most=0.7 + SOON):
        lease = await client.lock("x", ttl=0.2, auto_extend=False, lock_delay=0.5).acquire()
        await (await other.lock("x").acquire()).release()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_break_lock_ignores_the_lock_delay(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("x", lock_delay=30).acquire()
    assert await other.break_lock("x") == 1
    await (await other.lock("x").acquire_nowait()).release()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


# on_lost


async def test_on_lost_flag_does_not_cancel_and_raises_at_the_end(client: aiodlock.Client) -> None:
    ended = False
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.lock("x", on_lost="flag") as lease:
            await client.break_lock("x")
            await lease.wait_lost()
            await settled(client)
            ended = True
    assert ended
    assert raised.value.reason == "broken"


# Semaphore


async def test_semaphore_has_limit_holders(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    semaphore = client.semaphore("s", 3)
    leases = [await semaphore.acquire() for _ in range(2)]
    leases.append(await other.semaphore("s", 3).acquire_nowait())
    assert len({lease.token for lease in leases}) == 3
    for attempt in (semaphore.acquire_nowait(), other.semaphore("s", 3).acquire_nowait()):
        with pytest.raises(aiodlock.WouldBlock):
            await attempt
    with pytest.raises(aiodlock.AcquireTimeout):
        await semaphore.acquire(timeout=0)
    waiting = asyncio.create_task(semaphore.acquire())
    await settled(client)
    assert not waiting.done()
    await leases.pop().release()
    leases.append(await waiting)
    for lease in leases:
        await lease.release()
    async with semaphore as lease:
        assert isinstance(lease, aiodlock.Lease)
        assert lease.held


async def test_semaphore_is_not_reentrant(client: aiodlock.Client) -> None:
    semaphore = client.semaphore("s", 1)
    async with semaphore:
        with pytest.raises(aiodlock.WouldBlock):
            await semaphore.acquire_nowait()
        with pytest.raises(aiodlock.AcquireTimeout):
            await semaphore.acquire(timeout=BRIEF)


async def test_semaphore_has_keys_of_its_own(client: aiodlock.Client) -> None:
    async with client.semaphore("x", 1), client.lock("x"), client.rwlock("y").read:
        async with client.semaphore("y", 1):
            pass


async def test_semaphore_is_fair(client: aiodlock.Client) -> None:
    semaphore, order = client.semaphore("s", 1), list[int]()

    async def take(number: int) -> None:
        async with semaphore:
            order.append(number)

    tasks = []
    async with semaphore:
        for number in range(5):
            tasks.append(asyncio.create_task(take(number)))
            await settled(client)
    await asyncio.gather(*tasks)
    assert order == list(range(5))


async def test_another_limit_for_a_semaphore_in_use_raises_value_error(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    async with client.semaphore("s", 2):
        for limit in (1, 3):
            for user in (client, other):
                with pytest.raises(ValueError):
                    await user.semaphore("s", limit).acquire()
                with pytest.raises(ValueError):
                    await user.semaphore("s", limit).acquire_nowait()


async def test_a_loss_cancels_the_body_of_a_semaphore(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.semaphore("s", 1, max_hold=0.2):
            await until_cancelled()
    assert (raised.value.name, raised.value.reason) == ("s", "max_hold")


# Multilock


async def test_multilock_takes_all_or_none(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("b")):
        with pytest.raises(aiodlock.AcquireTimeout):
            async with client.multilock("a", "b", "c", timeout=BRIEF):
                pytest.fail("without b")
        assert await is_free(client, "a", "c")
        with pytest.raises(aiodlock.AcquireTimeout):
            await client.multilock("a", "b").acquire(timeout=0)
        assert await is_free(client, "a")
    async with client.multilock("a", client.lock("b"), client.rwlock("c").read) as leases:
        assert isinstance(leases, aiodlock.MultiLease)
        for name in "abc":
            assert await client.lock(name).locked()
        assert (await client.inspect("c")).holders[0].mode == "shared"
    assert await is_free(client, "a", "b", "c")


async def test_multilocks_in_any_order_do_not_deadlock(client: aiodlock.Client) -> None:
    async def take(*names: str) -> None:
        for _ in range(10):
            async with client.multilock(*names):
                pass

    async with bounded(20):
        await asyncio.gather(take("a", "b", "c"), take("c", "b", "a"), take("b", "c", "a"))


async def test_multilock_by_hand(client: aiodlock.Client) -> None:
    leases = await client.multilock("a", "b").acquire()
    assert set(leases.tokens) == {"a", "b"}
    assert leases["a"].token == leases.tokens["a"]
    await leases.release()
    assert await is_free(client, "a", "b")
    with pytest.raises(aiodlock.NotHeld):
        await leases.release()


async def test_losing_one_name_of_a_multilock_loses_all(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.multilock("a", "b"):
            await client.break_lock("b")
            await until_cancelled()
    assert (raised.value.name, raised.value.reason) == ("b", "broken")
    await until_free(client, "a", "b")


# Election


async def test_election_has_one_leader_and_tells_its_value(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    async with one.election("e").lead("one") as lease:
        assert isinstance(lease, aiodlock.Lease)
        assert lease.held
        with pytest.raises(aiodlock.AcquireTimeout):
            async with other.election("e", timeout=BRIEF).lead("other"):
                pytest.fail("two leaders")
        async for value in other.election("e").observe():
            assert value == "one"
            break


async def test_leaving_resigns_and_observers_are_told(make_client: MakeClient) -> None:
    one, other, watcher = [await make_client() for _ in range(3)]
    values: list[str] = []

    async def watch() -> None:
        async for value in watcher.election("e").observe():
            values.append(value)

    watching = asyncio.create_task(watch())
    try:
        async with one.election("e").lead("one"):
            await until(lambda: values == ["one"])
        async with other.election("e").lead():
            await until(lambda: values == ["one", ""])
    finally:
        await cancelled(watching)


async def test_observing_ends_with_client_closed(store: Store) -> None:
    async with aiodlock.Client(store.source) as client:

        async def watch() -> None:
            async for _ in client.election("e").observe():
                pass

        watching = asyncio.create_task(watch())
        await settled(client)
        assert not watching.done()
    with pytest.raises(aiodlock.ClientClosed):
        await watching


# inspect, locks, break_lock, check_sequencer


@pytest.mark.scripted
async def test_inspect_of_a_name_nobody_used(store: Store, client: aiodlock.Client) -> None:
    info = await client.inspect("x")
    assert isinstance(info, aiodlock.LockInfo)
    assert info.name == "x"
    assert not info.holders
    assert not info.waiters
    assert isinstance(info.token, int)
    assert not await (await store.raw()).keys("*"), "looking leaves no key"


async def test_inspect_tells_holders_and_waiters(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    async with one.lock("x", owner="first", ttl=90) as lease:
        waits = []
        for number, lock in enumerate(
            [other.rwlock("x", owner="second").read, one.lock("x", owner="third")]
        ):
            waits.append(asyncio.create_task(lock.acquire()))
            await until_waiting(one, "x", number + 1)
        info = await other.inspect("x")
        assert (info.name, info.token) == ("x", lease.token)
        (holder,) = info.holders
        assert (holder.owner, holder.mode, holder.token, holder.count) == (
            "first",
            "exclusive",
            lease.token,
            1,
        )
        assert holder.remaining is None or 70 < holder.remaining <= 90
        assert [(w.owner, w.mode) for w in info.waiters] == [
            ("second", "shared"),
            ("third", "exclusive"),
        ]
        positions = [waiter.position for waiter in info.waiters]
        assert positions[1] == positions[0] + 1
        assert all(0 <= (waiter.waiting or 0.0) < 10 for waiter in info.waiters)
        assert isinstance(holder.client, str)
        assert holder.client == info.waiters[1].client != info.waiters[0].client
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def test_inspect_tells_the_default_owner_as_the_lease_does(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        assert (await client.inspect("x")).holders[0].owner == lease.owner


async def test_inspect_remembers_the_last_token(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        pass
    info = await client.inspect("x")
    assert info.token == lease.token
    assert not info.holders


async def test_inspect_does_not_show_the_dead(store: Store, client: aiodlock.Client) -> None:
    lease = await client.lock("x", ttl=0.2, auto_extend=False).acquire()
    await lease.wait_lost()
    await until_free(client, "x")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_locks_match_globs_on_names(client: aiodlock.Client) -> None:
    names = ["order:1", "order:22", "orde:1", "Order:1", "a[b]", "a*c", "é", "x\ny", "b?"]
    leases = [await client.lock(name).acquire() for name in names]

    async def matching(glob: str) -> set[str]:
        found = [info.name async for info in client.locks(match=glob)]
        assert len(found) == len(set(found))
        return set(found)

    assert {info.name async for info in client.locks()} == set(names)
    assert await matching("*") == set(names)
    assert await matching("order:*") == {"order:1", "order:22"}
    assert await matching("order:?") == {"order:1"}
    assert await matching("order:1") == {"order:1"}
    assert await matching("[oO]rder:1") == {"order:1", "Order:1"}
    assert await matching("é") == {"é"}
    assert await matching("?") == {"é"}
    assert await matching("x?y") == {"x\ny"}
    assert await matching("nothing*") == set()
    assert await matching("order") == set()
    for lease in leases:
        await lease.release()
    assert await matching("*") == set()


async def test_locks_tells_held_and_waited_for(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")) as lease:
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x")
        (info,) = [info async for info in client.locks(match="x")]
        assert isinstance(info, aiodlock.LockInfo)
        assert info.holders[0].token == lease.token
        assert len(info.waiters) == 1
        await cancelled(waiting)


async def test_break_lock_returns_the_number_of_holders(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    assert await other.break_lock("x") == 0
    leases = [await client.lock("x").acquire()]
    assert await other.break_lock("x") == 1
    shared = client.rwlock("y", owner="a").read, other.rwlock("y", owner="b").read
    leases += [await lock.acquire() for lock in shared]
    assert await other.break_lock("y") == 2
    for lease in leases:
        assert (await lease.wait_lost()).reason == "broken"
        with pytest.raises(aiodlock.LockLost):
            await lease.release()


async def test_break_lock_leaves_waiters_who_get_in_at_once(make_client: MakeClient) -> None:
    client, operator = await make_client(), await make_client()
    broken = []

    async def body() -> None:
        try:
            async with client.lock("x"):
                await until_cancelled()
        except aiodlock.LockLost as lost:
            broken.append(lost.reason)

    holding = asyncio.create_task(body())
    await until_held(client, "x")
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(client, "x")
    async with takes(at_most=SOON):
        assert await operator.break_lock("x") == 1
        lease = await waiting
        await holding
    assert broken == ["broken"]
    await lease.release()


async def test_check_sequencer(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    async with client.lock("a:b", owner="me") as lease:
        right = lease.sequencer
        assert right.isprintable()
        assert await other.check_sequencer(right) is True
        async with client.rwlock("shared").read as shared:
            assert await other.check_sequencer(shared.sequencer)
        forged = [
            "",
            "x",
            ":",
            "::",
            ":::",
            "nonsense",
            f"{lease.token}",
            right + " ",
            " " + right,
            right + "0",
            right + "\n",
            right[:-1],
            right.upper(),
            right.replace("exclusive", "shared"),
            right.replace(str(lease.token), f"0{lease.token}"),
            right.replace(str(lease.token), f"+{lease.token}"),
            right.replace(str(lease.token), f"{lease.token}.0"),
            right.replace(str(lease.token), f"{lease.token:_}"),
            right.replace(str(lease.token), str(lease.token + 1)),
            right.replace(str(lease.token), "-1"),
            right.replace(str(lease.token), "9" * 5000),
            right.replace(str(lease.token), "".join(chr(0x660 + int(d)) for d in str(lease.token))),
            "x" * 600 + ":exclusive:1",
            "\ud800:exclusive:1",
            "a:exclusive:" + str(lease.token),
        ]
        for text in forged:
            assert text == right or await other.check_sequencer(text) is False, ascii(text)
    assert await other.check_sequencer(right) is False
    async with client.lock("a:b"):
        assert await other.check_sequencer(right) is False


async def test_sequencer_of_a_semaphore_holds_while_it_is_held(client: aiodlock.Client) -> None:
    async with client.semaphore("s", 2) as lease:
        assert await client.check_sequencer(lease.sequencer)
    assert not await client.check_sequencer(lease.sequencer)
