"""One lock: taking turns, names, timeouts, releasing, inspecting, breaking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import aiodlock
from aiodlock import AcquireTimeout, Client, DeadlockError, LockLost, NotHeld, WouldBlock

from ..conftest import MakeClient
from ..scenes import (
    BRIEF,
    PATIENCE,
    SOON,
    cancelled,
    held_elsewhere,
    is_held,
    keeper_of,
    takes,
    until,
    until_free,
    until_waiting,
)
from ..servers import SERVED, Store

NAMES = ["{}", "{a}b", "}{", " ", "a b", "a\0b", "\n", "🔒", "x" * 512, "é" * 256, "%7B", "*", ":"]


async def test_any_text_is_a_name_from_end_to_end(client: Client) -> None:
    for name in NAMES:
        async with client.lock(name) as lease:
            assert lease.name == name
            assert lease.sequencer.isprintable()
            assert lease.sequencer.isascii()
            assert str(lease.token) in lease.sequencer
            assert await client.check_sequencer(lease.sequencer)
            assert (await client.inspect(name)).holders[0].token == lease.token
            assert [info.name async for info in client.locks()] == [name]
            with pytest.raises(WouldBlock) as busy:
                await asyncio.create_task(client.lock(name).acquire_nowait())
            assert busy.value.name == name
            assert repr(name) in str(busy.value)
        assert not await client.check_sequencer(lease.sequencer)


async def test_names_that_look_alike_are_different_locks(client: Client) -> None:
    async with client.lock("a"), client.lock("A"), client.lock("%61"), client.lock("a "):
        assert len([info async for info in client.locks()]) == 4


# -- turns -----------------------------------------------------------------------------------------


async def test_grants_follow_the_order_of_arrival(client: Client) -> None:
    lock = client.lock("x")
    order: list[int] = []
    tokens: list[int] = []

    async def take(number: int) -> None:
        async with lock as lease:
            order.append(number)
            tokens.append(lease.token)

    async with lock as first:
        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(take(number)))
            await until_waiting(client, "x", number + 1)
        tokens.append(first.token)
    await asyncio.gather(*tasks)
    assert order == list(range(8))
    assert tokens == sorted(set(tokens))
    assert all(type(token) is int and token > 0 for token in tokens)


async def test_one_lock_object_is_used_by_many_tasks_at_once(client: Client) -> None:
    lock = client.lock("x")
    inside = 0
    seen: list[int] = []

    async def take() -> None:
        nonlocal inside
        async with lock:
            inside += 1
            seen.append(inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(take() for _ in range(60)))
    assert seen == [1] * 60
    assert not await lock.locked()


async def test_shared_holders_are_together_and_wait_behind_a_writer(client: Client) -> None:
    both = client.rwlock("x")
    async with held_elsewhere(both.read) as one, held_elsewhere(both.read) as other:
        assert one.mode == other.mode == "shared"
        writer = asyncio.create_task(both.write.acquire())
        await until_waiting(client, "x")
        with pytest.raises(WouldBlock):
            await both.read.acquire_nowait()
        late = asyncio.create_task(both.read.acquire())
        await until_waiting(client, "x", 2)
        assert [waiter.mode for waiter in (await client.inspect("x")).waiters] == [
            "exclusive",
            "shared",
        ]
    lease = await writer
    assert not late.done()
    assert lease.token > max(one.token, other.token)
    await lease.release()
    await (await late).release()


async def test_lock_and_rwlock_of_a_name_are_one_lock(client: Client) -> None:
    async with held_elsewhere(client.rwlock("x").read):
        with pytest.raises(WouldBlock):
            await client.lock("x").acquire_nowait()


@pytest.mark.stores(*SERVED)
async def test_token_grows_over_clients_and_over_the_expiry_of_its_key(
    store: Store, make_client: MakeClient
) -> None:
    tokens = []
    for client in [await make_client(), await make_client(), await make_client()]:
        async with client.lock("x") as lease:
            tokens.append(lease.token)
        await store.empty()
    assert tokens == sorted(set(tokens))


# -- timeouts --------------------------------------------------------------------------------------


async def test_timeout_runs_out_and_leaves_the_queue(client: Client) -> None:
    async with held_elsewhere(client.lock("x")):
        async with takes(at_least=BRIEF - 0.01, at_most=BRIEF + 0.2):
            with pytest.raises(AcquireTimeout) as elapsed:
                await client.lock("x").acquire(timeout=BRIEF)
        assert isinstance(elapsed.value, TimeoutError)
        assert elapsed.value.name == "x"
        assert "'x'" in str(elapsed.value)
        # Else whoever keeps thousands of these keeps the frames of as many cancelled waits.
        assert elapsed.value.__context__ is None
        assert not (await client.inspect("x")).waiters


async def test_timeout_of_the_lock_holds_for_async_with(client: Client) -> None:
    async with held_elsewhere(client.lock("x")):
        with pytest.raises(AcquireTimeout):
            async with client.lock("x", timeout=BRIEF):
                pytest.fail("two are in")
        assert not (await client.inspect("x")).waiters


async def test_timeout_of_acquire_goes_before_that_of_the_lock(client: Client) -> None:
    lock = client.lock("x", timeout=0)
    async with held_elsewhere(client.lock("x")) as lease:
        waiting = asyncio.create_task(lock.acquire(timeout=None))
        await until_waiting(client, "x")
        with pytest.raises(AcquireTimeout):
            await lock.acquire()
        assert is_held(lease)
    await (await waiting).release()


async def test_timeout_zero_tries_once(client: Client) -> None:
    async with await client.lock("x").acquire(timeout=0):
        with pytest.raises(AcquireTimeout):
            await asyncio.create_task(client.lock("x").acquire(timeout=0))
        assert not (await client.inspect("x")).waiters


async def test_nowait_does_not_pass_a_waiter(client: Client) -> None:
    async with held_elsewhere(client.lock("x")):
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x")
        with pytest.raises(WouldBlock):
            await client.lock("x").acquire_nowait()
        assert len((await client.inspect("x")).waiters) == 1
    await (await waiting).release()


async def test_burst_of_requests_that_fills_its_slices_can_be_cancelled(
    make_client: MakeClient,
) -> None:
    # A hundred begin in a turn of the loop: full slices must not keep the next one from beginning.
    client, other = await make_client(), await make_client()
    async with other.lock("x"):
        waiting = [asyncio.create_task(client.lock("x").acquire()) for _ in range(200)]
        await until_waiting(other, "x", 200)
        for waiter in waiting:
            waiter.cancel()
        _, stuck = await asyncio.wait(waiting, timeout=PATIENCE)
        assert not stuck
        await until_waiting(other, "x", 0)
    async with asyncio.timeout(PATIENCE), client.lock("another"):
        pass


async def test_cancelled_waiter_leaves_the_queue_and_the_next_is_served(client: Client) -> None:
    async with held_elsewhere(client.lock("x")):
        first = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x")
        second = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x", 2)
        await cancelled(first)
        assert len((await client.inspect("x")).waiters) == 1
    await (await second).release()


# -- releasing -------------------------------------------------------------------------------------


async def test_lock_release_ends_the_latest_hold_of_this_task(client: Client) -> None:
    lock = client.lock("x")
    first = await lock.acquire()
    second = await client.lock("x").acquire()
    await lock.release()
    assert not second.held
    assert is_held(first)
    assert await lock.locked()
    await lock.release()
    assert not first.held
    assert not await lock.locked()
    with pytest.raises(NotHeld) as nothing:
        await lock.release()
    assert nothing.value.name == "x"
    assert "'x'" in str(nothing.value)


async def test_lock_release_is_of_its_own_mode(client: Client) -> None:
    both = client.rwlock("x")
    lease = await both.write.acquire()
    with pytest.raises(NotHeld):
        await both.read.release()
    assert is_held(lease)
    await both.write.release()


async def test_lock_release_in_a_task_that_holds_nothing_is_not_held(client: Client) -> None:
    lock = client.lock("x")
    async with lock as lease:
        with pytest.raises(NotHeld):
            await asyncio.create_task(lock.release())
        assert is_held(lease)


async def test_lease_is_released_from_any_task_and_once(client: Client) -> None:
    lease = await client.lock("x").acquire()
    await asyncio.create_task(lease.release())
    assert not await client.lock("x").locked()
    for _ in range(2):
        with pytest.raises(NotHeld) as again:
            await lease.release()
        assert again.value.name == "x"
    assert isinstance(again.value, RuntimeError)


async def test_release_inside_the_body_is_not_repeated_on_leaving(client: Client) -> None:
    async with client.lock("x") as lease:
        await lease.release()
        async with held_elsewhere(client.lock("x")) as next_lease:
            assert next_lease.token > lease.token
    assert not await client.lock("x").locked()


async def test_lock_release_inside_the_body(client: Client) -> None:
    lock = client.lock("x")
    async with lock as lease:
        await lock.release()
        assert not is_held(lease)
        assert not await lock.locked()


async def test_unconfirmed_release_frees_the_name(client: Client) -> None:
    for _ in range(5):
        async with client.lock("x", confirm_release=False) as lease:
            assert is_held(lease)
    await until_free(client, "x")


async def test_body_left_in_another_task_than_entered_is_released(client: Client) -> None:
    lock = client.lock("x")
    lease = await asyncio.create_task(lock.__aenter__())
    assert is_held(lease)
    await asyncio.create_task(lock.__aexit__(None, None, None))
    assert not is_held(lease)
    assert not await lock.locked()


async def test_leases_context_left_in_another_task_is_released(client: Client) -> None:
    lease = await client.lock("x").acquire()
    await asyncio.create_task(lease.__aenter__())
    await asyncio.create_task(lease.__aexit__(None, None, None))
    assert not await client.lock("x").locked()


async def test_closed_generator_releases(client: Client) -> None:
    async def values() -> AsyncIterator[int]:
        async with client.lock("x"):
            yield 1
            yield 2

    generator = values()
    assert await anext(generator) == 1
    assert await client.lock("x").locked()
    await generator.aclose()  # type: ignore[attr-defined]
    await until_free(client, "x")


async def test_collected_generator_releases(client: Client) -> None:
    async def values() -> AsyncIterator[int]:
        async with client.lock("x"):
            yield 1
            yield 2

    async def take_one() -> None:
        async for _ in values():
            break  # the loop closes what is collected, in a task of its own

    await asyncio.create_task(take_one())
    await until_free(client, "x")


# -- reentrancy ------------------------------------------------------------------------------------


async def test_task_that_holds_gets_in_again_with_the_same_token(client: Client) -> None:
    lock = client.lock("x", ttl=5)
    async with lock as outer:
        async with client.lock("x", ttl=9) as inner:
            assert inner.token == outer.token
            assert inner.ttl == 5, "the outermost options hold"
            assert inner.owner == outer.owner
        assert not inner.held
        assert is_held(outer)
        assert await lock.locked()
        async with lock as again:
            await again.release()
        again_bare = await lock.acquire_nowait()
        await again_bare.release()
        assert is_held(outer)
    assert not await lock.locked()


async def test_getting_in_again_needs_no_round_trip(client: Client, store: Store) -> None:
    lock = client.lock("x")
    async with lock:
        coroutine = lock.acquire()
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)  # it never suspends
        await done.value.value.release()


async def test_getting_in_again_passes_the_waiters(client: Client) -> None:
    lock = client.lock("x")
    async with lock:
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(client, "x")
        async with lock:
            assert not waiting.done()
    await (await waiting).release()


async def test_holds_may_end_in_any_order(client: Client) -> None:
    lock = client.lock("x")
    outer = await lock.acquire()
    inner = await lock.acquire()
    await outer.release()
    assert not outer.held
    assert inner.held
    assert await lock.locked()
    await inner.release()
    assert not await lock.locked()


async def test_child_task_is_another_owner(client: Client) -> None:
    lock = client.lock("x")
    async with lock:
        with pytest.raises(WouldBlock):
            await asyncio.create_task(lock.acquire_nowait())
        async with asyncio.TaskGroup() as group:

            async def child() -> None:
                with pytest.raises(AcquireTimeout):
                    await lock.acquire(timeout=BRIEF)

            group.create_task(child())


async def test_exclusive_then_shared_and_the_downgrade(client: Client) -> None:
    both = client.rwlock("x")
    writing = await both.write.acquire()
    reading = await both.read.acquire()
    assert reading.mode == "shared"
    with pytest.raises(WouldBlock):
        await asyncio.create_task(both.read.acquire_nowait())
    await writing.release()
    async with held_elsewhere(both.read):
        assert reading.held
        with pytest.raises(WouldBlock):
            await asyncio.create_task(both.write.acquire_nowait())
    await reading.release()
    assert not await both.read.locked()


@pytest.mark.parametrize("owner", [None, "me"])
async def test_shared_then_exclusive_is_a_deadlock_at_once(
    client: Client, owner: str | None
) -> None:
    both = client.rwlock("x", owner=owner)
    async with both.read as reading:
        for attempt in (both.write.acquire(), both.write.acquire_nowait()):
            with pytest.raises(DeadlockError) as error:
                await attempt
            assert isinstance(error.value, RuntimeError)
            assert error.value.name == "x"
            assert "'x'" in str(error.value)
        assert reading.held
    async with both.write:
        pass


async def test_named_owner_is_one_over_tasks(client: Client) -> None:
    lock = client.lock("x", owner="me")
    async with lock as mine:
        other = await asyncio.create_task(lock.acquire())
        assert other.token == mine.token
        assert other.owner == mine.owner == "me"
        (holder,) = (await client.inspect("x")).holders
        assert (holder.owner, holder.count) == ("me", 2)
        with pytest.raises(WouldBlock):
            await asyncio.create_task(client.lock("x").acquire_nowait())
        with pytest.raises(WouldBlock):
            await asyncio.create_task(client.lock("x", owner="you").acquire_nowait())
    assert other.held
    assert await lock.locked()
    await other.release()
    assert not await lock.locked()


async def test_named_owner_is_one_over_clients_and_counted_on_the_server(
    make_client: MakeClient,
) -> None:
    first, second = await make_client(), await make_client()
    one = await first.lock("x", owner="job 7").acquire()
    two = await second.lock("x", owner="job 7").acquire()
    three = await second.lock("x", owner="job 7").acquire()
    assert one.token == two.token == three.token
    (holder,) = (await first.inspect("x")).holders
    assert (holder.owner, holder.count, holder.token) == ("job 7", 3, one.token)
    waiting = asyncio.create_task(first.lock("x").acquire())
    await until_waiting(first, "x")
    await one.release()
    await three.release()
    assert not waiting.done()
    assert two.held
    await two.release()
    last = await waiting
    assert last.token > one.token
    await last.release()


async def test_named_owner_passes_the_waiters(make_client: MakeClient) -> None:
    first, second = await make_client(), await make_client()
    async with first.lock("x", owner="me"):
        waiting = asyncio.create_task(first.lock("x").acquire())
        await until_waiting(first, "x")
        async with second.lock("x", owner="me", timeout=PATIENCE):
            assert not waiting.done()
    await (await waiting).release()


async def test_named_owner_never_equals_a_tasks_own(client: Client) -> None:
    async with client.lock("x") as lease:
        named = client.lock("x", owner=lease.owner)
        with pytest.raises(WouldBlock):
            await asyncio.create_task(named.acquire_nowait())


async def test_lost_lease_is_not_entered_again(client: Client) -> None:
    lock = client.lock("x", on_lost="flag")
    with pytest.raises(LockLost):  # noqa: PT012
        async with lock as lease:
            assert await client.break_lock("x") == 1
            assert (await lease.wait_lost()).reason == "broken"
            with pytest.raises(LockLost) as again:
                await lock.acquire()
            assert again.value.reason == "broken"
            with pytest.raises(LockLost):
                await lock.acquire_nowait()
    async with lock as fresh:
        assert fresh.token > lease.token


# -- for people ------------------------------------------------------------------------------------


async def test_inspect_tells_holders_and_waiters(client: Client) -> None:
    empty = await client.inspect("x")
    assert (empty.name, len(empty.holders), len(empty.waiters)) == ("x", 0, 0)
    async with client.lock("x", ttl=7, owner="holder") as lease:
        waiting = []
        for number in range(3):
            owner = f"waiter {number}"
            task = asyncio.create_task(client.lock("x", owner=owner).acquire())
            waiting.append(task)
            await until_waiting(client, "x", number + 1)
        info = await client.inspect("x")
        (holder,) = info.holders
        assert info.token == holder.token == lease.token
        assert (holder.owner, holder.mode, holder.count) == ("holder", "exclusive", 1)
        assert holder.remaining is None or 5 < holder.remaining <= 7
        assert isinstance(holder.client, str)
        assert holder.client
        assert [waiter.owner for waiter in info.waiters] == [f"waiter {n}" for n in range(3)]
        assert [waiter.position for waiter in info.waiters] == [0, 1, 2]
        assert all(waiter.mode == "exclusive" for waiter in info.waiters)
        assert all(0 <= (waiter.waiting or 0.0) < 5 for waiter in info.waiters)
        for task in waiting:
            await cancelled(task)


async def test_lease_that_nobody_extends_is_overdue_from_its_half_on(client: Client) -> None:
    async def looked_at(name: str) -> aiodlock.HolderInfo:
        (holder,) = (await client.inspect(name)).holders
        return holder

    kept = await client.lock("kept", ttl=6, on_lost="flag").acquire()
    left = await client.lock("left", ttl=6, auto_extend=False, on_lost="flag").acquire()
    first = await looked_at("left")
    if client._core.store.capabilities.remaining_known:
        assert first.ttl == 6
        await until(lambda: left.remaining() < 2.5)
        assert (await looked_at("left")).overdue
    assert not first.overdue
    assert not (await looked_at("kept")).overdue
    for lease in (kept, left):
        await lease.release()


async def test_locks_lists_what_matches(client: Client) -> None:
    async with client.lock("order:1"), client.lock("order:2"), client.lock("else"):
        assert {i.name async for i in client.locks(match="order:*")} == {"order:1", "order:2"}
        assert {i.name async for i in client.locks(match="order:[2-9]")} == {"order:2"}
        assert {i.name async for i in client.locks(match="?lse")} == {"else"}
        assert {i.name async for i in client.locks()} == {"order:1", "order:2", "else"}
        assert not [i async for i in client.locks(match="none*")]
    assert not [info async for info in client.locks()]


async def test_prefixes_are_separate_worlds(make_client: MakeClient) -> None:
    one, other = await make_client(prefix="one"), await make_client(prefix="other")
    async with one.lock("x"), other.lock("x"):
        assert len([info async for info in one.locks()]) == 1


async def test_break_lock_tells_all_holders_and_lets_the_next_in(make_client: MakeClient) -> None:
    operator, holder = await make_client(), await make_client()
    assert await operator.break_lock("x") == 0
    lock = holder.lock("x", lock_delay=30)
    entered = asyncio.Event()

    async def body() -> None:
        async with lock:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered.wait()
    waiting = asyncio.create_task(holder.lock("x").acquire())
    await until_waiting(operator, "x")
    assert await operator.break_lock("x") == 1
    async with takes(at_most=SOON):  # long before the next extension of either
        with pytest.raises(LockLost) as lost:
            await task
        lease = await waiting
    assert lost.value.reason == "broken"
    assert lost.value.name == "x"
    await lease.release()


async def test_break_lock_counts_shared_holders(client: Client) -> None:
    read = client.rwlock("x", on_lost="flag").read
    leases = [await asyncio.create_task(read.acquire()) for _ in range(3)]
    assert await client.break_lock("x") == 3
    for lease in leases:
        assert (await lease.wait_lost()).reason == "broken"
        with pytest.raises(LockLost):
            await lease.release()


async def test_sequencer_that_no_lease_made_is_not_valid(client: Client) -> None:
    made_up = ["", "x", "x:exclusive", "x:exclusive:1", "x:exclusive:-1", "x:exclusive:1e3", ":::"]
    async with client.lock("x"):
        assert [one for one in made_up if await client.check_sequencer(one) is not False] == []


async def test_sequencer_is_valid_for_its_own_grant_only(client: Client) -> None:
    async with client.lock("x") as lease:
        assert await client.check_sequencer(lease.sequencer) is True
        changed = lease.sequencer.replace(str(lease.token), str(lease.token + 1))
        assert await client.check_sequencer(changed) is False
        shared = lease.sequencer.replace("exclusive", "shared")
        assert await client.check_sequencer(shared) is False
    async with client.lock("x"):
        assert await client.check_sequencer(lease.sequencer) is False


async def test_locked_tells_of_any_holder_in_any_mode(client: Client) -> None:
    both = client.rwlock("x")
    assert await both.read.locked() is False
    async with held_elsewhere(both.read):
        assert await both.write.locked() is True
        assert await both.read.locked() is True


async def test_bad_name_is_refused_everywhere(client: Client) -> None:
    for bad in ("", "x" * 513, "\ud800"):
        with pytest.raises(ValueError):
            await client.inspect(bad)
        with pytest.raises(ValueError):
            await client.break_lock(bad)


@pytest.mark.scripted
async def test_free_name_leaves_only_its_token(client: Client, store: Store) -> None:
    lock = client.lock("x")
    async with held_elsewhere(lock):
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(client, "x")
    await (await waiting).release()
    raw = await store.raw()

    async def only_the_token() -> bool:
        keys = [key async for key in raw.scan_iter("*")]
        # The nodes of a quorum know that they are.
        return [key for key in keys if not key.startswith("aiodlock:2:quorum")] == [
            "aiodlock:2:lock:{x}:token"
        ]

    await until(only_the_token)
    assert 3500 < await raw.ttl("aiodlock:2:lock:{x}:token") <= 3601


async def test_acquisitions_whose_lease_is_discarded_leave_nothing_at_the_task(
    client: aiodlock.Client,
) -> None:
    lock = client.lock("x")

    async def worker() -> int:
        for _ in range(20):
            await lock.acquire()
            await lock.release()
        task = asyncio.current_task()
        callbacks = getattr(task, "_callbacks", None) or []
        return len(callbacks)

    assert await asyncio.create_task(worker()) <= 2  # who awaits it is one


async def test_margin_that_leaves_no_time_to_extend_is_refused(client: aiodlock.Client) -> None:
    with pytest.raises(ValueError, match="margin"):
        client.lock("x", ttl=1, margin=0.995)


async def test_extending_by_hand_again_and_again_takes_no_memory(client: aiodlock.Client) -> None:
    async with client.lock("x", ttl=3600) as lease:
        for _ in range(300):
            await lease.extend()
        assert client._core.session is not None
        assert len(client._core.session.deadlines._agenda._heap) < 200
        assert len(keeper_of(client)._agenda._heap) < 200


async def test_waiting_for_the_loss_of_an_inner_lease_ends_with_its_release(
    client: aiodlock.Client,
) -> None:
    async with client.lock("x"):
        inner = await client.lock("x").acquire()
        waiting = asyncio.create_task(inner.wait_lost())
        await until(lambda: inner._request.watchers)
        await inner.release()
        with pytest.raises(aiodlock.NotHeld):
            await waiting
