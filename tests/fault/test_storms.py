"""Many clients lose their connections in one moment: connections, messages and losses are counted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock._request import State

from ..inside import session_of
from ..proxy import FaultProxy
from ..scenes import keeper_of, stalls, store_of, until, until_waiting
from ..servers import Store, embedded

#: So long a server works on one new connection, and on no other meanwhile: a TLS handshake, say.
_HANDSHAKE = 0.01
_MANY = 120


@pytest.fixture
def server(real_store: Store) -> Iterator[EmbeddedServer]:
    with embedded(real_store.name, tcp=True) as server:
        yield server


@asynccontextmanager
async def one_connection_at_a_time(server: EmbeddedServer) -> AsyncIterator[tuple[str, list[int]]]:
    """Pass connections on, each after the others have been worked on; count those."""
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    busy = asyncio.Lock()
    dialled: list[int] = []
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.append(len(dialled))
        async with busy:
            await asyncio.sleep(_HANDSHAKE)
        upstream = await asyncio.open_connection("127.0.0.1", port)
        for task in (
            asyncio.create_task(pump(reader, upstream[1])),
            asyncio.create_task(pump(upstream[0], writer)),
        ):
            pumps.add(task)
            task.add_done_callback(pumps.discard)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1000)
    try:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0", dialled
    finally:
        listening.close()
        for task in tuple(pumps):
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def links_of(client: aiodlock.Client) -> list[Any]:
    backend = store_of(client)
    return [backend.server.commands, backend.server.wakeups.link]


async def ask(server: EmbeddedServer, *command: str) -> Any:
    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as admin:
        return await admin.execute_command(*command)  # type: ignore[no-untyped-call]


async def kill_all(server: EmbeddedServer) -> None:
    for kind in ("normal", "pubsub"):
        await ask(server, "CLIENT", "KILL", "TYPE", kind)


async def test_clients_come_back_with_one_connection_per_link(server: EmbeddedServer) -> None:
    async with AsyncExitStack() as stack:
        url, dialled = await stack.enter_async_context(one_connection_at_a_time(server))
        clients = []
        for _ in range(_MANY):
            clients.append(await stack.enter_async_context(aiodlock.Client(url)))
        leases = [
            await client.lock(f"storm:{n}", ttl=120.0).acquire() for n, client in enumerate(clients)
        ]
        links = [link for client in clients for link in links_of(client)]
        before = [link.wire for link in links]
        dialled.clear()

        def back() -> bool:
            pairs = zip(links, before, strict=True)
            return all(link.wire not in (None, old) for link, old in pairs)

        async with stalls() as stalled:
            await kill_all(server)
            await until(back, "all connections", within=100.0)
            # While the machine does something else, dials take longer than they are waited for.
            assert len(dialled) < 2 * len(links) * (1 + stalled())
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()


async def test_server_that_has_the_scripts_is_not_sent_them_again(server: EmbeddedServer) -> None:
    async with FaultProxy(server.url) as proxy, aiodlock.Client(proxy.url) as client:
        for _ in range(5):
            seen = len(proxy.connections)
            await lose_connections(server, client)
            sent = [connection.bytes_from_client for connection in proxy.connections[seen:]]
            assert len(sent) == 2
            assert sum(sent) < 1000
        async with client.lock("x"):
            pass


async def test_server_that_has_lost_the_scripts_has_them_before_the_first_call(
    server: EmbeddedServer,
) -> None:
    async with aiodlock.Client(server.url) as client:
        await ask(server, "SCRIPT", "FLUSH")
        await lose_connections(server, client)
        async with client.lock("x"):
            pass
        (commands, _) = links_of(client)
        assert not commands.wire.reloaded


async def lose_connections(server: EmbeddedServer, client: aiodlock.Client) -> None:
    links = links_of(client)
    before = [link.wire for link in links]
    await kill_all(server)

    def back() -> bool:
        pairs = zip(links, before, strict=True)
        return all(link.wire not in (None, old) for link, old in pairs)

    await until(back)


async def test_wakeups_wait_until_commands_are_back(real_store: Store) -> None:
    async with FaultProxy(real_store.url) as proxy, aiodlock.Client(proxy.url) as client:
        commands, wakeups = links_of(client)
        proxy.half_open()  # it takes connections, and answers on none
        seen = len(proxy.connections)
        proxy.cut()
        await until(lambda: len(proxy.connections) > seen, "a new attempt")
        await until(lambda: commands._attempts.failures > 1, "an attempt that failed")
        assert len(proxy.connections) - seen <= commands._attempts.failures
        assert wakeups._attempts.failures == 1
        await proxy.heal()
        await until(lambda: commands.wire and wakeups.wire, within=30.0)


async def test_burst_of_extensions_is_sent_in_slices(
    real_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst does not keep the event loop from others: it has turns between the slices."""
    turns = 0
    sent: dict[int, int] = {}
    taken: dict[int, int] = {}
    counting = True

    def turn() -> None:
        nonlocal turns
        turns += 1
        if counting:
            asyncio.get_running_loop().call_soon(turn)

    async with aiodlock.Client(real_store.url, ttl=60.0) as client:
        leases = [await client.lock(f"burst:{number}").acquire() for number in range(1500)]
        keeper: Any = keeper_of(client)
        extend, on_answer = keeper.store.extend, keeper.on_answer

        def counting_extend(batch: Any) -> Any:
            sent[turns] = sent.get(turns, 0) + len(batch)
            return extend(batch)

        def counting_answer(*arguments: Any) -> None:
            taken[turns] = taken.get(turns, 0) + 1
            on_answer(*arguments)

        monkeypatch.setattr(keeper.store, "extend", counting_extend)
        monkeypatch.setattr(keeper._sender, "_on_answer", counting_answer)
        turn()
        for place in keeper.places.values():
            keeper.extend_now(place)
        await until(lambda: sum(taken.values()) >= len(leases), "all answers")
        counting = False
        assert sum(sent.values()) == len(leases)
        # A slice is 200; where a turn begins and ends is counted by a callback among others.
        assert max(sent.values()) <= 400
        assert max(taken.values()) <= 400
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()


async def test_holders_are_told_at_once_when_the_server_comes_back_empty(
    server: EmbeddedServer,
) -> None:
    """Not at their next beat, a third of the ttl later: others are granted the same names meanwhile."""
    async with aiodlock.Client(server.url, ttl=60.0) as client:
        leases = [await client.lock(f"empty:{number}").acquire() for number in range(20)]
        server.kill()
        server.start()
        await until(lambda: all(lease.lost for lease in leases), "the loss of all", within=5.0)
        assert {lease.lost.reason for lease in leases if lease.lost} == {"gone"}
        for lease in leases:
            with pytest.raises(aiodlock.LockLost):
                await lease.release()


async def test_holders_are_asked_about_once_after_a_reconnection(server: EmbeddedServer) -> None:
    async with FaultProxy(server.url) as proxy, aiodlock.Client(proxy.url, ttl=60.0) as client:
        leases = [await client.lock(f"once:{number}").acquire() for number in range(100)]
        seen = len(proxy.connections)
        await lose_connections(server, client)
        connections = proxy.connections[seen:]

        def asked() -> int:
            return sum(connection.commands["EVALSHA"] for connection in connections)

        await until(lambda: asked() >= len(leases), "an extension of each")
        await asyncio.sleep(0.3)
        assert asked() == len(leases)
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()


async def test_client_enters_over_a_long_way(real_store: Store) -> None:
    """Each answer takes 0.8 s, and entering may take 5 s: that leaves five round trips."""
    async with FaultProxy(real_store.url) as proxy:
        proxy.delay(0.4)
        async with aiodlock.Client(proxy.url, ttl=60.0, close_timeout=1.0) as client:
            async with client.lock("far") as lease:
                assert lease.held


async def test_listing_asks_about_many_names_in_one_script(server: EmbeddedServer) -> None:
    async with aiodlock.Client(server.url, ttl=60.0) as client:
        leases = [await client.lock(f"listed:{number}").acquire() for number in range(120)]
        await ask(server, "CONFIG", "RESETSTAT")
        found = {info.name async for info in client.locks("listed:*")}
        stats = await ask(server, "INFO", "commandstats")
        assert found == {lease.name for lease in leases}
        assert stats["cmdstat_evalsha"]["calls"] <= 3
        # The script reads one key of each name; queues and tokens are asked for together.
        assert stats["cmdstat_hgetall"]["calls"] == len(leases)
        assert stats["cmdstat_mget"]["calls"] <= 3
        assert "cmdstat_xrange" not in stats
        for lease in leases:
            await lease.release()


async def test_listing_tells_of_the_one_queue_among_many_names(server: EmbeddedServer) -> None:
    async with aiodlock.Client(server.url, ttl=60.0) as client:
        leases = [await client.lock(f"listed:{number}").acquire() for number in range(60)]
        waiting = asyncio.create_task(client.lock("listed:7").acquire())
        await until_waiting(client, "listed:7")
        found = {info.name: info async for info in client.locks("listed:*")}
        assert [name for name, info in found.items() if info.waiters] == ["listed:7"]
        assert all(len(info.holders) == 1 and info.token > 0 for info in found.values())
        assert {info.token for info in found.values()} == {lease.token for lease in leases}
        for lease in leases:
            await lease.release()
        await (await waiting).release()


@pytest.mark.parametrize("how", ["time out", "cancel"])
async def test_crowd_of_waiters_comes_and_goes_in_slices(
    real_store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One message each to come and one to go, a slice of them in each turn of the event loop."""
    number = 1500
    loop, turns, counting = asyncio.get_running_loop(), 0, True
    came: dict[int, int] = {}
    went: dict[int, int] = {}
    timeouts: list[asyncio.Timeout] = []
    make_timeout = asyncio.timeout

    def turn() -> None:
        nonlocal turns
        turns += 1
        if counting:
            loop.call_soon(turn)

    def noted_timeout(delay: float | None) -> asyncio.Timeout:
        timeout = make_timeout(delay)
        if delay == 600.0:
            timeouts.append(timeout)
        return timeout

    async with (
        aiodlock.Client(real_store.url, ttl=60.0, waiter_ttl=60.0) as client,
        aiodlock.Client(real_store.url) as elsewhere,
        elsewhere.lock("crowd", ttl=60.0),
        client.lock("other") as other,
    ):
        store: Any = keeper_of(client).store
        acquire, leave_later = store.acquire, store.leave_later

        def counting_acquire(*arguments: Any, **options: Any) -> Any:
            came[turns] = came.get(turns, 0) + 1
            return acquire(*arguments, **options)

        def counting_leave(*arguments: Any, **options: Any) -> Any:
            went[turns] = went.get(turns, 0) + 1
            return leave_later(*arguments, **options)

        monkeypatch.setattr(asyncio, "timeout", noted_timeout)
        monkeypatch.setattr(store, "acquire", counting_acquire)
        monkeypatch.setattr(store, "leave_later", counting_leave)
        turn()
        lock = client.lock("crowd", timeout=600.0)
        waiting = [asyncio.create_task(lock.acquire()) for _ in range(number)]
        requests = session_of(client).requests
        await until(lambda: len(requests) == number + 1, "all asked", within=60.0)
        states = requests.values()
        await until(lambda: sum(r.state is State.WAITING for r in states) == number, within=60.0)
        for timeout, task in zip(timeouts, waiting, strict=True):
            timeout.reschedule(loop.time()) if how == "time out" else task.cancel()
        await asyncio.wait(waiting)
        await until(lambda: len(requests) == 1, "all left", within=60.0)
        counting = False
        assert sum(came.values()) == sum(went.values()) == number
        # A slice is 100; where a turn begins and ends is counted by a callback among others.
        assert max(came.values()) <= 250
        assert max(went.values()) <= 250
        assert other.held
    if how == "cancel":
        assert all(task.cancelled() for task in waiting)
    else:
        assert all(isinstance(task.exception(), aiodlock.AcquireTimeout) for task in waiting)


async def test_lease_is_extended_before_thousands_of_waiters_have_left(
    server: EmbeddedServer,
) -> None:
    """Behind them, it was lost where they took longer than it had left."""
    number = 4000
    async with (
        aiodlock.Client(server.url, ttl=60.0, waiter_ttl=60.0) as client,
        aiodlock.Client(server.url, ttl=60.0) as elsewhere,
        elsewhere.lock("crowd"),
        client.lock("other") as lease,
    ):
        waiting = [asyncio.create_task(client.lock("crowd").acquire()) for _ in range(number)]
        states = session_of(client).requests.values()
        await until(lambda: sum(r.state is State.WAITING for r in states) == number, within=60.0)
        server.pause()
        for task in waiting:
            task.cancel()
        await until(lambda: sum(r.state is State.LEAVING for r in states) == number, within=30.0)
        extending = asyncio.create_task(lease.extend(61.0))
        await asyncio.sleep(0.05)
        server.resume()
        await extending
        assert len(states) > number / 2
        await until(lambda: len(states) == 1, "all left", within=60.0)


async def test_client_is_left_by_a_crowd_of_waiters_in_slices(
    real_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of them hears of it in each turn of the loop, and none of them begins any more."""
    number = 1500
    loop, turns, counting = asyncio.get_running_loop(), 0, True
    went: dict[int, int] = {}
    began: list[aiodlock.Lease] = []

    def turn() -> None:
        nonlocal turns
        turns += 1
        if counting:
            loop.call_soon(turn)

    async def work(lock: aiodlock.Lock) -> None:
        async with lock as lease:
            began.append(lease)

    async with aiodlock.Client(real_store.url) as elsewhere:
        holder = await elsewhere.lock("crowd", ttl=60.0).acquire()
        async with aiodlock.Client(real_store.url, ttl=60.0, waiter_ttl=60.0) as client:
            store: Any = keeper_of(client).store
            leave_later = store.leave_later

            def counting_leave(*arguments: Any, **options: Any) -> Any:
                went[turns] = went.get(turns, 0) + 1
                return leave_later(*arguments, **options)

            monkeypatch.setattr(store, "leave_later", counting_leave)
            lock = client.lock("crowd")
            waiting = [asyncio.create_task(work(lock)) for _ in range(number)]
            states = session_of(client).requests.values()
            await until(
                lambda: sum(r.state is State.WAITING for r in states) == number, within=60.0
            )
            turn()
            releasing = asyncio.create_task(holder.release())  # to one of them, while they leave
        counting = False
        await releasing
        await asyncio.wait(waiting)
        assert {type(task.exception()) for task in waiting} == {aiodlock.ClientClosed}
        assert not began
        assert sum(went.values()) == number
        assert max(went.values()) <= 250
        info = await elsewhere.inspect("crowd")
        assert not info.holders
        assert not info.waiters


@pytest.mark.parametrize("how", ["without a timeout", "with a timeout"])
async def test_waiter_is_few_objects_and_nearly_none_when_its_wait_has_ended(
    real_store: Store, how: str
) -> None:
    """Python's collector looks at all of them in one turn. A task on an ``asyncio.Event`` is 7, and 8."""
    number = 400

    def each(before: int) -> float:
        gc.collect()
        return (len(gc.get_objects()) - before) / number

    async with (
        aiodlock.Client(real_store.url, ttl=60.0, waiter_ttl=60.0) as client,
        aiodlock.Client(real_store.url) as elsewhere,
        elsewhere.lock("crowd", ttl=60.0),
    ):
        requests = session_of(client).requests
        lock = client.lock("crowd", timeout=None if how == "without a timeout" else 3600.0)
        before = each(0) * number
        waiting = [asyncio.create_task(lock.acquire()) for _ in range(number)]
        await until(
            lambda: sum(r.state is State.WAITING for r in requests.values()) == number, within=60.0
        )
        assert each(int(before)) < (16 if how == "without a timeout" else 21)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await until(lambda: not requests, within=60.0)
        assert each(int(before)) < 10


async def test_burst_of_extensions_leaves_few_objects_to_the_collector(
    server: EmbeddedServer,
) -> None:
    """What lives until its answer comes grows old, and then the collector looks at all there is."""
    async with aiodlock.Client(server.url, ttl=60.0) as client:
        leases = [await client.lock(f"old:{number}").acquire() for number in range(3000)]
        keeper: Any = keeper_of(client)
        places = list(keeper.places.values())
        for place in places:
            keeper.extend_now(place)
        deadlines = [place.deadline for place in places]
        gc.collect()
        before = gc.get_stats()[0]["collections"]

        def extended() -> bool:
            return all(place.deadline > old for place, old in zip(places, deadlines, strict=True))

        await until(extended, "an extension of each")
        assert gc.get_stats()[0]["collections"] - before < len(places) / 200
        assert len(keeper._agenda._heap) < 1.5 * len(places), "entries are used again"
        for lease in leases:
            await lease.release()
