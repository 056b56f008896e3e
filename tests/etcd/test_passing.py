"""A request that leaves lets in the next one of its own client before its key is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import aiodlock
from aiodlock._model import ENDED, RAN_OUT, End, Granted, Left, Waiting
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.batches import Batches
from aiodlock.backends.etcd.place import EtcdPlace

from ..scenes import until
from .conftest import Direct, Heard
from .servers import EtcdCluster
from .test_faults import _acquire, _left

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


class Gate:
    """Keeps transactions back. Mutable state: ``open``; ``kept`` (so many came while it was not)."""

    def __init__(self, direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.kept = 0
        call = direct.store.cluster.link.call

        async def gated(method: Any, request: Any, within: float = 2.0) -> Any:
            if method is api.TXN and not self.open.is_set():
                self.kept += 1
                await self.open.wait()
            return await call(method, request, within)

        monkeypatch.setattr(direct.store.cluster.link, "call", gated)


async def _wait(direct: Direct, **terms: Any) -> tuple[EtcdPlace, Heard]:
    place, heard = direct.place(ttl=20.0, waiter_ttl=20.0, **terms)
    assert isinstance(await place.acquire(wait=True), Waiting)
    return place, heard


async def _followed(direct: Direct, kind: str = "lock") -> None:
    """Wait until the client follows the name: until then nothing is passed on."""
    room = direct.store.cluster.rooms.of(direct.store.cluster.keys(kind, "name"))
    await until(lambda: room._following.is_near)


async def test_next_one_of_the_client_holds_before_the_key_is_deleted_and_no_other(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, other = [await make_direct(one_node, prefix="passed") for _ in range(2)]
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    own = [await _wait(direct) for _ in range(3)]
    foreign, foreign_heard = await _wait(other)
    last, last_heard = await _wait(direct)
    await _followed(direct)
    gate = Gate(direct, monkeypatch)
    leaves: list[asyncio.Task[Left]] = []
    before = holder
    for place, one in own:
        leaves.append(asyncio.create_task(before.leave(ENDED)))
        await one.until("granted")
        assert place.token > before.token
        # It is the holder to whoever asks with its token, and the one before is not any more.
        assert await other.store.holds("lock", "name", "exclusive", place.token)
        before = place
    leaves.append(asyncio.create_task(before.leave(ENDED)))
    await asyncio.sleep(0.1)
    assert len(await _left(other)) == 6  # nothing is deleted yet
    assert foreign_heard.words == last_heard.words == []
    gate.open.set()
    await foreign_heard.until("granted")
    assert [(await leave).what for leave in leaves] == ["released"] * 4
    assert not await other.store.holds("lock", "name", "exclusive", before.token)
    assert last_heard.words == []
    await foreign.leave(ENDED)
    await last_heard.until("granted")
    await last.leave(ENDED)
    assert await _left(other) == []


@pytest.mark.parametrize(
    ("terms", "end"),
    [
        ({"owner": "me"}, ENDED),
        ({"lock_delay": 5.0}, ENDED),
        ({}, RAN_OUT),
        ({"kind": "once"}, End(record=(b"n", 30.0))),
        ({"kind": "once"}, ENDED),
    ],
    ids=["owner", "lock-delay", "lost", "record", "once"],
)
async def test_nothing_is_passed_on_if_more_than_the_key_has_a_say(
    one_node: EtcdCluster,
    make_direct: MakeDirect,
    monkeypatch: pytest.MonkeyPatch,
    terms: dict[str, Any],
    end: End,
) -> None:
    direct = await make_direct(one_node)
    kind = terms.get("kind", "lock")
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0, **terms)
    await _acquire(holder, heard)
    waiter, waiter_heard = await _wait(direct, kind=kind)
    gate = Gate(direct, monkeypatch)
    leave = asyncio.create_task(holder.leave(end))
    await until(lambda: gate.kept)
    assert waiter_heard.words == []
    gate.open.set()
    await leave
    await waiter_heard.until("recorded" if end.record else "granted")
    await waiter.leave(ENDED)
    await direct.store.forget("name")


async def test_nothing_is_passed_on_while_a_body_closes_the_name(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    holder.terms = replace(holder.terms, hold_at_least=30.0)
    await _acquire(holder, heard)
    waiter, waiter_heard = await _wait(direct)
    await holder.leave(ENDED)
    await asyncio.sleep(0.1)
    assert waiter_heard.words == []
    await direct.store.break_lock("name")
    await waiter_heard.until("granted")
    await waiter.leave(ENDED)


async def test_owner_that_asks_in_another_mode_gets_in_beside_its_request_and_nobody_before_it(
    one_node: EtcdCluster, make_direct: MakeDirect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of its own task joins by the key that is about to be deleted, so the name is its own."""
    direct = await make_direct(one_node)
    holder, heard = direct.place(ttl=20.0, waiter_ttl=20.0)
    await _acquire(holder, heard)
    waiter, waiter_heard = await _wait(direct)
    mate, _ = direct.place(mode="shared", ttl=20.0, waiter_ttl=20.0)
    mate.owner = holder.owner  # as the core names it for a task that holds
    gate = Gate(direct, monkeypatch)
    joining = asyncio.create_task(mate.acquire(wait=True))
    await asyncio.sleep(0)
    leave = asyncio.create_task(holder.leave(ENDED))
    await until(lambda: gate.kept)
    assert waiter_heard.words == []
    gate.open.set()
    answer = await joining
    await leave
    if isinstance(answer, Granted):
        assert waiter_heard.words == []
    await mate.leave(ENDED)
    await waiter_heard.until("granted")
    await waiter.leave(ENDED)
    assert await _left(direct) == []


async def test_who_inspects_sees_the_one_that_holds(one_node: EtcdCluster) -> None:
    async with aiodlock.Client(one_node.url) as client:
        lock = client.lock("seen")
        seen: list[int] = []

        async def turn() -> None:
            async with lock as lease:
                info = await lock.inspect()
                assert [holder.token for holder in info.holders] == [lease.token]
                assert await client.check_sequencer(lease.sequencer)
                seen.append(lease.token)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(turn())
        assert seen == sorted(seen)
        assert len(seen) == 8


class Link:
    """Answers whatever it is asked. Mutable state: ``calls``."""

    described = "fake"

    def __init__(self) -> None:
        self.calls: list[m.TxnRequest] = []

    async def call(self, method: Any, request: m.TxnRequest) -> m.TxnResponse:
        self.calls.append(request)
        inner = [step for step in request.success if step.request_txn is not None]
        answers = [m.ResponseOp(response_txn=m.TxnResponse(succeeded=True)) for _ in inner]
        return m.TxnResponse(m.Header(), True, answers)


async def test_leaves_of_one_name_go_out_together_and_others_of_a_name_alone() -> None:
    link = Link()
    tasks: set[asyncio.Task[None]] = set()

    def start(call: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        tasks.add(asyncio.create_task(call(*args)))
        return True

    batches = Batches(link, start)  # type: ignore[arg-type]
    request = m.TxnRequest()
    own = [
        batches.transact(b"a", request, own=f"{number}", gather=number < 7) for number in range(8)
    ]
    await asyncio.gather(*own, batches.transact(b"a", request), batches.transact(b"a", request))
    sizes = [max(1, len(call.success)) for call in link.calls]
    assert sizes == [8, 1, 1]
    link.calls.clear()
    await batches.transact(b"a", request, own="0", gather=True)  # nothing else comes
    assert len(link.calls) == 1
    link.calls.clear()
    # A move and a leave of one request see what the other one does.
    await asyncio.gather(*(batches.transact(b"a", request, own=id) for id in "0102"))
    assert sorted(max(1, len(call.success)) for call in link.calls) == [2, 2]
