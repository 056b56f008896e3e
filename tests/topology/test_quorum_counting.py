"""A client that cannot count votes takes none. A node that came back waits for the longest lease in use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

import aiodlock
from aiodlock._embedded import EmbeddedServer, find_valkey9
from aiodlock.backends.redis.quorum import QuorumBackend
from aiodlock.backends.redis.quorum.nodes import Nodes

from ..contract.test_renewal import kill
from ..proxy import FaultProxy
from ..scenes import PATIENCE, SOON, bounded, store_of, until, until_waiting


@pytest.fixture
def nodes() -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EmbeddedServer(find_valkey9())) for _ in range(3)]


def _nodes_of(client: aiodlock.Client) -> Nodes:
    store = store_of(client)
    assert isinstance(store, QuorumBackend)
    return store.nodes


async def test_client_that_trusts_no_majority_keeps_nobody_out_and_gets_in_when_it_does(
    nodes: list[EmbeddedServer],
) -> None:
    urls = [node.url for node in nodes]
    async with aiodlock.Client(urls, ttl=60.0) as one, aiodlock.Client(urls, ttl=60.0) as two:
        held = await two.lock("name").acquire()
        waiting = asyncio.create_task(one.lock("name").acquire())
        await until_waiting(two, "name")
        # To a machine that was paused, all clocks have stepped.
        trusts = [voter.trust for voter in _nodes_of(one).voters]
        for trust in trusts:
            trust._on_step(1.5)
        await held.release()
        for _ in range(5):
            async with two.lock("name", timeout=PATIENCE):
                assert not waiting.done()
        for trust in trusts:
            trust._steady_at = 0.0
        lease = await asyncio.wait_for(waiting, PATIENCE)
        assert lease.held
        await lease.release()


async def test_holder_goes_on_by_nodes_whose_clocks_have_stepped(
    nodes: list[EmbeddedServer],
) -> None:
    urls = [node.url for node in nodes]
    async with aiodlock.Client(urls, ttl=60.0) as client:
        lease = await client.lock("name").acquire()
        for voter in _nodes_of(client).voters:
            voter.trust._on_step(1.5)
        await lease.extend()
        assert lease.held
        await lease.release()


async def test_node_that_came_back_empty_waits_for_the_longest_lease_of_anybody(
    nodes: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        urls = [node.url for node in nodes]
        long = await stack.enter_async_context(aiodlock.Client([way.url for way in ways], ttl=60.0))
        short = await stack.enter_async_context(aiodlock.Client(urls, ttl=1.0))
        none = await stack.enter_async_context(aiodlock.Client(urls, ttl=1.0, restart_delay=0))
        lease = await long.lock("name").acquire()
        for way in ways:
            way.stall()
        for node in nodes[:2]:
            node.kill()
            node.start()
            for client in (short, none):
                voter = _nodes_of(client).voters[nodes.index(node)]
                await until(voter.up.is_set, "a connection")
            await asyncio.sleep(2.0)
        for client in (short, none):
            with pytest.raises((aiodlock.AcquireTimeout, aiodlock.BackendUnavailable)):
                await client.lock("name", timeout=2.0).acquire()
        assert lease.held
        for way in ways:
            await way.heal()


async def test_next_session_of_a_client_knows_its_nodes_again(
    nodes: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as stack:
        others = [stack.enter_context(EmbeddedServer(find_valkey9())) for _ in range(3)]
        async with aiodlock.Client([other.url for other in others]):
            pass  # they are nodes of a quorum, too, from when it was new
        way = await stack.enter_async_context(FaultProxy(nodes[0].url))
        urls = [way.url, *(node.url for node in nodes[1:])]
        client = await stack.enter_async_context(aiodlock.Client(urls, ttl=60.0))
        async with client.lock("name"):
            before = _nodes_of(client)
        assert before.is_trusted(0)
        way.lead_to(others[0].url)
        kill(client)
        await until(lambda: _nodes_of(client) is not before, "another session")
        async with client.lock("name"):
            assert not _nodes_of(client).is_trusted(0)


async def test_each_answer_of_far_nodes_brings_entering_further(
    nodes: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodlock._patience.ENTERS_WITHIN", 2.5)
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        for way in ways:
            way.delay(1.2)
        async with aiodlock.Client([way.url for way in ways], ttl=60.0) as client:
            for way in ways:
                way.delay(0.0)
            async with client.lock("name", timeout=PATIENCE) as lease:
                assert lease.held


async def test_far_nodes_are_waited_for_as_long_as_they_need(nodes: list[EmbeddedServer]) -> None:
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        client = await stack.enter_async_context(
            aiodlock.Client([way.url for way in ways], ttl=30.0)
        )
        lease = await client.lock("held").acquire()
        for way in ways:
            way.delay(1.3)
        for _ in range(2):
            async with client.lock("name", timeout=60.0):
                assert lease.held
        for way in ways:
            way.delay(0.0)
        await lease.release()


async def test_nodes_that_are_too_slow_for_the_lease_are_told_instead_of_waited_for_without_end(
    nodes: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(FaultProxy(node.url)) for node in nodes]
        urls = [way.url for way in ways]
        client = await stack.enter_async_context(aiodlock.Client(urls, unavailable_after=4.0))
        lock = client.lock("name", ttl=0.5)
        for way in ways:
            way.delay(0.8)  # in time for an answer, and not for the lease
        for acquiring in (lock.acquire(), lock.acquire(timeout=3.0), lock.acquire_nowait()):
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(aiodlock.BackendUnavailable, match="too slowly"):
                    await acquiring
        for way in ways:
            await way.heal()

        async def is_quick() -> bool:
            async with lock:
                return True

        await until(is_quick, "a lease at quick nodes")


async def test_silent_node_keeps_nobody_waiting_whose_ttl_is_new(
    nodes: list[EmbeddedServer],
) -> None:
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(FaultProxy(nodes[0].url))
        urls = [way.url, *(node.url for node in nodes[1:])]
        client = await stack.enter_async_context(aiodlock.Client(urls, ttl=60.0))
        known = _nodes_of(client)
        for _ in range(5):
            known.voters[0].patience.ran_out()
        way.stall()
        sharing = asyncio.create_task(known._share_lengths())
        known._tell_again_at = 0.0
        await asyncio.sleep(0.1)  # it waits for the silent node
        assert not sharing.done()
        async with bounded(SOON):
            lease = await client.lock("name", ttl=50.0).acquire()
        await way.heal()
        await lease.release()
        sharing.cancel()
