"""One part of a soak: workers, a tormentor, and what they have come to."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aiodlock._clock import now

from .disk import mounted
from .faults import Crew, Tormentor, end_if_cancelled
from .journal import Record, check, gaps, read, without
from .memory import Series, resident
from .tormentors import disk_of, tormentor_of
from .worker import FORGOTTEN, STARVED, WAITER_TTL

_ROOT = Path(__file__).parents[2]
#: For a worker to notice anything on a busy machine, in seconds.
_LATE = 2.0
#: Servers that serve no worker for so long (seconds) are no fault that ends: the soak gives up.
_ENTERS_WITHIN = 120.0


@dataclass(frozen=True)
class Options:
    """What one part is."""

    store: str
    minutes: float
    processes: int
    tasks: int
    pause: float
    seed: int


@dataclass
class Result:
    """What one part came to: a line of a campaign's file."""

    store: str
    minutes: float
    seed: int
    faults: dict[str, int]
    counts: dict[str, int]
    processes: int
    longest_wait: float
    #: Seconds for which a name that was waited for had no holder, without the time in which a fault lasted.
    longest_gap: float
    #: What that may be: a holder's ttl, a waiter's and a third, and what the store needs to recover.
    bound: float
    #: Of each thing measured: bytes in the second quarter of the time, and in the last.
    memory: dict[str, tuple[int, int]]
    #: The largest load of the machine within a minute.
    load: float
    violations: list[str] = field(default_factory=list)
    #: What was seen after the servers had said themselves that they lost what they had acknowledged.
    not_judged: list[str] = field(default_factory=list)
    #: Minutes before they did; None: they did not.
    judged: float | None = None

    def __str__(self) -> str:
        took = self.counts.get("acquisitions", 0)
        return (
            f"soak of {self.minutes:.1f} min on {self.store}: "
            f"{took:,} acquisitions ({took / max(self.minutes, 1e-9) / 60:,.0f}/s) "
            f"of {self.processes} processes, "
            f"{self.counts.get('cancelled', 0):,} cancelled, "
            f"{self.counts.get('lost: expired', 0):,} leases lost and told, "
            f"longest wait {self.longest_wait:.1f} s, longest without a holder {self.longest_gap:.1f} s "
            f"(bound {self.bound:.1f} s); {sum(self.faults.values()):,} faults; "
            f"load up to {self.load:.0f}; "
            + "".join(
                f"{label} {before / 2**20:.1f} -> {after / 2**20:.1f} MiB; "
                for label, (before, after) in self.memory.items()
            )
            + f"{len(self.violations)} violations"
            + (
                ""
                if self.judged is None
                else f"; servers lost data after {self.judged:.1f} min, {len(self.not_judged)} not judged"
            )
        )


@dataclass
class _Worker:
    process: asyncio.subprocess.Process
    through_lines: bool
    journal: Path
    is_being_killed: bool = False


class Soak(Crew):
    """Mutable state: ``_workers``, ``_started``, ``violations``, ``memory``, ``_load``, ``_broke`` (when
    servers lost data, and their words).
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._rng = random.Random(options.seed)
        self._workers: list[_Worker] = []
        self._started = 0
        self._load = 0.0
        self.violations: list[str] = []
        self.memory: list[Series] = []
        #: The longest wait of each second: (seconds since the start, seconds).
        self.waits: list[tuple[float, float]] = []
        self._broke: tuple[float, str] | None = None

    async def run(self) -> Result:
        """Go on for as long as it is to last, or until SIGINT or SIGTERM; then tell."""
        options = self._options
        stop = asyncio.Event()
        for ending in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(ending, stop.set)
        with mounted(disk_of(options.store)) as disk:
            async with tormentor_of(options.store, self._rng, disk) as tormentor:
                self._tormentor = tormentor
                tormentor.crew = self
                began = now()
                # One that is never killed on each way to the servers: those tell of the memory.
                for number in range(options.processes):
                    self._workers.append(await self._start(through_lines=number % 2 == 1))
                ready = now()
                tasks = [
                    asyncio.create_task(tormentor.run(options.pause)),
                    asyncio.create_task(self._sample(began)),
                    asyncio.create_task(self._watch()),
                    asyncio.create_task(stop.wait()),
                ]
                await asyncio.wait(
                    tasks, timeout=options.minutes * 60, return_when=asyncio.FIRST_COMPLETED
                )
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Exception):
                        raise ended
                lasted = now() - ready
                await tormentor.mend()
                await self._end()
                await self._look_at_what_is_left(tormentor)
                record = read(sorted(self._folder.glob("journal-*")))
                for seen in record.violations:
                    self.violations.append("; ".join((seen, *await tormentor.explain(seen))))
                for errors in sorted(self._folder.glob("errors-*")):
                    if text := errors.read_text(errors="replace"):
                        self.violations.append(f"log of a worker, {errors.name}: {text[:2000]!r}")
                for number, log in enumerate(tormentor.logs(), 1):
                    shutil.copy(log, self._folder / f"server-{number}.log")
                if self.violations:
                    tormentor.keep(self._folder)
                self._broke = tormentor.broke()
        return self._judge(tormentor, record, lasted, began)

    # -- workers ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self._workers)

    async def _start(self, *, through_lines: bool) -> _Worker:
        self._started += 1
        journal = self._folder / f"journal-{self._started}"
        log = self._folder / f"errors-{self._started}"
        source = json.dumps(
            [
                self._tormentor.source(through_lines=through_lines),
                dict(self._tormentor.client_options),
            ]
        )
        give_up_at = now() + _ENTERS_WITHIN
        while now() < give_up_at:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "tests.soak.worker", source, str(journal)),
                    *(str(self._rng.randrange(2**32)), str(self._options.tasks)),
                    str(self._tormentor.ttl),
                    cwd=_ROOT,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                )
            assert process.stdout is not None
            try:
                if await process.stdout.readline() == b"ready\n":
                    return _Worker(process, through_lines, journal)
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            # Entering met with a fault: that is allowed to fail, also when the soak ends in this moment.
            log.unlink()
            await process.wait()
        raise RuntimeError(f"no worker has entered its client at {source} for {_ENTERS_WITHIN:g} s")

    def signal_one(self, number: int, what: signal.Signals) -> None:
        worker = self._workers[number]
        if worker.process.returncode is None:
            worker.process.send_signal(what)

    async def kill_one(self) -> None:
        if self._options.processes <= 2:
            return
        number = self._rng.randrange(2, self._options.processes)
        worker = self._workers[number]
        worker.is_being_killed = True
        worker.process.kill()
        await worker.process.wait()
        self._workers[number] = await self._start(through_lines=worker.through_lines)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for worker in self._workers:
                if worker.process.returncode is not None and not worker.is_being_killed:
                    worker.is_being_killed = True
                    self.violations.append(f"a worker ended: {worker.process.returncode}")

    async def _end(self) -> None:
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

    async def _look_at_what_is_left(self, tormentor: Tormentor) -> None:
        give_up_at = time.monotonic() + 10 * tormentor.ttl + 2 * tormentor.recovery
        while left := await tormentor.left():
            if time.monotonic() > give_up_at:
                self.violations.append(f"leak: left in the store: {left[:5]}, {len(left)} in all")
                return
            await asyncio.sleep(0.2)

    # -- what is seen ----------------------------------------------------------------------------

    async def _sample(self, began: float) -> None:
        clients = [Series(f"client {number}") for number in range(min(2, len(self._workers)))]
        server = Series(f"servers ({self._options.store})")
        self.memory = [*clients, server]
        while True:
            at = now() - began
            self._load = max(self._load, os.getloadavg()[0])
            for series, worker in zip(clients, self._workers, strict=False):
                if worker.process.returncode is None:
                    series.points.append((at, resident(worker.process.pid)))
            # Each store's driver has its own words for a server that is away.
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    what, size = await self._tormentor.memory()
                server.label = f"servers ({self._options.store}, {what})"
                server.points.append((at, size))
            end_if_cancelled()
            await asyncio.sleep(1.0)

    def _judge(self, tormentor: Tormentor, record: Record, lasted: float, began: float) -> Result:
        options = self._options
        self.violations += check(record.holds, readers_share_tokens=options.store == "quorum")
        judged = self.memory if tormentor.memory_is_judged else self.memory[:-1]
        if lasted >= 300:  # shorter ones are all warming up
            self.violations += [f"memory: {s} is not flat" for s in judged if not s.is_flat]
        bound = tormentor.ttl + WAITER_TTL * 4 / 3 + tormentor.recovery + _LATE
        found = gaps(record, [span[:2] for span in tormentor.spans])
        by_servers = [span[:2] for span in tormentor.spans if span.to_servers]
        for wait, alone in without(record.waits, by_servers):
            if alone > STARVED * wait.queues:
                self.violations.append(
                    f"{wait.granted:.3f} starved: {wait.name} was waited for "
                    f"{wait.granted - wait.asked:.1f} s, "
                    f"{alone:.1f} s of them without anything done to the servers"
                )
        for gap in found:
            if gap.quiet > bound + options.pause:  # a fault is seen in full when it is over
                self.violations.append(
                    f"{gap.ended:.3f} liveness: nobody held {gap.name} for {gap.ended - gap.began:.1f} s, "
                    f"{gap.quiet:.1f} s of them without a fault (from {gap.began - began:.1f} s on)"
                )
        told = [
            (self._with_what_was_done(what, tormentor), self._is_not_judged(what, tormentor))
            for what in self.violations
        ]
        seconds: Counter[int] = Counter()
        for wait in record.waits:
            second = int(wait.granted - began)
            seconds[second] = max(seconds[second], round((wait.granted - wait.asked) * 1000))
        self.waits = [(float(at), seconds[at] / 1000) for at in range(int(lasted))]
        return Result(
            store=options.store,
            minutes=round(lasted / 60, 2),
            seed=options.seed,
            faults=dict(tormentor.counts),
            counts=dict(record.counts),
            processes=self._started,
            longest_wait=round(record.longest_wait, 2),
            longest_gap=round(max((gap.quiet for gap in found), default=0.0), 2),
            bound=round(bound, 2),
            memory={series.label: series.growth() for series in self.memory},
            load=round(self._load, 1),
            violations=[what for what, aside in told if not aside],
            not_judged=[what for what, aside in told if aside],
            judged=None if self._broke is None else round((self._broke[0] - began) / 60, 2),
        )

    def _is_not_judged(self, violation: str, tormentor: Tormentor) -> bool:
        """Tell whether servers may have said before that they lost data, or may forget a lease."""
        moment = _moment_of(violation)
        if moment is not None and FORGOTTEN in violation and tormentor.may_forget(moment):
            return True
        return self._broke is not None and (moment is None or moment > self._broke[0])

    @staticmethod
    def _with_what_was_done(violation: str, tormentor: Tormentor) -> str:
        """Add to a violation that tells its moment what was done to whom in the 20 s before."""
        moment = _moment_of(violation)
        if moment is None:
            return violation
        done = [
            f"{span.what} from {moment - span.began:.1f} to {moment - span.ended:.1f} s before"
            for span in tormentor.spans
            if span.began < moment and span.ended > moment - 20.0
        ]
        return f"{violation} ({', '.join(done)})"


def _moment_of(violation: str) -> float | None:
    try:
        return float(violation.split(" ", 1)[0])
    except ValueError:
        return None
