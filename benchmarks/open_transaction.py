"""An hour of PostgreSQL beside a transaction that stays open, and beside none.

``python -m benchmarks.open_transaction --minutes 60`` starts a server with four databases: logged and
unlogged, with two foreign transactions that stay open (one holds a snapshot, the other a transaction number
too), and without. In each of them clients take and release names at the same steady rate. Each
window's rows of the table, in Markdown, are printed when it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

import aiodlock
from tests.postgres import PostgresServer, find_debian, find_wheel

_SERVERS = {"debian": find_debian, "wheel": find_wheel}
_TICKS = os.sysconf("SC_CLK_TCK")
#: Of each database, per second: pairs of one task, and hand-overs between two clients (two pairs each).
_ALONE, _HAND_OVERS = 40, 5


@dataclass
class _Seen:
    """What one database had cost when a window ended."""

    pairs: int
    cpu: float
    pages: int
    alone: list[float] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)


@dataclass
class _Room:
    """One database, and what its clients have measured since the window began."""

    title: str
    url: str
    stack: AsyncExitStack
    pairs: int = 0
    alone: list[float] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)
    before: _Seen = field(default_factory=lambda: _Seen(0, 0.0, 0))

    async def open(self) -> None:
        self.first = await self.stack.enter_async_context(aiodlock.Client(self.url))
        self.second = await self.stack.enter_async_context(aiodlock.Client(self.url))
        self.admin = await asyncpg.connect(self.url)
        self.stack.push_async_callback(self.admin.close)

    async def take_alone(self) -> None:
        lock = self.first.lock("alone")
        while True:
            started = time.perf_counter()
            async with lock:
                pass
            taken = time.perf_counter() - started
            self.alone.append(taken)
            self.pairs += 1
            await asyncio.sleep(max(0.0, 1 / _ALONE - taken))

    async def hand_over(self) -> None:
        ours, theirs = self.first.lock("shared"), self.second.lock("shared")
        while True:
            began = time.perf_counter()
            lease = await ours.acquire()
            waiting = asyncio.create_task(theirs.acquire())
            while not (await self.first.inspect("shared")).waiters:
                await asyncio.sleep(0.001)
            started = time.perf_counter()
            await lease.release()
            after = await waiting
            self.handed.append(time.perf_counter() - started)
            await after.release()
            self.pairs += 2
            await asyncio.sleep(max(0.0, 1 / _HAND_OVERS - (time.perf_counter() - began)))

    async def look(self) -> _Seen:
        """Return what it has cost so far, and begin a window."""
        pids = await self.admin.fetch(
            "select pid from pg_stat_activity where datname = current_database() "
            "and backend_type = 'client backend' and pid <> pg_backend_pid()"
        )
        pages = await self.admin.fetchval(
            "select blks_hit + blks_read from pg_stat_database where datname = current_database()"
        )
        cpu = sum(_cpu(row["pid"]) for row in pids)
        seen = _Seen(self.pairs, cpu, pages, self.alone, self.handed)
        self.alone, self.handed = [], []
        return seen

    async def row(self, minutes: float) -> str:
        """Return the window's row: the times, and what the server and its tables say."""
        seen, before = await self.look(), self.before
        self.before = seen
        pairs = max(1, seen.pairs - before.pairs)
        name, waiter = await self.size("name"), await self.size("waiter")
        return (
            f"| {self.title} | {minutes:.0f} | {seen.pairs:,} "
            f"| {_middle(seen.alone)} | {_middle(seen.handed)} | "
            f"{(seen.cpu - before.cpu) / pairs * 1e6:,.0f} | {(seen.pages - before.pages) / pairs:,.0f} | "
            f"{name} | {waiter} |"
        )

    async def size(self, table: str) -> str:
        row = await self.admin.fetchrow(
            "select pg_stat_get_dead_tuples(c) as dead, pg_relation_size(c) as heap, "
            "pg_indexes_size(c) as indexes from to_regclass($1) c",
            f"aiodlock.{table}",
        )
        return f"{row['dead']:,}; {row['heap'] / 1e6:.1f} + {row['indexes'] / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=_SERVERS, default="debian")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--windows", type=int, default=12)
    asked = parser.parse_args()
    programs = _SERVERS[asked.server]()
    if programs is None:
        parser.error(f"this server is not installed: {asked.server}")
    with PostgresServer(programs, shared_buffers="128MB") as server:
        asyncio.run(_measure(server, asked))


async def _measure(server: PostgresServer, asked: argparse.Namespace) -> None:
    from aiodlock.backends.postgres.installing import install

    admin = await asyncpg.connect(server.url)
    version = await admin.fetchval("show server_version")
    print(f"PostgreSQL {version}, Python {platform.python_version()}, {os.cpu_count()} cores,")
    print(f"load average before: {os.getloadavg()[0]:.1f}\n")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(admin.close)
        rooms: list[_Room] = []
        readers: list[Any] = []
        for durability in ("logged", "unlogged"):
            for beside in ("open", "none"):
                name = f"{durability}_{beside}"
                await admin.execute(f"create database {name}")
                url = server.url_of("postgres", name)
                connection = await asyncpg.connect(url)
                await install(connection, durability)
                await connection.close()
                if beside == "open":
                    for number in ("1", "txid_current()"):
                        reader = await asyncpg.connect(url)
                        await reader.execute(
                            f"begin isolation level repeatable read; select {number} from aiodlock.meta"
                        )
                        readers.append(reader)
                rooms.append(_Room(f"{durability}, {beside}", url, stack))
        for room in rooms:
            await room.open()
        tasks = [
            asyncio.create_task(work)
            for room in rooms
            for work in (room.take_alone(), room.hand_over())
        ]
        await asyncio.sleep(2)  # statements are prepared
        for room in rooms:
            room.before = await room.look()
        await _watch(server, rooms, tasks, asked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reader in readers:
            reader.terminate()


async def _watch(
    server: PostgresServer,
    rooms: list[_Room],
    tasks: list[asyncio.Task[None]],
    asked: argparse.Namespace,
) -> None:
    print(
        "| | minutes | pairs | µs per pair of one task: median | µs per hand-over: median "
        "| server's CPU per pair, µs | pages per pair | names: dead rows; table + indexes | waiters |\n|"
        + "---|"
        * 9,
        flush=True,
    )
    started, reaped = time.monotonic(), _reaped(server)
    for window in range(1, asked.windows + 1):
        until = started + asked.minutes * 60 * window / asked.windows
        done, _ = await asyncio.wait(
            tasks, timeout=until - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()  # none of them ends by itself
        for room in rooms:
            print(await room.row((time.monotonic() - started) / 60), flush=True)
    print(
        f"\nThe server's other processes, autovacuum mostly: {_reaped(server) - reaped:.1f} s of CPU; "
        f"load average after: {os.getloadavg()[0]:.1f}"
    )


def _cpu(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / _TICKS


def _reaped(server: PostgresServer) -> float:
    """Return the CPU of the server's processes that have ended."""
    words = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[13]) + int(words[14])) / _TICKS


def _middle(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e6:,.0f}" if times else "-"


if __name__ == "__main__":
    main()
