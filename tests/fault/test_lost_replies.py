"""A reply is lost after the script ran; or a script runs late, when nobody wants it any more.

All leases are far longer than the tests wait: whatever comes right does so without their end.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock.backends.redis.scripts import ACQUIRE, BREAK, EXTEND, LEAVE

from ..conftest import MakeClient
from ..inside import session_of
from ..protocol.direct import Direct
from ..proxy import FaultProxy, named
from ..scenes import BRIEF, LASTING, keeper_of, until_free
from ..servers import Store
from .scenes import (
    SOON,
    calling,
    free_at_once,
    line_up,
    no_places,
    no_places_soon,
    nothing_left,
    queued,
    takes,
    until,
    waiting_for_notice,
)


async def test_lost_reply_to_a_granted_acquire(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    lost = proxy.drop_reply(calling(ACQUIRE))
    async with takes(at_most=SOON):
        lease = await unlucky.lock("name").acquire()
    assert lost.happened.is_set()
    (holder,) = (await client.inspect("name")).holders
    assert (holder.token, holder.count) == (lease.token, 1)
    assert lease.remaining() <= (holder.remaining or 0.0) + 0.01
    await lease.release()
    await free_at_once(store, client)
    no_places(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_queued_acquire_costs_no_place(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
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
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
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
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
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
    await no_places_soon(unlucky)


async def test_lost_reply_to_a_release(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    lease = await unlucky.lock("name").acquire()
    lost = proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        await lease.release()  # without LockLost: the first message has done it
    assert lost.happened.is_set()
    await free_at_once(store, client)
    no_places(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_release_while_the_next_one_has_it_already(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
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


async def test_lost_reply_to_a_release_that_tells_of_a_grant_to_the_same_client(
    proxy: FaultProxy, unlucky: aiodlock.Client
) -> None:
    lease = await unlucky.lock("name").acquire()
    next_one = asyncio.create_task(unlucky.lock("name").acquire())
    await waiting_for_notice(unlucky)
    lost = proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        await lease.release()
        after = await next_one
    assert lost.happened.is_set()
    assert after.token > lease.token
    await after.release()
    no_places(unlucky)


async def test_reply_to_a_cancelled_release_tells_of_a_grant_to_the_same_client(
    proxy: FaultProxy, unlucky: aiodlock.Client
) -> None:
    lease = await unlucky.lock("name").acquire()
    next_one = asyncio.create_task(unlucky.lock("name").acquire())
    await waiting_for_notice(unlucky)
    kept = proxy.hold_reply(calling(LEAVE))
    releasing = asyncio.create_task(lease.release())
    await kept.happened.wait()
    releasing.cancel()
    await asyncio.sleep(0)
    kept.release()
    async with takes(at_most=SOON):
        after = await next_one
        with pytest.raises(asyncio.CancelledError):
            await releasing
    assert after.token > lease.token
    await after.release()
    no_places(unlucky)


async def test_lost_reply_to_the_release_of_a_body(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    lost = proxy.drop_reply(calling(LEAVE))
    async with takes(at_most=SOON):
        async with unlucky.lock("name"):
            pass
    assert lost.happened.is_set()
    await free_at_once(store, client)
    await no_places_soon(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_reply_to_a_withdrawal(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    async with client.lock("name"):
        lost = proxy.drop_reply(calling(LEAVE))
        with pytest.raises(aiodlock.AcquireTimeout):
            await unlucky.lock("name").acquire(timeout=BRIEF)
        assert lost.happened.is_set()
        await queued(client, 0)
    await free_at_once(store, client)
    await no_places_soon(unlucky)
    await nothing_left(store, markers=True)


async def test_lost_replies_to_extensions_of_a_holder(
    proxy: FaultProxy, make_unlucky: MakeClient
) -> None:
    unlucky = await make_unlucky(ttl=3.0)
    async with unlucky.lock("name") as lease:
        lost = proxy.drop_reply(calling(EXTEND))
        before = lease._request.place.deadline
        await lost.happened.wait()
        assert lease._request.place.deadline == before
        await until(lambda: lease._request.place.deadline > before, "the repeated extension")
        assert lease.held
    no_places(unlucky)


async def test_lost_replies_to_extensions_of_a_waiter_cost_no_place(
    proxy: FaultProxy, make_unlucky: MakeClient, client: aiodlock.Client
) -> None:
    unlucky = await make_unlucky(waiter_ttl=3.0)
    held, (first, second) = await line_up(client, unlucky, client)
    (place,) = session_of(unlucky).requests.values()
    lost = proxy.drop_reply(calling(EXTEND))
    before = place.place.deadline
    await lost.happened.wait()
    await until(lambda: place.place.deadline > before, "the repeated extension")
    assert list(session_of(unlucky).requests) == [place.id]
    await held.release()
    await (await first).release()
    await (await second).release()


async def test_all_replies_of_a_while_are_lost(
    proxy: FaultProxy, make_unlucky: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    """Each step of a life of requests loses its reply once."""
    unlucky = await make_unlucky(ttl=20.0)
    for _ in range(3):
        for script in (ACQUIRE, LEAVE):
            proxy.drop_reply(calling(script))
        async with takes(at_most=SOON):
            async with unlucky.lock("name") as lease:
                assert lease.held
    await free_at_once(store, client)


# -- late duplicates ---------------------------------------------------------------------------------


async def test_late_duplicate_after_an_ordinary_release_creates_no_ghost(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    proxy.cut()
    lease = await task  # the same request, sent again on the next connection
    await lease.release()
    held_back.release()
    await held_back.answered.wait()
    assert (await client.inspect("name")).holders == ()
    await nothing_left(store, markers=True)
    no_places(unlucky)


async def test_late_duplicate_of_a_waiter_after_its_release_creates_no_ghost(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
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
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client, name_is: str
) -> None:
    held = await client.lock("name").acquire() if name_is == "held" else None
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    proxy.cut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await no_places_soon(unlucky)
    held_back.release()
    await held_back.answered.wait()
    assert (await client.inspect("name")).waiters == ()
    if held is not None:
        await held.release()
    await free_at_once(store, client)
    await nothing_left(store, markers=True)


async def test_request_in_flight_that_is_cancelled_is_left_behind_it(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    """On one connection messages stay in order: no marker is needed, and none is written."""
    held_back = proxy.hold_command(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await held_back.happened.wait()
    task.cancel()
    held_back.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await no_places_soon(unlucky)
    await free_at_once(store, client)
    await nothing_left(store)


# -- local deadlines ---------------------------------------------------------------------------------


async def server_ends_at(client: aiodlock.Client) -> tuple[float, float]:
    """Return between which moments on our clock the server will drop the holder."""
    asked = now()
    (holder,) = (await client.inspect("name")).holders
    return asked + (holder.remaining or 0.0), now() + (holder.remaining or 0.0)


async def test_local_deadline_of_a_repeated_message_counts_from_its_own_sending(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    lost = proxy.drop_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name", ttl=5.0, auto_extend=False).acquire())
    await lost.happened.wait()
    await proxy.refuse()
    await asyncio.sleep(1.0)  # that much of the lease is over when it asks again
    late = proxy.hold_reply(calling(ACQUIRE))
    before = proxy.accepted
    await proxy.accept()
    while proxy.accepted == before:
        asked_again_after = now()
        await asyncio.sleep(0.002)
    await late.happened.wait()
    answered_before = now()
    await asyncio.sleep(0.3)  # and that much when the answer is here
    late.release()
    lease = await task
    earliest, latest = await server_ends_at(client)
    assert lease._request.place.deadline <= latest, "the lease would be believed in for too long"
    # Not from the first sending either: that would throw away what has passed in between.
    drift = 0.06
    assert lease._request.place.deadline >= earliest - drift - (answered_before - asked_again_after)
    await lease.release()


async def test_slow_reply_does_not_lengthen_a_lease(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    proxy.delay(0.2)
    lease = await unlucky.lock("name", ttl=5.0, auto_extend=False).acquire()
    assert lease._request.place.deadline <= (await server_ends_at(client))[1]
    await lease.extend()
    assert lease._request.place.deadline <= (await server_ends_at(client))[1]
    await lease.release()


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["refused", "unanswered"])
async def test_lease_dropped_after_a_second_attempt_does_not_wait_for_the_collector(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client, how: str
) -> None:
    """Found by the simulation, from Python 3.12 on: the first attempt's exception kept all frames alive."""
    if how == "refused":
        await (await store.raw()).script_flush()
    else:
        proxy.drop_reply(calling(ACQUIRE))

    async def drop() -> None:
        lease = await unlucky.lock("name").acquire()
        assert lease.held

    with _no_collector():
        with pytest.warns(ResourceWarning, match="forgotten"):  # noqa: PT031
            await asyncio.create_task(drop())
            await free_at_once(store, client)


async def test_leave_that_nobody_awaits_is_repeated_when_it_was_lost(
    proxy: FaultProxy, unlucky: aiodlock.Client, store: Store, client: aiodlock.Client
) -> None:
    """A plain callback of the loop starts the repetition."""
    lost = proxy.drop_command(calling(LEAVE))
    async with unlucky.lock("name", ttl=30, confirm_release=False):
        pass
    await lost.happened.wait()
    await free_at_once(store, client)
    await no_places_soon(unlucky)


async def test_grant_that_outlived_its_lease_on_the_way_is_not_given_to_the_one_who_tries_once(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    late = proxy.hold_reply(calling(ACQUIRE))
    trying = asyncio.create_task(unlucky.lock("name", ttl=0.05).acquire(timeout=0))
    await late.happened.wait()
    await until_free(client, "name")  # it is over on the server, and earlier for its holder
    late.release()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    await no_places_soon(unlucky)


async def test_try_whose_lost_grant_is_in_its_lock_delay_does_not_begin_a_body(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    lost = proxy.hold_reply(calling(ACQUIRE))
    lock = unlucky.lock("name", ttl=0.2, lock_delay=5, timeout=0)
    began = False

    async def body() -> None:
        nonlocal began
        async with lock:
            began = True

    trying = asyncio.create_task(body())
    await lost.happened.wait()

    async def is_overdue() -> bool:
        return (await client.inspect("name")).closed > 0

    await until(is_overdue, "the end of the grant that nobody heard of")
    proxy.cut()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    assert not began


async def test_late_duplicate_of_a_refused_try_takes_nothing(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    held = await client.lock("name").acquire()
    late = proxy.hold_command(calling(ACQUIRE))
    trying = asyncio.create_task(unlucky.lock("name").acquire_nowait())
    await late.happened.wait()
    proxy.cut()
    with pytest.raises(aiodlock.WouldBlock):
        await trying  # the repetition is refused
    await held.release()
    await no_places_soon(unlucky)
    late.release()
    await late.answered.wait()
    assert (await client.inspect("name")).holders == ()
    no_places(unlucky)


async def test_release_that_is_not_answered_in_time_keeps_the_lock_delay(
    client: aiodlock.Client, unlucky: aiodlock.Client, proxy: FaultProxy
) -> None:
    """The local deadline is earlier than the server's: a leave that arrives between them opens nothing."""
    lease = await unlucky.lock("name", ttl=0.5, lock_delay=30).acquire()
    await lease.extend(20.0)
    # As after a slow answer: the server grants much longer.
    (place,) = keeper_of(unlucky).places.values()
    place.deadline = now() + 0.2
    await proxy.refuse()
    proxy.cut()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    await proxy.heal()
    await no_places_soon(unlucky)
    assert await client.lock("name").locked()


async def test_lease_is_extended_in_time_when_its_first_answer_came_late(
    unlucky: aiodlock.Client, proxy: FaultProxy, real_store: Store
) -> None:
    """A repeated acquire is answered with what is left of a ttl that began with the first one."""
    lost = proxy.hold_reply(calling(ACQUIRE))
    acquiring = asyncio.create_task(unlucky.lock("name", ttl=30).acquire())
    await lost.happened.wait()
    direct = Direct(await real_store.raw())
    (id,) = await direct.holders()
    await direct.age(id, by=27_000)  # less is left than the third after which it is extended
    proxy.cut()
    lease = await acquiring
    assert 0 < lease.remaining() < 3
    await until(lambda: lease.remaining() > 20, "an extension")
    await lease.release()


async def test_repeated_acquire_whose_first_grant_was_overdue_holds_what_it_is_told(
    proxy: FaultProxy, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """The overdue record has the same id: it was swept after the new one had been written over it."""
    away = await make_client(proxy.url)
    other = await client.rwlock("name", ttl=30).read.acquire()  # or the key would have expired
    lost = proxy.drop_reply(calling(ACQUIRE))
    task = asyncio.create_task(away.rwlock("name", ttl=LASTING).read.acquire())
    await lost.happened.wait()
    await proxy.refuse()

    async def is_overdue() -> bool:
        return len((await client.inspect("name")).holders) == 1  # which sweeps nothing

    await until(is_overdue)
    await proxy.accept()
    lease = await task
    tokens = {holder.token for holder in (await client.inspect("name")).holders}
    assert tokens == {other.token, lease.token}
    await lease.release()
    await other.release()


async def test_lost_reply_to_a_break_does_not_break_the_next_holder(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    stuck = await client.lock("name", on_lost="flag").acquire()
    waiting = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 1)
    lost = proxy.drop_reply(calling(BREAK))
    assert (
        await unlucky.break_lock("name") == 1
    )  # who held has gone, and who holds now is another one
    assert lost.happened.is_set()
    lease = await waiting
    await stuck.wait_lost()
    await lease.extend()
    await lease.release()


async def test_break_that_did_not_arrive_is_repeated(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    stuck = await client.lock("name", on_lost="flag").acquire()
    lost = proxy.drop_command(calling(BREAK))
    assert await unlucky.break_lock("name") == 1
    assert lost.happened.is_set()
    await stuck.wait_lost()


async def test_lost_reply_to_a_forget_takes_no_newer_success(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    async with client.once("pay", keep=60):
        pass
    lost = proxy.drop_reply(named("DEL"))
    with pytest.raises(aiodlock.BackendUnavailable, match="'pay'"):
        await unlucky.forget("pay")
    assert lost.happened.is_set()
    async with client.once("pay", keep=60) as again:
        assert again.first  # it was done, and told to be unsure
    assert await unlucky.forget("pay")
