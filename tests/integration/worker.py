"""A worker process of test_processes: many tasks take turns, a third of them is interrupted.

What it holds it proves to a store outside of Redis: a SQLite file that counts who is inside, refuses
tokens that do not grow, and logs every grant with its request's id.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
import time
from pathlib import Path

import aiodlock
from aiodlock import Lease, Lock

SCHEMA = """
CREATE TABLE fence (token INTEGER, writers INTEGER, readers INTEGER);
INSERT INTO fence VALUES (0, 0, 0);
CREATE TABLE grants (token INTEGER, request TEXT, mode TEXT, waited REAL);
CREATE TABLE violations (what TEXT);
"""


class Witness:
    """The token-checking store."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous=OFF")

    def enter(self, lease: Lease, waited: float) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        writers, readers, last = db.execute("SELECT writers, readers, token FROM fence").fetchone()
        if writers or (readers and lease.mode == "exclusive"):
            self._violated(f"{lease!r} overlaps {writers} writers and {readers} readers")
        if lease.mode == "exclusive" and lease.token <= last:
            self._violated(f"{lease!r} is older than {last}")
        column = "writers" if lease.mode == "exclusive" else "readers"
        db.execute(f"UPDATE fence SET {column}={column}+1, token=max(token, ?)", (lease.token,))
        row = (lease.token, lease.owner, lease.mode, waited)
        db.execute("INSERT INTO grants VALUES (?, ?, ?, ?)", row)
        db.execute("COMMIT")

    def leave(self, lease: Lease) -> None:
        column = "writers" if lease.mode == "exclusive" else "readers"
        self._db.execute(f"UPDATE fence SET {column}={column}-1")

    def _violated(self, what: str) -> None:
        self._db.execute("INSERT INTO violations VALUES (?)", (what,))


async def take_turn(lock: Lock, witness: Witness, rng: random.Random) -> None:
    asked = time.monotonic()
    async with lock as lease:
        witness.enter(lease, time.monotonic() - asked)
        try:
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.002)
        finally:
            witness.leave(lease)


async def interrupted(lock: Lock, witness: Witness, rng: random.Random) -> None:
    """Begin, and be cancelled or timed out at a random moment, or not."""
    patience = rng.random() * 0.3
    if rng.random() < 0.5:
        task = asyncio.create_task(take_turn(lock, witness, rng))
        _done, _ = await asyncio.wait({task}, timeout=patience)
        task.cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    else:
        try:
            async with asyncio.timeout(patience):
                await take_turn(lock, witness, rng)
        except TimeoutError:
            pass


async def main(url: str, database: str, seed: int, tasks: int, turns: int, readers: float) -> None:
    rng = random.Random(seed)
    witness = Witness(Path(database))
    async with aiodlock.Client(url, ttl=10) as client:
        pair = client.rwlock("turn")

        async def contender() -> None:
            for turn in range(turns):
                lock = pair.read if rng.random() < readers else pair.write
                # A third is interrupted, and made up for: so many turns are taken in the end.
                if turn % 2 == 0:
                    await interrupted(lock, witness, rng)
                await take_turn(lock, witness, rng)

        print(json.dumps({"ready": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(contender())
        session = client._core.session
        assert session is not None
        async with asyncio.timeout(30):
            while session.requests:
                await asyncio.sleep(0.01)
        left = {"places": len(session.requests), "beats": len(session.deadlines)}
    left["tasks"] = len(asyncio.all_tasks()) - 1
    print(json.dumps(left), flush=True)


if __name__ == "__main__":
    url, database, *numbers, share = sys.argv[1:]
    first, second, third = map(int, numbers)
    asyncio.run(main(url, database, first, second, third, float(share)))
