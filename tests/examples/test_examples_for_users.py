"""The election and the lost lease, as a reader would start them."""

from __future__ import annotations

import asyncio

import pytest

from aiodlock.testing import memory_client
from examples import bank_transfer, deadlock, leader_election, lost_lease


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


@pytest.mark.parametrize(("source", "target", "amount"), [(1, 1, 50), (1, 2, 0), (1, 2, -50)])
async def test_bank_refuses_what_is_no_transfer(source: int, target: int, amount: int) -> None:
    database = bank_transfer.open_bank()
    before = database.execute("SELECT id, balance FROM account").fetchall()
    async with memory_client() as client:
        with pytest.raises(ValueError, match=f"{amount} from account {source} to {target}"):
            await bank_transfer.transfer(client, database, source, target, amount)
    assert database.execute("SELECT id, balance FROM account").fetchall() == before
    database.close()
