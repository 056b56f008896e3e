"""Which cluster a node belongs to: by the ids of the nodes that it names.

Each connection is asked before it is used. A node that no known one names is not believed: neither what it
keeps, nor whom it names. So an address that leads to another cluster by now leads nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from ...._errors import BackendError
from ..wire import Wire


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """What one node says of itself and of its cluster.

    :param node: its own id.
    :param nodes: the ids of all nodes that it knows, its own too.
    :param addresses: where those are, as it says.
    """

    node: str
    nodes: frozenset[str]
    addresses: frozenset[tuple[str, int]] = field(default=frozenset(), compare=False)

    def conflict(self, known: Self) -> str:
        """See ``Identity``. A node that was reset and given to another cluster keeps its id."""
        if self.node not in known.nodes:
            return f"no known node of the cluster names its id, {self.node[:8]}"
        if len(known.nodes) > 1 and self.nodes & known.nodes == {self.node}:
            return "it names none of the known nodes of the cluster"
        return ""

    def after(self, known: Self) -> Self:
        """See ``Identity``. Nodes come and go: what is known is what was named last."""
        return self

    def is_of(self, other: ClusterIdentity) -> bool:
        """Tell whether both name the same cluster, as far as that can be seen."""
        return self.node in other.nodes or other.node in self.nodes


@dataclass(frozen=True, slots=True)
class Told:
    """What a node tells when it is asked for the owners of slots."""

    identity: ClusterIdentity
    slots: Any


async def identity_on(wire: Wire) -> ClusterIdentity:
    """Ask which node answers, and which others it knows.

    :raises ReplyError: the node refuses; ``BackendError`` for an answer of the wrong shape.
    """
    return _read(await wire.send("CLUSTER", "NODES"))


async def told_on(wire: Wire) -> Told:
    """Ask for the owners of slots; raises as ``identity_on``."""
    owning, naming = wire.send("CLUSTER", "SLOTS"), wire.send("CLUSTER", "NODES")
    slots, nodes = await asyncio.gather(owning, naming)
    return Told(_read(nodes), slots)


def _read(reply: Any) -> ClusterIdentity:
    node, nodes, addresses = "", set[str](), set[tuple[str, int]]()
    try:
        for line in bytes(reply).decode().splitlines():
            # id, ip:port@bus[,hostname], flags, …
            id, where, flags, *_ = line.split(" ")
            if "handshake" in flags:
                continue  # its id is a made-up one until they have met
            nodes.add(id)
            if "myself" in flags:
                node = id
            addresses.update(_addresses(where))
    except (ValueError, TypeError) as wrong:
        raise BackendError(f"CLUSTER NODES has the wrong shape: {reply!r:.200}") from wrong
    if not node:
        raise BackendError(f"CLUSTER NODES has the wrong shape: {reply!r:.200}")
    return ClusterIdentity(node, frozenset(nodes), frozenset(addresses))


def _addresses(where: str) -> Iterable[tuple[str, int]]:
    address, *names = where.split(",")
    host, _, port = address.partition("@")[0].rpartition(":")
    yield host, int(port)
    if names and names[0]:
        yield names[0], int(port)
