"""A process that holds is killed with SIGKILL, alone or with waiters in it: how long the others wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import aiodlock
from aiodlock._clock import now

from ..conftest import MakeClient
from ..servers import Store
from .scenes import free_at_once, queued, until, waiting_for_notice

Hold = Callable[..., Awaitable[asyncio.subprocess.Process]]

TTL = 0.6
#: The promise is 0.1 s; the rest is for a machine with two cores that runs everything else too.
LATE = 0.1 + 0.05


@pytest.fixture
async def hold(real_store: Store) -> AsyncIterator[Hold]:
    """Give a starter of processes that hold the name, with so many waiters."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(waiters: int = 0, waiter_ttl: float = 10.0) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.fault.holder", real_store.url, "name"),
            *(str(TTL), str(waiters), str(waiter_ttl)),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20.0) == b"ready\n"
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def kill(process: asyncio.subprocess.Process, client: aiodlock.Client) -> float:
    """Kill the process and return when the server drops its lease, on our clock."""
    process.kill()
    await process.wait()
    (holder,) = (await client.inspect("name")).holders
    # Counted from the answer: never too early for what the server does.
    return now() + holder.remaining


async def test_live_head_is_in_when_the_killed_holders_lease_ends(
    hold: Hold, client: aiodlock.Client, notifications: bool
) -> None:
    process = await hold()
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    ends_at = await kill(process, client)
    lease = await task
    assert ends_at - 0.1 <= now() <= ends_at + LATE
    await lease.release()


async def test_head_that_became_head_only_after_the_kill_is_in_as_soon(
    hold: Hold, make_client: MakeClient, client: aiodlock.Client, notifications: bool
) -> None:
    process = await hold()
    before = await make_client()
    first = asyncio.create_task(before.lock("name").acquire())
    await waiting_for_notice(before)
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    ends_at = await kill(process, client)
    first.cancel()
    lease = await task
    assert ends_at - 0.1 <= now() <= ends_at + LATE
    await lease.release()


async def test_waiter_that_comes_after_the_kill_is_in_as_soon(
    hold: Hold, client: aiodlock.Client
) -> None:
    process = await hold()
    ends_at = await kill(process, client)
    lease = await client.lock("name").acquire()
    assert ends_at - 0.1 <= now() <= ends_at + LATE
    await lease.release()


async def test_all_readers_at_the_head_are_in_when_the_killed_holders_lease_ends(
    hold: Hold, client: aiodlock.Client
) -> None:
    process = await hold()
    lock = client.rwlock("name").read
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(5)]
    await waiting_for_notice(client, 5)
    ends_at = await kill(process, client)
    leases = await asyncio.gather(*tasks)
    assert now() <= ends_at + LATE
    for lease in leases:
        await lease.release()


async def test_fifty_waiters_killed_with_the_holder_cost_one_waiter_ttl_and_a_third(
    hold: Hold, make_client: MakeClient, store: Store, notifications: bool
) -> None:
    waiter_ttl = 0.6
    client = await make_client(waiter_ttl=waiter_ttl)
    process = await hold(waiters=50, waiter_ttl=waiter_ttl)
    task = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 51)
    await waiting_for_notice(client)
    ends_at = await kill(process, client)
    killed_at = now()
    lease = await task
    assert now() <= max(ends_at, killed_at + waiter_ttl * 4 / 3) + LATE
    await lease.release()
    await free_at_once(store, client)


async def test_everything_is_as_ever_after_a_killed_process_is_forgotten(
    hold: Hold, make_client: MakeClient
) -> None:
    client = await make_client(waiter_ttl=0.6)
    process = await hold(waiters=20, waiter_ttl=0.6)
    task = asyncio.create_task(client.lock("name", ttl=30).acquire())
    await queued(client, 21)
    process.kill()
    await process.wait()
    lease = await task
    second = asyncio.create_task(client.lock("name").acquire())
    await until(lambda: len(client._session.places) == 2)  # type: ignore[union-attr]
    await waiting_for_notice(client)
    began = now()
    await lease.release()
    await (await second).release()
    assert now() - began <= 1.0
