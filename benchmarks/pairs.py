"""Time per acquire and release, all contenders by turns, so that a noisy minute hurts all alike."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from .contenders import Contender, Worker


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds per acquire and release: the median of the repetitions, and the quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Case:
    """``tasks`` tasks on ``names`` names, each locking ``count`` times per repetition."""

    title: str
    tasks: int
    names: int
    count: int
    left_out: frozenset[str] = frozenset()


async def measure(
    case: Case, contenders: Mapping[str, Contender], url: str, repetitions: int
) -> dict[str, Figure | str]:
    """Return a figure for each contender, or why there is none."""
    results: dict[str, Figure | str] = {}
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        workers: dict[str, list[Worker]] = {}
        for name, contender in contenders.items():
            if name in case.left_out:
                continue
            try:
                make = await stack.enter_async_context(contender(url))
                workers[name] = [make(f"bench{i % case.names}") for i in range(case.tasks)]
                await workers[name][0](3)
            except ImportError as missing:
                results[name] = f"not installed ({missing.name})"
                workers.pop(name, None)
        for _ in range(repetitions):
            for name, of_name in workers.items():
                if name in results:
                    continue
                started = time.perf_counter()
                try:
                    await asyncio.gather(*(work(case.count) for work in of_name))
                except Exception as failed:
                    results[name] = f"failed: {type(failed).__name__}"
                    continue
                elapsed = time.perf_counter() - started
                times.setdefault(name, []).append(elapsed / (case.count * case.tasks) * 1e6)
    for name, measured in times.items():
        if name not in results:
            results[name] = _figure(measured)
    return {name: results[name] for name in contenders if name in results}


def _figure(measured: list[float]) -> Figure:
    if len(measured) < 2:
        return Figure(measured[0], measured[0], measured[0])
    low, median, high = statistics.quantiles(measured, n=4, method="inclusive")
    return Figure(median, low, high)
