"""Transactions that go out together: how many, and how large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodlock import Client
from aiodlock._errors import BackendError, BackendUnavailable
from aiodlock._model import Granted
from aiodlock.backends.etcd import exchange as x
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd import transactions
from aiodlock.backends.etcd.batches import Batches
from aiodlock.backends.etcd.recipe import Keys
from aiodlock.backends.etcd.refusals import translate

from ..scenes import bounded
from .conftest import Direct
from .servers import EtcdCluster
from .test_passing import Link

MakeDirect = Callable[..., Coroutine[Any, Any, Direct]]


def _put(key: bytes, size: int) -> m.TxnRequest:
    put = m.PutRequest(key, b"v" * size)
    return m.TxnRequest(success=[m.RequestOp(request_put=put)])


async def test_results_of_one_turn_are_recorded_however_large_they_are_together(
    one_node: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 KiB each, thirty are more than a member takes in one message."""
    inside, go = 0, asyncio.Event()
    async with Client(one_node.url, prefix="large", ttl=10.0) as client:

        async def one(number: int) -> None:
            nonlocal inside
            async with client.once(f"job-{number}", keep=60.0) as once:
                inside += 1
                if inside == 300:
                    go.set()
                await go.wait()
                once.result = b"\xff" * 65_536

        link = client._core.session.backend._link  # type: ignore[union-attr]
        before = link.generation
        async with bounded(20.0):
            await asyncio.gather(*map(one, range(300)))
        assert link.generation == before, "the member was taken for one that has failed"


async def test_request_that_is_too_large_fails_alone_and_its_member_is_not_given_up(
    one_node: EtcdCluster, make_direct: MakeDirect
) -> None:
    direct = await make_direct(one_node)
    link = direct.store.cluster.link
    before = link.generation
    batches = Batches(link, direct.store.cluster.start)
    sizes = {b"a": 10, b"b": 3 << 20, b"c": 10, b"d": 1_700_000}
    calls = [batches.transact(key, _put(b"large/" + key, size)) for key, size in sizes.items()]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer, size in zip(answers, sizes.values(), strict=True):
        if size > 10:
            assert isinstance(answer, BackendError)
            assert not isinstance(answer, BackendUnavailable)
            assert "takes no message as large as this one" in str(answer)
            assert "--max-request-bytes" in str(answer)
        else:
            assert isinstance(answer, m.TxnResponse)
            assert answer.succeeded
    assert link.generation == before, "the member was taken for one that has failed"
    place, _ = direct.place()
    assert isinstance(await place.acquire(wait=True), Granted)


async def test_batches_are_limited_by_number_and_by_bytes() -> None:
    link = Link()
    tasks: set[asyncio.Task[None]] = set()

    def start(call: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        tasks.add(asyncio.create_task(call(*args)))
        return True

    async def sent(*sizes: int, own: bool = False) -> list[int]:
        link.calls.clear()
        batches = Batches(link, start)  # type: ignore[arg-type]
        calls = [
            batches.transact(
                b"name" if own else b"%d" % n, _put(b"key", size), own=f"{n}" if own else ""
            )
            for n, size in enumerate(sizes)
        ]
        await asyncio.gather(*calls)
        return [sum(step.request_txn is not None for step in c.success) or 1 for c in link.calls]

    for own in (False, True):
        assert await sent(*[10] * 100, own=own) == [60, 40]
        assert await sent(*[100_000] * 12, own=own) == [5, 5, 2]
        assert await sent(10, 1 << 20, 10, 10, own=own) == [1, 1, 2]


async def test_what_was_given_up_is_not_sent_again_when_its_batch_was_refused() -> None:
    """Its leave went out in a batch of its own, and was carried out before."""
    sent: list[int] = []

    class Refusing:
        described = "etcd"

        async def call(self, _: object, request: m.TxnRequest) -> m.TxnResponse:
            sent.append(len(request.success))
            if len(request.success) > 1:
                given_up.cancel()
                await asyncio.sleep(0)
                raise BackendError("one of them is too large")
            return m.TxnResponse(succeeded=True)

    tasks: set[asyncio.Task[None]] = set()

    def start(call: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        tasks.add(asyncio.create_task(call(*args)))
        return True

    batches = Batches(Refusing(), start)  # type: ignore[arg-type]
    given_up = asyncio.create_task(batches.transact(b"a", _put(b"a", 10)))
    other = asyncio.create_task(batches.transact(b"b", _put(b"b", 10)))
    assert (await other).succeeded
    await asyncio.wait(tasks)
    assert sent == [2, 1]


async def test_name_that_is_forbidden_is_refused_alone() -> None:
    """A role may allow some names, and etcd refuses a transaction for one key of it."""

    class Guarded:
        described = "etcd"

        async def call(self, _: object, request: m.TxnRequest) -> m.TxnResponse:
            if b"forbidden" in request.encode():
                denied = x.Status(x.PERMISSION_DENIED, "etcdserver: permission denied")
                raise translate(denied, "etcd", entered=True, logs_in=False) from denied
            answer = m.ResponseOp(response_txn=m.TxnResponse(succeeded=True))
            return m.TxnResponse(m.Header(), True, [answer] * len(request.success))

    tasks: set[asyncio.Task[None]] = set()

    def start(call: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        tasks.add(asyncio.create_task(call(*args)))
        return True

    batches = Batches(Guarded(), start)  # type: ignore[arg-type]
    calls = [batches.transact(key, _put(key, 10)) for key in (b"a", b"forbidden", b"z")]
    first, refused, last = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, m.TxnResponse)
    assert isinstance(refused, BackendUnavailable)
    assert isinstance(last, m.TxnResponse)


def test_size_of_a_request_is_never_told_too_small() -> None:
    keys = Keys.of("aiodlock", "lock", "\u20ac" * 170)
    leases = transactions.Leases((1 << 63) - 1, (1 << 63) - 1, (1 << 63) - 1)
    id, value = "label-12345", b"v" * 5000
    for request in (
        transactions.enter(keys, id, value, leases, read=True, once=True),
        transactions.enter_unless_changed(keys, id, value, leases, 1 << 62),
        transactions.move(keys, id, 1 << 62, value, value, leases),
        transactions.leave(keys, id, b"m", delay=True, opens=True, marker_lease=1 << 62),
        transactions.record(keys, id, b"m", value, 1 << 62, 1 << 62),
    ):
        size = len(m.RequestOp(request_txn=request).encode())
        assert size <= transactions.size(request) <= 2 * size + 1000
