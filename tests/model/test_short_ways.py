"""The short ways of a quorum's scripts, held against the general ones behind them.

The same history runs on two nodes with one virtual clock, of which one takes no short way. After each
step the replies, all keys with their contents and ends, and what was said are equal. The nodes are those
of the simulation: on fakeredis keys end when the clock says so, and a node can be out of memory.

``AIODLOCK_MODEL_STEPS`` sets how many steps are taken, about (default 2,000).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from aiodlock.backends.redis import scripts
from aiodlock.backends.redis.keys import channel_prefix, keys_of
from aiodlock.backends.redis.scripts import Script

from ..protocol.direct import CLIENTS, MARKER_TTL, PREFIX, RETENTION
from ..protocol.test_guards import SHORT_WAYS_OF_A_QUORUM, Mutation
from ..simulation.server import SimServer, SimSocket
from ..simulation.world import World
from .test_scripts import STEPS

#: How many steps a history has, about; and how many it takes at the most to notice a missing condition.
USUAL, BUDGET = 30, 6_000
KEYS = keys_of(PREFIX, "lock", "name")
OPTIONS = (channel_prefix(PREFIX), RETENTION, "PUBLISH")

Sources = Mapping[str, str]


def _with(script: Script, old: str, new: str) -> Sources:
    source = script.source.decode()
    assert source.count(old) == 1, f"this is not in the script any more: {old}"
    return {script.name: source.replace(old, new)}


GENERAL: Sources = {
    **_with(scripts.VOTE, "if what == 'ask' and redis.call(", "if false and redis.call("),
    **_with(scripts.UNVOTE, "if what == 'ended' and ARGV[3] == '0' then", "if false then"),
}

# A message that no client hears tells of each short way that was taken.
_TELL = "redis.call('PUBLISH', 'test', 'short - {} -') "
_ANSWERS = {scripts.VOTE: "return {'waiting', ARGV[4], ", scripts.UNVOTE: "return {'released'}"}
TELLING: Sources = {
    name: source
    for script, answer in _ANSWERS.items()
    for name, source in _with(script, answer, _TELL.format(script.name) + answer).items()
}


# -- a history ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a request is made of. Named owners are the same one."""

    id: str
    mode: str
    owner: str
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
    """`ahead`: by how much the token is larger than the one that is known."""

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
    key: str


@dataclass(frozen=True)
class Broken:
    """By an operator."""


@dataclass(frozen=True)
class OutOfMemory:
    now: bool


Step = Asked | AskedAgain | Left | Passed | Evicted | Broken | OutOfMemory

#: A number below is one of the last requests, this number is whoever has a vote.
LAST = 8
LENGTHS = (10_000, 20_000, 60_000)
AHEAD = (0, 1, 7_000_000, -1)


def some_history(seed: int) -> list[Step]:
    """Return some that begins with requests."""
    chance = random.Random(seed)
    first = [_asked(chance) for _ in range(chance.randint(3, 6))]
    return [*first, *(_step(chance) for _ in range(chance.randint(10, 50)))]


def _asked(chance: random.Random) -> Asked:
    return Asked(
        mode=chance.choice("xxxxs"),
        named=chance.random() < 0.2,
        older=chance.choice((0, 0, 0, 2, 2, 7)),
        delay=chance.choice((0, 0, 30_000)),
        what=chance.choice(("ask", "ask", "ask", "ask", "try")),
        length=chance.choice(LENGTHS),
    )


def _step(chance: random.Random) -> Step:
    pick = chance.choice
    kind = chance.choices((Asked, AskedAgain, Left, Passed, None), (6, 6, 4, 3, 1))[0]
    who = pick((LAST, chance.randrange(LAST)))
    if kind is Asked:
        return _asked(chance)
    if kind is AskedAgain:
        what = pick(("ask", "ask", "ask", "fence", "fence", "held"))
        return AskedAgain(who, what, pick(LENGTHS), pick(AHEAD))
    if kind is Left:
        what = pick(("ended", "ended", "ended", "ended", "lost", "yield"))
        return Left(who, what, chance.random() < 0.25, pick(AHEAD))
    if kind is Passed:
        ms = pick((1, 4_000, 9_999, 10_000, 20_000, -4_000, -90_000))
        return Passed(ms, pick((0, chance.randrange(1 << LAST))))
    lost = Evicted(pick((KEYS.state, KEYS.queue, KEYS.waiters, KEYS.token)))
    return pick((lost, Broken(), OutOfMemory(True), OutOfMemory(False)))


# -- two nodes ---------------------------------------------------------------------------------------


class Node:
    """A node of the simulation, with the scripts as they are but for those that are given."""

    def __init__(self, world: World, sources: Sources) -> None:
        self.server = SimServer(world)
        self.said: list[bytes] = []
        self._sources = sources
        self._socket = SimSocket(self.server, self.said.append)
        listener = SimSocket(self.server, self.said.append)
        self.server.run(listener, [b"PSUBSCRIBE", CLIENTS.encode()])

    def call(self, script: Script, keys: list[str], arguments: list[object]) -> Any:
        """Return the reply, and everything that it may have changed."""
        source = self._sources.get(script.name, script.source.decode())
        self.said.clear()
        fields = ("EVAL", source, len(keys), *keys, *arguments)
        reply = self.server.run(self._socket, [str(field).encode() for field in fields])
        return reply, self.stored(), list(self.said)

    def stored(self) -> dict[bytes, Any]:
        """Return what each key has and when it ends."""
        db = self.server.db
        return {key: (self._read(key), db[key].expireat) for key in db}

    def votes(self) -> dict[str, int]:
        """Return the tokens of those that have a vote."""
        votes = self._read(KEYS.state.encode())
        return {id.decode(): int(text.split(b" ")[1]) for id, text in votes.items()}

    def waits(self, id: str) -> bool:
        return id.encode() in self._read(KEYS.waiters.encode())

    def last_token(self) -> int:
        return int(self._read(KEYS.token.encode()) or 0)

    def _read(self, key: bytes) -> Any:
        kind = key.rpartition(b":")[2]
        if kind == b"queue":
            return self._socket.execute([b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"])
        if kind in (b"state", b"waiters", b"broken"):
            flat = self._socket.execute([b"HGETALL", key])
            return dict(zip(flat[::2], flat[1::2], strict=True))
        return self._socket.execute([b"GET", key])


class Pair:
    """Two nodes that nobody can tell apart, whatever happens to both."""

    def __init__(self, sources: Sources) -> None:
        self._world = World(0)
        self._nodes = [Node(self._world, GENERAL), Node(self._world, sources)]
        self._requests = [Request("r0", "x", "tr0", 0, 0)]
        #: How often each short way was taken.
        self.taken: Counter[str] = Counter()

    def take(self, step: Step) -> None:
        match step:
            case Asked():
                id = f"r{len(self._requests)}"
                owner = "uowner" if step.named else f"t{id}"
                ticket = 2 * len(self._requests) - step.older
                request = Request(id, step.mode, owner, max(1, ticket), step.delay)
                self._requests.append(request)
                self._vote(request, step.what, step.length, 0)
            case AskedAgain():
                request, token = self._meant(step.who)
                self._vote(request, step.what, step.length, max(0, token + step.ahead))
            case Left():
                request, token = self._meant(step.who)
                if step.what != "yield":
                    token = self._nodes[0].last_token()
                marker = MARKER_TTL if step.late and step.what != "yield" else 0
                about = (step.what, marker, max(0, token + step.ahead))
                self._call(scripts.UNVOTE, self._six(request.id), request.id, *about, *OPTIONS)
            case Broken():
                keys = [KEYS.state, KEYS.queue, KEYS.waiters, KEYS.token, KEYS.broken]
                self._call(scripts.BREAK_VOTES, keys, *OPTIONS, MARKER_TTL)
            case Passed(ms, heard):
                for number, request in enumerate(self._requests[-LAST:]):
                    if heard >> number & 1 and self._nodes[0].waits(request.id):
                        self._vote(request, "ask", 60_000, 0)
                self._world.time += ms / 1000
            case Evicted(key):
                for node in self._nodes:
                    node.server.db.pop(key.encode(), None)
            case OutOfMemory(now):
                for node in self._nodes:
                    node.server.out_of_memory = now

    def _vote(self, request: Request, what: str, length: int, token: int) -> None:
        id, mode, owner = request.id, request.mode, request.owner
        about = (id, mode, owner, length, request.delay, f"of-{id}", request.ticket)
        known = token if what in ("fence", "held") else 0
        self._call(scripts.VOTE, self._six(id), *about, what, known, *OPTIONS)

    def _meant(self, who: int) -> tuple[Request, int]:
        """Return a request, and the token of its vote."""
        votes = self._nodes[0].votes()
        last = [request for request in self._requests if request.id in votes] if who == LAST else []
        last = last or self._requests[-LAST:]
        request = last[who % len(last)]
        return request, votes.get(request.id, 0)

    def _call(self, script: Script, keys: list[str], *arguments: object) -> None:
        expected, found = (node.call(script, keys, list(arguments)) for node in self._nodes)
        assert found == expected
        assert not expected[0].startswith(b"-ERR"), "only want of memory is an error"
        told = self._nodes[1].server.published
        self.taken.update(way for word, way in told if word == "short")

    @staticmethod
    def _six(id: str) -> list[str]:
        marker = KEYS.marker + id
        return [KEYS.state, KEYS.queue, KEYS.waiters, KEYS.token, marker, KEYS.broken]


def hold_against_the_general_ways(sources: Sources, steps: int) -> Counter[str]:
    """Take about so many steps; return how many there were, and how often each short way was taken."""
    taken: Counter[str] = Counter()
    for seed in range(steps // USUAL):
        pair = Pair(sources)
        for number, step in enumerate(some_history(seed)):
            try:
                pair.take(step)
            except AssertionError as different:
                different.add_note(f"history {seed}, step {number}: {step}")
                raise
            taken["steps"] += 1
        taken += pair.taken
    return taken


def test_short_ways_answer_and_write_and_say_what_the_general_ones_do() -> None:
    taken = hold_against_the_general_ways(TELLING, STEPS)
    assert taken["vote"] > taken["steps"] / 20
    assert taken["unvote"] > taken["steps"] / 50


@pytest.mark.parametrize(
    "mutation",
    [mutation for mutation in SHORT_WAYS_OF_A_QUORUM if not mutation.rare],
    ids=lambda mutation: mutation.guard,
)
def test_condition_of_a_short_way_taken_out_is_noticed(mutation: Mutation) -> None:
    # TypeError: what the simulated server says of a command that a real one refuses.
    with pytest.raises((AssertionError, TypeError)):
        hold_against_the_general_ways(mutation.sources(), BUDGET)
