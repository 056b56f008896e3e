"""Order of arrival, nobody barges, no herd, and what the dead cost."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import AsyncIterator

import pytest

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import (
    LASTING,
    PATIENCE,
    SOON,
    cancelled,
    granted_at,
    held_elsewhere,
    settled,
    stalls,
    takes,
    until,
    until_held,
    until_waiting,
)
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


class Queue:
    """Tasks that ask for a lock one after another, and the order in which they got it."""

    def __init__(self, watcher: aiodlock.Client, name: str) -> None:
        self.order: list[str] = []
        self.may_leave = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self._watcher, self._name = watcher, name

    async def ask(self, label: str, lock: aiodlock.Lock) -> asyncio.Task[None]:
        before = len((await self._watcher.inspect(self._name)).waiters)

        async def take() -> None:
            async with lock:
                self.order.append(label)
                await self.may_leave.wait()

        task = asyncio.create_task(take())
        self.tasks.append(task)
        await until_waiting(self._watcher, self._name, before + 1)
        return task

    async def end(self) -> None:
        self.may_leave.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_grants_follow_the_order_of_arrival_across_clients(make_client: MakeClient) -> None:
    clients = [await make_client() for _ in range(3)]
    queue = Queue(clients[0], "x")
    async with held_elsewhere(clients[0].lock("x")):
        for number in range(9):
            await queue.ask(str(number), clients[number % 3].lock("x"))
    await queue.end()
    assert queue.order == [str(number) for number in range(9)]


async def test_a_newcomer_does_not_barge(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("x", owner="first").acquire()
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(client, "x")
    await lease.release()
    with pytest.raises(aiodlock.WouldBlock):
        await other.lock("x").acquire_nowait()
    await (await waiting).release()


async def test_a_reader_does_not_pass_a_waiting_writer(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    queue = Queue(client, "x")
    async with held_elsewhere(client.rwlock("x").read):
        await queue.ask("writer", client.lock("x"))
        for attempt in (
            other.rwlock("x").read.acquire_nowait(),
            other.rwlock("x").read.acquire(timeout=0),
        ):
            with pytest.raises((aiodlock.WouldBlock, aiodlock.AcquireTimeout)):
                await attempt
        await queue.ask("reader", other.rwlock("x").read)
        assert queue.order == []
    await until(lambda: queue.order == ["writer"])
    await queue.end()
    assert queue.order == ["writer", "reader"]


async def test_shared_requests_at_the_head_are_granted_together(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    queue = Queue(client, "x")
    async with held_elsewhere(client.lock("x")):
        for number in range(4):
            await queue.ask("r", (client, other)[number % 2].rwlock("x").read)
        await queue.ask("W", client.lock("x"))
        await queue.ask("r", other.rwlock("x").read)
    await until(lambda: len(queue.order) == 4)
    info = await client.inspect("x")
    assert [holder.mode for holder in info.holders] == ["shared"] * 4
    assert [waiter.mode for waiter in info.waiters] == ["exclusive", "shared"]
    await queue.end()
    assert queue.order == ["r", "r", "r", "r", "W", "r"]


async def test_when_a_waiting_writer_gives_up_the_readers_behind_it_get_in(
    client: aiodlock.Client,
) -> None:
    queue = Queue(client, "x")
    async with held_elsewhere(client.rwlock("x").read):
        writer = await queue.ask("W", client.lock("x"))
        await queue.ask("r", client.rwlock("x").read)
        await queue.ask("r", client.rwlock("x").read)
        async with takes(at_most=SOON):
            await cancelled(writer)
            await until(lambda: queue.order == ["r", "r"])
    await queue.end()


async def test_a_waiter_that_gives_up_does_not_hold_up_those_behind(
    client: aiodlock.Client,
) -> None:
    queue = Queue(client, "x")
    async with held_elsewhere(client.lock("x")):
        for label in "abc":
            await queue.ask(label, client.lock("x"))
        await cancelled(queue.tasks[1])
    await queue.end()
    assert queue.order == ["a", "c"]


async def test_readers_who_come_and_go_do_not_starve_a_writer(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    done = asyncio.Event()

    async def read(which: aiodlock.Client) -> None:
        while not done.is_set():
            async with which.rwlock("x").read:
                await asyncio.sleep(0.002)

    readers = [asyncio.create_task(read(which)) for which in (client, other) for _ in range(4)]
    await until_held(client, "x")
    async with client.lock("x", timeout=PATIENCE):
        done.set()
    await asyncio.gather(*readers)


@pytest.mark.stores("valkey9")
async def test_a_release_wakes_whom_it_grants_and_one_other_at_most(proxy: FaultProxy) -> None:
    async with held_clients(proxy, 8) as clients:
        watcher = clients[0]
        waits = []
        async with held_elsewhere(watcher.lock("x")):
            for number, client in enumerate(clients[1:]):
                waits.append(asyncio.create_task(client.lock("x").acquire()))
                await until_waiting(watcher, "x", number + 1)
            await settled(*clients)
            proxy.forget()
        await waits[0]
        await settled(*clients)
        scripts = [
            command
            for command in proxy.log
            if command.name.startswith("EVAL") and b"{x}" in command.raw
        ]
        # The leave, the new holder's extension to its full ttl, and the new head's look.
        assert len(scripts) <= 3, scripts
        assert len({command.connection for command in scripts}) <= 3
        for wait in waits[1:]:
            wait.cancel()
        await asyncio.gather(*waits[1:], return_exceptions=True)
        await waits[0].result().release()


@pytest.mark.stores("valkey9")
async def test_a_waiter_that_is_not_the_head_sends_one_message_per_third(
    real_store: Store, proxy: FaultProxy
) -> None:
    async with (
        aiodlock.Client(real_store.url) as holder,
        aiodlock.Client(proxy.url, waiter_ttl=1.8, ttl=30) as client,
    ):
        async with held_elsewhere(holder.lock("x")):
            ahead = asyncio.create_task(holder.lock("x").acquire())
            await until_waiting(holder, "x", 1)
            behind = [asyncio.create_task(client.lock("x").acquire()) for _ in range(10)]
            await until_waiting(holder, "x", 11)
            began = time.monotonic()
            proxy.forget()
            await until(lambda: count(proxy) >= 3 * 10, "three messages of each")
            assert count(proxy) <= 10 * (time.monotonic() - began) / 0.6 + 10
            assert sum(len(command.raw) for command in proxy.log) / count(proxy) < 2000
            for task in (ahead, *behind):
                task.cancel()
            await asyncio.gather(ahead, *behind, return_exceptions=True)


def count(proxy: FaultProxy) -> int:
    return sum(command.name.startswith("EVAL") for command in proxy.log)


def held_clients(proxy: FaultProxy, number: int) -> Clients:
    return Clients(proxy.url, number)


class Clients:
    """Several clients on one URL."""

    def __init__(self, url: str, number: int) -> None:
        # Long enough that nobody has to be extended during the test.
        self._clients = [aiodlock.Client(url, ttl=600, waiter_ttl=300) for _ in range(number)]

    async def __aenter__(self) -> list[aiodlock.Client]:
        for client in self._clients:
            await client.__aenter__()
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.__aexit__(None, None, None)


# The dead

#: How late the next one may be in, on the server's clock.
LATE = 0.5

HOLDER = """
    import asyncio, aiodlock
    async def main():
        async with aiodlock.Client({url!r}) as client:
            async with client.lock("x", {options}):
                print("ready", flush=True)
                await asyncio.sleep(60)
    asyncio.run(main())
"""
WAITERS = """
    import asyncio, aiodlock
    async def main():
        async with aiodlock.Client({url!r}, {options}) as client:
            waits = [asyncio.create_task(client.lock("x").acquire()) for _ in range(20)]
            while len((await client.inspect("x")).waiters) < 20:
                await asyncio.sleep(0.01)
            print("ready", flush=True)
            await asyncio.sleep(60)
    asyncio.run(main())
"""


@pytest.fixture
async def processes() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    started: list[asyncio.subprocess.Process] = []
    yield started
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def start(
    processes: list[asyncio.subprocess.Process], program: str, url: str, options: str
) -> asyncio.subprocess.Process:
    text = textwrap.dedent(program).format(url=url, options=options)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE
    )
    processes.append(process)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.stores("valkey9")
@pytest.mark.parametrize("delay", [0.0, 0.6])
async def test_a_killed_holder_costs_its_ttl_and_its_lock_delay(
    store: Store,
    client: aiodlock.Client,
    processes: list[asyncio.subprocess.Process],
    delay: float,
) -> None:
    holder = await start(processes, HOLDER, store.url, f"ttl={LASTING}, lock_delay={delay}")
    waiting = asyncio.create_task(client.lock("x").acquire())
    await until_waiting(client, "x")
    asked_at = await server_time(store)
    left = (await client.inspect("x")).holders[0].remaining
    assert left is not None
    holder.kill()
    await holder.wait()
    died_at = await server_time(store)
    async with stalls() as stalled:
        lease = await waiting
        assert granted_at(lease) >= asked_at + left + delay - 0.002  # the store counts milliseconds
        assert granted_at(lease) <= died_at + LASTING + delay + LATE + stalled()
    await lease.release()


async def server_time(store: Store) -> float:
    seconds, microseconds = await (await store.raw()).time()
    return float(seconds + microseconds / 1e6)


@pytest.mark.stores("valkey9")
async def test_killed_waiters_cost_together_one_waiter_ttl_and_a_third(
    store: Store, make_client: MakeClient, processes: list[asyncio.subprocess.Process]
) -> None:
    client = await make_client(waiter_ttl=LASTING)
    async with held_elsewhere(client.lock("x")):
        dead = await start(processes, WAITERS, store.url, f"waiter_ttl={LASTING}, ttl=5")
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x", 21)
        dead.kill()
        await dead.wait()
    died_at = await server_time(store)
    async with stalls() as stalled:
        lease = await waiting
        assert granted_at(lease) - died_at <= LASTING * 4 / 3 + LATE + stalled()
    await lease.release()


@pytest.mark.stores("valkey9")
async def test_killed_processes_leave_no_ghosts(
    store: Store, client: aiodlock.Client, processes: list[asyncio.subprocess.Process]
) -> None:
    holder = await start(processes, HOLDER, store.url, f"ttl={LASTING}")
    holder.kill()

    async def nothing_listed() -> bool:
        return not [info async for info in client.locks()]

    async with takes(at_most=LASTING + SOON):
        await until(nothing_listed, "an empty list")
