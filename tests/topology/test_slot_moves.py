"""Slots that move: who waits hears of a grant as before, and nothing is said to the wrong connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack

import pytest
import redis

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock.backends.redis.cluster.topology import slot_of
from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.scripts import ACQUIRE, EXTEND, LEAVE

from ..scenes import SOON, cancelled, keeper_of, soon, store_of, takes, until, until_waiting
from .cluster import Cluster, port

STATE = keys_of("aiodlock", "lock", "name").state
#: Longer than any of this takes: a waiter that is not told asks only every 100 s.
FOR_EVER = 300.0


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    primaries, replicas = getattr(request, "param", (2, 0))
    with Cluster(find_valkey9(), primaries=primaries, replicas=replicas) as cluster:
        yield cluster


def _client(cluster: Cluster, **options: float) -> aiodlock.Client:
    return aiodlock.Client(cluster.url, ttl=FOR_EVER, waiter_ttl=FOR_EVER, **options)  # type: ignore[arg-type]


def _move(cluster: Cluster) -> EmbeddedServer:
    source = cluster.primary_of(STATE)
    target = next(node for node in cluster.primaries if node is not source)
    cluster.move_slot(slot_of("name"), source, target).finish()
    return target


def _listening(cluster: Cluster, node: EmbeddedServer) -> int:
    """Return how many connections listen on a channel of the name at a node."""
    channels = cluster.call(node, "PUBSUB", "SHARDCHANNELS")
    return sum(cluster.call(node, "PUBSUB", "SHARDNUMSUB", channel)[1] for channel in channels)


async def test_channel_of_a_name_is_listened_to_again_wherever_its_slot_has_moved(
    cluster: Cluster,
) -> None:
    async with _client(cluster) as one, _client(cluster) as two:
        held = await one.lock("name").acquire()
        waiting = [asyncio.create_task(two.lock("name").acquire()) for _ in range(3)]
        await until_waiting(one, "name", 3)
        for _ in range(8):
            target = await asyncio.to_thread(_move, cluster)
            await until(lambda target=target: _listening(cluster, target) == 1, "listening")  # type: ignore[misc]
        await held.release()
        for _ in range(3):
            done, _ = await asyncio.wait(waiting, timeout=SOON, return_when="FIRST_COMPLETED")
            (got,) = done
            waiting.remove(got)
            await got.result().release()


async def test_hand_offs_are_as_quick_after_a_slot_has_moved(cluster: Cluster) -> None:
    """A waiter that is not told asks only at its next beat, 100 s later."""
    async with _client(cluster) as one, _client(cluster) as two:
        turns = 0

        async def work(client: aiodlock.Client) -> None:
            nonlocal turns
            while True:
                async with client.lock("name"):
                    turns += 1

        workers = [asyncio.create_task(work(one if n % 2 else two)) for n in range(20)]
        for _ in range(4):
            before = turns
            await until(lambda before=before: turns >= before + 100, "100 turns")  # type: ignore[misc]
            target = await asyncio.to_thread(_move, cluster)
            await until(lambda target=target: _listening(cluster, target) == 2, "listening")  # type: ignore[misc]
        before = turns
        async with takes(at_most=5.0):
            await until(lambda: turns >= before + 200, "200 turns")
        for worker in workers:
            await cancelled(worker)


async def test_channel_that_was_refused_while_the_cluster_was_down_is_listened_to_later(
    cluster: Cluster,
) -> None:
    """The cluster is down for want of a slot that is nobody's."""
    for node in cluster.nodes:
        cluster.call(node, "CONFIG", "SET", "cluster-allow-pubsubshard-when-down", "no")
    async with _client(cluster) as one, _client(cluster) as two:
        held = await one.lock("name").acquire()
        # The last connection for wake-ups comes up while the cluster is down.
        waiting = asyncio.create_task(two.lock("name").acquire())
        await until_waiting(one, "name")
        owner = cluster.primary_of(STATE)
        await until(lambda: _listening(cluster, owner) == 1, "listening")
        unowned = next(
            slot
            for slot in (0, 16000)
            if slot != slot_of("name") and _owner_of(cluster, slot) is not owner
        )
        other = _owner_of(cluster, unowned)
        for node in cluster.nodes:
            cluster.call(node, "CLUSTER", "DELSLOTS", unowned)
        await until(lambda: _is_down(cluster, owner), "a cluster that is down")
        cluster.call(owner, "CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: _refusals(cluster, owner) > 0, "a refusal")
        assert _listening(cluster, owner) == 0
        cluster.call(other, "CLUSTER", "ADDSLOTS", unowned)
        await asyncio.to_thread(cluster.wait_until_fine)
        await until(lambda: _listening(cluster, owner) == 1, "listening")
        async with asyncio.timeout(SOON):
            await held.release()
            await (await waiting).release()


def _owner_of(cluster: Cluster, slot: int) -> EmbeddedServer:
    for first, last, primary, *_ in cluster.call(cluster.nodes[0], "CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return next(node for node in cluster.nodes if port(node) == primary[1])
    raise AssertionError(f"nobody owns slot {slot}")


def _is_down(cluster: Cluster, node: EmbeddedServer) -> bool:
    return "cluster_state:fail" in cluster.call(node, "CLUSTER", "INFO")


def _refusals(cluster: Cluster, node: EmbeddedServer, code: str = "CLUSTERDOWN") -> int:
    found = re.search(rf"errorstat_{code}:count=(\d+)", cluster.call(node, "INFO", "errorstats"))
    return int(found[1]) if found else 0


async def test_release_waits_until_its_slot_has_arrived_and_goes_there_once(
    cluster: Cluster,
) -> None:
    """Until then no script runs there, whatever is asked: not all keys of the name are there."""
    async with _client(cluster) as client:
        lease = await client.lock("name").acquire()
        source = cluster.primary_of(STATE)
        target = next(node for node in cluster.primaries if node is not source)
        moving = cluster.move_slot(slot_of("name"), source, target)
        while moving.move_keys():
            pass
        keys = keys_of("aiodlock", "lock", "name")
        with redis.Redis(port=port(target), single_connection_client=True) as asked:
            for script in (ACQUIRE, EXTEND, LEAVE):
                asked.execute_command("ASKING")
                call = (*keys[:4], f"{keys.marker}id", keys.broken)[: int(script.number_of_keys)]
                with pytest.raises(redis.ResponseError, match="Multiple keys"):
                    asked.execute_command("EVAL", script.source, len(call), *call)
        before = _refusals(cluster, target, "MOVED")
        releasing = asyncio.create_task(lease.release())
        await until(lambda: _refusals(cluster, source, "ASK") > 1, "repeated answers of the source")
        refused = _refusals(cluster, target, "TRYAGAIN"), _refusals(cluster, target, "MOVED")
        assert refused == (3, before), "the client has not asked it"
        moving.finish()
        await releasing


async def test_refusal_while_a_slot_was_on_its_way_is_no_failure_later_on(cluster: Cluster) -> None:
    """An acquire that runs into its timeout at another node would be told of it."""
    async with _client(cluster) as client:
        lease = await client.lock("name").acquire()
        source = cluster.primary_of(STATE)
        target = next(node for node in cluster.primaries if node is not source)
        moving = cluster.move_slot(slot_of("name"), source, target)
        backend, keeper = store_of(client), keeper_of(client)
        (place,) = keeper.places.values()
        keeper.extend_now(place)
        await until(lambda: backend.failure is not None, "a refusal")
        moving.finish()
        await lease.extend()
        for name in ("name", "other", "b"):  # on each of the nodes
            await client.inspect(name)
        await lease.release()
        assert backend.failure is None


async def test_script_that_is_ended_in_the_middle_while_its_slot_is_on_its_way_may_be_called_again(
    cluster: Cluster,
) -> None:
    """All its keys are there when it begins. When one has gone, it may touch that no more."""
    async with _client(cluster) as client:
        await _break_between_two(client, client.break_lock("name"))  # that leaves a key
        source = cluster.primary_of(STATE)
        target = next(node for node in cluster.primaries if node is not source)

        async def break_on_its_way() -> None:
            moving = cluster.move_slot(slot_of("name"), source, target)
            with pytest.raises(aiodlock.BackendUnavailable):
                await client.break_lock("name")
            moving.finish()

        await _break_between_two(client, break_on_its_way())


async def _break_between_two(client: aiodlock.Client, breaking: Awaitable[object]) -> None:
    """One holds and one waits; then the first is no holder any more, and the second one is."""
    lease = await client.lock("name", on_lost="flag").acquire()
    waiting = asyncio.create_task(client.lock("name").acquire())
    await until_waiting(client, "name")
    await breaking
    async with await soon(waiting) as next_one:
        assert not lease.held
        assert next_one.held


async def test_redirected_extension_does_not_wait_for_the_other_node(cluster: Cluster) -> None:
    """Answers of a batch are taken in order: a lease on a healthy node would be lost behind it."""
    async with _client(cluster) as client:
        lease = await client.lock("name").acquire()
        backend, keeper = store_of(client), keeper_of(client)
        (place,) = keeper.places.values()
        before, deadline = backend.server_of(place), place.deadline
        await asyncio.to_thread(_move, cluster)
        (outcome,) = backend.extend([(place, place.length)])
        with pytest.raises(aiodlock.BackendUnavailable, match="takes over"):
            await outcome
        assert backend.server_of(place) != before
        keeper.extend_now(place)
        await until(lambda: place.deadline > deadline, "an extension by the new owner")
        await lease.extend()
        await lease.release()


async def test_first_call_for_a_name_on_a_node_that_has_joined_is_answered(
    cluster: Cluster,
) -> None:
    """The redirection tells of the node, and a call that is made once is not repeated."""
    async with AsyncExitStack() as stack:
        one, *others = [await stack.enter_async_context(_client(cluster)) for _ in range(7)]
        source = cluster.primary_of(STATE)
        new = await asyncio.to_thread(cluster.add_primary)
        cluster.move_slot(slot_of("name"), source, new).finish()
        await asyncio.gather(
            others[0].inspect("name"),
            others[1].break_lock("name"),
            others[2].lock("name").locked(),
            others[3].forget("name"),
        )
        held = await others[4].lock("name").acquire_nowait()
        assert [info.name async for info in one.locks()] == ["name"]
        assert [info.name async for info in others[5].locks("nam*")] == ["name"]
        await held.release()


async def test_nodes_that_are_to_be_called_by_a_name_and_have_none_are_found(
    cluster: Cluster,
) -> None:
    """They say `?` for their host, in CLUSTER SLOTS and in MOVED."""
    cluster.configure("cluster-preferred-endpoint-type", "hostname")
    async with _client(cluster) as client:
        for number in range(20):
            async with client.lock(f"name {number}", timeout=SOON) as lease:
                assert lease.held
        await asyncio.to_thread(_move_by_number, cluster)
        async with client.lock("name", timeout=2 * SOON) as lease:
            assert lease.held


def _move_by_number(cluster: Cluster) -> None:
    slot = slot_of("name")
    source = _owner_of(cluster, slot)
    target = next(node for node in cluster.primaries if node is not source)
    cluster.move_slot(slot, source, target).finish()


async def test_nodes_that_announce_names_are_reached_by_them(cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster.call(node, "CONFIG", "SET", "cluster-announce-hostname", "localhost")
    cluster.configure("cluster-preferred-endpoint-type", "hostname")
    async with _client(cluster) as client:
        for number in range(20):
            async with client.lock(f"name {number}", timeout=SOON) as lease:
                assert lease.held
