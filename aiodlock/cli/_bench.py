"""``aiodlock bench``: what a lock costs on a server. It uses names of its own, whose keys soon expire."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis
from rich.table import Table

from .. import Client
from . import _show
from ._source import is_one_server, read_source

#: The columns in a pipe, and what they mean.
COLUMNS = {
    "case": "What was measured.",
    "per_second": "Acquisitions (or round trips) per second, of all tasks together.",
    "median_ms": "Half of them took at most this many milliseconds.",
    "p99_ms": "99 of 100 took at most this many milliseconds.",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One case: how often per second, all tasks together, and how long one of them took."""

    case: str
    per_second: float
    median_ms: float
    p99_ms: float


async def measure(url: str, *, prefix: str, seconds: float) -> list[Result]:
    """Run every case for so long, one after the other.

    :raises BackendUnavailable: when the server does not answer.
    """
    results = []
    source = read_source(url)
    async with Client(source, prefix=prefix, token_retention=1.0) as client:
        if is_one_server(source):
            async with Redis.from_url(url, single_connection_client=True) as server:
                results.append(await _case("one PING, one task", [lambda: _ping(server)], seconds))
        own = f"aiodlock bench {secrets.token_hex(4)}"

        def turn(name: str) -> Callable[[], Awaitable[None]]:
            lock = client.lock(name)

            async def take() -> None:
                async with lock:
                    pass

            return take

        cases = {
            "a free lock, one task": [turn(own)],
            "64 free locks, 64 tasks": [turn(f"{own}:{number}") for number in range(64)],
            "one lock, 16 tasks in its queue": [turn(own)] * 16,
        }
        for title, turns in cases.items():
            results.append(await _case(title, turns, seconds))
    return results


async def _ping(server: Redis) -> None:
    await server.ping()


async def _case(title: str, turns: list[Callable[[], Awaitable[None]]], seconds: float) -> Result:
    """Let one task for each turn repeat it until the time is over."""
    took: list[float] = []

    async def repeat(turn: Callable[[], Awaitable[None]]) -> None:
        moment = time.perf_counter()
        while True:
            await turn()
            before, moment = moment, time.perf_counter()
            took.append(moment - before)
            if moment >= give_up_at:
                return

    for turn in turns:  # the server knows the scripts from now on, and we its connections
        await turn()
    started = time.perf_counter()
    give_up_at = started + seconds
    async with asyncio.TaskGroup() as tasks:
        for turn in turns:
            tasks.create_task(repeat(turn))
    lasted = time.perf_counter() - started
    took.sort()
    return Result(
        title,
        round(len(took) / lasted, 1),
        round(took[len(took) // 2] * 1000, 3),
        round(took[len(took) * 99 // 100] * 1000, 3),
    )


def show(results: list[Result], *, header: bool) -> None:
    """Print a table, or lines with tabs in a pipe."""
    if not _show.for_people():
        if header:
            _show.print_line(*COLUMNS)
        for one in results:
            _show.print_line(one.case, one.per_second, one.median_ms, one.p99_ms)
        return
    table = Table("acquire and release, repeated", title="aiodlock bench")
    for heading in ("per second", "median, ms", "99th percentile, ms"):
        table.add_column(heading, justify="right")
    for one in results:
        table.add_row(
            one.case, f"{one.per_second:,.0f}", f"{one.median_ms:.3f}", f"{one.p99_ms:.3f}"
        )
    _show.render(table)
