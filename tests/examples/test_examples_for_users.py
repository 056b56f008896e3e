"""The election and the lost lease, as a reader would start them."""

from __future__ import annotations

import asyncio

from examples import leader_election, lost_lease


async def test_leader_election() -> None:
    terms, leaders = await asyncio.wait_for(leader_election.main(), 120)
    assert sorted(terms) == ["worker-1", "worker-2", "worker-3"]
    assert leaders


async def test_lost_lease() -> None:
    said = await asyncio.wait_for(lost_lease.main(), 120)
    assert said[0].startswith("writing with token")
    assert said[1:] == ["rolled back", "lost: broken"]
