"""What ZooKeeper's servers keep: nodes, and transactions on them. Pure: no clock, no network.

A leader turns a request into a ``Change`` (or refuses it) by looking at its newest state; all servers then
make the same change. Left out: quotas, ACLs beyond "may this client do anything here", TTL nodes, and
reconfiguration.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from aiodlock.backends.zookeeper import jute

_STAT = struct.Struct(">qqqqiiiqiiq")
BAD_VERSION, NO_CHILDREN_FOR_EPHEMERALS, RUNTIME_INCONSISTENCY = -103, -108, -2


class Refused(Exception):
    """A request cannot be done; ``code`` is what the client hears."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Operation(NamedTuple):
    """One call of a client, alone or in a transaction."""

    opcode: int
    path: str = ""
    data: bytes = b""
    flags: int = 0
    version: int = -1


@dataclass
class Node:
    """One node."""

    data: bytes
    created: int
    owner: int = 0
    container: bool = False
    version: int = 0
    modified: int = 0
    #: Of all children that there ever were: the next sequential one gets this number.
    creates: int = 0
    children_modified: int = 0
    children: set[str] = field(default_factory=set)

    def stat(self) -> bytes:
        return _STAT.pack(
            self.created,
            self.modified,
            0,
            0,
            self.version,
            2 * self.creates - len(self.children),  # creations and deletions
            0,
            self.owner,
            len(self.data),
            len(self.children),
            self.children_modified,
        )


class Change(NamedTuple):
    """What one transaction does: the same on every server."""

    zxid: int
    #: ("create", path, data, flags, session), ("delete", path), ("set", path, data), ("check",)
    steps: tuple[tuple[object, ...], ...] = ()
    #: A session begins (its timeout in ms), or ends (0).
    session: int = 0
    timeout: int = 0
    #: The code with which it was refused; nothing changes then but the zxid. Of a transaction: all codes.
    codes: tuple[int, ...] = ()


class Tree:
    """All nodes, as one server has them.

    Mutable state: ``nodes``, ``sessions`` (timeouts in ms, by id), ``zxid`` (of the last change),
    ``ephemerals`` (paths by session).
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {"": Node(b"", 0)}
        self.sessions: dict[int, int] = {}
        self.zxid = 0
        self.ephemerals: dict[int, set[str]] = {}
        #: Told of each node that comes, is written, or goes: ``kind`` as in watch events, and the path.
        self.told: Callable[[int, str], None] = lambda kind, path: None

    def copy(self) -> Tree:
        """Return one like it that nobody is told of."""
        other = Tree()
        other.nodes = {
            path: Node(
                n.data,
                n.created,
                n.owner,
                n.container,
                n.version,
                n.modified,
                n.creates,
                n.children_modified,
                set(n.children),
            )
            for path, n in self.nodes.items()
        }
        other.sessions = dict(self.sessions)
        other.zxid = self.zxid
        other.ephemerals = {session: set(paths) for session, paths in self.ephemerals.items()}
        return other

    # -- reading -------------------------------------------------------------------------------------

    def get(self, path: str) -> Node:
        node = self.nodes.get(_key(path))
        if node is None:
            raise Refused(jute.NO_NODE)
        return node

    def below(self, path: str) -> list[str]:
        """Return all nodes below a path."""
        return [other for other in self.nodes if other.startswith(f"{path}/")]

    # -- deciding ------------------------------------------------------------------------------------

    def decide(self, zxid: int, session: int, operations: Iterable[Operation]) -> Change:
        """Say what these operations, all or none, change. Changes this tree already: it is the draft."""
        steps: list[tuple[object, ...]] = []
        undo: list[Callable[[], None]] = []
        wanted = list(operations)
        for at, operation in enumerate(wanted):
            try:
                step = self._decide(session, operation)
                undo.append(self._undoing(step))
                self._do(zxid, step)
                steps.append(step)
            except Refused as refused:
                for one in reversed(undo):
                    one()
                after = [RUNTIME_INCONSISTENCY] * (len(wanted) - at - 1)
                return Change(zxid, codes=(*[0] * at, refused.code, *after))
        self.zxid = zxid
        return Change(zxid, tuple(steps))

    def _decide(self, session: int, operation: Operation) -> tuple[object, ...]:
        opcode, path = operation.opcode, operation.path
        if opcode in (jute.CREATE, jute.CREATE2, jute.CREATE_CONTAINER):
            return self._decide_create(session, operation)
        node = self.get(path)
        if operation.version not in (-1, node.version):
            raise Refused(BAD_VERSION)
        if opcode == jute.DELETE:
            if node.children:
                raise Refused(jute.NOT_EMPTY)
            return "delete", path
        if opcode == jute.SET_DATA:
            return "set", path, operation.data
        assert opcode == jute.CHECK, opcode
        return ("check",)

    def _decide_create(self, session: int, operation: Operation) -> tuple[object, ...]:
        path, flags = operation.path, operation.flags
        parent = self.get(_parent(path))
        if flags & jute.SEQUENTIAL and flags != jute.CONTAINER:
            path += f"{parent.creates:010d}"
        if _key(path) in self.nodes:
            raise Refused(jute.NODE_EXISTS)
        if parent.owner:
            raise Refused(NO_CHILDREN_FOR_EPHEMERALS)
        ephemeral = flags in (jute.EPHEMERAL, jute.EPHEMERAL | jute.SEQUENTIAL)
        if ephemeral and session not in self.sessions:
            raise Refused(jute.SESSION_EXPIRED)
        owner = session if ephemeral else 0
        return "create", path, operation.data, owner, flags == jute.CONTAINER

    def _undoing(self, step: tuple[object, ...]) -> Callable[[], None]:
        """Return what takes a step back, before it is done."""
        if step[0] == "check":
            return lambda: None
        path = str(step[1])
        before = {p: self._kept(p) for p in (_key(path), _parent(path))}
        node = self.nodes.get(_key(path))
        owner = node.owner if node is not None else step[3] if step[0] == "create" else 0
        assert isinstance(owner, int)
        owned = set(self.ephemerals.get(owner, ()))

        def undo() -> None:
            for one, node in before.items():
                if node is None:
                    self.nodes.pop(one, None)
                else:
                    self.nodes[one] = node
            self.ephemerals[owner] = owned

        return undo

    def _kept(self, path: str) -> Node | None:
        node = self.nodes.get(path)
        if node is None:
            return None
        return Node(
            node.data,
            node.created,
            node.owner,
            node.container,
            node.version,
            node.modified,
            node.creates,
            node.children_modified,
            set(node.children),
        )

    # -- changing ------------------------------------------------------------------------------------

    def apply(self, change: Change) -> list[bytes]:
        """Make a change that a leader has decided; return the Stat after each step, or nothing."""
        self.zxid = change.zxid
        if change.session and change.timeout:
            self.sessions[change.session] = change.timeout
        elif change.session:
            self.sessions.pop(change.session, None)
            for path in sorted(self.ephemerals.pop(change.session, ())):
                if _key(path) in self.nodes:
                    self._do(change.zxid, ("delete", path))
        stats = []
        for step in change.steps:
            self._do(change.zxid, step)
            node = self.nodes.get(_key(str(step[1]))) if step[0] in ("create", "set") else None
            stats.append(b"" if node is None else node.stat())
        return stats

    def _do(self, zxid: int, step: tuple[object, ...]) -> None:
        kind = step[0]
        if kind == "check":
            return
        path = str(step[1])
        if kind == "set":
            node = self.nodes[_key(path)]
            assert isinstance(step[2], bytes)
            node.data, node.modified = step[2], zxid
            node.version += 1
            self.told(jute.CHANGED, path)
            return
        parent = self.nodes[_parent(path)]
        parent.children_modified = zxid
        name = path.rpartition("/")[2]
        if kind == "create":
            _, _, data, owner, container = step
            assert isinstance(data, bytes)
            assert isinstance(owner, int)
            self.nodes[path] = Node(
                data, zxid, owner, bool(container), 0, zxid, children_modified=zxid
            )
            parent.children.add(name)
            parent.creates += 1
            if owner:
                self.ephemerals.setdefault(owner, set()).add(path)
            self.told(jute.CREATED, path)
        else:
            node = self.nodes.pop(path)
            parent.children.discard(name)
            if node.owner:
                self.ephemerals.get(node.owner, set()).discard(path)
            self.told(jute.DELETED, path)
        self.told(jute.CHILDREN_CHANGED, _parent(path) or "/")


def _key(path: str) -> str:
    return "" if path == "/" else path


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


# -- reading requests --------------------------------------------------------------------------------


def read_operation(opcode: int, reader: jute.Reader) -> Operation:
    """Read the body of a call that may change something."""
    path = reader.text()
    if opcode in (jute.CREATE, jute.CREATE2, jute.CREATE_CONTAINER):
        data = reader.buffer()
        for _ in range(reader.int()):
            reader.int(), reader.text(), reader.text()
        return Operation(opcode, path, data, reader.int())
    if opcode == jute.SET_DATA:
        data = reader.buffer()
        return Operation(opcode, path, data, version=reader.int())
    return Operation(opcode, path, version=reader.int())


_HEAD = struct.Struct(">i?i")


def read_operations(reader: jute.Reader) -> list[Operation]:
    """Read the body of a transaction."""
    operations: list[Operation] = []
    while True:
        opcode, done, _ = reader.unpack(_HEAD)
        if done:
            return operations
        operations.append(read_operation(opcode, reader))


# -- writing answers ---------------------------------------------------------------------------------


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">i", len(encoded)) + encoded


def texts(values: list[str]) -> bytes:
    return struct.pack(">i", len(values)) + b"".join(map(text, values))


def result_of(operation: Operation, step: tuple[object, ...], stat: bytes) -> bytes:
    """Return the answer to one operation that was done."""
    if operation.opcode == jute.CREATE:
        return text(str(step[1]))
    if operation.opcode in (jute.CREATE2, jute.CREATE_CONTAINER):
        return text(str(step[1])) + stat
    return stat if operation.opcode == jute.SET_DATA else b""


def results_of(operations: list[Operation], change: Change, stats: list[bytes]) -> bytes:
    """Return the answer to a transaction."""
    parts = []
    if change.codes:
        parts = [_HEAD.pack(-1, False, code) + struct.pack(">i", code) for code in change.codes]
    else:
        for operation, step, stat in zip(operations, change.steps, stats, strict=True):
            opcode, answer = operation.opcode, result_of(operation, step, stat)
            if opcode == jute.CREATE2:
                # Servers answer a create2 in a transaction as a create (ZOOKEEPER-4026).
                opcode, answer = jute.CREATE, text(str(step[1]))
            elif opcode == jute.CREATE_CONTAINER:
                opcode = jute.CREATE2
            parts.append(_HEAD.pack(opcode, False, 0) + answer)
    return b"".join(parts) + _HEAD.pack(-1, True, -1)
