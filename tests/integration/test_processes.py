"""Real processes take turns on a real server, and a third of all attempts is interrupted.

``AIODLOCK_TURNS`` sets how many turns each task takes (default 12: 8 processes of 25 tasks make 2,400
acquisitions, beside 1,200 interrupted attempts).
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aiodlock.backends.redis.scripts import ACQUIRE
from tests import forked
from tests.integration.worker import SCHEMA
from tests.servers import Store

TURNS = int(os.environ.get("AIODLOCK_TURNS", "12"))


@asynccontextmanager
async def arrivals(store: Store) -> AsyncIterator[Callable[[], list[tuple[str, str]]]]:
    """Note id and mode of every request in the order in which it reached the server (MONITOR)."""
    reader, writer = await asyncio.open_unix_connection(urlsplit(store.url).path, limit=2**20)
    seen: dict[str, str] = {}
    sha = f'"EVALSHA" "{ACQUIRE.sha.decode()}"'.encode()

    async def listen() -> None:
        async for line in reader:
            if sha in line:
                words = line.decode().split('" "')
                seen.setdefault(words[8], words[9])  # EVALSHA sha 5, five keys, id, mode

    writer.write(b"MONITOR\r\n")
    await reader.readline()
    listening = asyncio.create_task(listen())
    try:
        yield lambda: list(seen.items())
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        writer.close()


async def contend(
    store: Store, database: Path, *, processes: int, tasks: int, turns: int, readers: float
) -> list[tuple[str, str]]:
    """Run the workers to their end; return the order of arrival."""
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(SCHEMA)
    # So that the server knows the scripts and each request is one EVALSHA.
    raw = await store.raw()
    await raw.script_load(ACQUIRE.source.decode())
    command = ("tests.integration.worker", store.url, str(database))
    async with arrivals(store) as seen:
        running = [
            await forked.start(
                *command,
                *(str(seed), str(tasks), str(turns), str(readers)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for seed in range(processes)
        ]
        try:
            for process in running:
                assert process.stdout is not None
                assert json.loads(await process.stdout.readline()) == {"ready": True}
            results = await asyncio.gather(*(process.communicate(b"go\n") for process in running))
        finally:
            for process in running:
                if process.returncode is None:
                    process.kill()
                await process.wait()
        for process, (out, _) in zip(running, results, strict=True):
            assert process.returncode == 0
            assert json.loads(out) == {"places": 0, "beats": 0, "tasks": 0}
        return seen()


def check(database: Path, arrived: list[tuple[str, str]]) -> list[tuple[int, str, str]]:
    with closing(sqlite3.connect(database)) as db:
        violations = [row[0] for row in db.execute("SELECT what FROM violations")]
        inside = db.execute("SELECT writers, readers FROM fence").fetchone()
        grants: list[tuple[int, str, str]] = list(
            db.execute("SELECT token, request, mode FROM grants ORDER BY token")
        )
    assert violations == []
    assert inside == (0, 0)
    # Tokens are given in the order of grants, so sorted by token the requests must be in order of arrival.
    position = {request: number for number, (request, _) in enumerate(arrived)}
    order = [position[request] for _, request, _ in grants]
    assert order == sorted(order), "a grant out of the order of arrival"
    return grants


@pytest.mark.stores("valkey9", "redis70")
async def test_thousands_of_turns_in_order_without_overlap_and_nothing_is_left(
    store: Store, tmp_path: Path
) -> None:
    database = tmp_path / "witness.db"
    arrived = await contend(store, database, processes=8, tasks=25, turns=TURNS, readers=0.0)
    grants = check(database, arrived)
    assert len(grants) >= 8 * 25 * TURNS
    assert len(arrived) > len(grants), "some were interrupted before their turn"
    assert await (await store.raw()).keys("*") == ["aiodlock:2:lock:{turn}:token"]


@pytest.mark.stores("valkey9", "redis70")
@pytest.mark.parametrize("readers", [0.9, 0.5])
async def test_readers_and_writers_keep_their_order_and_writers_are_alone(
    store: Store, tmp_path: Path, readers: float
) -> None:
    database = tmp_path / "witness.db"
    arrived = await contend(store, database, processes=4, tasks=20, turns=8, readers=readers)
    grants = check(database, arrived)
    assert len(grants) >= 4 * 20 * 8
    assert {mode for _, _, mode in grants} == {"shared", "exclusive"}
