"""Notices that come late, early, for nobody, or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import aiodlock
from aiodlock import _request as core
from aiodlock._clock import now
from aiodlock._departure import Departure
from aiodlock._model import End, Gone, StoreRequest, Terms, Waiting
from aiodlock.backends.keeper import Keeper
from aiodlock.backends.redis import calls, messages, replies
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.quorum.notices import NodeNotices
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE
from aiodlock.backends.stage import Stage

from ..conftest import MakeClient
from ..inside import session_of
from ..protocol.direct import Direct
from ..proxy import FaultProxy, containing
from ..scenes import keeper_of, soon, until_waiting
from ..servers import Store
from . import test_lost_replies
from .scenes import (
    SOON,
    calling,
    connections,
    free_at_once,
    line_up,
    no_places,
    no_places_soon,
    takes,
    until,
    waiting_for_notice,
)


@pytest.mark.scripted
async def test_grant_of_a_request_that_nobody_has_is_given_back(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    direct = Direct(await store.raw())
    other = await make_client()
    held = await client.lock("name").acquire()
    # A request of that client, which it has never heard of: its process was restarted, say.
    label = session_of(other).backend.label
    await direct.acquire("unknown", waiter_ttl=60_000, client=label)
    await held.release()
    await free_at_once(store, client)
    assert await direct.all_keys() == {"token", "marker:unknown"}


async def test_request_that_nobody_has_is_given_back_once_and_for_all(
    store: Store, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """Its client has left it, that was lost, and two late duplicates of its acquire are carried out."""
    other = await make_client()
    held = await client.lock("name").acquire()
    terms = Terms("lock", "name", "exclusive", 0, 60.0, 60.0, 0.0, 0.0, None, True)

    async def late_duplicate() -> object:
        request = StoreRequest("unknown", terms, "tunknown")
        backend: Any = keeper_of(other).store
        answer = await backend.acquire(request, wait=True)
        if request.tally is not None:  # a quorum's client
            backend._requests.forget(request.tally)
        return answer

    assert isinstance(await late_duplicate(), Waiting)
    await held.release()
    await free_at_once(store, client)
    assert await late_duplicate() == Gone("gone")
    await free_at_once(store, client)


def _keep_notices(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return what will have been heard of grants, to be heard once more."""
    heard: list[Callable[[], None]] = []
    for heard_by in (Keeper, NodeNotices):

        def on_granted(
            self: Keeper | NodeNotices, *said: Any, hear: Any = heard_by.on_granted
        ) -> None:
            heard.append(partial(hear, self, *said))
            hear(self, *said)

        monkeypatch.setattr(heard_by, "on_granted", on_granted)
    return heard


async def test_notice_that_crossed_its_leave_leaves_nothing(
    store: Store, make_client: MakeClient, client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker would be one more key for each cancellation that meets a grant."""
    one = await make_client()
    crossed = _keep_notices(monkeypatch)
    held = await client.lock("name").acquire()
    waits = asyncio.create_task(one.lock("name").acquire())
    await waiting_for_notice(one)
    await held.release()
    await (await waits).release()
    assert crossed
    for hear in crossed.copy():
        hear()
    await asyncio.sleep(0.1)  # what they do wrongly would be done by now
    members = {"aiodlock:2:quorum", "aiodlock:2:quorum:lengths"}

    async def nothing_left() -> bool:
        return not {*await store.left(markers=False)} - members

    await until(nothing_left)
    await free_at_once(store, client)


async def test_notice_that_overtakes_the_reply_starts_the_body_at_once(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    held = await client.lock("name").acquire()
    kept = proxy.hold_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await kept.happened.wait()
    (place,) = keeper_of(unlucky).places.values()
    await held.release()
    await until(lambda: place.noticed is not None)
    assert not task.done(), "before the reply there is no deadline to believe in"
    kept.release()
    async with takes(at_most=SOON):
        lease = await task
    (holder,) = (await client.inspect("name")).holders
    assert lease.token == holder.token
    await lease.release()


@pytest.mark.parametrize("closes", ["lock_delay", "hold_at_least"])
async def test_notice_that_comes_after_its_lease_was_lost_opens_no_name(
    make_client: MakeClient,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
    closes: str,
) -> None:
    """The answers to its extensions were lost, so the server keeps it for longer than its client."""
    one = await make_client(waiter_ttl=1.0)
    late = _keep_notices(monkeypatch)
    options: Any = {closes: 30.0, "ttl": 60.0}
    held = await client.lock("name").acquire()
    waits = asyncio.create_task(one.lock("name", **options).acquire())
    await waiting_for_notice(one)
    keeper = keeper_of(one)

    def on_answer(place: Any, *answer: Any) -> None:
        if place.stage is not Stage.HELD:
            keeper.on_answer(place, *answer)

    monkeypatch.setattr(keeper._sender, "_on_answer", on_answer)
    await held.release()
    lease = await waits
    await until(lambda: not lease.held)
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    await until(lambda: not session_of(one).requests)
    assert late
    for hear in late.copy():
        hear()
    await asyncio.sleep(0.2)  # it is given back, or it is not
    with pytest.raises(aiodlock.WouldBlock):
        await client.lock("name").acquire_nowait()


async def test_notice_that_comes_after_a_leave_that_was_too_late_opens_no_name(
    make_client: MakeClient, client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease had ended on the server already, whose clock went ahead; its ``hold_at_least`` goes on."""
    one = await make_client()
    late = _keep_notices(monkeypatch)
    held = await client.lock("name").acquire()
    lock = one.lock("name", ttl=1.0, auto_extend=False, hold_at_least=30.0)
    waits = asyncio.create_task(lock.acquire())
    await waiting_for_notice(one)
    await held.release()
    lease = await waits
    (place,) = keeper_of(one).places.values()
    place.deadline += 30.0
    await asyncio.sleep(2.0)  # its ttl, and what was left of the place in the queue
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    assert late
    for hear in late.copy():
        hear()
    await asyncio.sleep(0.2)  # it is given back, or it is not
    with pytest.raises(aiodlock.WouldBlock):
        await client.lock("name").acquire_nowait()


async def test_break_that_overtakes_the_reply_to_the_grant_lets_no_body_begin_with_it(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    kept = proxy.hold_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire())
    await kept.happened.wait()
    (place,) = keeper_of(unlucky).places.values()
    assert await client.break_lock("name") == 1
    other = await client.lock("name").acquire()
    await until(lambda: place.broken > 0)
    kept.release()
    await until_waiting(client, "name", 1)
    assert not task.done(), "two holders"
    await other.release()
    lease = await task
    assert lease.token > other.token
    await lease.release()


async def test_break_that_overtakes_the_reply_to_a_single_try_refuses_it(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    kept = proxy.hold_reply(calling(ACQUIRE))
    task = asyncio.create_task(unlucky.lock("name").acquire_nowait())
    await kept.happened.wait()
    (place,) = keeper_of(unlucky).places.values()
    assert await client.break_lock("name") == 1
    await until(lambda: place.broken > 0)
    kept.release()
    with pytest.raises(aiodlock.WouldBlock):
        await task
    assert not (await client.inspect("name")).holders
    await until(lambda: not session_of(unlucky).requests)


async def test_break_that_comes_with_its_grant_is_not_the_stores_fault(
    make_client: MakeClient,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task of the waiter has not run in between. It waits on, behind who waited behind it."""
    other = await make_client()
    held = await client.lock("name").acquire()
    task = asyncio.create_task(other.lock("name").acquire(timeout=1.0))
    await waiting_for_notice(other)
    behind = asyncio.create_task(client.lock("name").acquire())
    await until_waiting(client, "name", 2)
    granted = core.Request.granted

    def granted_and_broken(self: core.Request) -> None:
        monkeypatch.setattr(core.Request, "granted", granted)
        asyncio.get_running_loop().call_soon(self.gone, "broken")  # before what wakes the task
        granted(self)

    monkeypatch.setattr(core.Request, "granted", granted_and_broken)
    await held.release()
    lease = await soon(behind)
    with pytest.raises(aiodlock.AcquireTimeout):
        await task
    assert not [record for record in caplog.records if getattr(record, "event", "") == "late_grant"]
    await lease.release()


async def stale_notice_after_the_local_deadline(
    proxy: FaultProxy, make_unlucky: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    """A grant is announced, and arrives when the server has dropped it and let another in."""
    late = await make_unlucky(waiter_ttl=1.5, ttl=1.5)
    held, (task,) = await line_up(client, late)
    (place,) = keeper_of(late).places.values()
    proxy.stall()
    await held.release()
    next_one = await client.lock("name").acquire()  # when the grant that is under way has ended
    assert now() > place.deadline
    await proxy.heal()

    async def has_learned() -> bool:
        return task.done() or len((await client.inspect("name")).waiters) == 1

    await until(has_learned)
    assert not task.done(), "two holders"
    assert next_one.held
    await next_one.release()
    await (await task).release()
    await free_at_once(store, client)


async def test_stale_notice_after_the_local_deadline_starts_no_body(
    proxy: FaultProxy, make_unlucky: MakeClient, store: Store, client: aiodlock.Client
) -> None:
    await stale_notice_after_the_local_deadline(proxy, make_unlucky, store, client)


async def stale_notice_of_an_earlier_grant(client: aiodlock.Client) -> None:
    """An id whose reply was lost for long was granted, dropped, and queued again: old news."""
    held, (task,) = await line_up(client, client)
    keeper = keeper_of(client)
    (place,) = [place for place in keeper.places.values() if place.stage is Stage.WAITING]
    keeper.on_granted(place.id, held.token, keys_of("aiodlock", "lock", "name").state)
    before = place.deadline
    await until(lambda: task.done() or place.deadline > before)  # it asks instead of believing
    try:
        assert not task.done(), "two holders"
        assert held.held
        await held.release()
    finally:
        await (await task).release()


async def test_stale_notice_of_an_earlier_grant_starts_no_body(client: aiodlock.Client) -> None:
    await stale_notice_of_an_earlier_grant(client)


@pytest.mark.stores("memory")
async def test_stale_notice_of_an_earlier_grant_is_noticed_without_the_guard(
    client: aiodlock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Keeper.on_granted

    def believe(self: Keeper, request_id: str, token: int, where: str, *_: object) -> None:
        self.places[request_id].floor = 0
        original(self, request_id, token, where)

    monkeypatch.setattr(Keeper, "on_granted", believe)
    with pytest.raises((AssertionError, aiodlock.LockLost)):
        await stale_notice_of_an_earlier_grant(client)


async def test_notice_never_moves_the_local_deadline(
    proxy: FaultProxy, make_unlucky: MakeClient, client: aiodlock.Client
) -> None:
    waiting = await make_unlucky(waiter_ttl=5.0)
    held, (task,) = await line_up(client, waiting)
    (place,) = keeper_of(waiting).places.values()
    acknowledged = place.deadline
    extension = proxy.hold_command(calling(EXTEND))
    await held.release()
    lease = await task
    assert place.deadline == acknowledged
    assert lease.held
    extension.release()
    await until(lambda: place.deadline > acknowledged + 20)  # the full ttl, at once
    await lease.release()


@pytest.mark.scripted
async def test_listener_hears_of_nonsense_and_lives_on(
    store: Store, client: aiodlock.Client
) -> None:
    raw = await store.raw()
    channel = f"aiodlock:2:client:{session_of(client).backend.label}"
    state = keys_of("aiodlock", "lock", "name").state
    for message in (
        "",
        "granted",
        f"granted {state} someone notanumber",
        f"granted {state} unknown 5",
        f"granted {state} unknown 5 6",
        f"look {state} unknown 0",
        f"broken {state} unknown 0",
        "granted no-key-of-ours unknown 5",
        "\udcff".encode("utf-8", "surrogateescape"),
    ):
        await raw.publish(channel, message)
    async with client.lock("name") as lease:
        assert lease.held
    await free_at_once(store, client)


async def test_notice_lost_with_the_subscription_is_made_up_for_after_it(
    proxy: FaultProxy, make_client: MakeClient, make_unlucky: MakeClient
) -> None:
    """The waiter's next message is due in 20 s, and its blocker would end in 60."""
    client = await make_client(ttl=60.0)
    deaf = await make_unlucky(waiter_ttl=60.0, ttl=60.0)
    held, (task,) = await line_up(client, deaf)
    _, wakeups = connections(proxy)
    await proxy.refuse()
    wakeups.cut()
    await held.release()
    (token,) = [holder.token for holder in (await client.inspect("name")).holders]
    assert not task.done()
    async with takes(at_most=SOON):
        await proxy.accept()
        lease = await task
    assert lease.token == token
    await lease.release()


async def test_every_waiter_is_looked_at_again_after_a_resubscription(
    proxy: FaultProxy, make_unlucky: MakeClient, client: aiodlock.Client
) -> None:
    deaf = await make_unlucky(waiter_ttl=60.0, ttl=60.0)
    held = [await client.lock(f"name {n}", ttl=60.0).acquire() for n in range(5)]
    tasks = [asyncio.create_task(deaf.lock(f"name {n}").acquire()) for n in range(5)]
    await waiting_for_notice(deaf, 5)
    _, wakeups = connections(proxy)
    await proxy.refuse()
    wakeups.cut()
    for lease in held:
        await lease.release()
    async with takes(at_most=SOON):
        await proxy.accept()
        leases = await asyncio.gather(*tasks)
    for lease in leases:
        await lease.release()
    no_places(deaf)


async def test_subscription_is_confirmed_before_the_first_acquire(
    proxy: FaultProxy,
) -> None:
    kept = proxy.hold_reply(containing(b"SUBSCRIBE"))
    deaf = aiodlock.Client(proxy.url)
    entering = asyncio.create_task(deaf.__aenter__())
    await kept.happened.wait()
    assert not entering.done()
    assert proxy.commands["EVALSHA"] == 0
    kept.release()
    await entering
    await deaf.__aexit__(None, None, None)


# -- the guards taken out ------------------------------------------------------------------------------

# A check that fails half-way leaves its leases to the garbage collector.
forgets = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@forgets
@pytest.mark.stores("valkey9")
async def test_stale_notice_is_noticed_to_start_a_body_without_the_guard(
    proxy: FaultProxy,
    make_unlucky: MakeClient,
    store: Store,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def believe(self: Keeper, request_id: str, token: int, where: str, *_: object) -> None:
        place = self.places[request_id]
        place.hold(token, now() + place.terms.ttl)
        self.extend_now(place)

    monkeypatch.setattr(Keeper, "on_granted", believe)
    with pytest.raises(AssertionError, match="two holders"):
        await stale_notice_after_the_local_deadline(proxy, make_unlucky, store, client)


@forgets
@pytest.mark.stores("valkey9")
async def test_reply_counted_from_its_arrival_is_noticed(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "local_deadline", lambda sent, left: now() + left / 1000)
    name = "test_local_deadline_of_a_repeated_message_counts_from_its_own_sending"
    with pytest.raises(AssertionError, match="too long"):
        await getattr(test_lost_replies, name)(proxy, unlucky, client)


@forgets
@pytest.mark.stores("valkey9")
async def test_reply_counted_from_the_first_sending_is_noticed(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: list[float] = []

    def from_the_first(sent: float, left: int) -> float:
        return first[0] + left / 1000

    original = calls.Calls.acquire

    async def note(self: calls.Calls, *args: object, **options: object) -> object:
        first.append(now())
        return await original(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calls.Calls, "acquire", note)
    monkeypatch.setattr(replies, "local_deadline", from_the_first)
    name = "test_local_deadline_of_a_repeated_message_counts_from_its_own_sending"
    with pytest.raises(AssertionError):
        await getattr(test_lost_replies, name)(proxy, unlucky, client)


@forgets
@pytest.mark.stores("valkey9")
@pytest.mark.parametrize(
    "check",
    [
        test_lost_replies.test_late_duplicate_after_an_ordinary_release_creates_no_ghost,
        test_lost_replies.test_late_duplicate_of_a_waiter_after_its_release_creates_no_ghost,
    ],
)
async def test_late_duplicate_is_noticed_to_create_a_ghost_without_the_marker(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    store: Store,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., Awaitable[None]],
) -> None:
    source = LEAVE.source.replace(b"if ARGV[5] ~= '0' then", b"if false then")
    assert source != LEAVE.source
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    without = dataclasses.replace(LEAVE, source=source, sha=sha)
    for module in (calls, messages):
        monkeypatch.setattr(module, "LEAVE", without)
    with pytest.raises(AssertionError):
        await check(proxy, unlucky, store, client)


@forgets
@pytest.mark.stores("valkey9")
async def test_lost_leave_is_noticed_when_it_is_not_repeated(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    client: aiodlock.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def forget(self: Departure, request: core.Request, end: End) -> None:
        self._register.remove(request)

    monkeypatch.setattr(Departure, "_go_on", forget)
    with pytest.raises(AssertionError):
        await test_lost_leave_is_repeated(proxy, unlucky, client)


async def test_lost_leave_is_repeated(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    """The leave itself is lost here, twice, so that only a repetition in the background frees the name."""
    proxy.drop_command(calling(LEAVE), times=2)
    async with unlucky.lock("name"):
        pass
    await no_places_soon(unlucky)
    assert (await client.inspect("name")).holders == ()


@pytest.mark.parametrize("about", ["one", "all"])
async def test_hint_that_overtakes_the_answer_to_acquire_is_not_forgotten(
    make_client: MakeClient, about: str
) -> None:
    """The grant's own notice was missed; whoever is still asking must look, too, once it is answered."""
    first, second = await make_client(), await make_client()
    held = await first.lock("name").acquire()
    keeper: Any = keeper_of(second)
    store: Any = keeper.store
    send = store.acquire

    async def acquire(request: StoreRequest, *, wait: bool) -> Any:
        answer = await send(request, wait=wait)
        assert isinstance(answer, Waiting)
        missed = asyncio.Event()
        noticing = keeper.on_granted
        keeper.on_granted = lambda *_: missed.set()
        try:
            await held.release()
            await missed.wait()
        finally:
            keeper.on_granted = noticing
        keeper.on_look(request.id if about == "one" else None)
        return answer

    store.acquire = acquire
    async with takes(at_most=SOON):  # the next extension is due after 3.3 s
        lease = await second.lock("name").acquire()
    await lease.release()
