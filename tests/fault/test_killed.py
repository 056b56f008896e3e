"""A process that holds is killed with SIGKILL, alone or with waiters in it: how long the others wait."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import aiodlock

from .. import forked
from ..conftest import MakeClient
from ..protocol.direct import Direct
from ..scenes import STARTING, granted_at
from ..servers import Store
from .scenes import free_at_once, queued, stalls, takes, waiting_for_notice

Hold = Callable[..., Awaitable[asyncio.subprocess.Process]]

#: Far longer than a machine stalls: nothing but a death ends a lease here.
TTL = 1.5
#: How late the next one may be in, on the server's clock.
LATE = 0.1


@pytest.fixture
async def hold(real_store: Store) -> AsyncIterator[Hold]:
    """Give a starter of processes that hold the name, with so many waiters."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(waiters: int = 0, waiter_ttl: float = 10.0) -> asyncio.subprocess.Process:
        process = await forked.start(
            "tests.fault.holder",
            real_store.url,
            "name",
            *(str(TTL), str(waiters), str(waiter_ttl)),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), STARTING) == b"ready\n"
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def kill(process: asyncio.subprocess.Process, store: Store) -> float:
    """Kill the process; return when the server drops its lease, on the server's clock."""
    direct = Direct(await store.raw())
    # Stopped it is as dead, and at once: until a killed process is waited for its lease may be over.
    process.send_signal(signal.SIGSTOP)
    await direct.now()  # what it had sent has arrived
    (holder,) = (await direct.holders()).values()
    process.kill()
    await process.wait()
    return holder.deadline / 1000


async def test_live_head_is_in_when_the_killed_holders_lease_ends(
    hold: Hold, client: aiodlock.Client, store: Store, notifications: bool
) -> None:
    process = await hold()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    ends_at = await kill(process, store)
    async with stalls() as stalled:
        lease = await task
        assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
    await lease.release()


async def test_head_that_became_head_only_after_the_kill_is_in_as_soon(
    hold: Hold,
    make_client: MakeClient,
    client: aiodlock.Client,
    store: Store,
    notifications: bool,
) -> None:
    process = await hold()
    before = await make_client()
    first = asyncio.create_task(before.lock("name").acquire())
    await waiting_for_notice(before)
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    ends_at = await kill(process, store)
    async with stalls() as stalled:
        first.cancel()
        lease = await task
        assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
    await lease.release()


async def test_waiter_that_comes_after_the_kill_is_in_as_soon(
    hold: Hold, client: aiodlock.Client, store: Store
) -> None:
    process = await hold()
    ends_at = await kill(process, store)
    async with stalls() as stalled:
        lease = await client.lock("name").acquire()
        assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
    await lease.release()


async def test_all_readers_at_the_head_are_in_when_the_killed_holders_lease_ends(
    hold: Hold, client: aiodlock.Client, store: Store
) -> None:
    process = await hold()
    lock = client.rwlock("name").read
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(5)]
    await waiting_for_notice(client, 5)
    ends_at = await kill(process, store)
    async with stalls() as stalled:
        leases = await asyncio.gather(*tasks)
        for lease in leases:
            assert ends_at <= granted_at(lease) <= ends_at + LATE + stalled()
    for lease in leases:
        await lease.release()


async def test_fifty_waiters_killed_with_the_holder_cost_one_waiter_ttl_and_a_third(
    hold: Hold, make_client: MakeClient, store: Store, notifications: bool
) -> None:
    waiter_ttl = TTL
    client = await make_client(waiter_ttl=waiter_ttl)
    process = await hold(waiters=50, waiter_ttl=waiter_ttl)
    task = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 51)
    await waiting_for_notice(client)
    ends_at = await kill(process, store)
    killed_at = await Direct(await store.raw()).now() / 1000
    async with stalls() as stalled:
        lease = await task
        last_moment = max(ends_at, killed_at + waiter_ttl * 4 / 3)
        assert granted_at(lease) <= last_moment + LATE + stalled()
    await lease.release()
    await free_at_once(store, client)


async def test_everything_is_as_ever_after_a_killed_process_is_forgotten(
    hold: Hold, make_client: MakeClient
) -> None:
    client = await make_client(waiter_ttl=TTL)
    process = await hold(waiters=20, waiter_ttl=TTL)
    task = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 21)
    process.kill()
    await process.wait()
    lease = await task
    second = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    async with takes(at_most=0.2):  # far from the end of any lease
        await lease.release()
        await (await second).release()
