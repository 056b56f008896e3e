"""A quorum of stores inside the process, for tests: there is no restart that they could outlive."""

from __future__ import annotations

import asyncio

import aiodlock


async def test_stores_in_memory_make_a_quorum() -> None:
    nodes = [f"memory://node-{number}" for number in range(3)]
    async with aiodlock.Client(nodes) as one, aiodlock.Client(nodes) as other:
        first = await one.lock("x").acquire()
        waiting = asyncio.create_task(other.lock("x").acquire(timeout=30))
        await first.release()
        second = await waiting
        assert second.token > first.token
        await second.release()
