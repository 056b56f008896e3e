"""Leases that linger on ZooKeeper: the holder watches who queues, also across cuts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

import aiodlock
from aiodlock.backends.zookeeper import jute

from ..scenes import PATIENCE, until, until_waiting
from ..zookeeper import ZooKeeperServer, installed
from .zookeeper_proxy import FrameProxy

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")
TICK = 0.1
#: Longer than any test.
LONG = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, longest=30.0) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"linger-{os.urandom(4).hex()}"


def _client(url: str, prefix: str) -> aiodlock.Client:
    return aiodlock.Client(url, prefix=prefix, ttl=20.0)


def _kept(client: aiodlock.Client) -> dict[str, Any]:
    assert client._core.session is not None
    return client._core.session.lingering.kept


def _asked(proxy: FrameProxy) -> list[int]:
    """Return what was sent but heartbeats, which write the session's own node."""
    return [code for code in proxy.opcodes if code not in (jute.SET_DATA, jute.PING)]


async def test_nothing_is_sent_between_two_bodies(server: ZooKeeperServer, prefix: str) -> None:
    async with FrameProxy(server.port) as proxy, _client(proxy.url, prefix) as client:
        lock = client.lock("a", linger=LONG)
        async with lock as first:
            pass
        place = _kept(client)["a"].place
        await until(lambda: place._own_watch._path is not None)
        await place._node.session.ask(jute.sync("/"))
        before = len(_asked(proxy))
        for _ in range(50):
            async with lock as lease:
                assert lease.token == first.token
            async with client.lock("a", linger=LONG) as lease:
                assert lease.token == first.token
        await place._node.session.ask(jute.sync("/"))
        assert _asked(proxy)[before:] == [jute.SYNC]


async def test_recall_while_the_connection_is_cut(server: ZooKeeperServer, prefix: str) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        _client(proxy.url, prefix) as client,
        _client(server.url, prefix) as other,
    ):
        async with client.lock("a", linger=LONG) as first:
            pass
        proxy.refuses = True
        proxy.cut()
        task = asyncio.create_task(other.lock("a", timeout=PATIENCE).acquire())
        await until_waiting(other, "a")
        assert _kept(client)
        proxy.refuses = False
        lease = await task
        assert lease.token > first.token
        assert not _kept(client)
        await lease.release()


async def test_watch_whose_answer_is_lost_is_set_again(
    server: ZooKeeperServer, prefix: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        _client(proxy.url, prefix) as client,
        _client(server.url, prefix) as other,
    ):
        lost = proxy.lose("answer", jute.GET_CHILDREN2, nth=2)  # the first one sees that it holds
        async with client.lock("a", linger=LONG):
            await asyncio.wait_for(lost.happened.wait(), PATIENCE)
        async with other.lock("a", timeout=PATIENCE):
            assert not _kept(client)


async def test_one_who_is_refused_recalls_it(server: ZooKeeperServer, prefix: str) -> None:
    async with (
        _client(server.url, prefix) as client,
        FrameProxy(server.port) as proxy,
        _client(proxy.url, prefix) as other,
    ):
        async with client.lock("a", linger=LONG):
            for _ in range(3):
                with pytest.raises(aiodlock.WouldBlock):
                    await other.lock("a").acquire_nowait()
            path = await _node(other)
            await until(lambda: _version(other, path))
        # It watches its node from a moment after the grant on.
        await until(lambda: not _kept(client))
        async with other.lock("a", timeout=PATIENCE):
            pass


async def test_recall_by_one_who_is_refused_is_heard_though_the_answer_that_tells_it_is_lost(
    server: ZooKeeperServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next tries write nothing: the node tells of the recall already."""
    monkeypatch.setattr("aiodlock.backends.zookeeper.own_watch._WATCH_AFTER", 0.5)
    async with (
        FrameProxy(server.port) as proxy,
        _client(proxy.url, prefix) as client,
        _client(server.url, prefix) as other,
    ):
        async with client.lock("a", linger=LONG):
            with pytest.raises(aiodlock.WouldBlock):
                await other.lock("a").acquire_nowait()
            path = await _node(other)
            await until(lambda: _version(other, path))
            lost = proxy.lose("answer", jute.GET_DATA)
            # What the client has seen is newer than the recall: no watch tells of that any more.
            backend: Any = client._core.session.backend  # type: ignore[union-attr]
            await backend._main.heartbeat()
            await asyncio.wait_for(lost.happened.wait(), PATIENCE)
        await until(lambda: not _kept(client))


async def _node(client: aiodlock.Client) -> str:
    backend: Any = client._core.session.backend  # type: ignore[union-attr]
    directory = backend.queues.directory("lock", "a")
    (node,) = (await backend._main.ask(jute.get_children(directory))).value[0]
    return f"{directory}/{node}"


async def _version(client: aiodlock.Client, path: str) -> bool:
    backend: Any = client._core.session.backend  # type: ignore[union-attr]
    stat = (await backend._main.ask(jute.get_data(path))).value[1]
    return bool(stat.version)
