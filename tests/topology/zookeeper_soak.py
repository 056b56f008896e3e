"""Minutes of everything that goes wrong with an ensemble of ZooKeeper's and its clients:

    python -m tests.topology.zookeeper_soak --minutes 10

Processes of tasks take turns on one name. Servers are killed, stopped, and cut off from each other or from
their clients, one at a time. Meanwhile processes are killed and stopped. A witness outside of ZooKeeper has
each turn: no two may overlap, tokens must grow. At the end no request may be left in the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from aiodlock._clock import now

from .. import forked
from ..scenes import until
from ..zookeeper import ZooKeeperEnsemble, left
from .load import until_turns
from .witness import beginnings, create, judge

_ROOT = Path(__file__).parents[2]
#: Large enough for a JVM on a busy machine: the leader asks its followers each half tick.
_TICK = 0.2
_TTL = 3.0
_TASKS = 4
#: Ticks for which a server goes on without the others, and for which it tries to follow a leader.
_SYNC_LIMIT, _INIT_LIMIT = 20, 50


class Crew:
    """The processes. Mutable state: ``_working``, ``told`` (what those that ended went through)."""

    def __init__(self, url: str, store: Path) -> None:
        arguments = (url, str(store), str(_TASKS), "0", str(_TTL))
        self._command = ("tests.topology.worker", *arguments)
        self._working: list[Process] = []
        self.told: Counter[str] = Counter()

    async def hire(self) -> None:
        """Add one process; it enters its client when that can be done."""
        while True:
            one = await forked.start(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=_ROOT
            )
            assert one.stdout is not None
            if await one.stdout.readline() == b"ready\n":
                self._working.append(one)
                return
            _, said = await one.communicate()
            assert b"BackendUnavailable" in said, said.decode()  # no server: it tries again

    def any(self) -> Process:
        """Return one of them."""
        return random.choice(self._working)

    async def kill(self) -> None:
        """Kill one, and take another on."""
        one = self.any()
        self._working.remove(one)
        one.kill()
        await one.communicate()
        await self.hire()

    async def stop_one(self) -> None:
        """Let one stand still for a while, often longer than its lease lasts."""
        one = self.any()
        one.send_signal(signal.SIGSTOP)
        await asyncio.sleep(random.uniform(0.3, 2.5) * _TTL)
        one.send_signal(signal.SIGCONT)

    async def dismiss(self) -> None:
        """Have all end, and note what they tell."""
        for one in self._working:
            output, said = await one.communicate(b"stop\n")
            assert one.returncode == 0, said.decode()
            self.told.update(json.loads(output))
        self._working.clear()

    async def abandon(self) -> None:
        """Leave no process behind."""
        for one in self._working:
            if one.returncode is None:
                one.kill()
                await one.communicate()


def _server_faults(ensemble: ZooKeeperEnsemble) -> dict[str, Callable[[], object]]:
    """Return what may happen to a server. Healing the ensemble ends each."""
    number = random.choice(list(ensemble.servers))
    server, door = ensemble.servers[number], ensemble.doors[number]
    return {
        "server killed": server.crash,
        "server stopped": server.pause,
        "server cut off from the others": lambda: ensemble.isolate(number),
        "server's connections to the others reset": lambda: ensemble.isolate(number, reset=True),
        "server cut off from its clients": door.stall,
        "server's answers lost": lambda: door.stall("back"),
        "clients' connections reset": door.cut,
        "leader stopped": lambda: ensemble.servers[ensemble.leader()].pause(),
        "leader killed": lambda: ensemble.servers[ensemble.leader()].crash(),
    }


async def _disturb_servers(
    ensemble: ZooKeeperEnsemble, store: Path, faults: Counter[str], ends_at: float
) -> None:
    while now() < ends_at:
        await asyncio.sleep(random.uniform(0.0, 2.0))
        how, happens = random.choice(list(_server_faults(ensemble).items()))
        faults[how] += 1
        print(f"{now() - ends_at:.0f} s: {how}", flush=True)
        await asyncio.to_thread(happens)
        await asyncio.sleep(random.uniform(0.2, 3.0) * _TTL)
        await asyncio.to_thread(ensemble.heal)
        await until_turns(store, 5)


async def _disturb_processes(crew: Crew, faults: Counter[str], ends_at: float) -> None:
    while now() < ends_at:
        await asyncio.sleep(random.uniform(0.5, 6.0))
        if random.random() < 0.4:
            faults["process killed"] += 1
            await crew.kill()
        else:
            faults["process stopped"] += 1
            await crew.stop_one()


async def soak(minutes: float, *, processes: int = 4) -> list[str]:
    """Return what is wrong: nothing, it is to be hoped."""
    faults: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as directory,
        ZooKeeperEnsemble(tick=_TICK, sync_limit=_SYNC_LIMIT, init_limit=_INIT_LIMIT) as ensemble,
    ):
        store = Path(directory) / "witness.db"
        create(store)
        crew = Crew(f"{ensemble.url}?tick_time={_TICK}", store)
        try:
            for _ in range(processes):
                await crew.hire()
            ends_at = now() + minutes * 60
            async with asyncio.TaskGroup() as group:
                group.create_task(_disturb_servers(ensemble, store, faults, ends_at))
                group.create_task(_disturb_processes(crew, faults, ends_at))
            await until_turns(store, 5)
            await crew.dismiss()
        finally:
            await crew.abandon()
        ghosts: list[str] = []

        async def clean() -> bool:
            ghosts[:] = await left(ensemble.url, receipts=True)
            return not ghosts

        wrong = []
        try:
            await until(clean, within=60.0)
        except AssertionError:
            wrong = [f"left behind: {ghosts}"]
        verdict = judge(store)
        began = beginnings(store)
    longest = max(after - before for before, after in pairwise(began))
    print(f"{verdict.turns} turns, the longest time without a new one {longest:.1f} s")
    print(f"faults: {dict(faults)}, together {sum(faults.values())}")
    print(f"those that ended by themselves told: {dict(crew.told)}")
    wrong += [*verdict.overlaps, *verdict.tokens_that_do_not_grow, *verdict.violations]
    print(f"{len(wrong)} violations", *wrong, sep="\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=4)
    chosen = parser.parse_args()
    return 1 if asyncio.run(soak(chosen.minutes, processes=chosen.processes)) else 0


if __name__ == "__main__":
    sys.exit(main())
