"""Processes that contend for one name while the test does things to the servers.

    python -m tests.topology.load --failovers 20 --min-replicas 1 --replicas 1

runs it for long, outside of the suite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiodlock._clock import now
from aiodlock._embedded import find_valkey9

from .. import forked
from .servers import SentinelService
from .witness import Verdict, beginnings, create, judge

_ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def contending(
    url: str,
    store: Path,
    *,
    processes: int = 4,
    tasks: int = 4,
    min_replicas: int = 0,
    ttl: float = 3,
) -> AsyncIterator[Counter[str]]:
    """Have processes of tasks take turns for as long as the block lasts; then the counter tells how
    it went."""
    create(store)
    told: Counter[str] = Counter()
    arguments = (url, str(store), str(tasks), str(min_replicas), str(ttl))
    workers: list[Process] = []
    try:
        for _ in range(processes):
            command = ("tests.topology.worker", *arguments)
            workers.append(await forked.start(*command, stdin=PIPE, stdout=PIPE, cwd=_ROOT))
        for worker in workers:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"ready\n"
        yield told
        for worker in workers:
            output, _ = await worker.communicate(b"stop\n")
            assert worker.returncode == 0
            told.update(json.loads(output))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


def turns_so_far(store: Path) -> int:
    """Return how many turns were taken by now."""
    return judge(store).turns


async def until_turns(store: Path, more: int, within: float = 120.0) -> None:
    """Wait for so many further turns."""
    wanted, give_up_at = turns_so_far(store) + more, time.monotonic() + within
    while turns_so_far(store) < wanted:
        assert time.monotonic() < give_up_at, f"no {more} turns within {within:g} s"
        await asyncio.sleep(0.02)


async def fail_over(service: SentinelService, how: str) -> float:
    """Take the primary away and wait for another; return how long that took."""
    began = time.monotonic()
    lost = service.pause_primary() if how == "pause" else service.kill_primary()
    await asyncio.to_thread(service.wait_promoted, lost)
    took = time.monotonic() - began
    if how == "pause":
        lost.resume()  # it believes to be the primary until a sentinel tells it
        await asyncio.to_thread(service.settle)
    else:
        await asyncio.to_thread(service.bring_back, lost)
    return took


def _without_grants(store: Path, lost_at: list[float]) -> list[float]:
    """Return for how long after each loss nobody got in."""
    began = beginnings(store)
    return [next((moment - at for moment in began if moment > at + 0.05), 0.0) for at in lost_at]


async def _main(
    failovers: int, replicas: int, min_replicas: int, ttl: float, hows: list[str]
) -> Verdict:
    with (
        tempfile.TemporaryDirectory() as directory,
        SentinelService(find_valkey9(), replicas=replicas, down_after=1000) as service,
    ):
        store = Path(directory) / "witness.db"
        async with contending(service.url, store, min_replicas=min_replicas, ttl=ttl) as told:
            await until_turns(store, 20)
            lost_at = []
            for number in range(1, failovers + 1):
                how = hows[number % len(hows)]
                await asyncio.sleep(random.uniform(0.0, 3.0))  # so as to meet long bodies, not gaps
                began, before = time.monotonic(), turns_so_far(store)
                lost_at.append(now())
                promoted = await fail_over(service, how)
                settled = time.monotonic() - began
                await until_turns(store, 20)
                print(
                    f"{number}: {how}, promoted after {promoted:.1f} s, settled after {settled:.1f} s, "
                    f"working again after {time.monotonic() - began:.1f} s, "
                    f"{turns_so_far(store) - before} turns",
                    flush=True,
                )
        verdict = judge(store)
        gaps = sorted(_without_grants(store, lost_at))
    print(
        f"without grants: median {gaps[len(gaps) // 2]:.1f} s, from {gaps[0]:.1f} to {gaps[-1]:.1f}"
    )
    print(dict(told))
    print(verdict)
    return verdict


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--failovers", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--ttl", type=float, default=3.0)
    parser.add_argument("--how", default="kill,pause")
    options = parser.parse_args()
    verdict = asyncio.run(
        _main(
            options.failovers,
            options.replicas,
            options.min_replicas,
            options.ttl,
            options.how.split(","),
        )
    )
    sys.exit(not verdict.all_is_well)
