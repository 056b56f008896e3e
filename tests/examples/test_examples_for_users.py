"""The election and the lost lease, as a reader would start them."""

from __future__ import annotations

import asyncio

from examples import deadlock, leader_election, lost_lease


async def test_leader_election() -> None:
    terms, leaders = await asyncio.wait_for(leader_election.main(), 120)
    assert sorted(terms) == ["worker-1", "worker-2", "worker-3"]
    assert leaders


async def test_lost_lease() -> None:
    said = await asyncio.wait_for(lost_lease.main(), 120)
    assert said[0].startswith("writing with token")
    assert said[1:] == ["rolled back", "lost: broken"]


async def test_deadlock() -> None:
    said = sorted(await asyncio.wait_for(deadlock.main(), 120))
    assert len(said) == 2
    assert said[0].startswith("gave up: waiting for 'account:")
    assert said[0].count(" waits for 'account:") == 2
    assert said[1].startswith("moved from account:")
