"""What is left of a shared lease when a body begins, and while it goes on: more than the margin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from aiodlock._clock import now
from aiodlock._model import ENDED, Gone, Granted, Waiting
from aiodlock.backends.base import Unanswered
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.leases import SharedLease
from aiodlock.backends.stage import HELD

from ..scenes import bounded
from .conftest import Direct
from .servers import EtcdCluster
from .test_faults import _acquire

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


@pytest.mark.parametrize("later", [False, True])
async def test_lease_is_renewed_before_only_its_margin_is_left(
    one_node: EtcdCluster, make_direct: MakeDirect, later: bool
) -> None:
    """``later``: the lease has lingered, and its next body has that margin."""
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=3.0, margin=0.0 if later else 2.4)
    await _acquire(place, heard)
    if later:
        place.reuse(replace(place.terms, margin=2.4))
    began = now()
    while now() < began + 2.0:
        assert place.deadline - 2.4 > now()
        await asyncio.sleep(0.005)
    await place.leave(ENDED)


async def test_lease_that_was_idle_is_renewed_before_it_is_used(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal counts after a read, which may take longer than the write of a request."""
    direct = await make_direct(one_node)
    call = direct.store.cluster.link.call

    async def slow(method: Any, request: Any, within: float = 2.0) -> Any:
        answer = await call(method, request, within)
        if method is api.RANGE:
            await asyncio.sleep(0.05)
        return answer

    monkeypatch.setattr(direct.store.cluster.link, "call", slow)
    place, heard = direct.place(ttl=0.3)
    await _acquire(place, heard)
    await place.leave(ENDED)
    lease = direct.store.cluster.leases._by_length.get(1)
    assert lease is not None
    async with bounded(5.0):
        while lease.deadline(0.3) > now():
            await asyncio.sleep(0.005)
    again, _ = direct.place(ttl=0.3)
    assert isinstance(await again.acquire(wait=True), Granted)
    assert again.deadline > now()
    await again.leave(ENDED)


@pytest.mark.parametrize("lock_delay", [0.0, 1.0])
async def test_margin_may_be_longer_than_the_lease_of_a_waiter(
    one_node: EtcdCluster, make_direct: MakeDirect, lock_delay: float
) -> None:
    """A name with a marker is free, and is entered by its queue."""
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=20.0, margin=8.0, lock_delay=lock_delay)
    marker = m.RequestOp(request_put=m.PutRequest(place.keys.marker("another"), b"{}"))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[marker]))
    assert isinstance(await place.acquire(wait=True), Granted)
    assert place.deadline - 8.0 > now()
    waiter, waiter_heard = direct.place(ttl=20.0, margin=8.0, lock_delay=lock_delay)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    await place.leave(ENDED)
    await waiter_heard.until("granted")
    assert waiter.deadline - 8.0 > now()
    await waiter.leave(ENDED)
    assert heard.words == []


async def test_waiter_that_is_granted_with_little_more_than_its_margin_keeps_its_lease(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    """Its key is moved to the lease of a holder a moment after the grant."""
    direct = await make_direct(one_node)
    first, _ = direct.place(ttl=20.0)
    assert isinstance(await first.acquire(wait=True), Granted)
    waiter, heard = direct.place(ttl=20.0, waiter_ttl=3.0)
    assert isinstance(await waiter.acquire(wait=True), Waiting)
    lease = waiter.own.lease
    assert lease is not None
    before = lease.renewed_at
    async with bounded(5.0):
        while lease.renewed_at == before:
            await asyncio.sleep(0.01)
    margin = lease.deadline(20.0) - now() - 0.02
    waiter.terms = replace(waiter.terms, margin=margin)
    await first.leave(ENDED)
    await heard.until("granted")
    granted = now()
    while now() < granted + 0.3:
        assert waiter.deadline - margin > now()
        await asyncio.sleep(0.002)
    await waiter.leave(ENDED)


async def test_grant_that_is_broken_before_it_is_answered_begins_no_body(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt has made it a holder, and has failed to renew what it needs."""
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=20.0, margin=8.0)
    marker = m.RequestOp(request_put=m.PutRequest(place.keys.marker("another"), b"{}"))
    await direct.store.cluster.link.call(api.TXN, m.TxnRequest(success=[marker]))
    transact = direct.store.cluster.transact
    lost = False

    async def lossy(keys: Any, request: m.TxnRequest, **options: Any) -> m.TxnResponse:
        nonlocal lost
        answer = await transact(keys, request, **options)
        if place.stage is HELD and not lost:
            lost = True
            raise Unanswered("the answer was lost")
        return answer

    monkeypatch.setattr(direct.store.cluster, "transact", lossy)
    with pytest.raises(Unanswered):
        await place.acquire(wait=True)
    async with bounded(5.0):
        while not place.own.settled:
            await asyncio.sleep(0.01)
    assert await direct.store.break_lock("name") == 1
    await heard.until("gone: broken")
    assert await place.acquire(wait=True) == Gone("gone")
    await place.leave(ENDED)


async def test_lease_that_was_extended_by_less_is_moved_without_a_storm_of_renewals(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key goes to the shorter lease as soon as that promises what the longer one did."""
    direct = await make_direct(one_node)
    place, heard = direct.place(ttl=9.0)
    await _acquire(place, heard)
    told = place.deadline
    await place.extend(8.0)
    sent: list[float] = []
    note = SharedLease.sent

    def noted(lease: SharedLease, moment: float) -> None:
        sent.append(moment)
        note(lease, moment)

    monkeypatch.setattr(SharedLease, "sent", noted)
    async with bounded(5.0):
        while place.own.lease is None or place.own.lease.asked != 8:
            assert place.deadline >= told
            await asyncio.sleep(0.01)
    assert place.deadline >= told
    assert len(sent) <= 6
    await place.leave(ENDED)
