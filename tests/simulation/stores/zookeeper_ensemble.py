"""ZooKeeper's servers, as few rules as make them what clients meet.

Reads are answered by the server that a client is connected to, from what it has applied. The leader alone
ends sessions: it asks its followers each half tick which ones they have heard of (``Lifetime`` rests on
that). How servers agree is in ``consensus``. Left out: SASL, and members that answer read-only.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiodlock.backends.zookeeper import jute

from ..world import World
from . import consensus
from . import zookeeper_tree as trees
from .consensus import Proposed
from .wire import Stream, Wire
from .zookeeper_tree import Change, Operation, Tree

#: In ticks.
_CONTAINERS_EVERY = 10
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
        if not self.open or not self.member.serves:
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
            self._to_leader("revalidate", session)
        else:
            self._to_leader("begin", self.timeout)

    def _to_leader(self, what: str, about: Any) -> None:
        member = self.member
        if not member.to_leader("on_request", member.number, what, self, about):
            self.close()

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
            self._to_leader("sync", asked)
        elif asked.awaited:
            self._to_leader("write", asked)

    def answered(self, asked: _Asked, change: Change, stats: list[bytes]) -> None:
        """What it has asked for is carried out here."""
        code, body = 0, b""
        if asked.opcode == jute.CLOSE:
            asked.closes = True
        elif asked.opcode == jute.MULTI:
            body = trees.results_of(asked.operations, change, stats)
        elif change.codes:
            code = change.codes[0]
        else:
            body = trees.result_of(asked.operations[0], change.steps[0], stats[0])
        asked.answer = self.reply(asked, code, body, change.zxid)
        self.go_on()

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

    def watches_for(self, path: str) -> bool:
        return path in self.watches["data"] or path in self.watches["children"]

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


def _serial_of(client: Client) -> int:
    return client.stream.serial


class Member(consensus.Member):
    """One server.

    Mutable state besides: ``tree`` (what it has applied), ``clients``, ``_touched`` (sessions heard of
    since the leader asked); of a leader ``draft`` (the tree with all of the log), ``expires`` (true times
    by session), ``owners`` (by session: which member may write for it).
    """

    letter = "z"
    ensemble: Ensemble

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        super().__init__(ensemble, number)
        self.tree = Tree()
        self.tree.told = self._told
        self.clients: set[Client] = set()
        self._touched: set[int] = set()
        self.draft = Tree()
        self.expires: dict[int, float] = {}
        self.owners: dict[int, int] = {}

    def apply(self, proposed: Proposed) -> list[bytes]:
        return self.tree.apply(proposed.change)

    def begin_to_lead(self) -> None:
        self.draft = self.tree.copy()
        self.expires, self.owners = {}, {}
        for session in self.tree.sessions:
            self._extend(session)

    def report(self) -> set[int]:
        touched, self._touched = self._touched, set()
        return touched

    def take_report(self, report: set[int]) -> None:
        for session in report:
            self._extend(session)

    def touch(self, session: int) -> None:
        """A client has been heard of."""
        if self.role == "leading":
            self._extend(session)
        else:
            self._touched.add(session)

    def drop_clients(self) -> None:
        for client in self.in_order():
            client.open = False
            client.stream.break_off()
        self.clients.clear()

    def _told(self, kind: int, path: str) -> None:
        those = [client for client in self.clients if client.watches_for(path)]
        for client in sorted(those, key=_serial_of) if len(those) > 1 else those:
            client.fire(kind, path)

    def in_order(self) -> list[Client]:
        """Return its clients, oldest first: a set's order is another one in each run."""
        return sorted(self.clients, key=_serial_of)

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
            self._change(Change(self.next_number(), (), session, 0), self.number, None)

    def on_request(self, number: int, what: str, client: Client, about: Any) -> None:
        self.heard_at[number] = self.world.time
        if what == "begin":
            self.ensemble.sessions += 1
            session = self.ensemble.sessions
            self.owners[session] = number
            change = Change(self.next_number(), (), session, about)
            self._change(change, number, lambda _: client.welcome(session, about))
        elif what == "revalidate":
            timeout = self.draft.sessions.get(about, 0)
            if timeout:
                self.owners[about] = number
                self._extend(about)
            self.tell(number, "on_valid", client, about, timeout)
        elif what == "sync":
            self.tell(number, "on_synced", client, about)
        else:
            change = self._decide(number, client, about)
            self._change(change, number, lambda stats: client.answered(about, change, stats))

    def _decide(self, number: int, client: Client, asked: _Asked) -> Change:
        session, zxid = client.session, self.next_number()
        if asked.opcode == jute.CLOSE:
            return Change(zxid, (), session, 0)
        refusal = 0
        if session not in self.draft.sessions:
            refusal = jute.SESSION_EXPIRED
        elif self.owners.get(session) != number:
            refusal = jute.SESSION_MOVED
        if refusal:
            asked.opcode = jute.SET_DATA  # in a transaction too the whole request is refused
            return Change(zxid, codes=(refusal,))
        # A write that a follower passes on tells the leader nothing of the session: the pong does.
        return self.draft.decide(zxid, session, asked.operations)

    def _change(self, change: Change, origin: int, answer: Any) -> None:
        if change.session:
            self.draft.apply(change)
            if change.timeout:
                self._extend(change.session)
            else:
                self.expires.pop(change.session, None)
        self.propose(change, origin, answer)

    def delete_containers(self) -> None:
        """Delete containers that have become empty."""
        for path, node in list(self.draft.nodes.items()):
            if node.container and node.creates and not node.children:
                gone = Operation(jute.DELETE, path)
                self._change(self.draft.decide(self.next_number(), 0, [gone]), self.number, None)


class Ensemble(consensus.Ensemble):
    """All servers. Mutable state besides: ``sessions`` (the last id)."""

    member_class = Member

    def __init__(self, world: World, wire: Wire, members: int, tick: float) -> None:
        self.sessions = 0
        #: By how much a session is honoured longer than it has to be, at the most.
        self.longest_slack = world.random.choice((0.0, 0.0, 0.0, tick))
        super().__init__(world, wire, members, tick)
        for member in self.members:
            wire.listening[self.address(member), 2181] = _Accept(self, member)
        self._sweep()

    def slack(self) -> float:
        return self.world.random.uniform(0.0, self.longest_slack) if self.longest_slack else 0.0

    @property
    def truth(self) -> Tree:
        """The newest state that any server has applied."""
        tree: Tree = self.newest.tree
        return tree

    def _sweep(self) -> None:
        leader = self.leader
        if leader is not None and leader.role == "leading" and not leader.paused:
            leader.delete_containers()
        self.world.after(_CONTAINERS_EVERY * self.tick, self._sweep)


class _Accept:
    """Takes connections for one member."""

    def __init__(self, ensemble: Ensemble, member: Member) -> None:
        self._ensemble = ensemble
        self._member = member

    def __call__(self, stream: Stream) -> Client:
        client = Client(self._member, stream)
        if self._member.serves:
            self._member.clients.add(client)
        else:
            self._ensemble.world.after(0.0, client.close)
        return client
