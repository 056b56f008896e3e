"""A Redis Cluster of real processes: primaries that share the slots, each with replicas."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from aiodlock._embedded import EmbeddedServer, EmbeddedServerError

from .servers import call

SLOTS = 16384
#: How long a node has to be silent before the others call it dead, in ms. On a machine that stalls, nodes
#: are silent for a second though nothing is the matter with them.
NODE_TIMEOUT = 3000
#: A node's bus has the port 10,000 above its own. Both below those that the kernel gives to clients.
_PORTS = (11_000, 22_000)


class Cluster:
    """`primaries` nodes with `replicas` each. The first of each group is the primary to begin with."""

    def __init__(self, binary: Path, *, primaries: int = 3, replicas: int = 1) -> None:
        self._binary = binary
        self._primaries = primaries
        self._replicas = replicas
        self._stack = ExitStack()
        self.nodes: list[EmbeddedServer] = []

    def __enter__(self) -> Self:
        try:
            count = self._primaries * (1 + self._replicas)
            self.nodes = [self._started() for _ in range(count)]
            self._form()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.resume()
        self._stack.close()

    @property
    def url(self) -> str:
        """A URL that names all nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def ports(self) -> list[int]:
        """The ports of all nodes."""
        return [port(node) for node in self.nodes]

    def configure(self, option: str, value: str) -> None:
        """Set an option on all nodes."""
        for node in self.nodes:
            self.call(node, "CONFIG", "SET", option, value)

    @property
    def primaries(self) -> list[EmbeddedServer]:
        """The nodes that own slots now, as most of them see it."""
        return [node for node in self.nodes if node.running and self._is_primary(node)]

    def primary_of(self, key: str) -> EmbeddedServer:
        """Return the node that owns the slot of a key."""
        seen = next(node for node in self.nodes if node.running)
        return self.primary_of_slot(int(self.call(seen, "CLUSTER", "KEYSLOT", key)))

    def primary_of_slot(self, slot: int) -> EmbeddedServer:
        """Return the node that owns a slot."""
        seen = next(node for node in self.nodes if node.running)
        for first, last, primary, *_ in self.call(seen, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if port(node) == primary[1])
        raise AssertionError(f"nobody owns slot {slot}")

    def call(self, node: EmbeddedServer, *command: str | int) -> Any:
        """Send one command to one node."""
        return call(port(node), *command)

    def wait(self, condition: Callable[[], bool], what: str, within: float = 60.0) -> None:
        """Look again and again until it is so."""
        give_up = time.monotonic() + within
        while not condition():
            assert time.monotonic() < give_up, f"{what} never came"
            time.sleep(0.02)

    def wait_until_fine(self) -> None:
        """Wait until every running node finds the cluster complete."""
        self.wait(self._is_fine, "a complete cluster")

    def add_primary(self) -> EmbeddedServer:
        """Start one more node, without slots; return it when all know it."""
        new = self._started()
        self.nodes.append(new)
        self.call(new, "CLUSTER", "SET-CONFIG-EPOCH", len(self.nodes))
        self.call(new, "CLUSTER", "MEET", "127.0.0.1", port(self.nodes[0]))
        self.wait(lambda: all(self._knows_all(node) for node in self.nodes), "everybody's meeting")
        self.wait_until_fine()
        return new

    def move_slot(self, slot: int, source: EmbeddedServer, target: EmbeddedServer) -> MovingSlot:
        """Begin to move a slot; the keys go one by one."""
        return MovingSlot(self, slot, source, target)

    def _started(self) -> EmbeddedServer:
        for _ in range(5):
            try:
                return self._stack.enter_context(self._node())
            except EmbeddedServerError as failed:
                # Another one was quicker; for the port of the bus too.
                if "in use" not in str(failed):
                    raise
        raise AssertionError("no free ports for a node of a cluster")

    def _node(self) -> EmbeddedServer:
        return EmbeddedServer(
            self._binary,
            tcp=True,
            port=_free_cluster_port(),
            config={
                "cluster-enabled": "yes",
                "cluster-config-file": "nodes.conf",
                "cluster-node-timeout": NODE_TIMEOUT,
                "cluster-replica-validity-factor": 0,
                "repl-diskless-sync-delay": 0,
            },
        )

    def _form(self) -> None:
        ids = [self.call(node, "CLUSTER", "MYID") for node in self.nodes]
        for index, node in enumerate(self.nodes):
            self.call(node, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index:
                self.call(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", port(node))
        for index in range(self._primaries):
            first = SLOTS * index // self._primaries
            last = SLOTS * (index + 1) // self._primaries
            self.call(self.nodes[index], "CLUSTER", "ADDSLOTS", *range(first, last))
        self.wait(lambda: all(self._knows_all(node) for node in self.nodes), "everybody's meeting")
        for index, node in enumerate(self.nodes[self._primaries :]):
            self.call(node, "CLUSTER", "REPLICATE", ids[index % self._primaries])
        self.wait_until_fine()
        self.wait(lambda: all(self._in_sync(n) for n in self.nodes), "the replicas' copies")

    def _knows_all(self, node: EmbeddedServer) -> bool:
        lines = self.call(node, "CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.nodes) and not any("handshake" in line for line in lines)

    def _is_primary(self, node: EmbeddedServer) -> bool:
        return bool(self.call(node, "ROLE")[0] == "master")

    def _in_sync(self, node: EmbeddedServer) -> bool:
        role = self.call(node, "ROLE")
        return bool(role[0] == "master" or role[3] == "connected")

    def _is_fine(self) -> bool:
        running = [node for node in self.nodes if node.running]
        return all("cluster_state:ok" in self.call(node, "CLUSTER", "INFO") for node in running)


class MovingSlot:
    """A slot on its way from one primary to another."""

    def __init__(
        self, cluster: Cluster, slot: int, source: EmbeddedServer, target: EmbeddedServer
    ) -> None:
        self._cluster, self._slot = cluster, slot
        self._source, self._target = source, target
        self._ids = [cluster.call(node, "CLUSTER", "MYID") for node in (source, target)]
        cluster.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[0])
        cluster.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[1])

    def move_keys(self, count: int = 1000) -> int:
        """Move some keys; return how many."""
        call = self._cluster.call
        keys = call(self._source, "CLUSTER", "GETKEYSINSLOT", self._slot, count)
        for key in keys:
            call(self._source, "MIGRATE", "127.0.0.1", port(self._target), key, 0, 5000)
        return len(keys)

    def finish(self) -> None:
        """Move what is left, and tell everybody."""
        while self.move_keys():
            pass
        for node in (self._target, self._source, *self._cluster.primaries):
            self._cluster.call(node, "CLUSTER", "SETSLOT", self._slot, "NODE", self._ids[1])


def port(node: EmbeddedServer) -> int:
    """Return the port that a node listens on."""
    return int(node.url.rpartition(":")[2].partition("/")[0])


def _free_cluster_port() -> int:
    while True:
        wanted = random.randrange(*_PORTS)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", wanted))
                second.bind(("127.0.0.1", wanted + 10_000))
            except OSError:
                continue
            return wanted
