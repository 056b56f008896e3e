"""A process of clients of a quorum that take turns: ``quorum_worker STORE CLIENTS TTL DELAY BODY URL...``.

It works until its standard input ends, and prints what it went through and how long each turn was waited
for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiodlock
from aiodlock._clock import now

from ..scenes import is_held
from .witness import Witness


class Taker:
    """What the clients of this process do, and what became of it."""

    def __init__(self, witness: Witness, body: float) -> None:
        self._witness = witness
        self._body = body
        self.told: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []

    async def work(self, lock: aiodlock.Lock, who: str) -> None:
        """Take turns for ever."""
        while True:
            asked = now()
            try:
                async with lock as lease:
                    self.waits.append((asked, now()))
                    await self._hold(lease, who)
                self.told["turns"] += 1
            except aiodlock.LockLost as lost:
                self.told[lost.reason] += 1
            except aiodlock.BackendUnavailable:
                self.told["unavailable"] += 1

    async def _hold(self, lease: aiodlock.Lease, who: str) -> None:
        """Write to the store at the beginning and at the end, and record what was certain between."""
        began = now()
        if not is_held(lease):
            return
        ended = began
        try:
            for pause in (self._body, 0.0):
                accepted = self._witness.write(lease.token)
                moment = now()
                # Held after that moment: then at that moment too.
                if not is_held(lease):
                    return
                if not accepted:
                    self._witness.violated(f"{who} holds with token {lease.token}, and is refused")
                ended = moment
                await asyncio.sleep(pause)
        finally:
            self._witness.record(began, ended, lease.token, who)


async def main(
    store: Path, clients: int, ttl: float, delay: float, body: float, urls: list[str]
) -> None:
    taker = Taker(Witness(store), body)
    async with AsyncExitStack() as stack:
        locks = []
        for _ in range(clients):
            client = aiodlock.Client(urls, ttl=ttl, waiter_ttl=ttl, restart_delay=delay)
            locks.append((await stack.enter_async_context(client)).lock("turn"))
        print("ready", flush=True)
        working = [
            asyncio.create_task(taker.work(lock, f"{os.getpid()}-{number}"))
            for number, lock in enumerate(locks)
        ]
        asked_to_stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait([*working, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()  # what ended it is an error
            task.cancel()
        await asyncio.wait(working)
    print(json.dumps({"told": taker.told, "waits": taker.waits}), flush=True)


if __name__ == "__main__":
    store, clients, ttl, delay, body, *urls = sys.argv[1:]
    asyncio.run(main(Path(store), int(clients), float(ttl), float(delay), float(body), urls))
