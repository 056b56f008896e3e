"""A client's life: entering, leaving, again, forks, loops, sources."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest
import redis.asyncio

import aiodlock
from aiodlock import (
    BackendUnavailable,
    Client,
    ClientClosed,
    LockError,
    LockLost,
    WouldBlock,
)

from ..conftest import MakeClient
from ..scenes import takes, until, until_cancelled, until_free, until_waiting
from ..servers import Store


def in_a_loop_of_its_own(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine like another program's main."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def _use(client: Client) -> int:
    async with client.lock("x") as lease:
        return lease.token


# -- entering --------------------------------------------------------------------------------------


async def test_client_that_was_not_entered_is_closed(store: Store) -> None:
    client = Client(store.source)
    lock = client.lock("x")
    assert "closed" in repr(client)
    attempts: list[Coroutine[Any, Any, object]] = [
        lock.acquire(),
        lock.acquire_nowait(),
        lock.release(),
        lock.locked(),
        client.inspect("x"),
        client.break_lock("x"),
        client.check_sequencer("x:exclusive:1"),
    ]
    for attempt in attempts:
        with pytest.raises(ClientClosed):
            await attempt
    with pytest.raises(ClientClosed):
        assert [info async for info in client.locks()]


async def test_locks_made_before_entering_work(store: Store) -> None:
    client = Client(store.source)
    lock = client.lock("x")
    async with client as entered:
        assert entered is client
        assert "open" in repr(client)
        async with lock:
            pass


async def test_client_is_entered_again_after_it_was_left(store: Store) -> None:
    client = Client(store.source)
    lock = client.lock("x")
    tokens = []
    for _ in range(3):
        async with client, lock as lease:
            tokens.append(lease.token)
        with pytest.raises(ClientClosed):
            await lock.acquire()
    assert tokens == sorted(set(tokens))


async def test_client_is_not_entered_twice_at_a_time(store: Store) -> None:
    async with Client(store.source) as client:
        with pytest.raises(RuntimeError):
            await client.__aenter__()
        await _use(client)


async def test_client_is_entered_and_left_in_different_tasks(store: Store) -> None:
    client = Client(store.source)
    await asyncio.create_task(client.__aenter__())
    await _use(client)
    await asyncio.create_task(client.__aexit__(None, None, None))
    with pytest.raises(ClientClosed):
        await _use(client)


def test_client_is_entered_again_on_another_loop() -> None:
    client = Client("memory://")
    lock = client.lock("x")

    async def main() -> None:
        async with client, lock:
            pass

    in_a_loop_of_its_own(main())
    in_a_loop_of_its_own(main())


@pytest.mark.real_store
async def test_real_client_is_entered_again_on_another_loop(store: Store) -> None:
    client = Client(store.source)
    async with client:
        first = await _use(client)
    second = []

    async def main() -> None:
        async with client:
            second.append(await _use(client))

    await asyncio.to_thread(in_a_loop_of_its_own, main())
    assert second[0] > first


async def test_use_from_another_loop_is_a_runtime_error(client: Client) -> None:
    async def elsewhere() -> None:
        for attempt in (client.lock("x").acquire, client.lock("x").locked):
            with pytest.raises(RuntimeError) as error:
                await attempt()
            assert not isinstance(error.value, LockError)

    await asyncio.to_thread(in_a_loop_of_its_own, elsewhere())
    await _use(client)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_use_after_a_fork_is_a_runtime_error(client: Client) -> None:
    lock = client.lock("x")
    async with lock as lease:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                coroutine = lock.acquire()
                try:
                    coroutine.send(None)
                except LockError:
                    code = 2
                except RuntimeError:
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
        assert os.waitstatus_to_exitcode(status) == 0
        await lease.extend()
        assert lease.held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_lease_is_not_held_in_a_forked_child(client: Client) -> None:
    """The parent may release it at any moment, and the child would not hear of that."""
    async with client.lock("x") as lease:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                told = lease.held, lease.remaining()
                try:
                    lease.ensure_held()
                except RuntimeError as error:
                    code = 0 if told == (False, 0.0) and "fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
        assert os.waitstatus_to_exitcode(status) == 0
        assert lease.held


# -- a store that is away --------------------------------------------------------------------------


async def test_entering_fails_within_5_seconds_when_nobody_answers() -> None:
    with socket.socket() as unused, socket.socket() as silent:
        unused.bind(("127.0.0.1", 0))  # refuses connections, as it does not listen
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        await asyncio.gather(*(_fails_to_enter(server) for server in (unused, silent)))


async def _fails_to_enter(server: socket.socket) -> None:
    client = Client(f"redis://user:s3cret@127.0.0.1:{server.getsockname()[1]}")
    async with takes(at_most=5.0):
        with pytest.raises(BackendUnavailable) as error:
            await client.__aenter__()
    assert isinstance(error.value, ConnectionError)
    assert "s3cret" not in str(error.value)
    assert error.value.__cause__ is not None
    with pytest.raises(ClientClosed):
        await _use(client)


async def test_entering_can_be_cancelled() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await Client(f"redis://127.0.0.1:{silent.getsockname()[1]}").__aenter__()


# -- leaving ---------------------------------------------------------------------------------------


async def test_leaving_ends_waits_and_bodies_and_releases(
    store: Store, make_client: MakeClient
) -> None:
    other = await make_client()
    client = Client(store.source)
    await client.__aenter__()
    entered = asyncio.Event()
    cleaned = []

    async def body() -> None:
        async with client.lock("x"):
            entered.set()
            try:
                await until_cancelled()
            finally:
                await other.inspect("x")
                cleaned.append(True)

    holding = asyncio.create_task(body())
    await entered.wait()
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(other, "x")
    await client.__aexit__(None, None, None)
    assert cleaned == [True]
    with pytest.raises(ClientClosed) as closed:
        await waiting
    assert closed.value.name == "x"
    with pytest.raises(LockLost) as lost:
        await holding
    assert lost.value.reason == "closed"
    info = await other.inspect("x")
    assert not info.holders
    assert not info.waiters


async def test_waiter_granted_while_others_are_told_that_the_client_is_left_begins_no_body(
    store: Store, make_client: MakeClient
) -> None:
    """Thousands are told in slices: those whose slice comes late may be granted before."""
    other = await make_client()
    holder = await other.lock("x").acquire()
    began: list[aiodlock.Lease] = []

    async def work(lock: aiodlock.Lock) -> None:
        async with lock as lease:
            began.append(lease)

    client = await make_client()
    waiting = asyncio.create_task(work(client.lock("x")))
    await until_waiting(other, "x")
    session = client._core.session
    assert session is not None
    session.closing = True
    await holder.release()
    with pytest.raises(ClientClosed):
        await waiting
    await client.__aexit__(None, None, None)
    assert not began
    await until_free(other, "x")


async def test_leaving_releases_bare_leases(store: Store, make_client: MakeClient) -> None:
    other = await make_client()
    async with Client(store.source) as client:
        lease = await client.lock("x").acquire()
    assert not await other.lock("x").locked()
    assert not lease.held
    assert lease.lost is not None
    assert lease.lost.reason == "closed"


async def test_leaving_waits_no_longer_than_close_timeout(
    store: Store, make_client: MakeClient
) -> None:
    other = await make_client()
    client = Client(store.source, close_timeout=0.2)
    await client.__aenter__()
    entered, enough = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with client.lock("x"):
            entered.set()
            try:
                await until_cancelled()
            finally:
                await enough.wait()

    stubborn = asyncio.create_task(body())
    await entered.wait()
    async with takes(at_least=0.19, at_most=0.5):
        await client.__aexit__(None, None, None)
    await until_free(other, "x")
    enough.set()
    with pytest.raises(LockLost):
        await stubborn


async def test_leaving_from_inside_a_body_does_not_hang(store: Store) -> None:
    client = Client(store.source)
    await client.__aenter__()
    async with takes(at_most=0.5):  # far less than close_timeout
        with pytest.raises(LockLost) as lost:
            async with client.lock("x"):
                await client.__aexit__(None, None, None)
    assert lost.value.reason == "closed"


async def test_leaving_in_a_task_that_the_body_awaits_releases(
    store: Store, make_client: MakeClient
) -> None:
    other = await make_client()
    client = Client(store.source)
    await client.__aenter__()
    # The loss cancels the body, and through it the task that leaves the client.
    with pytest.raises(LockLost) as lost:
        async with client.lock("x", ttl=60):
            await asyncio.create_task(client.__aexit__(None, None, None))
    assert lost.value.reason == "closed"
    await until_free(other, "x")


@pytest.mark.parametrize("by", ["asyncio", "anyio"])
async def test_leaving_that_is_cancelled_lets_bodies_clean_up_and_releases(
    store: Store, make_client: MakeClient, by: str
) -> None:
    other = await make_client()
    client = Client(store.source)
    await client.__aenter__()
    entered, losing, enough = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with client.lock("x", ttl=60):
            entered.set()
            try:
                await until_cancelled()
            finally:
                losing.set()
                await enough.wait()

    async def leave() -> None:
        if by == "asyncio":
            await client.__aexit__(None, None, None)
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.05, scope.cancel)
            await client.__aexit__(None, None, None)
        assert scope.cancelled_caught

    cleaning = asyncio.create_task(body())
    await entered.wait()
    leaving = asyncio.create_task(leave())
    await losing.wait()
    if by == "asyncio":
        leaving.cancel()
    asyncio.get_running_loop().call_later(0.1, enough.set)
    (ended,) = await asyncio.gather(leaving, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError) == (by == "asyncio")
    with pytest.raises(LockLost):
        await cleaning
    await until_free(other, "x")


async def test_exception_of_the_clients_body_comes_out(store: Store) -> None:
    async def body() -> None:
        async with Client(store.source) as client:
            await client.lock("x").acquire()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await body()


async def test_leaving_twice_is_harmless(store: Store) -> None:
    client = Client(store.source)
    await client.__aenter__()
    await client.__aexit__(None, None, None)
    await client.__aexit__(None, None, None)


# -- sources ---------------------------------------------------------------------------------------


async def test_memory_without_a_name_is_private() -> None:
    async with Client("memory://") as one, Client("memory://") as other:
        async with one.lock("x"):
            lease = await asyncio.create_task(other.lock("x").acquire_nowait())
            await lease.release()


async def test_memory_of_one_name_is_shared() -> None:
    async with Client("memory://life") as one, Client("memory://life") as other:
        async with one.lock("x"):
            with pytest.raises(WouldBlock):
                await asyncio.create_task(other.lock("x").acquire_nowait())
    async with Client("memory://elsewhere") as third:
        assert not await third.lock("x").locked()


@pytest.mark.real_store
@pytest.mark.parametrize("decode", [True, False])
async def test_ready_redis_client_stays_the_callers(store: Store, decode: bool) -> None:
    ready = redis.asyncio.Redis.from_url(store.url, decode_responses=decode)
    try:
        await ready.set("mine", "1")
        async with Client(ready) as client:
            async with client.lock("x"):
                waiting = asyncio.create_task(client.lock("x").acquire())
                await until_waiting(client, "x")
                assert await ready.get("mine") == ("1" if decode else b"1")
            await (await waiting).release()
        assert await ready.get("mine") == ("1" if decode else b"1")
        async with Client(ready) as client:
            await _use(client)
    finally:
        await ready.aclose()


# -- many ------------------------------------------------------------------------------------------


@pytest.mark.real_store
@pytest.mark.stores("valkey9", "redis70")
async def test_2000_waiters_use_two_connections_few_commands_and_are_served_in_order(
    store: Store, make_client: MakeClient
) -> None:
    raw = await store.raw()
    before = len(await raw.client_list())
    client = await make_client()
    lock = client.lock("x")
    order: list[int] = []

    async def take(number: int) -> None:
        async with lock:
            order.append(number)

    first = await lock.acquire()
    tasks = [asyncio.create_task(take(number)) for number in range(2000)]
    await until_waiting(client, "x", 2000)
    assert len(await raw.client_list()) - before <= 2

    async def scripts_run() -> int:
        stats = await raw.info("commandstats")
        return sum(
            stats[f"cmdstat_{name}"]["calls"]
            for name in ("evalsha", "eval")
            if f"cmdstat_{name}" in stats
        )

    # Time itself is under test: over more than one beat (a third of 10 s) of every waiter.
    started, ran = time.monotonic(), await scripts_run()
    await asyncio.sleep(4)
    rate = (await scripts_run() - ran) / (time.monotonic() - started) / 2000
    assert rate < 0.5
    await first.release()
    await asyncio.gather(*tasks)
    assert order == list(range(2000))
    await until(lambda: client._core.session is not None and not client._core.session.requests)


async def test_leaving_the_client_in_a_forked_child_releases_nothing_of_the_parent(
    client: aiodlock.Client,
) -> None:
    lease = await client.lock("x", on_lost="flag").acquire()
    session = client._core.session
    assert session is not None
    session.pid += 1  # as a child sees it
    with pytest.raises(RuntimeError, match="fork"):
        await client.__aexit__(None, None, None)
    session.pid -= 1
    client._core.session = session
    assert lease.held
    await lease.release()


async def test_leaving_the_client_waits_for_a_body_that_is_only_flagged(
    store: Store, client: aiodlock.Client
) -> None:
    leaving = aiodlock.Client(store.source)
    await leaving.__aenter__()
    begun, told, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with leaving.lock("x", on_lost="flag") as lease:
            begun.set()
            await lease.wait_lost()
            told.set()
            await finish.wait()

    working = asyncio.create_task(body())
    await begun.wait()
    closing = asyncio.create_task(leaving.__aexit__(None, None, None))
    await told.wait()
    with pytest.raises(aiodlock.WouldBlock):
        await client.lock("x").acquire_nowait()
    finish.set()
    with pytest.raises(aiodlock.LockLost, match="closed"):
        await working
    await closing
    await (await client.lock("x").acquire_nowait()).release()


@pytest.mark.stores("valkey9")
async def test_leaving_without_close_timeout_releases_thousands_of_bare_leases(
    client: Client, make_client: MakeClient
) -> None:
    leaving = await make_client(close_timeout=0)
    leases = await asyncio.gather(*(leaving.lock(f"bare:{i}").acquire() for i in range(3000)))
    await leaving.__aexit__(None, None, None)
    assert len(leases) == 3000
    assert [info.name async for info in client.locks("bare:*")] == []
