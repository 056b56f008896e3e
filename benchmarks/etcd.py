"""etcd as a store, beside the locks of aetcd and etcdctl, and raw transactions, in one run.

``python -m benchmarks.etcd`` prints a table in Markdown. A server of its own is started, with fsync as
shipped. The repetitions of all contenders take turns, and the table has their medians. ``--quick`` for
a short run. Of the others, those take part that are installed. python-etcd3 is not among them: its lock
does not run with the tenacity of today.

``--hand-over`` measures something else: from the call that releases a name until another client holds it,
with 10 and with 10,000 requests in the queue, in raw transactions of the same moment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import aiodlock
from aiodlock.backends.etcd import calls as api
from aiodlock.backends.etcd import messages as m
from aiodlock.backends.etcd import transactions
from aiodlock.backends.etcd.store import EtcdBackend
from tests.etcd.servers import EtcdCluster

#: Acquire and release a name once.
Pair = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def _ours(cluster: EtcdCluster) -> AsyncIterator[Pair]:
    async with aiodlock.Client(cluster.url) as client:
        locks: dict[str, aiodlock.Lock] = {}

        async def pair(name: str) -> None:
            if name not in locks:
                locks[name] = client.lock(name)
            async with locks[name]:
                pass

        yield pair


@asynccontextmanager
async def _aetcd(cluster: EtcdCluster) -> AsyncIterator[Pair]:
    import aetcd

    client: Any = aetcd.Client(host="127.0.0.1", port=cluster.nodes[0].port)
    await client.connect()
    try:

        async def pair(name: str) -> None:
            lock = client.lock(name.encode(), ttl=30)
            while not await lock.acquire():
                pass
            await lock.release()

        yield pair
    finally:
        await client.close()


@asynccontextmanager
async def _etcdctl(cluster: EtcdCluster) -> AsyncIterator[Pair]:
    """A process for each pair."""

    async def pair(name: str) -> None:
        ran = await asyncio.create_subprocess_exec(
            "etcdctl", "--endpoints", cluster.nodes[0].endpoint, "lock", name, "true",
            env={**os.environ, "ETCDCTL_API": "3"},
        )  # fmt: skip
        assert await ran.wait() == 0

    yield pair


@asynccontextmanager
async def _store(cluster: EtcdCluster) -> AsyncIterator[EtcdBackend]:
    async with aiodlock.Client(cluster.url) as client:
        assert client._core.session is not None
        store = client._core.session.backend
        assert isinstance(store, EtcdBackend)
        yield store


@asynccontextmanager
async def _own_messages(cluster: EtcdCluster) -> AsyncIterator[Pair]:
    """The two transactions of ours, and nothing else of ours."""
    async with _store(cluster) as store:
        link, lease = store.cluster.link, await store.cluster.leases.make(60)
        leases, numbers = transactions.Leases(lease.id, lease.id), itertools.count()
        value = b'{"mode": "exclusive", "owner": "tother", "client": "other"}'

        async def pair(name: str) -> None:
            keys, id = store.cluster.keys("lock", name), f"{next(numbers):016}"
            enter = transactions.enter(keys, id, value, leases, read=True)
            leave = transactions.leave(
                keys, id, store.cluster.message_key(id), delay=False, opens=False
            )
            assert (await link.call(api.TXN, enter)).succeeded
            assert (await link.call(api.TXN, leave)).succeeded

        yield pair


@asynccontextmanager
async def _raw(cluster: EtcdCluster) -> AsyncIterator[Pair]:
    """Two transactions on the channel that ours uses."""
    async with _store(cluster) as store:
        link = store.cluster.link

        async def pair(name: str) -> None:
            key = f"raw/{name}".encode()
            put = m.RequestOp(request_put=m.PutRequest(key, b"x" * 100))
            delete = m.RequestOp(request_delete_range=m.DeleteRangeRequest(key))
            await link.call(api.TXN, m.TxnRequest(success=[put]))
            await link.call(api.TXN, m.TxnRequest(success=[delete]))

        yield pair


async def _one_task(pair: Pair, pairs: int) -> int:
    for _ in range(pairs):
        await pair("one")
    return pairs


async def _names(pair: Pair, pairs: int) -> int:
    each = max(1, pairs // 64)

    async def work(name: str) -> None:
        for _ in range(each):
            await pair(name)

    await asyncio.gather(*(work(f"name{n}") for n in range(64)))
    return 64 * each


async def _one_name(pair: Pair, pairs: int) -> int:
    each = max(1, pairs // 16)

    async def work() -> None:
        for _ in range(each):
            await pair("shared")

    await asyncio.gather(*(work() for _ in range(16)))
    return 16 * each


async def _crowd(pair: Pair, pairs: int) -> int:
    await asyncio.gather(*(pair("crowd") for _ in range(pairs)))
    return pairs


#: Case, what it does, pairs of ours, pairs of the others' (0: they are not asked).
_CASES: tuple[tuple[str, Callable[[Pair, int], Awaitable[int]], int, int], ...] = (
    ("one task", _one_task, 300, 300),
    ("64 tasks on 64 names", _names, 1920, 640),
    ("16 tasks on one name", _one_name, 480, 32),
    ("1,000 waiters of one name", _crowd, 1000, 0),
)
#: Where nobody waits for anybody.
_ALONE = (_one_task, _names)


@dataclass(frozen=True)
class _Contender:
    opened: Callable[[EtcdCluster], AbstractAsyncContextManager[Pair]]
    installed: bool = True
    is_lock: bool = True
    #: Which part of the pairs it is given.
    share: float = 1.0


_CONTENDERS = {
    "aiodlock": _Contender(_ours),
    "aetcd": _Contender(_aetcd, find_spec("aetcd") is not None),
    "etcdctl lock": _Contender(_etcdctl, shutil.which("etcdctl") is not None, share=0.1),
    "its two messages": _Contender(_own_messages, is_lock=False),
    "two transactions": _Contender(_raw, is_lock=False),
}


_HAND_OVERS = 40


async def _hand_over(cluster: EtcdCluster, waiting: int) -> None:
    name = f"queue of {waiting}"
    async with aiodlock.Client(cluster.url) as one, aiodlock.Client(cluster.url) as two:
        assert one._core.session is not None
        store = one._core.session.backend
        assert isinstance(store, EtcdBackend)
        link, keys = store.cluster.link, store.cluster.keys("lock", name)
        lease = await one.lock(name).acquire()
        tasks: list[asyncio.Task[tuple[float, aiodlock.Lease]]] = []

        async def turn(client: aiodlock.Client) -> tuple[float, aiodlock.Lease]:
            lease = await client.lock(name).acquire()
            return time.perf_counter(), lease

        for number in range(_HAND_OVERS):
            tasks.append(asyncio.create_task(turn((two, one)[number % 2])))
            while len((await store.cluster.read(keys)).requests) < number + 2:
                await asyncio.sleep(0)
        others = await store.cluster.leases.make(600)
        value = b'{"mode": "exclusive", "owner": "tother", "client": "other"}'
        for first in range(0, waiting, 100):
            some = range(first, min(first + 100, waiting))
            puts = [m.PutRequest(keys.request(f"other-{n}"), value, others.id) for n in some]
            steps = [m.RequestOp(request_put=put) for put in puts]
            await link.call(api.TXN, m.TxnRequest(success=steps))
        took, raw, written = [], [], []
        for task in tasks:
            before = (await store.cluster.read(keys)).revision
            began = time.perf_counter()
            await lease.release()
            granted, lease = await task
            took.append(granted - began)
            written.append((await store.cluster.read(keys)).revision - before)
            put = m.RequestOp(request_put=m.PutRequest(b"raw", b"x" * 100))
            began = time.perf_counter()
            await link.call(api.TXN, m.TxnRequest(success=[put]))
            raw.append(time.perf_counter() - began)
        await lease.release()
        await store.cluster.leases.revoke(others)
    commit, hand_over = statistics.median(raw), statistics.median(took)
    print(
        f"| {waiting:,} | {hand_over * 1000:.2f} ms | {commit * 1000:.2f} ms | {hand_over / commit:.2f} "
        f"| {statistics.mean(written):.2f} |",
        flush=True,
    )


async def _hand_overs(cluster: EtcdCluster) -> None:
    print("| waiting | hand-over | raw transaction | in transactions | writes for each |")
    print("|---|---|---|---|---|")
    for waiting in (10, 10_000, 10, 10_000):
        await _hand_over(cluster, waiting)


async def _measure(cluster: EtcdCluster, quick: bool) -> None:
    share = 4 if quick else 1
    rounds = 3 if quick else 5
    contenders = {who: one for who, one in _CONTENDERS.items() if one.installed}
    figures: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for who, contender in contenders.items():
            async with contender.opened(cluster) as pair:
                await pair("warm")
                for case, run, ours, theirs in _CASES:
                    other = contender.is_lock and who != "aiodlock"
                    pairs = int((theirs if other else ours) * contender.share) // share
                    if not pairs or not (contender.is_lock or run in _ALONE):
                        continue
                    began = time.perf_counter()
                    done = await run(pair, pairs)
                    figures.setdefault((case, who), []).append(done / (time.perf_counter() - began))
    print(f"| pairs per second | {' | '.join(contenders)} |")
    print(f"|---|{'---|' * len(contenders)}")
    for case, *_ in _CASES:
        found = [figures.get((case, who)) for who in contenders]
        cells = [f"{statistics.median(one):,.0f}" if one else "" for one in found]
        print(f"| {case} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.etcd", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the pairs, three rounds")
    parser.add_argument("--hand-over", action="store_true", help="a hand-over, in raw transactions")
    chosen = parser.parse_args()
    with EtcdCluster() as cluster:
        asyncio.run(_hand_overs(cluster) if chosen.hand_over else _measure(cluster, chosen.quick))


if __name__ == "__main__":
    main()
