"""ZooKeeper's servers, as few rules as make them what clients meet.

A leader decides, a majority accepts, every server applies in the same order, later or earlier. Reads are
answered by the server that a client is connected to, from what it has applied. The leader alone ends
sessions: it asks its followers each half tick which ones they have heard of (``Lifetime`` rests on that).
Who has not heard from its leader, or from a majority, for some ticks closes its clients' connections.

Left out: observers, reconfiguration, snapshots on disk, SASL, and members that answer read-only.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from aiodlock.backends.zookeeper import jute

from ..world import World
from . import zookeeper_tree as trees
from .wire import Stream, Wire
from .zookeeper_tree import Change, Operation, Tree

#: In ticks.
_SYNC_LIMIT, _CONTAINERS_EVERY = 5, 10
_SHORTEST, _LONGEST = 2, 20
_REPLY = struct.Struct(">iqi")
_EVENT_STATE = 3


@dataclass
class _Asked:
    """One request of a client, in the order in which it has to be answered."""

    xid: int
    opcode: int
    reader: jute.Reader
    operations: list[Operation] = field(default_factory=list)
    #: Of a write: the answer, when it is committed and applied here.
    answer: bytes | None = None
    awaited: bool = False
    closes: bool = False


class Client:
    """A server's side of a connection."""

    def __init__(self, member: Member, stream: Stream) -> None:
        self.member = member
        self.stream = stream
        self.session = 0
        self.timeout = 0
        self.open = True
        self.pending: deque[_Asked] = deque()
        self.watches: dict[str, set[str]] = {"data": set(), "children": set()}
        self._unread = bytearray()
        self._greeted = False

    # -- Served --------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        self.member.do(self._receive, data)

    def ended(self) -> None:
        self.open = False
        self.member.clients.discard(self)

    # -- requests ------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if not self.open or self.member.role not in ("leading", "following"):
            self.close()
            return
        self._unread += data
        for frame in jute.split(self._unread):
            if not self._greeted:
                self._greeted = True
                self._greet(frame)
                continue
            reader = jute.Reader(frame)
            xid, opcode = reader.int(), reader.int()
            self._ask(_Asked(xid, opcode, reader))
            if self.session:
                self.member.touch(self.session)
        self.go_on()

    def _greet(self, frame: bytes) -> None:
        reader = jute.Reader(frame)
        reader.int()
        seen, timeout, session = struct.unpack_from(">qiq", frame, 4)
        if seen > self.member.tree.zxid:
            self.close()  # the client has seen a newer state than this server has
            return
        tick = round(self.member.ensemble.tick * 1000)
        self.timeout = min(max(timeout, _SHORTEST * tick), _LONGEST * tick)
        if session:
            self.member.to_leader("revalidate", self, session)
        else:
            self.member.to_leader("begin", self, self.timeout)

    def welcome(self, session: int, timeout: int) -> None:
        """The leader has answered the greeting; a timeout of 0: there is no such session."""
        if not self.open:
            return
        self.session = session if timeout else 0
        body = struct.pack(">iiqi", 0, timeout, session, 16) + bytes(16) + b"\x00"
        self._send(body)
        if not timeout:
            self.close()

    def _ask(self, asked: _Asked) -> None:
        opcode = asked.opcode
        if opcode == jute.MULTI:
            asked.operations = trees.read_operations(asked.reader)
        elif opcode in _WRITES:
            asked.operations = [trees.read_operation(opcode, asked.reader)]
        asked.awaited = opcode in (*_WRITES, jute.MULTI, jute.SYNC, jute.CLOSE)
        self.pending.append(asked)
        if opcode == jute.SYNC:
            self.member.to_leader("sync", self, asked)
        elif asked.awaited:
            self.member.to_leader("write", self, asked)

    def go_on(self) -> None:
        """Answer what can be answered, in order."""
        while self.pending and self.open:
            asked = self.pending[0]
            if asked.awaited and asked.answer is None:
                return
            self.pending.popleft()
            if asked.answer is None:
                asked.answer = self._read(asked)
            self._send(asked.answer)
            if asked.closes:
                self.close()

    def _read(self, asked: _Asked) -> bytes:
        tree, opcode, reader = self.member.tree, asked.opcode, asked.reader
        try:
            body = self._look_up(tree, opcode, reader)
        except trees.Refused as refused:
            return self.reply(asked, refused.code)
        return self.reply(asked, 0, body)

    def _look_up(self, tree: Tree, opcode: int, reader: jute.Reader) -> bytes:
        if opcode in (jute.PING, jute.AUTH):
            return b""
        if opcode == jute.SET_WATCHES:
            self._set_watches(tree, reader)
            return b""
        path = reader.text()
        if opcode == jute.GET_EPHEMERALS:
            own = tree.ephemerals.get(self.session, set())
            return trees.texts(sorted(one for one in own if one.startswith(path)))
        watch = bool(reader.unpack(struct.Struct(">?"))[0])
        if opcode == jute.EXISTS and watch:
            self.watches["data"].add(path)
        node = tree.get(path)
        if opcode == jute.GET_CHILDREN2:
            if watch:
                self.watches["children"].add(path)
            return trees.texts(sorted(node.children)) + node.stat()
        if watch:
            self.watches["data"].add(path)
        if opcode == jute.EXISTS:
            return node.stat()
        assert opcode == jute.GET_DATA, opcode
        return struct.pack(">i", len(node.data)) + node.data + node.stat()

    def _set_watches(self, tree: Tree, reader: jute.Reader) -> None:
        (since,) = reader.unpack(struct.Struct(">q"))
        data, exist, children = reader.texts(), reader.texts(), reader.texts()
        for path in data:
            node = tree.nodes.get(path)
            if node is None:
                self.tell(jute.DELETED, path)
            elif node.modified > since:
                self.tell(jute.CHANGED, path)
            else:
                self.watches["data"].add(path)
        for path in exist:
            if path in tree.nodes:
                self.tell(jute.CREATED, path)
            else:
                self.watches["data"].add(path)
        for path in children:
            node = tree.nodes.get(path)
            if node is None:
                self.tell(jute.DELETED, path)
            elif node.children_modified > since:
                self.tell(jute.CHILDREN_CHANGED, path)
            else:
                self.watches["children"].add(path)

    # -- answers -------------------------------------------------------------------------------------

    def reply(self, asked: _Asked, code: int, body: bytes = b"", zxid: int | None = None) -> bytes:
        seen = self.member.tree.zxid if zxid is None else zxid
        return _REPLY.pack(asked.xid, seen, code) + (b"" if code else body)

    def fire(self, kind: int, path: str) -> None:
        """A node has come, was written or has gone."""
        if kind == jute.CHILDREN_CHANGED:
            watched = path in self.watches["children"]
            self.watches["children"].discard(path)
        else:
            watched = path in self.watches["data"]
            self.watches["data"].discard(path)
            if kind == jute.DELETED and path in self.watches["children"]:
                self.watches["children"].discard(path)
                watched = True
        if watched:
            self.tell(kind, path)

    def tell(self, kind: int, path: str) -> None:
        body = struct.pack(">ii", kind, _EVENT_STATE) + trees.text(path)
        self._send(_REPLY.pack(jute.EVENT_XID, -1, 0) + body)

    def _send(self, body: bytes) -> None:
        if self.open:
            self.stream.send(struct.pack(">i", len(body)) + body)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.member.clients.discard(self)
            self.stream.hang_up()


_WRITES = (
    jute.CREATE, jute.CREATE2, jute.CREATE_CONTAINER, jute.DELETE, jute.SET_DATA, jute.CHECK,
)  # fmt: skip


@dataclass
class _Proposed:
    """A change on its way, and whose it is."""

    change: Change
    origin: int
    client: Client | None = None
    asked: _Asked | None = None
    accepted: set[int] = field(default_factory=set)


class Member:
    """One server.

    Mutable state: ``role`` ("leading", "following", "looking", "down"), ``log`` (what it has accepted),
    ``tree`` (what it has applied of that: the first ``applied``), ``clients``, ``paused`` and ``_later``
    (what it does when it goes on), ``heard_at`` (when it last heard from its leader, or as one: from each
    follower), ``_touched`` (sessions heard of since the leader asked); of a leader ``draft`` (the tree with
    all of the log), ``committed``, ``expires`` (true times by session), ``owners`` (by session: which
    member may write for it).
    """

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        self.ensemble = ensemble
        self.world = ensemble.world
        self.number = number
        self.rate = 1.0 + self.world.random.uniform(-0.004, 0.004)
        self.role = "looking"
        self.epoch = 0
        self.log: list[_Proposed] = []
        self.applied = 0
        self.tree = Tree()
        self.tree.told = self._told
        self.clients: set[Client] = set()
        self.paused = False
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.heard_at: dict[int, float] = {}
        self._touched: set[int] = set()
        self.draft = Tree()
        self.committed = 0
        self.expires: dict[int, float] = {}
        self.owners: dict[int, int] = {}
        #: How long accepting a change takes, in true seconds.
        self.disk = self.world.random.uniform(0.0001, 0.002)

    def __repr__(self) -> str:
        return f"z{self.number}({self.role})"

    @property
    def leader(self) -> Member | None:
        leader = self.ensemble.leader
        return leader if leader is not None and leader.epoch == self.epoch else None

    # -- running -------------------------------------------------------------------------------------

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Do it now, or when the server goes on."""
        if self.role == "down":
            return
        if self.paused:
            self._later.append((call, args))
        else:
            call(*args)

    def resume(self) -> None:
        self.paused = False
        later, self._later = self._later, []
        # What a server finds when it goes on has come by many connections: in no order but each one's own.
        for call, args in later:
            self.do(call, *args)

    def send(self, to: Member, call: Callable[..., None], *args: Any) -> None:
        """Have another member do something, behind all that was sent to it before."""
        self.ensemble.send(self, to, self.epoch, call, args)

    def to_leader(self, what: str, client: Client, about: Any) -> None:
        leader = self.leader
        if leader is None:
            client.close()
        elif leader is self:
            self.on_request(self.number, what, client, about)
        else:
            self.send(leader, leader.on_request, self.number, what, client, about)

    def touch(self, session: int) -> None:
        """A client has been heard of."""
        if self.role == "leading":
            self._extend(session)
        else:
            self._touched.add(session)

    def down(self) -> None:
        """The process is killed. What it has accepted is on its disk."""
        self.drop_clients()
        self.role, self.paused, self._later = "down", False, []

    def look(self) -> None:
        """Look for a leader; clients are sent away."""
        if self.role != "down":
            self.drop_clients()
            self.role = "looking"

    def drop_clients(self) -> None:
        for client in list(self.clients):
            client.open = False
            client.stream.break_off()
        self.clients.clear()

    # -- changes -------------------------------------------------------------------------------------

    def accept(self, proposed: _Proposed) -> None:
        """Write it to the disk; the leader hears of that."""
        self.log.append(proposed)
        self.world.after(self.disk, self.do, self._accepted, proposed, self.epoch)

    def _accepted(self, proposed: _Proposed, epoch: int) -> None:
        leader = self.leader
        if epoch != self.epoch or leader is None:
            return
        if leader is self:
            self.on_accepted(self.number, proposed)
        else:
            self.send(leader, leader.on_accepted, self.number, proposed)

    def apply_until(self, count: int) -> None:
        """The first so many changes are committed."""
        while self.applied < min(count, len(self.log)):
            proposed = self.log[self.applied]
            self.applied += 1
            stats = self.tree.apply(proposed.change)
            self.ensemble.on_applied(self, proposed.change)
            if proposed.origin == self.number and proposed.client is not None:
                self._answer(proposed, stats)

    def _answer(self, proposed: _Proposed, stats: list[bytes]) -> None:
        client, asked, change = proposed.client, proposed.asked, proposed.change
        assert client is not None
        if asked is None:
            client.welcome(change.session, change.timeout)
            return
        if asked.opcode == jute.CLOSE:
            asked.closes = True
            asked.answer = client.reply(asked, 0, zxid=change.zxid)
        elif asked.opcode == jute.MULTI:
            body = trees.results_of(asked.operations, change, stats)
            asked.answer = client.reply(asked, 0, body, change.zxid)
        elif change.codes:
            asked.answer = client.reply(asked, change.codes[0], zxid=change.zxid)
        else:
            body = trees.result_of(asked.operations[0], change.steps[0], stats[0])
            asked.answer = client.reply(asked, 0, body, change.zxid)
        client.go_on()

    def _told(self, kind: int, path: str) -> None:
        for client in sorted(self.clients, key=lambda one: one.session):
            client.fire(kind, path)

    # -- following -----------------------------------------------------------------------------------

    def on_ping(self) -> None:
        """The leader asks which sessions were heard of."""
        self.heard_at[-1] = self.world.time
        touched, self._touched = self._touched, set()
        if (leader := self.leader) is not None:
            self.send(leader, leader.on_pong, self.number, touched)

    def on_proposal(self, proposed: _Proposed) -> None:
        if not self.log or proposed.change.zxid > self.log[-1].change.zxid:
            self.accept(proposed)  # else it was in the log that was taken over

    def on_commit(self, count: int) -> None:
        self.heard_at[-1] = self.world.time
        self.apply_until(count)

    def on_valid(self, client: Client, session: int, timeout: int) -> None:
        client.welcome(session, timeout)

    def on_synced(self, client: Client, asked: _Asked) -> None:
        asked.answer = client.reply(asked, 0, trees.text("/"))
        client.go_on()

    # -- leading -------------------------------------------------------------------------------------

    def _extend(self, session: int) -> None:
        timeout = self.draft.sessions.get(session)
        if timeout is not None:
            length = timeout / 1000 / self.rate
            end = self.world.time + length + self.ensemble.slack()
            end = self.expires[session] = max(self.expires.get(session, 0.0), end)
            self.world.at(end, self.do, self._end_overdue, session, self.epoch)

    def _end_overdue(self, session: int, epoch: int) -> None:
        """End a session at once when its time is over: servers may round up, and must not be relied on."""
        if self.role != "leading" or epoch != self.epoch:
            return
        if self.expires.get(session, self.world.time + 1.0) <= self.world.time:
            self.world.log(f"{self!r}: session {session} has expired")
            self._propose(Change(self._next_zxid(), (), session, 0), self.number, None, None)

    def on_pong(self, number: int, touched: set[int]) -> None:
        self.heard_at[number] = self.world.time
        for session in touched:
            self._extend(session)

    def on_request(self, number: int, what: str, client: Client, about: Any) -> None:
        self.heard_at[number] = self.world.time
        if what == "begin":
            self.ensemble.sessions += 1
            change = Change(self._next_zxid(), (), self.ensemble.sessions, about)
            self.owners[change.session] = number
            self._propose(change, number, client, None)
        elif what == "revalidate":
            timeout = self.draft.sessions.get(about, 0)
            if timeout:
                self.owners[about] = number
                self._extend(about)
            self._tell(number, "on_valid", client, about, timeout)
        elif what == "sync":
            self._tell(number, "on_synced", client, about)
        elif about.opcode == jute.CLOSE:
            change = Change(self._next_zxid(), (), client.session, 0)
            self._propose(change, number, client, about)
        else:
            self._write(number, client, about)

    def _write(self, number: int, client: Client, asked: _Asked) -> None:
        session = client.session
        zxid = self._next_zxid()
        refusal = 0
        if session not in self.draft.sessions:
            refusal = jute.SESSION_EXPIRED
        elif self.owners.get(session) != number:
            refusal = jute.SESSION_MOVED
        if refusal:
            # In a transaction too the whole request is refused.
            asked.opcode = jute.SET_DATA
            change = Change(zxid, codes=(refusal,))
        else:
            # A write that a follower passes on tells the leader nothing of the session: the pong does.
            change = self.draft.decide(zxid, session, asked.operations)
        self._propose(change, number, client, asked)

    def _tell(self, number: int, what: str, *args: Any) -> None:
        member = self.ensemble.members[number]
        if member is self:
            getattr(self, what)(*args)
        else:
            self.send(member, getattr(member, what), *args)

    def _next_zxid(self) -> int:
        last = self.log[-1].change.zxid if self.log else 0
        return last + 1 if last >> 32 == self.epoch else (self.epoch << 32) + 1

    def _propose(
        self, change: Change, origin: int, client: Client | None, asked: _Asked | None
    ) -> None:
        if change.session:
            self.draft.apply(change)
            if change.timeout:
                self._extend(change.session)
            else:
                self.expires.pop(change.session, None)
        proposed = _Proposed(change, origin, client, asked)
        for member in self.followers():
            self.send(member, member.on_proposal, proposed)
        self.accept(proposed)

    def followers(self) -> list[Member]:
        return [
            member
            for member in self.ensemble.members
            if member is not self and member.role == "following" and member.epoch == self.epoch
        ]

    def on_accepted(self, number: int, proposed: _Proposed) -> None:
        self.heard_at[number] = self.world.time
        proposed.accepted.add(number)
        before = self.committed
        while (
            self.committed < len(self.log)
            and len(self.log[self.committed].accepted) >= self.ensemble.majority
        ):
            self.committed += 1
        if self.committed > before:
            # The leader applies what it then tells others to apply.
            self.apply_until(self.committed)
            for member in self.followers():
                self.send(member, member.on_commit, self.committed)

    def beat(self) -> None:
        """Each half tick of a leader."""
        for member in self.followers():
            self.send(member, member.on_ping)

    def delete_containers(self) -> None:
        """Delete containers that have become empty."""
        for path, node in list(self.draft.nodes.items()):
            if node.container and node.creates and not node.children:
                change = self.draft.decide(self._next_zxid(), 0, [Operation(jute.DELETE, path)])
                self._propose(change, self.number, None, None)


class _Message(NamedTuple):
    """From one member to another. In the order of their serials."""

    serial: int
    one: Member
    to: Member
    epoch: int
    call: Callable[..., None]
    args: tuple[Any, ...]


class Ensemble:
    """All servers, what lies between them, and who leads.

    Mutable state: ``members``, ``leader``, ``epoch``, ``sessions`` (the last id), ``cut`` (pairs of members
    between which nothing passes), ``_last`` (delivery times, for the order), ``_held`` (what waits for a
    cut to heal).
    """

    def __init__(self, world: World, wire: Wire, members: int, tick: float) -> None:
        self.world = world
        self.wire = wire
        self.tick = tick
        self.members = [Member(self, number) for number in range(members)]
        self.leader: Member | None = None
        self.epoch = 0
        self.sessions = 0
        self.cut: set[frozenset[int]] = set()
        self._last: dict[tuple[int, int], float] = {}
        self._held: list[_Message] = []
        self._serials = count()
        #: By how much a session is honoured longer than it has to be, at the most.
        self.longest_slack = world.random.choice((0.0, 0.0, 0.0, tick))
        self.between = world.random.choice((0.0002, 0.003, 0.015))
        #: Told of each change that some member is the first to apply.
        self.on_first: Callable[[Change, Tree], None] = lambda change, tree: None
        self._newest = 0
        for member in self.members:
            address = self.address(member)
            wire.listening[address, 2181] = lambda stream, member=member: self._accept(
                member, stream
            )  # type: ignore[misc]
        self._tick()
        self._sweep()

    @staticmethod
    def address(member: Member) -> str:
        return f"10.0.0.{member.number + 1}"

    @property
    def majority(self) -> int:
        return len(self.members) // 2 + 1

    def slack(self) -> float:
        return self.world.random.uniform(0.0, self.longest_slack) if self.longest_slack else 0.0

    @property
    def truth(self) -> Tree:
        """The newest state that any server has applied."""
        return max(self.members, key=lambda member: member.tree.zxid).tree

    def _accept(self, member: Member, stream: Stream) -> Client:
        client = Client(member, stream)
        if member.role in ("leading", "following"):
            member.clients.add(client)
        else:
            self.world.after(0.0, client.close)
        return client

    def on_applied(self, member: Member, change: Change) -> None:
        if change.zxid > self._newest:
            self._newest = change.zxid
            self.on_first(change, member.tree)

    # -- between members -----------------------------------------------------------------------------

    def is_cut(self, one: Member, other: Member) -> bool:
        return frozenset((one.number, other.number)) in self.cut

    def send(
        self, one: Member, to: Member, epoch: int, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self._send(_Message(next(self._serials), one, to, epoch, call, args))

    def _send(self, message: _Message) -> None:
        if self.is_cut(message.one, message.to):
            self._held.append(message)
            return
        key = (message.one.number, message.to.number)
        when = self.world.time + self.between * self.world.random.uniform(0.5, 1.5)
        when = self._last[key] = max(when, self._last.get(key, 0.0))
        self.world.at(when, self._arrive, message)

    def _arrive(self, message: _Message) -> None:
        if self.is_cut(message.one, message.to):
            self._held.append(message)
        else:
            message.to.do(self._take, message.to, message.epoch, message.call, message.args)

    @staticmethod
    def _take(to: Member, epoch: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if to.epoch == epoch and to.role in ("leading", "following"):
            call(*args)

    def heal(self, pair: frozenset[int]) -> None:
        """What waited goes on, in its order."""
        self.cut.discard(pair)
        held, self._held = sorted(self._held), []  # some were under way when it was cut
        for message in held:
            self._send(message)

    # -- who leads -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Each half tick: leaders ask, and who hears nothing looks for another leader."""
        world, limit = self.world, _SYNC_LIMIT * self.tick
        for member in self.members:
            if member.paused:
                continue
            if member.role == "leading":
                heard = sum(world.time - at <= limit for at in member.heard_at.values())
                if heard + 1 < self.majority and world.time - member.heard_at[-1] > limit:
                    world.log(f"{member!r} hears no majority")
                    member.look()
                else:
                    member.beat()
            elif member.role == "following" and world.time - member.heard_at[-1] > limit:
                world.log(f"{member!r} hears no leader")
                member.look()
        self._elect()
        world.after(self.tick / 2, self._tick)

    def _elect(self) -> None:
        looking = [m for m in self.members if m.role == "looking" and not m.paused]
        leader = self.leader
        if leader is not None and leader.role == "leading":
            for member in looking:
                if not leader.paused and not self.is_cut(member, leader):
                    self._join(member, leader)
            looking = [m for m in looking if m.role == "looking"]
        for best in sorted(
            looking, key=lambda m: (m.log[-1].change.zxid if m.log else 0, m.number), reverse=True
        ):
            near = [m for m in looking if m is best or not self.is_cut(m, best)]
            newest = max(m.log[-1].change.zxid if m.log else 0 for m in near)
            mine = best.log[-1].change.zxid if best.log else 0
            if len(near) >= self.majority and mine >= newest:
                self._lead(best, near)
                return

    def _lead(self, best: Member, near: list[Member]) -> None:
        self.epoch += 1
        self.leader = best
        best.epoch, best.role = self.epoch, "leading"
        self.world.log(f"{best!r} leads epoch {self.epoch}")
        best.heard_at = {-1: self.world.time}
        best.committed = len(best.log)
        best.apply_until(best.committed)
        best.draft = best.tree.copy()
        best.expires, best.owners = {}, {}
        for session in best.tree.sessions:
            best._extend(session)
        for member in near:
            if member is not best:
                self._join(member, best)

    def _join(self, member: Member, leader: Member) -> None:
        """Take over what the leader has accepted, and follow it."""
        known = leader.log
        same = member.log == known[: len(member.log)]
        if not same and member.applied:
            assert member.log[: member.applied] == known[: member.applied]
        member.log = list(known)
        member.epoch, member.role = leader.epoch, "following"
        member.heard_at = {-1: self.world.time}
        leader.heard_at[member.number] = self.world.time
        for proposed in known[leader.committed :]:
            self.world.after(member.disk, member.do, member._accepted, proposed, member.epoch)
        member.apply_until(leader.committed)
        # Changes that are on their way to it were in the log.
        key = (leader.number, member.number)
        self._held = [m for m in self._held if (m.one, m.to) != (leader, member)]
        self._last[key] = max(self._last.get(key, 0.0), self.world.time)
        self.world.log(f"{member!r} follows {leader!r}")

    def _sweep(self) -> None:
        leader = self.leader
        if leader is not None and leader.role == "leading" and not leader.paused:
            leader.delete_containers()
        self.world.after(_CONTAINERS_EVERY * self.tick, self._sweep)
