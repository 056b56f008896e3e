"""What goes wrong between a client and etcd: on one member, and on three."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._errors import BackendError, BackendUnavailable
from aiodlock._model import ENDED, RAN_OUT, Granted, Left, Waiting
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.link import Access, Link
from aiodlock.backends.etcd.place import EtcdPlace
from aiodlock.backends.etcd.recipe import Keys
from aiodlock.backends.etcd.refusals import NoSpace
from aiodlock.backends.etcd.watching import Watches
from aiodlock.backends.stage import OVER

from ..scenes import bounded, takes, until
from .conftest import Direct, Heard
from .servers import EtcdCluster, EtcdNode

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


async def _acquire(place: EtcdPlace, heard: Heard, within: float = 20.0) -> None:
    """Acquire as the core does: again after what had no answer, then wait."""
    async with asyncio.timeout(within):
        while True:
            try:
                answer = await place.acquire(wait=True)
                break
            except BackendUnavailable:
                await asyncio.sleep(0.05)
        if isinstance(answer, Waiting):
            await heard.until("granted", within)
        else:
            assert isinstance(answer, Granted), answer


async def _leave(place: EtcdPlace, within: float = 20.0) -> Left:
    async with asyncio.timeout(within):
        while True:
            try:
                return await place.leave(ENDED, within=1.0)
            except BackendUnavailable:
                await asyncio.sleep(0.05)


async def _left(direct: Direct, name: str = "name") -> list[bytes]:
    """Return the keys of a name that are no markers."""
    keys = direct.store.cluster.keys("lock", name)
    answer = await direct.store.cluster.link.call(api.RANGE, m.RangeRequest(keys.base, keys.end))
    return [kv.key for kv in answer.kvs if b"/x/" not in kv.key]


async def _is_empty(direct: Direct) -> bool:
    return not await _left(direct)


# -- lost answers ----------------------------------------------------------------------------------


class Faulty:
    """Loses answers of transactions. Mutable state: ``lose`` (so many of the next ones); ``writing`` (only
    of those that write this key)."""

    def __init__(self, direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lose = 0
        self.writing: bytes | None = None
        self.requests: list[m.TxnRequest] = []
        call = direct.store.cluster.link.call

        async def lossy(method: Any, request: Any, within: float = 2.0) -> Any:
            answer = await call(method, request, within)
            if method is api.TXN:
                self.requests.append(request)
                inner = [step.request_txn for step in request.success if step.request_txn]
                steps = [step for one in (request, *inner) for step in one.success]
                written = {step.request_put.key for step in steps if step.request_put}
                if self.lose and (self.writing is None or self.writing in written):
                    self.lose -= 1
                    raise Unanswered("the answer was lost")
            return answer

        monkeypatch.setattr(direct.store.cluster.link, "call", lossy)


@pytest.mark.parametrize("wait", [True, False])
async def test_acquire_whose_answer_is_lost_is_repeated_with_the_same_token(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, _ = direct.place()
    faulty.lose = 1
    with pytest.raises(Unanswered):
        await place.acquire(wait=wait)
    assert len(await _left(direct)) == 1
    answer = await place.acquire(wait=wait)
    assert isinstance(answer, Granted)
    assert len(await _left(direct)) == 1
    assert (await place.leave(ENDED)).what == "released"
    assert await _left(direct) == []


async def test_late_duplicate_of_an_acquire_is_refused_after_the_leave(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, _ = direct.place()
    faulty.lose = 1
    with pytest.raises(Unanswered):
        await place.acquire(wait=True)
    late = faulty.requests[-1]
    await place.leave(ENDED)
    assert await _left(direct) == []
    await direct.store.cluster.link.call(api.TXN, late)
    assert await _left(direct) == []


async def test_late_duplicate_of_an_acquire_is_refused_in_the_lock_delay_of_its_lost_lease(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, heard = direct.place(lock_delay=1.0)
    faulty.lose = 1
    await _acquire(place, heard)
    late = faulty.requests[0]
    await place.leave(RAN_OUT)
    closed = [place.keys.delay(place.id)]
    assert await _left(direct) == closed
    await direct.store.cluster.link.call(api.TXN, late)
    assert await _left(direct) == closed


async def test_leave_whose_answer_is_lost_is_released_when_repeated(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    place, heard = direct.place()
    other, other_heard = direct.place()
    await _acquire(place, heard)
    assert isinstance(await other.acquire(wait=True), Waiting)
    faulty.lose = 1
    with pytest.raises(Unanswered):
        await place.leave(ENDED)
    assert await place.leave(ENDED) == Left("released")
    await other_heard.until("granted")
    await other.leave(ENDED)
    assert await _left(direct) == []


async def test_join_whose_answer_is_lost_is_repeated(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    faulty = Faulty(direct, monkeypatch)
    first, heard = direct.place(owner="ann")
    other, _ = direct.place()
    await _acquire(first, heard)
    assert isinstance(await other.acquire(wait=True), Waiting)
    for lost in (1, 2):
        mate, mate_heard = direct.place(owner="ann")
        faulty.lose = lost
        await _acquire(mate, mate_heard)
        assert mate.token == first.token
        await mate.leave(ENDED)
    await first.leave(ENDED)
    await _leave(other)


@pytest.mark.parametrize("then", ["granted", "gone: gone"])
async def test_request_whose_owner_leaves_while_it_joins_is_told(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """What comes while it asks is told to nobody: it holds, or its key is gone."""
    far = await make_direct(one_node, prefix=f"joins-{len(then)}")
    direct = await make_direct(one_node, prefix=f"joins-{len(then)}")
    first, heard = far.place(owner="ann")
    await _acquire(first, heard)
    mate, mate_heard = direct.place(owner="ann")
    transact = direct.store.cluster.transact
    joins, go = asyncio.Event(), asyncio.Event()

    async def late(keys: Any, request: m.TxnRequest, **options: Any) -> m.TxnResponse:
        if mate.own.written:
            joins.set()
            await go.wait()
        return await transact(keys, request, **options)

    monkeypatch.setattr(direct.store.cluster, "transact", late)
    asked = asyncio.create_task(mate.acquire(wait=True))
    await joins.wait()
    await first.leave(ENDED)
    if then != "granted":
        deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(mate.key))
        await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
    room = direct.store.cluster.rooms.find(mate.keys)
    assert room is not None
    async with bounded(5.0):
        while room.queue is None or len(room.queue.requests) != (then == "granted"):
            await asyncio.sleep(0.005)
    go.set()
    assert isinstance(await asked, Waiting)
    await mate_heard.until(then)
    await mate.leave(ENDED)


async def test_waiter_that_leaves_while_it_joins_its_owner_keeps_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the leave overtakes the other one. (The watch may have told the grant before.)"""
    far, direct = [await make_direct(one_node, prefix="joins late") for _ in range(2)]
    first, first_heard = far.place()
    owner, owner_heard = far.place(owner="ann")
    mate, mate_heard = direct.place(owner="ann", ttl=20.0)
    await _acquire(first, first_heard)
    for place in (owner, mate):
        assert isinstance(await place.acquire(wait=True), Waiting)
    transact = direct.store.cluster.transact
    joined, go = asyncio.Event(), asyncio.Event()

    async def late(keys: Any, request: m.TxnRequest, **options: Any) -> m.TxnResponse:
        answer = await transact(keys, request, **options)
        if any(step.request_put is not None for step in request.success):
            joined.set()
            await go.wait()
        return answer

    monkeypatch.setattr(direct.store.cluster, "transact", late)
    await first.leave(ENDED)
    await owner_heard.until("granted")
    await joined.wait()
    lease = direct.store.cluster.leases._by_length.get(20)
    assert lease is not None
    monkeypatch.setattr(direct.store.cluster, "transact", transact)
    await mate.leave(ENDED)
    go.set()
    await asyncio.sleep(0.3)  # what came late would have joined by now
    await until(lambda: not lease.users)
    assert mate.stage is OVER
    assert mate_heard.words in ([], ["granted"])
    await owner.leave(ENDED)


async def test_waiter_that_leaves_when_its_turn_comes_while_its_key_is_moved_stays_away(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    first, heard = direct.place()
    await _acquire(first, heard)
    waiter, waiter_heard = direct.place()
    waiter.terms = replace(waiter.terms, lock_delay=1.0)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    async with waiter.own.alone:
        await first.leave(ENDED)
        await asyncio.sleep(0.1)  # it waits to write what its grant needs
        await waiter.leave(ENDED)
    await asyncio.sleep(0.1)
    assert direct.store.cluster.is_up
    assert waiter.stage is OVER
    assert waiter_heard.words == []
    await until(lambda: _is_empty(direct))


async def test_cancelled_acquire_leaves_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    for pause in range(12):
        place, _ = direct.place()
        task = asyncio.create_task(place.acquire(wait=True))
        await asyncio.sleep(pause * 0.0003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await place.leave(ENDED)
    await asyncio.sleep(0.1)  # what came late would be there by now
    await until(lambda: _is_empty(direct))


# -- leases that end ---------------------------------------------------------------------------------


async def _revoke(direct: Direct, place: EtcdPlace) -> None:
    assert place.own.lease is not None
    await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(place.own.lease.id))


async def test_waiter_whose_lease_ended_is_told_while_its_predecessor_holds(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=30.0, waiter_ttl=30.0)
    waiter, waiter_heard = direct.place(ttl=2.0)
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await _revoke(direct, waiter)
    async with bounded(5.0):
        while not waiter_heard.words:
            await asyncio.sleep(0.01)
    assert waiter_heard.words[0].startswith("gone")
    await waiter.leave(ENDED)
    await holder.leave(ENDED)


async def test_holder_whose_lease_ended_is_told_and_another_lease_is_made(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=2.0)
    await _acquire(place, heard)
    await _revoke(direct, place)
    await heard.until("gone: expired")
    assert await place.leave(ENDED) == Left("gone", "expired")
    again, again_heard = direct.place(ttl=2.0)
    await _acquire(again, again_heard)
    await again.leave(ENDED)


async def test_renewal_that_was_answered_while_the_loop_was_blocked_gives_no_member_up(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=3.0)
    await _acquire(place, heard)
    lease = place.own.lease
    assert lease is not None
    generation = direct.store.cluster.link.generation
    async with bounded(5.0):
        while lease.silent_since is None:
            await asyncio.sleep(0)
    time.sleep(1.5)
    await asyncio.sleep(0.3)
    assert direct.store.cluster.link.generation == generation
    assert heard.errors == []
    await place.leave(ENDED)


async def test_acquire_with_a_lease_that_ended_unnoticed_uses_another(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=25.0, waiter_ttl=25.0)
    await _acquire(place, heard)
    await place.leave(ENDED)
    lease = direct.store.cluster.leases._by_length.get(25)
    assert lease is not None
    await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(lease.id))
    again, again_heard = direct.place(ttl=25.0, waiter_ttl=25.0)
    await _acquire(again, again_heard)
    await again.leave(ENDED)


async def test_key_deleted_by_others_is_noticed(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=3.0)
    await _acquire(place, heard)
    deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(place.key))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
    await heard.until("gone: gone")


@pytest.mark.parametrize("how", ["deleted", "overdue"])
async def test_holder_that_was_told_that_its_key_is_gone_is_not_asked_about_again(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(place, heard)
    lease = place.own.lease
    assert lease is not None
    if how == "deleted":
        deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(place.key))
        await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
        await direct.store._audit._compare(lease)
        assert heard.words == ["gone: gone"]
    else:
        place.reuse(replace(place.terms, max_hold=0.01))
        place.run_out()
        async with bounded(5.0):
            while await _left(direct):
                await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    faulty = Faulty(direct, monkeypatch)
    await direct.store._audit._compare(lease)
    assert faulty.requests == []
    await place.leave(RAN_OUT)


async def test_key_of_a_request_that_is_over_is_deleted(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=3.0)
    await _acquire(place, heard)
    assert place.own.lease is not None
    ghost = direct.store.cluster.keys("lock", "name").request(f"{direct.store.label}-999")
    put = m.RequestOp(request_put=m.PutRequest(ghost, b"{}", place.own.lease.id))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[put]))
    async with bounded(10.0):
        while ghost in await _left(direct):
            await asyncio.sleep(0.05)
    assert place.key in await _left(direct)
    await place.leave(ENDED)


async def test_lock_delay_that_began_while_the_keys_are_compared_is_not_deleted(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    place, heard = direct.place(lock_delay=10.0)
    await _acquire(place, heard)
    lease = place.own.delay_lease
    assert lease is not None
    link = direct.store.cluster.link
    call = link.call

    async def slow(method: Any, request: Any, within: float = 2.0) -> Any:
        answer = await call(method, request, within)
        if method is api.LEASE_TIME_TO_LIVE:
            assert await place.leave(RAN_OUT) == Left("gone", "expired")
        return answer

    monkeypatch.setattr(link, "call", slow)
    await direct.store._audit._compare(lease)
    assert await _left(direct) == [place.keys.delay(place.id)]


async def test_dead_client_costs_its_lease(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await make_direct(one_node, prefix="both")
    direct = await make_direct(one_node, prefix="both")
    holder, heard = dead.place(ttl=2.0)
    await _acquire(holder, heard)
    waiter, waiter_heard = direct.place(ttl=2.0)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    async with takes(at_most=2.0 + 2.0):
        monkeypatch.setattr(dead.store.cluster.leases, "_by_id", {})  # it renews nothing any more
        await waiter_heard.until("granted")
    assert holder.deadline <= now()
    await waiter.leave(ENDED)


async def test_lock_delay_keeps_the_name_of_a_lost_holder_closed(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=2.0, lock_delay=2.0)
    await _acquire(holder, heard)
    waiter, waiter_heard = direct.place(ttl=2.0)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    began = now()
    await holder.leave(RAN_OUT)
    info = await direct.store.inspect("lock", "name")
    assert info.closed_places == 1
    assert info.closed > 0
    await waiter_heard.until("granted")
    assert now() - began >= 1.9
    await waiter.leave(ENDED)


@pytest.mark.parametrize("known", [False, True])
async def test_lock_delay_of_a_process_that_dies_begins_when_its_lease_has_ended(
    one_node: EtcdCluster, make_direct: MakeDirect, known: bool
) -> None:
    """Whenever it dies: no renewal of its lease comes without one of the lock-delay's, which is longer.

    ``known``: the lock-delay's is there already when the other one is made.
    """
    direct = await make_direct(one_node)
    if known:
        await direct.store.cluster.leases.get(4.0)
        await asyncio.sleep(0.2)
    holder, heard = direct.place(ttl=3.0, lock_delay=1.0)
    await _acquire(holder, heard)
    lease, delay = holder.own.lease, holder.own.delay_lease
    assert lease is not None
    assert delay is not None
    made = lease.renewed_at
    async with bounded(5.0):
        while lease.renewed_at < made + 2.0:
            assert delay.renewed_at + delay.seconds >= lease.renewed_at + lease.seconds + 1.0
            await asyncio.sleep(0.005)
    await holder.leave(ENDED)


async def test_waiter_that_is_granted_opens_its_lock_delay_when_it_is_lost(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    first, first_heard = direct.place(ttl=2.0)
    second, second_heard = direct.place(ttl=2.0, lock_delay=2.0)
    third, third_heard = direct.place(ttl=2.0)
    await _acquire(first, first_heard)
    for place in (second, third):
        assert isinstance(await place.acquire(wait=True), Waiting)
    await first.leave(ENDED)
    await second_heard.until("granted")
    began = now()
    await second.leave(RAN_OUT)
    await third_heard.until("granted")
    assert now() - began >= 1.9
    await third.leave(ENDED)
    assert await _left(direct) == []


async def test_run_out_lease_of_a_live_client_opens_the_name(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=1.0, auto_extend=False)
    waiter, waiter_heard = direct.place(ttl=2.0)
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    deadline = holder.deadline
    holder.run_out()
    await waiter_heard.until("granted")
    assert deadline <= now() <= deadline + 1.0
    await waiter.leave(ENDED)


async def test_lease_at_its_max_hold_opens_the_name_though_its_body_goes_on(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0)
    holder.terms = replace(holder.terms, max_hold=0.5)
    waiter, waiter_heard = direct.place(ttl=20.0)
    await _acquire(holder, heard)
    began = now()
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await asyncio.sleep(began + 0.5 - now())
    holder.run_out()  # its body was told, and does not end
    await waiter_heard.until("granted", 5.0)
    await waiter.leave(ENDED)


async def test_lock_delay_begins_once_though_the_body_ends_later(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, lock_delay=20.0)
    holder.terms = replace(holder.terms, max_hold=0.2)
    await _acquire(holder, heard)
    await asyncio.sleep(0.2)
    holder.run_out()
    async with bounded(5.0):
        while (queue := await direct.store.cluster.read(holder.keys)).requests:
            await asyncio.sleep(0.01)
    begun = queue.closing()
    await asyncio.sleep(0.05)
    assert await holder.leave(RAN_OUT) == Left("gone", "expired")
    assert (await direct.store.cluster.read(holder.keys)).closing() == begun
    assert direct.store.requests.find(holder.id) is None


@pytest.mark.parametrize("turns", range(5))
async def test_stream_that_breaks_while_it_is_cancelled_ends(
    one_node: EtcdCluster, turns: int
) -> None:
    link = Link(Access((one_node.nodes[0].endpoint,)), "etcd")
    running = asyncio.create_task(link.run())
    await link.opened()
    watches = Watches(link)
    streaming = asyncio.create_task(watches.run())
    watches.watch(b"a", b"b", 0, lambda events, revision: None, lambda: None)
    await watches.first_answer()
    link.failed(link.generation, Unanswered("cut by the test"))
    for _ in range(turns):
        await asyncio.sleep(0)
    streaming.cancel()
    await asyncio.wait([streaming], timeout=5.0)
    ended = streaming.cancelled()
    running.cancel()
    await asyncio.wait([running])
    streaming.cancel()
    assert ended


# -- what the server does ------------------------------------------------------------------------------


async def test_waiter_is_granted_though_what_it_missed_was_compacted(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place()
    waiter, waiter_heard = direct.place()
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    # Its watch goes back behind what the store remembers.
    room = direct.store.cluster.rooms.of(direct.store.cluster.keys("lock", "name"))
    assert room._following._near is not None
    await holder.leave(ENDED)
    await waiter_heard.until("granted")
    third, third_heard = direct.place()
    assert isinstance(await third.acquire(wait=True), Waiting)
    room._following._near.start = 1
    revision = (await direct.store.cluster.read(room.keys)).revision
    await asyncio.to_thread(one_node.call, "kv/compaction", revision=str(revision))
    link = direct.store.cluster.link
    link.failed(link.generation, Unanswered("cut by the test"))
    await waiter.leave(ENDED)
    await third_heard.until("granted")
    await third.leave(ENDED)


@pytest.fixture
def small_cluster() -> Any:
    with EtcdCluster(quota_backend_bytes=16 * 1024 * 1024) as cluster:
        yield cluster


async def test_full_store_refuses_and_releases(
    small_cluster: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(small_cluster)
    holder, heard = direct.place(ttl=2.0)
    waiter, waiter_heard = direct.place(ttl=2.0)
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    unsure, _ = direct.place(ttl=2.0)
    assert isinstance(await unsure.acquire(wait=True), Waiting)
    unsure.entering.ambiguous = True  # as after a lost answer
    put = m.RequestOp(request_put=m.PutRequest(b"ballast", bytes(1_000_000)))

    async def fill() -> None:
        while True:  # how full it is, the server knows when it has written to its disk
            await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[put]), 10.0)

    with pytest.raises(BackendError, match="NOSPACE"):
        async with bounded(30.0):
            await fill()
    refused, _ = direct.place("another")
    with pytest.raises(BackendError, match="NOSPACE"):
        await refused.acquire(wait=True)
    await asyncio.sleep(2.5)  # leases are renewed all the same
    assert heard.words == []
    assert holder.deadline > now()
    assert await unsure.leave(ENDED) == Left("withdrawn")
    assert await holder.leave(ENDED) == Left("released")
    await waiter_heard.until("granted")
    assert await waiter.leave(ENDED) == Left("released")
    assert await _left(direct) == []


async def test_what_is_refused_is_repeated_more_and_more_rarely(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full store commits each attempt before it refuses it, and thousands may hold."""
    direct = await make_direct(one_node)
    (holder, heard), (waiter, waiter_heard) = direct.place(), direct.place()
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    cluster, refused, changed = direct.store.cluster, 0, asyncio.Event()
    transact = cluster.transact

    async def full(keys: Keys, request: m.TxnRequest, **how: Any) -> m.TxnResponse:
        if not any(step.request_put for step in request.success):
            return await transact(keys, request, **how)
        nonlocal refused
        refused += 1
        changed.set()
        raise NoSpace("full")

    monkeypatch.setattr(cluster, "transact", full)
    await holder.leave(ENDED)
    await waiter_heard.until("granted")
    began = now()
    while refused < 8:  # to have its key end with the lease of its ttl
        changed.clear()
        await changed.wait()
    assert now() - began > 2.0
    monkeypatch.undo()
    async with bounded(10.0):
        while waiter.own.lease is None or waiter.own.lease.asked != 5:
            await asyncio.sleep(0.01)
    assert await waiter.leave(ENDED) == Left("released")


async def test_grant_that_is_refused_is_repeated_once_however_much_is_heard_of_the_name(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waiter that gave up began one more repetition of it, and all went on until it succeeded."""
    direct = await make_direct(one_node)
    (holder, heard), (waiter, waiter_heard) = direct.place(), direct.place(lock_delay=5.0)
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    others = [direct.place()[0] for _ in range(5)]
    for other in others:
        assert isinstance(await other.acquire(wait=True), Waiting)
    cluster, refused = direct.store.cluster, 0
    transact = cluster.transact

    async def full(keys: Keys, request: m.TxnRequest, **how: Any) -> m.TxnResponse:
        nonlocal refused
        if not any(step.request_put for step in request.success):
            return await transact(keys, request, **how)
        refused += 1
        raise NoSpace("full")

    def repeating() -> int:
        coroutines = [task.get_coro() for task in asyncio.all_tasks()]
        return sum(getattr(one, "__qualname__", "") == "Waiter._confirm" for one in coroutines)

    monkeypatch.setattr(cluster, "transact", full)
    await holder.leave(ENDED)
    await until(lambda: refused)
    for other in others:
        await other.leave(ENDED)
        await asyncio.sleep(0)  # what it has begun is not over in this turn
    await until(lambda: repeating() == 1, within=5.0)
    monkeypatch.undo()
    await waiter_heard.until("granted")
    assert await waiter.leave(ENDED) == Left("released")


# -- three members ---------------------------------------------------------------------------------------


async def _leader(cluster: EtcdCluster, direct: Direct) -> EtcdNode:
    def ask(node: EtcdNode) -> bool:
        url = f"http://{node.endpoint}/v3/maintenance/status"
        request = urllib.request.Request(url, data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                status = json.load(answer)
        except OSError:
            return False
        return bool(status.get("leader") == status["header"]["member_id"])

    async with bounded(10.0):
        while True:
            for node in cluster.nodes:
                if node.running and await asyncio.to_thread(ask, node):
                    return node
            await asyncio.sleep(0.1)


async def _use(direct: Direct, cluster: EtcdCluster, node: EtcdNode) -> None:
    """Have the client talk to this member."""
    link = direct.store.cluster.link
    async with bounded(10.0):
        while link.endpoint != node.endpoint:
            generation = link.generation
            link.failed(generation, Unanswered("moved by the test"))
            await link.call(api.RANGE, m.RangeRequest(b"any"))


@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize("at", ["leader", "follower"])
async def test_locks_go_on_when_the_leader_fails(
    three_nodes: EtcdCluster, make_direct: MakeDirect, how: str, at: str
) -> None:
    direct = await make_direct(three_nodes)
    leader = await _leader(three_nodes, direct)
    followers = [node for node in three_nodes.nodes if node is not leader]
    await _use(direct, three_nodes, leader if at == "leader" else followers[0])
    holder, heard = direct.place(ttl=10.0, waiter_ttl=10.0)
    waiter, waiter_heard = direct.place(ttl=10.0, waiter_ttl=10.0)
    await _acquire(holder, heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    token = holder.token
    getattr(leader, how)()
    fresh, fresh_heard = direct.place("another", ttl=10.0)
    async with takes(at_most=8.0):
        await _acquire(fresh, fresh_heard)
    assert heard.words == []
    assert holder.deadline > now()
    assert (await _leave(holder)).what == "released"
    await waiter_heard.until("granted")
    assert waiter.token > token
    if how == "pause":
        leader.resume()
    assert (await _leave(waiter)).what == "released"
    await _leave(fresh)
    assert await _left(direct) == []


async def test_client_without_any_member_loses_its_leases_in_time(
    three_nodes: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(three_nodes)
    holder, heard = direct.place(ttl=3.0)
    await _acquire(holder, heard)
    for node in three_nodes.nodes:
        node.pause()
    paused = now()
    await asyncio.sleep(3.2)
    assert holder.deadline <= paused + 3.0  # nothing was believed beyond the last answer
    assert heard.errors
    nowait, _ = direct.place("another")
    async with takes(at_most=4.5):
        with pytest.raises(BackendUnavailable):
            await nowait.acquire(wait=False)
    for node in three_nodes.nodes:
        node.resume()
    again, again_heard = direct.place("third")
    await _acquire(again, again_heard)
    await _leave(again)
    await _leave(nowait)
    await _leave(holder)
    assert await _left(direct) == []


async def test_member_is_replaced_under_load(
    three_nodes: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(three_nodes)
    tokens: list[int] = []
    busy = 0
    stop = False

    async def work() -> None:
        nonlocal busy
        while not stop:
            place, heard = direct.place(ttl=10.0)
            await _acquire(place, heard)
            assert busy == 0
            busy = 1
            tokens.append(place.token)
            await asyncio.sleep(0)
            busy = 0
            await _leave(place)

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    try:
        for node in three_nodes.nodes:
            await asyncio.sleep(0.5)
            node.kill()
            done = len(tokens)
            async with bounded(15.0):
                while len(tokens) < done + 5:
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(three_nodes.until_healthy)
    finally:
        stop = True
        await asyncio.gather(*tasks)
    assert tokens == sorted(set(tokens))
    assert await _left(direct) == []
