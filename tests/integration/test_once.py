"""Once, with workers that are killed and stopped: effects are seen by a witness outside of the store."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

import aiodlock

from ..conftest import MakeClient
from ..scenes import until
from ..servers import Store

KEYS, WORKERS = 60, 4

#: Goes through the keys; what it does and what its exits have confirmed, it writes to a file of its own.
WORKER = r"""
import asyncio, random, sys
import aiodlock

async def main(url, keys, seed, witness):
    order = list(range(keys))
    random.Random(seed).shuffle(order)
    with open(witness, "a", buffering=1) as seen:
        async with aiodlock.Client(url, ttl=1.0, waiter_ttl=1.0) as client:
            for key in order:
                try:
                    async with client.once(f"key:{key}", keep=600) as once:
                        if once.first:
                            seen.write(f"effect {key} {once.lease.token}\n")
                            await asyncio.sleep(random.random() * 0.02)
                            once.result = str(once.lease.token)
                    seen.write(f"confirmed {key} {once.result}\n")
                except aiodlock.LockLost:
                    seen.write(f"lost {key} -\n")

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
"""


def told(path: Path) -> list[tuple[str, str, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(word, key, value) for word, key, value in map(str.split, lines)]


@pytest.mark.stores("valkey9")
async def test_each_key_has_one_success_though_workers_are_killed_and_stopped(
    store: Store, make_client: MakeClient, tmp_path: Path
) -> None:
    chance = random.Random(7)
    witnesses: list[Path] = []

    async def start(number: int) -> asyncio.subprocess.Process:
        witness = tmp_path / f"witness-{number}"
        witnesses.append(witness)
        words = (store.url, str(KEYS), str(number), str(witness))
        return await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, *words)

    doomed = [await start(number) for number in range(WORKERS)]
    await until(lambda: any(told(path) for path in witnesses), within=60)
    for process in doomed[:-1]:
        await asyncio.sleep(chance.random() * 0.1)
        if chance.random() < 0.5:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)
        process.kill()
    # Others go on with what the dead have left.
    more = [await start(WORKERS + number) for number in range(2)]
    for process in (*doomed, *more):
        await asyncio.wait_for(process.wait(), 90)
    lines = [line for path in witnesses for line in told(path)]
    results: dict[str, set[str]] = {}
    for word, key, value in lines:
        if word == "confirmed":
            results.setdefault(key, set()).add(value)
    assert {key: len(values) for key, values in results.items()} == {
        str(key): 1 for key in range(KEYS)
    }
    client = await make_client()
    for key, (result,) in ((key, tuple(values)) for key, values in results.items()):
        async with client.once(f"key:{key}", keep=600) as once:
            assert (once.first, once.result) == (False, result), (
                "what an exit confirmed is on record"
            )
    effects = Counter(key for word, key, _ in lines if word == "effect")
    assert set(effects) == set(results)
    # Above one only where a worker died between the effect and its record.
    assert sum(effects.values()) - KEYS <= WORKERS - 1


@pytest.mark.stores("memory")
async def test_each_key_has_one_success_though_tasks_are_cancelled(
    make_client: MakeClient,
) -> None:
    clients = [await make_client(ttl=1.0), await make_client(ttl=1.0)]
    chance = random.Random(7)
    effects: Counter[int] = Counter()
    results: dict[int, set[object]] = {}

    async def work(client: aiodlock.Client) -> None:
        for key in chance.sample(range(KEYS), KEYS):
            async with client.once(f"key:{key}", keep=600) as once:
                if once.first:
                    assert once.lease is not None
                    await asyncio.sleep(chance.random() * 0.005)
                    effects[key] += 1
                    once.result = str(once.lease.token)
            results.setdefault(key, set()).add(once.result)

    tasks = [asyncio.create_task(work(client)) for client in clients * 4]
    for task in tasks[2:]:
        await asyncio.sleep(chance.random() * 0.02)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {key: len(values) for key, values in results.items()} == dict.fromkeys(range(KEYS), 1)
    assert sum(effects.values()) - KEYS <= len(tasks) - 2
