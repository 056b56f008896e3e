"""What the workers of a soak write down, and the check of it afterwards.

A worker writes only what it may believe: the moment before `held` answered True. So a hold is an
interval between two such moments, all on the one clock of the machine, and two intervals that exclude
each other and overlap are a violation of a promise, whatever had happened to the process in between.

Lines of a journal (nothing is buffered, so a killed worker loses none):

    + <hold> <name> <mode> <token> <moment>    it began
    = <hold> <moment>                          it still lasts, or has just ended
    w <asked> <granted> <name>                 a wait that was long
    ! <text>                                   a violation that the worker saw itself
    t <json>                                   its counts so far
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from aiodlock._clock import now

#: Between names that were waited for one after the other.
AND = "+"


class Journal:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._holds = count(1)

    def began(self, name: str, mode: str, token: int, moment: float) -> int:
        hold = next(self._holds)
        self._write(f"+ {hold} {name} {mode} {token} {moment:.9f}")
        return hold

    def lasts(self, hold: int, moment: float) -> None:
        self._write(f"= {hold} {moment:.9f}")

    def waited(self, name: str, asked: float, granted: float) -> None:
        self._write(f"w {asked:.6f} {granted:.6f} {name}")

    def violation(self, what: str) -> None:
        self._write(f"! {now():.3f} " + what.replace("\n", " "))

    def totals(self, counts: Mapping[str, float]) -> None:
        self._write("t " + json.dumps(counts))

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode() + b"\n")


@dataclass(slots=True)
class Hold:
    """One hold as far as it is proven.

    `mode` is x, s, s<limit> of a semaphore, or l: exclusive, and with the token of the body before if the
    client has kept the lease meanwhile.
    """

    name: str
    mode: str
    token: int
    began: float
    ended: float

    def __str__(self) -> str:
        span = f"{self.began:.4f} to {self.ended:.4f}"
        return f"{self.name} in mode {self.mode} with token {self.token} from {span}"


@dataclass(frozen=True, slots=True)
class Wait:
    """From when to when a name was waited for; only long ones are written down."""

    name: str
    asked: float
    granted: float

    @property
    def queues(self) -> int:
        """In how many queues it stood, one after the other."""
        return self.name.count(AND) + 1


@dataclass
class Record:
    """Everything that was written down."""

    holds: list[Hold] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def read(paths: Iterable[Path]) -> Record:
    """Read journals, also those that end in the middle of a line."""
    record = Record()
    for path in paths:
        holds: dict[str, Hold] = {}
        totals: dict[str, float] = {}
        for line in path.read_text().splitlines():
            match line.split(" "):
                case ["+", hold, name, mode, token, moment]:
                    at = float(moment)
                    holds[hold] = Hold(name, mode, int(token), at, at)
                case ["=", hold, moment]:
                    holds[hold].ended = float(moment)
                case ["w", asked, granted, name]:
                    record.waits.append(Wait(name, float(asked), float(granted)))
                case ["t", *_] if line.endswith("}"):
                    totals = json.loads(line[2:])
                case ["!", *_]:
                    record.violations.append(line[2:])
        record.longest_wait = max(record.longest_wait, totals.pop("longest wait", 0.0))
        record.counts.update({key: int(value) for key, value in totals.items()})
        record.holds += holds.values()
    return record


def check(holds: Iterable[Hold], *, readers_share_tokens: bool = False) -> list[str]:
    """Return what contradicts mutual exclusion, or the growth of tokens, one line each.

    :param readers_share_tokens: as on a quorum: readers with no writer in between may have the same one.
    """
    by_name: defaultdict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        by_name[hold.name].append(hold)
    found: list[str] = []
    for same in by_name.values():
        same.sort(key=lambda hold: hold.began)
        found += _overlaps(same)
        found += _tokens(same, readers_share_tokens)
    return found


def _overlaps(holds: list[Hold]) -> list[str]:
    found: list[str] = []
    inside: list[Hold] = []
    for hold in holds:
        inside = [other for other in inside if other.ended > hold.began]
        for other in inside:
            if hold.mode in "xl" or other.mode in "xl":
                found.append(f"exclusion: {hold} overlaps {other}")
        limit = int(hold.mode[1:] or 0)
        if limit and len(inside) >= limit:
            found.append(f"limit: {hold} is one more beside {len(inside)} others")
        inside.append(hold)
    return found


def _tokens(holds: list[Hold], readers_share_tokens: bool) -> list[str]:
    """An exclusive hold has a larger token than all that ended before, a later one a larger still."""
    found: list[str] = []
    seen: set[int] = set()
    largest, exclusive = 0, 0
    for hold in holds:  # in the order in which they began
        floor = largest if hold.mode in "xl" else exclusive
        again = hold.mode == "l" and hold.token == floor
        if hold.token <= floor and not again:
            found.append(f"token: {hold} came after {floor}")
        shared = readers_share_tokens and hold.mode == "s"
        if hold.token in seen and not again and not shared:
            found.append(f"token: {hold} has a token that was given before")
        seen.add(hold.token)
        largest = max(largest, hold.token)
        if hold.mode in "xl":
            exclusive = max(exclusive, hold.token)
    return found


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a name was waited for, and nobody certainly held it.

    ``quiet`` is its length in seconds without the time in which a fault lasted.
    """

    name: str
    began: float
    ended: float
    quiet: float


def gaps(record: Record, faults: Iterable[tuple[float, float]]) -> list[Gap]:
    """Return for each long wait the longest time in it without a holder.

    :param faults: from when to when something was done to a process, a server or the network.
    """
    spans = _merged(faults)
    by_name: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for hold in record.holds:
        by_name[hold.name].append((hold.began, hold.ended))
    held = {
        name: _merged(by_name[name])
        for name in {wait.name for wait in record.waits if wait.queues == 1}
    }
    found = []
    for wait in record.waits:
        if wait.queues > 1:
            continue  # some of them may be held
        at, spaces = wait.asked, []
        for began, ended in held[wait.name]:
            if ended < wait.asked or began > wait.granted:
                continue
            spaces.append((at, began))
            at = max(at, ended)
        spaces.append((at, wait.granted))
        found.append(
            max(
                (
                    Gap(wait.name, began, ended, ended - began - _covered(spans, began, ended))
                    for began, ended in spaces
                    if ended > began
                ),
                key=lambda gap: gap.quiet,
                default=Gap(wait.name, wait.granted, wait.granted, 0.0),
            )
        )
    return found


def without(
    waits: Iterable[Wait], spans: Iterable[tuple[float, float]]
) -> list[tuple[Wait, float]]:
    """Return each wait with its length in seconds without that of the spans."""
    merged = _merged(spans)
    return [
        (wait, wait.granted - wait.asked - _covered(merged, wait.asked, wait.granted))
        for wait in waits
    ]


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def _covered(spans: list[tuple[float, float]], began: float, ended: float) -> float:
    return sum(max(0.0, min(end, ended) - max(start, began)) for start, end in spans)
