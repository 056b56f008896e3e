"""What places on ZooKeeper do that others need not: sessions, seats, and the ends of leases."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

import aiodlock
from aiodlock import BackendError, Unsupported
from aiodlock._clock import now
from aiodlock._model import ENDED, Gone, Granted, Left, Refused, Waiting
from aiodlock.backends.zookeeper import jute, store
from aiodlock.backends.zookeeper.node import QueueNode
from aiodlock.backends.zookeeper.queue import Entry
from aiodlock.backends.zookeeper.store import ZooKeeperBackend

from ..scenes import PATIENCE, until
from ..zookeeper import ZooKeeperServer, installed, looking
from .zookeeper_places import Asker, asker, running
from .zookeeper_proxy import FrameProxy

pytestmark = pytest.mark.skipif(not installed(), reason="no ZooKeeper")

TICK = 0.05
TTL = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick=TICK, shortest=0.3, longest=4.0) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"name-{os.urandom(4).hex()}"


async def _receipts(backend: ZooKeeperBackend, *asked: Asker) -> list[str]:
    ids = (await backend._main.ask(jute.get_children(f"{backend.queues.root}/ids"))).value[0]
    return [one.place._node.id for one in asked if one.place._node.id in ids]


async def test_ttl_that_the_servers_do_not_grant_is_refused_with_their_figure(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        with pytest.raises(Unsupported, match=r"ttl=0\.2 is shorter .* 0\.3 s"):
            await asker(backend, name=name, ttl=0.2).place.acquire(wait=True)
        with pytest.raises(Unsupported, match=r"ttl=5 is longer .* 4 s"):
            await asker(backend, name=name, ttl=5.0).place.acquire(wait=True)
        # It would be closed for longer than its ttl when its process dies.
        with pytest.raises(Unsupported, match=r"ttl=0\.2 is shorter .* 0\.3 s"):
            await asker(backend, name=name, ttl=0.2, max_hold=1.0).place.acquire(wait=True)
        # More milliseconds than a message has room for: 25 days.
        with pytest.raises(Unsupported, match=r"ttl=1e\+09 is longer .* 4 s"):
            await asker(backend, name=name, ttl=1e9).place.acquire(wait=True)
        # What is held for a short time at most is deleted by the client itself.
        brief = asker(backend, name=name, ttl=0.2, max_hold=0.2)
        await brief.acquire()
        await brief.leave()


@pytest.mark.parametrize("tick", [TTL, 2000.0])
async def test_ttl_that_could_not_be_extended_with_ticks_of_that_length_is_refused(
    server: ZooKeeperServer, name: str, tick: float
) -> None:
    """A tickTime was given in milliseconds, as in zoo.cfg: each lease was lost after its ttl, and the next
    request waited for ever, at the head of the queue."""
    async with running(server.url, tick=tick, ttl=TTL) as backend:
        with pytest.raises(Unsupported, match=f"too short for tick_time={tick:g}.*in seconds"):
            await asker(backend, name=name, ttl=TTL).place.acquire(wait=True)


async def test_each_ttl_has_a_session_whose_timeout_it_is(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        one, other = asker(backend, name=name, ttl=1.0), asker(backend, name=f"{name}-2", ttl=3.0)
        await one.acquire()
        await other.acquire()
        assert one.place._node.session is not other.place._node.session
        for asked in (one, other):
            assert asked.place._node.session.granted == asked.place._terms.ttl
            await asked.leave()


async def test_ttl_that_differs_at_each_call_is_told(
    server: ZooKeeperServer,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is computed: it takes a connection for each lock, which servers limit."""
    monkeypatch.setattr(store, "_MANY", 4)
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        for number in range(6):
            asked = asker(backend, name=name, ttl=1.0 + number / 100)
            await asked.acquire()
            await asked.leave()
    messages = [record.getMessage() for record in caplog.records]
    (told,) = [one for one in messages if "different ttl" in one]
    assert "uses 4 " in told


async def test_token_is_the_nodes_czxid(server: ZooKeeperServer, name: str) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        tokens = []
        for _ in range(3):
            asked = asker(backend, name=name, ttl=TTL)
            granted = await asked.acquire()
            assert asked.place._node.path is not None
            stat = (await backend._main.ask(jute.exists(asked.place._node.path))).value
            assert granted.token == stat.created
            tokens.append(granted.token)
            await asked.leave()
        assert tokens == sorted(set(tokens))


async def test_owner_holds_on_when_the_client_that_came_first_dies(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as lasting:
        second = asker(lasting, "ubob", name=name, ttl=TTL)
        stranger = asker(lasting, name=name, ttl=TTL)
        async with running(server.url, tick=TICK, ttl=TTL) as dying:
            first = asker(dying, "ubob", name=name, ttl=TTL)
            token = (await first.acquire()).token
            await stranger.queue()
            assert (await second.acquire()).token == token
        # The session of the first is closed now, its nodes are gone.
        assert len((await lasting.inspect("lock", name)).holders) == 1
        third = asker(lasting, "ubob", name=name, ttl=TTL)
        assert (await third.acquire()).token == token
        assert stranger.heard.told == []
        await second.leave()
        assert stranger.heard.told == []
        await third.leave()
        await asyncio.wait_for(stranger.heard.changed.wait(), PATIENCE)
        assert stranger.heard.told == ["granted"]
        assert stranger.place.token > token
        await stranger.leave()


async def test_waiter_whose_owner_comes_to_hold_joins_when_it_looks(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, first, between, second = (
            asker(backend, owner, name=name, ttl=TTL) for owner in (None, "ubob", None, "ubob")
        )
        await holder.acquire()
        await first.queue()
        await between.queue()
        await second.queue()
        await holder.leave()
        await until(lambda: first.heard.told == ["granted"])
        await until(lambda: second.heard.told == ["granted"])
        assert second.place.token == first.place.token
        assert between.heard.told == []
        for asked in (first, second, between):
            await asked.leave()


async def test_waiter_that_moves_into_its_owners_seat_does_not_miss_the_node_it_left(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is to be watched soon after it began to wait; that may come during the move."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as other,
    ):
        blocker = asker(one, name=name)
        await blocker.acquire()
        first, second = asker(one, "ujob", name=name), asker(other, "ujob", name=name)
        await first.queue()
        await second.queue()
        place = second.place
        session = place._node.session
        ask = session.submit

        def submit(call: jute.Call[Any]) -> asyncio.Future[Any]:
            answer = ask(call)
            if call.opcode == jute.MULTI:
                place._own_watch._watch()
            return answer

        monkeypatch.setattr(session, "submit", submit)
        await blocker.leave()
        await until(lambda: second.heard.told)
        assert second.heard.told == ["granted"]
        await first.leave()
        await second.leave()


async def test_waiter_that_is_first_while_its_node_moves_hears_of_a_break_when_it_holds(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seat's holder leaves during the move, and the waiter looks after what it waits for then."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as other,
    ):
        blocker = asker(one, name=name)
        await blocker.acquire()
        first, second = asker(one, "ujob", name=name), asker(other, "ujob", name=name)
        await first.queue()
        await second.queue()
        await until(lambda: second.place._own_watch._path)
        join = QueueNode.join

        async def later(node: QueueNode, seat: Entry) -> None:
            monkeypatch.setattr(QueueNode, "join", join)
            await first.leave()
            second.place.look_after()
            await asyncio.sleep(0)
            await node.session.ask(jute.sync("/"))  # what was read is known
            await join(node, seat)

        monkeypatch.setattr(QueueNode, "join", later)
        await blocker.leave()
        await until(lambda: second.heard.told == ["granted"])
        await until(lambda: second.place._own_watch._path)
        assert await one.break_lock(name) == 1
        await until(lambda: second.heard.told == ["granted", "broken"])
        await second.leave()


@pytest.mark.parametrize("broken", [False, True])
async def test_acquire_that_is_cancelled_while_its_node_moves_leaves_no_receipt(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """It would stay for as long as its client."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        first, second = (asker(backend, "ujob", name=name, ttl=TTL) for _ in range(2))
        await first.acquire()
        acquiring = asyncio.ensure_future(second.place.acquire(wait=True))
        session = backend._main
        submit = session.submit

        def cancelled(call: jute.Call[Any]) -> asyncio.Future[Any]:
            if call.opcode == jute.MULTI:
                acquiring.cancel()
            return submit(call)

        monkeypatch.setattr(session, "submit", cancelled)
        await asyncio.wait({acquiring})
        assert acquiring.cancelled()
        monkeypatch.undo()
        if broken:
            await backend.break_lock(name)
        for asked in (second, first):
            await asked.leave()
        await session.ask(jute.sync("/"))
        assert await _receipts(backend, first, second) == []


async def test_lease_that_was_broken_leaves_no_receipt(server: ZooKeeperServer, name: str) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        asked = asker(backend, name=name, ttl=TTL)
        await asked.acquire()
        await backend.break_lock(name)
        assert await asked.leave() == Left("gone", "broken")
        await backend._main.ask(jute.sync("/"))
        assert await _receipts(backend, asked) == []


@pytest.mark.parametrize("how", ["leave", "leave_soon"])
async def test_request_that_ends_while_its_node_moves_leaves_no_node(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with (
        running(server.url, tick=TICK, ttl=TTL) as one,
        running(server.url, tick=TICK, ttl=TTL) as other,
    ):
        blocker = asker(one, name=name)
        await blocker.acquire()
        first, second = asker(one, "ujob", name=name), asker(other, "ujob", name=name)
        await first.queue()
        await second.queue()
        session = second.place._node.session
        ask, loop = session.submit, asyncio.get_running_loop()
        left, soon = loop.create_future(), loop.create_future()

        def submit(call: jute.Call[Any]) -> asyncio.Future[Any]:
            answer = ask(call)
            if call.opcode == jute.MULTI and not left.done():
                if how == "leave_soon" and second.place.leave_soon(ENDED, soon.set_result):
                    left.set_result(soon)
                else:
                    left.set_result(asyncio.ensure_future(second.leave()))
            return answer

        monkeypatch.setattr(session, "submit", submit)
        await blocker.leave()
        assert await (await left) == Left("withdrawn")
        await first.leave()
        async with looking(server.url) as (session, root):
            path = f"{root}/locks/{name}"
            assert (await session.ask(jute.get_children(path))).value[0] == []


async def test_session_that_is_about_to_be_used_is_not_closed_as_idle(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        before = asker(backend, name=name, ttl=1.0)
        await before.acquire()
        await before.leave()
        session = backend._session_in_use(before.place._terms.ttl)
        session.members.used_at -= 100.0
        connected = session.wait_up

        async def wait_up(within: float) -> None:
            backend._close_idle(backend._main)  # the sweep comes while there is no connection
            await asyncio.sleep(0)
            await connected(within)

        monkeypatch.setattr(session, "wait_up", wait_up)
        again = asker(backend, name=name, ttl=1.0)
        await again.acquire()
        await again.leave()


async def test_exclusive_hold_does_not_begin_where_a_downgrade_has_let_a_reader_in(
    server: ZooKeeperServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner held exclusively when the queue was read, and in shared mode alone when its node moves."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        writing = asker(near, "ubob", name=name, ttl=TTL)
        reading = asker(near, "ubob", name=name, ttl=TTL, mode="shared")
        await writing.acquire()
        await reading.acquire()
        reader = asker(far, name=name, ttl=TTL, mode="shared")
        await reader.queue()
        again = asker(near, "ubob", name=name, ttl=TTL)
        join = QueueNode.join

        async def later(node: QueueNode, seat: Entry) -> None:
            await writing.leave()
            await until(lambda: reader.heard.told == ["granted"])
            monkeypatch.setattr(QueueNode, "join", join)
            await join(node, seat)

        monkeypatch.setattr(QueueNode, "join", later)
        assert await again.place.acquire(wait=True) == Refused("deadlock", unsure=True)
        for asked in (again, reading, reader):
            await asked.leave()


async def test_downgrade_lets_a_waiting_reader_in(server: ZooKeeperServer, name: str) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        writing = asker(backend, "ubob", name=name, ttl=TTL)
        reading = asker(backend, "ubob", name=name, ttl=TTL, mode="shared")
        other = asker(backend, name=name, ttl=TTL, mode="shared")
        await writing.acquire()
        await other.queue()
        await reading.acquire()
        await asyncio.sleep(0.1)
        assert other.heard.told == []
        await writing.leave()
        await until(lambda: other.heard.told == ["granted"])
        upgrade = asker(backend, "ubob", name=name, ttl=TTL)
        assert await upgrade.place.acquire(wait=True) == Refused("deadlock", unsure=True)
        for asked in (upgrade, reading, other):
            await asked.leave()


async def test_task_gets_in_again_in_shared_mode_while_it_holds_exclusively(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        writing = asker(backend, name=name, ttl=TTL)
        token = (await writing.acquire()).token
        own = f"t{writing.request_id}"
        reading = asker(backend, own, name=name, ttl=TTL, mode="shared")
        assert (await reading.acquire()).token == token
        await reading.leave()
        await writing.leave()


async def test_lease_that_ran_out_is_deleted_though_the_session_lives(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder = asker(backend, name=name, ttl=0.5, auto_extend=False)
        waiter = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        await asyncio.sleep(0.5)
        holder.place.run_out()
        await asyncio.wait_for(waiter.heard.changed.wait(), 1.0)
        assert waiter.heard.told == ["granted"]
        assert await holder.leave() == Left("gone", "expired")
        await waiter.leave()


@pytest.mark.parametrize("look", ["inspect", "try once"])
async def test_look_at_a_queue_waits_for_the_clients_own_leave_on_another_session(
    server: ZooKeeperServer, name: str, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions have connections of their own: what is asked on one may overtake a leave on another."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, trying = asker(backend, name=name, ttl=1.0), asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        session = holder.place._node.session
        loop, slow, transact = asyncio.get_running_loop(), asyncio.Event(), session.transact

        def late(calls: Any) -> asyncio.Future[Any]:
            async def send() -> Any:
                await slow.wait()
                return await transact(calls)

            return loop.create_task(send())

        monkeypatch.setattr(session, "transact", late)
        left: list[object] = []
        assert holder.place.leave_soon(ENDED, left.append)
        asked: Any = (
            backend.inspect("lock", name) if look == "inspect" else trying.place.acquire(wait=False)
        )
        answering = asyncio.create_task(asked)
        await asyncio.wait([answering], timeout=0.2)
        slow.set()
        answer = await answering
        if look == "inspect":
            assert answer.holders == ()
        else:
            assert isinstance(answer, Granted)
            await trying.leave()
        assert left == [Left("released")]


async def test_margin_that_no_session_leaves_is_a_lease_that_comes_too_late(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        asked = asker(backend, name=name, ttl=TTL, margin=0.99 * TTL)
        answer = await asked.place.acquire(wait=True)
        assert isinstance(answer, Waiting)
        await asyncio.wait_for(asked.heard.changed.wait(), PATIENCE)
        assert asked.heard.told == ["expired"]
        assert asked.place.token > 0
        await asked.leave()


async def test_waiter_that_looks_after_what_blocks_it_does_not_read_the_queue(
    server: ZooKeeperServer, name: str
) -> None:
    """Each does so once per timeout: a thousand waiters would read a thousand entries each."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as far,
    ):
        holder, waiter = asker(near, name=name, ttl=TTL), asker(far, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        (session,) = far._sessions.values()
        await session.ask(jute.sync("/"))  # its watch is set
        before = len(proxy.opcodes)
        for member in list(session.members._all):
            member.look_after()
        await session.ask(jute.sync("/"))
        assert jute.EXISTS in proxy.opcodes[before:]
        assert jute.GET_CHILDREN2 not in proxy.opcodes[before:]
        await holder.leave()
        await until(lambda: waiter.heard.told == ["granted"])
        await waiter.leave()


async def test_checking_a_sequencer_asks_for_those_who_hold_and_for_no_waiter(
    server: ZooKeeperServer, name: str
) -> None:
    """A resource may check one for each write; it asked for the node of each waiter, thousands perhaps."""
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as far,
    ):
        holder = asker(near, name=name, ttl=TTL)
        token = (await holder.acquire()).token
        waiters = [asker(near, name=name, ttl=TTL) for _ in range(20)]
        for one in waiters:
            await one.queue()
        before = len(proxy.opcodes)
        assert await far.holds("lock", name, "exclusive", token)
        assert not await far.holds("lock", name, "exclusive", token + 1)
        assert not await far.holds("lock", name, "shared", token)
        assert proxy.opcodes[before:].count(jute.GET_DATA) <= 3
        for one in (*waiters, holder):
            await one.leave()
        assert not await far.holds("lock", name, "exclusive", token)


async def test_break_deletes_the_holders_and_tells_them(server: ZooKeeperServer, name: str) -> None:
    async with (
        running(server.url, tick=TICK, ttl=TTL) as near,
        running(server.url, tick=TICK, ttl=TTL) as far,
    ):
        held = [asker(near, name=name, ttl=TTL, mode="shared") for _ in range(3)]
        for one in held:
            await one.acquire()
        waiter = asker(far, name=name, ttl=TTL)
        await waiter.queue()
        assert await far.break_lock(name) == 3
        await until(lambda: all(one.heard.told == ["broken"] for one in held))
        await until(lambda: waiter.heard.told == ["granted"])
        assert [await one.leave() for one in held] == [Left("gone", "broken")] * 3
        await waiter.leave()
        assert await far.break_lock(name) == 0


async def test_waiter_behind_a_node_that_another_user_has_made_is_refused_and_told_why(
    server: ZooKeeperServer, name: str
) -> None:
    """A node that may not be read was taken for one that had gone: the waiter read the queue again and
    again, as fast as the servers answered, and who looked saw a free name."""
    prefix = f"mixed-{os.urandom(4).hex()}"
    user, ticks = f"zookeeper://alice:secret@127.0.0.1:{server.port}", f"?tick_time={TICK}"
    async with FrameProxy(server.port) as proxy:
        async with (
            aiodlock.Client(proxy.url + ticks, prefix=prefix, ttl=TTL) as anybody,
            aiodlock.Client(user + ticks, prefix=prefix, ttl=TTL) as alice,
        ):
            async with anybody.lock(name):
                pass  # all may add nodes to this queue
            async with alice.lock(name):
                before = len(proxy.opcodes)
                with pytest.raises(BackendError, match="not permitted by the node's ACL"):
                    await anybody.lock(name, timeout=0.5).acquire()
                assert len(proxy.opcodes) < before + 20
                with pytest.raises(BackendError, match="not permitted by the node's ACL"):
                    await anybody.lock(name).locked()
            async with anybody.lock(name, timeout=10.0):
                pass


async def test_more_holders_than_one_message_can_name_are_broken(
    server: ZooKeeperServer, name: str
) -> None:
    """Servers close the connection on a message of a megabyte."""
    url, name, many = f"{server.url}/{name}", "é" * 256, 700
    async with running(url, tick=TICK, ttl=4.0) as near, running(url, tick=TICK, ttl=4.0) as far:
        held = [asker(near, name=name, ttl=4.0, mode="shared") for _ in range(many)]
        # A busy machine does not answer all of them at once in time.
        for at in range(0, many, 50):
            await asyncio.gather(*(one.acquire() for one in held[at : at + 50]))
        assert await far.break_lock(name) == many
        await until(lambda: all(one.heard.told == ["broken"] for one in held))
        assert await far.break_lock(name) == 0
        await asyncio.gather(*(one.leave() for one in held))


@pytest.mark.parametrize("odd", [".", "..", "a/b", "\0", "\n", "😀", "zookeeper", "%2E", "a:b"])
async def test_any_text_is_a_name(server: ZooKeeperServer, name: str, odd: str) -> None:
    # All names under its root are its own.
    async with running(f"{server.url}/{name}", tick=TICK, ttl=TTL) as backend:
        asked = asker(backend, name=odd, ttl=TTL)
        await asked.acquire()
        assert [name async for name in backend.names("*")] == [odd]
        assert len((await backend.inspect("lock", odd)).holders) == 1
        await asked.leave()
        assert [name async for name in backend.names("*")] == []


async def test_observer_is_told_of_a_queue_that_comes_and_of_its_changes(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        changed = asyncio.Event()
        stop = backend.observe("lock", name, changed.set)
        await asyncio.sleep(0.1)
        asked = asker(backend, name=name, ttl=TTL)
        await asked.acquire()
        await asyncio.wait_for(changed.wait(), PATIENCE)
        await asyncio.sleep(0.1)
        changed.clear()
        await asked.leave()
        await asyncio.wait_for(changed.wait(), PATIENCE)
        stop()
        changed.clear()
        again = asker(backend, name=name, ttl=TTL)
        await again.acquire()
        await asyncio.sleep(0.1)
        assert not changed.is_set()
        await again.leave()


async def test_observer_of_a_queue_that_the_servers_delete_is_told_of_the_next_one(
    server: ZooKeeperServer, name: str
) -> None:
    """They delete what has been empty for a while, and tell that to who watches the children."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        before = asker(backend, name=name, ttl=TTL)
        await before.acquire()
        await before.leave()
        changed = asyncio.Event()
        stop = backend.observe("lock", name, changed.set)
        await backend._main.ask(jute.delete(backend.queues.directory("lock", name)))
        for _ in range(2):
            await backend._main.ask(jute.sync("/"))
        changed.clear()
        asked = asker(backend, name=name, ttl=TTL)
        await asked.acquire()
        await asyncio.wait_for(changed.wait(), PATIENCE)
        await asked.leave()
        stop()


async def test_observer_is_told_once_of_a_change_however_often_its_connection_was_lost(
    server: ZooKeeperServer, name: str
) -> None:
    async with (
        FrameProxy(server.port) as proxy,
        running(proxy.url, tick=TICK, ttl=TTL) as backend,
        running(server.url, tick=TICK, ttl=TTL) as other,
    ):
        session, first = backend._main, asker(other, name=name, ttl=TTL)
        await first.acquire()
        told = 0

        def changed() -> None:
            nonlocal told
            told += 1

        stop = backend.observe("lock", name, changed)
        for _ in range(3):
            connection = session._connection
            proxy.cut()
            await until(lambda last=connection: session.is_up and session._connection is not last)  # type: ignore[misc]
        await session.ask(jute.sync("/"))
        told = 0
        await first.leave()
        await until(lambda: told)
        await session.ask(jute.sync("/"))
        assert told == 1
        stop()
        assert not session.watches._children
        assert not session.watches._data


async def test_everything_that_was_deleted_ends_what_was_held_and_waited_for(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder, waiter = asker(backend, name=name, ttl=TTL), asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        path = backend.queues.directory("lock", name)
        nodes = (await backend._main.ask(jute.get_children(path))).value[0]
        await asyncio.sleep(0.1)
        for node in nodes:
            await backend._main.ask(jute.delete(f"{path}/{node}"))
        await until(lambda: holder.heard.told == ["gone"])
        await until(lambda: waiter.heard.told[-1:] in (["gone"], ["granted"]))
        await waiter.place.leave(ENDED, within=5.0)
        await holder.leave()
        again = asker(backend, name=name, ttl=TTL)
        await again.acquire()
        await again.leave()


async def test_request_whose_session_has_ended_is_gone(server: ZooKeeperServer, name: str) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        session = holder.place._node.session
        session.lifetime.over = True
        session.members.on_over()
        assert holder.heard.told == ["expired"]
        assert await holder.place.acquire(wait=True) == Gone("expired")
        assert await holder.leave() == Left("gone", "expired")


async def test_single_try_after_a_pause_that_the_session_did_not_survive_is_granted(
    server: ZooKeeperServer, name: str
) -> None:
    """It asks on the old connection first. It was refused with BackendUnavailable, which said that it had
    been granted too late."""
    async with aiodlock.Client(f"{server.url}?tick_time={TICK}", ttl=0.5) as client:
        async with client.lock(name):
            pass
        time.sleep(1.2)  # the process stands still
        lease = await client.lock(name).acquire_nowait()
        assert lease.held
        await lease.release()


async def test_lost_lease_keeps_its_name_closed_until_it_would_have_ended(
    server: ZooKeeperServer, name: str
) -> None:
    """A body that is cancelled because its client is closed cleans up behind a closed door."""
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder = asker(backend, name=name, ttl=TTL, margin=0.2)
        waiter = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        deadline = holder.place.deadline
        holder.place.run_out()
        await asyncio.wait_for(waiter.heard.changed.wait(), PATIENCE)
        assert waiter.heard.told == ["granted"]
        assert waiter.heard.at >= deadline
        assert await holder.leave() == Left("gone", "expired")
        await waiter.leave()


async def test_lease_that_was_held_for_its_longest_time_is_deleted_though_the_session_lives(
    server: ZooKeeperServer, name: str
) -> None:
    async with running(server.url, tick=TICK, ttl=TTL) as backend:
        holder = asker(backend, name=name, ttl=4.0, max_hold=0.1)
        waiter = asker(backend, name=name, ttl=TTL)
        await holder.acquire()
        await waiter.queue()
        await asyncio.sleep(holder.place.deadline - now())
        lifetime = holder.place._node.lifetime
        assert lifetime is not None
        session_ends = lifetime.deadline
        holder.place.run_out()
        await asyncio.wait_for(waiter.heard.changed.wait(), PATIENCE)
        assert waiter.heard.told == ["granted"]
        assert holder.place.deadline <= waiter.heard.at < session_ends
        await holder.leave()
        await waiter.leave()


@pytest.mark.parametrize(("ttl", "max_hold", "reason"), [(3, 1, "max_hold"), (1, 3, "expired")])
async def test_lease_that_is_not_extended_ends_for_the_reason_that_made_it_short(
    server: ZooKeeperServer, name: str, ttl: float, max_hold: float, reason: str
) -> None:
    """Its end comes a moment before ``max_hold``, which counts from the grant."""
    async with aiodlock.Client(f"{server.url}?tick_time={TICK}") as client:
        lock = client.lock(name, ttl=ttl, max_hold=max_hold, auto_extend=False)
        lease = await lock.acquire()
        request = lease._request
        assert request.place.deadline < request.granted_at + max_hold
        assert request.overdue_reason(request.place.deadline) == reason
        await lease.release()
