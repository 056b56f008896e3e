"""Five independent servers, and processes whose clients contend for one name on them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiodlock._embedded import EmbeddedServer

from ..proxy import FaultProxy
from .witness import create

_ROOT = Path(__file__).parents[2]


@dataclass
class Told:
    """What the processes told in the end: how turns went, and from when to when each was waited for."""

    counts: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def waited(self, began: float, ended: float) -> list[float]:
        """Return, sorted, how long those waited who came and entered within a window."""
        return sorted(
            entered - asked for asked, entered in self.waits if began <= asked and entered <= ended
        )

    def waited_across(self, moment: float) -> list[float]:
        """Return, sorted, how long those waited who had come before a moment and entered after it."""
        return sorted(entered - asked for asked, entered in self.waits if asked < moment < entered)


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
            command = (sys.executable, "-m", "tests.topology.quorum_worker", *arguments)
            # What a worker tells of its turns is one long line.
            workers.append(
                await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, cwd=_ROOT, limit=2**26
                )
            )
        for worker in workers:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"ready\n"
        yield told
        for worker in workers:
            output, _ = await worker.communicate(b"stop\n")
            assert worker.returncode == 0
            report = json.loads(output)
            told.counts.update(report["told"])
            told.waits += [(asked, entered) for asked, entered in report["waits"]]
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


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
