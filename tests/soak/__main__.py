"""A soak: several processes, every mode, random faults, for as long as one likes.

    python -m tests.soak --minutes 10

Ends with one line: load, faults, violations; and with code 0 only when there was no violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from aiodlock._embedded import EmbeddedServer

from ..proxy import FaultProxy
from ..servers import REAL, embedded
from .faults import Tormentor
from .journal import check, read
from .memory import Series, plot, resident
from .worker import STARVED, TTL

_ROOT = Path(__file__).parents[2]


@dataclass
class Worker:
    process: asyncio.subprocess.Process
    through_proxy: bool
    journal: Path
    is_being_killed: bool = False


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._rng = random.Random(options.seed)
        self._server: EmbeddedServer = embedded(
            options.store,
            tcp=False,
            appendonly="yes",
            appendfsync="always",
            **_allow_debug(options.store),
        )
        self._workers: list[Worker] = []
        self._started = 0
        self.violations: list[str] = []
        self.memory: list[Series] = []

    async def run(self) -> None:
        options = self._options
        began = time.monotonic()
        with self._server:
            async with FaultProxy(self._server.url) as proxy:
                self._proxy = proxy
                # One that is never killed on each way to the server: those tell of the memory.
                for number in range(options.processes):
                    self._workers.append(await self._start(through_proxy=number % 2 == 1))
                tormentor = Tormentor(
                    self._server,
                    proxy,
                    self._rng,
                    victims=lambda: range(len(self._workers)),
                    signal_one=self._signal,
                    kill_one=self._kill_and_replace,
                )
                sampling = asyncio.create_task(self._sample(began))
                watching = asyncio.create_task(self._watch())
                try:
                    async with asyncio.timeout(options.minutes * 60):
                        await tormentor.run(options.pause)
                except TimeoutError:
                    pass
                finally:
                    for task in (sampling, watching):
                        task.cancel()
                    await asyncio.gather(sampling, watching, return_exceptions=True)
                await self._end()
                await self._look_at_what_is_left()
        self._tell(tormentor.counts.total(), dict(tormentor.counts))

    # -- workers ---------------------------------------------------------------------------------

    async def _start(self, *, through_proxy: bool) -> Worker:
        self._started += 1
        journal = self._folder / f"journal-{self._started}"
        url = self._proxy.url if through_proxy else self._server.url
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.soak.worker", url, str(journal)),
                *(str(self._rng.randrange(2**32)), str(self._options.tasks)),
                cwd=_ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            try:
                if await process.stdout.readline() == b"ready\n":
                    return Worker(process, through_proxy, journal)
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            await process.wait()  # entering met with a fault: that is allowed to fail

    def _signal(self, number: int, what: signal.Signals) -> None:
        worker = self._workers[number]
        if worker.process.returncode is None:
            worker.process.send_signal(what)

    async def _kill_and_replace(self) -> None:
        if self._options.processes <= 2:
            return
        number = self._rng.randrange(2, self._options.processes)
        worker = self._workers[number]
        worker.is_being_killed = True
        worker.process.kill()
        await worker.process.wait()
        self._workers[number] = await self._start(through_proxy=worker.through_proxy)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for worker in self._workers:
                if worker.process.returncode is not None and not worker.is_being_killed:
                    worker.is_being_killed = True
                    self.violations.append(f"a worker ended: {worker.process.returncode}")

    async def _end(self) -> None:
        await self._proxy.heal()
        self._server.resume()
        running = [worker for worker in self._workers if worker.process.returncode is None]
        for worker in running:
            worker.process.send_signal(signal.SIGCONT)
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in running:
            try:
                async with asyncio.timeout(STARVED + 10):
                    out, _ = await worker.process.communicate()
            except TimeoutError:
                self.violations.append(f"liveness: {worker.journal.name} does not end")
                worker.process.kill()
                await worker.process.wait()
                continue
            left = json.loads(out) if worker.process.returncode == 0 else None
            if left is None or any(left.values()):
                self.violations.append(
                    f"leak: {worker.journal.name} ends with {left or 'an error'}"
                )

    async def _look_at_what_is_left(self) -> None:
        give_up_at = time.monotonic() + 10 * TTL
        async with redis.asyncio.Redis.from_url(self._server.url, decode_responses=True) as client:
            while True:
                keys = [str(key) async for key in client.scan_iter(count=1000)]
                left = [key for key in keys if not key.endswith(":token") and ":marker:" not in key]
                if not left:
                    break
                if time.monotonic() > give_up_at:
                    self.violations.append(f"leak: keys are left: {left[:5]}")
                    break
                await asyncio.sleep(0.1)
            forever = [key for key in keys if await client.ttl(key) == -1]
            if forever:
                self.violations.append(f"leak: keys without a TTL: {forever[:5]}")

    # -- what is seen ----------------------------------------------------------------------------

    async def _sample(self, began: float) -> None:
        clients = [Series(f"client {number}") for number in range(min(2, len(self._workers)))]
        server = Series(f"server ({self._options.store}, used_memory)")
        self.memory = [*clients, server]
        while True:
            at = time.monotonic() - began
            for series, worker in zip(clients, self._workers, strict=False):
                if worker.process.returncode is None:
                    series.points.append((at, resident(worker.process.pid)))
            try:
                async with asyncio.timeout(0.5):
                    async with redis.asyncio.Redis.from_url(self._server.url) as client:
                        info = await client.info("memory")
                server.points.append((at, int(info["used_memory"])))
            except (RedisError, OSError, TimeoutError):
                pass  # it is away just now
            self._proxy.forget()
            await asyncio.sleep(1.0)

    def _tell(self, faults: int, kinds: dict[str, int]) -> None:
        options = self._options
        record = read(sorted(self._folder.glob("journal-*")))
        self.violations += record.violations + check(record.holds)
        if options.minutes >= 5:  # shorter ones are all warming up
            self.violations += [f"memory: {s} is not flat" for s in self.memory if not s.is_flat]
        counts = record.counts
        print(json.dumps({"seed": options.seed, "faults": kinds, "counts": counts}, sort_keys=True))
        for violation in self.violations[:20]:
            print(f"violation: {violation}")
        rate = counts["acquisitions"] / (options.minutes * 60)
        line = (
            f"soak of {options.minutes:g} min on {options.store}: "
            f"{counts['acquisitions']:,} acquisitions ({rate:,.0f}/s) of {self._started} processes, "
            f"{counts['cancelled']:,} cancelled, {counts['lost: expired']:,} leases lost and told, "
            f"longest wait {record.longest_wait:.1f} s; {faults:,} faults; "
            f"memory {', '.join(map(str, self.memory))}; {len(self.violations)} violations"
        )
        if options.plot is not None:
            plot(self.memory, line.partition("; memory")[0].replace(", ", ",\n", 1), options.plot)
        print(line)


def _allow_debug(store: str) -> dict[str, str]:
    # Redis 6.2 has no such option and always allows it.
    return {} if store == "redis62" else {"enable_debug_command": "yes"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--store", choices=REAL, default="valkey9")
    parser.add_argument("--processes", type=int, default=4, help="the first two are never killed")
    parser.add_argument("--tasks", type=int, default=12, help="of each process")
    parser.add_argument(
        "--pause", type=float, default=3.0, help="mean seconds between faults of a kind"
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--plot", type=Path, help="draw memory over time into this PNG")
    parser.add_argument("--journals", type=Path, help="keep in this folder what the workers wrote")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="aiodlock-soak-") as folder:
        if options.journals is not None:
            options.journals.mkdir(parents=True)
        soak = Soak(options, options.journals or Path(folder))
        asyncio.run(soak.run())
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
