"""Defects that a soak has found, each as small as it could be made."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiodlock
from aiodlock.backends.redis.scripts import ACQUIRE

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..scenes import LASTING
from .scenes import calling, until


async def test_repeated_acquire_whose_first_grant_was_overdue_holds_what_it_is_told(
    proxy: FaultProxy, make_client: MakeClient, client: aiodlock.Client
) -> None:
    """The overdue record has the same id: it was swept after the new one had been written over it."""
    away = await make_client(proxy.url)
    other = await client.rwlock("name", ttl=30).read.acquire()  # or the key would have expired
    lost = proxy.drop_reply(calling(ACQUIRE))
    task = asyncio.create_task(away.rwlock("name", ttl=LASTING).read.acquire())
    await lost.happened.wait()
    await proxy.refuse()

    async def is_overdue() -> bool:
        return len((await client.inspect("name")).holders) == 1  # which sweeps nothing

    await until(is_overdue)
    await proxy.accept()
    lease = await task
    tokens = {holder.token for holder in (await client.inspect("name")).holders}
    assert tokens == {other.token, lease.token}
    await lease.release()
    await other.release()


async def test_multilock_whose_loss_is_known_by_the_clock_alone_says_so(
    client: aiodlock.Client,
) -> None:
    with pytest.raises(aiodlock.LockLost) as lost:
        async with client.multilock("a", "b", ttl=0.1, auto_extend=False):
            time.sleep(0.15)  # a stopped process, or a blocked loop: the extender could not run
    assert lost.value.reason == "expired"


async def test_multilease_that_is_asked_after_its_end_says_so(client: aiodlock.Client) -> None:
    leases = await client.multilock("a", "b", ttl=0.8, auto_extend=False).acquire()
    time.sleep(0.85)
    with pytest.raises(aiodlock.LockLost):
        leases.ensure_held()
    with pytest.raises(aiodlock.LockLost):
        await leases.release()
