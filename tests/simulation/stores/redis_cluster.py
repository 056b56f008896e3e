"""A Redis Cluster in plain Python: slots and who owns them, as each node sees it; moves and failovers.

Nodes hear each other by ticks, and believe whoever claims a slot with the larger epoch. A primary sends its
replicas what it has changed, later. What is decided about one name is the machine's (``redis_machine.py``).
``test_redis_cluster_fake.py`` makes the same calls on this and on real nodes.

Left out: how far a script came that is ended in the middle (it deletes a key of a slot on its way, and
touches it again: here all is done but what it would say), ``WAIT``, replicas of a moved slot between two
``MIGRATE``, keyspace events, ``READONLY``, transactions, votes that split, nodes that are forgotten,
hostnames, TLS and users.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import hiredis
from redis import crc

from aiodlock.backends.memory.machine import Name
from aiodlock.backends.redis.scripts import ALL

from ..world import World
from .postgres_tables import copy_of
from .redis_machine import Keys, Refusal, Said, encode, has_part, parts_of, script_of, sha_of, split
from .wire import Stream, Wire

SLOTS = 16384
key_slot = lru_cache(10_000)(crc.key_slot)
PORT = 6379
#: Of the servers' clocks, in seconds. They agree.
_EPOCH = 1_700_000_000.0
_ALL = frozenset(script.sha for script in ALL)
#: A primary that has started takes no calls for so long (seconds).
_WRITABLE_AFTER = 2.0
#: Whose claim, and with which epoch.
Claim = tuple[int, str]


class Session:
    """The server's side of one connection. Mutable state: ``asking``, and its channels, ``plain`` and
    ``sharded``."""

    def __init__(self, node: Node, stream: Stream) -> None:
        self.node = node
        self.stream = stream
        self.asking = False
        self.plain: dict[str, None] = {}
        self.sharded: dict[str, None] = {}
        self._reader = hiredis.Reader(notEnoughData=False)
        self._out: list[bytes] | None = None
        node.sessions.append(self)

    def received(self, data: bytes) -> None:
        self.node.do(self._take, data)

    def ended(self) -> None:
        if self in self.node.sessions:
            self.node.sessions.remove(self)

    def _take(self, data: bytes) -> None:
        self._reader.feed(data)
        self._out = []
        while (fields := self._reader.gets()) is not False:
            try:
                self.push(self.node.run(self, fields))
            except Refusal as refused:
                self.node.cluster.world.log(f"{self.node!r}: {_text(fields)} -> {refused}")
                self.push(refused)
        out, self._out = b"".join(self._out), None
        if out:
            self.stream.send(out)

    def push(self, value: Any) -> None:
        """Send something, behind all that was sent before."""
        if value is NOTHING:
            return
        if self._out is not None:
            self._out.append(encode(value))
        else:
            self.stream.send(encode(value))


NOTHING: Any = object()


def _text(fields: Sequence[bytes]) -> str:
    return b" ".join(field[:40] for field in fields[:5]).decode(errors="replace")


class Node:
    """One server.

    Mutable state: ``keys``; ``view``, who owns each part of the slots, as this node knows; ``epoch``, its
    own; ``known``, the addresses of nodes by their ids; ``master`` (None for a primary); ``migrating`` and
    ``importing``, slots on their way; ``gone`` and ``arrived``, which keys of a name were moved; ``heard``,
    when each other node was heard last; ``is_ok``, whether it serves; ``up``, ``paused`` and ``_later``;
    ``link``, which copy of its primary's data it follows (0: none), and ``synced``, whether it had one.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.number = number
        self.id = f"{cluster.letter}{number:039x}"
        self.address = f"10.{cluster.net}.0.{number + 1}"
        self.keys = Keys()
        self.view: list[Claim] = [(0, "")] * len(cluster.parts)
        self.epoch = 0
        self.known: dict[str, str] = {self.id: self.address}
        self.master: Node | None = None
        self.migrating: dict[int, Node] = {}
        self.importing: dict[int, Node] = {}
        self.gone: dict[str, set[str]] = {}
        self.arrived: dict[str, set[str]] = {}
        self.heard: dict[str, float] = {}
        self.is_ok = True
        self.minority_at = -100.0
        self.not_before = 0.0
        self.up = True
        self.paused = False
        self.link = 0
        self.synced = False
        self.lag = 0.0
        self.scripts: set[bytes] = set()
        self.sessions: list[Session] = []
        self.version = 0
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._slots: tuple[int, bytes] = (-1, b"")
        self.listen()

    def __repr__(self) -> str:
        role = "replica" if self.master else "primary"
        return f"{self.cluster.letter}{self.number}({role}{'' if self.up else ', down'})"

    def listen(self) -> None:
        self.cluster.wire.listening[self.address, PORT] = lambda stream: Session(self, stream)

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Do it now, or when the server goes on."""
        if not self.up:
            return
        if self.paused:
            self._later.append((call, args))
        else:
            call(*args)

    def resume(self) -> None:
        self.paused = False
        later, self._later = self._later, []
        for call, args in later:
            self.do(call, *args)

    def now_us(self) -> int:
        return round((self.world.time + _EPOCH) * 1_000_000)

    def now_ms(self) -> int:
        return self.now_us() // 1000

    # -- whose a slot is -----------------------------------------------------------------------------

    def owns(self, slot: int) -> bool:
        return self.view[self.cluster.part_of(slot)][1] == self.id

    def has(self, key: str) -> bool:
        """Whether this key is here, when some of its name's may have been moved."""
        base, part = split(key)
        if part in self.gone.get(base, ()):
            return False
        if base in self.arrived and part not in self.arrived[base]:
            return False
        return self.keys.exists(key, self.now_ms())

    def redirect(self, keys: Sequence[str], asking: bool, *, channels: bool = False) -> None:
        """Raise Refusal unless this node serves a command with these keys."""
        slots = {key_slot(key.encode()) for key in keys}
        if len(slots) > 1:
            raise Refusal("CROSSSLOT Keys in request don't hash to the same slot")
        (slot,) = slots
        _, owner = self.view[self.cluster.part_of(slot)]
        if not owner:
            raise Refusal("CLUSTERDOWN Hash slot not served")
        if not self.is_ok and not (channels and self.cluster.channels_when_down):
            raise Refusal("CLUSTERDOWN The cluster is down")
        target = self.migrating.get(slot) if owner == self.id else None
        importing = target is None and slot in self.importing
        if (target is not None or importing) and not channels:
            there = [self.has(key) for key in keys]
            if target is not None and not all(there):
                if any(there) and self.cluster.tries_again:
                    raise Refusal("TRYAGAIN Multiple keys request during rehashing of slot")
                raise Refusal(f"ASK {slot} {self.known[target.id]}:{PORT}")
            if importing and asking and len(set(keys)) > 1 and not all(there):
                raise Refusal("TRYAGAIN Multiple keys request during rehashing of slot")
        if importing and asking:
            return
        if owner != self.id:
            raise Refusal(f"MOVED {slot} {self.known.get(owner, '')}:{PORT}")

    # -- commands ------------------------------------------------------------------------------------

    def run(self, session: Session, fields: list[bytes]) -> Any:
        """Carry a command out; return its answer."""
        name = fields[0].upper().decode()
        asking, session.asking = session.asking, False
        return getattr(self, f"_{name.lower()}")(session, fields[1:], asking)

    def _asking(self, session: Session, words: list[bytes], asking: bool) -> Any:
        session.asking = True
        return "OK"

    def _ping(self, session: Session, words: list[bytes], asking: bool) -> Any:
        return [b"pong", b""] if session.plain or session.sharded else "PONG"

    def _time(self, session: Session, words: list[bytes], asking: bool) -> Any:
        us = self.now_us()
        return [b"%d" % (us // 1_000_000), b"%d" % (us % 1_000_000)]

    def _cluster(self, session: Session, words: list[bytes], asking: bool) -> Any:
        about = words[0].upper()
        if about == b"NODES":
            return self._tell_nodes()
        assert about == b"SLOTS", words
        return self._tell_slots()

    def _tell_nodes(self) -> bytes:
        lines = []
        for id, address in self.known.items():
            flags = "myself," if id == self.id else ""
            flags += "master" if any(owner == id for _, owner in self.view) else "slave"
            lines.append(f"{id} {address}:{PORT}@1{PORT} {flags} - 0 0 {self.epoch} connected")
        return "\n".join(lines).encode() + b"\n"

    def _tell_slots(self) -> list[Any]:
        told: list[list[Any]] = []
        last_owner = ""
        for (first, last), (_, owner) in zip(self.cluster.parts, self.view, strict=True):
            if owner and owner == last_owner:
                told[-1][1] = last
            elif owner:
                where = self.known.get(owner, "")
                told.append([first, last, [where.encode(), PORT, owner.encode()]])
            last_owner = owner
        return told

    def _script(self, session: Session, words: list[bytes], asking: bool) -> Any:
        if words[0].upper() == b"EXISTS":
            return [int(words[1] in self.scripts)]
        self.scripts.add(sha_of(words[1]))
        return sha_of(words[1])

    def _evalsha(self, session: Session, words: list[bytes], asking: bool) -> Any:
        sha, number = words[0], int(words[1])
        keys = [key.decode() for key in words[2 : 2 + number]]
        if keys:
            self.redirect(keys, asking)
        if sha not in self.scripts:
            raise Refusal("NOSCRIPT No matching script. Please use EVAL.")
        return self._call(script_of(sha), keys, words[2 + number :])

    def _eval(self, session: Session, words: list[bytes], asking: bool) -> Any:
        number = int(words[1])
        keys = [key.decode() for key in words[2 : 2 + number]]
        if not keys:
            return 1
        self.redirect(keys, asking)
        self.scripts.add(sha_of(words[0]))
        return self._call(script_of(words[0]), keys, words[2 + number :])

    def _call(self, script: str, keys: list[str], arguments: list[bytes]) -> Any:
        base = split(keys[0])[0]
        name = self.keys.names.get(base)
        before = () if name is None else (*name.holders, *name.waiters)
        on_its_way = bool(self.migrating) and key_slot(keys[0].encode()) in self.migrating
        there = [key for key in keys if on_its_way and self.has(key)]
        reply, said = self.keys.run(script, keys, arguments, self.now_us())
        if script not in ("inspect", "tell"):
            id = arguments[0].decode()
            self.world.log(_Ran(repr(self), script, base, id, reply))
            self.cluster.on_call(self, script, base, id, reply, before)
            self.changed(base)
        if not all(map(self.has, there)):
            # It has deleted a key, and touches it again: that would have to be asked for elsewhere.
            raise Refusal("ERR Attempted to access a non local key in a cluster node script")
        for one in said:
            self._say(one)
        return b" ".join(reply) if script in ("acquire", "extend", "leave") else reply

    def _say(self, said: Said) -> None:
        if said.command == "SPUBLISH":
            self._spread(said.channel, said.text.encode(), sharded=True)
        else:
            self.cluster.publish(self, said.channel, said.text.encode())

    def _spread(self, channel: str, text: bytes, *, sharded: bool) -> int:
        heard = 0
        word = b"smessage" if sharded else b"message"
        for session in list(self.sessions):
            if channel in (session.sharded if sharded else session.plain):
                session.push([word, channel.encode(), text])
                heard += 1
        return heard

    def heard_of(self, channel: str, text: bytes) -> None:
        """Another node passes on what was published there."""
        self._spread(channel, text, sharded=False)

    def _publish(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.cluster.publish(self, words[0].decode(), words[1])
        return sum(words[0].decode() in one.plain for one in self.sessions)

    def _spublish(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.redirect([words[0].decode()], asking, channels=True)
        return self._spread(words[0].decode(), words[1], sharded=True)

    def _pubsub(self, session: Session, words: list[bytes], asking: bool) -> Any:
        if not self.cluster.sharded:
            raise Refusal("ERR Unknown subcommand or wrong number of arguments for 'SHARDNUMSUB'.")
        return []

    def _subscribe(self, session: Session, words: list[bytes], asking: bool) -> Any:
        session.plain[words[0].decode()] = None
        return [b"subscribe", words[0], len(session.plain)]

    def _unsubscribe(self, session: Session, words: list[bytes], asking: bool) -> Any:
        session.plain.pop(words[0].decode(), None)
        return [b"unsubscribe", words[0], len(session.plain)]

    def _ssubscribe(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.redirect([words[0].decode()], asking, channels=True)
        session.sharded[words[0].decode()] = None
        return [b"ssubscribe", words[0], len(session.sharded)]

    def _sunsubscribe(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.redirect([words[0].decode()], asking, channels=True)
        session.sharded.pop(words[0].decode(), None)
        return [b"sunsubscribe", words[0], len(session.sharded)]

    def _get(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.redirect([words[0].decode()], asking)
        return self.keys.get(words[0].decode(), self.now_ms())

    def _del(self, session: Session, words: list[bytes], asking: bool) -> Any:
        key = words[0].decode()
        self.redirect([key], asking)
        deleted = self.keys.delete(key, self.now_us())
        self.changed(split(key)[0])
        return deleted

    def _exists(self, session: Session, words: list[bytes], asking: bool) -> Any:
        self.redirect([words[0].decode()], asking)
        return int(self.has(words[0].decode()))

    def _scan(self, session: Session, words: list[bytes], asking: bool) -> Any:
        return [b"0", [key.encode() for key in self.keys.scan(self.now_ms()) if self.has(key)]]

    def _probe(self, session: Session, words: list[bytes], asking: bool) -> Any:
        """What is only asked to see whether it may be."""
        self.redirect([words[0].decode()], asking)
        return None

    _set = _hgetall = _hget = _hset = _hdel = _hexists = _mget = _pttl = _pexpire = _probe
    _xadd = _xrange = _xdel = _probe

    # -- data ----------------------------------------------------------------------------------------

    def changed(self, base: str) -> None:
        """A name has changed: the replicas are sent it."""
        name = self.keys.names.get(base)
        for replica in self.cluster.replicas_of(self):
            if replica.link and base:
                twin = copy_of(name, deep=True)
                self.world.after(replica.lag, replica.do, replica.apply, replica.link, base, twin)

    def apply(self, link: int, base: str, name: Name | None) -> None:
        """A replica is sent how a name is now."""
        if link != self.link or self.master is None or not self.cluster.hear(self, self.master):
            if link == self.link:
                self.link = 0
            return
        if name is None:
            self.keys.names.pop(base, None)
        else:
            self.keys.names[base] = name

    def resync(self) -> None:
        """A replica takes over all that its primary has."""
        assert self.master is not None
        self.cluster.links += 1
        self.link, self.synced = self.cluster.links, True
        self.keys = copy_keys(self.master.keys)
        self.gone, self.arrived = {}, {}

    # -- the view of the slots -----------------------------------------------------------------------

    def take(self, part: int, claim: Claim) -> None:
        """Somebody has claimed slots with a larger epoch."""
        _, before = self.view[part]
        if before == claim[1]:
            self.view[part] = claim
            return
        self.view[part] = claim
        self.version += 1
        if before == self.id:
            self._lose(part)

    def _lose(self, part: int) -> None:
        first, last = self.cluster.parts[part]
        self.migrating.pop(first, None)
        for session in list(self.sessions):
            for channel in [c for c in session.sharded if first <= key_slot(c.encode()) <= last]:
                del session.sharded[channel]
                session.push([b"sunsubscribe", channel.encode(), len(session.sharded)])
        self.keys.names = {
            base: name
            for base, name in self.keys.names.items()
            if not first <= key_slot(base.encode()) <= last
        }

    def follow(self, master: Node) -> None:
        """Become a replica."""
        self.world.log(f"{self!r} follows {master!r}")
        self.master, self.link, self.synced = master, 0, False
        self.migrating, self.importing = {}, {}

    def promote(self) -> None:
        """Take over all slots of the primary."""
        old = self.master
        assert old is not None
        self.master, self.link = None, 0
        self.keys = copy_keys(self.keys)
        self.epoch = self.cluster.next_epoch()
        self.is_ok, self.not_before = True, 0.0
        parts = [part for part, (_, owner) in enumerate(self.view) if owner == old.id]
        self.world.log(f"{self!r} takes over from {old!r}")
        for part in parts:
            self.view[part] = (self.epoch, self.id)
            self.cluster.claim(part, self)
        self.version += 1
        self.cluster.on_promotion(self, old, parts)
        self.cluster.drop_halves(old)
        self.cluster.spread(self)

    def down(self) -> None:
        """The process is killed. Its data are on the disk."""
        self.up, self.paused, self._later = False, False, []
        self.cluster.drop_halves(self)
        self.cluster.wire.listening.pop((self.address, PORT), None)
        self.cluster.wire.close(self.address)
        self.sessions.clear()
        self.scripts.clear()

    def start(self) -> None:
        if self.up:
            return
        self.up = True
        self.heard = dict.fromkeys(self.heard, self.world.time)
        self.link = 0
        self.is_ok, self.not_before = False, self.world.time + _WRITABLE_AFTER
        self.listen()


def copy_keys(keys: Keys) -> Keys:
    twin = Keys()
    twin.strings = dict(keys.strings)
    for base, name in keys.names.items():
        copied = copy_of(name, deep=True)
        assert copied is not None
        twin.names[base] = copied
    return twin


class _Ran(NamedTuple):
    """What is logged of a script, as text when somebody reads it."""

    node: str
    script: str
    base: str
    id: str
    reply: Any

    def __str__(self) -> str:
        return f"{self.node}: {self.script} {self.base} {self.id} -> {_shown(self.reply)}"


def _shown(reply: Any) -> str:
    if isinstance(reply, list):
        return "[" + " ".join(_shown(part) for part in reply) + "]"
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)


class Cluster:
    """All nodes.

    Mutable state: ``nodes``; ``claims``, who has claimed each part of the slots with the largest epoch;
    ``epoch``; ``cut`` (pairs of nodes between which nothing passes); ``moves`` under way; ``links``.

    :param names: of which each has a part of the slots for itself.
    """

    def __init__(
        self,
        world: World,
        wire: Wire,
        names: Sequence[str],
        *,
        letter: str = "a",
        net: int = 1,
        primaries: int = 3,
        replicas: int = 1,
        timeout: float = 1.0,
        tick: float = 0.1,
    ) -> None:
        self.world = world
        self.wire = wire
        self.letter, self.net = letter, net
        self.timeout, self.tick = timeout, tick
        #: Redis 7 tells that keys are on both sides; older ones send clients to the other.
        self.tries_again = True
        self.sharded = True
        self.channels_when_down = True
        self.parts = _parts({key_slot(name.encode()) for name in names})
        self._firsts = [first for first, _ in self.parts]
        self.claims: list[tuple[int, Node]] = []
        self.epoch = 0
        self.links = 0
        self.cut: set[frozenset[int]] = set()
        self.moves: list[Move] = []
        self.between = 0.001
        self.on_call: Callable[..., None] = lambda *_: None
        self.on_promotion: Callable[[Node, Node, list[int]], None] = lambda *_: None
        self.on_lost: Callable[[list[str]], None] = lambda _: None
        self._wanted: defaultdict[str, float] = defaultdict(float)
        self._merged: dict[tuple[int, int], tuple[int, int]] = {}
        self._all_heard_at = 0.0
        self._versions = -1
        self.nodes = [Node(self, number) for number in range(primaries)]
        for index in range(len(self.parts)):
            owner = self.nodes[index % primaries]
            self.claims.append((owner.number + 1, owner))
        for node in self.nodes:
            node.epoch = node.number + 1
        self.epoch = primaries
        for number in range(primaries * replicas):
            replica = Node(self, primaries + number)
            replica.master = self.nodes[number % primaries]
            self.nodes.append(replica)
        for node in self.nodes:
            node.view = [(epoch, owner.id) for epoch, owner in self.claims]
            node.known = {one.id: one.address for one in self.nodes}
            node.heard = dict.fromkeys(node.known, 0.0)
            if node.master is not None:
                node.resync()
        self._tick()

    def part_of(self, slot: int) -> int:
        return bisect_right(self._firsts, slot) - 1

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def claim(self, part: int, node: Node) -> None:
        self.claims[part] = (node.epoch, node)

    def owner_of(self, base: str) -> Node:
        """Return the node that has claimed a name last."""
        return self.claims[self.part_of(key_slot(base.encode()))][1]

    def find(self, base: str) -> Name | None:
        """Return a name where it is now."""
        owner = self.owner_of(base)
        found = owner.keys.names.get(base)
        if found is None:
            target = owner.migrating.get(key_slot(base.encode()))
            found = None if target is None else target.keys.names.get(base)
        return found

    def replicas_of(self, master: Node) -> list[Node]:
        return [node for node in self.nodes if node.master is master]

    def publish(self, node: Node, channel: str, text: bytes) -> None:
        """Publish at one node; the others pass it on."""
        node._spread(channel, text, sharded=False)
        for other in self.nodes:
            if other is not node and self.hear(node, other):
                self.world.after(self.between, other.do, other.heard_of, channel, text)

    # -- hearing each other --------------------------------------------------------------------------

    def hear(self, one: Node, other: Node) -> bool:
        if not (one.up and other.up) or one.paused or other.paused:
            return False
        return frozenset((one.number, other.number)) not in self.cut

    def _tick(self) -> None:
        self.world.after(self.tick, self._tick)
        now, nodes = self.world.time, self.nodes
        versions = sum(node.version for node in nodes)
        all_well = not self.cut and all(
            node.up and not node.paused and node.is_ok and (node.link or node.master is None)
            for node in nodes
        )
        if all_well and versions == self._versions:
            self._all_heard_at = now  # as when all have heard each other, and nothing is new
            return
        for one in nodes:
            for other in nodes:
                if one is not other and self.hear(one, other):
                    one.heard[other.id] = now
                    self._merge(other, one)
        for node in nodes:
            if node.up and not node.paused:
                self._settle(node)
        self._versions = versions if all_well else -1

    def spread(self, node: Node) -> None:
        """A node tells all others at once."""
        for other in self.nodes:
            if other is not node and self.hear(node, other):
                self.world.after(self.between, self._merge_if_heard, node, other)

    def _merge_if_heard(self, node: Node, other: Node) -> None:
        if self.hear(node, other):
            self._merge(node, other)

    def _merge(self, sender: Node, to: Node) -> None:
        """``to`` hears what ``sender`` owns, and tells what it knows better."""
        if sender.id not in to.known:
            return
        to.known[sender.id] = sender.address
        versions = (sender.version, to.version)
        if self._merged.get((sender.number, to.number)) == versions:
            return
        self._merged[sender.number, to.number] = versions
        for id, address in sender.known.items():
            if id not in to.known:
                to.known[id] = address
                to.heard[id] = self.world.time
                to.version += 1
        if sender.master is not None:
            return
        lost: tuple[Node, str] | None = None
        for part, (_, owner) in enumerate(sender.view):
            if owner != sender.id:
                continue
            known, of = to.view[part]
            if of == sender.id:
                to.view[part] = (sender.epoch, sender.id)
            elif self.parts[part][0] in to.importing:
                continue  # changed by hand alone
            elif not of or sender.epoch > known:
                if of == to.id or (to.master is not None and of == to.master.id):
                    lost = (sender, of)
                to.take(part, (sender.epoch, sender.id))
            elif known > sender.epoch and self.parts[part][0] not in sender.importing:
                sender.take(part, to.view[part])
                if not any(owner == sender.id for _, owner in sender.view):
                    sender.follow(self._node(of))
        if lost is not None and not any(owner == lost[1] for _, owner in to.view):
            to.follow(lost[0])

    def _node(self, id: str) -> Node:
        return next(node for node in self.nodes if node.id == id)

    # -- who is well ---------------------------------------------------------------------------------

    def _masters(self, node: Node) -> list[Node]:
        ids = {owner for _, owner in node.view if owner}
        return [one for one in self.nodes if one.id in ids]

    def _misses(self, node: Node, other: Node) -> bool:
        since = max(node.heard.get(other.id, self.world.time), self._all_heard_at)
        return node is not other and self.world.time - since > self.timeout

    def _calls_failed(self, masters: list[Node], node: Node, other: Node) -> bool:
        agree = sum(
            self._misses(one, other)
            for one in masters
            if one is node or (one is not other and not self._misses(node, one))
        )
        return agree > len(masters) // 2

    def _settle(self, node: Node) -> None:
        masters, now = self._masters(node), self.world.time
        reached = sum(not self._misses(node, one) for one in masters)
        with_majority = reached > len(masters) // 2
        failed = [
            one
            for one in masters
            if self._misses(node, one) and self._calls_failed(masters, node, one)
        ]
        if not with_majority:
            node.minority_at = now
        was = node.is_ok
        if not with_majority or failed:
            node.is_ok = False
        elif not node.is_ok and now >= node.not_before:
            rejoins = node.master is None and now - node.minority_at < max(0.5, self.timeout)
            node.is_ok = not rejoins
        if node.is_ok is not was:
            self.world.log(f"{node!r} serves{'' if node.is_ok else ' no more'}")
        if node.master is None:
            return
        if not node.link and self.hear(node, node.master) and node.master.master is None:
            node.resync()
        elif node.master.master is not None:
            node.follow(node.master.master)
        if with_majority and node.master in failed and node.synced:
            when = self._wanted[node.id]
            if not when:
                self._wanted[node.id] = now + 0.2 + 0.5 * self.world.random.random()
            elif now >= when and node.up:
                del self._wanted[node.id]
                node.promote()
        else:
            self._wanted.pop(node.id, None)

    # -- what operators do ---------------------------------------------------------------------------

    def fail_over(self, replica: Node) -> None:
        """``CLUSTER FAILOVER``: the primary waits until the replica has all."""
        master = replica.master
        if master is None or not self.hear(replica, master) or not replica.link:
            return
        replica.resync()
        replica.promote()
        self._merge(replica, master)

    def join(self) -> Node:
        """A new node without slots; one of the others is told of it."""
        node = Node(self, len(self.nodes))
        self.nodes.append(node)
        first = next(one for one in self.nodes if one.up and not one.paused)
        node.view, node.known = list(first.view), dict(first.known)
        node.known[node.id] = node.address
        first.known[node.id] = node.address
        node.heard = dict.fromkeys(node.known, self.world.time)
        first.version += 1
        return node

    def drop_halves(self, node: Node) -> None:
        """Names of which some keys were moved from or to a node that is gone are no more."""
        for other in self.nodes:
            bases = [*other.gone, *other.arrived]
            if other is not node:
                bases = [base for base in bases if base in node.gone or base in node.arrived]
            for base in bases:
                name = other.keys.names.pop(base, None)
                if name is not None:
                    self.on_lost([*name.holders, *name.waiters])
                other.gone.pop(base, None)
                other.arrived.pop(base, None)

    def calm(self) -> None:
        self.cut.clear()
        for node in self.nodes:
            if node.paused:
                node.resume()
            node.start()


class Move:
    """A slot on its way to another primary, step by step."""

    def __init__(self, cluster: Cluster, slot: int, target: Node, pause: float) -> None:
        self.cluster = cluster
        self.slot = slot
        self.part = cluster.part_of(slot)
        self.source = cluster.claims[self.part][1]
        self.target = target
        self._pause = pause
        self._steps = iter(self._all())
        cluster.moves.append(self)
        self.step()

    def step(self) -> None:
        source, target = self.source, self.target
        well = source.up and target.up and not source.paused and not target.paused
        if (
            not well
            or not source.owns(self.slot)
            or target.master
            or not self.cluster.hear(source, target)
        ):
            self.abort()
            return
        if next(self._steps, None) is None:
            self.cluster.moves.remove(self)
            return
        random = self.cluster.world.random
        self.cluster.world.after(self._pause * random.uniform(0.2, 2.0), self.step)

    def abort(self) -> None:
        """The operator's tool gives up: ``SETSLOT STABLE``. What has arrived goes back."""
        for base in list(self.source.gone):
            if key_slot(base.encode()) == self.slot:
                del self.source.gone[base]
                self.target.keys.names.pop(base, None)
                self.target.arrived.pop(base, None)
        for base in [b for b in self.target.keys.names if key_slot(b.encode()) == self.slot]:
            if not self.target.owns(self.slot):
                self.source.keys.names.setdefault(base, self.target.keys.names.pop(base))
        if not self.target.owns(
            self.slot
        ):  # else the source hears of it, and sends everybody there
            self.source.migrating.pop(self.slot, None)
        self.target.importing.pop(self.slot, None)
        if self in self.cluster.moves:
            self.cluster.moves.remove(self)

    def _all(self) -> Any:
        source, target, world = self.source, self.target, self.cluster.world
        world.log(f"slot {self.slot} moves from {source!r} to {target!r}")
        target.importing[self.slot] = source
        yield True
        source.migrating[self.slot] = target
        source.known.setdefault(target.id, target.address)
        yield True
        for base in [b for b in source.keys.names if key_slot(b.encode()) == self.slot]:
            for part in parts_of(source.keys.names[base], source.now_ms()):
                if not self.move(base, part):
                    yield True
        for key in [k for k in source.keys.strings if key_slot(k.encode()) == self.slot]:
            target.keys.strings[key] = source.keys.strings.pop(key)
        # What came meanwhile is moved at once, and the slot is the target's.
        for base in [b for b in source.keys.names if key_slot(b.encode()) == self.slot]:
            self._arrive(base)
        self.own()
        yield True
        source.migrating.pop(self.slot, None)
        source.take(self.part, (target.epoch, target.id))
        self.cluster.spread(target)

    def move(self, base: str, part: str) -> bool:
        """``MIGRATE`` one key; return whether the whole name is there now."""
        source, target = self.source, self.target
        name = source.keys.names.get(base)
        if name is None:
            return True
        source.gone.setdefault(base, set()).add(part)
        target.arrived.setdefault(base, set()).add(part)
        target.keys.names[base] = name
        left = set(parts_of(name, source.now_ms())) - source.gone[base]
        if left:
            return False
        self._arrive(base)
        return True

    def _arrive(self, base: str) -> None:
        source, target = self.source, self.target
        target.keys.names[base] = source.keys.names.pop(base)
        source.gone.pop(base, None)
        target.arrived.pop(base, None)
        source.changed(base)
        target.changed(base)

    def own(self) -> None:
        """``SETSLOT NODE`` at the target."""
        target = self.target
        target.importing.pop(self.slot, None)
        target.epoch = self.cluster.next_epoch()
        target.take(self.part, (target.epoch, target.id))
        self.cluster.claim(self.part, target)


def move_at_once(cluster: Cluster, slot: int, target: Node) -> None:
    """Valkey's ``CLUSTER MIGRATESLOTS``: nobody sees a part of it."""
    move = Move.__new__(Move)
    move.cluster, move.slot, move.target = cluster, slot, target
    move.part = cluster.part_of(slot)
    move.source = source = cluster.claims[move.part][1]
    for base in [b for b in source.keys.names if key_slot(b.encode()) == slot]:
        move._arrive(base)
    move.own()
    source.take(move.part, (target.epoch, target.id))
    cluster.spread(target)


def _parts(alone: set[int]) -> list[tuple[int, int]]:
    """Cut the slots into parts, so that each of these slots is one."""
    firsts = sorted({0, SLOTS // 3, 2 * SLOTS // 3} | alone | {slot + 1 for slot in alone})
    firsts = [first for first in firsts if first < SLOTS]
    return list(zip(firsts, [first - 1 for first in [*firsts[1:], SLOTS]], strict=True))


__all__ = ["Cluster", "Move", "Node", "has_part", "move_at_once"]
