"""PostgreSQL as a store, beside its own advisory locks and beside Redis, all by turns in one run.

``python -m benchmarks.postgres`` prints tables in Markdown. Servers of its own are started, with ``fsync``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import asyncpg

import aiodlock
from tests.postgres import PostgresServer, find_debian, find_wheel

from .contenders import Load
from .servers import Servers

#: The connections of an advisory lock over a pool.
_POOL = 16
_LOADS = {
    "one task": Load(1, 1, 200),
    "64 tasks on 64 names": Load(64, 64, 12),
    "16 tasks on one name": Load(16, 1, 15),
}
_SERVERS = {"debian": find_debian, "wheel": find_wheel}

#: Takes a name once, and gives it back.
_Pair = Callable[[str], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=_SERVERS, default="debian")
    parser.add_argument("--rounds", type=int, default=9, help="how often each pair is measured")
    parser.add_argument("--pairs", type=int, default=20_000, help="beside an open transaction")
    parser.add_argument(
        "--growth", type=int, default=1_000_000, help="pairs on a server of our own"
    )
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=list(_PARTS))
    asked = parser.parse_args()
    programs = _SERVERS[asked.server]()
    if programs is None:
        parser.error(f"this server is not installed: {asked.server}")
    with (
        PostgresServer(programs, shared_buffers="128MB") as server,
        Servers() as others,
    ):
        asyncio.run(_measure(server, others, asked))


async def _measure(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    admin = await asyncpg.connect(server.url)
    version = await admin.fetchval("show server_version")
    print(f"PostgreSQL {version}, Python {platform.python_version()}, {os.cpu_count()} cores,")
    print(
        f"load average before: {os.getloadavg()[0]:.1f}. A commit took {await _commit(admin):.0f} µs.\n"
    )
    for durability in ("logged", "unlogged"):
        await admin.execute(f"create database {durability}")
        await _install(server.url_of("postgres", durability), durability)
    await admin.close()
    for part in asked.only:
        await _PARTS[part](server, others, asked)


async def _install(url: str, durability: Any) -> None:
    from aiodlock.backends.postgres.installing import install

    connection = await asyncpg.connect(url)
    await install(connection, durability)
    await connection.close()


async def _commit(admin: Any) -> float:
    """Return how long a transaction takes that writes one row and waits for the disk (µs)."""
    await admin.execute("create table commits (number integer); insert into commits values (0)")
    times = []
    for _ in range(200):
        started = time.perf_counter()
        await admin.execute("update commits set number = number + 1")
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


# -- pairs ---------------------------------------------------------------------------------------


@asynccontextmanager
async def _ours(url: str) -> AsyncIterator[_Pair]:
    async with aiodlock.Client(url) as client:
        locks: dict[str, aiodlock.Lock] = {}

        async def pair(name: str) -> None:
            if name not in locks:
                locks[name] = client.lock(name)
            async with locks[name]:
                pass

        yield pair


@asynccontextmanager
async def _bare(url: str) -> AsyncIterator[_Pair]:
    connection = await asyncpg.connect(url)

    async def pair(name: str) -> None:
        await _advisory(connection, name)

    yield pair
    await connection.close()


@asynccontextmanager
async def _pool(url: str) -> AsyncIterator[_Pair]:
    async with asyncpg.create_pool(url, min_size=_POOL, max_size=_POOL) as pool:

        async def pair(name: str) -> None:
            async with pool.acquire() as connection:
                await _advisory(connection, name)

        yield pair


async def _advisory(connection: Any, name: str) -> None:
    key = hash(name) & 0x7FFFFFFF
    await connection.fetchval("select pg_advisory_lock($1)", key)
    await connection.fetchval("select pg_advisory_unlock($1)", key)


async def _pairs(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    opened = {
        "aiodlock, logged": _ours(server.url_of("postgres", "logged")),
        "aiodlock, unlogged": _ours(server.url_of("postgres", "unlogged")),
        "advisory lock, one connection": _bare(server.url),
        f"advisory lock, pool of {_POOL}": _pool(server.url),
        "aiodlock on Redis": _ours(others.redis),
    }
    times: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        contenders = {
            title: await stack.enter_async_context(each) for title, each in opened.items()
        }
        order = list(contenders)
        for _ in range(asked.rounds + 1):
            for what, load in _LOADS.items():
                for title in order:
                    if "one connection" in title and load.tasks > 1:
                        continue
                    taken = await _carry(contenders[title], load)
                    times.setdefault((what, title), []).append(taken)
            order = order[1:] + order[:1]
    print(f"µs per acquire and release, {asked.rounds} rounds by turns: median (smallest)\n")
    print("| |", " | ".join(_LOADS), "|")
    print("|---|", "---|" * len(_LOADS), sep="")
    for title in contenders:
        cells = [_cell(times.get((what, title), [])[1:]) for what in _LOADS]
        print(f"| {title} |", " | ".join(cells), "|")
    print("\nSpeed in parts of the advisory locks' (median of the rounds' ratios)\n")
    print("| | bare, one task |", " | ".join(f"pool, {what}" for what in _LOADS), "|")
    print("|---|---|", "---|" * len(_LOADS), sep="")
    for title in ("aiodlock, logged", "aiodlock, unlogged"):
        cells = [_ratio(times, "one task", title, "advisory lock, one connection")]
        cells += [_ratio(times, what, title, f"advisory lock, pool of {_POOL}") for what in _LOADS]
        print(f"| {title} |", " | ".join(cells), "|")
    print()


async def _carry(pair: _Pair, load: Load) -> float:
    async def work(name: str) -> None:
        for _ in range(load.count):
            await pair(name)

    started = time.perf_counter()
    await asyncio.gather(*(work(f"bench{task % load.names}") for task in range(load.tasks)))
    return (time.perf_counter() - started) / (load.tasks * load.count) * 1e6


def _cell(times: list[float]) -> str:
    return f"{statistics.median(times):,.0f} ({min(times):,.0f})" if times else "-"


def _ratio(times: dict[tuple[str, str], list[float]], what: str, ours: str, other: str) -> str:
    rounds = zip(times[what, other][1:], times[what, ours][1:], strict=True)
    return f"{statistics.median(theirs / mine for theirs, mine in rounds):.2f}"


# -- many waiters, many leases --------------------------------------------------------------------


async def _crowds(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    print(
        "| | transactions per second | messages per second | client's share of a core |\n|---|---|---|---|"
    )
    url = server.url_of("postgres", "logged")
    for what, count, names in (("1,000 waiters", 1_000, 1), ("10,000 leases", 10_000, 10_000)):
        async with aiodlock.Client(url) as holder, aiodlock.Client(url) as client:
            if names == 1:
                await holder.lock("crowded").acquire()
            leases: list[Any] = []

            async def take(name: str, client: Any = client, leases: list[Any] = leases) -> None:
                leases.append(await client.lock(name).acquire())

            tasks = [
                asyncio.create_task(take(f"crowd{n}" if names > 1 else "crowded"))
                for n in range(count)
            ]
            async with asyncio.timeout(120):
                while (
                    len(leases if names > 1 else (await client.inspect("crowded")).waiters) < count
                ):
                    await asyncio.sleep(0.1)
            before, seconds = await _calls(url), 20.0
            cpu = time.process_time()
            await asyncio.sleep(seconds)
            share = (time.process_time() - cpu) / seconds
            calls = (await _calls(url) - before) / seconds
            beats = count / (10 / 3 if names == 1 else 30 / 3)
            print(f"| {what} | {calls:.1f} | {beats:,.0f} | {share:.3f} |")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            leases.clear()
    print()


async def _calls(url: str) -> int:
    connection = await asyncpg.connect(url)
    await asyncio.sleep(1.2)  # the sessions tell of their calls once a second
    commits = await connection.fetchval(
        "select xact_commit from pg_stat_database where datname = current_database()"
    )
    await connection.close()
    return int(commits)


async def _hand_overs(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    print("| waiting | µs per hand-over: median (smallest) of 200 |\n|---|---|")
    url = server.url_of("postgres", "logged")
    for waiting in (10, 10_000):
        async with aiodlock.Client(url, waiter_ttl=30) as client:
            turns: list[float] = []
            go, over = asyncio.Event(), asyncio.Event()

            async def take(
                client: Any = client,
                turns: list[float] = turns,
                go: Any = go,
                over: Any = over,
                most: int = waiting,
            ) -> None:
                async with client.lock(f"queue{most}"):
                    await go.wait()
                    turns.append(time.perf_counter())
                if len(turns) <= 200:
                    if most <= 200:
                        await take()  # the queue stays as long as it is
                else:
                    over.set()

            tasks = [asyncio.create_task(take()) for _ in range(waiting + 1)]
            async with asyncio.timeout(180):
                while len((await client.inspect(f"queue{waiting}")).waiters) < waiting:
                    await asyncio.sleep(0.1)
                go.set()
                await over.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            steps = [(after - before) * 1e6 for before, after in pairwise(turns[:201])]
            print(f"| {waiting:,} | {_cell(steps)} |")
    print()


# -- a transaction that stays open ----------------------------------------------------------------


async def _beside(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    print(f"Beside a transaction that stays open, {asked.pairs:,} pairs\n")
    print(
        "| | µs per pair, first 1,000 | last 1,000 | dead rows | table | indexes |\n"
        "|---|---|---|---|---|---|"
    )
    for title, tasks in (("one task", 1), ("two tasks on one name", 2)):
        url = server.url_of("postgres", "logged")
        reader = await asyncpg.connect(url)
        await reader.execute("begin isolation level repeatable read; select 1 from aiodlock.meta")
        try:
            async with _ours(url) as pair:
                name = f"beside{tasks}"
                await _carry(pair, Load(tasks, 1, 50))
                first = await _named(pair, name, tasks, 1_000)
                await _named(pair, name, tasks, asked.pairs - 2_000)
                last = await _named(pair, name, tasks, 1_000)
        finally:
            await reader.close()
        print(f"| {title} | {first:,.0f} | {last:,.0f} | {await _size(url)} |")
    print()


async def _size(url: str) -> str:
    """Return what the table of names takes up: dead rows, the table, its indexes."""
    connection = await asyncpg.connect(url)
    await asyncio.sleep(1.2)  # the sessions tell of their rows once a second
    row = await connection.fetchrow(
        "select pg_stat_get_dead_tuples(c) as dead, pg_relation_size(c) as heap, "
        "pg_indexes_size(c) as indexes from to_regclass('aiodlock.name') c"
    )
    await connection.close()
    heap, indexes = row["heap"] / 1e6, row["indexes"] / 1e6
    return f"{row['dead']:,} | {heap:.1f} MB | {indexes:.1f} MB"


async def _growth(server: PostgresServer, others: Servers, asked: argparse.Namespace) -> None:
    print(f"{asked.growth:,} pairs, 64 tasks on 64 names, nobody else on the server\n")
    print("| pairs | µs per pair | dead rows | table | indexes |\n|---|---|---|---|---|")
    url, load = server.url_of("postgres", "logged"), Load(64, 64, asked.growth // 640)
    async with _ours(url) as pair:
        for part in range(10):
            taken = await _carry(pair, load)
            if part in (0, 4, 9):
                print(
                    f"| {(part + 1) * asked.growth // 10:,} | {taken:,.0f} | {await _size(url)} |",
                    flush=True,
                )
    print()


async def _named(pair: _Pair, name: str, tasks: int, pairs: int) -> float:
    async def work() -> None:
        for _ in range(pairs // tasks):
            await pair(name)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return (time.perf_counter() - started) / pairs * 1e6


_PARTS: dict[str, Callable[[PostgresServer, Servers, argparse.Namespace], Awaitable[None]]] = {
    "pairs": _pairs,
    "crowds": _crowds,
    "hand-overs": _hand_overs,
    "beside": _beside,
    "growth": _growth,
}

if __name__ == "__main__":
    main()
