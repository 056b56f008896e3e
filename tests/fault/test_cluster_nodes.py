"""One node of a cluster is silent, old, loading or away: what it costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aiodlock
from aiodlock._embedded import EmbeddedServer
from aiodlock.backends.redis import server as server_module
from aiodlock.backends.redis.cluster import ClusterBackend
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.permissions import check_permissions
from aiodlock.backends.redis.server import Server
from aiodlock.backends.redis.wire import Wire

from ..inside import session_of
from ..scenes import PATIENCE, keeper_of, store_of, until, until_outlived, until_waiting
from ..security.fake_server import FakeServer
from ..servers import BINARIES
from ..topology.cluster import Cluster, port
from .scenes import waiting_for_notice


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Give a cluster of a test's own: it does not stay as it was."""
    with Cluster(BINARIES["valkey9"](), replicas=0) as cluster:
        yield cluster


async def test_silent_node_of_a_cluster_costs_no_lease_on_another(cluster: Cluster) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    async with aiodlock.Client(cluster.url, ttl=6.0) as client:
        # Extended in one batch.
        leases = [await client.lock(f"name {n}").acquire() for n in range(20)]
        nodes = [cluster.primary_of(f"aiodlock:2:lock:{{name%20{n}}}:state") for n in range(20)]
        stopped = nodes[0]
        keeper = keeper_of(client)
        for place in keeper.places.values():
            keeper.extend_now(place)
        stopped.pause()
        try:
            # A silent connection is given up after a second.
            async with asyncio.timeout(PATIENCE):
                await leases[0].wait_lost()
            others = [lease for n, lease in enumerate(leases) if nodes[n] is not stopped]
            await asyncio.gather(*(until_outlived(lease) for lease in others))
            assert [lease for lease in others if lease.lost] == []
        finally:
            stopped.resume()


def _node_for(cluster: Cluster, name: str) -> EmbeddedServer:
    return cluster.primary_of(keys_of("aiodlock", "lock", name).state)


@pytest.mark.parametrize("binary", ["redis62", "valkey9"])
async def test_node_is_only_asked_to_speak_as_it_can(
    binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has just come up may be called before all was found out about it."""
    go_on = asyncio.Event()
    check = check_permissions

    async def late(*args: Any, **options: Any) -> None:
        await go_on.wait()
        await check(*args, **options)

    with Cluster(BINARIES[binary](), replicas=0) as cluster:
        async with aiodlock.Client(cluster.url, waiter_ttl=60.0, ttl=60.0) as client:
            backend = store_of(client)
            assert isinstance(backend, ClusterBackend)
            monkeypatch.setattr(server_module, "check_permissions", late)
            address = ("127.0.0.1", port(_node_for(cluster, "name")))
            backend.topology.nodes.pop(address).scope.cancel()
            node = backend.topology.start(address)
            held = await client.lock("name").acquire()
            waiting = asyncio.create_task(client.lock("name").acquire())
            await until_waiting(client, "name")
            await held.release()
            lease = await asyncio.wait_for(waiting, PATIENCE)
            await lease.release()
            assert not node.up.is_set()
            go_on.set()


@pytest.mark.parametrize("configured", [False, True])
async def test_node_that_goes_while_it_is_prepared_does_not_end_the_client(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    check = check_permissions
    gone = _node_for(cluster, "gone")
    was_there = asyncio.Event()

    async def unlucky(wire: Wire, **options: Any) -> None:
        await check(wire, **options)
        if wire.peer == ("127.0.0.1", port(gone)) and not was_there.is_set():
            gone.pause()
            wire.close()
            was_there.set()

    try:
        async with aiodlock.Client(cluster.url, configure_notifications=configured) as client:
            backend = store_of(client)
            assert isinstance(backend, ClusterBackend)
            monkeypatch.setattr(server_module, "check_permissions", unlucky)
            address = ("127.0.0.1", port(gone))
            backend.topology.nodes.pop(address).scope.cancel()
            node = backend.topology.start(address)
            await was_there.wait()
            await asyncio.sleep(1.0)  # for longer than a call waits for its connection
            gone.resume()
            await until(node.up.is_set, "the node")
            await (await client.lock("gone").acquire()).release()
    finally:
        gone.resume()


async def test_lease_on_a_node_that_has_only_just_been_found_is_extended_later(
    cluster: Cluster,
) -> None:
    """In the turn in which a node is added it has no connections yet, not even some that are down."""
    async with aiodlock.Client(cluster.url, ttl=20.0) as client:
        backend = store_of(client)
        assert isinstance(backend, ClusterBackend)
        lease = await client.lock("name").acquire()
        address = ("127.0.0.1", port(_node_for(cluster, "name")))
        (place,) = keeper_of(client).places.values()
        deadline = place.deadline
        backend.topology.nodes.pop(address).scope.cancel()
        node = backend.topology.start(address)
        (outcome,) = backend.extend([(place, place.length)])
        with pytest.raises(aiodlock.BackendUnavailable):
            await outcome
        backend.topology.nodes.pop(address).scope.cancel()
        node = backend.topology.start(address)
        keeper_of(client).extend_now(place)
        await until(node.up.is_set, "the node")
        await until(lambda: place.deadline > deadline, "an extension")
        assert lease.held
        await lease.release()


async def test_node_that_refuses_this_user_costs_no_lease_on_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts to use it, it has no connections, not even some that are down."""
    away = _node_for(cluster, "there")
    names = ("there", next(n for n in map(str, range(99)) if _node_for(cluster, n) is not away))
    async with aiodlock.Client(cluster.url, ttl=4.0) as client:
        backend = store_of(client)
        assert isinstance(backend, ClusterBackend)
        there, here = [await client.lock(name).acquire() for name in names]
        address = ("127.0.0.1", port(away))
        backend.topology.nodes.pop(address).scope.cancel()
        attempts = 0

        async def refused(self: Server, *_: object) -> None:
            nonlocal attempts
            attempts += 1
            raise aiodlock.BackendError("WRONGPASS")

        run = Server.run
        monkeypatch.setattr(Server, "run", refused)
        node = backend.topology.start(address)
        await there.wait_lost()
        await until_outlived(here)
        assert here.held
        assert attempts > 1
        monkeypatch.setattr(Server, "run", run)
        await until(node.up.is_set, "the node")
        await (await client.lock("there").acquire()).release()
        await here.release()


async def test_node_of_a_cluster_that_is_loading_is_asked_again() -> None:
    told = 0

    def answer(command: tuple[bytes, ...]) -> bytes | None:
        nonlocal told
        if command[0] != b"CLUSTER":
            return None
        told += command[1] == b"SLOTS"
        if told <= 3:
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        return b"-ERR This instance has cluster support disabled\r\n"

    async with FakeServer() as server:
        server.answer = answer
        with pytest.raises(aiodlock.BackendError, match="cluster support disabled"):
            async with aiodlock.Client(server.url.replace("redis:", "redis+cluster:")):
                pass
    assert told == 4


async def test_waiter_that_was_given_up_while_its_node_was_away_is_not_listened_for(
    cluster: Cluster,
) -> None:
    cluster.configure("cluster-require-full-coverage", "no")
    async with aiodlock.Client(cluster.url, ttl=2.0) as client:
        held = await client.lock("name", ttl=3.0).acquire()
        backend = store_of(client)
        assert isinstance(backend, ClusterBackend)
        waiting = asyncio.create_task(client.lock("name").acquire())
        await waiting_for_notice(client)
        node = _node_for(cluster, "name")
        wakeups = backend.topology.node_of("name").server.wakeups
        assert wakeups is not None
        await until(lambda: wakeups._listened, "listening")
        node.stop()
        await until(lambda: backend.failure is not None, "its connection's end")
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(lambda: len(session_of(client).requests) == 1, "the end of the waiter")
        assert not wakeups._listened
        await held.wait_lost()
