"""What a server did with one name, read from MONITOR: who came, was granted, left, and when.

The scripts' own writes are in MONITOR too, so this is the server's account and not the clients'. Times
are seconds of the machine's clock, which the server, MONITOR and the worker processes share.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from aiodlock.backends.redis.keys import keys_of
from aiodlock.backends.redis.scripts import ACQUIRE

from ..servers import Store

#: The scripts count in whole milliseconds, and read their clock a little after MONITOR does.
TOLERANCE = 0.003
NEVER = float("inf")

_LINE = re.compile(r'^\+?(?P<time>[0-9.]+) \[\d+ (?P<who>[^\]]+)\] (?P<words>".*")$')

Interval = tuple[float, float]


@dataclass
class Life:
    """One request, from its arrival on. `until` is the last deadline that it was promised."""

    id: str
    mode: str
    arrived: float
    until: float = NEVER
    granted: float = NEVER
    left: float = NEVER
    token: int = 0
    #: Number of the script run that granted it.
    run: int = 0
    #: The longest lease that it ever had before it, in seconds.
    longest: float = 0.0

    def promise(self, time: float, until: float) -> None:
        self.until = until
        self.longest = max(self.longest, until - time)

    @property
    def end(self) -> float:
        return min(self.left, self.until)

    @property
    def waiting(self) -> Interval:
        return self.arrived, min(self.granted, self.end)

    @property
    def holding(self) -> Interval:
        return self.granted, self.end

    @property
    def was_granted(self) -> bool:
        return self.granted < NEVER

    @property
    def died(self) -> bool:
        """Nobody ever released or withdrew it: its lease ended."""
        return self.until < self.left


@dataclass
class History:
    """All lives, by request id, in order of arrival."""

    name: str = "name"
    lives: dict[str, Life] = field(default_factory=dict)
    runs: int = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take in what MONITOR said."""
        keys = keys_of("aiodlock", "lock", self.name)
        time = 0.0
        for line in lines:
            match = _LINE.match(line.rstrip())
            if match is None:
                continue
            command, *words = match["words"][1:-1].split('" "')
            if command == "EVALSHA":
                # What a script does happens at one moment, however busy the machine is.
                time = float(match["time"])
                self.runs += 1
                if words[0] == ACQUIRE.sha.decode() and words[2] == keys.state:
                    self.lives.setdefault(words[7], Life(words[7], words[8], time))
            elif match["who"] == "lua" and words[:1] == [keys.state]:
                self._on_state(time, command, words[1:])
            elif match["who"] == "lua" and words[:1] == [keys.waiters]:
                self._on_waiters(time, command, words[1:])

    def _on_state(self, time: float, command: str, words: list[str]) -> None:
        if command == "HSET":
            life = self.lives[words[0]]
            _mode, token, deadline, *_ = words[1].split(" ")
            if not life.was_granted:
                life.granted, life.token, life.run = time, int(token), self.runs
            life.promise(time, int(deadline) / 1000)
        elif command == "HDEL":
            for id in filter(None, words):  # the scripts remove '' to be let past a memory limit
                self._on_left(time, self.lives[id])

    def _on_waiters(self, time: float, command: str, words: list[str]) -> None:
        if command == "HSET":
            self.lives[words[0]].promise(time, int(words[1].split(" ")[1]) / 1000)
        elif command == "HDEL" and not self.lives[words[0]].was_granted:
            self._on_left(time, self.lives[words[0]])

    @staticmethod
    def _on_left(time: float, life: Life) -> None:
        if time < life.until:  # else it is only swept up
            life.left = min(life.left, time)

    # -- what must hold ------------------------------------------------------------------------------

    def granted(self) -> list[Life]:
        """Return those that came to hold, in order of their grants."""
        return sorted(
            (life for life in self.lives.values() if life.was_granted),
            key=lambda life: (life.granted, life.token),
        )

    def overlaps(self) -> list[str]:
        """Return each grant to a writer while anybody held, and to a reader while a writer did."""
        found = []
        last = {"x": Life("nobody", "x", 0, until=0), "s": Life("nobody", "s", 0, until=0)}
        for life in self.granted():
            against = last.values() if life.mode == "x" else [last["x"]]
            found += [
                f"{life} beside {other}"
                for other in against
                if other.end > life.granted + TOLERANCE
            ]
            last[life.mode] = max(last[life.mode], life, key=lambda one: one.end)
        return found

    def passed(self) -> list[str]:
        """Return each grant to a request while one that had come earlier was alive and waited."""
        found = []
        longest = Life("nobody", "x", 0, until=0)
        for life in sorted(self.lives.values(), key=lambda life: life.arrived):
            if life.was_granted and longest.waiting[1] > life.granted + TOLERANCE:
                found.append(f"{life} passed {longest}")
            longest = max(longest, life, key=lambda one: one.waiting[1])
        return found

    def tokens_that_do_not_grow(self) -> list[str]:
        return [
            f"{after} after {before}"
            for before, after in pairwise(self.granted())
            if after.token <= before.token
        ]

    def in_front_of(self, life: Life) -> list[Life]:
        """Return the requests that came before it and were not over when it came."""
        return [
            other
            for other in self.lives.values()
            if other.arrived < life.arrived and other.end > life.arrived
        ]

    def unexplained(self, life: Life, entered: float) -> float:
        """Return for how long it waited though nothing in front of it kept it out.

        A writer is kept out by whoever holds; a reader by a writer that holds, and by a writer that waits
        in front of it for those who hold. The dead count until their leases end.
        """
        ahead = self.in_front_of(life)
        holds = _union([other.holding for other in ahead if other.was_granted])
        if life.mode == "x":
            explained = holds
        else:
            writers = [other for other in ahead if other.mode == "x"]
            explained = _union(
                [other.holding for other in writers if other.was_granted]
                + _both(_union([other.waiting for other in writers]), holds)
            )
        return entered - life.arrived - _length(_both(explained, [(life.arrived, entered)]))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif begin < end:
            merged.append((begin, end))
    return merged


def _both(some: list[Interval], others: list[Interval]) -> list[Interval]:
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


@asynccontextmanager
async def monitored(store: Store, name: str) -> AsyncIterator[History]:
    """Give a history that is complete when the block is left."""
    raw = await store.raw()
    await raw.script_load(ACQUIRE.source.decode())  # so that each request is one EVALSHA
    reader, writer = await asyncio.open_unix_connection(urlsplit(store.url).path, limit=2**22)
    lines: list[str] = []
    end = f'"{id(lines)} is the end"'

    async def listen() -> None:
        async for line in reader:
            lines.append(line.decode())
            if end in lines[-1]:
                return

    writer.write(b"MONITOR\r\n")
    await reader.readline()
    listening = asyncio.create_task(listen())
    history = History(name)
    try:
        yield history
        await raw.echo(end.strip('"'))
        await asyncio.wait_for(listening, 10.0)
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        writer.close()
    history.read(lines)
