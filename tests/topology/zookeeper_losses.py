"""Do servers of ZooKeeper keep what they have committed when their leader changes?

    python -m tests.topology.zookeeper_losses --minutes 2

Sessions make and delete nodes as requests do: with a receipt, and after a lost answer by looking. Meanwhile
a follower is left behind, the other one comes back to the leader, and the leader goes. At the end each
server is asked for nodes that the sessions know to be gone. There should be none. Servers before 3.9.4 have
some, and a name can wait behind a node that nobody counts. AIODLOCK_ZOOKEEPER_CLASSES chooses a release.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiodlock import BackendError
from aiodlock._clock import now
from aiodlock.backends.zookeeper import jute
from aiodlock.backends.zookeeper.address import read_url
from aiodlock.backends.zookeeper.session import Session

from ..zookeeper import ZooKeeperEnsemble, left, looking

T = TypeVar("T")

_QUEUE, _RECEIPTS = "/aiodlock/locks/losses", "/aiodlock/ids"
_SESSIONS, _TASKS, _TIMEOUT = 3, 6, 60.0
#: It waits so long for a leader, or for a follower, and goes on without.
_WITHIN = 8.0


class Worker:
    """Makes nodes and deletes them. Mutable state: ``gone`` (what the names of gone nodes begin with)."""

    def __init__(self, session: Session, name: str) -> None:
        self.gone: set[str] = set()
        self._session = session
        self._name = name

    async def work(self, end: float) -> None:
        """Do that until then."""
        number = 0
        while now() < end:
            number += 1
            await self._one(f"{self._name}-{number}")

    async def _one(self, request: str) -> None:
        node, receipt = f"{_QUEUE}/x:{request}::", f"{_RECEIPTS}/{request}"
        making = jute.multi(
            (
                jute.create(receipt, b"", jute.EPHEMERAL),
                jute.create(node, b"", jute.EPHEMERAL | jute.SEQUENTIAL),
            )
        )
        try:
            await self._session.wait_up(_TIMEOUT)
            paths = [str((await self._session.ask(making)).value[-1])]
        except BackendError:
            paths = await self._persist(lambda: self._look(request, receipt))
        await asyncio.sleep(random.random() * 0.02)
        for path in paths:
            await self._persist(lambda path=path: self._ask(jute.delete(path)))  # type: ignore[misc]
        await self._persist(lambda: self._ask(jute.delete(receipt)))
        self.gone.add(node)

    async def _look(self, request: str, receipt: str) -> list[str]:
        """Find what a creation without an answer has made. Behind the receipt nothing comes."""
        await self._ask(jute.create(receipt, b"", jute.EPHEMERAL))
        await self._session.ask(jute.sync("/"))
        nodes = (await self._session.ask(jute.get_children(_QUEUE))).value[0]
        return [f"{_QUEUE}/{node}" for node in nodes if node.startswith(f"x:{request}::")]

    async def _ask(self, call: jute.Call[Any]) -> None:
        try:
            await self._session.ask(call)
        except jute.ZooKeeperError as refused:
            if refused.code not in (jute.NO_NODE, jute.NODE_EXISTS):
                raise

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                await self._session.wait_up(_TIMEOUT)
                return await step()
            except BackendError:
                await asyncio.sleep(0.01)


async def _until_mode(ensemble: ZooKeeperEnsemble, mode: str, *servers: int) -> int:
    """Return which of these servers is a leader, or a follower; the first if none is in time."""
    give_up = now() + _WITHIN
    while now() < give_up:
        for number in servers:
            if await asyncio.to_thread(ensemble.servers[number].mode) == mode:
                return number
        await asyncio.sleep(0.01)
    return servers[0]


async def _change_leaders(ensemble: ZooKeeperEnsemble) -> None:
    """Leave one follower behind, let the other one come back, and take their leader away."""
    leader = await asyncio.to_thread(ensemble.leader)
    near, behind = random.sample([number for number in ensemble.servers if number != leader], 2)
    await asyncio.to_thread(ensemble.isolate, behind, reset=True)
    await asyncio.sleep(random.uniform(0.05, 0.25))
    for pair in ((leader, near), (near, leader)):
        ensemble.peers[pair].cut()
    await asyncio.sleep(0.02)
    for pair in ((leader, near), (near, leader)):
        ensemble.peers[pair].heal()
    leader = await _until_mode(ensemble, "leader", leader, near)
    (near,) = set(ensemble.servers) - {leader, behind}
    await _until_mode(ensemble, "follower", near)
    await asyncio.sleep(random.random() * 0.3)
    if random.random() < 0.5:
        await asyncio.to_thread(ensemble.servers[leader].crash)
    await asyncio.to_thread(ensemble.isolate, leader, reset=True)
    for pair in ((near, behind), (behind, near)):
        ensemble.peers[pair].heal()
    await _until_mode(ensemble, "leader", near, behind)
    await asyncio.sleep(random.random())


async def _run(minutes: float) -> None:
    counted: Counter[str] = Counter()
    with ZooKeeperEnsemble(tick=0.1, sync_limit=20, init_limit=100) as ensemble:
        async with looking(ensemble.url) as (session, _):
            await session.make_root()
            await session.ask(jute.create(_QUEUE, b"", jute.PERSISTENT))
        address = read_url(ensemble.url, "aiodlock")
        sessions = [Session(address, _TIMEOUT, f"worker-{n}") for n in range(_SESSIONS)]
        running = [asyncio.create_task(session.run()) for session in sessions]
        end = now() + minutes * 60
        workers = [
            Worker(session, f"{number}.{task}")
            for number, session in enumerate(sessions)
            for task in range(_TASKS)
        ]
        working = [asyncio.create_task(worker.work(end)) for worker in workers]
        while now() < end:
            await _change_leaders(ensemble)
            counted["changes"] += 1
            await asyncio.to_thread(ensemble.heal)
            await asyncio.sleep(random.random())
        _, unfinished = await asyncio.wait(working, timeout=_WITHIN)
        for task in unfinished:
            task.cancel()
        ended = await asyncio.gather(*working, return_exceptions=True)
        counted.update(f"worker ended by {error!r}" for error in ended if error is not None)
        counted["nodes"] = sum(len(worker.gone) for worker in workers)
        gone = set().union(*(worker.gone for worker in workers))
        for number, server in ensemble.servers.items():
            there = await left(ensemble.url_of(number), receipts=False)
            restored = sorted(node for node in there if f"{node.rpartition('::')[0]}::" in gone)
            print(f"server {number}, {server.mode()}: {len(restored)} that are gone", *restored[:9])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    print(*(f"{what}: {number}" for what, number in counted.items()), sep=", ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    asyncio.run(_run(parser.parse_args().minutes))
