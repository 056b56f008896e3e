"""A reply is lost after the script ran; or a script runs late, when nobody wants it any more.

All leases are far longer than the tests wait: whatever comes right does so without their end.
"""

from __future__ import annotations

import asyncio

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..servers import Store
from .scenes import (
    SOON,
    calling,
    free_at_once,
    load_scripts,
    no_places,
    nothing_left,
    queued,
    takes,
    until,
    waiting_for_notice,
)


async def test_lost_reply_to_a_granted_acquire(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    lost = proxy.drop_reply(calling(ACQUIRE))
    async with takes(at_most=SOON):
        lease = await unlucky.lock("name").acquire()
    assert lost.happened.is_set()
    (holder,) = (await client.inspect("name")).holders
    assert (holder.token, holder.count) == (lease.token, 1)
    assert lease.remaining() <= holder.remaining + 0.01
    await lease.release()
    await free_at_once(store, client)
    no_places(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_queued_acquire_costs_no_place(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held = await client.lock("name").acquire()
    lost = proxy.drop_reply(calling(ACQUIRE))
    order: list[str] = []

    async def wait(who: aiodlock.Client, name: str) -> None:
        async with who.lock("name"):
            order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait(unlucky, "first"))
        await lost.happened.wait()
        tasks.create_task(wait(client, "second"))
        await queued(client, 2)
        await waiting_for_notice(unlucky)
        async with takes(at_most=SOON):
            await held.release()
            await until(lambda: len(order) == 2)
    assert order == ["first", "second"]
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_queued_acquire_whose_grant_comes_before_it_asks_again(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held = await client.lock("name").acquire()
    lost = proxy.drop_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await lost.happened.wait()
    await proxy.refuse()
    await held.release()
    await proxy.accept()
    async with takes(at_most=SOON):
        lease = await task
    (holder,) = (await client.inspect("name")).holders
    assert (holder.token, holder.count) == (lease.token, 1)
    await lease.release()
    await nothing_left(store, markers=True)


async def test_lost_reply_to_an_acquire_that_does_not_wait(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    proxy.drop_reply(calling(ACQUIRE))
    async with takes(at_most=SOON):
        lease = await unlucky.lock("name").acquire_nowait()
    await lease.release()
    proxy.drop_reply(calling(ACQUIRE))
    async with client.lock("name"):
        async with takes(at_most=SOON):
            with pytest.raises(aiodlock.WouldBlock):
                await unlucky.lock("name").acquire_nowait()
    await free_at_once(store, client)
    # The ambiguous refusal is left in the background, with a marker.
    session = unlucky._session
    assert session is not None
    await until(lambda: not session.places, within=SOON)


async def test_lost_reply_to_a_release(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    lease = await unlucky.lock("name").acquire()
    lost = proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        await lease.release()  # without LockLost: the first message has done it
    assert lost.happened.is_set()
    await free_at_once(store, client)
    no_places(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_release_while_the_next_one_has_it_already(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    lease = await unlucky.lock("name").acquire()
    next_one = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 1)
    proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        await lease.release()
        after = await next_one
    assert after.token > lease.token
    assert after.held
    (holder,) = (await client.inspect("name")).holders
    assert holder.token == after.token, "the repeated leave has not touched the next holder"
    await after.release()


async def test_lost_reply_to_the_release_of_a_body(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    lost = proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        async with unlucky.lock("name"):
            pass
    assert lost.happened.is_set()
    await free_at_once(store, client)
    await until(lambda: not unlucky._session.places)  # type: ignore[union-attr]
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_withdrawal(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    async with client.lock("name"):
        lost = proxy.drop_reply(calling(LEAVE))
        with pytest.raises(aiodlock.AcquireTimeout):
            await unlucky.lock("name").acquire(timeout=0.1)
        assert lost.happened.is_set()
        await queued(client, 0)
    await free_at_once(store, client)
    await until(lambda: not unlucky._session.places)  # type: ignore[union-attr]
    await nothing_left(store, markers=True)


async def test_lost_replies_to_extensions_of_a_holder(
    proxy: FaultProxy, make_client: MakeClient, store: Store
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url, ttl=0.6)
    async with unlucky.lock("name") as lease:
        lost = proxy.drop_reply(calling(EXTEND))
        await lost.happened.wait()
        before = lease._place.deadline
        await until(lambda: lease._place.deadline > before + 0.6, within=3.0)
        assert lease.held
    no_places(unlucky)


async def test_lost_replies_to_extensions_of_a_waiter_cost_no_place(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url, waiter_ttl=0.6)
    held = await client.lock("name").acquire()
    first = asyncio.create_task(unlucky.lock("name").acquire())
    await queued(client, 1)
    second = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 2)
    lost = proxy.drop_reply(calling(EXTEND))
    await lost.happened.wait()
    (request_id,) = unlucky._session.places  # type: ignore[union-attr]
    before = proxy.commands["EVALSHA"]
    await until(lambda: proxy.commands["EVALSHA"] >= before + 3)
    assert list(unlucky._session.places) == [request_id]  # type: ignore[union-attr]
    await held.release()
    await (await first).release()
    await (await second).release()


async def test_all_replies_of_a_while_are_lost(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    """Each step of a life of requests loses its reply once."""
    await load_scripts(store)
    unlucky = await make_client(proxy.url, ttl=2.0)
    for _ in range(3):
        for script in (ACQUIRE, LEAVE):
            proxy.drop_reply(calling(script))
        async with takes(at_most=SOON):
            async with unlucky.lock("name") as lease:
                assert lease.held
    await free_at_once(store, client)


# -- late duplicates ---------------------------------------------------------------------------------


async def test_late_duplicate_after_an_ordinary_release_creates_no_ghost(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    proxy.cut()
    lease = await task  # the same request, sent again on the next connection
    await lease.release()
    held_back.release()
    await held_back.answered.wait()
    await free_at_once(store, client)
    await nothing_left(store, markers=True)
    no_places(unlucky)


async def test_late_duplicate_of_a_waiter_after_its_release_creates_no_ghost(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held = await client.lock("name").acquire()
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    proxy.cut()
    await waiting_for_notice(unlucky)
    await held.release()
    await (await task).release()
    async with client.lock("name"):
        held_back.release()
        await held_back.answered.wait()
        assert (await client.inspect("name")).waiters == ()
    await nothing_left(store, markers=True)


@pytest.mark.parametrize("name_is", ["free", "held"])
async def test_late_duplicate_after_a_withdrawal_creates_no_ghost(
    proxy: FaultProxy,
    make_client: MakeClient,
    store: Store,
    client: aiodlock.Client,
    name_is: str,
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held = await client.lock("name").acquire() if name_is == "held" else None
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    proxy.cut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not unlucky._session.places)  # type: ignore[union-attr]
    held_back.release()
    await held_back.answered.wait()
    assert (await client.inspect("name")).waiters == ()
    if held is not None:
        await held.release()
    await free_at_once(store, client)
    await nothing_left(store, markers=True)


async def test_request_in_flight_that_is_cancelled_is_left_behind_it(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    """On one connection messages stay in order: no marker is needed, and none is written."""
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    task.cancel()
    held_back.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not unlucky._session.places)  # type: ignore[union-attr]
    await free_at_once(store, client)
    await nothing_left(store)


# -- local deadlines ---------------------------------------------------------------------------------


async def server_ends_at(client: aiodlock.Client, name: str = "name") -> float:
    """Return when the server will drop the holder, at the earliest, on our clock."""
    asked = now()
    (holder,) = (await client.inspect(name)).holders
    return asked + holder.remaining


async def test_local_deadline_of_a_repeated_message_counts_from_its_own_sending(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    unlucky = await make_client(proxy.url)
    lost = proxy.drop_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name", ttl=5.0, auto_extend=False).acquire())
    await lost.happened.wait()
    await proxy.refuse()
    began = now()
    await asyncio.sleep(0.4)  # that much of the lease is over when it asks again
    proxy.delay(0.15)
    await proxy.accept()
    lease = await task
    asked_again_at = now()
    ends_at = await server_ends_at(client)
    assert lease._place.deadline <= ends_at, "the lease would be believed in for too long"
    # Not from the first sending either: that would throw away what has passed in between.
    assert lease._place.deadline >= ends_at - 0.3
    assert asked_again_at - began >= 0.4
    await lease.release()


async def test_slow_reply_does_not_lengthen_a_lease(
    proxy: FaultProxy, make_client: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await load_scripts(store)
    slow = await make_client(proxy.url)
    proxy.delay(0.2)
    lease = await slow.lock("name", ttl=5.0, auto_extend=False).acquire()
    assert lease._place.deadline <= await server_ends_at(client)
    await lease.extend()
    assert lease._place.deadline <= await server_ends_at(client)
    await lease.release()
