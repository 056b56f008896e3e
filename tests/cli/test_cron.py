"""Twenty periods of a cron job on three hosts, by real ``aiodlock run`` processes.

The hosts' clocks differ by a part of the period, with some jitter, and the job is short: without more it
runs on each of them. Everything is scaled down: a period has three seconds.

A busy machine starts a process later than any clock would be wrong. Such a period is told by its times
alone, whatever ran in it: it does not count, the next one begins with nothing on record, and from then on
periods are longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path

import pytest

from .. import forked
from ..scenes import STARTING
from ..servers import Store

pytestmark = [pytest.mark.stores("valkey9"), pytest.mark.timeout(600)]

PERIODS, HOSTS = 20, 3
#: Seconds.
FIRST_PERIOD, LONGER = 3.0, 1.25
#: Parts of the period: between the clocks of two hosts, and how much later than its clock a host begins.
APART, JITTER = 1 / 30, 1 / 60
#: So long is tried. What was not reached by then, this machine is too busy for.
ENOUGH = 400.0


@dataclass(frozen=True)
class Job:
    """How a crontab starts a job."""

    name: Callable[[int], str]
    #: With the part of the period for which what the option says lasts; None: always ten minutes.
    option: str
    lasts: float | None
    #: For how long the job works, as a part of the period.
    works: float = 1 / 30
    #: The exit code of the hosts on which it does not run.
    elsewhere: int = 0


JOBS = {
    "period in the name": Job(lambda period: f"report:{period}", "--once", None),
    "kept for half of the period": Job(lambda _: "poll", "--once", 1 / 2),
    "kept for as long as the period": Job(lambda _: "hourly", "--once", 1.0, works=0.35),
    "held at least": Job(lambda _: "nightly", "--hold-at-least", 1 / 2, elsewhere=75),
}


class Host:
    """One host: starts runs, and knows how and when they ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._runs: dict[int, asyncio.Future[tuple[int, float]]] = {}
        self._hearing = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, code, when = line.split()
            self._runs.pop(int(number)).set_result((int(code), float(when)))

    async def run(self, *arguments: str) -> tuple[int, float]:
        """Start ``aiodlock run``; return its exit code and when it ended."""
        number = random.getrandbits(60)
        ended: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()
        self._runs[number] = ended
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps([number, "run", "--quiet", *arguments]).encode() + b"\n"
        )
        return await ended


@asynccontextmanager
async def host(url: str) -> AsyncIterator[Host]:
    process = await forked.start(
        "tests.cli.cron_host",
        env={**os.environ, "AIODLOCK_URL": url},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(STARTING):
            assert await process.stdout.readline() == b"ready\n"
        yield Host(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


class Cron:
    """One job on all hosts, period after period."""

    def __init__(self, job: Job, hosts: list[Host], log: Path) -> None:
        self._job, self._hosts, self._log = job, hosts, log
        self._length = FIRST_PERIOD
        self._ran = 0
        #: How often the job ran in each period in which no host was late; a list for those that follow
        #: each other.
        self.rows: list[list[int]] = [[]]
        log.touch()

    def __str__(self) -> str:
        return f"{self.rows}, the last period {self._length:.1f} s"

    async def run(self, later: float) -> None:
        tick = time.monotonic() + later
        for period in count():
            starts = [self._start(period, tick, number) for number in range(1, HOSTS + 1)]
            ended = max(await asyncio.gather(*starts))
            ran = len(self._log.read_text().splitlines()) - self._ran
            self._ran += ran
            if ended < tick + self._length * self._on_time(ran):
                self.rows[-1].append(ran)
                tick = max(tick + self._length, ended if self._job.lasts is None else 0.0)
            else:
                self.rows.append([])
                tick = max(ended, tick) + self._length * (self._job.lasts or 0.0) + 0.1
                self._length *= LONGER
            if sum(map(len, self.rows)) == PERIODS:
                return

    def _on_time(self, ran: int) -> float:
        """Return the part of the period within which all runs must have ended, or it does not count.

        All have asked before their runs ended, and what lasts has begun by then.
        """
        match self._job.lasts:
            case None:
                return inf
            case 1.0:
                # Where it did not run, the record of the period before must have stood until all had asked.
                return 0.95 if ran else self._job.works
            case part:
                return part

    async def _start(self, period: int, tick: float, number: int) -> float:
        job, length = self._job, self._length
        begins = tick + length * (number * APART + random.uniform(0.0, JITTER))
        await asyncio.sleep(begins - time.monotonic())
        lasts = 600.0 if job.lasts is None else job.lasts * length
        options = (job.option, f"{lasts}", *(["--nonblock"] if job.elsewhere else []))
        effect = f"sleep {length * job.works:.3f}; echo {period} >> {self._log}"
        code, ended = await self._hosts[number - 1].run(
            *options, job.name(period), "--", "sh", "-c", effect
        )
        assert code in (0, job.elsewhere)
        return ended


async def test_job_of_three_hosts_runs_once_in_each_of_twenty_periods(
    store: Store, tmp_path: Path
) -> None:
    async with host(store.url) as one, host(store.url) as two, host(store.url) as three:
        hosts = [one, two, three]
        crons = {
            name: Cron(job, hosts, tmp_path / name.replace(" ", "-")) for name, job in JOBS.items()
        }
        for one_host in hosts:  # what is done for the first time takes longer
            await one_host.run("warm", "--", "true")
        # Not all at the same moment: this is about the hosts of one job.
        apart = FIRST_PERIOD / len(crons)
        running = [
            asyncio.create_task(cron.run(number * apart))
            for number, cron in enumerate(crons.values())
        ]
        _, unfinished = await asyncio.wait(running, timeout=ENOUGH)
        for task in unfinished:
            task.cancel()
        for task in running:
            with suppress(asyncio.CancelledError):
                await task
    for name, cron in crons.items():
        print(f"{name}: {cron}")
        for row in cron.rows:
            if name == "kept for as long as the period":
                assert row == [1, 0] * (len(row) // 2) + [1] * (len(row) % 2), name
            else:
                assert row == [1] * len(row), name
        assert any(cron.rows), f"{name}: no period at all was as it should be"
    if unfinished:
        pytest.skip(
            "this machine is too busy for twenty periods in time; those that were are right"
        )
