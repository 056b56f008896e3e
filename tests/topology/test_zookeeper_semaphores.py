"""A semaphore's waiters on ZooKeeper tell each other when they come to hold, also across cuts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.session import Session
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..scenes import until
from ..zookeeper import ZooKeeperServer, installed
from .zookeeper_places import Asker, asker, running

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")
TICK = 0.1
TTL = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, longest=30.0) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"name-{os.urandom(4).hex()}"


def _asker(backend: ZooKeeperBackend, name: str) -> Asker:
    return asker(backend, kind="semaphore", mode="shared", limit=2, name=name, ttl=TTL)


def _session(asked: Asker) -> Session:
    return asked.place._node.session


async def _settled(*asked: Asker) -> None:
    """Return when the server has answered all that was sent, and the loop has seen to it."""
    for _ in range(3):
        for one in asked:
            await _session(one).ask(jute.sync("/"))
        await asyncio.sleep(0)


async def test_word_to_the_next_waiter_is_repeated_when_the_connection_is_lost(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two holders both leave. The first waiter's write, by which the second learns that it is the first
    now, is lost with the connection."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as two,
        running(server.url, tick=TICK, ttl=TTL) as three,
    ):
        holders = [_asker(one, name) for _ in range(2)]
        for holder in holders:
            await holder.acquire()
        first, second = _asker(two, name), _asker(three, name)
        await first.queue()
        await second.queue()
        session = _session(first)
        ask, words = session.submit, 0

        def submit(call: jute.Call[Any]) -> asyncio.Future[Any]:
            nonlocal words
            answer = ask(call)
            if call.opcode == jute.SET_DATA and name.encode() in call.body:
                words += 1
                connection = session._connection
                if words == 1 and connection is not None:
                    connection.abort(ConnectionResetError("the test"))
            return answer

        monkeypatch.setattr(session, "submit", submit)
        await holders[0].leave()
        await until(lambda: first.heard.told == ["granted"])
        assert words >= 1
        await holders[1].leave()
        await until(lambda: second.heard.told == ["granted"])
        await first.leave()
        await second.leave()


async def test_waiter_that_begins_to_watch_after_the_word_of_the_one_in_front_looks_again(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at the queue and its watch the one in front comes to hold, and tells it."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as two,
        running(server.url, tick=TICK, ttl=TTL) as three,
    ):
        holders = [_asker(one, name) for _ in range(2)]
        for holder in holders:
            await holder.acquire()
        first, second = _asker(two, name), _asker(three, name)
        await first.queue()
        watch: list[Any] = []
        with monkeypatch.context() as patched:
            blockers = second.place._waiter._blockers
            patched.setattr(blockers, "wait_for", lambda *about: watch.append(about))
            await second.queue()
        await holders[0].leave()
        await until(lambda: first.heard.told == ["granted"])
        await _settled(first)
        for about in watch:
            blockers.wait_for(*about)
        await _settled(second)
        await holders[1].leave()
        await until(lambda: second.heard.told == ["granted"])
        await first.leave()
        await second.leave()


async def test_waiters_of_a_semaphore_with_one_place_look_no_more_often_than_it_changes(
    server: ZooKeeperServer, name: str
) -> None:
    """The holder's node was written, for the waiter that watches it: that is no reason to look again."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as two,
    ):
        asked = [
            asker(backend, kind="semaphore", mode="shared", limit=1, name=name, ttl=TTL)
            for backend in (one, two, one, two)
        ]
        holder, first, second, third = asked
        await holder.acquire()
        for waiter in (first, second, third):
            await waiter.queue()
        await holder.leave()
        await until(lambda: first.heard.told == ["granted"])
        await _settled(first, second)
        looks = 0

        def looked() -> None:
            nonlocal looks
            looks += 1

        for session in (*one._sessions.values(), *two._sessions.values()):
            ask = session.submit

            def submit(call: jute.Call[Any], ask: Any = ask) -> Any:
                if call.opcode == jute.GET_CHILDREN2:
                    looked()
                return ask(call)

            session.submit = submit  # type: ignore[method-assign]
        await _settled(first, second)
        assert looks == 0
        for before, after in ((first, second), (second, third)):
            await before.leave()
            await asyncio.wait_for(after.heard.changed.wait(), TTL)
            assert after.heard.told == ["granted"]
        await third.leave()
