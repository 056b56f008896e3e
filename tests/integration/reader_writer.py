"""A worker process of test_mixed_load: readers and writers of one name, until told to stop, or killed.

What it did it notes in a file of its own, which outlives it: append-only, a line per event, each with the
moment at which the lease was still held.

Lines on its standard input: ``go``, then ``die holding`` (kill yourself in the next body) or ``stop``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import aiodlock
from aiodlock import Lease, Lock, LockLost

from ..scenes import queued_for

NAME = "mixed"
TTL = 0.5
TICK = 0.01


class Worker:
    """The tasks of one process."""

    def __init__(self, seed: int, readers: float, log: Path) -> None:
        self._rng = random.Random(seed)
        self._readers = readers
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._stop = asyncio.Event()
        self._dies = False
        self.lost = 0

    async def run(self, url: str, tasks: int) -> None:
        async with aiodlock.Client(url, ttl=TTL, waiter_ttl=TTL) as client:
            print("ready", flush=True)
            assert await asyncio.to_thread(sys.stdin.readline) == "go\n"
            watching = asyncio.create_task(self._watch())
            async with asyncio.TaskGroup() as group:
                for _ in range(tasks):
                    group.create_task(self._contend(client))
                while not self._stop.is_set():
                    match await asyncio.to_thread(sys.stdin.readline):
                        case "die holding\n":
                            self._dies = True
                        case _:
                            self._stop.set()
            watching.cancel()
            session = client._core.session
            assert session is not None
            async with asyncio.timeout(30):
                while session.requests:
                    await asyncio.sleep(0.01)
            left = {"places": len(session.requests), "beats": len(session.deadlines)}
        print(json.dumps({**left, "lost": self.lost}), flush=True)

    async def _watch(self) -> None:
        """Note when the machine did not let this process run; what it computed itself is no excuse."""
        while True:
            began, computed, queued = time.time(), time.process_time(), queued_for(os.getpid())
            await asyncio.sleep(TICK)
            ended = time.time()
            stalled = ended - began - (time.process_time() - computed) - TICK
            # Late ticks miss what is shorter than a tick.
            stalled = max(stalled, queued_for(os.getpid()) - queued)
            if stalled > TICK / 10:
                os.write(self._log, f"stalled {stalled} {ended}\n".encode())

    async def _contend(self, client: aiodlock.Client) -> None:
        pair, rng = client.rwlock(NAME), self._rng
        while not self._stop.is_set():
            lock = pair.read if rng.random() < self._readers else pair.write
            try:
                match rng.randrange(6):
                    case 0:
                        await self._cancelled(lock)
                    case 1:
                        async with asyncio.timeout(rng.random() * 0.1):
                            await self._take_turn(lock)
                    case _:
                        await self._take_turn(lock)
            except TimeoutError:
                pass
            except LockLost:  # this machine was too busy to extend in time
                self.lost += 1

    async def _cancelled(self, lock: Lock) -> None:
        task = asyncio.create_task(self._take_turn(lock))
        await asyncio.wait({task}, timeout=self._rng.random() * 0.1)
        task.cancel()
        if self._rng.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _take_turn(self, lock: Lock) -> None:
        async with lock as lease:
            self._note(lease)
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(self._rng.random() * 0.004)
                self._note(lease)

    def _note(self, lease: Lease) -> None:
        """Note a moment at which the lease was held for certain: it still is, after that moment."""
        moment = time.time()
        if lease.held:
            os.write(self._log, f"{lease.token} {lease.mode} {lease.owner} {moment}\n".encode())


if __name__ == "__main__":
    url, seed, readers, tasks, log = sys.argv[1:]
    asyncio.run(Worker(int(seed), float(readers), Path(log)).run(url, int(tasks)))
