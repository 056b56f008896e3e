"""Owners are any text: they reach the server and come back unharmed, and never mean somebody else."""

from __future__ import annotations

import pytest

import aiodlock

from ..conftest import MakeClient
from ..servers import Store
from .direct import Direct, Heard

HOSTILE = [
    "two words",
    " leading and trailing ",
    "x 1 99999999999999 1000 0 towner client",
    "line\nbreak",
    "\r\n$3\r\nfoo",
    "nul\0nul",
    "{}",
    "{tag}",
    "%",
    "%20",
    "%(s)s",
    "'; redis.call('FLUSHALL') --",
    "*",
    "[a-z]?",
    "émoji 🔒",
    "t1",
    "u1",
    "-1",
    "x" * 512,
]


@pytest.mark.scripted
@pytest.mark.parametrize("owner", HOSTILE, ids=lambda owner: ascii(owner)[:30])
async def test_owner_of_any_text_is_told_as_given(
    store: Store, client: aiodlock.Client, owner: str
) -> None:
    direct = Direct(await store.raw())
    async with client.lock("name", owner=owner) as lease:
        assert lease.owner == owner
        info = await client.inspect("name")
        assert [(holder.owner, holder.count) for holder in info.holders] == [(owner, 1)]
        (record,) = (await direct.holders()).values()
        assert record.token == lease.token
    assert await direct.all_keys() == {"token"}


@pytest.mark.stores("fakeredis", "valkey9")
async def test_every_owner_is_only_itself(client: aiodlock.Client, make_client: MakeClient) -> None:
    other = await make_client()
    for owner in HOSTILE:
        async with client.lock("name", owner=owner) as lease:
            for stranger in HOSTILE:
                if stranger != owner:
                    with pytest.raises(aiodlock.WouldBlock):
                        await other.lock("name", owner=stranger).acquire_nowait()
            again = await other.lock("name", owner=owner).acquire_nowait()
            assert again.token == lease.token
            await again.release()


async def test_owner_of_a_task_can_be_claimed_by_nobody(client: aiodlock.Client) -> None:
    direct_names: set[str] = set()
    async with client.lock("name") as lease:
        (holder,) = (await client.inspect("name")).holders
        direct_names = {lease.owner, holder.owner, f"t{holder.owner}", f"u{holder.owner}"}
        for owner in direct_names:
            with pytest.raises(aiodlock.WouldBlock):
                await client.lock("name", owner=owner).acquire_nowait()


@pytest.mark.scripted
@pytest.mark.parametrize(
    "name", ["{}", "a b", "nul\0", "line\nbreak", "émoji 🔒", "%7B", "}:state", "*", "x" * 512]
)
async def test_name_of_any_text_has_keys_of_its_own(
    store: Store, client: aiodlock.Client, name: str
) -> None:
    direct = Direct(await store.raw(), name)
    async with client.lock(name) as lease:
        assert [holder.token for holder in (await direct.holders()).values()] == [lease.token]
        assert [info.name async for info in client.locks()] == [name]
    assert await direct.all_keys() == {"token"}


async def test_new_head_is_told_when_to_look_also_when_its_owner_gets_somebody_else_in(
    direct: Direct, heard: Heard
) -> None:
    await direct.acquire("holder", owner="uone", ttl=10_000)
    await direct.acquire("dead", waiter_ttl=90_000)
    await direct.acquire("next", waiter_ttl=90_000, client="stranger")
    await direct.acquire("again", waiter_ttl=90_000)  # as if its owner had come to hold since
    await direct.age("dead", by=100_000)
    await heard.notices()
    assert (await direct.extend("again", 90_000, owner="uone"))[0] == "held"
    assert ("stranger", "look", "next") in await heard.notices()
