"""Tokens only grow; what a name leaves behind is small and expires."""

from __future__ import annotations

import asyncio

import pytest

import aiodlock

from ..conftest import MakeClient
from ..proxy import FaultProxy, named
from ..scenes import held_elsewhere, until, until_cancelled, until_free, until_waiting
from ..servers import BEYOND, Store

pytestmark = pytest.mark.stores("memory", "fakeredis", "valkey9", *BEYOND)


async def token_key(store: Store, token: int) -> str:
    """Find the key that keeps the last token of the only name in use."""
    raw = await store.raw()
    (key,) = [
        key
        for key in map(str, await raw.keys("*"))
        if await raw.type(key) == "string" and str(token) in str(await raw.get(key))
    ]
    return key


async def test_a_token_is_an_int_that_fits_a_bigint_and_a_double(client: aiodlock.Client) -> None:
    async with client.lock("x") as lease:
        assert 0 < lease.token < 2**53


async def test_tokens_grow_with_every_grant_in_any_mode_and_client(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    tokens = []
    for lock in (one.lock("x"), other.lock("x"), one.rwlock("x").read, other.rwlock("x").write):
        for _ in range(3):
            async with lock as lease:
                tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_each_shared_holder_has_a_token_of_its_own(make_client: MakeClient) -> None:
    one, other = await make_client(), await make_client()
    async with one.rwlock("x").read as first, other.rwlock("x").read as second:
        assert second.token > first.token


@pytest.mark.scripted
async def test_tokens_grow_across_the_loss_of_the_last_token(
    store: Store, client: aiodlock.Client
) -> None:
    """As after its expiry, and as after a failover that lost it."""
    tokens = []
    for _ in range(3):
        async with client.lock("x") as lease:
            tokens.append(lease.token)
        await (await store.raw()).flushall()
    assert tokens == sorted(set(tokens))


@pytest.mark.scripted
async def test_tokens_grow_across_the_expiry_of_the_last_token(
    store: Store, make_client: MakeClient
) -> None:
    client = await make_client(token_retention=1.0, ttl=0.3)
    async with client.lock("x") as lease:
        pass
    raw = await store.raw()
    await until(lambda: no_keys(raw), "a store without keys")
    async with client.lock("x") as later:
        assert later.token > lease.token


async def no_keys(raw: object) -> bool:
    return not await raw.keys("*")  # type: ignore[attr-defined]


@pytest.mark.scripted
async def test_tokens_grow_when_the_server_clock_was_set_back(
    store: Store, make_client: MakeClient
) -> None:
    """As seen by the server afterwards: the last token is of a time that is still to come."""
    client = await make_client(token_retention=3600)
    async with client.lock("x") as lease:
        pass
    raw = await store.raw()
    key = await token_key(store, lease.token)
    ahead = lease.token + 1800 * 1_000_000
    await raw.set(key, str(await raw.get(key)).replace(str(lease.token), str(ahead)), px=60_000)
    tokens = [ahead]
    for _ in range(3):
        async with client.lock("x") as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    kept = await raw.pttl(key)
    assert kept > 5_000_000, "kept for token_retention after the token's own time"


@pytest.mark.scripted
async def test_a_free_name_leaves_one_small_key_that_expires(
    store: Store, make_client: MakeClient
) -> None:
    client, raw = await make_client(token_retention=600), await store.raw()
    async with client.lock("x"):
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until_waiting(client, "x")
        keys = await raw.keys("*")
        for key in keys:
            assert await raw.pttl(key) > 0, key
    await (await waiting).release()
    (key,) = await raw.keys("*")
    assert 590_000 < await raw.pttl(key) <= 601_000
    assert len(str(await raw.get(key))) < 64


@pytest.mark.scripted
async def test_a_name_that_was_only_waited_for_leaves_no_more(
    store: Store, client: aiodlock.Client
) -> None:
    raw = await store.raw()
    async with held_elsewhere(client.lock("x")):
        for attempt in (
            client.lock("x").acquire(timeout=0),
            client.lock("x").acquire(timeout=0.02),
            client.lock("x").acquire_nowait(),
        ):
            with pytest.raises(aiodlock.LockError):
                await attempt
        assert not (await client.inspect("x")).waiters
    assert len(await raw.keys("*")) == 1


@pytest.mark.scripted
async def test_everything_else_leaves_no_more(store: Store, client: aiodlock.Client) -> None:
    raw = await store.raw()
    async with client.rwlock("a").read, client.rwlock("a").read:
        pass
    lease = await client.lock("b").acquire()
    await client.break_lock("b")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    with pytest.raises(aiodlock.LockLost):
        async with client.lock("c", max_hold=0.1):
            await until_cancelled()
    await until_free(client, "a", "b", "c")
    for key in await raw.keys("*"):
        left = await raw.pttl(key)
        assert left == -2 or 0 <= left <= 3_601_000  # -2: its time is over; 0: in less than 1 ms


@pytest.mark.stores("valkey9")
async def test_an_ambiguous_failure_leaves_one_marker_that_expires(
    store: Store, proxy: FaultProxy
) -> None:
    raw = await store.raw()
    async with aiodlock.Client(proxy.url) as client:
        async with client.lock("w"):
            pass
        lost = proxy.drop_reply(named("EVALSHA"))
        async with client.lock("x"):
            assert lost.happened.is_set()
        await until_free(client, "x")
    keys = [key for key in await raw.keys("*") if "{x}" in str(key)]
    assert len(keys) <= 2
    for key in keys:
        assert 0 < await raw.pttl(key) <= 3_601_000


@pytest.mark.stores("valkey9")
async def test_a_late_duplicate_of_a_request_that_was_left_is_refused(
    store: Store, proxy: FaultProxy
) -> None:
    """The first message is on its way for so long that its request was repeated, and left."""
    async with aiodlock.Client(proxy.url) as client:
        async with client.lock("w"):
            pass
        late = proxy.hold_command(named("EVALSHA"))
        acquiring = asyncio.create_task(client.lock("x").acquire())
        await late.happened.wait()
        proxy.cut()
        await (await acquiring).release()
        late.release()
        await late.answered.wait()
        info = await client.inspect("x")
        assert not info.holders
        assert not info.waiters
