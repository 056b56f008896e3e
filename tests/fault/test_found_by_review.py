"""Interleavings that a review of the code found, each once broken."""

from __future__ import annotations

import asyncio

import pytest

import aiodlock
from aiodlock.backends.redis.scripts import ACQUIRE

from ..conftest import MakeClient
from ..proxy import FaultProxy
from ..servers import Store
from .scenes import calling, load_scripts, no_places, until


async def test_grant_that_outlived_its_lease_on_the_way_is_not_given_to_the_one_who_tries_once(
    make_client: MakeClient, proxy: FaultProxy, real_store: Store
) -> None:
    await load_scripts(real_store)
    client = await make_client(url=proxy.url)
    late = proxy.hold_reply(calling(ACQUIRE))
    trying = asyncio.create_task(client.lock("name", ttl=0.05).acquire(timeout=0))
    await late.happened.wait()
    await asyncio.sleep(0.1)
    late.release()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    await until(lambda: client._session is not None and not client._session.places)


async def test_try_whose_lost_grant_is_in_its_lock_delay_does_not_begin_a_body(
    make_client: MakeClient, proxy: FaultProxy, real_store: Store
) -> None:
    await load_scripts(real_store)
    client = await make_client(url=proxy.url)
    lost = proxy.hold_reply(calling(ACQUIRE))
    lock = client.lock("name", ttl=0.2, lock_delay=5, timeout=0)
    began = False

    async def body() -> None:
        nonlocal began
        async with lock:
            began = True

    trying = asyncio.create_task(body())
    await lost.happened.wait()
    await asyncio.sleep(0.3)  # the grant that nobody heard of is overdue by now
    proxy.cut()
    with pytest.raises(aiodlock.BackendUnavailable):
        await trying
    assert not began


async def test_late_duplicate_of_a_refused_try_takes_nothing(
    make_client: MakeClient, proxy: FaultProxy, real_store: Store
) -> None:
    await load_scripts(real_store)
    other = await make_client()
    client = await make_client(url=proxy.url)
    held = await other.lock("name").acquire()
    late = proxy.hold_command(calling(ACQUIRE))
    trying = asyncio.create_task(client.lock("name").acquire_nowait())
    await late.happened.wait()
    proxy.cut()
    with pytest.raises(aiodlock.WouldBlock):
        await trying  # the repetition is refused
    await held.release()
    await until(lambda: client._session is not None and not client._session.places)
    late.release()
    await late.answered.wait()
    assert (await other.inspect("name")).holders == ()
    no_places(client)
