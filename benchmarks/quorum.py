"""A quorum of five under contention, beside pottery's Redlock: ``python -m benchmarks.quorum``.

Processes of clients take turns on one name for some seconds, ours and pottery's one after the other, again
and again, on the same servers; then the same with two of the five frozen, and with two killed. How long a
turn lasts (``--body``) and how long a client does something else between its turns (``--think``) decide
what there is to gain, so several of both can be told. Pottery waits for a frozen server as long as its
connections let it, by default for ever: so there is one with a time-out, too.

Turns per second alone favour whoever lets the last holder in again: that costs nothing, and the others
wait. So it is told besides how many of the clients had a turn at all, and the longest wait of any.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import redis.asyncio

import aiodlock
from aiodlock._embedded import EmbeddedServer

_PROCESSES, _CLIENTS = 4, 4

Turn = Callable[[], Any]


async def _ours(stack: AsyncExitStack, urls: list[str]) -> Turn:
    client = await stack.enter_async_context(aiodlock.Client(urls))
    lock = client.lock("turn")
    return lambda: lock


async def _pottery(stack: AsyncExitStack, urls: list[str], **options: Any) -> Turn:
    from pottery import AIORedlock

    clients = [redis.asyncio.Redis.from_url(url, **options) for url in urls]
    masters = {await stack.enter_async_context(client) for client in clients}
    return lambda: AIORedlock(key="turn", masters=masters, auto_release_time=10)


_CONTENDERS: dict[str, Callable[..., Any]] = {
    "aiodlock": _ours,
    "pottery": _pottery,
    "pottery with a time-out": functools.partial(_pottery, socket_timeout=0.1),
}


@dataclass
class _Told:
    """What one client tells of a run."""

    turns: int = 0
    failed: int = 0
    #: Seconds, also of a wait that the end of the run has cut short.
    longest_wait: float = 0.0
    #: Seconds of the CPU for all clients of its process.
    cpu: float = 0.0


async def _take_turns(
    who: str, urls: list[str], seconds: float, body: float, think: float
) -> list[_Told]:
    """Let the clients of this process take turns."""
    told = [_Told() for _ in range(_CLIENTS)]
    async with AsyncExitStack() as stack:
        turns = [await _CONTENDERS[who](stack, urls) for _ in range(_CLIENTS)]
        end, cpu = time.monotonic() + seconds, time.process_time()

        async def work(turn: Turn, mine: _Told) -> None:
            since = time.monotonic()

            def waited() -> None:
                mine.longest_wait = max(mine.longest_wait, time.monotonic() - since)

            while time.monotonic() < end:
                try:
                    async with turn():
                        waited()
                        mine.turns += time.monotonic() < end
                        await asyncio.sleep(body)
                    if think:
                        await asyncio.sleep(random.expovariate(1 / think))
                    since = time.monotonic()
                except Exception:  # whatever the contender calls it
                    mine.failed += 1
            waited()

        # Who waits for a turn at the end is not waited for.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + 1.0):
                await asyncio.gather(*map(work, turns, told))
        for mine in told:
            mine.cpu = (time.process_time() - cpu) / _CLIENTS
    return told


def _process(work: tuple[str, list[str], float, float, float]) -> list[_Told]:
    return asyncio.run(_take_turns(*work))


def _run(who: str, urls: list[str], seconds: float, body: float, think: float) -> list[_Told]:
    """Return what all clients of all processes tell."""
    for url in urls:
        away = (redis.ConnectionError, redis.TimeoutError)
        with suppress(*away), redis.Redis.from_url(url, socket_timeout=1) as client:
            client.delete("redlock:turn")
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        told = pool.map(_process, [(who, urls, seconds, body, think)] * _PROCESSES, chunksize=1)
    return [one for of_process in told for one in of_process]


def _line(told: list[_Told], seconds: float) -> str:
    turns = [one.turns for one in told]
    served, longest = sum(map(bool, turns)), max(one.longest_wait for one in told)
    cpu = 1000 * sum(one.cpu for one in told) / max(sum(turns), 1)
    return (
        f"{sum(turns) / seconds:.1f} turns/s, {sum(one.failed for one in told)} attempts failed, "
        f"{served} of {len(told)} clients served ({min(turns)} to {max(turns)} turns each), "
        f"longest wait {longest:.2f} s, {cpu:.2f} ms of client CPU a turn"
    )


def _compare(about: str, urls: list[str], body: float, think: float, options: Any) -> None:
    """Let all contenders run, by turns, and say how they did."""
    about = f"{about}, body {1000 * body:g} ms, pause {1000 * think:g} ms"
    rates: dict[str, list[float]] = {who: [] for who in _CONTENDERS}
    for _ in range(options.repeat):
        for who, found in rates.items():
            told = _run(who, urls, options.seconds, body, think)
            found.append(sum(one.turns for one in told) / options.seconds)
            print(f"{about}: {who} {_line(told, options.seconds)}", flush=True)
    ours = statistics.median(rates.pop("aiodlock"))
    for who, found in rates.items():
        theirs = statistics.median(found)
        times = f"{ours / theirs:.1f} times" if theirs else "it took none"
        print(f"{about}: {ours:.1f} turns/s, {who} {theirs:.1f}, {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--body", type=float, nargs="+", default=[0.001], help="seconds that a turn lasts"
    )
    parser.add_argument(
        "--think", type=float, nargs="+", default=[0.0], help="between turns, on average"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        nodes = [stack.enter_context(EmbeddedServer(tcp=True)) for _ in range(5)]
        urls = [node.url for node in nodes]
        for state in ("all five", "two of five frozen", "two of five killed"):
            for node in nodes[3:]:
                if state == "two of five frozen":
                    node.pause()
                elif state == "two of five killed":
                    node.resume()
                    node.kill()
            for body, think in itertools.product(options.body, options.think):
                _compare(state, urls, body, think, options)


if __name__ == "__main__":
    main()
