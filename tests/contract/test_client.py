"""`Client`: sources, entering, leaving, loops and forks."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis.asyncio

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import SOON, is_free, takes, until, until_cancelled, until_held, until_waiting
from ..servers import BEYOND, Servers, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


def in_a_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the coroutine on a loop of another thread; return what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(make()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


# Sources


async def test_private_memory_stores_are_not_shared() -> None:
    async with aiodlock.Client("memory://") as one, aiodlock.Client("memory://") as other:
        async with one.lock("x"):
            assert not await other.lock("x").locked()
            await (await other.lock("x").acquire_nowait()).release()


async def test_memory_stores_are_shared_by_name() -> None:
    async with (
        aiodlock.Client("memory://contract-a") as one,
        aiodlock.Client("memory://contract-a") as same,
        aiodlock.Client("memory://contract-b") as other,
    ):
        async with one.lock("x"):
            assert await same.lock("x").locked()
            assert not await other.lock("x").locked()


async def test_a_client_on_a_private_memory_store_may_be_entered_again() -> None:
    client = aiodlock.Client("memory://")
    for _ in range(2):
        async with client, client.lock("x"):
            pass


async def test_named_memory_store_works_on_two_loops() -> None:
    async def lock() -> int:
        async with aiodlock.Client("memory://contract-c") as client:
            async with client.lock("x") as lease:
                return lease.token

    first = await lock()
    second = await asyncio.to_thread(in_a_thread, lock)
    assert isinstance(first, int)
    assert isinstance(second, int), second


@pytest.mark.scripted
async def test_ready_redis_is_used_and_still_owned_by_the_caller(store: Store) -> None:
    raw = await store.raw()
    async with aiodlock.Client(raw) as client:
        async with client.lock("x"):
            async with aiodlock.Client(store.source) as other:
                assert await other.lock("x").locked()
    assert await raw.ping()


@pytest.mark.scripted
async def test_ready_redis_without_decoded_replies(store: Store) -> None:
    raw = await store.raw(decode_responses=False)
    async with aiodlock.Client(raw) as client, client.lock("x") as lease:
        assert (await client.inspect("x")).token == lease.token
    assert await raw.ping()


async def test_ready_redis_brings_its_database(real_store: Store) -> None:
    raw = redis.asyncio.Redis.from_url(real_store.url.replace("db=0", "db=3"))
    try:
        async with aiodlock.Client(raw) as client, client.lock("x"):
            assert await raw.keys("aiodlock*")
            async with aiodlock.Client(real_store.url) as other:
                assert not await other.lock("x").locked()
    finally:
        await raw.aclose()


@pytest.mark.scripted
async def test_two_prefixes_are_two_worlds(store: Store, make_client: MakeClient) -> None:
    one, other = await make_client(prefix="one"), await make_client(prefix="other")
    async with one.lock("x"), other.lock("x"):
        assert [info.name async for info in one.locks()] == ["x"]
    raw = await store.raw()
    assert {str(key).split(":")[0] for key in await raw.keys("*")} == {"one", "other"}


@pytest.mark.parametrize("source", ["", "http://x", "localhost:6379", "memory", "redis"])
def test_a_source_that_is_no_url_of_ours_is_refused(source: str) -> None:
    with pytest.raises(ValueError):
        aiodlock.Client(source)


@pytest.mark.parametrize("source", [None, 1, 1.5, object(), b"redis://localhost", {"a": 1}])
def test_a_source_of_another_type_is_refused(source: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        aiodlock.Client(source)


# Constructing and entering


def test_constructing_needs_no_loop_and_no_server() -> None:
    client = aiodlock.Client("redis://127.0.0.1:1/0")
    assert client.lock("x").name == "x"
    assert client.rwlock("x").read.mode == "shared"
    client.multilock("a", "b")
    client.semaphore("s", 2)
    client.election("e")


def test_locks_made_before_entering_work_in_every_loop_later(store_url: str) -> None:
    client = aiodlock.Client(store_url)
    lock, shared = client.lock("x"), client.rwlock("y").read
    both, semaphore = client.multilock("a", "b"), client.semaphore("s", 1)
    tokens = []

    async def use() -> None:
        async with client:
            async with lock as lease, shared, both, semaphore:
                tokens.append(lease.token)

    asyncio.run(use())
    asyncio.run(use())
    assert len(tokens) == 2


@pytest.fixture(params=["memory", "valkey9"])
def store_url(request: pytest.FixtureRequest, servers: Servers) -> str:
    """Give the URL of an empty store without a running loop."""
    name: str = request.param
    chosen: str = request.config.getoption("--store")
    if chosen and name not in chosen.split(","):
        pytest.skip("another store was chosen")
    url: str = servers.store(name).url
    return url


async def test_entering_where_nothing_listens_raises_within_five_seconds(proxy: FaultProxy) -> None:
    client = aiodlock.Client(proxy.url)
    await proxy.refuse()
    async with takes(at_most=5.5):
        with pytest.raises(aiodlock.BackendUnavailable) as raised:
            await client.__aenter__()
    assert isinstance(raised.value, ConnectionError)
    assert raised.value.__cause__ is not None, "the driver's error"
    twin = pickle.loads(pickle.dumps(raised.value))
    assert (type(twin), str(twin)) == (type(raised.value), str(raised.value))
    await proxy.accept()
    async with client, client.lock("x"):
        pass


async def test_entering_where_nobody_answers_raises_within_five_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = aiodlock.Client(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        async with takes(at_most=5.5):
            with pytest.raises(aiodlock.BackendUnavailable):
                await client.__aenter__()


async def test_entering_and_leaving_in_different_tasks(store: Store) -> None:
    client = aiodlock.Client(store.source)
    entered = await asyncio.create_task(client.__aenter__())
    assert entered is client
    async with client.lock("x"):
        pass
    await asyncio.create_task(client.__aexit__(None, None, None))
    with pytest.raises(aiodlock.ClientClosed):
        await client.lock("x").acquire()


async def test_a_left_client_may_be_entered_again(store: Store) -> None:
    client = aiodlock.Client(store.source)
    tokens = []
    for _ in range(3):
        async with client, client.lock("x") as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_entering_twice_at_once_is_refused_and_harms_nothing(store: Store) -> None:
    async with aiodlock.Client(store.source) as client:
        with pytest.raises(RuntimeError):
            await client.__aenter__()
        async with client.lock("x"):
            pass


async def test_use_before_entering_raises_runtime_error(store: Store) -> None:
    client = aiodlock.Client(store.source)
    for use in (client.lock("x").acquire(), client.inspect("x"), client.break_lock("x")):
        with pytest.raises(RuntimeError) as raised:
            await use
        assert isinstance(raised.value, aiodlock.ClientClosed)
        assert raised.value.name == "x"


async def test_every_use_after_leaving_raises_client_closed(store: Store) -> None:
    async with aiodlock.Client(store.source) as client:
        pass
    uses: list[Coroutine[Any, Any, Any]] = [
        client.lock("x").acquire(),
        client.lock("x").acquire_nowait(),
        client.lock("x").locked(),
        client.rwlock("x").read.acquire(timeout=0),
        client.semaphore("x", 1).acquire(),
        client.inspect("x"),
        client.break_lock("x"),
        client.check_sequencer("x:exclusive:1"),
    ]
    for use in uses:
        with pytest.raises(aiodlock.ClientClosed) as closed:
            await use
        assert closed.value.name == "x"
        assert "'x'" in str(closed.value)
    with pytest.raises(aiodlock.ClientClosed):
        await client.multilock("x", "y").acquire()
    with pytest.raises(aiodlock.ClientClosed):
        async for _ in client.locks():
            pass
    with pytest.raises(aiodlock.ClientClosed):
        async with client.election("x").lead():
            pass


async def test_use_from_another_loop_raises_runtime_error(client: aiodlock.Client) -> None:
    lock = client.lock("x")
    async with lock as lease:

        async def exits() -> None:
            await client.__aexit__(None, None, None)

        uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: client.lock("y").acquire(),
            lambda: lock.acquire(timeout=0),
            lambda: lock.acquire_nowait(),
            lambda: lock.locked(),
            lambda: client.inspect("x"),
            lambda: client.break_lock("x"),
            lambda: client.semaphore("x", 1).acquire(),
            lambda: client.multilock("y", "z").acquire(),
            lambda: lease.extend(),
            lambda: lease.release(),
            exits,
        ]
        for use in uses:
            error = await asyncio.to_thread(in_a_thread, use)
            assert isinstance(error, RuntimeError), error
        assert lease.held
    assert await is_free(client, "x", "y")


async def test_use_after_a_fork_raises_runtime_error(client: aiodlock.Client) -> None:
    lease = await client.lock("x").acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (client.lock("y").acquire(), lease.release(), client.inspect("x")):
            try:
                use.send(None)
                said.append("went on")
            except RuntimeError:
                said.append("RuntimeError")
            except BaseException as error:
                said.append(type(error).__name__)
        os.write(writing, ",".join(said).encode())
        os._exit(0)
    os.close(writing)
    await asyncio.to_thread(os.waitpid, child, 0)
    with os.fdopen(reading) as told:
        assert told.read() == "RuntimeError,RuntimeError,RuntimeError"
    assert lease.held
    await lease.release()


async def test_a_forked_child_may_enter_a_client_of_its_own(real_store: Store) -> None:
    client = aiodlock.Client(real_store.url)
    async with client, client.lock("x"):
        child = os.fork()
        if child == 0:
            code = 3
            try:

                async def look() -> bool:
                    async with aiodlock.Client(real_store.url) as own:
                        return await own.lock("x").locked()

                loop = asyncio.new_event_loop()
                code = 0 if loop.run_until_complete(look()) else 1
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


# Leaving


async def test_leaving_ends_every_wait_with_client_closed(
    store: Store, make_client: MakeClient
) -> None:
    holder = await make_client()
    async with holder.lock("x"), holder.semaphore("s", 1), aiodlock.Client(store.source) as client:
        waits = [
            asyncio.ensure_future(wait)
            for wait in (
                client.lock("x").acquire(),
                client.rwlock("x").read.acquire(timeout=30),
                client.multilock("x", "y").acquire(),
                client.semaphore("s", 1).acquire(),
            )
        ]
        await until_waiting(holder, "x", 3)
        async with takes(at_most=SOON):
            await client.__aexit__(None, None, None)
            outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [aiodlock.ClientClosed] * 4
        await client.__aenter__()
    assert await is_free(holder, "x", "y")


async def test_leaving_cancels_bodies_that_hold_and_releases(
    store: Store, make_client: MakeClient
) -> None:
    watcher = await make_client()
    client = await aiodlock.Client(store.source).__aenter__()
    begun, cleaned = asyncio.Event(), []

    async def body() -> None:
        async with client.lock("x"):
            begun.set()
            try:
                await until_cancelled()
            finally:
                await asyncio.sleep(0.05)
                cleaned.append(await watcher.lock("x").locked())

    task = asyncio.create_task(body())
    await begun.wait()
    async with takes(at_most=SOON):
        await client.__aexit__(None, None, None)
    assert cleaned == [True], "the name was still ours while the body cleaned up"
    with pytest.raises(aiodlock.LockLost) as raised:
        await task
    assert raised.value.reason == "closed"
    assert raised.value.name == "x"
    assert await is_free(watcher, "x")


async def _goes_on_when_cancelled(
    client: aiodlock.Client,
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Begin a body that cleans up, when it is cancelled, until the event is set."""
    began, enough = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        async with client.lock("x"):
            began.set()
            try:
                await until_cancelled()
            finally:
                await enough.wait()

    task = asyncio.create_task(body())
    await began.wait()
    return task, enough


async def test_leaving_waits_at_most_close_timeout_for_bodies(store: Store) -> None:
    client = await aiodlock.Client(store.source, close_timeout=0.3).__aenter__()
    task, enough = await _goes_on_when_cancelled(client)
    async with takes(at_least=0.25, at_most=0.3 + SOON):
        await client.__aexit__(None, None, None)
    assert not task.done()
    enough.set()
    with pytest.raises(aiodlock.LockLost):
        await task


async def test_leaving_tells_bare_leases(store: Store, make_client: MakeClient) -> None:
    watcher = await make_client()
    async with aiodlock.Client(store.source) as client:
        lease = await client.lock("x").acquire()
        telling = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
    assert (await telling).reason == "closed"
    assert not lease.held
    with pytest.raises(aiodlock.LockLost):
        lease.ensure_held()
    assert await is_free(watcher, "x")


async def test_leaving_stops_all_tasks(store: Store) -> None:
    before = asyncio.all_tasks()
    async with aiodlock.Client(store.source) as client:
        async with client.lock("x"), client.rwlock("y").read:
            pass
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_what_the_client_block_raises_passes_through_unchanged(store: Store) -> None:
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        async with aiodlock.Client(store.source) as client, client.lock("x"):
            raise mine
    assert raised.value is mine


async def test_a_client_left_within_a_body_of_the_same_task(
    store: Store, make_client: MakeClient
) -> None:
    """Leaving from inside a held block may not wait for itself for ever."""
    watcher = await make_client()
    client = await aiodlock.Client(store.source, close_timeout=0.5).__aenter__()
    async with takes(at_most=0.5 + SOON):
        with pytest.raises((aiodlock.LockLost, asyncio.CancelledError)):
            async with client.lock("x"):
                await client.__aexit__(None, None, None)
    await until(lambda: is_free(watcher, "x"))


async def test_a_dead_background_task_ends_every_wait_and_body_with_backend_error(
    store: Store, make_client: MakeClient
) -> None:
    watcher = await make_client()
    others = asyncio.all_tasks()
    client = await aiodlock.Client(store.source).__aenter__()
    background = asyncio.all_tasks() - others
    assert background

    async def body() -> None:
        async with client.lock("x"):
            await until_cancelled()

    holding = asyncio.create_task(body())
    await until_held(watcher, "x")
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(watcher, "x")
    for task in background:
        task.cancel()
    async with takes(at_most=SOON):
        outcomes = await asyncio.gather(holding, waiting, return_exceptions=True)
    assert isinstance(outcomes[1], aiodlock.BackendError), outcomes
    assert isinstance(outcomes[0], aiodlock.BackendError), outcomes
    await asyncio.gather(client.__aexit__(None, None, None), return_exceptions=True)


async def test_a_client_has_two_connections_however_many_wait(real_store: Store) -> None:
    raw = await real_store.raw()
    before = len(await raw.client_list())
    async with aiodlock.Client(real_store.url) as client:
        async with client.lock("x"):
            waits = [asyncio.create_task(client.lock("x").acquire()) for _ in range(30)]
            held = [await client.lock(f"name {number}").acquire() for number in range(30)]
            await until_waiting(client, "x", 30)
            assert len(await raw.client_list()) - before <= 2
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            for lease in held:
                await lease.release()


async def test_configuration_is_changed_only_when_asked_for(real_store: Store) -> None:
    raw = await real_store.raw()
    async with aiodlock.Client(real_store.url):
        assert (await raw.config_get("notify-keyspace-events"))["notify-keyspace-events"] == ""
        assert not await raw.keys("*"), "the probe leaves no key behind"
    async with aiodlock.Client(real_store.url, configure_notifications=True):
        assert (await raw.config_get("notify-keyspace-events"))["notify-keyspace-events"] != ""


async def test_a_cancelled_entering_leaves_nothing(proxy: FaultProxy) -> None:
    proxy.stall()
    client = aiodlock.Client(proxy.url)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.__aenter__()
    assert not [task for task in asyncio.all_tasks() if "aiodlock" in task.get_name()]
    await proxy.heal()
    async with client, client.lock("x"):
        pass


async def test_close_timeout_of_nothing_does_not_wait(store: Store) -> None:
    client = await aiodlock.Client(store.source, close_timeout=0).__aenter__()
    task, enough = await _goes_on_when_cancelled(client)
    async with takes(at_most=SOON):
        await client.__aexit__(None, None, None)
    enough.set()
    with pytest.raises(aiodlock.LockLost):
        await task


def test_client_and_what_it_has_made_say_that_each_process_needs_its_own() -> None:
    client = aiodlock.Client("memory://")
    for one in (client, client.lock("x"), client.rwlock("x"), client.once("x", keep=1)):
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="make a client in each process"):
                duplicate(one)
