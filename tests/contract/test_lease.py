# ruff: noqa: PT012, PT031
"""`Lease`: what it tells, extending, releasing, losing, collecting."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import warnings
from typing import Any

import pytest

import aiodlock
from aiodlock.testing import expire, lose

from ..conftest import MakeClient
from ..proxy import FaultProxy, containing
from ..scenes import (
    LASTING,
    SOON,
    held_elsewhere,
    is_free,
    is_held,
    settled,
    takes,
    until,
    until_cancelled,
    until_free,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


async def test_attributes(client: aiodlock.Client) -> None:
    async with client.lock("x", ttl=70) as lease:
        assert isinstance(lease, aiodlock.Lease)
        assert (lease.name, lease.mode, lease.ttl) == ("x", "exclusive", 70)
        assert type(lease.token) is int
        assert isinstance(lease.owner, str)
        assert lease.owner
        assert lease.held is True
        assert lease.lost is None
        assert 60 < lease.remaining() < 70
        assert isinstance(lease.sequencer, str)
        assert "x" in lease.sequencer
        assert "exclusive" in lease.sequencer
        assert str(lease.token) in lease.sequencer
        lease.ensure_held()
        assert "x" in repr(lease)
    assert is_held(lease) is False
    assert lease.lost is None
    assert lease.remaining() <= 0


async def test_attributes_of_a_shared_lease(client: aiodlock.Client) -> None:
    async with client.rwlock("x", owner="me").read as lease:
        assert (lease.mode, lease.owner) == ("shared", "me")
        assert await client.check_sequencer(lease.sequencer)


async def test_attributes_cannot_be_written(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        anything: Any = lease
        for name in ("name", "mode", "token", "owner", "held", "lost", "sequencer"):
            with pytest.raises(AttributeError):
                setattr(anything, name, None)


async def test_a_lease_is_lost_a_margin_before_the_server_gives_it_away(
    client: aiodlock.Client,
) -> None:
    async with takes(at_least=0.1, at_most=SOON):
        lease = await client.lock("x", ttl=4, margin=3.5, auto_extend=False).acquire()
        lost = await lease.wait_lost()
    assert lost.reason == "expired"
    assert not lease.held
    assert (await client.inspect("x")).holders, "the server still honours it: time to clean up"
    with pytest.raises(aiodlock.LockLost):
        lease.ensure_held()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_without_auto_extend_a_lease_ends(client: aiodlock.Client) -> None:
    async with takes(at_least=0.2, at_most=0.3 + SOON):
        lease = await client.lock("x", ttl=0.3, auto_extend=False).acquire()
        lost = await lease.wait_lost()
    assert lost.reason == "expired"
    assert not lease.held
    assert lease.remaining() <= 0
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_extend_by_hand(client: aiodlock.Client) -> None:
    clock = asyncio.get_running_loop().time
    lease = await client.lock("x", ttl=LASTING, auto_extend=False).acquire()
    outlived_at = clock() + LASTING
    while clock() < outlived_at:
        await asyncio.sleep(0.3)
        asked_at = clock()
        await lease.extend()
        assert lease.remaining() + clock() > asked_at + 0.9 * LASTING
    assert is_held(lease)
    await lease.release()


async def test_extend_after_the_end_raises(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    with pytest.raises((aiodlock.NotHeld, aiodlock.LockLost)):
        await lease.extend()
    lost = await client.lock("y", ttl=0.3, auto_extend=False).acquire()
    await lost.wait_lost()
    with pytest.raises(aiodlock.LockLost):
        await lost.extend()
    with pytest.raises(aiodlock.LockLost):
        await lost.release()


async def test_release_twice_raises_not_held(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    for _ in range(2):
        with pytest.raises(aiodlock.NotHeld) as raised:
            await lease.release()
        assert raised.value.name == "x"


async def test_a_second_release_does_not_touch_the_next_holder(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    async with held_elsewhere(client.lock("x")) as next_lease:
        with pytest.raises(aiodlock.NotHeld):
            await lease.release()
        assert next_lease.held
        assert (await client.inspect("x")).holders[0].token == next_lease.token


async def test_two_releases_at_the_same_time(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    outcomes = await asyncio.gather(lease.release(), lease.release(), return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "NotHeld"]
    assert await is_free(client, "x")


async def test_release_from_any_task(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await asyncio.create_task(lease.release())
    assert await is_free(client, "x")
    with pytest.raises(aiodlock.NotHeld):
        await client.lock("x").release()


async def test_after_release_nothing_is_held(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    assert not lease.held
    assert lease.lost is None
    with pytest.raises(aiodlock.LockError):
        lease.ensure_held()


async def test_a_bare_lease_is_never_cancelled(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    expire(lease)
    assert (await lease.wait_lost()).reason == "expired"
    await settled(client)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_entering_a_bare_lease_arms_on_lost_in_that_task(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()

    async def body() -> None:
        async with lease as same:
            assert same is lease
            await until_cancelled()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    expire(lease)
    with pytest.raises(aiodlock.LockLost) as raised:
        await task
    assert raised.value.reason == "expired"


async def test_arming_a_lost_lease_raises(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    expire(lease)
    with pytest.raises(aiodlock.LockLost):
        async with lease:
            await until_cancelled()


async def test_arming_a_released_lease_raises_not_held(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    await lease.release()
    with pytest.raises(aiodlock.NotHeld):
        async with lease:
            pytest.fail("a body without the lock")


async def test_wait_lost_of_a_lost_lease_returns_at_once(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    expire(lease)
    async with takes(at_most=SOON):
        lost = await lease.wait_lost()
    assert isinstance(lost, aiodlock.LockLost)
    assert lease.lost is not None
    assert (lost.name, lost.reason) == ("x", "expired")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_several_may_wait_for_the_loss(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    waits = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
    await asyncio.sleep(0)
    expire(lease)
    assert {lost.reason for lost in await asyncio.gather(*waits)} == {"expired"}
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_a_collected_lease_is_released_with_a_warning(client: aiodlock.Client) -> None:
    lease = await asyncio.create_task(client.lock("x").acquire())
    assert lease.held
    await asyncio.sleep(0)  # the loop has handed the task on, and forgets it
    with pytest.warns(ResourceWarning, match="'x'"):
        del lease
        gc.collect()
    await until_free(client, "x")


async def test_a_collected_lease_that_was_lost_warns_nobody(client: aiodlock.Client) -> None:
    """Who was told of the loss has nothing left to release."""
    lease = await client.lock("x").acquire()
    expire(lease)
    with pytest.raises(aiodlock.LockLost):
        lease.ensure_held()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
        gc.collect()
    await until_free(client, "x")


async def test_a_collected_lease_that_was_released_warns_nobody(client: aiodlock.Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = await client.lock("x").acquire()
        await lease.release()
        del lease
        gc.collect()


async def test_the_waiter_behind_a_collected_lease_gets_in(client: aiodlock.Client) -> None:
    async def forget_while_waited_for() -> asyncio.Task[aiodlock.Lease]:
        lease = await client.lock("x", owner="me").acquire()
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: waits(client, "x"))
        assert lease.held
        return waiting

    with pytest.warns(ResourceWarning):
        waiting = await asyncio.create_task(forget_while_waited_for())
        lease = await waiting
    await lease.release()


async def waits(client: aiodlock.Client, name: str) -> bool:
    return bool((await client.inspect(name)).waiters)


# Reasons of a loss


async def test_reason_expired_when_the_holder_cannot_extend(
    store: Store, client: aiodlock.Client
) -> None:
    lease = await client.lock("x", ttl=0.3, auto_extend=False).acquire()
    assert (await lease.wait_lost()).reason == "expired"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_reason_broken_is_told_at_once(client: aiodlock.Client) -> None:
    lease = await client.lock("x", ttl=30).acquire()
    assert await client.break_lock("x") == 1
    async with takes(at_most=SOON):
        assert (await lease.wait_lost()).reason == "broken"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


@pytest.mark.scripted
async def test_reason_gone_when_the_store_was_emptied(
    store: Store, client: aiodlock.Client
) -> None:
    lease = await client.lock("x", ttl=LASTING).acquire()
    await (await store.raw()).flushall()
    assert (await lease.wait_lost()).reason == "gone"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


@pytest.mark.scripted
async def test_reason_taken_over_when_another_holds_after_the_store_was_emptied(
    store: Store, make_client: MakeClient
) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("x", ttl=LASTING).acquire()
    await (await store.raw()).flushall()
    async with other.lock("x"):
        assert (await lease.wait_lost()).reason == "taken_over"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_reason_max_hold(client: aiodlock.Client) -> None:
    async with takes(at_least=0.25, at_most=0.3 + SOON):
        with pytest.raises(aiodlock.LockLost) as raised:
            async with client.lock("x", ttl=5, max_hold=0.3):
                await until_cancelled()
    assert raised.value.reason == "max_hold"
    assert await is_free(client, "x")


async def test_max_hold_is_never_extended_past_by_hand(client: aiodlock.Client) -> None:
    lease = await client.lock("x", ttl=5, max_hold=LASTING).acquire()
    await lease.extend(20)
    assert lease.remaining() <= LASTING
    assert (await lease.wait_lost()).reason == "max_hold"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_max_hold_may_be_longer_than_the_ttl(client: aiodlock.Client) -> None:
    async with takes(at_least=2.5, at_most=2.6 + SOON):
        with pytest.raises(aiodlock.LockLost) as raised:
            async with client.lock("x", ttl=LASTING, max_hold=2.6):
                await until_cancelled()
    assert raised.value.reason == "max_hold"


async def test_max_hold_may_be_infinite_or_is_refused(client: aiodlock.Client) -> None:
    try:
        lock = client.lock("x", max_hold=math.inf)
    except ValueError:
        return
    async with lock as lease:
        assert lease.held


@pytest.mark.parametrize(
    "reason", ["expired", "broken", "taken_over", "gone", "max_hold", "closed"]
)
async def test_every_reason_cancels_the_body_and_frees_the_name(
    client: aiodlock.Client, reason: Any
) -> None:
    lock = client.lock("x")
    with pytest.raises(aiodlock.LockLost) as raised:
        async with lock as lease:
            lose(lease, reason)
            await until_cancelled()
    assert raised.value.reason == reason
    assert not lease.held
    assert lease.lost is not None
    await until_free(client, "x")


async def test_held_turns_false_before_the_server_lets_the_next_in(
    make_client: MakeClient,
) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("x", ttl=0.4, auto_extend=False).acquire()
    next_lease = await other.lock("x").acquire()
    assert not lease.held
    assert next_lease.token > lease.token
    await next_lease.release()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_held_is_false_when_the_loop_was_blocked(client: aiodlock.Client) -> None:
    lease = await client.lock("x", ttl=0.2).acquire()
    time.sleep(0.25)
    assert lease.held is False, "before the loop ran again"
    with pytest.raises(aiodlock.LockLost):
        lease.ensure_held()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_a_body_that_blocked_the_loop_is_told_when_it_runs_again(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("x", ttl=0.2):
            time.sleep(0.25)
            async with takes(at_most=SOON):
                await until_cancelled()


async def test_a_lease_of_a_client_that_was_left_is_lost_for_everything(store: Store) -> None:
    async with aiodlock.Client(store.source) as client:
        lease = await client.lock("x").acquire()
    with pytest.raises(aiodlock.LockLost):
        lease.ensure_held()
    with pytest.raises(aiodlock.LockLost):
        await lease.extend()
    assert (await lease.wait_lost()).reason == "closed"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


@pytest.mark.stores("valkey9")
async def test_a_grant_that_arrives_too_late_never_starts_a_body(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        await client.inspect("x")
        late = proxy.hold_reply(containing(b"{x}"))
        asking = asyncio.create_task(client.lock("x", ttl=LASTING).acquire())
        await late.happened.wait()
        await asyncio.sleep(LASTING)
        late.release()
        lease = await asking
        assert lease.held
        assert (await client.inspect("x")).holders[0].token == lease.token
        await lease.release()


@pytest.mark.stores("valkey9")
async def test_a_try_whose_grant_arrives_too_late_fails_loudly(proxy: FaultProxy) -> None:
    async with aiodlock.Client(proxy.url) as client:
        await client.inspect("x")
        late = proxy.hold_reply(containing(b"{x}"))
        asking = asyncio.create_task(client.lock("x", ttl=0.3).acquire_nowait())
        await late.happened.wait()
        await asyncio.sleep(0.3)
        late.release()
        with pytest.raises(aiodlock.LockError):
            await asking
        await until_free(client, "x")
