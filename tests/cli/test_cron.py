"""Twenty periods of a cron job on three hosts, by real ``aiodlock run`` processes.

The hosts' clocks differ by a tenth of a second, with some jitter, and the job is short: without more it
runs on each of them. Everything is scaled down: a period has three seconds.

A machine that stalls starts a process later than any clock would be wrong. Such a period is told by its
times alone, whatever ran in it; it does not count, and the next one begins with nothing on record.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..scenes import STARTING
from ..servers import Store

pytestmark = [pytest.mark.stores("valkey9"), pytest.mark.timeout(600)]

PERIOD, PERIODS, HOSTS = 3.0, 20, 3
#: Between the clocks of two hosts, and how much later than its clock says a host begins at most.
APART, JITTER = 0.1, 0.05
#: A run that is done with the store so long after the tick was not held up.
ON_TIME = PERIOD / 2


@dataclass(frozen=True)
class Job:
    """How a crontab starts a job, and how long that works."""

    options: tuple[str, ...]
    name: Callable[[int], str]
    seconds: float = 0.1
    #: For so long a success or a hold of a period lasts into the next ones.
    lasts: float = 0.0
    #: The exit code of the hosts on which it does not run.
    elsewhere: int = 0


JOBS = {
    "period in the name": Job(("--once", "600"), lambda period: f"report:{period}"),
    "kept for half of the period": Job(
        ("--once", str(PERIOD / 2)), lambda _: "poll", lasts=PERIOD / 2
    ),
    "kept for as long as the period": Job(
        ("--once", str(PERIOD)), lambda _: "hourly", seconds=1.2, lasts=PERIOD
    ),
    "held at least": Job(
        ("--nonblock", "--hold-at-least", str(PERIOD / 2)),
        lambda _: "nightly",
        lasts=PERIOD / 2,
        elsewhere=75,
    ),
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
        ended = self._runs[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps([number, "run", "--quiet", *arguments]).encode() + b"\n"
        )
        return await ended


@asynccontextmanager
async def host(url: str) -> AsyncIterator[Host]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.cli.cron_host"),
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
        self.late = 0
        log.touch()

    async def run(self) -> list[int]:
        """Return for each of twenty periods in which no host was held up how often the job ran.

        Lists begin anew after a period that does not count; a list of less than two counts for nothing.
        """
        counts: list[int] = []
        period, tick, before = 0, time.monotonic() + 0.1, 0
        self.rows: list[list[int]] = [[]]
        while sum(map(len, self.rows)) < PERIODS:
            ended = await asyncio.gather(
                *(self._start(period, tick, number) for number in range(1, HOSTS + 1))
            )
            ran = len(self._log.read_text().splitlines()) - before
            before += ran
            # A success that stands was recorded when the job had run; until then all must have asked.
            margin = self._job.seconds if ran else 0.0
            allowed = min(ON_TIME, self._job.seconds + APART) if not ran else ON_TIME + margin
            if max(ended) < tick + allowed:
                self.rows[-1].append(ran)
                tick += PERIOD
            else:
                self.late += 1
                self.rows.append([])
                tick = max(*ended, tick) + self._job.lasts + 0.1
            period += 1
        for row in self.rows:
            counts += row
        return counts

    async def _start(self, period: int, tick: float, number: int) -> float:
        begins = tick + number * APART + random.uniform(0.0, JITTER)
        await asyncio.sleep(begins - time.monotonic())
        effect = f"sleep {self._job.seconds}; echo {period} >> {self._log}"
        code, ended = await self._hosts[number - 1].run(
            *self._job.options, self._job.name(period), "--", "sh", "-c", effect
        )
        assert code in (0, self._job.elsewhere)
        return ended


async def test_job_of_three_hosts_runs_once_in_each_of_twenty_periods(
    store: Store, tmp_path: Path
) -> None:
    async with host(store.url) as one, host(store.url) as two, host(store.url) as three:
        crons = {
            name: Cron(job, [one, two, three], tmp_path / name.replace(" ", "-"))
            for name, job in JOBS.items()
        }
        await asyncio.gather(*(cron.run() for cron in crons.values()))
    for name, cron in crons.items():
        print(f"{name}: {cron.rows}, {cron.late} late")
        for row in cron.rows:
            if name == "kept for as long as the period":
                assert row == [1, 0] * (len(row) // 2) + [1] * (len(row) % 2), name
            else:
                assert row == [1] * len(row), name
