"""hold_at_least on etcd: a key of its own, on a lease that nobody renews."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._model import ENDED, RAN_OUT, UNUSED, Granted, Terms, Waiting
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.recipe import Keys, Queue, value_of

from ..scenes import bounded
from .conftest import Direct, Heard
from .servers import EtcdCluster
from .test_faults import Faulty, _acquire, _left

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


def _holding(
    direct: Direct, hold: float = 30.0, *, begins: bool = True, **terms: Any
) -> tuple[EtcdPlace, Heard]:
    place, heard = direct.place(ttl=20.0, waiter_ttl=20.0, **terms)
    place.terms = replace(place.terms, hold_at_least=hold, begins=begins)
    return place, heard


async def _closed(direct: Direct) -> int:
    return (await direct.store.inspect("lock", "name")).closed_places


async def test_body_that_lasts_longer_leaves_the_name_open(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = _holding(direct, 0.5)  # a second
    await _acquire(place, heard)
    async with bounded(10.0):
        while len(await _left(direct)) > 1:
            await asyncio.sleep(0.02)
    await place.leave(ENDED)
    assert await _closed(direct) == 0
    other, _ = direct.place()
    assert isinstance(await other.acquire(wait=False), Granted)
    await other.leave(ENDED)


async def test_waiter_is_let_in_when_the_hold_is_over(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = _holding(direct, 1.0)
    await _acquire(place, heard)
    granted = now()
    waiter, waiter_heard = direct.place()
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await place.leave(ENDED)
    await waiter_heard.until("granted")
    assert now() - granted >= 1.0
    await waiter.leave(ENDED)
    assert await _left(direct) == []


@pytest.mark.parametrize("waits", [False, True])
async def test_hold_whose_answer_is_lost_is_written_once(
    one_node: EtcdCluster,
    make_direct: MakeDirect,
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    first, first_heard = direct.place()
    place, heard = _holding(direct)
    if waits:
        await _acquire(first, first_heard)
        assert isinstance(await place.acquire(wait=True), Waiting)
        faulty.writing, faulty.lose = place.keys.hold(place.id), 1
        await first.leave(ENDED)
        await heard.until("granted")
    else:
        faulty.lose = 0
        place.terms, terms = replace(place.terms, begins=False), place.terms
        assert isinstance(await place.acquire(wait=True), Granted)
        place.terms = terms
        faulty.lose = 1
        with pytest.raises(Unanswered):
            await place.acquire(wait=True)  # told as held, but not before this is answered
        assert isinstance(await place.acquire(wait=True), Granted)
    late = next(request for request in faulty.requests if b"/h/" in request.encode())
    assert len(await _left(direct)) == 2
    await place.leave(ENDED)
    assert await _closed(direct) == 1
    await direct.store.break_lock("name")
    await direct.store.cluster.link.call(api.TXN, late)
    assert await _left(direct) == []
    await first.leave(ENDED)


async def test_body_that_never_began_leaves_the_name_open_also_when_its_key_is_gone(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    for gone in (False, True):
        place, heard = _holding(direct)
        await _acquire(place, heard)
        if gone:
            deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(place.key))
            await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
        await place.leave(UNUSED)
        assert await _left(direct) == []


async def test_grant_closes_nothing_until_the_body_begins(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = _holding(direct, begins=False)
    await _acquire(place, heard)
    assert len(await _left(direct)) == 1
    await place.begin()
    await place.begin()
    assert len(await _left(direct)) == 2
    await place.leave(RAN_OUT)
    assert await _closed(direct) == 1
    await direct.store.break_lock("name")


def test_holder_that_is_gone_with_a_lock_delay_and_a_hold_takes_one_place() -> None:
    keys = Keys.of("p", "semaphore", "name")
    terms = Terms("semaphore", "name", "exclusive", 2, 5.0, 5.0, 1.0, 0.0, None, True)
    value = value_of(terms, "tme", "me", "", 1)
    queue = Queue(keys)
    for key, lease in ((keys.delay("one"), 7), (keys.hold("one"), 8)):
        queue.put(m.KeyValue(key, 2, 2, 1, value, lease))
    queue.put(m.KeyValue(keys.request("two"), 3, 3, 1, value_of(terms, "to", "o", "", None), 9))
    assert [record.id for record in queue.holders()] == ["two"]
    assert queue.closing() == {7, 8}
    queue.delete(keys.delay("one"))
    assert len(queue.closed()) == 1
    queue.delete(keys.hold("one"))
    assert queue.closed() == []


async def test_hold_counts_from_when_the_body_is_told_however_slow_the_store_is(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    ask = direct.store.cluster.link._ask

    async def slow(*args: Any) -> Any:
        answer = await ask(*args)
        await asyncio.sleep(0.7)
        return answer

    place, heard = _holding(direct, 2.0)
    async with bounded(20.0):
        await _acquire(direct.place()[0], heard)  # its leases are there
        monkeypatch.setattr(direct.store.cluster.link, "_ask", slow)
        await direct.store.break_lock("name")
        assert isinstance(await place.acquire(wait=True), Granted)
    granted = now()
    monkeypatch.setattr(direct.store.cluster.link, "_ask", ask)
    await place.leave(ENDED)
    assert await _closed(direct) == 1
    waiter, waiter_heard = direct.place()
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await waiter_heard.until("granted", 20.0)
    assert now() - granted >= 2.0
    await waiter.leave(ENDED)


async def test_leases_that_nobody_uses_are_revoked(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be kept by the cluster for an hour."""
    monkeypatch.setattr("aiodlock.backends.etcd.leases._IDLE", 0.3)
    direct = await make_direct(one_node)

    def there() -> set[str]:
        return {one["ID"] for one in one_node.call("lease/leases").get("leases", [])}

    before = there()
    place, heard = direct.place(ttl=3600.0)
    await _acquire(place, heard)
    await place.leave(ENDED)
    unused, heard = _holding(direct, 3600.0)
    await _acquire(unused, heard)
    await unused.leave(UNUSED)
    lost = asyncio.create_task(direct.store.cluster.leases.make(3600.0))
    await asyncio.sleep(0)
    lost.cancel()  # its answer is heard by nobody
    await asyncio.wait([lost])
    closing, heard = _holding(direct, 3600.0)
    await _acquire(closing, heard)
    await closing.leave(ENDED)
    assert await _closed(direct) == 1
    async with bounded(20.0):
        while len(await asyncio.to_thread(there) - before) > 1:
            await asyncio.sleep(0.1)
    assert await _closed(direct) == 1
    await direct.store.break_lock("name")
    async with bounded(20.0):
        while any(
            int(one_node.call("lease/timetolive", ID=id).get("TTL", -1)) > 100
            for id in await asyncio.to_thread(there) - before
        ):
            await asyncio.sleep(0.1)
