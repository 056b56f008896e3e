"""Five independent servers, and processes whose clients contend for one name on them."""

from __future__ import annotations

import asyncio
import json
import random
from asyncio.subprocess import PIPE, Process
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from aiodlock._clock import now
from aiodlock._embedded import EmbeddedServer

from .. import forked
from ..proxy import FaultProxy
from ..scenes import stalls
from .witness import create

_ROOT = Path(__file__).parents[2]
_NOTE_EVERY = 0.05


class Wait(NamedTuple):
    """From when to when a turn was waited for."""

    asked: float
    entered: float

    @property
    def length(self) -> float:
        return self.entered - self.asked


@dataclass
class Told:
    """What the processes told in the end: how turns went, and from when to when each was waited for."""

    counts: Counter[str] = field(default_factory=Counter)
    waits: list[Wait] = field(default_factory=list)
    #: For how long the machine had not let us run, by moment.
    stalls: list[tuple[float, float]] = field(default_factory=list)

    def within(self, began: float, ended: float) -> list[Wait]:
        """Return the waits of those who came and entered within a window."""
        return [wait for wait in self.waits if began <= wait.asked and wait.entered <= ended]

    def across(self, moment: float) -> list[Wait]:
        """Return the waits of those who had come before a moment and entered after it."""
        return [wait for wait in self.waits if wait.asked < moment < wait.entered]

    def passed_by(self, wait: Wait) -> int:
        """Return how many others entered while one waited."""
        return sum(wait.asked < other.entered < wait.entered for other in self.waits)

    def stalled(self, wait: Wait) -> float:
        """Return for how long the machine did not let us run while one waited."""
        before = bisect_right(self.stalls, (wait.asked, 0.0)) - 1
        after = min(bisect_right(self.stalls, (wait.entered, 0.0)), len(self.stalls) - 1)
        return max(0.0, self.stalls[after][1] - self.stalls[max(before, 0)][1])

    def median_and_p99(self, waits: Sequence[Wait]) -> tuple[float, float]:
        """Return how long half of them waited, and 99 of 100.

        What the machine stalled more while one waited than it did while others waited is taken off.
        """
        stalled = {wait: self.stalled(wait) for wait in waits}
        usual = median(stalled.values())
        lengths = sorted(wait.length - max(0.0, stalled[wait] - usual) for wait in waits)
        return median(wait.length for wait in waits), lengths[len(lengths) * 99 // 100]


@asynccontextmanager
async def contending(
    urls: Sequence[str],
    store: Path,
    *,
    processes: int = 4,
    clients: int = 4,
    ttl: float,
    restart_delay: float,
    body: float = 0.005,
) -> AsyncIterator[Told]:
    """Have processes of clients take turns for as long as the block lasts."""
    create(store)
    told = Told()
    arguments = [str(store), str(clients), str(ttl), str(restart_delay), str(body), *urls]
    workers: list[Process] = []
    try:
        for _ in range(processes):
            command = ("tests.topology.quorum_worker", *arguments)
            # What a worker tells of its turns is one long line.
            workers.append(
                await forked.start(*command, stdin=PIPE, stdout=PIPE, cwd=_ROOT, limit=2**26)
            )
        for worker in workers:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"ready\n"
        async with stalls() as stalled:
            watching = asyncio.create_task(_note(told, stalled))
            try:
                yield told
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        for worker in workers:
            output, _ = await worker.communicate(b"stop\n")
            assert worker.returncode == 0
            report = json.loads(output)
            told.counts.update(report["told"])
            told.waits += [Wait(asked, entered) for asked, entered in report["waits"]]
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def _note(told: Told, stalled: Callable[[], float]) -> None:
    """Note how much the machine has stalled, again and again."""
    while True:
        told.stalls.append((now(), stalled()))
        await asyncio.sleep(_NOTE_EVERY)


class Faults:
    """Takes nodes away, and gives them back. ``proxies`` are in front of those that can be cut off."""

    def __init__(self, nodes: Sequence[EmbeddedServer], proxies: Sequence[FaultProxy]) -> None:
        self._nodes = nodes
        self._proxies = proxies

    async def take(self, how: str, number: int = 2) -> list[int]:
        """Lose some of the nodes; return which."""
        lost = random.sample(range(len(self._nodes)), number)
        for node in lost:
            if how == "kill":
                await asyncio.to_thread(self._nodes[node].kill)
            elif how == "stop":
                self._nodes[node].pause()
            else:
                await self._proxies[node].refuse()
                self._proxies[node].cut()
        return lost

    async def give_back(self, how: str, lost: list[int]) -> None:
        """Undo ``take``: who was killed comes back empty."""
        for node in lost:
            if how == "kill":
                await asyncio.to_thread(self._nodes[node].start)
            elif how == "stop":
                self._nodes[node].resume()
            else:
                await self._proxies[node].accept()
