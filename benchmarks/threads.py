"""Locks from threads: aiodlock.sync beside redis-py's blocking Lock and python-redis-lock.

python -m benchmarks.threads --rounds 21 --url redis://localhost:6379/0 --round-trip 0.5

All take turns within each round, and a ratio is taken within the round: a noisy minute hurts all alike.
With ``--round-trip`` the server is so many milliseconds away, from all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import redis

import aiodlock
from aiodlock import sync

from .delay import delayed
from .servers import Servers

Locking = Callable[[str], Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Load:
    title: str
    threads: int
    names: int
    turns: int


LOADS = (
    Load("1 thread", 1, 1, 100),
    Load("16 threads, 16 names", 16, 16, 20),
    Load("16 threads, 1 name", 16, 1, 4),
)


def contenders(url: str) -> dict[str, Locking]:
    """Return what makes a lock of a name; each use of it is a ``with``."""
    ours, theirs = sync.Client(url), redis.Redis.from_url(url)

    def of_ours(name: str) -> Callable[[], AbstractContextManager[Any]]:
        lock = ours.lock(f"bench:{name}")
        return lambda: lock

    def of_redis_py(name: str) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: theirs.lock(f"bench:redis-py:{name}", timeout=30)

    found: dict[str, Locking] = {"aiodlock.sync": of_ours, "redis-py Lock": of_redis_py}
    try:
        from redis_lock import Lock as Third
    except ImportError:
        return found

    def of_third(name: str) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: Third(theirs, f"bench:third:{name}", expire=30)

    return found | {"python-redis-lock": of_third}


def measure(locking: Locking, load: Load) -> float:
    """Return microseconds per acquire and release, of all threads together."""
    begin = threading.Barrier(load.threads + 1)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            use = locking(str(number % load.names))
            with use():
                pass
            begin.wait()
            for _ in range(load.turns):
                with use():
                    pass
        except BaseException as error:
            errors.append(error)
            begin.abort()  # else the others would wait for this one for ever

    threads = [threading.Thread(target=work, args=(number,)) for number in range(load.threads)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        begin.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return (time.perf_counter() - started) / (load.threads * load.turns) * 1e6


def measure_async(url: str, turns: int) -> float:
    """Return the same for one task of asyncio."""

    async def run() -> float:
        async with aiodlock.Client(url) as client:
            lock = client.lock("bench:task")
            async with lock:
                pass
            started = time.perf_counter()
            for _ in range(turns):
                async with lock:
                    pass
            return (time.perf_counter() - started) / turns * 1e6

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="default: a server of its own")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--round-trip", type=float, default=0.0, metavar="MS")
    options = parser.parse_args()
    with Servers(options.url) as servers:
        if not options.round_trip:
            compare(servers.redis, options.rounds)
            return
        with delayed(servers.redis, options.round_trip / 1000) as url:
            print(f"a PING takes {ping(url):,.0f} µs\n")
            compare(url, options.rounds)


def ping(url: str, turns: int = 200) -> float:
    """Return the microseconds of a bare round trip."""
    with redis.Redis.from_url(url) as server:
        server.ping()
        started = time.perf_counter()
        for _ in range(turns):
            server.ping()
        return (time.perf_counter() - started) / turns * 1e6


def compare(url: str, rounds: int) -> None:
    """Print a table."""
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    print(
        "| load | contender | µs per acquire and release | per second | aiodlock.sync takes times this |"
    )
    print("|---|---|---|---|---|")
    for load in LOADS:
        run = dict(contenders(url))
        times: dict[str, list[float]] = {name: [] for name in run}
        if load.threads == 1:
            times["aiodlock, one task"] = []
        for number in range(rounds):
            names = list(run)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].append(measure(run[name], load))
            if load.threads == 1:
                times["aiodlock, one task"].append(measure_async(url, load.turns))
        for name, found in times.items():
            ratios = [ours / one for one, ours in zip(found, times["aiodlock.sync"], strict=True)]
            median = statistics.median(found)
            print(
                f"| {load.title} | {name} | {median:,.0f} | {1e6 / median:,.0f} "
                f"| {statistics.median(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
