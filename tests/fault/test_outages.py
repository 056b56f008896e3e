"""The server, or the way to it, goes away: who is told, when, and how it goes on afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.redis import RedisBackend, events
from aiodlock.backends.redis.scripts import LEAVE

from ..conftest import MakeClient
from ..inside import session_of
from ..proxy import Command, FaultProxy
from ..scenes import settled, store_of, until_cancelled, until_free
from ..servers import Store, embedded
from .scenes import (
    free_at_once,
    line_up,
    met_silence,
    no_places,
    no_places_soon,
    nothing_left,
    queued,
    stalls,
    takes,
    until,
)

#: From a local deadline until the body has ended.
TOLD_WITHIN = 0.1


@pytest.fixture
def server(real_store: Store) -> Iterator[EmbeddedServer]:
    """Give a server of the store's kind that the test may kill."""
    with embedded(real_store.name) as server:
        yield server


Away = Callable[[FaultProxy], Awaitable[None]]
Test = TypeVar("Test", bound=Callable[..., object])


async def _cut_and_refuse(proxy: FaultProxy) -> None:
    await proxy.refuse()
    proxy.cut()


async def _half_open(proxy: FaultProxy) -> None:
    proxy.half_open()


def network(test: Test) -> Test:
    """Mark a matter of the network and the client: one kind of server is enough."""
    marked: Callable[[Test], Test] = pytest.mark.stores("valkey9")
    return marked(test)


def ways(test: Test) -> Test:
    """Run with each way of going away."""
    both = pytest.mark.parametrize("go_away", [_cut_and_refuse, _half_open])
    marked: Test = both(network(test))
    return marked


# -- a server that forgets its scripts -----------------------------------------------------------------


@pytest.mark.scripted
async def test_scripts_that_were_flushed_are_sent_again(
    store: Store, client: aiodlock.Client
) -> None:
    raw = await store.raw()
    lock = client.lock("name", ttl=5.0)
    for _ in range(2):
        await raw.script_flush()
        lease = await lock.acquire()
        await raw.script_flush()
        await lease.extend()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await queued(client, 1)
        await raw.script_flush()
        assert (await client.inspect("name")).token == lease.token
        await raw.script_flush()
        await lease.release()
        await raw.script_flush()
        await (await waiting).release()
        await raw.script_flush()
        assert await client.break_lock("name") == 0
    await nothing_left(store)
    no_places(client)


# -- a server that dies ----------------------------------------------------------------------------------


async def test_holder_is_told_in_time_when_the_server_is_killed(server: EmbeddedServer) -> None:
    async with aiodlock.Client(server.url) as client:
        async with stalls() as stalled:
            with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
                async with client.lock("name", ttl=0.6) as lease:
                    deadline = lease._request.place.deadline
                    server.kill()
                    await until_cancelled()
            assert lost.value.reason == "expired"
            # An extension may have been answered before the kill.
            assert now() <= lease._request.place.deadline + TOLD_WITHIN + stalled()
        assert lease._request.place.deadline <= deadline + 0.6
        assert not lease.held
        server.start()  # so that the client can be left at once


async def test_waiters_stand_in_line_again_after_the_server_came_back_empty(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url, ttl=5.0, waiter_ttl=1.0) as client:
        held, tasks = await line_up(client, client, client, client)
        server.kill()
        server.start()
        async with takes(at_most=4.0):
            for _ in tasks:
                (done, _) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                (lease,) = [task.result() for task in done]
                tasks = [task for task in tasks if task not in done]
                await lease.release()
        # The server that came back knows nothing of the first holder: it was told, or will be.
        assert (await held.wait_lost()).reason in ("gone", "taken_over")
        with pytest.raises(aiodlock.LockLost):
            await held.release()


async def test_token_grows_over_a_restart_that_lost_everything(server: EmbeddedServer) -> None:
    async with aiodlock.Client(server.url) as client:
        async with client.lock("name") as lease:
            before = lease.token
        server.kill()
        server.start()
        async with client.lock("name") as lease:
            assert lease.token > before


# -- a connection that dies ------------------------------------------------------------------------------


@network
async def test_connection_lost_right_after_entering_is_survived(
    proxy: FaultProxy, make_client: MakeClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the client still looks whether keyspace events arrive."""
    await store.notifications(True)
    monkeypatch.setattr(events, "_PROBE_AGAIN", 0.02)
    for fault in (proxy.drop_command, proxy.drop_reply):
        for what in (b"SUBSCRIBE", b"SET"):
            # Not the subscription of its own channel: without that it has not entered.
            predicate = lambda command, what=what: (  # noqa: E731
                command.args[0] == what and b":probe:" in command.raw
            )
            cut = fault(predicate)
            client = await make_client(proxy.url)
            await cut.happened.wait()
            async with client.lock("name") as lease:
                assert lease.held
            await until(partial(_hears_events, client))


def _hears_events(client: aiodlock.Client) -> bool:
    backend = store_of(client)
    assert isinstance(backend, RedisBackend)
    return backend.server.notifications is True


@ways
async def test_holder_is_told_at_its_local_deadline(
    proxy: FaultProxy, unlucky: aiodlock.Client, go_away: Away
) -> None:
    async with stalls() as stalled:
        with pytest.raises(aiodlock.LockLost):  # noqa: PT012
            async with unlucky.lock("name", ttl=0.6) as lease:
                await go_away(proxy)
                await until_cancelled()
        deadline = lease._request.place.deadline
        assert deadline <= now() <= deadline + TOLD_WITHIN + stalled()
    await proxy.heal()


@ways
async def test_body_whose_release_has_no_answer_is_told_and_cancelled_at_its_next_await(
    proxy: FaultProxy, unlucky: aiodlock.Client, go_away: Away
) -> None:
    steps = 0
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with unlucky.lock("name", ttl=0.5) as lease:
            await go_away(proxy)
            with pytest.raises(aiodlock.LockLost):
                await lease.release()
            assert lease.lost is not None
            for _ in range(40):
                await asyncio.sleep(0.001)
                steps += 1
    assert lost.value.reason == "expired"
    assert steps == 0


@ways
async def test_holder_that_reaches_the_server_again_in_time_keeps_its_lease(
    proxy: FaultProxy, make_unlucky: MakeClient, go_away: Away
) -> None:
    client = await make_unlucky(ttl=10.0)
    async with client.lock("name") as lease:
        await go_away(proxy)
        deadline = lease._request.place.deadline
        await met_silence(client, proxy)
        assert lease._request.place.deadline == deadline
        await proxy.heal()
        await lease.extend()
        assert lease._request.place.deadline > deadline


@ways
async def test_waiter_that_is_back_within_its_lease_keeps_its_place(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client, go_away: Away
) -> None:
    held, (first, second) = await line_up(client, unlucky, client)
    await go_away(proxy)
    await met_silence(unlucky, proxy)
    await proxy.heal()
    await held.release()
    lease = await first
    assert not second.done()
    await lease.release()
    await (await second).release()


@network
async def test_waiter_that_is_back_too_late_stands_at_the_end(
    proxy: FaultProxy, make_unlucky: MakeClient, client: aiodlock.Client
) -> None:
    away = await make_unlucky(waiter_ttl=0.4)
    held, (first, second) = await line_up(client, away, client)
    await _cut_and_refuse(proxy)
    await queued(client, 1)  # it has run out
    await proxy.heal()
    await queued(client, 2)
    await held.release()
    lease = await second
    assert not first.done()
    await lease.release()
    await (await first).release()


@ways
async def test_waiting_gives_up_when_nothing_answers_for_long(
    proxy: FaultProxy, make_unlucky: MakeClient, client: aiodlock.Client, go_away: Away
) -> None:
    away = await make_unlucky(unavailable_after=0.5, waiter_ttl=0.6)
    began = now()
    held, (task,) = await line_up(client, away)
    await go_away(proxy)
    async with takes(at_most=1.5):
        with pytest.raises(aiodlock.BackendUnavailable, match="name"):
            await task
    assert now() - began >= 0.5
    await proxy.heal()
    await held.release()


@ways
async def test_acquire_that_was_never_answered_gives_up(
    proxy: FaultProxy, make_unlucky: MakeClient, go_away: Away
) -> None:
    away = await make_unlucky(unavailable_after=0.5)
    await go_away(proxy)
    async with takes(at_least=0.4, at_most=1.5):
        with pytest.raises(aiodlock.BackendUnavailable, match="name"):
            await away.lock("name").acquire()
    await proxy.heal()


@ways
async def test_acquire_tells_at_its_timeout_that_the_store_is_away(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    store: Store,
    client: aiodlock.Client,
    go_away: Away,
) -> None:
    await go_away(proxy)
    async with takes(at_least=0.3, at_most=0.3 + 0.2):
        with pytest.raises(aiodlock.BackendUnavailable, match="name"):
            await unlucky.lock("name").acquire(timeout=0.3)
    await proxy.heal()
    await free_at_once(store, client)
    await no_places_soon(unlucky)


@ways
async def test_what_does_not_wait_raises_within_two_seconds(
    proxy: FaultProxy, unlucky: aiodlock.Client, go_away: Away
) -> None:
    await go_away(proxy)

    async def raises(call: Awaitable[object]) -> None:
        async with takes(at_most=2.0):
            with pytest.raises(aiodlock.BackendUnavailable):
                await call

    lock = unlucky.lock("name")
    async with asyncio.TaskGroup() as tasks:
        for call in (
            lock.acquire_nowait(),
            lock.acquire(timeout=0),
            lock.locked(),
            unlucky.inspect("name"),
            unlucky.break_lock("name"),
        ):
            tasks.create_task(raises(call))
    await proxy.heal()


@network
async def test_what_does_not_wait_reconnects_once(
    proxy: FaultProxy, unlucky: aiodlock.Client
) -> None:
    proxy.cut()
    async with takes(at_most=1.0):
        await (await unlucky.lock("name").acquire_nowait()).release()
    proxy.cut()
    async with takes(at_most=1.0):
        assert (await unlucky.inspect("name")).holders == ()


@ways
async def test_release_by_hand_raises_at_the_local_deadline(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    store: Store,
    client: aiodlock.Client,
    go_away: Away,
) -> None:
    lease = await unlucky.lock("name", ttl=0.8).acquire()
    await go_away(proxy)
    deadline = lease._request.place.deadline
    async with stalls() as stalled:
        with pytest.raises(aiodlock.LockLost, match="name"):
            await lease.release()
        assert deadline <= now() <= deadline + TOLD_WITHIN + stalled()
    assert not lease.held
    with pytest.raises(aiodlock.NotHeld):
        await lease.release()
    await proxy.heal()
    await free_at_once(store, client)


@ways
async def test_release_by_hand_succeeds_when_the_server_is_back_in_time(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client, go_away: Away
) -> None:
    lease = await unlucky.lock("name").acquire()
    await go_away(proxy)
    sent = proxy.commands["EVALSHA"]
    releasing = asyncio.create_task(lease.release())
    backend = session_of(unlucky).backend
    await until(lambda: backend.failure is not None or proxy.commands["EVALSHA"] > sent)
    assert not releasing.done()
    assert (await client.inspect("name")).holders
    await proxy.heal()
    await releasing
    assert not (await client.inspect("name")).holders


@ways
async def test_leaving_a_body_returns_within_a_second_and_goes_on_in_the_background(
    proxy: FaultProxy,
    unlucky: aiodlock.Client,
    store: Store,
    client: aiodlock.Client,
    go_away: Away,
) -> None:
    lock = unlucky.lock("name")
    lease = await lock.__aenter__()
    await go_away(proxy)
    async with takes(at_most=1.0):
        await lock.__aexit__(None, None, None)
    assert not lease.held
    await proxy.heal()
    await until_free(client, "name")
    await no_places_soon(unlucky)
    await nothing_left(store, markers=True)


@pytest.mark.stores("valkey9")
async def test_leave_that_is_not_answered_within_a_second_is_sent_once_more_and_not_twice(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    sent = 0

    def counts(command: Command) -> bool:
        nonlocal sent
        sent += LEAVE.sha in command.raw
        return False

    async with unlucky.lock("name", ttl=60.0):
        proxy.drop_command(counts)
        proxy.delay(1.5)
    await settled(unlucky)
    assert sent == 2
    await proxy.heal()
    await until_free(client, "name")


@ways
async def test_client_that_is_left_while_the_server_is_away_ends(
    proxy: FaultProxy, go_away: Away
) -> None:
    client = aiodlock.Client(proxy.url, close_timeout=0.5)
    await client.__aenter__()
    lease, (task,) = await line_up(client, client)
    await go_away(proxy)
    async with takes(at_most=0.5 + 1.0 + 0.2):  # close_timeout, and a second for what was sent
        await client.__aexit__(None, None, None)
    with pytest.raises(aiodlock.ClientClosed):
        await task
    assert lease.lost is not None
    assert lease.lost.reason == "closed"


@network
async def test_closing_does_not_wait_for_a_bare_lease_that_was_lost_before(store: Store) -> None:
    client = aiodlock.Client(store.source)
    await client.__aenter__()
    lease = await client.lock("name", ttl=0.1, auto_extend=False).acquire()
    await lease.wait_lost()
    async with takes(at_most=1.0):
        await client.__aexit__(None, None, None)


@network
async def test_paused_server_is_not_answered_with_ever_more_connections(
    proxy: FaultProxy, unlucky: aiodlock.Client
) -> None:
    before = proxy.accepted
    proxy.stall()
    tasks = [asyncio.create_task(unlucky.lock(f"name {n}").acquire()) for n in range(50)]
    async with stalls() as stalled:
        await asyncio.sleep(1.6)  # time is under test: how many in it
        assert proxy.accepted - before <= 4 + 2 * stalled()
    await proxy.heal()
    for lease in await asyncio.gather(*tasks):
        await lease.release()


@network
@pytest.mark.parametrize("what", ["inspect", "acquire_nowait", "break_lock"])
async def test_what_does_not_wait_connects_at_once_when_the_server_is_back(
    proxy: FaultProxy, unlucky: aiodlock.Client, what: str
) -> None:
    """Whatever pause the attempts to connect have grown to meanwhile."""
    await proxy.refuse()
    proxy.cut()
    await asyncio.sleep(2.0)  # the pauses grow: 0.1, 0.2, 0.4, 0.8, 1.6 s
    await proxy.heal()
    if what == "acquire_nowait":
        await (await unlucky.lock("name").acquire_nowait()).release()
    else:
        await getattr(unlucky, what)("name")


@pytest.mark.parametrize("taken", [False, True])
async def test_lock_whose_ttl_is_shorter_than_a_round_trip_is_refused_and_not_kept_from_others(
    make_unlucky: MakeClient,
    proxy: FaultProxy,
    client: aiodlock.Client,
    caplog: pytest.LogCaptureFixture,
    taken: bool,
) -> None:
    slow = await make_unlucky(unavailable_after=4.0)
    held = await client.lock("name").acquire()
    proxy.delay(0.4)
    acquiring = asyncio.create_task(slow.lock("name", ttl=0.15).acquire())
    if taken:
        await asyncio.sleep(0.5)
    await held.release()
    got_in = 0
    while not acquiring.done():
        async with client.lock("name", timeout=5):
            got_in += 1
        await asyncio.sleep(0.05)
    with pytest.raises(aiodlock.BackendUnavailable, match="too slowly"):
        await acquiring
    assert got_in > 3
    warned = [record for record in caplog.records if getattr(record, "event", "") == "late_grant"]
    assert len(warned) == 1
    await proxy.heal()
    await until_free(client, "name")
