"""Leases that linger on etcd: who queues is watched for, also across cuts, compactions and kills."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import aiodlock
from aiodlock._request import State
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd.store import EtcdBackend

from .. import forked
from ..ports import free_ports
from ..scenes import PATIENCE, STARTING, until, until_waiting
from .cuts import Cut
from .servers import EtcdCluster

MakeClient = Callable[..., Coroutine[Any, Any, aiodlock.Client]]
_numbers = itertools.count(1)
#: Longer than any test.
LONG = 60.0


@pytest.fixture
async def make(one_node: EtcdCluster) -> AsyncIterator[MakeClient]:
    """Give a factory of clients with one prefix."""
    (node,), prefix = one_node.nodes, f"linger{next(_numbers)}"
    async with AsyncExitStack() as stack:

        async def made(endpoint: str = node.endpoint) -> aiodlock.Client:
            client = aiodlock.Client(f"etcd://{endpoint}", prefix=prefix, ttl=20.0)
            return await stack.enter_async_context(client)

        yield made


def _store(client: aiodlock.Client) -> EtcdBackend:
    assert client._core.session is not None
    store = client._core.session.backend
    assert isinstance(store, EtcdBackend)
    return store


def _kept(client: aiodlock.Client) -> dict[str, Any]:
    assert client._core.session is not None
    return client._core.session.lingering.kept


async def test_no_message_is_sent_between_two_bodies(
    make: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await make()
    lock = client.lock("a", linger=LONG)
    async with lock as first:
        pass

    def transact(*about: object) -> Any:
        raise AssertionError(f"it was asked: {about}")

    monkeypatch.setattr(_store(client).cluster, "transact", transact)
    watches = len(_store(client).cluster.watches._watches)
    for _ in range(50):
        async with lock as lease:
            assert lease.token == first.token
        async with client.lock("a", linger=LONG) as lease:
            assert lease.token == first.token
    assert len(_store(client).cluster.watches._watches) == watches
    monkeypatch.undo()


async def test_one_watch_for_a_lease_that_lingers_and_none_when_it_is_released(
    make: MakeClient,
) -> None:
    client, other = await make(), await make()
    before = len(_store(client).cluster.watches._watches)
    for name in "abc":
        async with client.lock(name, linger=LONG):
            pass
    assert len(_store(client).cluster.watches._watches) == before + 3
    for name in "abc":
        async with other.lock(name, timeout=PATIENCE):
            pass
    await until(lambda: len(_store(client).cluster.watches._watches) == before)


async def test_recall_is_missed_while_the_connection_is_cut(
    make: MakeClient, one_node: EtcdCluster
) -> None:
    (node,), (port,) = one_node.nodes, free_ports(1)
    async with Cut(port, node.port) as cut:
        client, other = await make(f"127.0.0.1:{port}"), await make()
        async with client.lock("a", linger=LONG) as first:
            pass
        cut.cut()
        cut.drop()
        task = asyncio.create_task(other.lock("a", timeout=PATIENCE).acquire())
        await until_waiting(other, "a")
        assert _kept(client)
        cut.heal()
        lease = await task
        assert lease.token > first.token
        await lease.release()
        assert not _kept(client)
        await client.__aexit__(None, None, None)


async def test_recall_is_missed_and_compacted(make: MakeClient, one_node: EtcdCluster) -> None:
    client, other = await make(), await make()
    async with client.lock("a", linger=LONG):
        pass
    store = _store(client)
    place = _kept(client)["a"].place
    watch = place._successors._watch
    assert watch is not None
    told = asyncio.Event()
    watch.heard = lambda events, revision: told.set()  # and what is told now is lost
    task = asyncio.create_task(other.lock("a", timeout=PATIENCE).acquire())
    await until_waiting(other, "a")
    await told.wait()  # told later, it would set the start anew
    watch.start = 1
    revision = (await store.cluster.read(place.keys)).revision
    await asyncio.to_thread(one_node.call, "kv/compaction", revision=str(revision))
    store.cluster.link.failed(store.cluster.link.generation, Unanswered("cut by the test"))
    await (await task).release()
    assert not _kept(client)


async def test_owner_that_gets_in_past_waiters_does_not_keep_its_lease(make: MakeClient) -> None:
    client, friend, other = await make(), await make(), await make()
    async with friend.lock("a", owner="us"):
        task = asyncio.create_task(other.lock("a", timeout=PATIENCE).acquire())
        await until_waiting(other, "a")
        async with client.lock("a", owner="us", linger=LONG) as lease:
            await until(lambda: not lease._request.may_linger)
        assert not _kept(client)
    await (await task).release()


async def test_lease_whose_renewal_has_no_answer_is_not_handed_out(make: MakeClient) -> None:
    client = await make()
    async with client.lock("a", linger=LONG) as first:
        pass
    request = _kept(client)["a"]
    request.place._failed = True
    async with client.lock("a", linger=LONG, timeout=PATIENCE) as second:
        assert second.token > first.token
    await until(lambda: request.state is State.OVER)


async def test_killed_while_idle_it_costs_what_a_dead_holder_costs(
    one_node: EtcdCluster,
) -> None:
    (node,), name = one_node.nodes, f"killed {next(_numbers)}"
    process = await forked.start(
        "tests.fault.lingerer",
        f"etcd://{node.endpoint}",
        name,
        "2",
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        first = int(await asyncio.wait_for(process.stdout.readline(), STARTING))
    finally:
        process.kill()
        await process.communicate()
    async with aiodlock.Client(f"etcd://{node.endpoint}") as client:
        assert await client.lock(name).locked()
        async with client.lock(name, timeout=3 * PATIENCE) as lease:
            assert lease.token > first
