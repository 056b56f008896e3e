"""Deadlocks on ZooKeeper: a wait is told with a session, and servers limit how long one is."""

from __future__ import annotations

import asyncio

import pytest

import aiodlock

from ..scenes import PATIENCE
from ..zookeeper import ZooKeeperServer, installed

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")
TICK = 0.02


@pytest.mark.parametrize(("shortest", "longest", "ttl"), [(8.0, 20.0, 10.0), (0.04, 4.0, 3.0)])
async def test_deadlock_is_found_whatever_sessions_the_servers_grant(
    shortest: float, longest: float, ttl: float
) -> None:
    both = asyncio.Barrier(2)
    with ZooKeeperServer(tick=TICK, shortest=shortest, longest=longest) as server:
        url = f"{server.url}?tick_time={TICK}"
        async with aiodlock.Client(url, ttl=ttl, deadlock_after=0.1) as client:

            async def take(first: str, second: str) -> None:
                async with client.lock(first):
                    await both.wait()
                    async with client.lock(second):
                        pass

            async with asyncio.timeout(PATIENCE):
                ends = await asyncio.gather(take("a", "b"), take("b", "a"), return_exceptions=True)
    assert [type(end) for end in ends if end is not None] == [aiodlock.DeadlockError]
