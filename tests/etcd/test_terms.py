"""A lease counts within the term in which it was made: what a stopped leader does when it wakes harms
nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock._model import ENDED, Left, Waiting
from aiodlock._patience import Patience
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.leases import Leases, SharedLease

from ..scenes import bounded, takes
from .conftest import Direct
from .servers import EtcdCluster
from .test_faults import Faulty, _acquire, _leader, _leave, _left

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]

# -- which renewals count ----------------------------------------------------------------------------


class FakeLink:
    """A member that answers as it is told. Mutable state: ``term`` of its answers, ``silent`` (reads have
    no answer), ``changing`` (so many leases are made while the leader changes), ``revoked``, ``renewals``
    that wait for an answer."""

    described = endpoint = "fake"
    generation = 0
    within = 2.0

    def __init__(self) -> None:
        self.patience = Patience()
        self.term = 7
        self.silent = False
        self.changing = 0
        self.revoked: list[int] = []
        self.renewals: asyncio.Queue[int] = asyncio.Queue()
        self.heard: Callable[[m.LeaseKeepAliveResponse], None]
        self._made = 0

    @property
    def header(self) -> m.Header:
        return m.Header(revision=1, raft_term=self.term)

    async def call(self, method: Any, request: Any, within: float = 2.0) -> Any:
        await asyncio.sleep(0)
        if method is api.RANGE:
            if self.silent:
                raise Unanswered("told to be silent")
            return m.RangeResponse(self.header)
        if method is api.LEASE_REVOKE:
            self.revoked.append(request.id)
            return m.LeaseRevokeResponse(self.header)
        assert method is api.LEASE_GRANT
        self._made += 1
        if self.changing:
            self.changing -= 1
            self.term += 1
        return m.LeaseGrantResponse(self.header, self._made, request.ttl)

    async def stream(
        self,
        method: Any,
        opened: Callable[[Callable[[Any], Awaitable[None]]], Awaitable[None]],
        heard: Callable[[Any], None],
    ) -> None:
        async def send(request: m.LeaseKeepAliveRequest) -> None:
            self.renewals.put_nowait(request.id)

        self.heard = heard
        await opened(send)

    def answered(self, sent: float) -> None:
        """Nothing is learned."""

    def ran_out(self, generation: int, sent: float, error: Exception) -> bool:
        """It goes on."""
        return False

    def answer(self, lease: SharedLease, term: int = 0) -> None:
        header = m.Header(revision=1, raft_term=term or self.term)
        self.heard(m.LeaseKeepAliveResponse(header, lease.id, lease.seconds))


class Kept:
    """Leases at a fake member. ``outdated``: those that were told to count no more."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.outdated: list[SharedLease] = []
        self.leases = Leases(
            self.link,  # type: ignore[arg-type]
            m.RangeRequest(b"probe"),
            lambda lease: None,
            lambda lease, error: None,
            self.outdated.append,
            lambda call, *args: None,
        )

    async def renewal(self, lease: SharedLease) -> float:
        """Wait until a renewal was sent; return a moment before that."""
        began = now()
        lease.due = 0.0
        self.leases._wake.set()
        while await self.link.renewals.get() != lease.id:
            pass
        return began


@asynccontextmanager
async def _kept() -> AsyncIterator[Kept]:
    kept = Kept()
    tasks = [asyncio.create_task(kept.leases.run()), asyncio.create_task(kept.leases.confirm())]
    try:
        yield kept
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Unanswered):
                await task


async def test_renewal_counts_once_a_later_read_shows_the_same_term() -> None:
    async with _kept() as kept:
        lease = await kept.leases.get(20.0)
        first, kept.link.silent = lease.renewed_at, True
        sent = await kept.renewal(lease)
        kept.link.answer(lease)
        await asyncio.sleep(0.05)
        assert lease.renewed_at == first  # answered, and not proven
        kept.link.silent = False
        async with bounded(5.0):
            while lease.renewed_at == first:
                await asyncio.sleep(0.01)
        assert sent <= lease.renewed_at
        assert not kept.outdated


@pytest.mark.parametrize("seen_by", ["answer", "read"])
async def test_renewal_in_another_term_than_that_of_the_lease_does_not_count(seen_by: str) -> None:
    async with _kept() as kept:
        lease = await kept.leases.get(20.0)
        first, until = lease.renewed_at, lease.deadline(20.0)
        await kept.renewal(lease)
        if seen_by == "answer":
            kept.link.answer(lease, term=8)
        else:
            kept.link.term = 8  # a leader that was stopped has answered: the read is another one's
            kept.link.answer(lease, term=7)
        async with bounded(5.0):
            while not kept.outdated:
                await asyncio.sleep(0.01)
        assert lease.renewed_at == first
        assert lease.deadline(20.0) == until
        other = await kept.leases.get(20.0)
        assert other is not lease
        # The old one is renewed further, for the keys that are still with it.
        await kept.renewal(lease)
        kept.link.answer(lease)
        await asyncio.sleep(0.02)
        assert lease.deadline(20.0) == until


async def test_renewal_that_is_answered_after_the_end_of_the_lease_does_not_count() -> None:
    async with _kept() as kept:
        lease = await kept.leases.get(20.0)
        await kept.renewal(lease)
        lease.renewed_at -= 20.0
        until = lease.deadline(20.0)
        kept.link.answer(lease)
        assert kept.outdated == [lease]
        assert lease.deadline(20.0) == until


async def test_lease_is_made_again_if_the_leader_changed_meanwhile() -> None:
    async with _kept() as kept:
        kept.link.changing = 2
        lease = await kept.leases.get(20.0)
        assert lease.term == 9
        assert kept.link.revoked == [1, 2]


async def test_leases_of_many_lengths_that_outlive_each_other_block_nothing() -> None:
    """As locks of many a ``ttl`` have them, with lock-delays of several lengths."""
    async with _kept() as kept:
        leases = [await kept.leases.get(float(20 + number)) for number in range(23)]
        for longer in leases:
            longer.outlives = {lease for lease in leases if lease.asked < longer.asked}
        async with takes(at_most=0.3):
            kept.leases._wake.set()
            await asyncio.sleep(0.02)
        assert kept.link.renewals.empty()
        leases[1].due = 0.0
        kept.leases._wake.set()
        sent = [await kept.link.renewals.get() for _ in leases[1:]]
        assert sent == [lease.id for lease in reversed(leases[1:])]
        assert leases[0].due > now()


@pytest.mark.parametrize("lock_delay", [0.1 + 0.2 - 0.3, 1e-9, 1.5])
async def test_lease_of_a_lock_delay_is_longer_however_short_that_is(lock_delay: float) -> None:
    async with _kept() as kept:
        lease = await kept.leases.get(20.0)
        longer = await kept.leases.get_longer(lease, lock_delay)
        assert longer.seconds >= lease.seconds + lock_delay
        assert longer is not lease
        await kept.renewal(lease)


# -- moving to a lease that counts -----------------------------------------------------------------------


async def _old_leases(direct: Direct) -> list[int]:
    return [lease.id for lease in direct.store.cluster.leases.all()]


async def test_nothing_rests_on_a_lease_from_before_a_change_of_the_leader(
    three_nodes: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(three_nodes)
    holder, heard = direct.place(ttl=4.0, waiter_ttl=4.0)
    waiter, waiter_heard = direct.place(ttl=4.0, waiter_ttl=4.0)
    delayed, delayed_heard = direct.place("delayed", ttl=4.0, waiter_ttl=4.0, lock_delay=2.0)
    await _acquire(holder, heard)
    await _acquire(delayed, delayed_heard)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    kept = {*await _left(direct), *await _left(direct, "delayed")}
    old = await _old_leases(direct)
    leader = await _leader(three_nodes, direct)
    leader.kill()
    killed = now()
    places = (holder, waiter, delayed)
    async with bounded(20.0):
        while min(place.deadline for place in places) < killed + 5.0:
            assert heard.words == waiter_heard.words == delayed_heard.words == []
            await asyncio.sleep(0.02)
    # A leader that was stopped believes that these have ended, and says so to the cluster.
    for id in old:
        await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(id))
    assert {*await _left(direct), *await _left(direct, "delayed")} == kept
    assert heard.words == waiter_heard.words == delayed_heard.words == []
    assert (await _leave(holder)).what == "released"
    await waiter_heard.until("granted")
    assert (await _leave(waiter)).what == "released"
    assert (await _leave(delayed)).what == "released"
    assert await _left(direct) == await _left(direct, "delayed") == []


async def _outdate(direct: Direct, seconds: float) -> SharedLease:
    lease = direct.store.cluster.leases._by_length.get(round(seconds))
    assert lease is not None
    direct.store.cluster.leases._outdate(lease)
    return lease


async def test_requests_move_together_to_another_lease(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    waiters = [direct.place(ttl=20.0, waiter_ttl=20.0)[0] for _ in range(100)]
    for waiter in waiters:
        assert isinstance(await waiter.acquire(wait=True), Waiting)
    faulty = Faulty(direct, monkeypatch)
    old = await _outdate(direct, 20.0)
    async with bounded(10.0):
        while any(place.own.lease is old or not place.own.settled for place in (holder, *waiters)):
            await asyncio.sleep(0.01)
    assert len(faulty.requests) <= 4  # the first one, and 59 others; the same of what is left
    before = holder.deadline
    await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(old.id))
    assert len(await _left(direct)) == 101
    assert holder.deadline >= before
    for place in (*reversed(waiters), holder):
        await place.leave(ENDED)
    assert await _left(direct) == []


@pytest.mark.parametrize("lost", [1, 2])
async def test_move_whose_answer_is_lost_promises_no_more_than_either_lease(
    one_node: EtcdCluster,
    make_direct: MakeDirect,
    monkeypatch: pytest.MonkeyPatch,
    lost: int,
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    faulty = Faulty(direct, monkeypatch)
    faulty.lose = lost
    old = await _outdate(direct, 20.0)
    until = holder.deadline
    async with bounded(10.0):
        while not holder.own.settled or holder.own.lease is old:
            if faulty.lose:
                assert holder.deadline <= until
            await asyncio.sleep(0)
    assert holder.deadline > until
    await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(old.id))
    assert await holder.leave(ENDED) == Left("released")
    assert heard.words == []


async def test_late_duplicate_of_a_move_changes_nothing(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    faulty = Faulty(direct, monkeypatch)
    for _ in range(2):
        old = await _outdate(direct, 20.0)
        async with bounded(10.0):
            while holder.own.lease is old or not holder.own.settled:
                await asyncio.sleep(0.01)
    first, _ = faulty.requests
    await direct.store.cluster.link.call(api.TXN, first)
    (key,) = (
        await direct.store.cluster.read(direct.store.cluster.keys("lock", "name"))
    ).requests.values()
    assert holder.own.lease is not None
    assert key.lease == holder.own.lease.id
    await holder.leave(ENDED)


async def test_lock_delay_whose_lease_was_revoked_is_written_again(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    """A leader that was stopped may have one of the two leases revoked, too."""
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=2.0, waiter_ttl=2.0, lock_delay=1.0)
    await _acquire(holder, heard)
    delay = holder.own.delay_lease
    assert delay is not None
    kept = await _left(direct)
    assert len(kept) == 2
    await direct.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(delay.id))
    assert await _left(direct) == [holder.key]
    async with bounded(5.0):
        while await _left(direct) != kept:
            await asyncio.sleep(0.05)
    assert holder.own.delay_lease is not delay
    assert heard.words == []
    assert await holder.leave(ENDED) == Left("released")
    assert await _left(direct) == []


async def test_holder_whose_key_is_gone_when_it_is_moved_is_told(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(holder.key))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
    await _outdate(direct, 20.0)
    await heard.until("gone: gone")
    await asyncio.sleep(0.05)
    assert heard.words == ["gone: gone"]
    await holder.leave(ENDED)


@pytest.mark.parametrize("when", ["moved", "granted", "joins"])
async def test_request_that_is_gone_when_its_lease_is_there_is_not_made_anew(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    direct = await make_direct(one_node)
    first, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(first, heard)
    owner, delay = ("ann", 0.0) if when == "joins" else (None, 5.0)
    mate, _ = direct.place(ttl=20.0, waiter_ttl=20.0, owner=owner)
    waiter, waiter_heard = direct.place(ttl=25.0, waiter_ttl=15.0, owner=owner, lock_delay=delay)
    for place in (mate, waiter) if owner else (waiter,):
        assert isinstance(await place.acquire(wait=True), Waiting)
    leases = direct.store.cluster.leases
    get = leases.get

    async def slow(length: float) -> SharedLease:
        if length == 25.0 and not waiter_heard.words:
            deletion = m.RequestOp(request_delete_range=m.DeleteRangeRequest(waiter.key))
            await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[deletion]))
            await waiter_heard.until("gone: gone")
        return await get(length)

    monkeypatch.setattr(leases, "get", slow)
    if when == "moved":
        await _outdate(direct, 15.0)
    else:
        await first.leave(ENDED)
    async with bounded(10.0):
        while not waiter_heard.words:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert waiter_heard.words == ["gone: gone"]
    assert not [key for key in await _left(direct) if waiter.id.encode() in key]
    for place in (first, mate, waiter):
        await place.leave(ENDED)


@pytest.mark.parametrize("how", ["with a lock-delay", "beside its owner"])
async def test_waiter_that_is_granted_promises_no_more_than_its_new_lease(
    one_node: EtcdCluster, make_direct: MakeDirect, how: str
) -> None:
    direct = await make_direct(one_node)
    first, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(first, heard)
    owner = "ann" if how == "beside its owner" else None
    mate, mate_heard = direct.place(ttl=20.0, waiter_ttl=20.0, owner=owner)
    if owner:
        assert isinstance(await mate.acquire(wait=True), Waiting)
    delay = 0.0 if owner else 1.0
    waiter, waiter_heard = direct.place(ttl=6.0, waiter_ttl=5.0, owner=owner, lock_delay=delay)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    lease = direct.store.cluster.leases._by_length.get(6)
    assert lease is not None
    async with bounded(10.0):
        while waiter.deadline < lease.deadline(6.0) + 0.3:
            await asyncio.sleep(0.005)
    await first.leave(ENDED)
    await waiter_heard.until("granted")
    assert waiter.deadline <= lease.deadline(6.0)
    async with bounded(5.0):
        while waiter.own.lease is not lease:  # the event of a joining may come before its answer
            assert waiter.deadline <= lease.deadline(6.0)
            await asyncio.sleep(0)
    assert waiter.deadline <= lease.deadline(6.0)
    if owner:
        assert mate_heard.words == ["granted"]
        await mate.leave(ENDED)
    await waiter.leave(ENDED)


@pytest.mark.parametrize("waits", [False, True])
async def test_acquire_with_a_lock_delay_whose_answer_is_lost_leaves_the_name_open(
    one_node: EtcdCluster,
    make_direct: MakeDirect,
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
) -> None:
    direct = await make_direct(one_node)
    first, first_heard = direct.place(ttl=20.0)
    second, _ = direct.place(ttl=20.0, waiter_ttl=20.0, lock_delay=5.0)
    faulty = Faulty(direct, monkeypatch)
    if waits:
        await _acquire(first, first_heard)
        assert isinstance(await second.acquire(wait=True), Waiting)
        # Of the write that makes the next one the holder, whether the leave arrives before it or after.
        faulty.writing, faulty.lose = second.keys.delay(second.id), 1
        await first.leave(ENDED)
        async with bounded(5.0):
            while faulty.lose:
                await asyncio.sleep(0)
    else:
        faulty.lose = 1
        with pytest.raises(Unanswered):
            await second.acquire(wait=True)
    await second.leave(ENDED)
    assert await _left(direct) == []
    await first.leave(ENDED)


@pytest.mark.parametrize(("ttl", "max_hold", "reason"), [(30, 1, "max_hold"), (1, 30, "expired")])
async def test_lease_that_is_not_renewed_ends_for_the_reason_that_made_it_short(
    one_node: EtcdCluster, ttl: float, max_hold: float, reason: str
) -> None:
    """Its deadline is counted from when it was asked for, so it comes a moment before ``max_hold``."""
    async with aiodlock.Client(one_node.url) as client:
        lease = await client.lock("short", ttl=ttl, max_hold=max_hold).acquire()
        request = lease._request
        assert request.place.deadline < request.granted_at + max_hold
        assert request.overdue_reason(request.place.deadline) == reason
        await lease.release()


@pytest.mark.parametrize("limits", [(16, 1_572_864), (128, 2048)])
async def test_requests_are_moved_one_by_one_where_a_member_takes_no_more(
    make_direct: MakeDirect, limits: tuple[int, int]
) -> None:
    steps, size = limits
    with EtcdCluster(1, max_txn_ops=steps, max_request_bytes=size) as cluster:
        direct = await make_direct(cluster)
        places = [direct.place(f"name {number}", ttl=20.0) for number in range(30)]
        for place, heard in places:
            await _acquire(place, heard)
        old = await _old_leases(direct)
        cluster.nodes[0].kill()
        await asyncio.to_thread(cluster.start)
        async with bounded(15.0):
            while any(place.own.lease is None or place.own.lease.id in old for place, _ in places):
                await asyncio.sleep(0.02)
