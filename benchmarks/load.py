"""What many waiters, many leases, long queues and several processes cost, each measured some times."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import multiprocessing.synchronize
import os
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import redis
import redis.asyncio

import aiodlock

from .contenders import Contender
from .servers import Servers


@dataclass(slots=True)
class Row:
    """One quantity: a value for each time that it was measured."""

    what: str
    values: list[float]
    unit: str = ""


@dataclass(slots=True)
class Table:
    key: str
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str = "") -> None:
        for row in self.rows:
            if row.what == what:
                row.values.append(value)
                return
        self.rows.append(Row(what, [value], unit))


#: What clients send. What their scripts call is counted by the server too, and is not meant here.
_SENT = ("evalsha", "eval", "subscribe", "ssubscribe", "unsubscribe", "ping")
#: Everything beats at a third of its length: a shorter look than some beats would see nothing.
WAITER_BEAT, LEASE_BEAT = 10 / 3, 30 / 3


class _Look:
    """What the server and this process did since the last look."""

    def __init__(self, admin: redis.asyncio.Redis) -> None:
        self._admin = admin
        self._before = (0.0, 0.0, 0.0, 0.0, 0.0)

    async def again(self) -> tuple[float, float, float, float]:
        """Return commands, bytes in and bytes out per second, and this process's share of a core."""
        calls: dict[str, dict[str, Any]] = await self._admin.info("commandstats")
        stats: dict[str, Any] = await self._admin.info("stats")
        now = (
            time.perf_counter(),
            sum(float(calls.get(f"cmdstat_{word}", {}).get("calls", 0)) for word in _SENT),
            float(stats["total_net_input_bytes"]),
            float(stats["total_net_output_bytes"]),
            time.process_time(),
        )
        seconds, *done = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        commands, inwards, outwards, cpu = (each / seconds for each in done)
        return commands, inwards, outwards, cpu


async def waiters(url: str, count: int, rounds: int) -> Table:
    """``count`` tasks wait for one name; each look lasts three of their beats."""
    table = Table("waiters", f"{count:,} waiters")
    async with redis.asyncio.Redis.from_url(url) as admin, aiodlock.Client(url) as client:
        idle = len(await admin.client_list()) - 2  # less this client's two
        async with client.lock("waited-for"):
            tasks = [asyncio.create_task(_wait(client, "waited-for")) for _ in range(count)]
            await _until_waiting(client, "waited-for", count)
            look = _Look(admin)
            await look.again()
            for _ in range(rounds):
                await asyncio.sleep(3 * WAITER_BEAT)
                commands, inwards, outwards, cpu = await look.again()
                table.add("commands per waiter and second", commands / count)
                table.add("bytes to the server, per waiter and second", inwards / count)
                table.add("bytes from the server, per waiter and second", outwards / count)
                table.add("connections", len(await admin.client_list()) - idle)
                table.add("client's CPU", cpu * 100, "% of a core")
            await _cancel(tasks)
    return table


async def leases(url: str, count: int, rounds: int) -> Table:
    """``count`` names held by one client; each look lasts one beat."""
    table = Table("leases", f"{count:,} leases held for {rounds * LEASE_BEAT:.0f} s")
    async with redis.asyncio.Redis.from_url(url) as admin, aiodlock.Client(url) as client:
        held = [await client.lock(f"held{i}").acquire() for i in range(count)]
        look = _Look(admin)
        await look.again()
        for _ in range(rounds):
            await asyncio.sleep(LEASE_BEAT)
            commands, inwards, outwards, cpu = await look.again()
            table.add("commands per second", commands)
            table.add("bytes to the server, per second", inwards)
            table.add("bytes from the server, per second", outwards)
            table.add("client's CPU", cpu * 100, "% of a core")
        table.add("leases lost", sum(not lease.held for lease in held))
        for lease in held:
            await lease.release()
    return table


async def queue_length(url: str, lengths: tuple[int, ...], rounds: int) -> Table:
    """From the end of one body to the start of the next, with so many behind it. Bodies last 2 ms."""
    table = Table("queue", "Hand-over as the queue grows")
    for _ in range(rounds):
        for length in lengths:
            gaps = await _hand_overs(url, length, 100)
            table.add(f"{length:,} waiting", statistics.median(gaps) * 1e6, "µs")
    return table


async def _hand_overs(url: str, length: int, count: int) -> list[float]:
    """Time hand-overs in a queue that keeps its length: who leaves comes back to its end."""
    gaps: list[float] = []
    released = 0.0
    async with aiodlock.Client(url, waiter_ttl=30, ttl=60) as client:

        async def contend() -> None:
            nonlocal released
            while True:
                async with client.lock("long-queue"):
                    if released:
                        gaps.append(time.perf_counter() - released)
                    await asyncio.sleep(0.002)  # the round trips of the one before are over
                    released = time.perf_counter()

        async with client.lock("long-queue"):
            tasks = [asyncio.create_task(contend()) for _ in range(length + 1)]
            await _until_waiting(client, "long-queue", length + 1)
            gc.collect()
        while len(gaps) < count:
            await asyncio.sleep(0.05)
        await _cancel(tasks)
    return gaps


async def memory(url: str, count: int, rounds: int) -> Table:
    """Bytes of the server, ``count`` of each, less what it used with none."""
    table = Table("memory", "Memory of the server")
    async with redis.asyncio.Redis.from_url(url) as admin:
        for number in range(rounds):
            await _measure_memory(url, admin, count, table, number)
    return table


async def _measure_memory(
    url: str, admin: redis.asyncio.Redis, count: int, table: Table, number: int
) -> None:
    async with aiodlock.Client(url) as client:
        empty = await _used(admin)
        held = [await client.lock(f"memory{number}-{i}", ttl=600).acquire() for i in range(count)]
        table.add("bytes per held name", (await _used(admin) - empty) / count)
        for lease in held:
            await lease.release()
        table.add("bytes per name after its release", (await _used(admin) - empty) / count)
        async with client.lock("memory-queue", ttl=600):
            before = await _used(admin)
            tasks = [asyncio.create_task(_wait(client, "memory-queue")) for _ in range(count)]
            await _until_waiting(client, "memory-queue", count)
            table.add("bytes per waiter", (await _used(admin) - before) / count)
            await _cancel(tasks)


def processes(
    servers: Servers, contenders: list[Contender], count: int, seconds: float, rounds: int
) -> Table:
    """``count`` processes contend for one name; who got it when is known by the machine's one clock.

    :param contenders: those on asyncio; they take turns.
    """
    table = Table("processes", f"{count} processes on one name")
    failed: set[str] = set()
    for number in range(rounds):
        for contender in contenders:
            if contender.key in failed:
                continue
            try:
                with _ServerTime(servers) as server_time:
                    of_process = _run_processes(servers, contender, count, seconds, number)
            except Exception as exc:
                failed.add(contender.key)
                print(f"{count} processes: {contender.title} left out: {exc}", flush=True)
                continue
            _tell_hand_overs(table, contender.title, [holds for holds, _ in of_process])
            turns = sum(len(holds) for holds, _ in of_process)
            title = f"{contender.title}: CPU per turn,"
            table.add(f"{title} clients", sum(cpu for _, cpu in of_process) / turns * 1e6, "µs")
            if contender.key != "postgres":
                table.add(f"{title} server", server_time.spent / turns * 1e6, "µs")
    return table


def second(servers: Servers, contenders: list[Contender], seconds: float, rounds: int) -> Table:
    """One process takes a name again and again, for a millisecond of every two. How long does another one
    wait that wants it now and then? The contenders take turns.
    """
    table = Table("second", "A second process wants the name of one that takes it again and again")
    context = multiprocessing.get_context("spawn")
    for number in range(rounds):
        for contender in contenders:
            job = ({"redis": servers.redis}, contender.key, f"second{number}", seconds)
            with context.Pool(2, _keep, (context.Barrier(2),)) as pool:
                parts = pool.starmap(_take_turns, [(*job, 0), (*job, 1)], chunksize=1)
            (taken, _), (_, waits) = parts
            percentiles = statistics.quantiles(waits, n=100)
            table.add(f"{contender.title}: wait p50", percentiles[49] * 1e6, "µs")
            table.add(f"{contender.title}: wait p99", percentiles[98] * 1e6, "µs")
            table.add(f"{contender.title}: bodies of the first", taken)
    return table


def _take_turns(
    addresses: dict[str, str], key: str, name: str, seconds: float, role: int
) -> tuple[int, list[float]]:
    """Be the first or the second process; return how many bodies it had, and how long each waited."""
    from .contenders import ALL

    (contender,) = (each for each in ALL if each.key == key)

    async def take_turns() -> tuple[int, list[float]]:
        waits: list[float] = []
        assert contender.open_holds is not None
        async with contender.open_holds(Servers.at(addresses)) as make:
            hold = make(name, False)
            async with make(f"{name}-warm-up-{os.getpid()}", False)():
                pass
            _barrier.wait(60)
            stop = time.monotonic() + seconds
            while (began := time.monotonic()) < stop:
                async with hold():
                    waits.append(time.monotonic() - began)
                    await asyncio.sleep(0.001 if role == 0 else 0.0)
                await asyncio.sleep(0.001 if role == 0 else 0.02)
        return len(waits), waits

    return asyncio.run(take_turns())


class _ServerTime:
    """The processor time that the Redis server spends while the block lasts, in seconds."""

    def __init__(self, servers: Servers) -> None:
        self._url = servers.redis
        self.spent = 0.0

    def _used(self) -> float:
        with redis.Redis.from_url(self._url) as admin:
            info: Any = admin.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def __enter__(self) -> Self:
        self.spent = -self._used()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent += self._used()


def _tell_hand_overs(table: Table, title: str, of_process: list[list[tuple[float, float]]]) -> None:
    holds = sorted(hold for holds in of_process for hold in holds)
    gaps = [after[0] - before[1] for before, after in pairwise(holds)]
    percentiles = statistics.quantiles(gaps, n=100)
    counts = [len(holds) for holds in of_process]
    table.add(f"{title}: hand-over p50", percentiles[49] * 1e6, "µs")
    table.add(f"{title}: hand-over p99", percentiles[98] * 1e6, "µs")
    table.add(f"{title}: acquisitions of the least served", min(counts))
    table.add(f"{title}: acquisitions of the most served", max(counts))


def _run_processes(
    servers: Servers, contender: Contender, count: int, seconds: float, number: int
) -> list[tuple[list[tuple[float, float]], float]]:
    addresses = {"redis": servers.redis}
    if contender.key == "postgres":
        addresses["postgres"] = servers.postgres
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, _keep, (context.Barrier(count),)) as pool:
        job = (addresses, contender.key, f"processes{number}", seconds)
        return pool.starmap(_contend, [job] * count, chunksize=1)


_barrier: multiprocessing.synchronize.Barrier


def _keep(barrier: multiprocessing.synchronize.Barrier) -> None:
    global _barrier
    _barrier = barrier


def _contend(
    addresses: dict[str, str], key: str, name: str, seconds: float
) -> tuple[list[tuple[float, float]], float]:
    """Take the lock again and again; return from when to when this process had it, and its CPU in s."""
    from .contenders import ALL

    (contender,) = (each for each in ALL if each.key == key)

    async def contend() -> tuple[list[tuple[float, float]], float]:
        holds: list[tuple[float, float]] = []
        assert contender.open_holds is not None
        async with contender.open_holds(Servers.at(addresses)) as make:
            hold = make(name, False)
            async with make(f"{name}-warm-up-{os.getpid()}", False)():
                pass
            _barrier.wait(60)
            stop, cpu = time.monotonic() + seconds, time.process_time()
            while time.monotonic() < stop:
                async with hold():
                    holds.append((time.monotonic(), time.monotonic()))
            return holds, time.process_time() - cpu

    return asyncio.run(contend())


async def _wait(client: aiodlock.Client, name: str) -> None:
    async with client.lock(name, ttl=600):
        pass


async def _until_waiting(client: aiodlock.Client, name: str, count: int) -> None:
    while len((await client.inspect(name)).waiters) < count:
        await asyncio.sleep(0.05)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _used(admin: redis.asyncio.Redis) -> int:
    info: dict[str, Any] = await admin.info("memory")
    return int(info["used_memory"])
