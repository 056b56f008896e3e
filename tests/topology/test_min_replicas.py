"""``min_replicas``: what no replica has does not count."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import aiodlock
from aiodlock.backends.redis.keys import keys_of

from ..conftest import MakeClient
from ..proxy import FaultProxy, containing
from ..scenes import (
    LASTING,
    cancelled,
    takes,
    until,
    until_extended,
    until_free,
    until_outlived,
    until_waiting,
)
from .servers import Node, Replicated

STATE = keys_of("aiodlock", "lock", "name").state


@pytest.fixture
async def make_client(replicated: Replicated) -> AsyncIterator[MakeClient]:
    """Give a factory of entered clients that ask for one replica."""
    async with AsyncExitStack() as stack:

        async def make(url: str | None = None, **options: object) -> aiodlock.Client:
            settings: dict[str, object] = {"min_replicas": 1, **options}
            client = aiodlock.Client(url or replicated.primary.url, **settings)  # type: ignore[arg-type]
            return await stack.enter_async_context(client)

        yield make


def replica(replicated: Replicated) -> Node:
    return replicated.followers[0]


def calls(node: Node, command: str) -> int:
    """Return how often the server was asked so."""
    found = re.search(rf"cmdstat_{command}:calls=(\d+)", node.call("INFO", "commandstats"))
    return int(found[1]) if found else 0


def holders(node: Node) -> int:
    return int(node.call("HLEN", STATE))


async def test_grant_counts_when_the_replica_has_it(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client()
    replica(replicated).pause()
    acquiring = asyncio.create_task(client.lock("name").acquire())
    await until(lambda: holders(replicated.primary), "a grant on the primary")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(acquiring), 0.8)
    replica(replicated).resume()
    lease = await acquiring
    assert holders(replica(replicated)) == 1
    await lease.release()


async def test_grant_that_had_to_wait_for_the_replica_has_its_whole_ttl(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client(ttl=10.0, waiter_ttl=3.0)
    replica(replicated).pause()
    acquiring = asyncio.create_task(client.lock("name").acquire())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(acquiring), 4.0)
    replica(replicated).resume()
    lease = await acquiring
    assert lease.remaining() > 8.0
    await lease.release()


async def test_handed_off_grant_counts_when_the_replica_has_it(
    replicated: Replicated, make_client: MakeClient
) -> None:
    careless, careful = await make_client(min_replicas=0), await make_client()
    held = await careless.lock("name").acquire()
    acquiring = asyncio.create_task(careful.lock("name").acquire())
    await until_waiting(careless, "name")
    replica(replicated).pause()
    await held.release()

    async def is_handed_off() -> bool:
        return bool((await careless.inspect("name")).holders)

    await until(is_handed_off, "the hand-off")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(acquiring), 0.8)
    replica(replicated).resume()
    lease = await acquiring
    assert lease.token > held.token
    await lease.release()


async def test_repeated_acquire_that_writes_nothing_is_not_taken_for_replicated(
    replicated: Replicated, make_client: MakeClient
) -> None:
    careless = await make_client(min_replicas=0)
    async with FaultProxy(replicated.primary.url) as proxy:
        careful = await make_client(url=proxy.url, waiter_ttl=30.0)
        held = await careless.lock("name").acquire()
        lost = proxy.drop_reply(containing(b"\r\nwait\r\n"))
        acquiring = asyncio.create_task(careful.lock("name").acquire())
        await lost.happened.wait()
        # Now the hand-off goes to a request that does not know yet that it waits.
        await until_waiting(careless, "name")
        replica(replicated).pause()
        await held.release()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(acquiring), 2.5)
        replica(replicated).resume()
        await (await acquiring).release()


async def test_extension_counts_when_the_replica_has_it(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client()
    lease = await client.lock("name", ttl=LASTING).acquire()
    await until_outlived(lease)
    replica(replicated).pause()
    async with takes(at_most=LASTING + 0.1):
        lost = await lease.wait_lost()
    assert lost.reason == "expired"
    with pytest.raises(aiodlock.LockLost):
        await lease.release()


async def test_lease_is_kept_when_the_replica_is_back_in_time(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client()
    lease = await client.lock("name", ttl=6.0).acquire()
    replica(replicated).pause()
    await until(lambda: lease.remaining() < 3.5, "an extension that was due")
    replica(replicated).resume()
    await until_extended(lease)
    await lease.release()


async def test_what_does_not_wait_says_in_time_that_replicas_are_missing(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client()
    replica(replicated).pause()
    async with takes(at_most=2.0):
        with pytest.raises(aiodlock.BackendUnavailable, match="min_replicas=1"):
            await client.lock("name").acquire_nowait()
    replica(replicated).resume()
    await until_free(client, "name")


async def test_acquire_gives_up_when_replicas_stay_away(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client(unavailable_after=1.0)
    replica(replicated).pause()
    with pytest.raises(aiodlock.BackendUnavailable, match="min_replicas=1"):
        await client.lock("name").acquire()
    replica(replicated).resume()
    await until_free(client, "name")


async def test_waiter_gives_up_when_replicas_stay_away(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client(unavailable_after=LASTING, waiter_ttl=LASTING)
    careless = await make_client(min_replicas=0)
    held = await careless.lock("name").acquire()
    acquiring = asyncio.create_task(client.lock("name").acquire())
    await until_waiting(careless, "name")
    replica(replicated).pause()
    with pytest.raises(aiodlock.BackendUnavailable, match="min_replicas=1"):
        await acquiring
    replica(replicated).resume()
    await held.release()
    await until_free(client, "name")


async def test_entering_raises_when_so_many_replicas_are_not_connected(
    replicated: Replicated,
) -> None:
    async with takes(at_most=5.0):
        with pytest.raises(aiodlock.BackendUnavailable, match="min_replicas=2"):
            async with aiodlock.Client(replicated.primary.url, min_replicas=2):
                pass


async def test_entering_says_that_the_user_may_not_wait(replicated: Replicated) -> None:
    primary = replicated.primary
    primary.call("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-wait")
    try:
        url = primary.url.replace("://", "://limited:secret@")
        with pytest.raises(aiodlock.BackendError, match="WAIT") as refused:
            async with aiodlock.Client(url, min_replicas=1):
                pass
        assert not isinstance(refused.value, aiodlock.BackendUnavailable)
    finally:
        primary.call("ACL", "DELUSER", "limited")


async def test_acquire_that_is_cancelled_before_it_was_sent_is_never_sent(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client()
    replica(replicated).pause()
    first = asyncio.create_task(client.lock("other").acquire())
    await until(lambda: calls(replicated.primary, "wait") >= 1, "a round on its way")
    second = asyncio.create_task(client.lock("name").acquire())
    await asyncio.sleep(0)
    await cancelled(second)
    replica(replicated).resume()
    await (await first).release()
    assert holders(replicated.primary) == 0


async def test_one_wait_covers_many_grants_and_extensions(
    replicated: Replicated, make_client: MakeClient
) -> None:
    client = await make_client(ttl=LASTING)
    replicated.primary.call("CONFIG", "RESETSTAT")
    leases = await asyncio.gather(*(client.lock(f"name {n}").acquire() for n in range(200)))
    granting = calls(replicated.primary, "wait")
    await until_outlived(leases[-1])
    extending = calls(replicated.primary, "wait") - granting
    assert granting <= 20
    assert extending <= 60, "some three beats of 200 leases"
    await asyncio.gather(*(lease.release() for lease in leases))


async def test_without_min_replicas_nobody_waits_and_there_is_no_third_connection(
    replicated: Replicated, make_client: MakeClient
) -> None:
    def connections() -> int:
        clients = replicated.primary.call("CLIENT", "LIST", "TYPE", "normal")
        subscribers = replicated.primary.call("CLIENT", "LIST", "TYPE", "pubsub")
        return len(clients.splitlines()) + len(subscribers.splitlines())

    for kind in ("normal", "pubsub"):  # of clients that have gone, and whose end was not seen yet
        replicated.primary.call("CLIENT", "KILL", "TYPE", kind)
    before = connections()
    client = await make_client(min_replicas=0)
    replicated.primary.call("CONFIG", "RESETSTAT")
    async with client.lock("name") as lease:
        await lease.extend()
    assert connections() - before == 2
    assert calls(replicated.primary, "wait") == 0
    await make_client(min_replicas=1)
    assert connections() - before == 5


async def test_contended_lock_goes_round_with_growing_tokens(make_client: MakeClient) -> None:
    clients = [await make_client() for _ in range(2)]
    tokens: list[int] = []

    async def turn(client: aiodlock.Client) -> None:
        for _ in range(10):
            async with client.lock("name") as lease:
                tokens.append(lease.token)

    await asyncio.gather(*(turn(client) for client in clients for _ in range(5)))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 100


async def test_demoted_primary_is_not_stormed_by_those_who_wait_for_its_replicas(
    replicated: Replicated, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses WAIT before it refuses a write; either means that it is the wrong server."""
    primary = replicated.primary
    async with aiodlock.Client(primary.url, min_replicas=1, ttl=LASTING, waiter_ttl=LASTING) as one:
        before = _connections_so_far(primary)
        primary.call("REPLICAOF", "127.0.0.1", replica(replicated).port)
        try:
            acquiring = asyncio.create_task(one.lock("name").acquire())
            await asyncio.sleep(4.0)
            assert _connections_so_far(primary) - before < 40
        finally:
            primary.call("REPLICAOF", "NO", "ONE")
        await asyncio.to_thread(replicated.settle)
        await (await acquiring).release()
    warned = [r for r in caplog.records if getattr(r, "event", "") == "no_connection"]
    assert len([r for r in warned if r.levelno >= logging.WARNING]) <= 6


def _connections_so_far(node: Node) -> int:
    found = re.search(r"total_connections_received:(\d+)", node.call("INFO", "stats"))
    assert found is not None
    return int(found[1])
