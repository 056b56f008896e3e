"""lock-delay: a name whose holder was lost stays closed; a release opens it at once."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodlock import AcquireTimeout, Client, Lock, LockLost, WouldBlock
from aiodlock.backends.base import Unanswered

from ..conftest import MakeClient
from ..protocol.direct import Direct
from ..scenes import BRIEF, PATIENCE, granted_at, stalls, store_of, until, until_cancelled
from ..servers import SERVED, Store


async def test_release_opens_at_once(client: Client) -> None:
    async with client.lock("a", lock_delay=30):
        pass
    lease = await client.lock("a").acquire_nowait()
    await lease.release()


@pytest.mark.stores(*SERVED)
async def test_name_stays_closed_after_a_loss(make_client: MakeClient, store: Store) -> None:
    client, other = await make_client(), await make_client()
    async with _lost(client.lock("a", ttl=0.8, auto_extend=False, lock_delay=4.0)):
        opens_at = await _opens_at(store)
        await until_cancelled()
    # Its body has ended before the server's deadline, and that does not make a release of it.
    await until(lambda: _closed(other), "closed")
    info = await other.inspect("a")
    assert info.holders == ()
    assert 0 < info.closed <= 4.0
    # Neither held nor waited for; the last node of a quorum may end the vote a little later.
    await until(lambda: _nothing_listed(other), "listed no more")
    assert await other.lock("a").locked()
    with pytest.raises(WouldBlock):
        await other.lock("a").acquire_nowait()
    with pytest.raises(WouldBlock):
        await client.lock("a").acquire_nowait()
    with pytest.raises(AcquireTimeout):
        await other.rwlock("a").read.acquire(timeout=BRIEF)
    async with stalls() as stalled, other.lock("a", timeout=PATIENCE) as lease:
        apart = _apart(store)
        assert opens_at - apart <= granted_at(lease) <= opens_at + 0.1 + apart + stalled()


def _apart(store: Store) -> float:
    """Return how far from each other, in seconds, the nodes of a store may open a name.

    The nodes of a quorum get a message at different moments, and a majority of them opens the name.
    """
    return 0.5 if store.quorum else 0.0


async def _opens_at(store: Store) -> float:
    """Return when the name is open again if its holder is lost, on the server's clock."""
    if store.postgres is not None:
        (row,) = store.postgres.execute(
            "select h.deadline + h.delay from aiodlock.name n, unnest(aiodlock.holders_of(n)) h"
        )
        return float(row[0]) / 1000
    (record,) = (await Direct(await store.raw(), "a").holders()).values()
    return (record.deadline + record.delay) / 1000


@asynccontextmanager
async def _lost(lock: Lock) -> AsyncIterator[None]:
    with pytest.raises(LockLost):
        async with lock:
            yield


async def test_margin_does_not_make_a_release_of_a_loss(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lock = client.lock("a", ttl=0.6, margin=0.4, auto_extend=False, lock_delay=30)
    async with _lost(lock):
        await until_cancelled()
    # Whatever its client still had to say about it comes before this, on the same connection.
    assert await client.lock("a").locked()
    assert await other.lock("a").locked()


async def _nothing_listed(client: Client) -> bool:
    return not [listed async for listed in client.locks()]


async def _closed(client: Client) -> bool:
    return (await client.inspect("a")).closed > 0


@pytest.mark.stores(*SERVED)
async def test_waiter_is_let_in_when_the_delay_is_over(
    make_client: MakeClient, store: Store
) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("a", ttl=0.3, auto_extend=False, lock_delay=0.3).acquire()
    opens_at = await _opens_at(store)
    async with stalls() as stalled, other.lock("a", timeout=PATIENCE) as after:
        apart = _apart(store)
        assert opens_at - apart <= granted_at(after) <= opens_at + 0.1 + apart + stalled()
        assert lease.lost is not None
    with pytest.raises(LockLost):
        await lease.release()


async def test_late_leave_does_not_open_early(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("a", ttl=0.2, auto_extend=False, lock_delay=30).acquire()
    await lease.wait_lost()
    await until(lambda: _closed(other), "closed")
    with pytest.raises(LockLost):
        await lease.release()
    assert await client.lock("a").locked()
    assert await other.lock("a").locked()


async def test_readers_pass_where_a_reader_was_lost(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.rwlock("a", ttl=0.2, auto_extend=False, lock_delay=30).read.acquire()
    await lease.wait_lost()
    await until(lambda: _closed(other), "closed")
    async with other.rwlock("a", timeout=PATIENCE).read:
        pass
    with pytest.raises(WouldBlock):
        await other.lock("a").acquire_nowait()
    with pytest.raises(LockLost):
        await lease.release()


async def test_breaking_ignores_the_delay(make_client: MakeClient) -> None:
    client, other = await make_client(), await make_client()
    lease = await client.lock("a", lock_delay=30).acquire()
    assert await other.break_lock("a") == 1
    async with other.lock("a", timeout=PATIENCE):
        pass
    with pytest.raises(LockLost):
        await lease.release()


@pytest.mark.parametrize("how", ["collected", "client left"])
async def test_name_stays_closed_also_when_only_the_clock_knows_of_the_loss(
    make_client: MakeClient, store: Store, how: str
) -> None:
    other = await make_client()
    client = Client(store.source, **store.options)
    async with client:
        lock = client.lock("a", ttl=0.3, auto_extend=False, lock_delay=30)
        leases = [await asyncio.create_task(lock.acquire())]
        await asyncio.sleep(0.28)
        # The loop is blocked for the last moments of the lease: the deadline passes, and no timer runs.
        while leases[0].held:
            pass
        if how == "collected":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                leases.clear()
            await client.inspect("another name")
    await until(lambda: _closed(other), "closed")
    leases.clear()


async def test_lost_reply_to_a_leave_does_not_hide_that_the_lease_had_expired(
    client: Client,
) -> None:
    """The record is kept for its lock-delay, so the leave that was lost has released nothing."""
    store = store_of(client)
    lock = client.lock("a", ttl=0.4, auto_extend=False, lock_delay=30)
    right = store.leave

    async def lost_on_its_way(*args: Any, **options: Any) -> Any:
        store.leave = right
        await until(lambda: _closed(client), "the end of the lease")
        raise Unanswered("the connection was lost")

    with pytest.raises(LockLost) as lost:
        async with lock:
            store.leave = lost_on_its_way
    assert lost.value.reason == "expired"
