"""A quorum of five under contention, beside pottery's Redlock: ``python -m benchmarks.quorum``.

Processes of clients take turns on one name for some seconds, ours and pottery's one after the other, again
and again, on the same servers; then the same with two of the five killed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

import redis.asyncio

import aiodlock
from aiodlock._embedded import EmbeddedServer

_PROCESSES, _CLIENTS, _BODY = 4, 4, 0.001

Turn = Callable[[], Any]


async def _ours(stack: AsyncExitStack, urls: list[str]) -> Turn:
    client = await stack.enter_async_context(aiodlock.Client(urls))
    lock = client.lock("turn")
    return lambda: lock


async def _pottery(stack: AsyncExitStack, urls: list[str]) -> Turn:
    from pottery import AIORedlock

    masters = {await stack.enter_async_context(redis.asyncio.Redis.from_url(url)) for url in urls}
    return lambda: AIORedlock(key="turn", masters=masters, auto_release_time=10)


_CONTENDERS = {"aiodlock": _ours, "pottery": _pottery}


async def _take_turns(who: str, urls: list[str], seconds: float) -> tuple[int, int]:
    """Return how many turns the clients of this process had, and how many attempts failed."""
    taken = failed = 0
    async with AsyncExitStack() as stack:
        turns = [await _CONTENDERS[who](stack, urls) for _ in range(_CLIENTS)]
        end = time.monotonic() + seconds

        async def work(turn: Turn) -> None:
            nonlocal taken, failed
            while time.monotonic() < end:
                try:
                    async with turn():
                        taken += time.monotonic() < end
                        await asyncio.sleep(_BODY)
                except Exception:  # whatever the contender calls it
                    failed += 1

        # Who waits for a turn at the end is not waited for.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + 1.0):
                await asyncio.gather(*(work(turn) for turn in turns))
    return taken, failed


def _process(work: tuple[str, list[str], float]) -> tuple[int, int]:
    return asyncio.run(_take_turns(*work))


def _run(who: str, urls: list[str], seconds: float) -> tuple[float, int]:
    """Return turns per second of all processes together, and failed attempts."""
    for url in urls:
        with suppress(redis.ConnectionError), redis.Redis.from_url(url) as client:
            client.delete("redlock:turn")
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        told = pool.map(_process, [(who, urls, seconds)] * _PROCESSES, chunksize=1)
    return sum(taken for taken, _ in told) / seconds, sum(failed for _, failed in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        nodes = [stack.enter_context(EmbeddedServer(tcp=True)) for _ in range(5)]
        urls = [node.url for node in nodes]
        for state in ("all five", "two of five killed"):
            if state != "all five":
                for node in nodes[3:]:
                    node.kill()
            rates: dict[str, list[float]] = {who: [] for who in _CONTENDERS}
            for _ in range(options.repeat):
                for who, found in rates.items():
                    rate, failed = _run(who, urls, options.seconds)
                    found.append(rate)
                    print(
                        f"{state}: {who} {rate:.1f} turns/s, {failed} attempts failed", flush=True
                    )
            ours, theirs = (statistics.median(rates[who]) for who in ("aiodlock", "pottery"))
            print(
                f"{state}: {ours:.1f} to {theirs:.1f} turns/s, {ours / max(theirs, 0.1):.1f} times"
            )


if __name__ == "__main__":
    main()
