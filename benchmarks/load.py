"""What many waiters, many leases, long queues and several processes cost. aiodlock alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from itertools import pairwise
from typing import Any

import redis.asyncio

import aiodlock

Rows = list[tuple[str, str]]


#: What clients send. What their scripts call is counted by the server too, and is not meant here.
_SENT = ("evalsha", "eval", "subscribe", "unsubscribe", "ping")
#: Everything beats at a third of its length: a shorter look than some beats would see nothing.
_WAITER_BEAT, _LEASE_BEAT = 10 / 3, 30 / 3


async def _commands(admin: redis.asyncio.Redis) -> int:
    stats: dict[str, dict[str, Any]] = await admin.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{word}", {}).get("calls", 0)) for word in _SENT)


async def waiters(url: str, count: int) -> Rows:
    """``count`` tasks wait for one name, for three of their beats."""
    seconds = 3 * _WAITER_BEAT
    async with redis.asyncio.Redis.from_url(url) as admin, aiodlock.Client(url) as client:
        idle = len(await admin.client_list()) - 2  # less this client's two
        async with client.lock("waited-for"):
            tasks = [asyncio.create_task(_wait(client, "waited-for")) for _ in range(count)]
            await _until_waiting(client, "waited-for", count)
            connections = len(await admin.client_list()) - idle
            before, cpu = await _commands(admin), time.process_time()
            await asyncio.sleep(seconds)
            sent = await _commands(admin) - before
            used = (time.process_time() - cpu) / seconds
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return [
        ("commands per waiter and second", f"{sent / count / seconds:.2f}"),
        ("connections", str(connections)),
        ("client's CPU, share of one core", f"{used:.1%}"),
    ]


async def leases(url: str, count: int, beats: int) -> Rows:
    """``count`` names held by one client, extended in the background."""
    seconds = beats * _LEASE_BEAT
    async with redis.asyncio.Redis.from_url(url) as admin, aiodlock.Client(url) as client:
        held = [await client.lock(f"held{i}").acquire() for i in range(count)]
        before, cpu = await _commands(admin), time.process_time()
        await asyncio.sleep(seconds)
        used = (time.process_time() - cpu) / seconds
        sent = (await _commands(admin) - before) / seconds
        lost = sum(not lease.held for lease in held)
        for lease in held:
            await lease.release()
    return [
        ("seconds looked at", f"{seconds:.0f}"),
        ("client's CPU, share of one core", f"{used:.1%}"),
        ("commands per second", f"{sent:.0f}"),
        ("leases lost", str(lost)),
    ]


async def queue_length(url: str, lengths: tuple[int, ...], repetitions: int) -> Rows:
    """Release to the next holder's body, with so many behind it."""
    rows: Rows = []
    for length in lengths:
        async with aiodlock.Client(url, waiter_ttl=30, ttl=60) as client:
            gaps: list[float] = []
            released = 0.0

            async def contend(client: aiodlock.Client, gaps: list[float] = gaps) -> None:
                nonlocal released
                async with client.lock("long-queue"):
                    if released:
                        gaps.append(time.perf_counter() - released)
                    await asyncio.sleep(0.002)  # the round trips of the one before are over
                    released = time.perf_counter()

            async with client.lock("long-queue"):
                tasks = [asyncio.create_task(contend(client)) for _ in range(length)]
                await _until_waiting(client, "long-queue", length)
            while len(gaps) < min(repetitions, length - 2):
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        rows.append(
            (f"hand-over with {length:,} waiting", f"{statistics.median(gaps) * 1e6:.0f} µs")
        )
    return rows


async def memory(url: str, count: int) -> Rows:
    """Bytes of the server per held name, per waiter, and per name after its release."""
    async with redis.asyncio.Redis.from_url(url) as admin, aiodlock.Client(url) as client:
        empty = await _used(admin)
        held = [await client.lock(f"memory{i}", ttl=600).acquire() for i in range(count)]
        per_name = (await _used(admin) - empty) / count
        for lease in held:
            await lease.release()
        per_released = (await _used(admin) - empty) / count
        async with client.lock("memory-queue", ttl=600):
            before = await _used(admin)
            tasks = [asyncio.create_task(_wait(client, "memory-queue")) for _ in range(count)]
            await _until_waiting(client, "memory-queue", count)
            per_waiter = (await _used(admin) - before) / count
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return [
        ("bytes per held name", f"{per_name:.0f}"),
        ("bytes per waiter", f"{per_waiter:.0f}"),
        ("bytes per name after its release", f"{per_released:.0f}"),
    ]


def processes(url: str, count: int, seconds: float) -> Rows:
    """``count`` processes contend for one name; who got it when is known by the machine's one clock."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(count) as pool:
        start = time.monotonic() + 3.0
        of_process = pool.starmap(_contend, [(url, start, start + seconds)] * count)
    holds = sorted(hold for holds in of_process for hold in holds)
    gaps = [after[0] - before[1] for before, after in pairwise(holds)]
    percentiles = statistics.quantiles(gaps, n=100)
    counts = [len(holds) for holds in of_process]
    return [
        ("hand-over p50", f"{percentiles[49] * 1e6:.0f} µs"),
        ("hand-over p99", f"{percentiles[98] * 1e6:.0f} µs"),
        ("acquisitions of the least and the most served", f"{min(counts)}, {max(counts)}"),
    ]


def _contend(url: str, start: float, stop: float) -> list[tuple[float, float]]:
    async def contend() -> list[tuple[float, float]]:
        holds: list[tuple[float, float]] = []
        async with aiodlock.Client(url) as client:
            lock = client.lock("processes")
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            while time.monotonic() < stop:
                async with lock:
                    acquired = time.monotonic()
                    holds.append((acquired, time.monotonic()))
        return holds

    return asyncio.run(contend())


async def _wait(client: aiodlock.Client, name: str) -> None:
    async with client.lock(name, ttl=600):
        pass


async def _until_waiting(client: aiodlock.Client, name: str, count: int) -> None:
    while len((await client.inspect(name)).waiters) < count:
        await asyncio.sleep(0.05)


async def _used(admin: redis.asyncio.Redis) -> int:
    info: dict[str, Any] = await admin.info("memory")
    return int(info["used_memory"])
