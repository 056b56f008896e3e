"""A worker process of test_postgres_processes: its tasks take turns on one name until it is killed.

What it holds it proves to a SQLite file, which knows who is inside, and has each grant with its request.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import sys

from aiodlock import BackendUnavailable, Client, Lease, LockLost

NAME = "turn"
TTL = 2.0
TASKS = 5
SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE inside (pid INTEGER, token INTEGER);
CREATE TABLE grants (token INTEGER, request TEXT);
CREATE TABLE violations (what TEXT);
"""


class Witness:
    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous=OFF")

    def enter(self, lease: Lease) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for pid, token in self._db.execute("SELECT pid, token FROM inside").fetchall():
            if is_alive(pid) or token >= lease.token:
                what = f"{lease!r} beside {token} of {pid}"
                self._db.execute("INSERT INTO violations VALUES (?)", (what,))
        self._db.execute("DELETE FROM inside")
        self._db.execute("INSERT INTO inside VALUES (?, ?)", (os.getpid(), lease.token))
        self._db.execute("INSERT INTO grants VALUES (?, ?)", (lease.token, lease.owner))
        self._db.execute("COMMIT")

    def leave(self, lease: Lease) -> None:
        self._db.execute("DELETE FROM inside WHERE token = ?", (lease.token,))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def take_turns(client: Client, witness: Witness, rng: random.Random) -> None:
    lock = client.lock(NAME)
    while True:
        try:
            async with lock as lease:
                witness.enter(lease)
                try:
                    if rng.random() < 0.2:
                        await asyncio.sleep(rng.random() * 0.002)
                finally:
                    witness.leave(lease)
        except (LockLost, BackendUnavailable):
            pass


async def main(url: str, database: str, seed: int) -> None:
    witness, rng = Witness(database), random.Random(seed)
    async with Client(url, ttl=TTL, waiter_ttl=TTL) as client, asyncio.TaskGroup() as tasks:
        for _ in range(TASKS):
            tasks.create_task(take_turns(client, witness, rng))
        print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
