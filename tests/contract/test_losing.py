"""A lease: what it tells, how it is lost, and what comes out of the body."""

# A lease is lost inside a body of several statements, and `raises` stands around it.
# ruff: noqa: PT012, PT031

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
import warnings
from collections.abc import Awaitable, Callable

import anyio
import pytest

import aiodlock
from aiodlock import (
    BackendError,
    Client,
    Lease,
    LockLost,
    MultiLease,
    NotHeld,
    Unsupported,
    WouldBlock,
)
from aiodlock._clock import now
from aiodlock._request import LOST

from ..conftest import MakeClient
from ..inside import session_of
from ..scenes import (
    LASTING,
    PATIENCE,
    SOON,
    bounded,
    cancelled,
    held_elsewhere,
    is_held,
    takes,
    until,
    until_cancelled,
    until_free,
    until_outlived,
    until_waiting,
)
from ..servers import SERVED, ZOOKEEPER, Store


async def lose(client: Client, lease: Lease) -> None:
    """Have an operator break the lease; return when its holder knows."""
    assert await client.break_lock(lease.name) == 1
    async with takes(at_most=SOON):
        await lease.wait_lost()


async def turns(client: Client) -> None:
    """Give a cancellation that must not come the time to come: round trips to the store."""
    for _ in range(3):
        await client.inspect("another name")


# -- what it tells ---------------------------------------------------------------------------------


async def test_lease_tells_what_it_is(client: Client) -> None:
    async with client.lock("order:42", ttl=7) as lease:
        assert lease.name == "order:42"
        assert lease.mode == "exclusive"
        assert lease.ttl == 7
        assert is_held(lease) is True
        assert lease.lost is None
        assert 6 < lease.remaining() < 7
        assert isinstance(lease.owner, str)
        assert lease.owner
        lease.ensure_held()
        assert "'order:42'" in repr(lease)
        assert str(lease.token) in repr(lease)
        assert "held" in repr(lease)
    assert lease.held is False
    assert lease.lost is None
    assert lease.remaining() == 0
    assert "released" in repr(lease)
    with pytest.raises(NotHeld):
        lease.ensure_held()
    with pytest.raises(NotHeld):
        await lease.wait_lost()
    with pytest.raises(NotHeld):
        await lease.extend()
    with pytest.raises(NotHeld):
        async with lease:
            pytest.fail("entered a released lease")


async def test_default_ttl_is_the_clients(make_client: MakeClient) -> None:
    client = await make_client(ttl=4.0)
    async with client.lock("x") as lease:
        assert lease.ttl == 4
    async with client.lock("x", ttl=2) as lease:
        assert lease.ttl == 2


async def test_lease_lives_longer_than_its_ttl(client: Client) -> None:
    async with client.lock("x", ttl=LASTING) as lease:
        await until_outlived(lease)
        assert is_held(lease)
        assert 0 < lease.remaining() <= LASTING
        assert (await client.inspect("x")).holders[0].token == lease.token


async def test_granted_waiter_lives_longer_than_its_ttl(client: Client) -> None:
    lock = client.lock("x", ttl=LASTING)
    async with held_elsewhere(lock):
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(client, "x")
        began = now()
        await until(lambda: _longest_wait(client, LASTING, began), "a wait longer than its lease")
    lease = await waiting
    await until_outlived(lease)
    assert is_held(lease)
    await lease.release()


async def _longest_wait(client: Client, more_than: float, began: float) -> bool:
    """Tell whether somebody has waited so long; where the store cannot know it, since ``began``."""
    info = await client.inspect("x")
    waits = [now() - began if one.waiting is None else one.waiting for one in info.waiters]
    return any(waited > more_than for waited in waits)


async def test_lease_without_auto_extend_ends_at_its_ttl(client: Client) -> None:
    async with takes(at_least=0.29, at_most=0.4):
        with pytest.raises(LockLost) as lost:
            async with client.lock("x", ttl=0.3, auto_extend=False) as lease:
                await until_cancelled()
    assert lost.value.reason == "expired"
    assert str(lease.token) in str(lost.value)
    assert not is_held(lease)


async def test_extending_by_hand_keeps_a_lease_without_auto_extend(client: Client) -> None:
    async with client.lock("x", ttl=LASTING, auto_extend=False) as lease:
        for _ in range(6):  # longer than the ttl
            await asyncio.sleep(0.4)
            await lease.extend()
        assert is_held(lease)


async def test_new_ttl_holds_from_then_on(client: Client) -> None:
    async with client.lock("x", ttl=LASTING) as lease:
        await lease.extend(20)
        assert lease.ttl == 20
        assert 10 < lease.remaining() < 20
        await lease.extend()
        assert 10 < lease.remaining() < 20
        remaining = (await client.inspect("x")).holders[0].remaining
        assert remaining is None or remaining > 10


@pytest.mark.stores(*ZOOKEEPER)
async def test_ttl_that_the_store_cannot_change_stays(client: Client) -> None:
    async with client.lock("x", ttl=LASTING) as lease:
        with pytest.raises(Unsupported, match="ttl=20"):
            await lease.extend(20)
        assert lease.ttl == LASTING


async def test_extending_never_brings_the_deadline_nearer(client: Client) -> None:
    async with client.lock("x", ttl=20) as lease:
        await lease.extend(0.5)
        assert lease.ttl == 0.5
        assert lease.remaining() > 10
        remaining = (await client.inspect("x")).holders[0].remaining
        assert remaining is None or remaining > 10


async def test_bad_ttl_of_extend_changes_nothing(client: Client) -> None:
    async with client.lock("x", ttl=5, margin=1) as lease:
        for bad in (0, 0.01, -1, float("nan"), float("inf"), 0.9):
            with pytest.raises(ValueError, match="ttl"):
                await lease.extend(bad)
        with pytest.raises(TypeError):
            await lease.extend("5")  # type: ignore[arg-type]
        assert lease.ttl == 5
        assert is_held(lease)


async def test_margin_ends_the_lease_that_much_earlier(client: Client) -> None:
    async with takes(at_least=0.28, at_most=0.5):
        with pytest.raises(LockLost) as lost:
            async with client.lock("x", ttl=1, margin=0.7, auto_extend=False) as lease:
                assert lease.remaining() <= 0.3
                await until_cancelled()
    assert lost.value.reason == "expired"


async def test_margin_leaves_a_living_lease_alone(client: Client) -> None:
    async with client.lock("x", ttl=1.5 * LASTING, margin=0.3) as lease:
        await until_outlived(lease)
        assert is_held(lease)


async def test_max_hold_ends_the_lease_whatever_happens(client: Client) -> None:
    async with takes(at_least=1.4, at_most=1.6):
        with pytest.raises(LockLost) as lost:
            async with client.lock("x", ttl=1.2, max_hold=1.5) as lease:
                await lease.extend(10)
                await until_cancelled()
    assert lost.value.reason == "max_hold"
    await until_free(client, "x")


@pytest.mark.parametrize("auto_extend", [True, False])
async def test_max_hold_shorter_than_the_ttl_is_the_reason(
    client: Client, auto_extend: bool
) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("x", max_hold=0.2, auto_extend=auto_extend):
            await until_cancelled()
    assert lost.value.reason == "max_hold"


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize(("ttl", "max_hold"), [(30.0, 1.5), (2.0, 3.0)])
async def test_max_hold_leaves_a_body_its_margin(
    client: Client, ttl: float, max_hold: float, waited: bool
) -> None:
    """The name opens at the ``max_hold``: the body is told so much earlier, and has time to end."""
    before = await client.lock("x").acquire() if waited else None
    task = asyncio.create_task(client.lock("x", ttl=ttl, max_hold=max_hold, margin=0.5).acquire())
    if before is not None:
        await until_waiting(client, "x", 1)
        await before.release()
    lease = await task
    closed = False
    with pytest.raises(LockLost) as lost:
        async with lease:
            try:
                await until_cancelled()
            finally:
                await asyncio.sleep(0.2)  # it cleans up
                closed = await client.lock("x").locked()
    assert closed
    assert lost.value.reason == "max_hold"
    await until_free(client, "x")


@pytest.mark.parametrize("waited", [False, True])
async def test_store_keeps_no_lease_for_longer_than_a_max_hold_below_the_ttl(
    client: Client, waited: bool
) -> None:
    lock = client.lock("x", ttl=20, max_hold=LASTING)
    if waited:
        async with held_elsewhere(client.lock("x")):
            asking = asyncio.create_task(lock.acquire())
            await until_waiting(client, "x")
    else:
        asking = asyncio.create_task(lock.acquire())
    lease = await asking
    (holder,) = (await client.inspect("x")).holders
    assert holder.remaining is None or holder.remaining <= LASTING
    await lease.release()


# -- losing ----------------------------------------------------------------------------------------


async def test_wait_lost_returns_the_loss(client: Client) -> None:
    lease = await client.lock("x").acquire()
    waiting = asyncio.create_task(lease.wait_lost())
    also = asyncio.create_task(lease.wait_lost())
    await lose(client, lease)
    lost = await waiting
    assert (await also).reason == lost.reason == "broken"
    assert lease.lost is not None
    assert lease.lost.reason == "broken"
    assert lost.name == "x"
    assert not is_held(lease)
    assert "broken" in repr(lease)
    for use in (lease.extend, lease.release):
        with pytest.raises(LockLost):
            await use()
    with pytest.raises(LockLost):
        lease.ensure_held()
    with pytest.raises(NotHeld):
        await lease.release()


async def test_wait_lost_ends_when_the_lease_is_released(client: Client) -> None:
    lease = await client.lock("x").acquire()
    waiting = asyncio.create_task(lease.wait_lost())
    await asyncio.sleep(0)
    await lease.release()
    with pytest.raises(NotHeld):
        await waiting


async def test_wait_lost_can_be_cancelled(client: Client) -> None:
    async with client.lock("x") as lease:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await lease.wait_lost()
        assert is_held(lease)


async def test_bare_lease_is_never_cancelled(client: Client) -> None:
    lease = await client.lock("x").acquire()
    await lose(client, lease)
    await turns(client)
    with pytest.raises(LockLost):
        await lease.release()


async def test_flag_only_marks_the_lease_and_leaving_raises(client: Client) -> None:
    reached = False
    with pytest.raises(LockLost) as lost:
        async with client.lock("x", on_lost="flag") as lease:
            await lose(client, lease)
            await turns(client)
            assert lease.lost is not None
            reached = True
    assert reached
    assert lost.value.reason == "broken"


async def test_body_is_cancelled_and_lock_lost_raised(client: Client) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("x") as lease:
            await client.break_lock("x")
            await until_cancelled()
    assert lost.value.reason == "broken"
    assert "'x'" in str(lost.value)
    assert str(lease.token) in str(lost.value)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await turns(client)  # and is not cancelled again


@pytest.mark.stores(*SERVED)
async def test_deleted_state_is_gone(client: Client, store: Store) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("x", ttl=LASTING):
            await store.empty()
            await until_cancelled()
    assert lost.value.reason == "gone"


@pytest.mark.stores(*SERVED)
async def test_deleted_state_is_noticed_on_leaving(client: Client, store: Store) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("x"):
            await store.empty()
    assert lost.value.reason == "gone"


@pytest.mark.stores(*SERVED)
async def test_holder_that_was_replaced_is_taken_over(client: Client, store: Store) -> None:
    lock = client.lock("x", ttl=5, on_lost="flag")
    lease = await lock.acquire()
    await store.empty()
    async with held_elsewhere(client.lock("x")):
        with pytest.raises(LockLost) as lost:
            await lease.extend()
        assert lost.value.reason == "taken_over"


async def test_cleaning_up_in_the_body_may_await(client: Client) -> None:
    done = []
    with pytest.raises(LockLost):
        async with client.lock("x"):
            try:
                await client.break_lock("x")
                await until_cancelled()
            finally:
                await turns(client)
                done.append("rolled back")
    assert done == ["rolled back"]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_nested_body_is_cancelled_exactly_once(client: Client, depth: int) -> None:
    lock = client.lock("x")
    times = 0

    async def body(depth: int) -> None:
        nonlocal times
        async with lock:
            if depth > 1:
                await body(depth - 1)
            else:
                try:
                    await client.break_lock("x")
                    await until_cancelled()
                except asyncio.CancelledError:
                    times += 1
                    await turns(client)
                    raise

    with pytest.raises(LockLost):
        await body(depth)
    assert times == 1
    await until_free(client, "x")


async def test_inner_exception_handler_sees_lock_lost_of_nested_lock(client: Client) -> None:
    lock = client.lock("x")
    with pytest.raises(LockLost):
        async with lock:
            with pytest.raises((LockLost, asyncio.CancelledError)):
                async with lock:
                    await client.break_lock("x")
                    await until_cancelled()


async def test_two_locks_of_one_task_lost_at_once(client: Client) -> None:
    with pytest.raises(LockLost) as lost:
        async with client.lock("outer"):
            async with client.lock("inner"):
                await client.break_lock("outer")
                await client.break_lock("inner")
                await until_cancelled()
    assert lost.value.name in ("outer", "inner")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await until_free(client, "outer")
    await until_free(client, "inner")


# -- what comes out --------------------------------------------------------------------------------


async def test_exception_of_the_body_comes_out_as_it_is(client: Client) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised:
        async with client.lock("x"):
            raise error
    assert raised.value is error
    assert not hasattr(error, "__notes__")
    assert not await client.lock("x").locked()


async def test_exception_of_the_body_goes_before_the_loss_which_is_a_note(client: Client) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised:
        async with client.lock("x", on_lost="flag") as lease:
            await lose(client, lease)
            raise error
    assert raised.value is error
    assert len(error.__notes__) == 1
    assert "'x'" in error.__notes__[0]
    assert "broken" in error.__notes__[0]


async def test_exception_raised_while_being_cancelled_has_the_note(client: Client) -> None:
    with pytest.raises(ValueError, match="mine") as raised:
        async with client.lock("x"):
            try:
                await client.break_lock("x")
                await until_cancelled()
            except asyncio.CancelledError:
                raise ValueError("mine") from None
    assert any("'x'" in note for note in raised.value.__notes__)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_body_that_swallows_the_cancellation_gets_lock_lost(client: Client) -> None:
    with pytest.raises(LockLost):
        async with client.lock("x"):
            try:
                await client.break_lock("x")
                await until_cancelled()
            except asyncio.CancelledError:
                pass


async def test_outer_cancellation_goes_before_the_loss(client: Client) -> None:
    cleaning = asyncio.Event()

    async def body() -> None:
        async with client.lock("x"):
            try:
                await client.break_lock("x")
                await until_cancelled()
            finally:
                cleaning.set()
                await until_cancelled()

    task = asyncio.create_task(body())
    await cleaning.wait()
    await cancelled(task)
    await until_free(client, "x")


async def test_outer_cancellation_of_a_living_body_releases(client: Client) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with client.lock("x"):
            entered.set()
            await until_cancelled()

    task = asyncio.create_task(body())
    await entered.wait()
    await cancelled(task)
    assert not await client.lock("x").locked()


async def test_timeout_around_a_flagged_loss_stays_a_timeout(client: Client) -> None:
    with pytest.raises(TimeoutError) as elapsed:
        async with asyncio.timeout(None) as limit:
            async with client.lock("x", on_lost="flag") as lease:
                await lose(client, lease)
                limit.reschedule(asyncio.get_running_loop().time())
                await until_cancelled()
    assert not isinstance(elapsed.value, LockLost)


async def test_loss_in_a_task_group_of_the_body_comes_out_as_lock_lost(client: Client) -> None:
    with pytest.raises(LockLost):
        async with client.lock("x"):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                await client.break_lock("x")
                await until_cancelled()


async def test_async_with_lease_arms_and_releases(client: Client) -> None:
    async with await client.lock("x").acquire() as lease:
        assert is_held(lease)
    assert not is_held(lease)
    assert not await client.lock("x").locked()
    with pytest.raises(LockLost):
        async with await client.lock("x").acquire():
            await client.break_lock("x")
            await until_cancelled()


async def test_lease_armed_in_another_task_cancels_that_task(client: Client) -> None:
    lease = await client.lock("x").acquire()
    entered = asyncio.Event()

    async def body() -> None:
        async with lease:
            entered.set()
            await until_cancelled()

    task = asyncio.create_task(body())
    await entered.wait()
    await client.break_lock("x")
    with pytest.raises(LockLost):
        await task


# -- a blocked event loop --------------------------------------------------------------------------


@pytest.mark.real_store
@pytest.mark.parametrize("awaits", [True, False])
async def test_loop_blocked_longer_than_the_ttl_loses_the_lease(
    make_client: MakeClient, awaits: bool
) -> None:
    client = await make_client()
    with pytest.raises(LockLost) as lost:
        async with client.lock("x", ttl=0.2) as lease:
            time.sleep(0.4)
            assert not is_held(lease)
            if awaits:
                await until_cancelled()
    assert lost.value.reason == "expired"
    async with client.lock("x") as successor:
        assert successor.token > lease.token


# -- forgotten leases ------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_lease_that_was_lost_before_its_block_is_left_by_entering_it(
    client: Client, names: str
) -> None:
    lease = await (client.lock("a") if names == "a" else client.multilock(*names)).acquire()
    await client.break_lock("a")
    async with takes(at_most=SOON):
        await lease.wait_lost()
    with pytest.raises(LockLost):
        async with lease:
            raise AssertionError
    await until(lambda: not session_of(client).requests, "the end of the lease")
    with pytest.raises(NotHeld):
        await lease.release()
    await until_free(client, *names)


async def test_multilock_that_was_cancelled_leaves_nothing_to_the_collector(client: Client) -> None:
    def leases() -> list[object]:
        return [found for found in gc.get_objects() if isinstance(found, MultiLease)]

    async with client.lock("b"):
        gc.collect()
        gc.disable()
        try:
            before = len(leases())
            waiting = asyncio.create_task(client.multilock("a", "b").acquire())
            await until_waiting(client, "b")
            waiting.cancel()
            await asyncio.wait({waiting})
            del waiting
            await until_free(client, "a")
            assert len(leases()) == before
        finally:
            gc.enable()


async def test_lease_cannot_be_copied(client: Client) -> None:
    """It is one acquisition, which would be released with the first copy that is forgotten."""
    lease = await client.lock("x").acquire()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"'x'.*cannot be copied"):
            copied(lease)
    assert lease.held
    await lease.release()


async def test_forgotten_bare_lease_is_released_with_a_warning(client: Client) -> None:
    lease = await asyncio.create_task(client.lock("x").acquire())
    await asyncio.sleep(0)  # the loop has handed the task on, and forgets it
    with pytest.warns(ResourceWarning, match="'x'"):
        del lease
        gc.collect()
    await until_free(client, "x")


async def test_lease_forgotten_in_a_cycle_is_released(client: Client) -> None:
    holder: list[object] = [await asyncio.create_task(client.lock("x").acquire())]
    await asyncio.sleep(0)  # the loop has handed the task on, and forgets it
    holder.append(holder)
    with pytest.warns(ResourceWarning, match="'x'"):
        del holder
        gc.collect()
    await until_free(client, "x")


async def test_discarded_result_is_released_by_the_lock_without_a_warning(client: Client) -> None:
    lock = client.lock("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await lock.acquire()
        gc.collect()
        await turns(client)
        assert await lock.locked()
        await lock.release()
        gc.collect()
    assert not await lock.locked()
    with pytest.raises(NotHeld):
        await lock.release()


async def test_lock_that_was_acquired_in_a_condition_is_held_until_it_is_released(
    client: Client,
) -> None:
    """As with ``asyncio.Lock`` and redis-py's, whose ``acquire`` returns a bool."""
    lock = client.lock("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if await lock.acquire():  # type: ignore[truthy-bool]
            await turns(client)
            assert await lock.locked()
            await lock.release()
        if not await lock.acquire():  # type: ignore[truthy-bool]
            raise AssertionError("a lease is true")
        await turns(client)
        assert await lock.locked()
        await lock.release()
        gc.collect()
    assert not await lock.locked()


async def test_task_that_ends_without_releasing_is_told_and_the_name_is_freed(
    client: Client,
) -> None:
    async def forget() -> None:
        await client.lock("x").acquire()

    with pytest.warns(ResourceWarning, match="'x'"):
        await asyncio.create_task(forget())
        gc.collect()
        await until_free(client, "x")


async def test_released_and_lost_leases_are_collected_in_silence(client: Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    lost = await client.lock("x").acquire()
    await lose(client, lost)
    with pytest.raises(LockLost):
        await lost.release()
    async with client.lock("x"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease, lost
        gc.collect()


async def test_lease_kept_by_another_task_outlives_its_own(client: Client) -> None:
    lease = await asyncio.create_task(client.lock("x").acquire())
    gc.collect()
    await turns(client)
    assert is_held(lease)
    assert await client.lock("x").locked()
    await lease.release()


# -- leaving while the client dies -----------------------------------------------------------------


async def test_death_of_a_background_task_reaches_waits_and_bodies(client: Client) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with client.lock("x"):
            entered.set()
            await until_cancelled()

    holding = asyncio.create_task(body())
    await entered.wait()
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(client, "x")

    async def bug() -> None:
        raise ZeroDivisionError("a bug of ours")

    session = client._core.session
    assert session is not None
    session.start_soon(bug)
    for task in (holding, waiting):
        with pytest.raises(BackendError) as error:
            await task
        assert isinstance(error.value.__cause__, ZeroDivisionError)


# -- what a demanding user tries -------------------------------------------------------------------


async def test_anyio_scope_around_a_body_ends_it_and_releases(client: Client) -> None:
    with anyio.move_on_after(0.05) as scope:
        async with client.lock("x"):
            await until_cancelled()
    assert scope.cancelled_caught
    await until_free(client, "x")


async def test_anyio_scope_inside_a_lost_body_does_not_hide_the_loss(client: Client) -> None:
    with pytest.raises(LockLost):
        async with client.lock("x"):
            with anyio.move_on_after(10):
                await client.break_lock("x")
                await until_cancelled()


async def test_asyncio_timeout_inside_a_lost_body_does_not_hide_the_loss(client: Client) -> None:
    with pytest.raises(LockLost):
        async with client.lock("x"):
            async with bounded(10):
                await client.break_lock("x")
                await until_cancelled()


async def test_task_works_on_after_a_loss(client: Client) -> None:
    tokens = []
    for _ in range(3):
        with pytest.raises(LockLost):
            async with client.lock("x") as lease:
                tokens.append(lease.token)
                await client.break_lock("x")
                await until_cancelled()
    async with client.lock("x") as lease:
        await turns(client)
        tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_base_exception_of_the_body_comes_out_and_releases(client: Client) -> None:
    class Stop(BaseException):
        pass

    with pytest.raises(Stop):
        async with client.lock("x"):
            raise Stop
    assert not await client.lock("x").locked()


async def test_return_and_break_in_the_body_release(client: Client) -> None:
    async def returns() -> int:
        async with client.lock("x") as lease:
            return lease.token

    assert await returns() > 0
    for _ in range(2):
        async with client.lock("x"):
            break
    assert not await client.lock("x").locked()


async def test_lease_entered_twice_is_released_once(client: Client) -> None:
    lease = await client.lock("x").acquire()
    async with lease:
        async with lease:
            assert is_held(lease)
        assert not is_held(lease)
    assert not await client.lock("x").locked()


async def test_hold_of_a_task_that_ended_is_not_inherited(client: Client) -> None:
    lock = client.lock("x")
    for _ in range(50):
        lease = await asyncio.create_task(lock.acquire())
        with pytest.raises(WouldBlock):  # though its id may be that of the task before
            await asyncio.create_task(lock.acquire_nowait())
        await lease.release()


# -- whatever the body does ------------------------------------------------------------------------


@pytest.mark.parametrize("touch", ["ensure_held", "extend", "wait_lost", "acquire", "nowait"])
async def test_body_that_touches_its_lost_lease_and_goes_on_is_cancelled_at_its_next_await(
    client: Client, touch: str
) -> None:
    lock = client.lock("x", ttl=0.1, auto_extend=False)
    steps = 0

    async def ensure_held(lease: Lease) -> None:
        lease.ensure_held()

    uses: dict[str, Callable[[Lease], Awaitable[object]]] = {
        "ensure_held": ensure_held,
        "extend": lambda lease: lease.extend(),
        "wait_lost": lambda lease: lease.wait_lost(),
        "acquire": lambda lease: lock.acquire(),
        "nowait": lambda lease: lock.acquire_nowait(),
    }
    with pytest.raises(LockLost):
        async with lock as lease:
            time.sleep(0.2)  # the loop is blocked once, for longer than the lease lasts
            try:
                await uses[touch](lease)
            except LockLost:
                pass  # logged, and forgotten
            while steps < 40:
                await asyncio.sleep(0.001)
                steps += 1
    assert steps == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.scripted
@pytest.mark.parametrize("way", ["lease", "lock", "block"])
async def test_body_whose_release_finds_the_lease_lost_is_cancelled_at_its_next_await(
    client: Client, store: Store, way: str
) -> None:
    raw, lock, steps = await store.raw(), client.lock("x"), 0

    async def enter(lease: Lease) -> None:
        async with lease:
            await raw.flushall()

    uses: dict[str, Callable[[Lease], Awaitable[object]]] = {
        "lease": lambda lease: lease.release(),
        "lock": lambda lease: lock.release(),
        "block": enter,
    }
    with pytest.raises(LockLost) as lost:
        async with lock as lease:
            await raw.flushall()
            try:
                await uses[way](lease)
            except LockLost:
                pass  # logged, and forgotten
            while steps < 40:
                await asyncio.sleep(0.001)
                steps += 1
    assert lost.value.reason == "gone"
    assert steps == 0
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.scripted
async def test_exception_of_a_release_that_finds_the_lease_lost_comes_out_of_the_body(
    client: Client, store: Store
) -> None:
    raw = await store.raw()
    with pytest.raises(LockLost) as lost:
        async with client.lock("x") as lease:
            await raw.flushall()
            await lease.release()
    assert lost.value.reason == "gone"
    await turns(client)  # and no cancellation afterwards


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01])
async def test_body_takes_no_second_step_after_its_lease_has_ended(
    client: Client, pause: float
) -> None:
    steps_after = 0
    with pytest.raises(LockLost):
        async with client.lock("x", ttl=0.15, auto_extend=False) as lease:
            blocked = False
            while True:
                await asyncio.sleep(pause)
                if not is_held(lease):
                    steps_after += 1
                elif not blocked and lease.remaining() < 0.05:
                    blocked = True
                    time.sleep(0.2)  # as a SIGSTOP does
    # One step more where the body yields without a pause: the lease may end between the loop's look at its
    # timers and the body's step, and that step is in line again before the loop looks at them next.
    assert steps_after <= (1 if pause else 2)


async def test_task_that_leaves_the_client_inside_a_body_is_not_cancelled(store: Store) -> None:
    client = Client(store.source, **store.options)
    await client.__aenter__()
    with pytest.raises(LockLost) as lost:
        async with client.lock("x"):
            await client.__aexit__(None, None, None)
            await asyncio.sleep(0.01)
    assert lost.value.reason == "closed"


async def test_loss_says_for_how_long_the_lease_is_over_when_it_is_raised(client: Client) -> None:
    lease = await client.lock("x", ttl=0.1, auto_extend=False).acquire()
    await lease.wait_lost()
    await asyncio.sleep(0.5)
    with pytest.raises(LockLost) as raised:
        lease.ensure_held()
    for told in (str(lease.lost), str(raised.value)):
        assert "expired 0.0 s ago" not in told
        assert "s ago" in told


async def test_loss_by_the_margin_says_what_is_left(client: Client) -> None:
    lease = await client.lock("x", ttl=5.0, margin=4.5, auto_extend=False).acquire()
    lost = await lease.wait_lost()
    assert "in 4." in str(lost)
    assert "margin 4.5 s" in str(lost)
    assert "ago" not in str(lost)


async def test_body_is_cancelled_also_when_a_thread_was_the_first_to_notice(
    client: aiodlock.Client,
) -> None:
    noticed = threading.Event()

    def notice(lease: aiodlock.Lease) -> None:
        try:
            while True:
                lease.ensure_held()
                time.sleep(0.005)
        finally:
            noticed.set()

    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x", ttl=0.2, auto_extend=False) as lease:
            noticing = asyncio.get_running_loop().run_in_executor(None, notice, lease)
            assert noticed.wait(PATIENCE)  # the loop is blocked: only the thread can see it
            await until_cancelled()
    with pytest.raises(aiodlock.LockLost):
        await noticing


async def test_looking_at_lost_does_not_keep_the_body_from_being_cancelled(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x", ttl=0.1, auto_extend=False) as lease:
            time.sleep(0.2)  # the loop is blocked, and the lease over when it runs again
            assert lease.lost is not None
            await until_cancelled()


async def test_release_that_is_closed_while_it_waits_goes_on(client: Client) -> None:
    lease = await client.lock("x").acquire()
    releasing = lease.release()
    releasing.send(None)
    releasing.close()
    assert client._core.session is not None
    requests = client._core.session.requests
    await until(lambda: not requests, "the end of the request")


async def test_loss_that_somebody_acts_on_is_marked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline may pass between two looks at the clock."""
    lease = await client.lock("x").acquire()
    register, request = session_of(client).register, lease._request
    later = request.ends_at + 1.0
    monkeypatch.setattr("aiodlock._request.now", lambda: later)
    lost = register.loss_of(request, lease._acquired.serial)
    monkeypatch.undo()
    assert lost is None or request.state is LOST
    await lease.release()


async def test_loss_of_what_the_task_still_holds_is_none_of_a_lease_that_was_released(
    client: Client,
) -> None:
    lock = client.lock("x")
    outer, inner = await lock.acquire(), await lock.acquire()
    await inner.release()
    await lose(client, outer)
    assert outer.lost is not None
    assert inner.lost is None
    assert "released" in repr(inner)
    with pytest.raises(NotHeld):
        inner.ensure_held()
    with pytest.raises(NotHeld):
        await inner.wait_lost()
    with pytest.raises(LockLost):
        await outer.release()


async def test_block_whose_lease_was_released_in_it_is_cancelled_with_what_its_task_still_holds(
    client: Client,
) -> None:
    lock = client.lock("x")
    outer = await lock.acquire()
    with pytest.raises(LockLost):
        async with lock as inner:
            await inner.release()
            await client.break_lock("x")
            await until_cancelled()
    with pytest.raises(LockLost):
        await outer.release()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
