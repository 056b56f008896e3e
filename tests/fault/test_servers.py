"""What happens to a server, and what operators do to it: who notices, within which bound.

`docs/internals/faults.md` lists all of these with their bounds.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio

import aiodlock
from aiodlock._clock import now
from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.redis import RedisBackend

from ..conftest import MakeClient
from ..inside import schedule_of, session_of
from ..proxy import FaultProxy
from ..scenes import LASTING, PATIENCE, keeper_of, store_of, until_cancelled, until_outlived
from ..servers import NOTIFICATIONS, Store, embedded
from .scenes import (
    SOON,
    free_at_once,
    line_up,
    no_places,
    nothing_left,
    queued,
    stalls,
    takes,
    until,
    waiting_for_notice,
)

#: How late a timer and a message may be, besides what the machine did not let run.
LATE = 0.25
STATE = "aiodlock:2:lock:{name}:state"
QUEUE = "aiodlock:2:lock:{name}:queue"
WAITERS = "aiodlock:2:lock:{name}:waiters"
TOKEN = "aiodlock:2:lock:{name}:token"


@pytest.fixture
def server(real_store: Store) -> Iterator[EmbeddedServer]:
    """Give a server of the store's kind that the test may kill and freeze; it saves nothing."""
    with embedded(real_store.name) as server:
        yield server


@pytest.fixture
def saving_server(real_store: Store) -> Iterator[EmbeddedServer]:
    """Give a server that keeps all that it acknowledged, also when it is killed."""
    with embedded(real_store.name, appendonly="yes", appendfsync="always") as server:
        yield server


@pytest.fixture
def debug_server(real_store: Store) -> Iterator[EmbeddedServer]:
    """Give a server that allows DEBUG; Redis 6.2 knows no such option and always does."""
    allowed = {} if real_store.name == "redis62" else {"enable_debug_command": "yes"}
    with embedded(real_store.name, tcp=False, **allowed) as server:
        yield server


@asynccontextmanager
async def talking_to(server: EmbeddedServer | Store) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
    try:
        yield client
    finally:
        await client.aclose()


async def still_held(lease: aiodlock.Lease) -> None:
    """Assert that the lease is held, on both sides."""
    await lease.extend()
    assert lease.held
    assert lease.lost is None


async def lost_to_another(lease: aiodlock.Lease) -> None:
    """Wait until the holder is told that the server does not know its lease any more."""
    assert (await lease.wait_lost()).reason in ("gone", "taken_over")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def probed(client: aiodlock.Client) -> bool:
    """Return whether the client has found that keyspace events arrive."""
    backend = store_of(client)
    assert isinstance(backend, RedisBackend)
    await until(lambda: backend.server.notifications is not None)
    return backend.server.notifications is True


# -- frozen -----------------------------------------------------------------------------------------------


async def test_server_frozen_for_less_than_the_leases_costs_only_that_time(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url, ttl=6.0, waiter_ttl=6.0) as client:
        held = await client.lock("name").acquire()
        task = asyncio.create_task(client.lock("name").acquire())
        await waiting_for_notice(client)
        server.pause()
        asking = asyncio.create_task(client.lock("other").acquire())
        await asyncio.sleep(0.5)
        server.resume()
        async with takes(at_most=SOON):
            await (await asking).release()
            await still_held(held)
            await held.release()
            await (await task).release()
        no_places(client)


async def test_holder_is_told_at_its_local_deadline_while_the_server_is_frozen(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url, close_timeout=0.5) as client:
        async with stalls() as stalled:
            with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
                async with client.lock("name", ttl=0.6) as lease:
                    server.pause()
                    deadline = lease._request.place.deadline
                    await until_cancelled()
            assert lost.value.reason == "expired"
            assert deadline - 0.01 <= now()
            assert (
                now() <= lease._request.place.deadline + 1.0 + LATE + stalled()
            )  # and it has left
        server.resume()
        async with client.lock("name", timeout=PATIENCE) as again:
            assert again.token > lease.token


# -- killed and restarted ---------------------------------------------------------------------------------


async def test_leases_and_places_outlive_a_restart_of_a_server_that_saves(
    saving_server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(saving_server.url, ttl=10.0, waiter_ttl=10.0) as client:
        held = await client.lock("name").acquire()
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(client.lock("name").acquire()))
            await queued(client, number + 1)
        saving_server.kill()
        saving_server.start()
        async with takes(at_most=4.0):
            await still_held(held)
            tokens = [held.token]
            await held.release()
            for task in tasks:  # in the order in which they came
                lease = await task
                tokens.append(lease.token)
                await lease.release()
        assert tokens == sorted(set(tokens))
        no_places(client)


async def test_token_is_remembered_over_a_restart_of_a_server_that_saves(
    saving_server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(saving_server.url) as client:
        async with talking_to(saving_server) as raw:
            async with client.lock("name"):
                pass
            ahead = str(int(await raw.get(TOKEN) or 0) + 10**12)  # as a clock set back leaves it
            await raw.set(TOKEN, ahead, px=60_000)
        saving_server.kill()
        saving_server.start()
        async with client.lock("name") as lease:
            assert lease.token == int(ahead) + 1


async def test_holder_is_told_within_a_third_of_its_ttl_that_the_server_came_back_empty(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url) as client:
        with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
            async with client.lock("name", ttl=6.0), stalls() as stalled:
                server.kill()
                server.start()
                restarted = now()
                try:
                    await until_cancelled()
                finally:
                    told, allowed = now(), 6.0 / 3 + 1.0 + stalled()
        assert lost.value.reason == "gone"
        # A connection is tried again after pauses of up to 2 s; here it was away for a moment only.
        assert told - restarted <= allowed


# -- emptied ----------------------------------------------------------------------------------------------


async def test_flushall_is_told_to_holders_within_a_third_of_their_ttl(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client(ttl=2.4)
    raw = await real_store.raw()
    async with stalls() as stalled:
        with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
            async with client.lock("name") as lease:
                await raw.flushall()
                flushed = now()
                await until_cancelled()
        assert lost.value.reason == "gone"
        assert now() - flushed <= 2.4 / 3 + LATE + stalled()
    async with client.lock("name") as again:
        assert again.token > lease.token


async def test_waiters_stand_in_line_again_after_a_flushall(
    real_store: Store, make_client: MakeClient, notifications: bool
) -> None:
    client = await make_client(ttl=5.0, waiter_ttl=1.5)
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    tasks = [asyncio.create_task(client.lock("name").acquire()) for _ in range(3)]
    await waiting_for_notice(client, 3)
    await raw.flushall()
    async with takes(at_most=1.5 / 3 + LATE + 0.5):
        for _ in range(3):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                tasks.remove(task)
                await task.result().release()
    await lost_to_another(held)
    await nothing_left(real_store)


# -- an operator's hands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["DEL", "UNLINK", "RENAME"])
async def test_state_that_an_operator_takes_away_is_told_and_the_head_gets_in(
    real_store: Store, make_client: MakeClient, notifications: bool, how: str
) -> None:
    client = await make_client(ttl=3.6, waiter_ttl=1.8)
    assert await probed(client) is notifications
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    if notifications:
        channel = f"__keyspace@0__:{STATE}"

        async def is_watched() -> bool:
            return bool(dict(await raw.pubsub_numsub(channel))[channel])

        await until(is_watched)
    taken = now()
    async with stalls() as stalled:
        await raw.execute_command(how, STATE, *(["elsewhere"] if how == "RENAME" else []))  # type: ignore[no-untyped-call]
        lease = await task
        # At the event of the key, or at the head's own next extension.
        assert now() - taken <= LATE + (0.0 if notifications else 1.8 / 3) + stalled()
        assert lease.token > held.token
        await lost_to_another(held)
        assert now() - taken <= 3.6 / 3 + LATE + stalled()
    await lease.release()


@pytest.mark.parametrize("keys", [(QUEUE,), (WAITERS,), (QUEUE, WAITERS)])
async def test_waiters_whose_keys_an_operator_deletes_stand_in_line_again(
    real_store: Store, make_client: MakeClient, keys: tuple[str, ...]
) -> None:
    client = await make_client(ttl=5.0, waiter_ttl=1.5)
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    tasks = [asyncio.create_task(client.lock("name").acquire()) for _ in range(3)]
    await waiting_for_notice(client, 3)
    await raw.delete(*keys)
    await queued(client, 3)
    await still_held(held)
    async with takes(at_most=1.5 / 3 + LATE + 0.5):
        await held.release()
        for _ in range(3):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                tasks.remove(task)
                await task.result().release()
    await nothing_left(real_store)


async def test_token_grows_although_an_operator_deletes_it(
    real_store: Store, client: aiodlock.Client
) -> None:
    raw = await real_store.raw()
    async with client.lock("name") as lease:
        await raw.delete(TOKEN)
    async with client.lock("name") as again:
        assert again.token > lease.token


# -- connections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_client_kill_costs_no_lease_and_no_place(
    real_store: Store, make_client: MakeClient, kind: str
) -> None:
    client = await make_client(ttl=6.0, waiter_ttl=6.0)
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    first = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client, 1)
    second = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client, 2)
    assert await raw.client_kill_filter(_type=kind) >= 1
    async with takes(at_most=SOON):
        await still_held(held)
        await held.release()
        lease = await first
        assert not second.done()
        await lease.release()
        await (await second).release()
    no_places(client)


async def test_client_pause_shorter_than_the_leases_costs_only_that_time(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client(ttl=6.0)
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    await raw.client_pause(500)
    async with takes(at_most=0.5 + SOON):
        await held.release()
        lease = await task
    assert held.lost is None
    await lease.release()
    await free_at_once(real_store, client)


async def test_client_pause_longer_than_the_lease_is_told_at_its_local_deadline(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client()
    raw = await real_store.raw()
    async with stalls() as stalled:
        with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
            async with client.lock("name", ttl=0.6) as lease:
                try:
                    await raw.client_pause(1500)
                    await until_cancelled()
                finally:
                    told = now()
        assert lost.value.reason == "expired"
        deadline = lease._request.place.deadline
        assert deadline - 0.01 <= told <= deadline + LATE + stalled()
    async with client.lock("name", timeout=PATIENCE) as again:
        assert again.token > lease.token


async def test_server_that_sleeps_for_less_than_the_leases_costs_only_that_time(
    debug_server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(debug_server.url, ttl=6.0) as client:
        async with talking_to(debug_server) as raw:
            held = await client.lock("name").acquire()
            task = asyncio.create_task(client.lock("name").acquire())
            await waiting_for_notice(client)
            sleeping = asyncio.create_task(raw.execute_command("DEBUG", "SLEEP", "0.5"))  # type: ignore[no-untyped-call]
            await asyncio.sleep(0)
            async with takes(at_most=0.5 + SOON):
                await held.release()
                await (await task).release()
            await sleeping
            assert held.lost is None
            no_places(client)


async def test_server_busy_with_a_script_of_somebody_else_is_waited_for(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client(ttl=6.0)
    raw = await real_store.raw()
    await raw.config_set("lua-time-limit", 20)
    held = await client.lock("name").acquire()
    endless = asyncio.ensure_future(raw.eval("while true do end", 0))
    try:
        async with talking_to(real_store) as other:

            async def is_busy() -> bool:
                try:
                    return not await other.ping()
                except redis.exceptions.ResponseError as refused:
                    return "BUSY" in str(refused)

            await until(is_busy)
            asking = asyncio.create_task(client.lock("other").acquire())
            with pytest.raises(aiodlock.BackendUnavailable, match="BUSY"):
                await client.inspect("name")
            assert not asking.done()
            await other.script_kill()
        async with takes(at_most=SOON):
            await (await asking).release()
            await still_held(held)
            await held.release()
    finally:
        await asyncio.gather(endless, return_exceptions=True)
        await raw.config_set("lua-time-limit", 5000)
    no_places(client)


# -- configuration while running -------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", NOTIFICATIONS])
async def test_notifications_turned_on_or_off_while_running_cost_the_head_nothing(
    real_store: Store, make_client: MakeClient, before: str
) -> None:
    raw = await real_store.raw()
    await raw.config_set("notify-keyspace-events", before)
    client = await make_client()
    assert await probed(client) is bool(before)
    held = await client.lock("name", ttl=1.5, auto_extend=False).acquire()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    await raw.config_set("notify-keyspace-events", "" if before else NOTIFICATIONS)
    async with stalls() as stalled:
        (holder,) = (await client.inspect("name")).holders
        ends_at = now() + (holder.remaining or 0.0)
        lease = await task
        assert now() <= ends_at + LATE + stalled()
    assert not held.held
    with pytest.raises(aiodlock.LockLost):
        await held.release()
    await lease.release()


# -- memory -----------------------------------------------------------------------------------------------


async def fill(raw: redis.asyncio.Redis) -> None:
    """Let the server have less memory than it uses already, and evict nothing."""
    await raw.config_set("maxmemory-policy", "noeviction")
    await raw.config_set("maxmemory", 1)


async def test_evicted_lease_is_told_within_a_third_of_its_ttl(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client(ttl=3.6)
    raw = await real_store.raw()
    used = (await raw.info("memory"))["used_memory"]
    await raw.config_set("maxmemory-policy", "allkeys-lru")
    await raw.config_set("maxmemory", int(used) + 2_000_000)
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with client.lock("name") as lease, stalls() as stalled:
            number, evicted = 0, now()
            try:
                while await raw.exists(STATE):
                    pipeline = raw.pipeline(transaction=False)
                    for _ in range(50):
                        number += 1
                        pipeline.set(f"filler:{number}", "x" * 20_000)
                    await pipeline.execute()
                    evicted = now()
                await until_cancelled()
            finally:
                told, allowed = now(), 3.6 / 3 + LATE + stalled()
    assert lost.value.reason == "gone"
    assert told - evicted <= allowed
    async with client.lock("name") as again:  # and it works on, with all that it takes to
        assert again.token > lease.token


async def test_full_server_refuses_new_locks_and_keeps_those_that_are_held_or_waited_for(
    real_store: Store, make_client: MakeClient
) -> None:
    client = await make_client(ttl=LASTING, waiter_ttl=LASTING)
    raw = await real_store.raw()
    held = await client.lock("name").acquire()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    await fill(raw)
    (place,) = [place for place in session_of(client).requests.values() if place.woken is not None]
    waits_until = place.place.deadline
    async with takes(at_most=SOON):
        for name in ("other", "name"):  # free, and held: it would have to queue
            with pytest.raises(aiodlock.BackendError, match="OOM"):
                await asyncio.create_task(client.lock(name).acquire())
        with pytest.raises(aiodlock.BackendError, match="OOM"):
            await client.lock("other").acquire_nowait()
    await until_outlived(held)
    await until(
        lambda: place.place.deadline > waits_until + LASTING / 2, "an extension of the waiter"
    )
    assert held.held
    assert not task.done()
    async with takes(at_most=LATE):
        await held.release()
        lease = await task
    await still_held(lease)
    await lease.release()
    await raw.config_set("maxmemory", 0)
    await free_at_once(real_store, client)
    await free_at_once(real_store, client, "other")
    no_places(client)


# -- demoted ----------------------------------------------------------------------------------------------


async def test_server_that_became_a_replica_is_waited_for_until_it_is_promoted(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url, ttl=8.0) as client, talking_to(server) as raw:
        held = await client.lock("name").acquire()
        await raw.replicaof("127.0.0.1", unused_port())
        asking = asyncio.create_task(client.lock("other").acquire())
        async with takes(at_most=2.1):
            with pytest.raises(aiodlock.BackendUnavailable):
                await client.lock("third").acquire_nowait()
        assert not asking.done()
        await raw.replicaof("NO", "ONE")
        async with takes(at_most=2 * SOON):  # pauses between attempts grow to 2 s
            await (await asking).release()
            await still_held(held)
            await held.release()


async def test_holder_is_told_at_its_local_deadline_while_its_server_is_a_replica(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url, close_timeout=0.5) as client, talking_to(server) as raw:
        async with stalls() as stalled:
            with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
                async with client.lock("name", ttl=0.8) as lease:
                    try:
                        await raw.replicaof("127.0.0.1", unused_port())
                        await until_cancelled()
                    finally:
                        told = now()
            assert lost.value.reason == "expired"
            deadline = lease._request.place.deadline
            assert deadline - 0.01 <= told <= deadline + LATE + stalled()
        await raw.replicaof("NO", "ONE")


def unused_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# -- a network that delivers byte by byte ----------------------------------------------------------------


async def test_replies_that_trickle_in_are_understood_and_lengthen_no_lease(
    proxy: FaultProxy, make_client: MakeClient, client: aiodlock.Client
) -> None:
    proxy.trickle()
    slow = await make_client(proxy.url, ttl=4.0)
    proxy.trickle(0.001)
    # Not extended: or an extension could be answered between the two looks that are compared.
    async with slow.lock("name", ttl=20.0, auto_extend=False) as lease:
        task = asyncio.create_task(slow.lock("name").acquire())
        await queued(client, 1)
        (holder,) = (await client.inspect("name")).holders
        assert lease.remaining() <= (holder.remaining or 0.0) + 0.01
    async with takes(at_most=SOON):
        second = await task
    assert second.token > lease.token
    await still_held(second)
    await second.release()


async def test_connection_that_swallows_everything_is_told_at_the_local_deadline_and_replaced(
    proxy: FaultProxy, make_client: MakeClient, client: aiodlock.Client
) -> None:
    away = await make_client(proxy.url)
    async with stalls() as stalled:
        with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
            async with away.lock("name", ttl=0.8) as lease:
                proxy.half_open()
                try:
                    await until_cancelled()
                finally:
                    told, allowed = now(), LATE + stalled()
                    await proxy.heal()
        assert lost.value.reason == "expired"
        assert (
            lease._request.place.deadline - 0.01 <= told <= lease._request.place.deadline + allowed
        )
    async with takes(at_most=2 * SOON):
        async with away.lock("name"):
            assert await client.lock("name").locked()


async def _snapshot(store: Store) -> Callable[..., Any]:
    """Return what brings the store back to where it is now, as a failover to an old replica does."""
    raw: Any = await store.raw(decode_responses=False)
    kept = {key: (await raw.dump(key), await raw.pttl(key)) for key in await raw.keys("*")}

    async def restore(*, without: str = "") -> None:
        # All at once: between two steps somebody would see a store that never was.
        async with raw.pipeline(transaction=True) as steps:
            for key in await raw.keys("*"):
                steps.delete(key)
            for key, (value, left) in kept.items():
                steps.restore(key, max(left, 0), value, replace=True)
                if without and key.endswith(b":state"):
                    steps.hdel(key, without)
            await steps.execute()

    return restore


async def test_holder_whom_the_store_takes_for_a_waiter_again_is_told(
    real_store: Store, make_client: MakeClient
) -> None:
    """A failover lost the hand-off: the new primary knows the request, in the queue."""
    first, second = [await make_client(ttl=3.0) for _ in range(2)]
    held, (waiting,) = await line_up(first, second)
    restore = await _snapshot(real_store)
    await held.release()
    lease = await waiting
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with lease:
            await restore()
            await until_cancelled()
    assert lost.value.reason == "gone"


async def test_holder_whom_the_store_has_granted_anew_is_told(
    real_store: Store, make_client: MakeClient
) -> None:
    """The same, and by the time it asks the ghost before it is over: its token is of another grant."""
    first, second = [await make_client(ttl=3.0) for _ in range(2)]
    held, (waiting,) = await line_up(first, second)
    released = held._request.id
    restore = await _snapshot(real_store)
    await held.release()
    lease = await waiting
    with pytest.raises(aiodlock.LockLost) as lost:  # noqa: PT012
        async with lease:
            await restore(without=released)
            await until_cancelled()
    assert lost.value.reason == "gone"


async def test_scripts_that_the_server_forgot_do_not_slow_down_a_thousand_extensions(
    unlucky: aiodlock.Client, proxy: FaultProxy, real_store: Store
) -> None:
    leases = [await unlucky.lock(f"name {n}", ttl=20).acquire() for n in range(100)]
    await (await real_store.raw()).script_flush()
    proxy.forget()
    keeper = keeper_of(unlucky)
    places = list(keeper.places.values())
    for place in places:
        keeper.extend_now(place)
    await until(
        lambda: (
            not any(schedule_of(place).is_due_again or schedule_of(place).asked for place in places)
        )
    )
    assert proxy.commands["EVAL"] == 1
    for lease in leases:
        await lease.release()


@pytest.mark.usefixtures("brief_entering")
async def test_client_of_a_replica_is_told_so_on_entering(real_store: Store) -> None:
    assert real_store.server is not None
    with embedded(real_store.name, tcp=True) as replica:
        with redis.Redis.from_url(replica.url) as admin:
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        client = aiodlock.Client(replica.url)
        with pytest.raises(aiodlock.BackendUnavailable, match="READONLY"):
            await client.__aenter__()


async def test_demoted_server_is_named_in_the_error_and_not_flooded_with_connections(
    make_client: MakeClient, real_store: Store
) -> None:
    with embedded(real_store.name, tcp=True) as server:
        client = await make_client(server.url, close_timeout=0.1)
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            before = admin.info("stats")["total_connections_received"]
            with pytest.raises(aiodlock.BackendUnavailable, match="READONLY"):
                await client.lock("name").acquire(timeout=1.5)
            assert admin.info("stats")["total_connections_received"] - before <= 12
