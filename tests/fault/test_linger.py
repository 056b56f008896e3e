"""Leases that linger: their process is killed or stopped while they are idle, and messages are lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import aiodlock
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE, Script

from .. import forked
from ..conftest import MakeClient
from ..inside import session_of
from ..protocol.direct import Direct
from ..proxy import FaultProxy
from ..scenes import PATIENCE, STARTING, granted_at, until, until_waiting
from ..servers import Store
from .scenes import calling

pytestmark = pytest.mark.stores("valkey9")

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
#: Far longer than a machine stalls.
TTL = 2.0


@pytest.fixture
async def start(real_store: Store) -> AsyncIterator[Start]:
    """Give a starter of processes that keep the name after a first body."""
    processes: list[asyncio.subprocess.Process] = []

    async def start() -> asyncio.subprocess.Process:
        process = await forked.start(
            "tests.fault.lingerer",
            real_store.url,
            "name",
            str(TTL),
            cwd=Path(__file__).parents[2],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def token(process: asyncio.subprocess.Process) -> int:
    """Return the token of the next body."""
    assert process.stdout is not None
    return int(await asyncio.wait_for(process.stdout.readline(), STARTING))


def again(process: asyncio.subprocess.Process) -> None:
    """Ask for another body."""
    assert process.stdin is not None
    process.stdin.write(b"\n")


async def test_killed_while_idle_it_costs_what_a_dead_holder_costs(
    start: Start, client: aiodlock.Client, store: Store
) -> None:
    process = await start()
    await token(process)
    process.kill()
    await process.wait()
    (holder,) = (await Direct(await store.raw()).holders()).values()
    lease = await client.lock("name").acquire(timeout=PATIENCE)
    assert granted_at(lease) >= holder.deadline / 1000
    await lease.release()


async def test_stopped_while_idle_it_begins_no_body_when_it_goes_on(
    start: Start, client: aiodlock.Client
) -> None:
    process = await start()
    first = await token(process)
    again(process)
    assert await token(process) == first
    process.send_signal(signal.SIGSTOP)
    lease = await client.lock("name").acquire(timeout=PATIENCE)
    process.send_signal(signal.SIGCONT)
    again(process)
    await until_waiting(client, "name")
    await lease.release()
    assert await token(process) > lease.token > first


@pytest.mark.parametrize("script", [ACQUIRE, EXTEND, LEAVE], ids=lambda script: str(script.name))
async def test_reply_is_lost(proxy: FaultProxy, make_client: MakeClient, script: Script) -> None:
    client, other = await make_client(proxy.url), await make_client()
    fault = proxy.drop_reply(calling(script))
    lock = client.lock("name", linger=60.0, ttl=TTL)
    async with lock as lease:
        first = lease.token
    if script is EXTEND:
        await fault.happened.wait()
    task = asyncio.create_task(other.lock("name").acquire(timeout=PATIENCE))
    second = await task
    assert second.token > first
    await second.release()
    async with lock as lease:
        assert lease.token > second.token


async def test_recall_is_lost_with_its_connection(
    proxy: FaultProxy, make_client: MakeClient
) -> None:
    client, other = await make_client(proxy.url), await make_client()
    async with client.lock("name", linger=60.0, ttl=20.0):
        pass
    await proxy.refuse()
    proxy.cut()
    task = asyncio.create_task(other.lock("name").acquire(timeout=3 * PATIENCE))
    await until_waiting(other, "name")
    await proxy.accept()
    await (await task).release()
    await until(lambda: not session_of(client).requests)
