"""What a client knows of a queue from its own places in it, and transactions that go out as one."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

import aiodlock
from aiodlock import BackendUnavailable
from aiodlock._model import Gone, Granted, Left, Refused, Waiting
from aiodlock.backends.zookeeper import jute, transactions
from aiodlock.backends.zookeeper.connection import Connection
from aiodlock.backends.zookeeper.queue import Queue, holders, read_queue
from aiodlock.backends.zookeeper.session import Session
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..scenes import bounded, until
from ..zookeeper import ZooKeeperServer, installed
from .zookeeper_places import Asker, asker, running
from .zookeeper_proxy import FrameProxy

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

TICK = 0.05
TTL = 10.0
#: What only asks. Nodes are watched after a while by GET_DATA, which is no question about the queue.
_READING = {jute.GET_CHILDREN2, jute.EXISTS}


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, longest=20.0) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"name-{os.urandom(4).hex()}"


async def _pass_by(backend: ZooKeeperBackend, name: str) -> None:
    """Hold a name once, so that its queue exists."""
    asked = asker(backend, name=name, ttl=TTL)
    await asked.acquire()
    await asked.leave()


async def _settled(*backends: ZooKeeperBackend) -> None:
    """Return when the servers have answered all that was sent, and the loop has seen to it."""
    for _ in range(3):
        for backend in backends:
            for session in backend._sessions.values():
                await session.ask(jute.sync("/"))
        await asyncio.sleep(0)


async def _is_deleted_when_empty(backend: ZooKeeperBackend, name: str) -> None:
    """Delete a queue in which nobody stands any more, as the servers do after a while."""
    async with bounded(10.0):
        while True:
            try:
                await backend._main.ask(jute.delete(backend.queues.directory("lock", name)))
                return
            except jute.ZooKeeperError as refused:
                if refused.code != jute.NOT_EMPTY:
                    raise
                await asyncio.sleep(0.005)


async def test_release_tells_the_own_successor_without_a_question(
    server: ZooKeeperServer, name: str
) -> None:
    async with FrameProxy(server.port) as proxy, running(proxy.url, tick=TICK, ttl=TTL) as backend:
        await _pass_by(backend, name)
        holder = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        seen = len(proxy.opcodes)
        waiters = [asker(backend, name=name, ttl=TTL) for _ in range(5)]
        for waiter in waiters:
            await waiter.queue()
        for before, after in zip([holder, *waiters], waiters, strict=False):
            assert await before.leave() == Left("released")
            assert after.heard.told == ["granted"]
        await waiters[-1].leave()
        opcodes = proxy.opcodes[seen:]
        assert not _READING & set(opcodes)
        assert opcodes.count(jute.MULTI) == 5 + 6


async def test_successor_behind_a_waiter_that_withdraws_waits_on(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, between, last = (asker(backend, name=name, ttl=TTL) for _ in range(3))
        await holder.acquire()
        await between.queue()
        await last.queue()
        assert await between.leave() == Left("withdrawn")
        await _settled(backend)
        assert last.heard.told == []
        await holder.leave()
        await until(lambda: last.heard.told == ["granted"])
        await last.leave()


async def test_successor_waits_for_every_node_of_the_seat_of_a_task(
    server: ZooKeeperServer, name: str
) -> None:
    """A task that holds exclusively gets in again in shared mode, and leaves the first hold first."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        writing = asker(backend, name=name, ttl=TTL)
        await writing.acquire()
        waiter = asker(backend, name=name, ttl=TTL)
        await waiter.queue()
        own = f"t{writing.request_id}"
        reading = asker(backend, own, name=name, ttl=TTL, mode="shared")
        await reading.acquire()
        await writing.leave()
        await _settled(backend)
        assert waiter.heard.told == []
        await reading.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_successor_waits_for_an_owners_node_in_another_client(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        first, second = (asker(one, "ubob", name=name, ttl=TTL) for one in (near, far))
        await first.acquire()
        waiter = asker(near, name=name, ttl=TTL)
        await waiter.queue()
        await second.acquire()
        await first.leave()
        await _settled(near, far)
        assert waiter.heard.told == []
        await second.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_shared_successors_come_in_together_and_the_writer_behind_them_later(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder = asker(backend, name=name, ttl=TTL)
        readers = [asker(backend, name=name, ttl=TTL, mode="shared") for _ in range(3)]
        writer = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        for one in (*readers, writer):
            await one.queue()
        await holder.leave()
        await until(lambda: all(one.heard.told == ["granted"] for one in readers))
        for one in readers:
            await _settled(backend)
            assert writer.heard.told == []
            await one.leave()
        await until(lambda: writer.heard.told == ["granted"])
        await writer.leave()


@pytest.mark.parametrize("limit", [0, 1])
async def test_try_once_that_is_refused_writes_nothing(
    server: ZooKeeperServer, name: str, limit: int
) -> None:
    kind = "semaphore" if limit else "lock"
    async with FrameProxy(server.port) as proxy, running(proxy.url, tick=TICK, ttl=TTL) as backend:
        holder, trying, again = (
            asker(backend, name=name, ttl=TTL, kind=kind, limit=limit) for _ in range(3)
        )
        await holder.acquire()
        seen = len(proxy.opcodes)
        assert await trying.place.acquire(wait=False) == Refused("busy")
        assert jute.MULTI not in proxy.opcodes[seen:]
        assert not any(trying.place in one.members._all for one in backend._sessions.values())
        await holder.leave()
        assert isinstance(await again.place.acquire(wait=False), Granted)
        await again.leave()


async def test_try_once_beside_another_that_comes_first_is_refused(
    server: ZooKeeperServer, name: str
) -> None:
    """Both find the name free, and make their nodes."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        await _pass_by(backend, name)
        trying = [asker(backend, name=name, ttl=TTL) for _ in range(3)]
        answers = await asyncio.gather(*(one.place.acquire(wait=False) for one in trying))
        assert isinstance(answers[0], Granted)
        assert answers[1:] == [Refused("busy", unsure=True)] * 2
        for one in trying:
            await one.leave()


@pytest.mark.parametrize("how", ["broken", "deleted", "lost and broken"])
async def test_successor_is_let_in_when_others_delete_the_node_in_front(
    server: ZooKeeperServer, name: str, how: str
) -> None:
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        holder, waiter = asker(near, name=name, ttl=TTL), asker(near, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        path = holder.place._node.path
        assert path is not None
        if how == "deleted":
            await far._main.ask(jute.delete(path))
        else:
            if how == "lost and broken":
                holder.place.run_out()
            assert await far.break_lock(name) == 1
        await until(lambda: waiter.heard.told == ["granted"])
        await holder.leave()
        await waiter.leave()


async def test_successor_in_another_session_is_let_in_when_the_one_in_front_expires(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as backend,
    ):
        holder, waiter = asker(backend, name=name, ttl=1.0), asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        proxy.refuses = True
        proxy.cut()
        await asyncio.sleep(2.0)
        proxy.refuses = False
        await until(lambda: waiter.heard.told == ["granted"])
        await until(lambda: holder.heard.told == ["expired"])
        await holder.leave()
        await waiter.leave()


async def test_node_of_a_queue_that_was_deleted_is_not_in_front_of_one_in_the_next_queue(
    server: ZooKeeperServer, name: str
) -> None:
    """The numbers begin anew, and the answer to a release in another session is late."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        first = asker(near, name=name, ttl=TTL)
        await first.acquire()
        connection = near._main._connection
        assert connection is not None
        assert connection._transport is not None
        connection._transport.pause_reading()
        leaving = asyncio.create_task(first.leave())
        await _is_deleted_when_empty(far, name)
        theirs = asker(far, name=name, ttl=TTL)
        await theirs.acquire()  # the first node of the queue that is made anew
        waiter = asker(near, name=name, ttl=TTL - 1)
        await waiter.queue()  # the second one
        connection._transport.resume_reading()
        assert await leaving == Left("released")
        await _settled(near, far)
        assert waiter.heard.told == []
        await theirs.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_release_that_is_repeated_lets_nobody_in_who_stands_in_the_next_queue(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        first = asker(near, name=name, ttl=TTL)
        await first.acquire()
        lost = proxy.lose("answer", jute.MULTI)
        with pytest.raises(BackendUnavailable):
            await first.leave()
        assert lost.happened.is_set()
        await _is_deleted_when_empty(far, name)
        theirs = asker(far, name=name, ttl=TTL)
        await theirs.acquire()
        await until(lambda: near._main.is_up)
        waiter = asker(near, name=name, ttl=TTL)
        await waiter.queue()
        assert await first.leave() == Left("released")
        await _settled(near, far)
        assert waiter.heard.told == []
        await theirs.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_request_whose_queue_goes_before_it_is_read_was_broken(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        await _pass_by(backend, name)
        asked = asker(backend, name=name, ttl=TTL)
        read_queue_of = backend.queues.read_queue

        def gone(session: Session, path: str) -> asyncio.Future[Queue]:
            return read_queue_of(session, f"{path}-gone")

        monkeypatch.setattr(backend.queues, "read_queue", gone)
        assert await asked.place.acquire(wait=True) == Gone("broken")
        monkeypatch.undo()
        await asked.leave()


@pytest.mark.parametrize("goes", ["before it is asked again", "while its node is read"])
async def test_request_that_is_broken_before_its_lost_answer_is_made_up_for_was_broken(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        await _pass_by(near, name)
        asked = asker(near, name=name, ttl=TTL)
        lost = proxy.lose("answer", jute.MULTI)
        with pytest.raises(BackendUnavailable):
            await asked.place.acquire(wait=True)
        assert lost.happened.is_set()
        await until(lambda: near._main.is_up)
        adopt = asked.place._node.adopt

        async def broken_first(entries: Queue) -> None:
            assert await far.break_lock(name) == 1
            await adopt(entries)

        if goes == "while its node is read":
            monkeypatch.setattr(asked.place._node, "adopt", broken_first)
        else:
            assert await far.break_lock(name) == 1
            await _is_deleted_when_empty(far, name)
        assert await asked.place.acquire(wait=True) == Gone("broken")
        await asked.leave()
        again = asker(near, name=name, ttl=TTL)
        await again.acquire()
        await again.leave()


async def test_connection_that_is_lost_before_the_blocker_is_watched_leaves_a_waiter(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        theirs = asker(far, name=name, ttl=TTL)
        await theirs.acquire()
        asked = asker(near, name=name, ttl=TTL)
        enter, session = asked.place._node.enter, near._main

        async def cut(*, reads: bool) -> Queue | None:
            entries = await enter(reads=reads)
            assert session._connection is not None
            session._connection.abort(BackendUnavailable("cut"))
            await asyncio.sleep(0)
            assert not session.is_up
            return entries

        monkeypatch.setattr(asked.place._node, "enter", cut)
        await asked.queue()
        await until(lambda: session.is_up)
        await theirs.leave()
        await until(lambda: asked.heard.told == ["granted"])
        await asked.leave()


async def test_calls_of_one_turn_are_one_transaction(server: ZooKeeperServer, name: str) -> None:
    async with FrameProxy(server.port) as proxy, running(proxy.url, tick=TICK, ttl=TTL) as backend:
        names = [f"{name}-{number}" for number in range(8)]
        for each in names:
            await _pass_by(backend, each)
        seen = proxy.opcodes.count(jute.MULTI)
        asked = [asker(backend, name=each, ttl=TTL) for each in names]
        await asyncio.gather(*(one.acquire() for one in asked))
        assert proxy.opcodes.count(jute.MULTI) == seen + 1
        await asyncio.gather(*(one.leave() for one in asked))
        assert proxy.opcodes.count(jute.MULTI) == seen + 2


async def test_two_nodes_of_a_queue_have_two_tokens_though_they_are_asked_for_at_once(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        await _pass_by(backend, name)
        readers = [asker(backend, name=name, ttl=TTL, mode="shared") for _ in range(4)]
        granted = await asyncio.gather(*(one.acquire() for one in readers))
        assert len({one.token for one in granted}) == 4
        for one in readers:
            await one.leave()


async def test_call_that_cannot_be_done_costs_no_other_its_place(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        names = [f"{name}-{number}" for number in range(3)]
        for each in names:
            await _pass_by(backend, each)
        # The servers delete what has been empty for a while.
        await backend._main.ask(jute.delete(backend.queues.directory("lock", names[1])))
        asked = [asker(backend, name=each, ttl=TTL) for each in names]
        granted = await asyncio.gather(*(one.acquire() for one in asked))
        assert all(isinstance(one, Granted) for one in granted)
        path = asked[2].place._node.path
        assert path is not None
        await backend._main.ask(jute.delete(path))
        left = await asyncio.gather(*(one.leave() for one in asked))
        assert left == [Left("released"), Left("released"), Left("gone", "gone")]


async def test_queue_that_was_not_there_when_it_was_read_and_came_back_before_the_node_is_read_again(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        names = [f"{name}-{number}" for number in range(2)]
        for each in names:
            await _pass_by(backend, each)
        missing = backend.queues.directory("lock", names[1])
        await backend._main.ask(jute.delete(missing))
        send = transactions._send

        def another_makes_it_first(
            connection: Connection, parts: Sequence[transactions._Part]
        ) -> None:
            if len(parts) == 1:
                connection.submit(jute.create2(missing, b"", jute.CONTAINER, backend.queues.acl))
            send(connection, parts)

        monkeypatch.setattr(transactions, "_send", another_makes_it_first)
        asked = [asker(backend, name=each, ttl=TTL) for each in names]
        granted = await asyncio.gather(*(one.acquire() for one in asked))
        assert all(isinstance(one, Granted) for one in granted)
        for one in asked:
            await one.leave()


async def test_calls_whose_connection_was_lost_in_their_turn_were_never_sent(
    server: ZooKeeperServer, name: str
) -> None:
    async with FrameProxy(server.port) as proxy, running(proxy.url, tick=TICK, ttl=TTL) as backend:
        session = backend._main
        receipt = jute.create(f"{backend.queues.root}/ids/{name}", b"", jute.EPHEMERAL)
        first = session.transact((receipt,))
        second = session.transact((jute.check("/"),))
        lost = session._connection
        assert lost is not None
        lost.connection_lost(None)
        for one in (first, second):
            with pytest.raises(BackendUnavailable):
                await one
        assert first.exception() is not second.exception()
        proxy.cut()
        await until(lambda: session.is_up and session._connection is not lost)
        with pytest.raises(jute.ZooKeeperError, match="no such node"):
            await session.ask(jute.exists(f"{backend.queues.root}/ids/{name}"))


@pytest.mark.parametrize("seed", range(6))
async def test_those_hold_who_stand_in_front(server: ZooKeeperServer, name: str, seed: int) -> None:
    """Requests of two clients come and go; when all is quiet, the queue says who holds, and they know."""
    chance = random.Random(seed)
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        here: list[Asker] = []
        holding: set[Asker] = set()
        for step in range(60):
            coming = [_any(chance, near, far, name, here) for _ in range(chance.choice([0, 1, 3]))]
            going = chance.sample(here, min(len(here), chance.choice([0, 1, 1, 2])))
            answers = await asyncio.gather(
                *(one.place.acquire(wait=True) for one in coming), *(one.leave() for one in going)
            )
            here = [one for one in here if one not in going]
            holding -= set(going)
            for one, answer in zip(coming, answers, strict=False):
                if isinstance(answer, (Refused, Gone)):
                    await one.leave()
                    continue
                here.append(one)
                if not isinstance(answer, Waiting):
                    holding.add(one)
            if step % 5 == 4:
                await _settled(near, far)
                try:
                    await until(partial(_know, near, name, here, holding), within=60.0)
                except AssertionError:
                    places = [(one.place, one.heard.told, one in holding) for one in here]
                    raise AssertionError(f"{await _held(near, name)} hold, but: {places}") from None
        for one in here:
            await one.leave()


async def _held(backend: ZooKeeperBackend, name: str) -> set[str]:
    """Return the requests that hold, as the servers' nodes tell it."""
    await backend._main.ask(jute.sync("/"))
    path = backend.queues.directory("lock", name)
    nodes = (await backend._main.ask(jute.get_children(path))).value[0]
    return {entry.request for entry in holders(read_queue(nodes))}


async def _know(
    backend: ZooKeeperBackend, name: str, here: list[Asker], holding: set[Asker]
) -> bool:
    """Tell whether those that hold know it, and no others believe it."""
    for one in list(here):
        if one.heard.told[-1:] not in ([], ["granted"]):
            here.remove(one)  # on a machine that stood still: its time is over
            await one.leave()
    told = {one for one in here if one in holding or one.heard.told == ["granted"]}
    return {one.place._node.id for one in told} == await _held(backend, name)


def _any(
    chance: random.Random,
    near: ZooKeeperBackend,
    far: ZooKeeperBackend,
    name: str,
    here: list[Asker],
) -> Asker:
    backend = chance.choice([near, near, far])
    mode = chance.choice(["exclusive", "exclusive", "shared"])
    ttl = chance.choice([TTL, TTL, 12.0])
    own = [
        one for one in here if one.place._queues is backend.queues and one.heard.told == ["granted"]
    ]
    owner = chance.choice([None, None, None, "ubob", "own"])
    if owner == "own":
        owner = f"t{chance.choice(own).request_id}" if own else None
    return asker(backend, owner, name=name, ttl=ttl, mode=mode)


async def test_thousand_waiters_of_two_clients_come_in_one_after_the_other(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        running(server.url, tick=TICK, ttl=20.0) as near,
        running(server.url, tick=TICK, ttl=20.0) as far,
    ):
        holder = asker(near, name=name, ttl=20.0)
        await holder.acquire()
        waiters = [asker(chance, name=name, ttl=20.0) for chance in (near, far) for _ in range(500)]
        random.Random(1).shuffle(waiters)
        await asyncio.gather(*(one.queue() for one in waiters))
        inside = 0

        async def take_turn(one: Asker) -> int:
            nonlocal inside
            await asyncio.wait_for(one.heard.changed.wait(), 120.0)
            assert one.heard.told == ["granted"]
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1
            await one.leave()
            return one.place.token

        await holder.leave()
        tokens = await asyncio.gather(*(take_turn(one) for one in waiters))
        assert len(set(tokens)) == 1000


async def test_queue_of_more_than_a_megabyte_is_read(server: ZooKeeperServer, name: str) -> None:
    """The limit of other clients (jute.maxbuffer) is none for this one."""
    async with running(server.url, tick=TICK, ttl=20.0) as backend:
        holder = asker(backend, name=name, ttl=20.0)
        await holder.acquire()
        session, path = backend._main, backend.queues.directory("lock", name)
        node = f"{path}/x:{'0' * 20}:{'0' * 24}:"
        some = [jute.create(node, b"", jute.EPHEMERAL | jute.SEQUENTIAL)] * 500
        await asyncio.gather(*(session.ask(jute.multi(some)) for _ in range(35)))
        entries = await backend.queues.read_queue(session, path)
        assert len(entries) == 17_501
        assert sum(4 + len(entry.node) for entry in entries) > 1_050_000
        await holder.leave()


async def test_refused_try_commits_nothing(server: ZooKeeperServer, name: str) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        aiodlock.Client(f"{server.url}?tick_time={TICK}", ttl=TTL) as holding,
        aiodlock.Client(f"{proxy.url}?tick_time={TICK}", ttl=TTL) as trying,
    ):
        async with holding.lock(name):
            seen = len(proxy.opcodes)
            with pytest.raises(aiodlock.WouldBlock):
                await trying.lock(name).acquire_nowait()
            assert jute.MULTI not in proxy.opcodes[seen:]
        async with trying.lock(name, timeout=10.0):  # an owner is the same in all of its requests
            async with trying.lock(name):
                pass
