"""Requests that got in beside another one of their owner stay there, whatever happens to their keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock._model import ENDED, RAN_OUT, Granted, Waiting
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.recipe import Keys, Queue

from .conftest import Direct
from .servers import EtcdCluster
from .test_faults import _acquire
from .test_terms import _outdate

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


async def test_request_that_joined_in_a_lost_answer_stays_beside_its_owner_when_it_is_moved(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader changes while it joins, and its watch tells it that it has while its key is moved."""
    far, direct = [await make_direct(one_node, prefix="joins moved") for _ in range(2)]
    first, first_heard = far.place(ttl=20.0)
    owner, owner_heard = far.place(ttl=20.0, owner="ann")
    other, other_heard = far.place(ttl=20.0)
    mate, mate_heard = direct.place(ttl=20.0, waiter_ttl=15.0, owner="ann")
    await _acquire(first, first_heard)
    for place in (owner, other, mate):
        assert isinstance(await place.acquire(wait=True), Waiting)
    room = direct.store.cluster.rooms.find(mate.keys)
    assert room is not None
    watch = room._following._near
    assert watch is not None
    call, heard = direct.store.cluster.link.call, watch.heard
    sent = 0
    events: list[Any] = []

    async def lossy(method: Any, request: Any, within: float = 2.0) -> Any:
        nonlocal sent
        sent += method is api.TXN
        if method is api.TXN and sent == 1:  # it joins
            monkeypatch.setattr(watch, "heard", lambda *told: events.append(told))
            await call(method, request, within)
            for seconds in (15.0, 20.0):
                await _outdate(direct, seconds)
            raise Unanswered("the answer was lost")
        if method is api.TXN and sent == 3:  # it is moved, for the second time
            for told in events:
                heard(*told)
            monkeypatch.setattr(watch, "heard", heard)
        return await call(method, request, within)

    monkeypatch.setattr(direct.store.cluster.link, "call", lossy)
    monkeypatch.setattr("aiodlock.backends.etcd.request.PAUSE", 3.0)  # it asks again only then
    await first.leave(ENDED)
    await owner_heard.until("granted")
    await mate_heard.until("granted")
    assert sent >= 3
    assert mate.token == owner.token
    await asyncio.sleep(0.3)
    assert list((await direct.store.cluster.read(mate.keys)).joined) == [mate.id]
    await owner.leave(ENDED)
    await asyncio.sleep(0.2)
    assert other_heard.words == []
    await mate.leave(ENDED)
    await other_heard.until("granted")
    await other.leave(ENDED)


def test_request_that_stands_no_more_beside_its_owner_is_in_the_queue_once() -> None:
    keys = Keys.of("p", "lock", "name")

    def key(id: str, created: int, written: int, order: int) -> m.KeyValue:
        value = {"mode": "exclusive", "owner": f"u{id[0]}", "client": "c", "order": order}
        return m.KeyValue(
            keys.request(id), created, written, value=json.dumps(value).encode(), lease=1
        )

    queue = Queue(keys, 1, [key("a1", 1, 1, 1), key("b", 2, 2, 2), key("a2", 3, 4, 1)])
    assert list(queue.joined) == ["a2"]
    queue.put(key("c", 5, 5, 5))
    queue.put(key("a2", 3, 6, 3))
    assert not queue.joined
    assert list(queue.requests) == ["a1", "b", "a2", "c"]
    for id in ("a1", "a2"):
        queue.delete(keys.request(id))
    assert [record.id for record in queue.holders()] == ["b"]


@pytest.mark.parametrize("clients", [1, 2])
async def test_readers_of_one_owner_that_are_let_in_together_have_the_first_ones_token(
    one_node: EtcdCluster, make_direct: MakeDirect, clients: int
) -> None:
    direct, *more = [await make_direct(one_node, prefix=f"mates {clients}") for _ in range(clients)]
    writer, heard = direct.place()
    await _acquire(writer, heard)
    readers = [one.place(mode="shared", owner="ann") for one in (direct, direct, *more)]
    for place, _ in readers:
        assert isinstance(await place.acquire(wait=True), Waiting)
    await writer.leave(ENDED)
    for place, heard in readers:
        await heard.until("granted")
        assert place.token == readers[0][0].own.created
    for place, _ in readers:
        await place.leave(ENDED)


async def test_request_that_joined_in_a_lost_answer_has_its_lock_delay(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    first, heard = direct.place(ttl=20.0, waiter_ttl=20.0, owner="ann")
    await _acquire(first, heard)
    mate, _ = direct.place(ttl=20.0, waiter_ttl=20.0, owner="ann", lock_delay=5.0)
    transact = direct.store.cluster.transact

    async def lossy(keys: Keys, request: m.TxnRequest, **options: Any) -> m.TxnResponse:
        answer = await transact(keys, request, **options)
        if mate.own.written:  # it joins
            raise Unanswered("the answer was lost")
        return answer

    monkeypatch.setattr(direct.store.cluster, "transact", lossy)
    with pytest.raises(Unanswered):
        await mate.acquire(wait=True)
    monkeypatch.setattr(direct.store.cluster, "transact", transact)
    assert isinstance(await mate.acquire(wait=True), Granted)
    assert mate.token == first.token
    await mate.leave(RAN_OUT)
    assert len((await direct.store.cluster.read(mate.keys)).closed()) == 1
    await first.leave(ENDED)
