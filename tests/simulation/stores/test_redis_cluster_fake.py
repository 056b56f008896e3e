"""The fake nodes answer as real ones do: the same random calls on both, equal answers and messages.

Compared are Valkey 9 with sharded channels, three primaries, and slots on their way. Times and tokens may
differ by what the real ones took. ``redis_cluster.py`` and ``redis_machine.py`` list what is left out.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hiredis
import pytest
from redis.crc import key_slot

from aiodlock._embedded import find_valkey9
from aiodlock.backends.redis.keys import keys_of, waits_key
from aiodlock.backends.redis.replies import for_people
from aiodlock.backends.redis.scripts import (
    ACQUIRE,
    ALL,
    BREAK,
    EXTEND,
    INSPECT,
    LEAVE,
    TELL,
    Script,
)

from ...topology.cluster import Cluster as RealCluster
from ...topology.cluster import port
from ..world import World
from . import redis_cluster
from .redis_cluster import Cluster, Move, Session
from .redis_machine import split
from .wire import Wire

_NAMES = ("n0", "n1", "n2")
_CALLS = 100
#: Lengths of leases (ms). A busy machine takes minutes for a seed, and nothing may end meanwhile: which of
#: two servers is a moment later is chance. They differ so much that it is certain who gets a hint.
_LENGTHS = (1_000_000, 9_000_000)
#: Real servers take some time for each call (ms).
_TOLERANCE = 8_000
#: What messages and lines begin with that have tokens and times in them.
_SAID = tuple(
    f"{word} ".encode()
    for word in (
        *("granted", "look", "recall", "broken", "done"),
        *("held", "recalled", "waiting", "released"),
    )
)
_MOVED = "the slot has moved"
_Command = tuple[bytes, ...]


def _packed(words: _Command) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


class _Stub:
    """A stream of the fake that keeps what the server sends."""

    def __init__(self) -> None:
        self.reader = hiredis.Reader(notEnoughData=False)

    def send(self, data: bytes) -> None:
        self.reader.feed(data)

    def read(self) -> list[Any]:
        found = []
        while (reply := self.reader.gets()) is not False:
            found.append(reply)
        return found


class _Link:
    """A connection to a real node, on which answers and messages are read in their order."""

    def __init__(self, at: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", at), timeout=30)
        self.reader = hiredis.Reader(notEnoughData=False)

    def ask(self, *words: bytes) -> Any:
        self.socket.sendall(_packed(words))
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.socket.recv(65536))
        return reply

    def read(self) -> list[Any]:
        """Return all messages that came; a PING on its way behind them ends the search."""
        self.socket.sendall(hiredis.pack_command((b"PING",)))
        found: list[Any] = []
        while True:
            while (reply := self.reader.gets()) is not False:
                if reply == b"PONG" or reply == [b"pong", b""]:
                    return found
                found.append(reply)
            self.reader.feed(self.socket.recv(65536))


class _Both:
    """A real cluster and the fake of one, with a connection for calls and one for messages to each node."""

    def __init__(self, real: RealCluster) -> None:
        self.real = real
        self.world = World(0)
        self.world.time = time.time() - redis_cluster._EPOCH
        self.fake = Cluster(self.world, Wire(self.world), _NAMES, replicas=0)
        for part, (first, _) in enumerate(self.fake.parts):
            owner = self.fake.nodes[first * 3 // redis_cluster.SLOTS]
            self.fake.claims[part] = (owner.epoch, owner)
        for node in self.fake.nodes:
            node.view = [(epoch, owner.id) for epoch, owner in self.fake.claims]
        self.links = [(_Link(port(node)), _Link(port(node))) for node in real.nodes]
        self.stubs = [(_Stub(), _Stub()) for _ in real.nodes]
        self.sessions = [
            tuple(Session(node, stub) for stub in pair)  # type: ignore[arg-type]
            for node, pair in zip(self.fake.nodes, self.stubs, strict=True)
        ]

    def close(self) -> None:
        for link in (link for pair in self.links for link in pair):
            link.socket.close()

    def ask(self, at: int, *words: bytes, listening: bool = False) -> Any:
        """Ask one node and its fake; return the answer. Both have to be equal."""
        self.world.time = time.time() - redis_cluster._EPOCH
        real = self.links[at][listening].ask(*words)
        session, stub = self.sessions[at][listening], self.stubs[at][listening]
        session.received(_packed(words))
        (fake,) = stub.read()
        self.compare(self._placed(real), fake, (at, words))
        return fake

    def _placed(self, reply: Any) -> Any:
        """Name the nodes of a redirection as the fake does."""
        if isinstance(reply, hiredis.ReplyError):
            text = str(reply)
            for real, node in zip(self.real.nodes, self.fake.nodes, strict=True):
                text = text.replace(f"127.0.0.1:{port(real)}", f"{node.address}:6379")
            return text
        return reply

    def compare_messages(self, about: object) -> None:
        for (_, link), (_, stub) in zip(self.links, self.stubs, strict=True):
            real, fake = link.read(), stub.read()
            if about == _MOVED:  # in no order
                real.sort(key=lambda told: told[1])
                fake.sort(key=lambda told: told[1])
                real, fake = ([told[:2] for told in all] for all in (real, fake))
            self.compare(real, fake, about)

    def compare(self, real: Any, fake: Any, about: object) -> None:
        if isinstance(fake, hiredis.ReplyError):
            fake = str(fake)
        if isinstance(real, list) and isinstance(fake, list):
            assert len(real) == len(fake), (about, real, fake)
            for one, other in zip(real, fake, strict=True):
                self.compare(one, other, about)
        elif isinstance(real, bytes) and real.startswith(_SAID) and isinstance(fake, bytes):
            self.compare(real.split(b" "), fake.split(b" "), about)
        elif self._are_numbers(real, fake):
            mine, other = int(real.rstrip(b"r")), int(fake.rstrip(b"r"))
            if mine > 10**12 and other > 10**12 and mine % 1000:
                assert abs(mine - other) < _TOLERANCE * 1000, (about, real, fake)
            else:
                assert abs(mine - other) < _TOLERANCE, (about, real, fake)
        elif isinstance(real, int) and isinstance(fake, int):
            assert abs(real - fake) < _TOLERANCE, (about, real, fake)
        elif isinstance(real, bytes) and real.startswith(b" ") and isinstance(fake, bytes):
            # As clients read them; an empty text says the same as no text.
            assert for_people(real) == for_people(fake or b" "), (about, real, fake)
        else:
            assert real == fake, (about, real, fake)

    @staticmethod
    def _are_numbers(*replies: Any) -> bool:
        return all(isinstance(one, bytes) and one.rstrip(b"r").isdigit() for one in replies)


@pytest.fixture(scope="module")
def real() -> Iterator[RealCluster]:
    with RealCluster(find_valkey9(), primaries=3, replicas=0) as cluster:
        yield cluster


def _call(script: Script, keys: list[str], *words: object) -> _Command:
    fields = (script.sha, len(keys), *keys, *words)
    return (b"EVALSHA", *(f if isinstance(f, bytes) else str(f).encode() for f in fields))


class _Calls:
    """Random calls of clients on a few names of kinds of this run."""

    def __init__(self, rng: random.Random, prefix: str) -> None:
        self._rng = rng
        self._prefix = prefix
        self._ids: list[tuple[str, str, str, str]] = []

    def words(self, base: str) -> tuple[str, int, str]:
        return f"{self._prefix}:2:client:{base[base.index('{') :]}:", 3_600_000, "SPUBLISH"

    def some(self) -> tuple[str, _Command]:
        """Return a name and a call about it."""
        rng = self._rng
        kind, name = rng.choice(("lock", "lock", "semaphore", "once")), rng.choice(_NAMES)
        keys = keys_of(self._prefix, kind, name)
        record = [keys.record] if kind == "once" else []
        known = [one for one in self._ids if one[1:3] == (kind, name)]
        what = rng.random()
        if what < 0.35 or not known:
            again = known and rng.random() < 0.15
            id, _, _, owner = rng.choice(known) if again else self._new(kind, name)
            mode = "s2" if kind == "semaphore" else "x" if kind == "once" else rng.choice("xxs")
            linger = rng.choice(("", "", " g=1")) if kind == "lock" else ""
            call = _call(
                ACQUIRE,
                [keys.state, keys.queue, keys.waiters, keys.token, keys.marker + id, *record],
                id, mode, owner, rng.choice(_LENGTHS), rng.choice(_LENGTHS),
                rng.choice((0, 500_000)), f"c{id[-1]}",
                *self.words(keys.base), rng.choice(("wait", "wait", "nowait")), linger, "",
            )  # fmt: skip
            return name, call
        id, _, _, owner = rng.choice(known)
        if what < 0.55:
            held = [keys.state, keys.queue, keys.waiters, keys.token, keys.broken, *record]
            words = self.words(keys.base)
            return name, _call(EXTEND, held, id, rng.choice(_LENGTHS), owner, *words)
        if what < 0.8:
            marker = keys.marker + id
            parts = [keys.state, keys.queue, keys.waiters, keys.token, marker, keys.broken, *record]
            ends: list[object] = [rng.choice(("ended", "ended", "lost", "unused"))]
            if kind == "once" and rng.random() < 0.3:
                ends = ["recorded", "fine", 900_000]
            late = rng.choice((0, 0, 900_000))
            return name, _call(LEAVE, parts, id, *self.words(keys.base), late, *ends)
        if what < 0.85:
            parts = [keys.state, keys.queue, keys.waiters, keys.token, keys.broken]
            prefix = f"{self._prefix}:2:client:"
            return name, _call(BREAK, parts, prefix, 3_600_000, "PUBLISH", 900_000, "all")
        if what < 0.95:
            parts = [keys.state, keys.queue, keys.waiters, keys.token, *record]
            return name, _call(INSPECT, parts, 4 + len(record), "queues")
        if what < 0.98:
            return name, _call(TELL, [waits_key(self._prefix, name)], f"{rng.randrange(9):020}", 900_000,
                               rng.choice((b"again", b"text")))  # fmt: skip
        return name, rng.choice(
            ((b"DEL", keys.record.encode()), (b"GET", waits_key(self._prefix, name).encode()))
        )

    def _new(self, kind: str, name: str) -> tuple[str, str, str, str]:
        number = len(self._ids)
        owner = self._rng.choice((f"t{number}", f"t{number}", "uann"))
        self._ids.append((f"r{number}", kind, name, owner))
        return self._ids[-1]


class _Moving:
    """A slot that moves on both, one key at a time."""

    def __init__(self, both: _Both, name: str, target: int) -> None:
        self.both, self.slot = both, key_slot(name.encode())
        fake = both.fake
        self.source = fake.claims[fake.part_of(self.slot)][1].number
        self.target = target
        nodes = both.real.nodes
        self.moving = both.real.move_slot(self.slot, nodes[self.source], nodes[target])
        self.move = Move.__new__(Move)
        self.move.cluster, self.move.slot = fake, self.slot
        self.move.part = fake.part_of(self.slot)
        self.move.source, self.move.target = fake.nodes[self.source], fake.nodes[target]
        self.move.target.importing[self.slot] = self.move.source
        self.move.source.migrating[self.slot] = self.move.target

    def has_all(self, call: _Command) -> bool:
        """Whether a script finds all its keys at the source, and may delete some."""
        if call[0] != b"EVALSHA" or call[1] in (INSPECT.sha, TELL.sha):
            return False
        keys = [key.decode() for key in call[3 : 3 + int(call[2])]]
        mine = key_slot(keys[0].encode()) == self.slot
        return mine and all(self.move.source.has(key) for key in keys)

    def some_keys(self, rng: random.Random) -> None:
        """Move one key, the same one on both."""
        call, node = self.both.real.call, self.both.real.nodes[self.source]
        keys = sorted(call(node, "CLUSTER", "GETKEYSINSLOT", self.slot, 1000))
        if keys:
            key = rng.choice(keys)
            to = port(self.both.real.nodes[self.target])
            call(node, "MIGRATE", "127.0.0.1", to, key, 0, 5000)
            base, part = split(key)
            if base:
                self.move.move(base, part)
            else:
                strings = self.move.source.keys.strings
                self.move.target.keys.strings[key] = strings.pop(key)

    def finish(self, rng: random.Random) -> None:
        call, node = self.both.real.call, self.both.real.nodes[self.source]
        while call(node, "CLUSTER", "GETKEYSINSLOT", self.slot, 1):
            self.some_keys(rng)
        self.moving.finish()
        for base in [b for b in self.move.source.keys.names if key_slot(b.encode()) == self.slot]:
            self.move._arrive(base)
        self.move.own()
        target = self.move.target
        for other in self.both.fake.nodes:
            other.migrating.pop(self.slot, None)
            if other is not target:
                other.take(self.move.part, (target.epoch, target.id))


@pytest.mark.parametrize("seed", range(2))
def test_same_calls_get_the_same_answers_while_slots_move(real: RealCluster, seed: int) -> None:
    _compare(real, seed, _CALLS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_same_calls_get_the_same_answers_for_long(real: RealCluster, seed: int) -> None:
    _compare(real, seed, 10 * _CALLS)


def test_who_was_broken_first_is_remembered_as_long_as_the_last(real: RealCluster) -> None:
    with _same(real) as both:
        at = both.fake.claims[both.fake.part_of(key_slot(b"n0"))][1].number
        keys = keys_of("first", "lock", "n0")
        parts = [keys.state, keys.queue, keys.waiters, keys.token]
        words = (f"first:2:client:{keys.base[keys.base.index('{') :]}:", 3_600_000, "SPUBLISH")

        def acquire(id: str, ttl: int) -> bytes:
            about = (id, "s", f"t{id}", ttl, 90_000, 0, "c", *words, "nowait", "", "")
            answer: bytes = both.ask(at, *_call(ACQUIRE, [*parts, keys.marker + id], *about))
            return answer.split(b" ")[1]

        def break_(tokens: bytes | str) -> None:
            about = ("first:2:client:", 3_600_000, "PUBLISH", 1, tokens)
            assert both.ask(at, *_call(BREAK, [*parts, keys.broken], *about)) == 1

        short, began = 2_000, time.time()
        break_(acquire("r0", short))
        acquire("r1", 900_000)
        break_("all")
        while time.time() < began + short / 1000 + 0.1:
            time.sleep(0.05)
        late = _call(EXTEND, [*parts, keys.broken], "r0", 1_000, "tr0", *words)
        assert both.ask(at, *late) == b"gone broken"


def _compare(real: RealCluster, seed: int, calls: int) -> None:
    rng = random.Random(seed)
    with _same(real) as both:
        _run(both, rng, _Calls(rng, f"p{seed}"), calls)


@contextmanager
def _same(real: RealCluster) -> Iterator[_Both]:
    """Both begin empty, and with all scripts."""
    real.wait_until_fine()
    for node in real.nodes:
        real.call(node, "FLUSHALL")
    both = _Both(real)
    try:
        for part, (first, _) in enumerate(both.fake.parts):
            owner = both.fake.nodes[real.nodes.index(real.primary_of_slot(first))]
            both.fake.claims[part] = (owner.epoch, owner)
            for fake in both.fake.nodes:
                fake.view[part] = (owner.epoch, owner.id)
        for at in range(3):
            for script in ALL:
                both.ask(at, b"SCRIPT", b"LOAD", script.source)
        yield both
    finally:
        both.close()


def _run(both: _Both, rng: random.Random, calls: _Calls, number: int) -> None:
    moving: _Moving | None = None
    for _ in range(number):
        name, call = calls.some()
        owner = both.fake.claims[both.fake.part_of(key_slot(name.encode()))][1].number
        if moving is not None and moving.has_all(call):
            continue  # a real script may be ended in the middle
        at = owner if rng.random() < 0.8 else rng.randrange(3)
        answer = both.ask(at, *call)
        word = str(answer).split(" ")[0] if isinstance(answer, hiredis.ReplyError) else ""
        if word == "ASK":
            to = next(n for n in both.fake.nodes if n.address in str(answer)).number
            if rng.random() < 0.8:
                both.ask(to, b"ASKING")
            both.ask(to, *call)
        both.compare_messages(call)
        kind = rng.random()
        if kind < 0.15:
            base = keys_of("", "lock", rng.choice(_NAMES)).base
            channel = calls.words(base)[0] + f"c{rng.randrange(10)}"
            verb = rng.choice((b"SSUBSCRIBE", b"SSUBSCRIBE", b"SUNSUBSCRIBE"))
            at = owner if rng.random() < 0.8 else rng.randrange(3)
            both.ask(at, verb, channel.encode(), listening=True)
        elif kind < 0.22 and moving is None:
            moved = rng.choice(_NAMES)
            part = both.fake.part_of(key_slot(moved.encode()))
            source = both.fake.claims[part][1].number
            moving = _Moving(both, moved, rng.choice([n for n in range(3) if n != source]))
        elif kind < 0.45 and moving is not None:
            moving.some_keys(rng)
        elif kind < 0.5 and moving is not None:
            moving.finish(rng)
            both.compare_messages(_MOVED)
            moving = None
    if moving is not None:
        moving.finish(rng)
