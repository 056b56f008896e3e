"""No node stays in a queue without its client: the ghosts of other clients of ZooKeeper, each as a test."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from aiodlock import BackendUnavailable
from aiodlock._clock import now
from aiodlock._model import ENDED, Gone, Granted, Left, Refused, Waiting
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.connection import connect
from aiodlock.backends.zookeeper.session import Session
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..scenes import PATIENCE, takes, until
from ..zookeeper import ZooKeeperServer, installed
from .zookeeper_places import Asker, asker, running
from .zookeeper_proxy import ON_THE_WAY, FrameProxy

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

TICK = 0.05
TTL = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"name-{os.urandom(4).hex()}"


async def _nodes(backend: ZooKeeperBackend, name: str) -> list[str]:
    session = backend._main
    await session.wait_up(10.0)
    session.submit(jute.sync("/"))
    try:
        return (await session.ask(jute.get_children(backend.queues.directory("lock", name)))).value[
            0
        ]
    except jute.ZooKeeperError:
        return []


async def _persist(asked: Asker) -> Granted | Waiting | Refused | Gone:
    """Ask as the core does: again after each attempt that had no answer."""
    while True:
        try:
            return await asked.place.acquire(wait=True)
        except BackendUnavailable:
            await asyncio.sleep(0.01)


async def _leave(asked: Asker) -> Left:
    while True:
        try:
            return await asked.place.leave(ENDED, within=2.0)
        except BackendUnavailable:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("what", ["request", "answer"])
@pytest.mark.parametrize("nth", range(1, 6))
async def test_connection_lost_at_any_message_costs_no_place_and_leaves_no_ghost(
    server: ZooKeeperServer, name: str, nth: int, what: Literal["request", "answer"]
) -> None:
    """CONNECTIONLOSS though the node was created (CURATOR-79). The first messages make the directory."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        loss = proxy.lose(what, *ON_THE_WAY, nth=nth)
        asked = asker(near, name=name, ttl=TTL)
        session = near._session_in_use(asked.place._terms.ttl)
        number = session.id
        granted = await _persist(asked)
        assert isinstance(granted, Granted), granted
        assert len(await _nodes(far, name)) == 1
        assert session.id == number
        left = await _leave(asked)
        assert left == Left("released")
        assert await _nodes(far, name) == []
        if nth <= 4:  # the multi that fails for the directory, the queue, both again
            assert loss.happened.is_set()
        began = now()
        after = asker(far, name=name, ttl=TTL)
        assert (await after.acquire()).token > granted.token
        assert now() - began < TTL / 2
        await after.leave()


@pytest.mark.parametrize("what", ["request", "answer"])
async def test_release_whose_message_is_lost_is_repeated(
    server: ZooKeeperServer, name: str, what: Literal["request", "answer"]
) -> None:
    """kazoo #732: a lock that was released while SUSPENDED stayed for as long as the session."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        asked, next_one = asker(near, name=name, ttl=TTL), asker(far, name=name, ttl=TTL)
        await asked.acquire()
        await next_one.queue()
        session = near._session_in_use(asked.place._terms.ttl)
        number = session.id
        loss = proxy.lose(what, jute.MULTI)
        with pytest.raises(BackendUnavailable):
            await asked.place.leave(ENDED, within=2.0)
        await loss.happened.wait()
        assert await _leave(asked) == Left("released")
        await asyncio.wait_for(next_one.heard.changed.wait(), TTL)
        assert session.id == number
        await next_one.leave()


async def test_release_while_there_is_no_connection_is_done_when_there_is_one(
    server: ZooKeeperServer, name: str
) -> None:
    """kazoo #732 again, with the connection away for the whole of the first attempt."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        asked = asker(near, name=name, ttl=TTL)
        await asked.acquire()
        session = near._session_in_use(asked.place._terms.ttl)
        proxy.refuses = True
        proxy.cut()
        await until(lambda: not session.is_up)
        with pytest.raises(BackendUnavailable):
            await asked.place.leave(ENDED, within=0.1)
        proxy.refuses = False
        assert await _leave(asked) == Left("released")
        assert await _nodes(far, name) == []


async def test_acquire_that_is_cancelled_while_its_node_is_made_leaves_none(
    server: ZooKeeperServer, name: str
) -> None:
    """CURATOR-79: an interrupted acquire left its node behind."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        warm = asker(near, name=name, ttl=TTL)
        await warm.acquire()
        await warm.leave()
        for pause, wait in itertools.product((0, 1, 2, 3), (True, False)):
            asked = asker(near, name=name, ttl=TTL)
            asking = asyncio.create_task(asked.place.acquire(wait=wait))
            for _ in range(pause):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await _leave(asked)
            assert await _nodes(far, name) == []
            receipts = (await far._main.ask(jute.get_children(f"{far.queues.root}/ids"))).value[0]
            assert asked.place._node.id not in receipts


async def test_acquire_cancelled_after_its_answer_was_lost_leaves_none_and_no_late_duplicate(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        warm = asker(near, name=name, ttl=TTL)
        await warm.acquire()
        await warm.leave()
        asked = asker(near, name=name, ttl=TTL)
        loss = proxy.lose("answer", jute.MULTI)
        with pytest.raises(BackendUnavailable):
            await asked.place.acquire(wait=True)
        await loss.happened.wait()
        assert await _leave(asked) == Left("withdrawn")
        assert await _nodes(far, name) == []
        # What the lost connection may still have carried: the receipt refuses it.
        session = near._session_in_use(asked.place._terms.ttl)
        with pytest.raises(jute.Aborted, match="exists"):
            await session.ask(jute.multi(asked.place._node.creation()))


async def test_node_of_a_dying_session_is_never_taken_for_ones_own(
    server: ZooKeeperServer, name: str
) -> None:
    """CURATOR-498, -604: a client that came back found its node by its id, and held by it until the old
    session,
    to which the node belonged, expired."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        ttl = 0.5
        warm = asker(near, name=name, ttl=ttl)
        await warm.acquire()
        await warm.leave()
        asked = asker(near, name=name, ttl=ttl)
        session = near._session_in_use(asked.place._terms.ttl)
        proxy.lose("answer", jute.MULTI)
        number = session.id
        attempt = asyncio.create_task(asked.place.acquire(wait=True))
        await asyncio.gather(attempt, return_exceptions=True)
        # The session dies with the node in it; a new one begins.
        proxy.refuses = True
        proxy.cut()
        await until(lambda: not session.is_up)
        await asyncio.sleep(2 * ttl)
        proxy.refuses = False
        await until(lambda: session.is_up and session.id != number)
        assert await _persist(asked) == Gone("expired")
        assert asked.place.token == 0
        assert await _leave(asked) == Left("gone", "expired")
        again, other = asker(near, name=name, ttl=ttl), asker(far, name=name, ttl=TTL)
        granted = await again.acquire()
        await other.queue()
        (own, _) = sorted(await _nodes(far, name), key=lambda node: node.split(":")[3])
        path = f"{near.queues.directory('lock', name)}/{own}"
        answer = await session.ask(jute.get_data(path))
        assert answer.value[1].ephemeral_owner == session.id
        assert answer.value[1].created == granted.token
        await again.leave()
        await other.leave()


@pytest.mark.parametrize("what", ["request", "answer"])
async def test_waiter_whose_move_into_its_owners_seat_had_no_answer_holds(
    server: ZooKeeperServer, name: str, what: Literal["request", "answer"]
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        holder, first = asker(far, name=name, ttl=TTL), asker(far, "ubob", name=name, ttl=TTL)
        second = asker(near, "ubob", name=name, ttl=TTL)
        await holder.acquire()
        await first.queue()
        await second.queue()
        loss = proxy.lose(what, jute.MULTI)
        await holder.leave()
        await loss.happened.wait()
        await until(lambda: second.heard.told == ["granted"])
        assert second.place.token == first.place.token
        await first.leave()
        assert await _leave(second) == Left("released")
        assert await _nodes(far, name) == []


async def test_holder_whose_move_into_its_owners_seat_had_no_answer_hears_of_a_break(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers may take longer to tell where its node is than it is left unwatched."""
    monkeypatch.setattr("aiodlock.backends.zookeeper.own_watch._WATCH_AFTER", 0.0)
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        holder, first = asker(far, name=name, ttl=TTL), asker(far, "ubob", name=name, ttl=TTL)
        second = asker(near, "ubob", name=name, ttl=TTL)
        await holder.acquire()
        await first.queue()
        await second.queue()
        proxy.lose("answer", jute.MULTI)
        await holder.leave()
        await until(lambda: second.heard.told == ["granted"])
        assert await far.break_lock(name) == 2
        await until(lambda: second.heard.told == ["granted", "broken"])
        await first.leave()
        await second.leave()


@pytest.mark.parametrize("nth", range(1, 5))
async def test_acquire_that_ends_at_any_message_leaves_no_queue_that_nothing_was_in(
    server: ZooKeeperServer, name: str, nth: int
) -> None:
    """The servers never delete such a container."""
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        loss = proxy.lose("answer", *ON_THE_WAY, nth=nth)
        asked = asker(near, name=name, ttl=TTL)
        asking = asyncio.ensure_future(asked.place.acquire(wait=True))
        await loss.happened.wait()
        asking.cancel()
        await _leave(asked)
        await far._main.ask(jute.sync("/"))
        try:
            stat = (await far._main.ask(jute.exists(near.queues.directory("lock", name)))).value
        except jute.ZooKeeperError:
            return
        assert stat.children_version > 0


async def test_waiter_whose_node_is_deleted_is_told(server: ZooKeeperServer, name: str) -> None:
    """It would sleep for ever if it watched its predecessor alone (as in etcd #19597)."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, waiter = asker(backend, name=name, ttl=TTL), asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        assert waiter.place._node.path is not None
        await backend._main.ask(jute.delete(waiter.place._node.path))
        await asyncio.wait_for(waiter.heard.changed.wait(), PATIENCE)
        assert waiter.heard.told == ["gone"]
        await waiter.leave()
        await holder.leave()


async def test_waiters_that_die_cost_one_session_together(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, last = asker(backend, name=name, ttl=TTL), asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        async with (
            FrameProxy(server.port) as proxy,
            running(proxy.url, tick=TICK, ttl=0.6) as dying,
        ):
            for _ in range(5):
                await asker(dying, name=name, ttl=0.6).queue()
            await last.queue()
            proxy.refuses = True
            proxy.cut()
            async with takes(at_most=0.6 + 1.0):
                await holder.leave()
                await asyncio.wait_for(last.heard.changed.wait(), PATIENCE)
        assert last.heard.told == ["granted"]
        await last.leave()


@pytest.mark.parametrize("front", ["own", "other", "semaphore"])
async def test_waiter_that_misses_the_end_of_the_one_in_front_sees_it_by_itself(
    server: ZooKeeperServer, name: str, front: str
) -> None:
    """Whatever was to tell it is not heard: no bug that is known, and none must block a name for ever."""
    async with (
        running(server.url, tick=TICK, ttl=1.0) as near,
        running(server.url, tick=TICK, ttl=1.0) as far,
    ):
        kind: dict[str, Any] = {}
        if front == "semaphore":
            kind = {"kind": "semaphore", "mode": "shared", "limit": 1}
        holder = asker(near if front == "own" else far, name=name, ttl=1.0, **kind)
        waiter = asker(near, name=name, ttl=1.0, **kind)
        await holder.acquire()
        await waiter.queue()
        for session in near._sessions.values():
            await session.ask(jute.sync("/"))
            session.watches._data.clear()
        if holder.place._seat._stand is not None:
            holder.place._seat._stand.behind.clear()
        await holder.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_node_that_no_request_counts_as_its_own_is_deleted_for_a_waiter(
    server: ZooKeeperServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(server.url, tick=TICK, ttl=1.0) as backend:
        left, waiter = asker(backend, name=name, ttl=1.0), asker(backend, name=name, ttl=1.0)
        await left.acquire()
        await waiter.queue()
        left.place.abandon()  # without a leave
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()
        assert await _nodes(backend, name) == []
    assert "node_left" in [getattr(record, "event", "") for record in caplog.records]


async def test_node_that_no_request_counts_as_its_own_is_deleted_though_others_wait_behind_it(
    server: ZooKeeperServer, name: str
) -> None:
    """Others cannot know that it is nobody's. Its client does when it reads the queue."""
    async with (
        running(server.url, tick=TICK, ttl=1.0) as near,
        running(server.url, tick=TICK, ttl=1.0) as far,
    ):
        left, waiter = asker(near, name=name, ttl=1.0), asker(far, name=name, ttl=1.0)
        await left.acquire()
        await waiter.queue()
        left.place.abandon()  # without a leave
        last = asker(near, name=name, ttl=1.0)
        await last.queue()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()
        await last.leave()
        assert await _nodes(far, name) == []


async def _restore(server: ZooKeeperServer, session: Session, path: str) -> None:
    """Have a node in a session again, as servers do that have lost its deletion."""
    nothing: tuple[Any, Any] = (lambda event: None, lambda sent: None)
    raw = await connect("127.0.0.1", server.port, None, *nothing)
    await raw.hello(0, round(session.timeout * 1000), session.id, session._welcome.password)
    await raw.submit(jute.create(path, b"", jute.EPHEMERAL))
    raw.abort(ConnectionError("it is done"))
    await raw.closed


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_node_that_servers_have_restored_is_deleted_after_a_reconnection(
    server: ZooKeeperServer, name: str, kind: Literal["lock", "semaphore"]
) -> None:
    """ZOOKEEPER-4925 and others: a deletion that was acknowledged is lost at a change of the leader."""
    terms: dict[str, Any] = {}
    if kind == "semaphore":
        terms = {"kind": "semaphore", "mode": "shared", "limit": 1}
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        held, kept = (
            asker(near, name=name, ttl=TTL, **terms),
            asker(near, name=f"{name}-2", ttl=TTL),
        )
        waiter = asker(far, name=name, ttl=TTL, **terms)
        await held.acquire()
        await kept.acquire()
        path, session = held.place._node.path, near._session_in_use(held.place._terms.ttl)
        number = session.id
        assert path is not None
        await held.leave()
        proxy.refuses = True
        proxy.cut()
        await until(lambda: not session.is_up)
        await _restore(server, session, path)
        await waiter.queue()
        proxy.refuses = False
        await asyncio.wait_for(waiter.heard.changed.wait(), TTL)
        assert waiter.heard.told == ["granted"]
        assert session.id == number
        assert kept.heard.told == []
        assert await kept.leave() == Left("released")
        await waiter.leave()


@pytest.mark.parametrize("answers", [True, False])
async def test_servers_that_cannot_tell_a_sessions_nodes_are_not_asked_for_ever(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Before 3.6 they answer that they do not know the question, and close the connection."""
    async with FrameProxy(server.port) as proxy, running(proxy.url, tick=TICK, ttl=TTL) as backend:
        if answers:
            monkeypatch.setattr(jute, "GET_EPHEMERALS", 999)
        session = backend._main
        for number in range(0 if answers else 10):
            loss = proxy.lose("request", jute.GET_EPHEMERALS)
            if number == 0:
                proxy.cut()
            await loss.happened.wait()
        for _ in range(3):
            before = session._connection
            proxy.cut()
            await until(lambda before=before: session.is_up and session._connection is not before)  # type: ignore[misc]
            await asyncio.sleep(0.1)
        await until(lambda: session.is_up)
        await session.heartbeat()
        assert proxy.opcodes.count(jute.GET_EPHEMERALS) == (1 if answers else 10)


async def test_waiter_deletes_no_node_of_a_request_that_is_alive(
    server: ZooKeeperServer, name: str
) -> None:
    """Its own client's, and another client's."""
    async with (
        running(server.url, tick=TICK, ttl=1.0) as near,
        running(server.url, tick=TICK, ttl=1.0) as far,
    ):
        asked = [asker(one, name=name, ttl=1.0) for one in (far, near, near, far, near)]
        await asked[0].acquire()
        for waiter in asked[1:]:
            await waiter.queue()
        for session in (*near._sessions.values(), *far._sessions.values()):
            for member in list(session.members._all):
                member.look_after()
            await session.ask(jute.sync("/"))
        await asyncio.sleep(0)
        assert len(await _nodes(near, name)) == 5
        assert not any(one.heard.told for one in asked)
        for before, after in itertools.pairwise(asked):
            await before.leave()
            await until(lambda after=after: after.heard.told == ["granted"])  # type: ignore[misc]
        await asked[-1].leave()
