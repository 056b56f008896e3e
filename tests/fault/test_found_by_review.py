"""Interleavings that a review of the code found, each once broken."""

from __future__ import annotations

import asyncio

import pytest
import redis

import aiodlock
from aiodlock._clock import now
from aiodlock.backends.redis.scripts import ACQUIRE

from ..conftest import MakeClient
from ..protocol.direct import Direct
from ..proxy import FaultProxy
from ..scenes import until_free
from ..servers import Store, embedded
from .scenes import calling, no_places, no_places_soon, until


async def test_grant_that_outlived_its_lease_on_the_way_is_not_given_to_the_one_who_tries_once(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    late = proxy.hold_reply(calling(ACQUIRE))
    trying = asyncio.create_task(unlucky.lock("name", ttl=0.05).acquire(timeout=0))
    await late.happened.wait()
    await until_free(client, "name")  # it is over on the server, and earlier for its holder
    late.release()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    await no_places_soon(unlucky)


async def test_try_whose_lost_grant_is_in_its_lock_delay_does_not_begin_a_body(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    lost = proxy.hold_reply(calling(ACQUIRE))
    lock = unlucky.lock("name", ttl=0.2, lock_delay=5, timeout=0)
    began = False

    async def body() -> None:
        nonlocal began
        async with lock:
            began = True

    trying = asyncio.create_task(body())
    await lost.happened.wait()

    async def is_overdue() -> bool:
        return (await client.inspect("name")).closed > 0

    await until(is_overdue, "the end of the grant that nobody heard of")
    proxy.cut()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    assert not began


async def test_late_duplicate_of_a_refused_try_takes_nothing(
    proxy: FaultProxy, unlucky: aiodlock.Client, client: aiodlock.Client
) -> None:
    held = await client.lock("name").acquire()
    late = proxy.hold_command(calling(ACQUIRE))
    trying = asyncio.create_task(unlucky.lock("name").acquire_nowait())
    await late.happened.wait()
    proxy.cut()
    with pytest.raises(aiodlock.WouldBlock):
        await trying  # the repetition is refused
    await held.release()
    await no_places_soon(unlucky)
    late.release()
    await late.answered.wait()
    assert (await client.inspect("name")).holders == ()
    no_places(unlucky)


async def test_release_that_is_not_answered_in_time_keeps_the_lock_delay(
    client: aiodlock.Client, unlucky: aiodlock.Client, proxy: FaultProxy
) -> None:
    """The local deadline is earlier than the server's: a leave that arrives between them opens nothing."""
    lease = await unlucky.lock("name", ttl=0.5, lock_delay=30).acquire()
    await lease.extend(20.0)
    lease._place.deadline = now() + 0.2  # as after a slow answer: the server grants much longer
    await proxy.refuse()
    proxy.cut()
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    await proxy.heal()
    await no_places_soon(unlucky)
    assert await client.lock("name").locked()


async def test_scripts_that_the_server_forgot_do_not_slow_down_a_thousand_extensions(
    unlucky: aiodlock.Client, proxy: FaultProxy, real_store: Store
) -> None:
    leases = [await unlucky.lock(f"name {n}", ttl=20).acquire() for n in range(100)]
    await (await real_store.raw()).script_flush()
    proxy.forget()
    session = unlucky._session
    assert session is not None
    for lease in leases:
        session.extender.extend_now(lease._place)
    await until(lambda: not any(lease._place.asked or not lease._place.beat for lease in leases))
    assert proxy.commands["EVAL"] == 1
    for lease in leases:
        await lease.release()


@pytest.mark.usefixtures("brief_entering")
async def test_client_of_a_replica_is_told_so_on_entering(real_store: Store) -> None:
    assert real_store.server is not None
    with embedded(real_store.name, tcp=True) as replica:
        with redis.Redis.from_url(replica.url) as admin:
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        client = aiodlock.Client(replica.url)
        with pytest.raises(aiodlock.BackendUnavailable, match="READONLY"):
            await client.__aenter__()


async def test_demoted_server_is_named_in_the_error_and_not_flooded_with_connections(
    make_client: MakeClient, real_store: Store
) -> None:
    with embedded(real_store.name, tcp=True) as server:
        client = await make_client(server.url, close_timeout=0.1)
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            before = admin.info("stats")["total_connections_received"]
            with pytest.raises(aiodlock.BackendUnavailable, match="READONLY"):
                await client.lock("name").acquire(timeout=1.5)
            assert admin.info("stats")["total_connections_received"] - before <= 12


async def test_lease_is_extended_in_time_when_its_first_answer_came_late(
    unlucky: aiodlock.Client, proxy: FaultProxy, real_store: Store
) -> None:
    """A repeated acquire is answered with what is left of a ttl that began with the first one."""
    lost = proxy.hold_reply(calling(ACQUIRE))
    acquiring = asyncio.create_task(unlucky.lock("name", ttl=30).acquire())
    await lost.happened.wait()
    direct = Direct(await real_store.raw())
    (id,) = await direct.holders()
    await direct.age(id, by=27_000)  # less is left than the third after which it is extended
    proxy.cut()
    lease = await acquiring
    assert 0 < lease.remaining() < 3
    await until(lambda: lease.remaining() > 20, "an extension")
    await lease.release()
