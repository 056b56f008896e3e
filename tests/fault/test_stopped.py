"""Processes that are stopped with SIGSTOP for longer than their lease, and then go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock.backends.redis.scripts import LEAVE

from .. import forked
from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import STARTING
from ..servers import Store
from .scenes import SOON, calling, queued, stalls, until, waiting_for_notice

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]

#: Far longer than a machine stalls: nothing but being stopped ends a lease here.
TTL = 1.5
#: How late the next one may be in, besides what the machine did not let run.
LATE = 0.1


@pytest.fixture
async def start(real_store: Store) -> AsyncIterator[Start]:
    """Give a starter of processes that wait for the name, and act while they hold it."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(ttl: float = TTL, waiter_ttl: float = 10.0) -> asyncio.subprocess.Process:
        process = await forked.start(
            "tests.fault.body",
            real_store.url,
            "name",
            str(ttl),
            str(waiter_ttl),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert await said(process) == ["waits"]
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process) -> list[str]:
    """Return the words of the next line."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), STARTING)
    return line.decode().split()


async def test_holder_that_was_stopped_is_told_before_it_acts_again(
    start: Start, client: aiodlock.Client
) -> None:
    process = await start()
    assert (await said(process))[0] == "acts"
    task = asyncio.create_task(client.lock("name").acquire())
    await waiting_for_notice(client)
    process.send_signal(signal.SIGSTOP)
    async with stalls() as stalled:
        (holder,) = (await client.inspect("name")).holders
        ends_at = now() + (holder.remaining or 0.0)
        lease = await task
        got_in = now()
        assert got_in <= ends_at + LATE + stalled()
        resumed = now()
        process.send_signal(signal.SIGCONT)
        while (line := await said(process))[0] == "acts":
            assert float(line[1]) < got_in  # what it did before it was stopped
        what, reason, held, told = line
        assert (what, reason, held) == ("lost", "expired", "False")
        assert float(told) <= resumed + SOON + stalled()
    assert lease.held
    await lease.release()


async def test_holder_that_was_stopped_for_less_than_its_lease_goes_on(
    start: Start, client: aiodlock.Client
) -> None:
    ttl = 2 * TTL
    process = await start(ttl=ttl)
    (_, first) = await said(process)
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(ttl / 8)  # it is at least two thirds of the lease from its end
    process.send_signal(signal.SIGCONT)
    acted = float(first)
    while acted < float(first) + 1.5 * ttl:
        what, moment = await said(process)
        assert what == "acts"
        acted = float(moment)


async def test_waiter_that_is_stopped_costs_the_others_no_more_than_its_lease(
    start: Start, make_client: MakeClient
) -> None:
    client = await make_client(ttl=5.0, waiter_ttl=TTL)
    held = await client.lock("name").acquire()
    process = await start(waiter_ttl=TTL)
    await queued(client, 1)
    task = asyncio.create_task(client.lock("name").acquire())
    await queued(client, 2)
    process.send_signal(signal.SIGSTOP)
    async with stalls() as stalled:
        stopped = now()
        await held.release()
        lease = await task
        assert now() <= stopped + TTL * 4 / 3 + LATE + stalled()
    process.send_signal(signal.SIGCONT)
    await queued(client, 1)  # the one that was stopped stands in line again, at the end
    await lease.release()
    assert (await said(process))[0] == "acts"


async def test_grant_to_a_stopped_waiter_starts_no_body_of_its_when_it_comes_too_late(
    start: Start, make_client: MakeClient
) -> None:
    client = await make_client(ttl=5.0, waiter_ttl=TTL)
    held = await client.lock("name").acquire()
    process = await start(waiter_ttl=TTL)
    await queued(client, 1)
    process.send_signal(signal.SIGSTOP)
    await held.release()  # grants it to the stopped one, in the same script

    async def is_over() -> bool:
        return not (await client.inspect("name")).holders

    await until(is_over)
    async with client.lock("name") as lease:
        entered = now()
        process.send_signal(signal.SIGCONT)
        await queued(client, 1)
        assert lease.held
        left = now()
    what, moment = await said(process)
    assert what == "acts"
    assert float(moment) > left > entered


@pytest.mark.stores("valkey9")
async def test_leave_that_comes_after_the_lease_has_ended_and_was_swept_tells_that_it_expired(
    proxy: FaultProxy, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """Not that the server had lost it: found by a soak."""
    slow = await make_client(proxy.url)
    leaving = proxy.hold_command(calling(LEAVE))

    async def hold() -> None:
        async with slow.lock("name", ttl=0.3, auto_extend=False):
            pass

    holding = asyncio.create_task(hold())
    await leaving.happened.wait()  # the body has ended in time
    await (await client.lock("name").acquire()).release()
    leaving.release()
    with pytest.raises(aiodlock.LockLost) as lost:
        await holding
    assert lost.value.reason == "expired"
