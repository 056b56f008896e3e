"""The timer of what ends on this side: a lease is lost in the turn in which its end is seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiodlock import Client, LockLost
from aiodlock._clock import now


async def test_body_takes_one_step_after_a_block_although_another_lease_is_granted_in_that_turn() -> (
    None
):
    """The timer that is due is left alone: a new one would come in the next turn, after a second step."""
    steps = 0

    async with Client("memory://") as client:
        session = client._session
        assert session is not None
        other = (await client.lock("b", ttl=30.0).acquire())._request

        def grant() -> None:
            other.granted_at = now()
            session.deadlines.add(other)

        async def body() -> None:
            nonlocal steps
            async with client.lock("a", ttl=0.2) as lease:
                session.deadlines.remove(other)
                asyncio.get_running_loop().call_soon(grant)
                time.sleep(0.3)  # the loop is blocked until the lease is over
                while steps < 5:
                    await asyncio.sleep(0)
                    steps += not lease.held

        with pytest.raises(LockLost):
            await body()
    assert steps == 1
