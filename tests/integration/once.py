"""Once, by processes that are killed and stopped at random moments; effects are what a witness heard.

    python -m tests.integration.once --store valkey9,postgres,sentinel,cluster

What must hold for each key:

- One success is on record. What an exit has confirmed, and what others got, is that success.
- An effect above one has a reason: a death, or a loss or a failure that was told.
- A key whose holder died is done by another in time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiodlock

from .. import forked
from ..scenes import STARTING, until
from ..servers import Servers, Store
from .once_worker import KEEP, TTL

#: A dead holder costs its ttl, dead waiters behind it a ttl and a third.
BOUND = TTL + TTL * 4 / 3
#: What else a key may have to wait for: processes that start, and the machine.
SLACK = 5.0


@dataclass(frozen=True)
class Line:
    """What the witness has heard: when, from whom, and what."""

    at: float
    pid: int
    word: str
    key: int
    value: str


@dataclass
class Verdict:
    """What one store came to."""

    keys: int
    confirmed: int = 0
    got: int = 0
    effects: int = 0
    #: Effects besides the one on record: after a death, or a loss or a failure that was told.
    after_deaths: int = 0
    after_told: int = 0
    longest: float = 0.0
    kills: int = 0
    stops: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def again(self) -> int:
        return self.after_deaths + self.after_told

    def __str__(self) -> str:
        return (
            f"{self.keys} successes on record, {self.confirmed} exits confirmed one and {self.got} got its "
            f"result; {self.effects} effects, {self.again} of them again ({self.after_deaths} after a "
            f"death, {self.after_told} after a loss or a failure that was told); a dead one's key waited "
            f"{self.longest:.2f} s at most (ttl {TTL:g} s); {self.kills} kills, {self.stops} stops, "
            f"{self.seconds:.0f} s; {len(self.wrong)} wrong"
        )


class Trial:
    """One store, its workers, and what happens to them. Mutable state is listed in ``__init__``."""

    def __init__(self, store: Store, folder: Path, keys: int, workers: int, seed: int) -> None:
        self._store = store
        self._socket, self._log = folder / "witness", folder / "log"
        self._log.touch()
        self._keys, self._number = keys, workers
        self._random = random.Random(seed)
        self._started = 0
        self._workers: list[asyncio.subprocess.Process] = []
        #: When processes were killed, by their ids.
        self.deaths: dict[int, float] = {}
        self.stops = 0

    async def run(self, kills: int, stops: int) -> Verdict:
        """Let all workers go through all keys, and be killed and stopped as the work goes on."""
        began = time.monotonic()
        async with self._witness():
            for _ in range(self._number):
                await self._start()
            # Each at its time, which is a part of all that the first workers will have to say.
            fates = [("kill", n / (kills + 1)) for n in range(1, kills + 1)]
            fates += [("stop", (n - 0.5) / (stops + 1)) for n in range(1, stops + 1)]
            going_on: list[asyncio.Task[None]] = []
            for what, moment in sorted(fates, key=lambda fate: fate[1]):
                await until(lambda m=moment: self._done() >= m * self._keys, "work", within=600)  # type: ignore[misc]
                await asyncio.sleep(self._random.random() * 0.1)
                if what == "kill":
                    await self._kill()
                else:
                    going_on.append(asyncio.create_task(self._stop()))
            await asyncio.gather(*going_on)
            for worker in self._workers:
                async with asyncio.timeout(600):
                    assert await worker.wait() == 0, f"a worker ended with {worker.returncode}"
            results = await self._results()
        verdict = judge(self.lines(), self.deaths, results)
        verdict.kills, verdict.stops = len(self.deaths), self.stops
        verdict.seconds = time.monotonic() - began
        return verdict

    def lines(self) -> list[Line]:
        """Return all that the witness has written."""
        found = []
        for text in self._log.read_text().splitlines():
            at, pid, word, key, value = text.split()
            found.append(Line(float(at), int(pid), word, int(key), value))
        return found

    def _done(self) -> int:
        """Return how many keys have had an effect, about."""
        return self._log.read_text().count(" effect ")

    @asynccontextmanager
    async def _witness(self) -> AsyncIterator[None]:
        module = ("tests.integration.once_witness", str(self._socket), str(self._log))
        witness = await forked.start(*module)
        try:
            await until(self._socket.exists, "the witness", within=STARTING)
            yield
        finally:
            for worker in self._workers:
                if worker.returncode is None:
                    worker.kill()
                    await worker.wait()
            witness.kill()
            await witness.wait()

    async def _start(self) -> None:
        self._started += 1
        words = (self._store.url, str(self._socket), str(self._started), str(self._keys))
        module = ("tests.integration.once_worker", *words)
        self._workers.append(await forked.start(*module))

    def _one_that_runs(self) -> asyncio.subprocess.Process | None:
        running = [worker for worker in self._workers if worker.returncode is None]
        return self._random.choice(running) if running else None

    async def _kill(self) -> None:
        """Kill one, and start another in its place."""
        doomed = self._one_that_runs()
        if doomed is None:
            return
        self.deaths[doomed.pid] = time.monotonic()
        doomed.kill()
        await doomed.wait()
        self._workers.remove(doomed)
        await self._start()

    async def _stop(self) -> None:
        """Stop one for as long as a lease, about."""
        stopped = self._one_that_runs()
        if stopped is None:
            return
        self.stops += 1
        stopped.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.1, 2.0) * TTL)
        if stopped.returncode is None:
            stopped.send_signal(signal.SIGCONT)

    async def _results(self) -> dict[int, object]:
        """Ask the store for each key; None where no success is on record."""
        results: dict[int, object] = {}
        async with aiodlock.Client(self._store.source) as client:
            for key in range(self._keys):
                with_nothing = RuntimeError("nothing is on record")
                try:
                    async with client.once(f"key:{key}", keep=KEEP, timeout=5) as once:
                        if once.first:
                            raise with_nothing
                        results[key] = once.result
                except RuntimeError as nothing:
                    if nothing is not with_nothing:
                        raise
                    results[key] = None
        return results


def judge(lines: list[Line], deaths: dict[int, float], results: dict[int, object]) -> Verdict:
    """Hold what was heard against what is on record."""
    verdict = Verdict(keys=sum(result is not None for result in results.values()))
    by_key: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_key[line.key].append(line)
    for key, result in results.items():
        heard = by_key[key]
        if result is None:
            verdict.wrong.append(f"key {key}: nothing is on record")
        for line in heard:
            if line.word in ("confirmed", "got") and line.value != result:
                verdict.wrong.append(f"key {key}: {line}, and {result!r} is on record")
        verdict.confirmed += sum(line.word == "confirmed" for line in heard)
        verdict.got += sum(line.word == "got" for line in heard)
        effects = [line for line in heard if line.word == "effect"]
        verdict.effects += len(effects)
        others = [line for line in effects if line.value != result]
        if len(others) != len(effects) - 1:
            verdict.wrong.append(
                f"key {key}: {result!r} is on record, and the effects are {effects}"
            )
        for effect in others:
            if told_after(effect, heard) is not None:
                verdict.after_told += 1
            elif effect.pid not in deaths:
                verdict.wrong.append(f"key {key}: {effect} was done again without a reason")
            else:
                verdict.after_deaths += 1
                waited = waited_for(effect, heard, deaths[effect.pid])
                verdict.longest = max(verdict.longest, waited)
                if waited > BOUND + SLACK:
                    verdict.wrong.append(f"key {key}: {waited:.2f} s after the death of {effect}")
    return verdict


def told_after(effect: Line, heard: list[Line]) -> Line | None:
    """Return that the doer of an effect was told that it is not on record."""
    for line in heard:
        if line.at > effect.at and line.pid == effect.pid and line.word in ("lost", "failed"):
            return line
    return None


def waited_for(effect: Line, heard: list[Line], died: float) -> float:
    """Return how long the key of a dead one has waited for the next one who does it, or gets its result."""
    for line in heard:
        if line.at > died and line.word in ("effect", "got") and line.pid != effect.pid:
            entered = [
                one.at
                for one in heard
                if (one.pid, one.word) == (line.pid, "enters") and one.at < line.at
            ]
            return line.at - max(died, entered[-1])
    return 0.0


async def try_store(
    store: Store, *, keys: int, workers: int, kills: int, stops: int, seed: int
) -> Verdict:
    """Run one trial in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="aiodlock-") as folder:
        return await Trial(store, Path(folder), keys, workers, seed).run(kills, stops)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.once", description=__doc__)
    parser.add_argument("--store", default="valkey9", help="stores, with commas between them")
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    servers, bad = Servers(), 0
    try:
        for name in chosen.store.split(","):
            how = {
                key: getattr(chosen, key) for key in ("keys", "workers", "kills", "stops", "seed")
            }
            verdict = asyncio.run(try_store(servers.store(name), **how))
            print(f"{name}: {verdict}", *verdict.wrong[:20], sep="\n  ", flush=True)
            bad += len(verdict.wrong)
    finally:
        servers.stop()
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
