"""The fake members answer as real ones do: the same random calls on both, equal answers and events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiodlock._clock
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import connection as real_connection
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd.exchange import CallFailed, Status

from ...etcd.servers import EtcdCluster, find_etcd
from ..world import Process, World
from . import etcd_cluster
from .etcd_cluster import Cluster
from .wire import Wire

_CALLS = 200
_KEYS = (b"a/1", b"a/2", b"a/3", b"b/1", b"b/2")
_RANGES = ((b"a/", b"a0"), (b"b/", b"b0"), (b"a/1", b""), (b"b/2", b""))

_Ask = tuple[api.Method[Any, Any], Callable[[int], m.Message]]


def _calls(rng: random.Random, lease: int) -> list[_Ask]:
    """Draw what is asked; each call is made of the revision that the store had at the beginning."""
    leases = [lease + number for number in range(3)]

    def compare(base: int) -> m.Compare:
        key, end = rng.choice([*((key, b"") for key in _KEYS), *_RANGES])
        target = rng.choice((m.VERSION, m.CREATE, m.MOD, m.LEASE))
        number = rng.choice((0, 0, 1, 2))
        if target in (m.CREATE, m.MOD) and number:
            number += base + rng.randint(0, 30)
        if target == m.LEASE and number:
            number = rng.choice(leases)
        found = m.Compare(rng.choice((m.EQUAL, m.GREATER, m.LESS)), target, key, range_end=end)
        name = {m.VERSION: "version", m.CREATE: "create_revision", m.MOD: "mod_revision"}
        setattr(found, name.get(target, "lease"), number)
        return found

    def step(base: int, depth: int) -> m.RequestOp:
        kind = rng.random()
        if kind < 0.4:
            lease = rng.choice((0, 0, *leases))
            put = m.PutRequest(rng.choice(_KEYS), rng.choice((b"x", b"yy")), lease)
            return m.RequestOp(request_put=put)
        if kind < 0.6:
            return m.RequestOp(request_delete_range=m.DeleteRangeRequest(*rng.choice(_RANGES)))
        if kind < 0.9 or depth > 1:
            return m.RequestOp(request_range=m.RangeRequest(*rng.choice(_RANGES)))
        return m.RequestOp(request_txn=txn(base, depth + 1))

    def txn(base: int, depth: int = 0) -> m.TxnRequest:
        return m.TxnRequest(
            [compare(base) for _ in range(rng.randint(0, 2))],
            [step(base, depth) for _ in range(rng.randint(0, 3))],
            [step(base, depth) for _ in range(rng.randint(0, 2))],
        )

    def some_call() -> _Ask:
        kind = rng.random()
        if kind < 0.7:
            seed = rng.random()

            def make(base: int) -> m.Message:
                rng.seed(seed)  # the same one, whatever the revisions are
                return txn(base)

            return api.TXN, make
        if kind < 0.8:
            asked = m.RangeRequest(*rng.choice(_RANGES), keys_only=rng.random() < 0.3)
            asked.count_only = rng.random() < 0.2
            asked.limit = rng.choice((0, 1))
            return api.RANGE, lambda _: asked
        if kind < 0.9:
            granted = m.LeaseGrantRequest(100, rng.choice(leases))
            return api.LEASE_GRANT, lambda _: granted
        revoked = m.LeaseRevokeRequest(rng.choice(leases))
        return api.LEASE_REVOKE, lambda _: revoked

    return [some_call() for _ in range(_CALLS)]


def _plain(value: Any, base: int) -> Any:
    """Return what two clusters can agree on: revisions count from the first one, members have no ids."""
    if isinstance(value, m.Header):
        return value.revision - base if value.revision else None
    if isinstance(value, m.KeyValue):
        created = value.create_revision - base if value.create_revision else 0
        written = value.mod_revision - base
        return value.key, created, written, value.version, value.value, value.lease
    if isinstance(value, m.Message):
        names = [name for name in type(value).__dataclass_fields__ if name != "header"]  # type: ignore[attr-defined]
        return tuple(_plain(getattr(value, name), base) for name in names)
    if isinstance(value, list):
        return [_plain(one, base) for one in value]
    return value


async def _ask(connection: Any, method: api.Method[Any, Any], request: m.Message) -> Any:
    answers: list[bytes] = []
    call = connection.begin(method.path, answers.append, request.encode(), within=10.0)
    try:
        await call.ended
    except Status as refused:
        return refused.code, str(refused)
    return method.answer.decode(answers[0])


async def _play(connection: Any, seed: int) -> list[Any]:
    """Make the calls, each after the answer to the one before; return answers and events."""
    rng = random.Random(seed)
    heard: list[Any] = []
    told: list[m.WatchResponse] = []
    first = await _ask(connection, api.RANGE, m.RangeRequest(b"a/"))
    base = first.header.revision
    watching = connection.begin(
        api.WATCH.path, lambda data: told.append(m.WatchResponse.decode(data))
    )
    for number, (key, end) in enumerate(_RANGES, 1):
        create = m.WatchCreateRequest(key, end, base + 1, watch_id=number)
        connection.send(watching, m.WatchRequest(create_request=create).encode())
    for method, make in _calls(rng, 7_000 + 10 * seed):
        before = rng.getstate()
        answer = await _ask(connection, method, make(base))
        rng.setstate(before)
        if isinstance(answer, tuple):
            heard.append((method.path, answer))
        else:
            heard.append((method.path, _plain(answer.header, base), _plain(answer, base)))
    last = m.TxnRequest(success=[m.RequestOp(request_put=m.PutRequest(b"b/2", b"last"))])
    await _ask(connection, api.TXN, last)
    while not {2, 4} <= {
        one.watch_id for one in told for e in one.events if e.kv and e.kv.value == b"last"
    }:
        await asyncio.sleep(0.01)
    for number in range(1, len(_RANGES) + 1):
        its = [event for one in told if one.watch_id == number for event in one.events]
        if number in (2, 4):
            heard.append((number, [_plain(event, base) for event in its]))
    connection.cancel(watching)
    # The next seed finds nothing.
    gone = m.TxnRequest(
        success=[m.RequestOp(request_delete_range=m.DeleteRangeRequest(b"a", b"c"))]
    )
    await _ask(connection, api.TXN, gone)
    return heard


def _on_the_fake(monkeypatch: pytest.MonkeyPatch, members: int, seed: int) -> list[Any]:
    world = World(1)
    wire = Wire(world)
    Cluster(world, wire, members, 0.2)
    process = Process(world, "p")
    process.loop.wire = wire
    monkeypatch.setattr(aiodlock._clock, "_gettime", lambda _: (world.current or process).boot())
    heard: list[list[Any]] = []

    async def play() -> None:
        connection = await etcd_cluster.connect("10.0.0.1", 2379, None)
        heard.append(await _play(connection, seed))
        connection.close(CallFailed("done"))

    task = process.start(play())
    assert world.run_until(1e4, task.done), "the fake did not answer"
    task.result()
    process.bury()
    return heard[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    if find_etcd() is None:
        pytest.skip("no etcd here")
    one = EtcdCluster(1)
    one.start()
    yield one
    one.stop()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("members", [1, 3])
def test_fake_answers_as_a_real_member_does(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch, seed: int, members: int
) -> None:
    seed += 100 * members

    async def on_the_real_one() -> list[Any]:
        connection = await real_connection.connect("127.0.0.1", cluster.nodes[0].port, None)
        try:
            return await _play(connection, seed)
        finally:
            connection.close(CallFailed("done"))
            await connection.until_closed(5.0)

    real = asyncio.run(on_the_real_one())
    with monkeypatch.context() as patched:
        fake = _on_the_fake(patched, members, seed)
    for number, (one, other) in enumerate(zip(real, fake, strict=True)):
        assert one == other, f"call {number}: the member {one}, the fake {other}"
