"""Readers and writers in four processes, that are cancelled and killed all the time.

Two accounts are taken and held against each other: what the processes saw (files that outlive them,
outside of Redis) and what the server did (MONITOR). ``AIODLOCK_SECONDS`` sets how long a run takes
(default 3), with four deaths in three seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .. import forked
from ..scenes import STARTING, queued_for
from ..servers import Store
from .history import History, Life, monitored
from .reader_writer import NAME, TICK, TTL

SECONDS = float(os.environ.get("AIODLOCK_SECONDS", "3"))
DEATHS = round(SECONDS * 4 / 3)
PROCESSES = 4
TASKS = 6
#: Whoever waits behind the dead finds out when it extends: a third of its lease after theirs ended.
FOUND_OUT = TTL / 3 + 0.05
#: From a release to the body of the next; besides, for what the processes were kept from running.
LATE = 0.25


@dataclass
class Turn:
    """What a process saw of one grant: its moments in the body, all while the lease was held."""

    token: int
    mode: str
    request: str
    moments: list[float] = field(default_factory=list)


class Crowd:
    """The worker processes: four at a time, the others stand by for those that die."""

    def __init__(self, store: Store, folder: Path, readers: float) -> None:
        self._store, self._folder, self._readers = store, folder, readers
        self._rng = random.Random(readers)
        self._standing_by: list[asyncio.subprocess.Process] = []
        self._running: list[asyncio.subprocess.Process] = []
        self.died_at: list[float] = []

    async def run(self) -> list[dict[str, int]]:
        """Return what the survivors say in the end."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(PROCESSES + DEATHS):
                    group.create_task(self._start(number))
            for _ in range(PROCESSES):
                self._replace()
            for number in range(DEATHS):
                await asyncio.sleep(SECONDS / (DEATHS + 1) * self._rng.uniform(0.8, 1.2))
                await self._let_one_die(holding=number % 2 == 0)
                self._replace()
            await asyncio.sleep(SECONDS / (DEATHS + 1))
            return await asyncio.gather(*(self._finish(process) for process in self._running))
        finally:
            for process in self._standing_by + self._running:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _start(self, number: int) -> None:
        process = await forked.start(
            "tests.integration.reader_writer",
            self._store.url,
            *(str(number), str(self._readers), str(TASKS), str(self._folder / f"{number}.log")),
            cwd=Path(__file__).parents[2],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._standing_by.append(process)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"

    def _replace(self) -> None:
        process = self._standing_by.pop()
        self._running.append(process)
        assert process.stdin is not None
        process.stdin.write(b"go\n")

    async def _let_one_die(self, *, holding: bool) -> None:
        process = self._running.pop(self._rng.randrange(PROCESSES))
        if holding:
            assert process.stdin is not None
            process.stdin.write(b"die holding\n")
        else:
            process.kill()
        await asyncio.wait_for(process.wait(), STARTING)
        self.died_at.append(time.time())

    @staticmethod
    async def _finish(process: asyncio.subprocess.Process) -> dict[str, int]:
        out, _ = await process.communicate(b"stop\n")
        assert process.returncode == 0
        result: dict[str, int] = json.loads(out)
        return result


def turns(folder: Path) -> list[Turn]:
    """Return what the processes saw, in order of tokens."""
    seen: dict[int, Turn] = {}
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            if line.startswith("stalled"):
                continue
            token, mode, request, moment = line.split(" ")
            turn = seen.setdefault(int(token), Turn(int(token), mode, request))
            assert turn.request == request, "a token was given twice"
            turn.moments.append(float(moment))
    return [seen[token] for token in sorted(seen)]


def stalls(folder: Path) -> list[tuple[float, float]]:
    """Return from when until when a process was kept from running by the machine, each time."""
    found = []
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            if line.startswith("stalled"):
                _, seconds, ended = line.split(" ")
                found.append((float(ended) - float(seconds), float(ended)))
    return found


@asynccontextmanager
async def stalls_of(store: Store) -> AsyncIterator[list[tuple[float, float]]]:
    """Note from when until when the server waited for a processor, as long as the block lasts."""
    assert store.server is not None
    pid, found = store.server.pid, []

    async def watch() -> None:
        queued = queued_for(pid)
        while True:
            await asyncio.sleep(TICK)
            ended, before, queued = time.time(), queued, queued_for(pid)
            if queued > before:
                found.append((ended - (queued - before), ended))

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def overlaps(turns: list[Turn]) -> list[str]:
    """Return each turn that a writer's overlapped, as the processes saw it."""
    found = []
    until: dict[str, tuple[float, Turn | None]] = defaultdict(lambda: (0.0, None))
    for turn in sorted(turns, key=lambda turn: turn.moments[0]):
        for mode in ("exclusive", "shared") if turn.mode == "exclusive" else ("exclusive",):
            if until[mode][0] >= turn.moments[0]:
                found.append(f"{turn} beside {until[mode][1]}")
        until[turn.mode] = max(until[turn.mode], (turn.moments[-1], turn), key=lambda pair: pair[0])
    return found


def deaths_in_the_way(history: History, life: Life, died_at: list[float]) -> int:
    """Count the processes that left something dead in front of the request."""
    dead = [other for other in history.in_front_of(life) if other.died]
    if not dead:
        return 0
    began = min(other.arrived for other in dead)
    return sum(began <= moment <= life.granted for moment in died_at)


@pytest.mark.timeout(600 + 10 * SECONDS)
@pytest.mark.stores("valkey9", "redis70")
@pytest.mark.parametrize("readers", [0.9, 0.5])
async def test_readers_and_writers_that_are_cancelled_and_killed(
    store: Store, tmp_path: Path, readers: float
) -> None:
    raw = await store.raw()
    async with monitored(store, NAME) as history, stalls_of(store) as stops:
        crowd = Crowd(store, tmp_path, readers)
        results = await crowd.run()
        left = f"aiodlock:2:lock:{{{NAME}}}:token"
        async with asyncio.timeout(30):
            while await raw.keys("*") != [left]:
                await asyncio.sleep(0.05)
    assert len(results) == PROCESSES
    assert all((result["places"], result["beats"]) == (0, 0) for result in results)

    seen = turns(tmp_path)
    # A writer overlaps nobody: not as the processes saw it, and not as the server did it.
    assert overlaps(seen) == []
    assert history.overlaps() == []
    # Nobody passes one who came earlier and is alive.
    assert history.passed() == []
    assert history.tokens_that_do_not_grow() == []

    # Each wait is explained by what stood in front.
    late: list[str] = []
    stops += stalls(tmp_path)
    longest = {False: 0.0, True: 0.0}
    for turn in seen:
        life = history.lives[turn.request]
        assert life.token == turn.token
        deaths = deaths_in_the_way(history, life, crowd.died_at)
        entered = turn.moments[0]
        stalled = sum(
            min(end, entered) - max(begin, life.arrived)
            for begin, end in stops
            if begin < entered and end > life.arrived
        )
        unexplained = history.unexplained(life, entered) - stalled
        longest[deaths > 0] = max(longest[deaths > 0], unexplained)
        if unexplained > LATE + deaths * FOUND_OUT:
            late.append(f"{life} waited {unexplained:.3f} s for nothing, {deaths} deaths")
    assert late == []

    # And the dead stood there for a lease at the most.
    lives = history.lives.values()
    assert max(life.longest for life in lives) <= TTL + LATE

    waited = max(life.granted - life.arrived for life in lives if life.was_granted)
    print(
        f"\n{store.name}, {readers:.0%} readers: {len(lives)} requests, {len(seen)} turns "
        f"({sum(turn.mode == 'exclusive' for turn in seen)} of writers), {len(crowd.died_at)} deaths "
        f"with {sum(life.died and life.was_granted for life in lives)} leases and "
        f"{sum(life.died and not life.was_granted for life in lives)} waiters, "
        f"{sum(result['lost'] for result in results)} losses of survivors; "
        f"longest wait {waited:.3f} s, unexplained {longest[False]:.3f} s at most, "
        f"behind the dead {longest[True]:.3f} s"
    )
    # It was a load: many turns, some withdrawn, some who died holding, some who died waiting.
    assert len(seen) > 15 * SECONDS
    assert {turn.mode for turn in seen} == {"shared", "exclusive"}
    assert any(life.left < life.until and not life.was_granted for life in lives)
    assert any(life.died and life.was_granted for life in lives)
    assert len({life.id for life in lives if life.died}) >= DEATHS
