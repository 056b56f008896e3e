"""once on etcd: the success is a key on a lease of its own, written as the holder's key is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._model import ENDED, RAN_OUT, End, Gone, Granted, Refused, Waiting
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.recipe import read_success, value_of_success
from aiodlock.backends.stage import OVER

from ..scenes import bounded
from .conftest import Direct, Heard
from .servers import EtcdCluster
from .test_cuts import _cuts, _endpoints
from .test_faults import Faulty, _acquire

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]

RECORD = End(record=(b"sdone", 30.0))


def _once(direct: Direct, **terms: Any) -> tuple[EtcdPlace, Heard]:
    return direct.place(kind="once", ttl=20.0, waiter_ttl=20.0, **terms)


async def _keys(direct: Direct) -> list[m.KeyValue]:
    """Return what there is of the name, but no markers."""
    keys = direct.store.cluster.keys("once", "name")
    answer = await direct.store.cluster.link.call(api.RANGE, m.RangeRequest(keys.base, keys.end))
    return [kv for kv in answer.kvs if b"/x/" not in kv.key]


async def _recorded(direct: Direct) -> bytes | None:
    """Return the result on record; None if nothing is there. Whatever else is there is wrong."""
    there = await _keys(direct)
    assert [kv.key[-2:] for kv in there] in ([], [b"/r"]), there
    return read_success(there[0]).result if there else None


async def _lives(direct: Direct, lease: int) -> bool:
    request = m.LeaseTimeToLiveRequest(lease)
    return (await direct.store.cluster.link.call(api.LEASE_TIME_TO_LIVE, request)).ttl >= 0


async def _until_ended(direct: Direct, *leases: int) -> None:
    async with bounded(10.0):
        for lease in leases:
            while await _lives(direct, lease):
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("result", [b"n", "s\0\n\u20ac\U0001f512".encode(), b"b\xff\x00", b"b{}"])
def test_result_is_read_as_it_was_written(result: bytes) -> None:
    kv = m.KeyValue(b"r", 1, 1, 1, value_of_success("me-1", result), 7)
    success = read_success(kv)
    assert (success.request, success.result, success.lease) == ("me-1", result, 7)
    with pytest.raises(ValueError, match="not a record"):
        read_success(m.KeyValue(b"r", 1, 1, 1, b"[1]", 7))


async def test_recording_whose_answer_is_lost_is_answered_from_the_record(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, heard = _once(direct)
    await _acquire(place, heard)
    faulty.lose = 2
    for _ in range(2):
        with pytest.raises(Unanswered):
            await place.leave(RECORD)
    first, *others = place.ending._record_leases
    assert all(lease.seconds >= 30.0 for lease in place.ending._record_leases)
    assert (await place.leave(RECORD)).what == "recorded"
    assert await _recorded(direct) == b"sdone"
    # The record ends with the first attempt's lease. Those of the others are given back.
    await _until_ended(direct, *(lease.id for lease in others))
    assert await _lives(direct, first.id)
    assert await direct.store.forget("name")
    await _until_ended(direct, first.id)


async def test_recording_that_arrives_after_a_later_leave_records_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    place, heard = _once(direct)
    await _acquire(place, heard)
    late: list[m.TxnRequest] = []
    call = direct.store.cluster.link.call

    async def lost(method: Any, request: Any, within: float = 2.0) -> Any:
        if method is api.TXN:
            late.append(request)
            raise Unanswered("the message is on its way")
        return await call(method, request, within)

    with monkeypatch.context() as patch:
        patch.setattr(direct.store.cluster.link, "call", lost)
        with pytest.raises(Unanswered):
            await place.leave(RECORD)
    (lease,) = place.ending._record_leases
    assert (await place.leave(RAN_OUT)).what == "released"
    await call(api.TXN, late[0])
    assert await _recorded(direct) is None
    await _until_ended(direct, lease.id)
    next_one, _ = _once(direct)
    assert isinstance(await next_one.acquire(wait=False), Granted)
    await next_one.leave(ENDED)


async def test_late_duplicate_of_a_recording_does_not_undo_a_forget(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, heard = _once(direct)
    await _acquire(place, heard)
    assert (await place.leave(RECORD)).what == "recorded"
    late = faulty.requests[-1]
    assert await direct.store.forget("name")
    await direct.store.cluster.link.call(api.TXN, late)
    assert await _recorded(direct) is None
    assert not await direct.store.forget("name")


async def test_holder_whose_key_is_gone_records_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    for broken in (False, True):
        place, heard = _once(direct)
        await _acquire(place, heard)
        if broken:
            assert await direct.store.break_lock("name", kind="once") == 1
        else:
            deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(place.key))
            await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
        left = await place.leave(RECORD)
        assert (left.what, left.reason) == ("gone", "broken" if broken else "gone")
        assert await _recorded(direct) is None


@pytest.mark.parametrize("wait", [True, False])
async def test_acquire_that_arrives_after_the_record_makes_no_ghost(
    one_node: EtcdCluster,
    make_direct: MakeDirect,
    monkeypatch: pytest.MonkeyPatch,
    wait: bool,
) -> None:
    direct = await make_direct(one_node)
    holder, heard = _once(direct)
    await _acquire(holder, heard)
    faulty = Faulty(direct, monkeypatch)
    waiter, _ = _once(direct)
    faulty.lose = 1
    with pytest.raises(Unanswered):
        await waiter.acquire(wait=wait)
    late = faulty.requests[-1]
    assert (await holder.leave(RECORD)).what == "recorded"
    await direct.store.cluster.link.call(api.TXN, late)  # while the record is there: by the record
    answer = await waiter.acquire(wait=wait)
    assert answer == Refused("recorded", unsure=True, result=b"sdone")
    await waiter.leave(ENDED)
    await direct.store.forget("name")
    await direct.store.cluster.link.call(api.TXN, late)  # later: by the marker
    assert await _recorded(direct) is None


async def test_success_is_told_with_one_message_per_client_and_nobody_leaves(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's client follows the name. To the others their turn is far: they read it once more."""
    clients = [await make_direct(one_node, prefix="told") for _ in range(4)]
    holder, heard = _once(clients[0])
    await _acquire(holder, heard)
    waiters = [_once(client) for client in clients for _ in range(3)]
    for place, _ in waiters:
        assert isinstance(await place.acquire(wait=True), Waiting)
    calls: list[str] = []
    for client in clients:
        _note(client, monkeypatch, calls)
    assert (await holder.leave(RECORD)).what == "recorded"
    for place, one in waiters:
        await one.until("recorded")
        assert one.words == ["recorded"]
        assert (place.stage, place.own.lease) == (OVER, None)
    assert calls.count(api.TXN.path) == 1  # the recording
    assert calls.count(api.RANGE.path) <= 3
    assert await _recorded(clients[0]) == b"sdone"
    for client in clients:
        assert not client.store.requests


def _note(client: Direct, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    call = client.store.cluster.link.call

    async def noted(method: Any, request: Any, within: float = 2.0) -> Any:
        if request is not client.store.cluster.link._probe:
            calls.append(method.path)
        return await call(method, request, within)

    monkeypatch.setattr(client.store.cluster.link, "call", noted)


async def test_success_while_another_attempt_is_on_its_way_is_its_answer(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    """Requests that come at the moment of the record: each is told, and none is left behind."""
    direct, other = [await make_direct(one_node, prefix="race") for _ in range(2)]
    for _ in range(15):
        holder, heard = _once(direct)
        await _acquire(holder, heard)
        waiters = [_once(one) for one in (direct, other) for _ in range(4)]
        asked = [asyncio.create_task(place.acquire(wait=True)) for place, _ in waiters]
        await asyncio.sleep(0)
        assert (await holder.leave(RECORD)).what == "recorded"
        for task, (place, one) in zip(asked, waiters, strict=True):
            answer = await task
            if isinstance(answer, Waiting):
                await one.until("recorded")
            elif isinstance(answer, Gone):
                await place.leave(ENDED)  # the core asks anew
            else:
                assert answer == Refused("recorded", result=b"sdone")
        assert await _recorded(direct) == b"sdone"
        await direct.store.forget("name")


@pytest.mark.parametrize("compacted", [False, True])
async def test_success_that_is_recorded_during_a_cut_is_told_after_it(
    one_node: EtcdCluster, make_direct: MakeDirect, compacted: bool
) -> None:
    async with _cuts(one_node) as cuts:
        prefix = f"missed{compacted}"
        direct = await make_direct(one_node, _endpoints(cuts), prefix=prefix)
        other = await make_direct(one_node, prefix=prefix)
        holder, heard = _once(other)
        await _acquire(holder, heard)
        waiters = [_once(direct) for _ in range(3)]
        for place, _ in waiters:
            assert isinstance(await place.acquire(wait=True), Waiting)
        (cut,) = cuts.values()
        cut.cut()
        assert (await holder.leave(RECORD)).what == "recorded"
        if compacted:
            again, _ = other.place("another")
            await again.acquire(wait=True)
            revision = again.token
            await again.leave(ENDED)
            await asyncio.to_thread(one_node.call, "kv/compaction", revision=str(revision))
        cut.drop()
        cut.heal()
        for _, one in waiters:
            await one.until("recorded", 20.0)
        assert await _recorded(other) == b"sdone"


async def test_record_is_kept_for_as_long_as_asked_and_the_next_one_is_first(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = _once(direct)
    await _acquire(place, heard)
    assert (await place.leave(End(record=(b"n", 1.0)))).what == "recorded"
    recorded = now()
    while isinstance(await (asked := _once(direct)[0]).acquire(wait=False), Refused):
        await asyncio.sleep(0.02)
    assert now() - recorded >= 1.0
    await asked.leave(ENDED)
    assert await _keys(direct) == []
