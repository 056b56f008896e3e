"""What goes wrong, or comes between, while requests of one client are passed a name whose last key is not
deleted yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import aiodlock
from aiodlock._clock import now
from aiodlock._model import ENDED, Left, Waiting
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.place import EtcdPlace

from ..ports import free_ports
from ..scenes import PATIENCE, bounded, until
from .conftest import Direct, Heard
from .cuts import Cut
from .servers import EtcdCluster
from .test_faults import _acquire, _left
from .test_passing import _followed, _wait

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]
Asked = tuple[EtcdPlace, Heard]


class Leaves:
    """Keeps the leaves of a client back, and nothing else. Mutable state: ``may_go``; ``sent``."""

    def __init__(self, direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = asyncio.Event()
        self.sent: list[asyncio.Task[Left]] = []
        transact = direct.store.cluster.transact

        async def kept(
            keys: Any, request: Any, *, own: str = "", gather: bool = False
        ) -> m.TxnResponse:
            if own:
                await self.may_go.wait()
            return await transact(keys, request, own=own, gather=gather)

        monkeypatch.setattr(direct.store.cluster, "transact", kept)

    async def of(self, place: EtcdPlace) -> None:
        """Send one. What it passes on to is told before this returns."""
        self.sent.append(asyncio.create_task(place.leave(ENDED)))
        await asyncio.sleep(0)

    async def let_go(self) -> list[Left]:
        """Let them arrive; return what each was told."""
        self.may_go.set()
        async with bounded(20.0):
            return await asyncio.gather(*self.sent)


async def _hold(direct: Direct, **terms: Any) -> Asked:
    place, heard = direct.place(**{"ttl": 20.0, "waiter_ttl": 20.0, **terms})
    await _acquire(place, heard)
    return place, heard


async def _line_up(direct: Direct, *, linger: float = 0.0, **terms: Any) -> Asked:
    place, heard = direct.place(**{"ttl": 20.0, "waiter_ttl": 20.0, **terms})
    place.terms = replace(place.terms, linger=linger)
    assert isinstance(await place.acquire(wait=True), Waiting)
    return place, heard


async def _has_heard_of_all(direct: Direct, place: EtcdPlace) -> None:
    """Have everything told to a client that was written before: its own watch tells in order."""
    room = direct.store.cluster.rooms.of(place.keys)
    revision = (await direct.store.cluster.read(place.keys)).revision
    probe, _ = await _line_up(
        direct,
        name=place.terms.name,
        kind=place.terms.kind,
        mode=place.terms.mode,
        limit=place.terms.limit,
    )
    assert room.queue is not None
    assert room.queue.revision > revision
    await probe.leave(ENDED)


@pytest.mark.parametrize("closing", ["lock_delay", "hold_at_least"])
async def test_operator_breaks_who_is_leaving_and_takes_nothing_from_the_next_one(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, closing: str
) -> None:
    direct, operator = [await make_direct(one_node, prefix=f"broken {closing}") for _ in range(2)]
    holder, _ = await _hold(direct)
    place, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    closes_for: Any = {closing: 30.0}
    place.terms = replace(place.terms, **closes_for)
    assert isinstance(await place.acquire(wait=True), Waiting)
    await _followed(direct)
    leaves = Leaves(direct, monkeypatch)
    await leaves.of(holder)
    await heard.until("granted")
    closes = place.keys.delay(place.id) if closing == "lock_delay" else place.keys.hold(place.id)
    assert closes in await _left(operator)
    assert await operator.store.break_lock("name") == 1
    # It holds, with all that it has asked for.
    assert sorted(await _left(operator)) == sorted([closes, place.key])
    assert await leaves.let_go() == [Left("gone", "broken")]
    assert heard.words == ["granted"]
    assert await operator.store.break_lock("name") == 1
    assert await _left(operator) == []
    await heard.until("gone: broken")
    await place.leave(ENDED)


async def test_lingering_ones_pass_on_and_are_recalled_by_others_in_order(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, other = [await make_direct(one_node, prefix="linger passed") for _ in range(2)]
    holder, _ = await _hold(direct)
    first, first_heard = await _line_up(direct, linger=60.0)
    await _followed(direct)
    leaves = Leaves(direct, monkeypatch)
    await leaves.of(holder)
    await first_heard.until("granted")
    assert first._successors is not None  # it watches for others, and knows of none
    # Another client's comes, and then the next one of this client: it must not overtake.
    foreign, foreign_heard = await _line_up(other, linger=60.0)
    await until(lambda: first.recalled)
    last, last_heard = await _line_up(direct, linger=60.0)
    assert foreign_heard.words == []
    await leaves.of(first)
    await _has_heard_of_all(other, foreign)
    assert last_heard.words == foreign_heard.words == []
    assert [left.what for left in await leaves.let_go()] == ["released"] * 2
    await foreign_heard.until("granted")
    assert foreign.recalled  # the other one waits already
    await foreign.leave(ENDED)
    await last_heard.until("granted")
    assert holder.token < first.token < foreign.token < last.token
    await last.leave(ENDED)
    assert await _left(other) == []


@pytest.mark.parametrize("which", ["of who leaves", "of the next one"])
async def test_lease_is_lost_while_the_leave_is_on_its_way(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    direct, other = [await make_direct(one_node, prefix=f"lost {which}") for _ in range(2)]
    holder, _ = await _hold(direct)
    place, heard = await _line_up(direct, ttl=40.0, waiter_ttl=40.0)
    foreign, foreign_heard = await _line_up(other)
    await _followed(direct)
    leaves = Leaves(direct, monkeypatch)
    await leaves.of(holder)
    await heard.until("granted")
    assert holder.own.lease is not None
    assert place.own.lease is not None
    assert holder.own.lease is not place.own.lease
    lost = holder.own.lease if which == "of who leaves" else place.own.lease
    await other.store.cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(lost.id))
    if lost is place.own.lease:
        await direct.store.cluster.look_for(lost)
        assert heard.words == ["granted", "gone: expired"]
        assert foreign_heard.words == []  # the key of who leaves is there
        assert [left.what for left in await leaves.let_go()] == ["released"]
    else:
        assert [left.what for left in await leaves.let_go()] == ["gone"]
        await _has_heard_of_all(other, foreign)
        assert (heard.words, foreign_heard.words) == (["granted"], [])
    await place.leave(ENDED)
    await foreign_heard.until("granted")
    await foreign.leave(ENDED)
    assert await _left(other) == []


async def test_readers_are_passed_the_name_and_a_writer_waits_for_those_of_others(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, other = [await make_direct(one_node, prefix="readers passed") for _ in range(2)]
    holder, _ = await _hold(direct)
    one, one_heard = await _line_up(direct, mode="shared")
    foreign, foreign_heard = await _line_up(other, mode="shared")
    two, two_heard = await _line_up(direct, mode="shared")
    writer, writer_heard = await _line_up(direct)
    await _followed(direct)
    leaves = Leaves(direct, monkeypatch)
    await leaves.of(holder)
    await one_heard.until("granted")
    await two_heard.until("granted")
    await leaves.of(one)
    await leaves.of(two)
    await _has_heard_of_all(other, foreign)
    assert writer_heard.words == foreign_heard.words == []
    assert [left.what for left in await leaves.let_go()] == ["released"] * 3
    await foreign_heard.until("granted")
    assert writer_heard.words == []
    await foreign.leave(ENDED)
    await writer_heard.until("granted")
    await writer.leave(ENDED)
    assert await _left(other) == []


async def test_places_of_a_semaphore_are_passed_on_in_order(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, other = [await make_direct(one_node, prefix="places passed") for _ in range(2)]
    semaphore: dict[str, Any] = {"kind": "semaphore", "limit": 2}
    holder, _ = await _hold(direct, **semaphore)
    beside, _ = await _hold(other, **semaphore)
    second, second_heard = await _line_up(direct, **semaphore)
    foreign, foreign_heard = await _line_up(other, **semaphore)
    last, last_heard = await _line_up(direct, **semaphore)
    await _followed(direct, "semaphore")
    leaves = Leaves(direct, monkeypatch)
    await leaves.of(holder)
    await second_heard.until("granted")
    await leaves.of(second)
    assert len((await other.store.inspect("semaphore", "name")).holders) == 2
    assert last_heard.words == foreign_heard.words == []
    assert [left.what for left in await leaves.let_go()] == ["released"] * 2
    await foreign_heard.until("granted")
    await beside.leave(ENDED)
    await last_heard.until("granted")
    for place in (foreign, last):
        await place.leave(ENDED)
    assert (await other.store.inspect("semaphore", "name")).holders == ()


async def test_cancelled_leave_that_passed_on_is_repeated_and_lets_nobody_in_before(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, other = [await make_direct(one_node, prefix="cancelled") for _ in range(2)]
    holder, _ = await _hold(direct)
    place, heard = await _wait(direct)
    foreign, foreign_heard = await _line_up(other)
    await _followed(direct)
    with monkeypatch.context() as patch:
        leaves = Leaves(direct, patch)
        await leaves.of(holder)
        await heard.until("granted")
        leaves.sent[0].cancel()
        await asyncio.gather(*leaves.sent, return_exceptions=True)
    assert (await place.leave(ENDED)).what == "released"
    await _has_heard_of_all(other, foreign)
    assert foreign_heard.words == []  # the key is there
    assert (await holder.leave(ENDED)).what == "released"
    await foreign_heard.until("granted")
    await foreign.leave(ENDED)
    assert await _left(other) == []


async def test_client_that_passed_on_in_a_cut_holds_until_its_deadline_and_others_only_then(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    (node,), (port,) = one_node.nodes, free_ports(1)
    async with Cut(port, node.port) as cut:
        direct = await make_direct(one_node, endpoints=(f"127.0.0.1:{port}",), prefix="cut")
        other = await make_direct(one_node, prefix="cut")
        holder, _ = await _hold(direct, ttl=3.0, waiter_ttl=3.0)
        place, heard = await _line_up(direct, ttl=2.0, waiter_ttl=2.0)
        foreign, foreign_heard = await _line_up(other)
        await _followed(direct)
        cut.cut()
        leave = asyncio.create_task(holder.leave(ENDED))
        await heard.until("granted")
        await foreign_heard.until("granted", 30.0)
        assert now() >= place.deadline
        assert foreign.token > place.token
        leave.cancel()
        await asyncio.gather(leave, return_exceptions=True)
        await foreign.leave(ENDED)
        assert await _left(other) == []


async def test_clients_with_all_kinds_of_requests_are_never_in_twice(one_node: EtcdCluster) -> None:
    """Tasks of two clients take turns: with and without ``linger``, with several ttls, readers, too."""
    inside: list[str] = []
    tokens: list[int] = []

    async def work(client: aiodlock.Client, number: int) -> None:
        lock = client.lock(
            "mixed",
            ttl=(10.0, 20.0)[number % 2],
            linger=(0.0, 0.5)[number // 2 % 2],
            timeout=PATIENCE,
        )
        for turn in range(12):
            if (number + turn) % 5 == 0:
                async with client.rwlock("mixed", timeout=PATIENCE).read:
                    inside.append("reader")
                    await asyncio.sleep(0.001)
                    assert set(inside) == {"reader"}
                    inside.remove("reader")
                continue
            async with lock as lease:
                inside.append("writer")
                assert inside == ["writer"]
                tokens.append(lease.token)
                await asyncio.sleep(0.001 * (turn % 2))
                assert inside == ["writer"]
                inside.remove("writer")

    async with (
        aiodlock.Client(one_node.url) as one,
        aiodlock.Client(one_node.url) as two,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(6):
            tasks.create_task(work((one, two)[number % 3 == 0], number))
    assert tokens == sorted(tokens)
    async with aiodlock.Client(one_node.url) as after:
        info = await after.lock("mixed").inspect()
        assert (info.holders, info.waiters) == ((), ())
