# ruff: noqa: PT012
"""The order of what comes out, and what cancellation leaves behind."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import AsyncExitStack

import anyio
import pytest

import aiodlock
from aiodlock.testing import expire

from ..proxy import FaultProxy, named
from ..scenes import (
    LASTING,
    SOON,
    bounded,
    cancelled,
    held_elsewhere,
    is_free,
    takes,
    until_cancelled,
    until_free,
    until_held,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


class Mine(BaseException):
    pass


async def test_the_bodys_own_exception_comes_out_as_it_is(client: aiodlock.Client) -> None:
    for mine in (ValueError("mine"), Mine(), TimeoutError(), GeneratorExit(), StopAsyncIteration()):
        with pytest.raises(type(mine)) as raised:
            async with client.lock("x"):
                raise mine
        assert raised.value is mine
        assert not getattr(mine, "__notes__", [])
        assert await is_free(client, "x")


async def test_the_bodys_own_exception_carries_the_loss_as_a_note(client: aiodlock.Client) -> None:
    mine = ValueError("mine")
    with pytest.raises(ValueError) as raised:
        async with client.lock("x") as lease:
            expire(lease)
            try:
                await until_cancelled()
            except asyncio.CancelledError:
                raise mine from None
    assert raised.value is mine
    assert any("'x'" in note for note in mine.__notes__)
    assert lease.lost is not None
    assert "'x'" in "".join(traceback.format_exception(mine))


async def test_own_exception_with_a_flagged_loss_carries_the_note_too(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(ValueError) as raised:
        async with client.lock("x", on_lost="flag") as lease:
            expire(lease)
            await lease.wait_lost()
            raise ValueError("mine")
    assert any("'x'" in note for note in raised.value.__notes__)


async def test_the_loss_comes_out_when_the_body_was_cancelled_for_it(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.lock("x") as lease:
            expire(lease)
            await until_cancelled()
    assert raised.value.reason == "expired"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_the_loss_comes_out_when_the_body_swallowed_the_cancellation(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x") as lease:
            expire(lease)
            try:
                await until_cancelled()
            except asyncio.CancelledError:
                pass
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.01)


async def test_the_loss_comes_out_of_a_body_that_ended_at_that_moment(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x") as lease:
            expire(lease)
    await asyncio.sleep(0.01)


async def test_lock_lost_raised_by_ensure_held_comes_out_once(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost) as raised:
        async with client.lock("x", on_lost="flag") as lease:
            expire(lease)
            lease.ensure_held()
    assert raised.value.name == "x"


async def test_an_outer_cancellation_comes_first(client: aiodlock.Client) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with client.lock("x") as lease:
            entered.set()
            try:
                await until_cancelled()
            finally:
                expire(lease)

    task = asyncio.create_task(body())
    await entered.wait()
    await cancelled(task)
    await until_free(client, "x")


async def test_an_outer_cancellation_comes_first_also_when_the_loss_was_first(
    client: aiodlock.Client,
) -> None:
    entered, cleaning = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with client.lock("x") as lease:
            expire(lease)
            entered.set()
            try:
                await until_cancelled()
            finally:
                cleaning.set()
                await asyncio.sleep(5)

    task = asyncio.create_task(body())
    await cleaning.wait()
    await cancelled(task)


async def test_the_body_is_cancelled_once_so_its_clean_up_may_await(
    client: aiodlock.Client,
) -> None:
    steps = []
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x", max_hold=0.2):
            try:
                await until_cancelled()
            finally:
                for step in range(3):
                    await asyncio.sleep(0.02)
                    steps.append(step)
    assert steps == [0, 1, 2]


async def test_asyncio_timeout_around(client: aiodlock.Client) -> None:
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(0.05):
            async with client.lock("x"):
                await until_cancelled()
    assert not isinstance(raised.value, aiodlock.AcquireTimeout)
    assert await is_free(client, "x")


async def test_asyncio_timeout_around_the_wait(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        with pytest.raises(TimeoutError) as raised:
            async with asyncio.timeout(0.05):
                await client.lock("x").acquire()
        assert not isinstance(raised.value, aiodlock.AcquireTimeout)
        assert not (await client.inspect("x")).waiters


async def test_asyncio_timeout_inside(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await until_cancelled()
        assert lease.held


async def test_loss_inside_an_asyncio_timeout_is_the_loss(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost):
        async with bounded(30):
            async with client.lock("x") as lease:
                expire(lease)
                async with bounded(30):
                    await until_cancelled()


async def test_move_on_after_around(client: aiodlock.Client) -> None:
    with anyio.move_on_after(0.05) as scope:
        async with client.lock("x"):
            await until_cancelled()
    assert scope.cancelled_caught
    await until_free(client, "x")


async def test_move_on_after_around_the_wait(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        with anyio.move_on_after(0.05) as scope:
            await client.lock("x").acquire()
        assert scope.cancelled_caught
        await until_waiting(client, "x", 0)


async def test_loss_inside_an_anyio_scope_is_the_loss(client: aiodlock.Client) -> None:
    with pytest.raises(aiodlock.LockLost):
        with anyio.fail_after(30):
            async with client.lock("x") as lease:
                expire(lease)
                with anyio.move_on_after(30):
                    await until_cancelled()


async def test_loss_inside_a_task_group_of_the_body(client: aiodlock.Client) -> None:
    """The body's task group is cancelled with it, and no group comes out."""
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x") as lease:
            async with asyncio.TaskGroup() as group:
                child = group.create_task(until_cancelled())
                await asyncio.sleep(0)
                expire(lease)
    assert child.cancelled()


async def test_task_group_around_several_locks(client: aiodlock.Client) -> None:
    async def take(name: str) -> None:
        async with client.lock(name) as lease:
            if name == "b":
                expire(lease)
            await until_cancelled()

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(take(name))
    (lost,) = raised.value.exceptions
    assert isinstance(lost, aiodlock.LockLost)
    await until_free(client, "a", "b", "c")


async def test_wait_for_around_a_whole_use(client: aiodlock.Client) -> None:
    async def use() -> None:
        async with client.lock("x"):
            await until_cancelled()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(), 0.05)
    assert await is_free(client, "x")


async def test_wait_for_around_acquire_leaves_no_waiter(client: aiodlock.Client) -> None:
    async with held_elsewhere(client.lock("x")):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.lock("x").acquire(), 0.05)
        assert not (await client.inspect("x")).waiters


async def test_cancelled_at_every_turn_of_acquiring_leaves_nothing(client: aiodlock.Client) -> None:
    for turns in range(30):
        task = asyncio.create_task(client.lock("x").acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, aiodlock.Lease):
            await outcome.release()
        else:
            assert isinstance(outcome, asyncio.CancelledError)
        await until_free(client, "x")


async def test_cancelled_at_every_turn_of_leaving_leaves_nothing(client: aiodlock.Client) -> None:
    for turns in range(30):
        inside = asyncio.Event()
        go = asyncio.Event()

        async def body(inside: asyncio.Event, go: asyncio.Event) -> None:
            async with client.lock("x"):
                inside.set()
                await go.wait()

        task = asyncio.create_task(body(inside, go))
        await inside.wait()
        go.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_free(client, "x")


async def test_cancelled_twice_still_leaves(client: aiodlock.Client) -> None:
    for turns in range(10):
        task = asyncio.create_task(client.lock("x").acquire())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().release()
        await until_free(client, "x")


async def test_after_leaving_the_lease_is_over(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    with pytest.raises(aiodlock.LockLost):
        async with lease:
            expire(lease)
            await until_cancelled()
    assert not lease.held
    with pytest.raises((aiodlock.NotHeld, aiodlock.LockLost)):
        await lease.release()
    with pytest.raises((aiodlock.NotHeld, aiodlock.LockLost)):
        await lease.extend()
    async with client.lock("x") as fresh:
        assert fresh.token > lease.token


@pytest.mark.stores("valkey9")
async def test_leaving_returns_within_a_second_when_nobody_answers(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(client.lock("x"))
            proxy.stall()
            async with takes(at_most=1.3):
                await stack.aclose()
        assert not lease.held
        assert lease.lost is None
        await proxy.heal()
        await until_free(client, "x")


@pytest.mark.stores("valkey9")
async def test_own_exception_comes_out_unchanged_when_nobody_answers(proxy: FaultProxy) -> None:
    mine = ValueError("mine")
    async with aiodlock.Client(proxy.url) as client:
        with pytest.raises(ValueError) as raised:
            async with client.lock("x"):
                proxy.stall()
                raise mine
        assert raised.value is mine
        await proxy.heal()
        await until_free(client, "x")


@pytest.mark.stores("valkey9")
async def test_release_by_hand_retries_until_it_is_answered(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        lease = await client.lock("x", ttl=20).acquire()
        await proxy.refuse()
        proxy.cut()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0.3)
        assert not releasing.done()
        await proxy.accept()
        async with bounded(10):
            await releasing
        assert await is_free(client, "x")
        with pytest.raises(aiodlock.NotHeld):
            await lease.release()


@pytest.mark.stores("valkey9")
async def test_release_by_hand_raises_lock_lost_at_the_local_deadline(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        lease = await client.lock("x", ttl=0.6).acquire()
        proxy.stall()
        async with takes(at_most=0.6 + SOON):
            with pytest.raises(aiodlock.LockLost) as raised:
                await lease.release()
        assert raised.value.reason == "expired"
        assert not lease.held
        with pytest.raises((aiodlock.NotHeld, aiodlock.LockLost)):
            await lease.release()
        await proxy.heal()


@pytest.mark.stores("valkey9")
async def test_a_lost_reply_to_a_release_counts_as_released(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        lease = await client.lock("x", ttl=20).acquire()
        lost = proxy.drop_reply(named("EVALSHA"))
        await lease.release()
        assert lost.happened.is_set()
        assert await is_free(client, "x")


@pytest.mark.stores("valkey9")
async def test_a_cancelled_acquire_waits_at_most_a_second_for_its_leave(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client, held_elsewhere(client.lock("x")):
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x")
        proxy.stall()
        async with takes(at_most=1.3):
            await cancelled(waiting)
        await proxy.heal()
        await until_waiting(client, "x", 0)


@pytest.mark.stores("valkey9")
async def test_the_body_is_told_before_the_server_lets_the_next_in(
    real_store: Store, proxy: FaultProxy
) -> None:
    async with aiodlock.Client(proxy.url) as client, aiodlock.Client(real_store.url) as other:
        events: list[str] = []

        async def body() -> None:
            try:
                async with client.lock("x", ttl=LASTING):
                    proxy.stall()
                    await until_cancelled()
            except aiodlock.LockLost as lost:
                events.append(lost.reason)

        holding = asyncio.create_task(body())
        await until_held(other, "x")
        async with other.lock("x"):
            events.append("next")
        await holding
        assert events == ["expired", "next"]
        await proxy.heal()
