"""What a store in memory is besides a store: private or shared, in all loops and threads of one process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

import pytest

from aiodlock import Client, LockLost
from aiodlock.backends.memory import store as memory
from aiodlock.backends.redis import RedisBackend

from ..scenes import PATIENCE, store_of, until, until_held, until_waiting
from ..servers import FAKEREDIS, Store

_T = TypeVar("_T")
_names = count()


@pytest.fixture
def url() -> str:
    """Give the URL of a store that no other test has."""
    return f"memory://test-memory-{next(_names)}"


def in_a_thread(main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine in an event loop of another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(main())).result(PATIENCE)


async def test_store_without_a_name_is_private() -> None:
    async with Client("memory://") as one, Client("memory://") as other:
        async with one.lock("x"):
            assert not await other.lock("x").locked()


async def test_waiter_in_another_thread_is_granted_the_lock_when_it_is_released(url: str) -> None:
    async def wait_for_it() -> int:
        async with Client(url) as client, client.lock("x") as lease:
            return lease.token

    async with Client(url, waiter_ttl=600.0, ttl=600.0) as client:
        async with client.lock("x") as lease:
            other = asyncio.create_task(asyncio.to_thread(in_a_thread, wait_for_it))
            await until_waiting(client, "x")
        # No timer would wake it: its lease as a waiter is long.
        async with asyncio.timeout(PATIENCE):
            assert await other > lease.token


async def test_threads_exclude_each_other(url: str) -> None:
    inside = 0
    seen: list[int] = []

    async def work() -> None:
        nonlocal inside
        async with Client(url) as client:
            for _ in range(50):
                async with client.lock("x") as lease:
                    inside += 1
                    seen.append(lease.token)
                    assert inside == 1
                    await asyncio.sleep(0)
                    inside -= 1

    workers = [asyncio.to_thread(in_a_thread, work) for _ in range(4)]
    await asyncio.gather(*workers)
    assert len(seen) == 200
    assert seen == sorted(set(seen)), "tokens grow with every grant"


async def test_break_is_told_to_a_holder_in_another_thread(url: str) -> None:
    async def hold() -> str:
        async with Client(url, ttl=600.0) as client:
            try:
                async with client.lock("x"):
                    await asyncio.sleep(PATIENCE)
            except LockLost as lost:
                return lost.reason
        return "not lost"

    async with Client(url) as client:
        holding = asyncio.create_task(asyncio.to_thread(in_a_thread, hold))
        await until_held(client, "x")
        assert await client.break_lock("x") == 1
        assert await holding == "broken"


async def test_lease_of_a_loop_that_is_gone_ends_by_itself(url: str) -> None:
    """Its notices go nowhere, and harm nobody."""
    loop = asyncio.new_event_loop()

    async def hold_and_wait() -> None:
        client = await Client(url, ttl=0.5, waiter_ttl=0.5).__aenter__()
        await client.lock("x").acquire()
        waiting = loop.create_task(client.lock("y").acquire())
        await until_waiting(client, "y")
        del waiting

    def run() -> None:
        with pytest.warns(ResourceWarning):  # noqa: PT031
            loop.run_until_complete(hold_and_wait())
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    async with Client(url) as client:
        async with client.lock("y"):
            thread = threading.Thread(target=run)
            thread.start()
            await asyncio.to_thread(thread.join, PATIENCE)
        async with asyncio.timeout(PATIENCE), client.lock("x"), client.lock("y"):
            pass


_FORKED = """
import asyncio, os, sys
import aiodlock

async def enter(client):
    async with client, client.lock("x"):
        pass

def refused(client):
    try:
        asyncio.run(enter(client))
    except RuntimeError as error:
        return "use a server" in str(error)
    return False

made_before = aiodlock.Client("memory://made")
asyncio.run(enter(aiodlock.Client("memory://used")))
child = os.fork()
if not child:
    # One exit code per mistake.
    if not refused(aiodlock.Client("memory://used")):
        os._exit(3)
    if not refused(made_before):
        os._exit(4)
    asyncio.run(enter(aiodlock.Client("memory://new")))
    asyncio.run(enter(aiodlock.Client("memory://")))
    os._exit(0)
asyncio.run(enter(made_before))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_named_store_is_refused_in_a_fork() -> None:
    """A copy of the store would exclude nobody."""
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_names_are_forgotten_when_nothing_is_left_of_them(monkeypatch: Any) -> None:
    store = memory.Store()
    monkeypatch.setattr(memory, "Store", lambda: store)
    monkeypatch.setattr("aiodlock.backends.memory.sources.Store", lambda: store)
    moment = store.now_us()
    monkeypatch.setattr(store, "now_us", lambda: moment)
    async with Client("memory://", token_retention=100.0) as client:
        for number in range(100):
            async with client.lock(f"name {number}"):
                pass
        assert len(store.known()) == 100
        moment += 200_000_000
        for _ in range(100):
            async with client.lock("one more"):
                pass
        assert [key.name for key in store.known()] == ["one more"]


def test_unused_stores_are_dropped_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = memory._Shared()
    user = threading.Event()  # anything that is collected when it is not referenced any more
    shared.get("used", user)
    for number in range(10 * memory._MANY):
        shared.get(f"unused {number}", threading.Event())
    assert len(shared.stores) <= memory._MANY + 1
    assert "used" in shared.stores


@pytest.mark.stores(FAKEREDIS)
async def test_ready_fakeredis_runs_the_scripts(store: Store) -> None:
    async with Client(store.source) as client, client.lock("x"):
        assert client._core.session is not None
        assert isinstance(store_of(client), RedisBackend)
        raw = await store.raw()
        assert await raw.exists("aiodlock:2:lock:{x}:state")


async def test_loop_of_acquisitions_lets_other_tasks_run() -> None:
    async with Client("memory://") as client:
        turns = 0

        async def acquire_for_ever() -> None:
            nonlocal turns
            while True:
                async with client.lock("x"):
                    turns += 1

        task = asyncio.create_task(acquire_for_ever())
        await until(lambda: turns > 10)
        task.cancel()
        await asyncio.wait([task])
        assert not await client.lock("x").locked()
