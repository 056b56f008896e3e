"""What people see of a name, and that a break ends what they have seen and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

import aiodlock

from ..conftest import MakeClient
from ..scenes import bounded
from ..servers import CLUSTER, ETCD, MEMORY, POSTGRES, SCRIPTED, SENTINEL, ZOOKEEPER, Store

_RECORDS = (MEMORY, *SCRIPTED, *POSTGRES, *ETCD, CLUSTER, SENTINEL)


async def until_waiting(client: aiodlock.Client, name: str, number: int = 1) -> None:
    """Wait until so many requests stand in the queue."""
    async with bounded(20):
        while len((await client.inspect(name)).waiters) != number:
            await asyncio.sleep(0.02)


async def test_break_ends_the_holder_that_was_shown_and_not_the_next_one(
    client: aiodlock.Client,
) -> None:
    shown = await client.lock("a", owner="shown").acquire()
    tokens = [holder.token for holder in (await client.inspect("a")).holders]
    waiting = asyncio.ensure_future(client.lock("a", owner="next", on_lost="flag").acquire())
    await until_waiting(client, "a")
    await shown.release()
    lease = await waiting

    assert await client.break_lock("a", tokens=tokens) == 0
    await lease.extend()
    assert lease.held

    assert await client.lock("a").break_lock(tokens=[lease.token]) == 1
    assert (await lease.wait_lost()).reason == "broken"
    await _lost(lease)


async def _lost(lease: aiodlock.Lease) -> None:
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_break_lets_the_waiter_in_and_spares_other_holders(client: aiodlock.Client) -> None:
    one = await client.rwlock("a", on_lost="flag").read.acquire()
    other = await client.rwlock("a", on_lost="flag", owner="other").read.acquire()
    assert one.token != other.token
    assert await client.break_lock("a", tokens=[one.token]) == 1
    assert (await one.wait_lost()).reason == "broken"
    await other.extend()
    (left,) = (await client.inspect("a")).holders
    assert left.token == other.token
    await other.release()
    await _lost(one)
    async with client.lock("a", timeout=10):
        pass


async def test_empty_collection_of_tokens_breaks_nobody(client: aiodlock.Client) -> None:
    async with client.lock("a") as lease:
        nobody: list[Iterable[int]] = [[], (), frozenset(), iter(())]
        for tokens in nobody:
            assert await client.break_lock("a", tokens=tokens) == 0
        for token in (0, -1, 1 << 70, lease.token + 1):
            assert await client.break_lock("a", tokens=[token]) == 0
        await lease.extend()


@pytest.mark.parametrize("tokens", [5, "5", ["5"], [True], [None], [1.0]])
async def test_tokens_are_a_collection_of_ints(client: aiodlock.Client, tokens: object) -> None:
    with pytest.raises(TypeError, match="tokens"):
        await client.break_lock("a", tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.stores(*_RECORDS)
async def test_only_a_break_of_all_opens_what_is_closed(client: aiodlock.Client) -> None:
    lease = await client.lock("a", hold_at_least=60).acquire()
    token = lease.token
    await lease.release()
    assert await client.break_lock("a", tokens=[token]) == 0
    assert (await client.inspect("a")).closed > 30
    await client.break_lock("a")
    async with client.lock("a", timeout=10):
        pass


@pytest.mark.stores(MEMORY, *SCRIPTED, *POSTGRES, *ZOOKEEPER, CLUSTER, SENTINEL)
async def test_break_ends_one_place_of_a_semaphore(client: aiodlock.Client) -> None:
    places = [await client.semaphore("s", limit=3, on_lost="flag").acquire() for _ in range(3)]
    broken = places[1]
    count = await client.break_lock("s", kind="semaphore", tokens=[broken.token])
    assert count == 1
    assert (await broken.wait_lost()).reason == "broken"
    await _lost(broken)
    for place in (places[0], places[2]):
        await place.extend()
        await place.release()


async def test_holder_tells_how_long_it_has_held(make_client: MakeClient, store: Store) -> None:
    client, other = await make_client(), await make_client()
    async with client.lock("a"):
        await asyncio.sleep(0.3)
        (holder,) = (await other.inspect("a")).holders
        if store.name.startswith(("etcd", "zookeeper")):
            assert holder.holding is None
        else:
            assert holder.holding is not None
            assert 0.2 < holder.holding < 60


@pytest.mark.stores(*_RECORDS)
async def test_recorded_success_is_told_and_listed(client: aiodlock.Client) -> None:
    assert (await client.inspect("job", kind="once")).recorded is None
    async with client.once("job", keep=500) as once:
        assert once.lease is not None
    recorded = (await client.inspect("job", kind="once")).recorded
    assert recorded is not None
    assert recorded.ago is not None
    assert 0 <= recorded.ago < 60
    assert 400 < recorded.remaining <= 501
    infos = [info async for info in client.locks(kind="once")]
    assert [(info.name, info.recorded is not None) for info in infos] == [("job", True)]
    assert [info.name async for info in client.locks()] == ["job"]
    assert await client.forget("job")
    assert [info async for info in client.locks(kind="once")] == []


async def test_leader_shows_its_value(client: aiodlock.Client) -> None:
    async with client.election("boss").lead("http://host:1"):
        (holder,) = (await client.inspect("boss")).holders
        assert holder.value == "http://host:1"
    async with client.lock("boss"):
        (holder,) = (await client.inspect("boss")).holders
        assert holder.value is None
