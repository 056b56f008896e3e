"""A cluster: names on their nodes, nodes that die, slots that move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import RedisCluster
from redis.crc import key_slot

import aiodlock
from aiodlock._model import Waiting
from aiodlock._request import Request
from aiodlock.backends.redis.cluster import ClusterBackend, seeds_of
from aiodlock.backends.redis.cluster.topology import slot_of
from aiodlock.backends.redis.keys import keys_of

from ..scenes import SOON, STARTING, keeper_of, store_of, takes, until, until_waiting
from ..servers import BINARIES, embedded
from .cluster import Cluster, port


@pytest.fixture(params=["valkey9"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give a cluster of a test's own: it does not stay as it was."""
    with Cluster(BINARIES[request.param]()) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[aiodlock.Client]:
    async with aiodlock.Client(cluster.url, ttl=3.0, waiter_ttl=2.0) as client:
        yield client


def _backend(client: aiodlock.Client) -> ClusterBackend:
    backend = store_of(client)
    assert isinstance(backend, ClusterBackend)
    return backend


def _state(name: str) -> str:
    return keys_of("aiodlock", "lock", name).state


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_all_keys_of_a_name_are_in_one_slot(name: str) -> None:
    keys = keys_of("aiodlock", "lock", name)
    assert {key_slot(key.encode()) for key in keys} == {slot_of(name)}


async def test_names_are_spread_over_the_nodes_and_two_connections_reach_each(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    before = [_connections(cluster, node) for node in cluster.primaries]
    leases = [await client.lock(f"name {n}").acquire() for n in range(60)]
    found = {info.name async for info in client.locks("name *")}
    assert found == {f"name {n}" for n in range(60)}
    held = [int(cluster.call(node, "DBSIZE")) for node in cluster.primaries]
    assert min(held) > 10
    assert [_connections(cluster, node) for node in cluster.primaries] == before
    assert all(connections == 2 for connections in before)
    for lease in leases:
        await lease.release()


def _connections(cluster: Cluster, node: object) -> int:
    """Count those of clients: without the replicas and our own."""
    lines = cluster.call(node, "CLIENT", "LIST").splitlines()  # type: ignore[arg-type]
    return len([line for line in lines if "flags=S" not in line]) - 1


async def test_hand_off_is_heard_on_a_channel_of_the_names_own_shard(cluster: Cluster) -> None:
    async with (
        aiodlock.Client(cluster.url, ttl=60.0, waiter_ttl=60.0) as one,
        aiodlock.Client(cluster.url, ttl=60.0, waiter_ttl=60.0) as two,
    ):
        held = await one.lock("name").acquire()
        waiting = asyncio.create_task(two.lock("name").acquire())
        await until_waiting(one, "name")
        owner = cluster.primary_of(_state("name"))
        await until(lambda: len(cluster.call(owner, "PUBSUB", "SHARDCHANNELS")) == 1)
        async with takes(at_most=5.0):  # a waiter asks by itself only every 20 s
            await held.release()
            lease = await waiting
        await lease.release()
        await until(lambda: not cluster.call(owner, "PUBSUB", "SHARDCHANNELS"))


async def test_waiter_who_is_told_of_a_success_on_record_is_not_listened_for_any_more(
    cluster: Cluster,
) -> None:
    """The store has forgotten it, so it is not left."""
    async with (
        aiodlock.Client(cluster.url, ttl=60.0, waiter_ttl=60.0) as one,
        aiodlock.Client(cluster.url, ttl=60.0, waiter_ttl=60.0) as two,
    ):

        async def is_first() -> bool:
            async with two.once("name", keep=60.0) as once:
                return once.first

        owner = cluster.primary_of(keys_of("aiodlock", "once", "name").state)
        async with one.once("name", keep=60.0):
            waiting = asyncio.create_task(is_first())
            await until_waiting(one, "name", kind="once")
            await until(lambda: len(cluster.call(owner, "PUBSUB", "SHARDCHANNELS")) == 1)
        assert not await waiting
        await until(lambda: not cluster.call(owner, "PUBSUB", "SHARDCHANNELS"))
        assert not _listening(two)


async def test_answer_that_comes_after_the_waiter_has_left_does_not_begin_to_listen_again(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    held = await client.lock("name").acquire()
    waiting = asyncio.create_task(client.lock("name").acquire())
    await until_waiting(client, "name")
    (place,) = [place for place in keeper_of(client).places.values() if not place.granted]
    (outcome,) = _backend(client).extend([(place, place.length)])
    waiting.cancel()
    await asyncio.wait({waiting})
    assert isinstance(await outcome, Waiting), "it was sent before"
    assert not _listening(client)
    await held.release()


async def test_holder_and_waiters_outlive_the_move_of_their_slot(cluster: Cluster) -> None:
    async with (
        aiodlock.Client(cluster.url, ttl=6.0, waiter_ttl=6.0) as client,
        aiodlock.Client(cluster.url, ttl=6.0, waiter_ttl=6.0) as other,
    ):
        order: list[int] = []

        async def wait(number: int) -> None:
            async with (client, other)[number % 2].lock("name") as lease:
                order.append(number)
                await lease.extend()

        lease = await client.lock("name").acquire()
        waiting = []
        for number in range(4):
            waiting.append(asyncio.create_task(wait(number)))
            await until_waiting(client, "name", number + 1)
        source = cluster.primary_of(_state("name"))
        target = next(node for node in cluster.primaries if node is not source)
        moving = cluster.move_slot(slot_of("name"), source, target)
        for _ in range(4):  # some keys here, some there: scripts are told to try again
            await lease.extend() if not moving.move_keys(1) else None
            await asyncio.sleep(0.6)
        moving.finish()
        assert cluster.primary_of(_state("name")) is target
        await lease.extend()
        await lease.release()
        await asyncio.gather(*waiting)
        assert order == [0, 1, 2, 3]
        assert not (await other.inspect("name")).holders


async def test_new_requests_for_a_slot_on_its_way_are_served_when_it_has_arrived(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    """Neither node takes a script some of whose keys do not exist, while the slot is between them."""
    async with client.lock("name") as lease:
        before = lease.token
    source = cluster.primary_of(_state("name"))
    target = next(node for node in cluster.primaries if node is not source)
    moving = cluster.move_slot(slot_of("name"), source, target)
    waiting = [asyncio.create_task(client.lock("name").acquire()) for _ in range(3)]
    await until(
        lambda: all(request.place.silent for request in _places(client)), "a refusal for each"
    )
    moving.finish()
    for _ in range(3):
        done, _ = await asyncio.wait(waiting, timeout=STARTING, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        waiting.remove(task)
        assert task.result().token > before
        before = task.result().token
        await task.result().release()


def _places(client: aiodlock.Client) -> list[Request]:
    assert client._core.session is not None
    return list(client._core.session.requests.values())


async def test_replica_takes_over_and_waiters_come_back(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    async with aiodlock.Client(cluster.url, ttl=3.0, waiter_ttl=2.0) as other:
        before = await client.lock("name").acquire()
        await before.release()
        held = asyncio.Event()
        outcome: list[BaseException | None] = []

        async def hold() -> None:
            try:
                async with client.lock("name"):
                    held.set()
                    await asyncio.sleep(1.0)
                outcome.append(None)
            except aiodlock.LockError as error:
                outcome.append(error)

        holding = asyncio.create_task(hold())
        await held.wait()
        waiting = asyncio.create_task(other.lock("name").acquire())
        await until_waiting(other, "name")
        owner = cluster.primary_of(_state("name"))
        owner.kill()
        lease = await asyncio.wait_for(waiting, 2 * STARTING)
        assert lease.token > before.token
        assert cluster.primary_of(_state("name")) is not owner
        await lease.release()
        await holding
        # Both are honest ends: it kept its lease, or was told that it had lost it.
        assert outcome == [None] or isinstance(outcome[0], aiodlock.LockLost)


async def test_holder_whom_the_new_primary_does_not_know_is_told_before_its_next_extension(
    cluster: Cluster,
) -> None:
    """Nothing is sent to the dead node meanwhile that would tell."""
    async with aiodlock.Client(cluster.url, ttl=300.0) as one, aiodlock.Client(cluster.url) as two:
        owner = cluster.primary_of(_state("name"))
        replica = cluster.nodes[cluster.nodes.index(owner) + 3]
        replica.pause()
        cluster.call(
            owner, "CLIENT", "KILL", "TYPE", "replica"
        )  # what is in a socket would be read
        lease = await one.lock("name").acquire()
        owner.kill()
        replica.resume()
        successor = await two.lock("name", timeout=2 * STARTING).acquire()
        assert successor.token > lease.token
        async with takes(at_most=5.0):
            assert (await lease.wait_lost()).reason in ("gone", "taken_over")
        await successor.release()


async def test_client_that_only_looks_sees_what_is_held_after_a_failover(cluster: Cluster) -> None:
    """Nothing else tells such a client that another node has taken over: it has no lease to extend."""
    async with (
        aiodlock.Client(cluster.url, ttl=60.0) as lists,
        aiodlock.Client(cluster.url, ttl=60.0) as inspects,
        aiodlock.Client(cluster.url, ttl=60.0) as asks_once,
        aiodlock.Client(cluster.url, ttl=60.0) as other,
    ):
        cluster.primary_of(_state("name")).kill()
        async with other.lock("name", timeout=60.0):
            await asyncio.to_thread(cluster.wait_until_fine)
            assert [info.name async for info in lists.locks()] == ["name"]
            assert (await inspects.inspect("name")).holders
            with pytest.raises(aiodlock.WouldBlock):
                await asks_once.lock("name").acquire_nowait()


async def test_observer_hears_of_leaders_when_its_node_has_died(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    async with aiodlock.Client(cluster.url, ttl=3.0, waiter_ttl=2.0) as leading:
        values = client.election("name").observe(interval=600)
        async with leading.election("name").lead("a"):
            assert await anext(values) == "a"
        waiting = asyncio.ensure_future(anext(values))
        topology = _backend(client).topology
        before = topology.node_of("name")
        cluster.primary_of(_state("name")).kill()
        await until(lambda: topology.owner("name") not in (before, None), within=2 * STARTING)
        await topology.node_of("name").up.wait()
        await asyncio.sleep(1.0)  # by then it has looked, as its node has gone
        assert not waiting.done()
        async with asyncio.timeout(STARTING), leading.election("name").lead("b"):
            assert await waiting == "b"
        await values.aclose()


async def test_observer_waits_while_it_is_not_known_which_node_owns_the_name(
    client: aiodlock.Client,
) -> None:
    _backend(client).topology._owners[slot_of("name")] = None
    values = client.election("name").observe(interval=600)
    waiting = asyncio.ensure_future(anext(values))
    await asyncio.sleep(0.0)
    async with asyncio.timeout(STARTING), client.election("name").lead("a"):
        assert await waiting == "a"
    await values.aclose()


async def test_names_of_other_nodes_do_not_notice_a_dead_one(
    cluster: Cluster, client: aiodlock.Client
) -> None:
    dead = cluster.primary_of(_state("name"))
    name = next(
        f"other {n}" for n in range(100) if cluster.primary_of(_state(f"other {n}")) is not dead
    )
    async with client.lock(name):
        dead.kill()
    for _ in range(5):
        async with client.lock(name, timeout=SOON):
            await asyncio.sleep(0.05)


async def test_ready_cluster_client_is_used_for_its_settings(cluster: Cluster) -> None:
    async with RedisCluster(host="127.0.0.1", port=cluster.ports[0]) as ready:
        async with aiodlock.Client(ready) as client, client.lock("name") as lease:
            assert lease.held
        assert await ready.ping()


async def test_ready_cluster_client_tells_where_nodes_are_reached_that_call_themselves_otherwise() -> (
    None
):
    """Behind port forwarding, or in containers."""
    with Cluster(BINARIES["valkey9"](), primaries=1, replicas=0) as cluster:
        cluster.configure("cluster-announce-ip", "192.0.2.1")
        ready = RedisCluster(
            host="127.0.0.1",
            port=cluster.ports[0],
            address_remap=lambda address: ("127.0.0.1", address[1]),
        )
        async with ready, aiodlock.Client(ready) as client, client.lock("name") as lease:
            assert lease.held
            assert "192.0.2.1" in str(_backend(client).topology.nodes)


async def test_remapping_that_does_not_know_a_node_ends_no_client() -> None:
    known: dict[tuple[str, int], tuple[str, int]] = {}
    with Cluster(BINARIES["valkey9"](), primaries=1, replicas=0) as cluster:
        ready = RedisCluster(
            host="127.0.0.1", port=cluster.ports[0], address_remap=lambda address: known[address]
        )
        async with aiodlock.Client(ready) as client, client.lock("name") as lease:
            assert lease.held


async def test_plain_url_of_a_node_is_refused_with_what_to_write(cluster: Cluster) -> None:
    url = f"redis://127.0.0.1:{cluster.ports[0]}"
    async with aiodlock.Client(url, close_timeout=0.1) as client:
        elsewhere = next(
            f"name {n}"
            for n in range(100)
            if cluster.primary_of(_state(f"name {n}")) is not cluster.nodes[0]
        )
        with pytest.raises(aiodlock.BackendError, match=r"redis\+cluster://"):
            await client.lock(elsewhere).acquire_nowait()


async def test_nodes_that_are_named_and_silent_do_not_delay_entering(cluster: Cluster) -> None:
    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ignored.append(writer)

    ignored: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(ignore, "0.0.0.0", 0)
    try:
        port = silent.sockets[0].getsockname()[1]
        gone = "".join(f"127.0.0.{n}:{port}," for n in range(2, 10))
        url = cluster.url.replace("//", "//" + gone, 1)
        async with aiodlock.Client(url) as client, client.lock("name") as lease:
            assert lease.held
        assert len(ignored) == 8
    finally:
        silent.close()
        for writer in ignored:
            writer.close()


async def test_server_that_is_no_cluster_is_refused() -> None:
    with embedded("valkey9", tcp=True) as server:
        client = aiodlock.Client(f"redis+cluster://127.0.0.1:{port(server)}")
        with pytest.raises(aiodlock.BackendError, match="no cluster"):
            await client.__aenter__()


@pytest.mark.parametrize("cluster", ["redis62"], indirect=True)
async def test_servers_without_sharded_channels_give_plain_notices(
    cluster: Cluster,
) -> None:
    async with aiodlock.Client(cluster.url, ttl=60.0, waiter_ttl=60.0) as client:
        held = await client.lock("name").acquire()
        waiting = asyncio.create_task(client.lock("name").acquire())
        await until_waiting(client, "name")
        await until(lambda: bool(_listening(client)), "listening")
        async with takes(at_most=5.0):
            await held.release()
            lease = await waiting
        await lease.release()


def _listening(client: aiodlock.Client) -> list[bytes]:
    nodes = _backend(client).topology.nodes.values()
    return [
        channel
        for node in nodes
        if node.server.wakeups
        for channel in node.server.wakeups._listened
    ]


def test_nodes_of_a_url_are_read_like_sentinels() -> None:
    """With spaces between them, and with names beside addresses, which urllib takes for a wrong one."""
    seeds = seeds_of("REDIS+CLUSTER://me:secret@one:1, 192.0.2.1:2 ,[fd00::1]:3/0?client_name=x")
    assert [(seed._kwargs["host"], seed._kwargs["port"]) for seed in seeds] == [
        ("one", 1),
        ("192.0.2.1", 2),
        ("fd00::1", 3),
    ]
    assert {(seed._kwargs["username"], seed._kwargs["client_name"]) for seed in seeds} == {
        ("me", "x")
    }


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster://localhost:1,,localhost:2",
        "redis+cluster://localhost:1/3",
    ],
)
def test_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="cluster"):
        aiodlock.Client(url)
