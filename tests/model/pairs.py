"""Two nodes with one virtual clock, and random histories of requests that run on both.

After each step the replies, all keys with their contents and ends, and what was said are equal. The nodes
are those of the simulation: on fakeredis keys end when the clock says so, and a node can be out of memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import fakeredis.model._stream

from aiodlock.backends.redis.keys import channel_prefix, keys_of
from aiodlock.backends.redis.scripts import Script

from ..protocol.direct import CLIENTS, MARKER_TTL, PREFIX, RETENTION
from ..simulation.server import Command, SimServer, SimSocket
from ..simulation.world import World

#: How many steps a history has, about.
USUAL = 30
KEYS = keys_of(PREFIX, "lock", "name")
OPTIONS = (channel_prefix(PREFIX), RETENTION, "PUBLISH")

Sources = Mapping[str, str]


# -- a history ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """What is said in histories; a word that stands there twice is chosen twice as often."""

    #: Each history has those of one of these.
    modes: Sequence[Sequence[str]]
    asked: Sequence[str]
    asked_again: Sequence[str]
    #: What clients that wait say all the time.
    heard: str
    left: Sequence[str]


@dataclass(frozen=True)
class Request:
    """What a request is made of. Named owners are the same one; some requests have the same client."""

    id: str
    mode: str
    owner: str
    client: str
    ticket: int
    delay: int


@dataclass(frozen=True)
class Asked:
    """A new request; its ticket is `older` than that of one which comes at this moment."""

    mode: str
    named: bool
    older: int
    delay: int
    what: str
    length: int


@dataclass(frozen=True)
class AskedAgain:
    """`ahead`: by how much the token is larger than the one that is known, where one is sent."""

    who: int
    what: str
    length: int
    ahead: int


@dataclass(frozen=True)
class Left:
    who: int
    what: str
    late: bool
    ahead: int


@dataclass(frozen=True)
class Passed:
    """Time, after some of those who wait were heard of; less than none when the clock is set back."""

    ms: int
    heard: int


@dataclass(frozen=True)
class Evicted:
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Broken:
    """By an operator."""


@dataclass(frozen=True)
class OutOfMemory:
    now: bool


Step = Asked | AskedAgain | Left | Passed | Evicted | Broken | OutOfMemory

#: A number below is one of the last requests, this number is whoever holds.
LAST = 8
LENGTHS = (10_000, 20_000, 60_000)
AHEAD = (0, 1, 7_000_000, -1)


def some_history(seed: int, words: Words) -> list[Step]:
    """Return some that begins with requests."""
    chance = random.Random(seed)
    modes = chance.choice(words.modes)
    first = [_asked(chance, words, modes) for _ in range(chance.randint(3, 6))]
    return [*first, *(_step(chance, words, modes) for _ in range(chance.randint(10, 50)))]


def _asked(chance: random.Random, words: Words, modes: Sequence[str]) -> Asked:
    return Asked(
        mode=chance.choice(modes),
        named=chance.random() < 0.25,
        older=chance.choice((0, 0, 0, 2, 2, 7)),
        delay=chance.choice((0, 0, 0, 30_000)),
        what=chance.choice(words.asked),
        length=chance.choice(LENGTHS),
    )


def _step(chance: random.Random, words: Words, modes: Sequence[str]) -> Step:
    pick = chance.choice
    kind = chance.choices((Asked, AskedAgain, Left, Passed, None), (6, 6, 5, 3, 3))[0]
    who = pick((LAST, chance.randrange(LAST)))
    if kind is Asked:
        return _asked(chance, words, modes)
    if kind is AskedAgain:
        return AskedAgain(who, pick(words.asked_again), pick(LENGTHS), pick(AHEAD))
    if kind is Left:
        return Left(who, pick(words.left), chance.random() < 0.25, pick(AHEAD))
    if kind is Passed:
        ms = pick((1, 4_000, 9_999, 10_000, 20_000, -4_000, -90_000))
        return Passed(ms, pick((0, chance.randrange(1 << LAST))))
    lost = Evicted(tuple(chance.sample(KEYS[:4], pick((1, 1, 2)))))
    accidents: list[Step] = [lost, lost, lost, Broken(), OutOfMemory(True)]
    return pick([*accidents, OutOfMemory(False), OutOfMemory(False)])


# -- two nodes ---------------------------------------------------------------------------------------


class Node:
    """A node of the simulation, with the scripts as they are but for those that are given."""

    def __init__(self, world: World, sources: Sources) -> None:
        self.server = SimServer(world)
        self.said: list[bytes] = []
        self._sources = sources
        self._socket = SimSocket(self.server, self.said.append)
        listener = SimSocket(self.server, self.said.append)
        self.server.run(listener, Command([b"PSUBSCRIBE", CLIENTS.encode()]))

    def call(self, script: Script, keys: list[str], arguments: list[object]) -> Any:
        """Return the reply, and everything that it may have changed."""
        source = self._sources.get(script.name, script.source.decode())
        self.said.clear()
        fields = ("EVAL", source, len(keys), *keys, *arguments)
        reply = self.server.run(self._socket, Command([str(field).encode() for field in fields]))
        return reply, self.stored(), list(self.said)

    def stored(self) -> dict[bytes, Any]:
        """Return what each key has and when it ends."""
        db = self.server.db
        return {key: (self._read(key), db[key].expireat) for key in db}

    def tokens(self) -> dict[str, int]:
        """Return those of all that hold."""
        state = self._read(KEYS.state.encode()) or {}
        return {id.decode(): int(text.split(b" ")[1]) for id, text in state.items()}

    def waits(self, id: str) -> bool:
        return id.encode() in (self._read(KEYS.waiters.encode()) or {})

    def last_token(self) -> int:
        return int(self._read(KEYS.token.encode()) or 0)

    def _read(self, key: bytes) -> Any:
        run = self._socket.execute
        match run([b"TYPE", key]).value:
            case b"hash":
                flat = run([b"HGETALL", key])
                return dict(zip(flat[::2], flat[1::2], strict=True))
            case b"zset":
                return run([b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"])
            case b"stream":
                return run([b"XRANGE", key, b"-", b"+"])
            case b"string":
                return run([b"GET", key])


class Pair:
    """Two nodes that nobody can tell apart, whatever happens to both."""

    words: ClassVar[Words]
    #: The scripts of the first one; those of the other are given.
    general: ClassVar[Sources]
    breaks: ClassVar[Script]

    def __init__(self, sources: Sources) -> None:
        self._world = World(0)
        self._nodes = [Node(self._world, self.general), Node(self._world, sources)]
        self._requests: list[Request] = []
        #: How often each short way was taken.
        self.taken: Counter[str] = Counter()

    def ask(self, request: Request, what: str, length: int, token: int) -> None:
        """Say that of a request, new or old."""
        raise NotImplementedError

    def leave(self, id: str, what: str, marker: int, token: int, ahead: int) -> None:
        raise NotImplementedError

    def take(self, step: Step) -> None:
        with patch.object(fakeredis.model._stream, "time", SimpleNamespace(time=self._time)):
            self._take(step)

    def _take(self, step: Step) -> None:
        match step:
            case Asked():
                request = self._new_request(step)
                self._requests.append(request)
                self.ask(request, step.what, step.length, 0)
            case AskedAgain():
                request, token = self._meant(step.who)
                self.ask(request, step.what, step.length, max(0, token + step.ahead))
            case Left():
                request, token = self._meant(step.who)
                marker = MARKER_TTL if step.late else 0
                self.leave(request.id, step.what, marker, token, step.ahead)
            case Broken():
                self.call(self.breaks, [*KEYS[:4], KEYS.broken], *OPTIONS, MARKER_TTL, "all")
            case Passed(ms, heard):
                for number, request in enumerate(self._requests[-LAST:]):
                    if heard >> number & 1 and self._nodes[0].waits(request.id):
                        self.ask(request, self.words.heard, 60_000, 0)
                self._world.time += ms / 1000
                for node in self._nodes:
                    node.server.sweep()
            case Evicted(keys):
                for node in self._nodes:
                    for key in keys:
                        node.server.db.pop(key.encode(), None)
            case OutOfMemory(now):
                for node in self._nodes:
                    node.server.out_of_memory = now

    def _new_request(self, step: Asked) -> Request:
        number = len(self._requests)
        owner = "uowner" if step.named else f"tr{number}"
        ticket = max(1, 2 * number - step.older)
        return Request(f"r{number}", step.mode, owner, f"c{number % 3}", ticket, step.delay)

    def _meant(self, who: int) -> tuple[Request, int]:
        """Return a request, and its token."""
        tokens = self._nodes[0].tokens()
        last = [request for request in self._requests if request.id in tokens]
        last = (last if who == LAST else []) or self._requests[-LAST:]
        request = last[who % len(last)]
        return request, tokens.get(request.id, 0)

    def call(self, script: Script, keys: list[str], *arguments: object) -> None:
        """Run a script on both."""
        expected, found = (node.call(script, keys, list(arguments)) for node in self._nodes)
        assert found == expected
        assert not expected[0].startswith(b"-ERR"), "only want of memory is an error"
        told = self._nodes[1].server.published
        self.taken.update(way for word, way in told if word == "short")

    def last_token(self) -> int:
        return self._nodes[0].last_token()

    def _time(self) -> float:
        """Return what entries of a stream are numbered by."""
        return self._nodes[0].server.clock_us() / 1e6


def hold_against_each_other(
    pair_with: Callable[[Sources], Pair], sources: Sources, steps: int
) -> Counter[str]:
    """Take about so many steps; return how many there were, and how often each short way was taken."""
    taken: Counter[str] = Counter()
    for seed in range(steps // USUAL):
        pair = pair_with(sources)
        for number, step in enumerate(some_history(seed, pair.words)):
            try:
                pair.take(step)
            except AssertionError as different:
                different.add_note(f"history {seed}, step {number}: {step}")
                raise
            taken["steps"] += 1
        taken += pair.taken
    return taken
