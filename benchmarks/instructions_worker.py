"""The process that ``benchmarks.instructions`` counts: acquires and releases, in time that is slowed down.

It is run by path, so that the same load runs on another tree's package.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from typing import Any


def slow_time_down(factor: float) -> None:
    """Let this process's clocks go slower. To be called before anything keeps a reference to them."""
    monotonic, get_time = time.monotonic, time.clock_gettime

    def slowed(clock: int) -> float:
        return first + (get_time(clock) - first) / factor

    def slowed_monotonic() -> float:
        return first + (monotonic() - first) / factor

    first = monotonic()
    time.clock_gettime = slowed
    time.monotonic = slowed_monotonic


class PatientSelector(selectors.DefaultSelector):
    """Waits as many times longer as the clocks go slower: else the loop would turn in vain."""

    factor = 1.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout * self.factor if timeout else timeout)


def work_in_thread(url: str, contender: str, pairs: int) -> None:
    """Acquire and release so many times in this thread, by what blocks it."""
    if contender == "redis-py":
        import redis

        lock: Any = redis.Redis.from_url(url).lock("instructions", timeout=600)
    else:
        from aiodlock import sync

        lock = sync.Client(url, ttl=600.0, waiter_ttl=600.0).lock("instructions")
    for _ in range(pairs):
        with lock:
            pass


async def work(url: str, tasks: int, names: int, pairs: int, linger: float) -> None:
    """Acquire and release so many times, all tasks together."""
    import aiodlock

    # On a machine that is very busy a turn may take seconds of real time: no lease is to end by that.
    async with aiodlock.Client(url, ttl=600.0, waiter_ttl=600.0) as client:
        # Trees before ``linger`` are measured, too.
        options: dict[str, Any] = {"linger": linger} if linger else {}
        locks = [client.lock(f"instructions:{number}", **options) for number in range(names)]

        async def lock_again(lock: aiodlock.Lock) -> None:
            for _ in range(pairs // tasks):
                async with lock:
                    pass

        await asyncio.gather(*(lock_again(locks[number % names]) for number in range(tasks)))


if __name__ == "__main__":
    where, contender, *numbers, how_long = sys.argv[1:]
    slower, tasks, names, pairs = map(int, numbers)
    slow_time_down(slower)
    PatientSelector.factor = slower
    selectors.DefaultSelector = PatientSelector  # type: ignore[misc]  # of every loop from now on
    if contender == "tasks":
        asyncio.run(work(where, tasks, names, pairs, float(how_long)))
    else:
        work_in_thread(where, contender, pairs)
