"""A process of tasks that take turns while servers fail: ``worker URL STORE TASKS MIN_REPLICAS TTL``.

It works until its standard input ends, and prints what it went through.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import aiodlock
from aiodlock._clock import now

from ..scenes import is_held
from .witness import Witness

#: How long bodies last, in seconds: most of them, and those that a failover is likely to meet.
_SHORT, _LONG = 0.02, 4.0
_LONG_SHARE = 0.05
_STEP = 0.005


async def take_turn(lock: aiodlock.Lock, witness: Witness, who: str) -> None:
    """Hold the lock, write to the store again and again, and record for how long it was certain."""
    lasting = _LONG if random.random() < _LONG_SHARE else _SHORT
    async with lock as lease:
        began = ended = now()
        if not is_held(lease):
            return
        try:
            while ended - began < lasting:
                accepted = witness.write(lease.token)
                moment = now()
                # Held after that moment: then at that moment too.
                if not is_held(lease):
                    return
                if not accepted:
                    witness.violated(f"{who} holds with token {lease.token}, and is refused")
                ended = moment
                await asyncio.sleep(_STEP)
        finally:
            witness.record(began, ended, lease.token, who)


async def work(lock: aiodlock.Lock, witness: Witness, who: str, told: Counter[str]) -> None:
    while True:
        try:
            await take_turn(lock, witness, who)
            told["turns"] += 1
        except aiodlock.LockLost as lost:
            told[lost.reason] += 1
        except aiodlock.BackendUnavailable:
            told["unavailable"] += 1


async def main(url: str, store: Path, tasks: int, min_replicas: int, ttl: float) -> None:
    witness = Witness(store)
    told: Counter[str] = Counter()
    client = aiodlock.Client(
        url, ttl=ttl, waiter_ttl=ttl, min_replicas=min_replicas, unavailable_after=30.0
    )
    async with client:
        print("ready", flush=True)
        working = [
            asyncio.create_task(work(client.lock("turn"), witness, f"{os.getpid()}-{i}", told))
            for i in range(tasks)
        ]
        asked_to_stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait([*working, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()  # what ended it is an error
            task.cancel()
        await asyncio.wait(working)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    url, store, *numbers, ttl = sys.argv[1:]
    asyncio.run(main(url, Path(store), int(numbers[0]), int(numbers[1]), float(ttl)))
