"""An address that leads to a node of another cluster: nobody is sent there."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import aiodlock
from aiodlock.backends.redis.cluster import ClusterBackend
from aiodlock.backends.redis.cluster.topology import slot_of

from ..contract.test_renewal import kill
from ..proxy import FaultProxy
from ..scenes import PATIENCE, store_of, until
from ..servers import BINARIES
from .cluster import SLOTS, Cluster, port


@pytest.fixture
def ours() -> Iterator[Cluster]:
    with Cluster(BINARIES["valkey9"](), replicas=0) as cluster:
        yield cluster


@pytest.fixture
def theirs() -> Iterator[Cluster]:
    with Cluster(BINARIES["valkey9"](), replicas=0) as cluster:
        yield cluster


def _url(*ports: int) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def _ports_of(client: aiodlock.Client) -> set[int]:
    store = store_of(client)
    assert isinstance(store, ClusterBackend)
    return {port for _, port in store.topology.nodes}


def _name_on(group: int) -> str:
    names = (f"name {n}" for n in range(1000))
    return next(name for name in names if slot_of(name) * 3 // SLOTS == group)


def _events(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [getattr(record, "event", "") for record in told]


@pytest.mark.parametrize("place", [0, 2])
async def test_seed_of_another_cluster_is_not_believed(
    ours: Cluster, theirs: Cluster, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    ports = ours.ports[:2]
    ports.insert(place, theirs.ports[0])
    for _ in range(6):
        async with aiodlock.Client(_url(*ports)) as client:
            assert _ports_of(client) == set(ours.ports)
            await until(lambda: "other_store" in _events(caplog), "a line of the log")


async def test_next_session_of_a_client_knows_its_cluster_again(
    ours: Cluster, theirs: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FaultProxy(f"redis://127.0.0.1:{ours.ports[0]}") as proxy,
        aiodlock.Client(_url(proxy.port)) as client,
    ):
        proxy.lead_to(f"redis://127.0.0.1:{theirs.ports[0]}")
        kill(client)
        await until(lambda: "other_store" in _events(caplog), "a line of the log")
        with pytest.raises(aiodlock.BackendError):
            await client.lock("name", timeout=0.5).acquire()
        proxy.lead_to(f"redis://127.0.0.1:{ours.ports[0]}")
        async with client.lock("name"):
            assert _ports_of(client) == set(ours.ports)


async def test_as_many_seeds_of_two_clusters_are_refused(ours: Cluster, theirs: Cluster) -> None:
    for ports in ((ours.ports[0], theirs.ports[0]), (theirs.ports[1], ours.ports[1])):
        with pytest.raises(aiodlock.BackendError, match="different clusters"):
            await aiodlock.Client(_url(*ports)).__aenter__()


async def test_address_of_a_node_that_leads_to_another_cluster_leads_nowhere(
    ours: Cluster, theirs: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultProxy(f"redis://127.0.0.1:{ours.ports[0]}") as proxy:
        ours.call(ours.nodes[0], "CONFIG", "SET", "cluster-announce-port", proxy.port)
        bus = ours.ports[0] + 10_000
        ours.call(ours.nodes[0], "CONFIG", "SET", "cluster-announce-bus-port", bus)
        ours.wait(
            lambda: all(
                proxy.port in [group[2][1] for group in ours.call(node, "CLUSTER", "SLOTS")]
                for node in ours.nodes
            ),
            "the new port",
        )
        expected = {proxy.port, *ours.ports[1:]}
        url = _url(*ours.ports[1:])
        async with aiodlock.Client(url, ttl=60.0) as one, aiodlock.Client(url, ttl=60.0) as two:
            assert _ports_of(one) == expected
            untouched = await one.lock(_name_on(2)).acquire()
            kept = await one.lock(_name_on(0)).acquire()
            proxy.lead_to(f"redis://127.0.0.1:{theirs.ports[0]}")
            proxy.cut()
            await until(lambda: _events(caplog).count("other_store") >= 2, "lines of the log")
            for name in (_name_on(0), _name_on(2)):
                with pytest.raises((aiodlock.AcquireTimeout, aiodlock.BackendUnavailable)):
                    await two.lock(name, timeout=1.0).acquire()
            assert _ports_of(one) == _ports_of(two) == expected
            proxy.lead_to(f"redis://127.0.0.1:{ours.ports[0]}")
            proxy.cut()
            async with two.lock("another one", timeout=PATIENCE):
                pass
            for lease in (untouched, kept):
                assert lease.held
                await lease.release()
    assert _events(caplog).count("other_store") == 2  # once for each client


async def test_node_that_was_reset_and_given_to_another_cluster_is_not_believed(
    ours: Cluster, theirs: Cluster
) -> None:
    """It keeps its id."""
    async with aiodlock.Client(ours.url) as client:
        given = ours.add_primary()
        ours.configure("cluster-allow-replica-migration", "no")
        id = ours.call(given, "CLUSTER", "MYID")
        # The client has to know the new one: a slot moves there, and back.
        moved = slot_of("name")
        source = ours.primary_of("{name}")
        ours.move_slot(moved, source, given).finish()
        async with client.lock("name", timeout=PATIENCE):
            pass
        ours.move_slot(moved, given, source).finish()
        for node in ours.nodes[:3]:
            ours.call(node, "CLUSTER", "FORGET", id)
        ours.call(given, "FLUSHALL")
        ours.call(given, "CLUSTER", "RESET", "SOFT")
        assert ours.call(given, "CLUSTER", "MYID") == id
        theirs.call(given, "CLUSTER", "MEET", "127.0.0.1", theirs.ports[0])
        theirs.wait(
            lambda: len(theirs.call(given, "CLUSTER", "NODES").splitlines()) == 4, "a meeting"
        )
        store = store_of(client)
        assert isinstance(store, ClusterBackend)
        for _ in range(10):
            await store.topology.learn()
        assert _ports_of(client) - {port(given)} == set(ours.ports[:3])
        async with client.lock("name", timeout=PATIENCE):
            pass


async def test_another_cluster_is_believed_when_the_known_one_is_silent_and_no_lease_is_left(
    ours: Cluster, theirs: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Moved to new nodes behind the same names."""
    async with FaultProxy(f"redis://127.0.0.1:{ours.ports[0]}") as proxy:
        async with aiodlock.Client(_url(proxy.port), ttl=4.0, unavailable_after=3.0) as client:
            lease = await client.lock("name").acquire()
            proxy.lead_to(f"redis://127.0.0.1:{theirs.ports[0]}")
            for node in ours.nodes:
                node.kill()
            proxy.cut()
            await lease.wait_lost()
            assert _ports_of(client) == set(ours.ports)
            await until(lambda: _ports_of(client) == set(theirs.ports), "the other cluster")
            async with client.lock("name", timeout=PATIENCE) as again:
                assert again.held
    assert "store_replaced" in _events(caplog)
