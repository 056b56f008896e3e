"""Who is told of a release: the new holder's client and the next one's, however many wait."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._model import ENDED, Waiting
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.recipe import Keys, Queue, Turn
from aiodlock.backends.etcd.room import Room
from aiodlock.backends.etcd.watching import Watches
from aiodlock.backends.stage import ASKING, NEW

from ..scenes import bounded
from .conftest import Direct, Heard
from .servers import EtcdCluster

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]
Waiters = list[tuple[EtcdPlace, Heard]]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the answers with events that each client hears."""
    found: Counter[int] = Counter()
    heard = Watches._heard

    def counting(self: Watches, answer: m.WatchResponse) -> None:
        found[id(self)] += bool(answer.events)
        heard(self, answer)

    monkeypatch.setattr(Watches, "_heard", counting)
    return found


async def _queue(
    clients: list[Direct], modes: list[Any], *, named: bool = False
) -> tuple[EtcdPlace, Waiters]:
    holder, _ = clients[0].place(ttl=20.0, waiter_ttl=20.0)
    await holder.acquire(wait=True)
    waiters: Waiters = []
    for client, mode in zip(clients[1:], modes, strict=True):
        owner = f"owner {len(waiters)}" if named else None
        place, heard = client.place(mode=mode, ttl=20.0, waiter_ttl=20.0, owner=owner)
        assert isinstance(await place.acquire(wait=True), Waiting)
        waiters.append((place, heard))
    return holder, waiters


async def _make(
    one_node: EtcdCluster, make_direct: MakeDirect, prefix: str, n: int
) -> list[Direct]:
    return [await make_direct(one_node, prefix=prefix) for _ in range(n)]


@pytest.mark.parametrize("named", [False, True])
async def test_release_is_told_to_the_new_holder_and_the_next_one(
    one_node: EtcdCluster, make_direct: MakeDirect, counts: Counter[int], named: bool
) -> None:
    """``named``: each with an ``owner=`` of its own."""
    clients = await _make(one_node, make_direct, f"herd {named}", 16)
    holder, waiters = await _queue(clients, ["exclusive"] * 15, named=named)
    await asyncio.sleep(0.2)
    counts.clear()
    order = [holder, *(place for place, _ in waiters)]
    for place, (_, heard) in zip(order, waiters, strict=False):
        await place.leave(ENDED)
        await heard.until("granted")
    # Each release is told to the new holder and the next one, and to the client that released. Told to all,
    # they would be 8 for each release.
    assert counts.total() <= 15 * 5
    assert max(counts.values()) <= 6
    await waiters[-1][0].leave(ENDED)


async def test_three_clients_follow_the_name_and_read_nothing_between_their_turns(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await _make(one_node, make_direct, "few", 3)
    holder, waiters = await _queue([*clients, *clients, *clients], ["exclusive"] * 8)
    read: list[Direct] = []
    for client in clients:
        _note_reads(client, monkeypatch, read)
    before = holder
    for place, heard in waiters:
        await before.leave(ENDED)
        await heard.until("granted")
        before = place
    await before.leave(ENDED)
    assert read == []


def _note_reads(client: Direct, monkeypatch: pytest.MonkeyPatch, read: list[Direct]) -> None:
    call = client.store.cluster.link.call

    async def noted(method: Any, request: Any, within: float = 2.0) -> Any:
        if method is api.RANGE and request is not client.store.cluster.link._probe:
            read.append(client)
        return await call(method, request, within)

    monkeypatch.setattr(client.store.cluster.link, "call", noted)


async def test_waiters_far_behind_are_granted_whoever_gives_up_in_front(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    clients = await _make(one_node, make_direct, "gone", 7)
    holder, waiters = await _queue(clients, ["exclusive"] * 6)
    for number in (3, 1, 0):  # the signal, one before it, and the next one
        await waiters[number][0].leave(ENDED)
    await holder.leave(ENDED)
    for number in (2, 4, 5):
        place, heard = waiters[number]
        await heard.until("granted")
        await place.leave(ENDED)


async def test_readers_behind_a_writer_are_granted_together(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    clients = await _make(one_node, make_direct, "readers", 9)
    modes = ["shared", "shared", "exclusive", *["shared"] * 4, "exclusive"]
    holder, waiters = await _queue(clients, modes)
    await holder.leave(ENDED)
    for number in (0, 1):
        await waiters[number][1].until("granted")
    for number in (1, 0):
        await waiters[number][0].leave(ENDED)
    await waiters[2][1].until("granted")
    await waiters[2][0].leave(ENDED)
    for number in (3, 4, 5, 6):
        await waiters[number][1].until("granted")
    assert waiters[7][1].words == []
    for number in (6, 3, 5, 4):
        await waiters[number][0].leave(ENDED)
    await waiters[7][1].until("granted")
    await waiters[7][0].leave(ENDED)


async def test_waiter_far_behind_whose_key_is_gone_is_told(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    clients = await _make(one_node, make_direct, "far", 6)
    holder, waiters = await _queue(clients, ["exclusive"] * 5)
    place, heard = waiters[-1]
    deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(place.key))
    await clients[0].store.cluster._batches.transact(b"x", m.TxnRequest(success=[deletion]))
    await heard.until("gone: gone", 5.0)
    for one, _ in waiters:
        await one.leave(ENDED)
    await holder.leave(ENDED)


async def test_request_whose_turn_becomes_far_while_it_comes_is_told_that_it_waits(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    """The change that makes it far is heard after the answer, and before its own one."""
    clients = await _make(one_node, make_direct, "herd far", 5)
    holder, waiters = await _queue(clients[:3], ["exclusive"] * 2)
    room = clients[2].store.cluster.rooms.find(holder.keys)
    assert room is not None
    assert room.queue is not None
    assert not room._following._far
    told = asyncio.create_task(room.reached(room.queue.revision + 2))
    for client in clients[3:]:
        place, heard = client.place(ttl=20.0, waiter_ttl=20.0)
        assert isinstance(await place.acquire(wait=True), Waiting)
        waiters.append((place, heard))
    async with bounded(5.0):
        await told
    assert room._following._far
    for place in (*(place for place, _ in reversed(waiters)), holder):
        await place.leave(ENDED)


async def test_request_that_comes_while_the_name_is_read_is_told_that_it_waits(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read may be older than its key. (Another one that reads the name, too, is on its way.)"""
    clients = await _make(one_node, make_direct, "herd read", 6)
    holder, waiters = await _queue(clients, ["exclusive"] * 5)
    store = clients[-1].store
    room = store.cluster.rooms.find(holder.keys)
    assert room is not None
    assert room._following._far
    read, transact = room._read, store.cluster.transact
    was_read, go, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    second, _ = clients[-1].place(ttl=20.0, waiter_ttl=20.0)
    third, _ = clients[-1].place(ttl=20.0, waiter_ttl=20.0)

    async def slow_read(keys: Any) -> Any:
        queue = await read(keys)
        was_read.set()
        await go.wait()
        return queue

    async def slow_second(keys: Any, request: m.TxnRequest, **options: Any) -> m.TxnResponse:
        if not let_go.is_set() and second.stage is ASKING and third.stage is NEW:
            await let_go.wait()
        return await transact(keys, request, **options)

    monkeypatch.setattr(room, "_read", slow_read)
    monkeypatch.setattr(store.cluster.rooms, "_read", slow_read)
    monkeypatch.setattr(store.cluster, "transact", slow_second)
    await waiters[2][0].leave(ENDED)  # the signal
    await was_read.wait()
    asking = asyncio.create_task(second.acquire(wait=True))
    await asyncio.sleep(0.05)
    asked = asyncio.create_task(third.acquire(wait=True))
    await asyncio.sleep(0.1)
    go.set()
    try:
        async with bounded(5.0):
            assert isinstance(await asked, Waiting)
    finally:
        let_go.set()
    assert isinstance(await asking, Waiting)
    for place in (third, second, *(place for place, _ in reversed(waiters)), holder):
        await place.leave(ENDED)


@pytest.mark.parametrize("seed", range(3))
async def test_many_clients_take_turns_whatever_happens(
    one_node: EtcdCluster, make_direct: MakeDirect, seed: int
) -> None:
    chance = random.Random(seed)
    clients = await _make(one_node, make_direct, f"random{seed}", 8)
    inside: list[str] = []

    async def work(client: Direct) -> None:
        for _ in range(6):
            mode: Any = chance.choice(["exclusive", "exclusive", "shared"])
            owner = chance.choice([None, None, None, "ann"]) if mode == "exclusive" else None
            place, heard = client.place(mode=mode, owner=owner, ttl=20.0, waiter_ttl=20.0)
            if isinstance(await place.acquire(wait=True), Waiting):
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.uniform(0, 0.02))
                    await place.leave(ENDED)
                    continue
                await heard.until("granted", 30.0)
            who = owner or f"{mode} {place.id}"
            others = [one for one in inside if one != who]
            assert not others or (mode == "shared" and all("shared" in one for one in others))
            inside.append(who)
            await asyncio.sleep(chance.uniform(0, 0.01))
            inside.remove(who)
            await place.leave(ENDED)

    async with asyncio.timeout(60.0):
        await asyncio.gather(*(work(client) for client in clients for _ in range(2)))


async def test_thousands_of_readers_of_one_client_are_let_in_without_a_stop() -> None:
    keys = Keys.of("p", "lock", "name")
    kvs = [
        m.KeyValue(
            keys.request(f"me-{number}"),
            number,
            number,
            value=json.dumps({"mode": "shared", "owner": f"tme-{number}", "client": "me"}).encode(),
        )
        for number in range(1, 10_001)
    ]
    told: list[str] = []

    class Reader:
        def __init__(self, id: str) -> None:
            self.id = id
            self.owner = f"t{id}"

        def on_turn(self, turn: Turn) -> None:
            assert turn.what == "holds"
            told.append(self.id)

        def on_vanished(self) -> None:
            """All of them are there."""

        def on_recorded(self, result: bytes) -> None:
            """Nothing is on record."""

    room = Room(keys, "me", Watches(None), None, None)  # type: ignore[arg-type]
    for number in range(1, 10_001):
        room.add(Reader(f"me-{number}"))
    queue = Queue(keys, 10_000, kvs)
    began = now()
    room.begin(queue)
    assert now() - began < 1.5
    assert told == list(queue.requests)
