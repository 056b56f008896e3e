"""One seed on ZooKeeper: an ensemble of one or three servers, their faults, and what must be left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import quote

from aiodlock._request import Request
from aiodlock.backends.zookeeper import identity
from aiodlock.backends.zookeeper.node import BROKEN, _short
from aiodlock.backends.zookeeper.queue import _owner_of, read_queue

from ..scenario import Simulation
from .cluster_faults import ClusterFaults
from .promises import Stood
from .scene import Scene
from .zookeeper_ensemble import Ensemble, Member
from .zookeeper_tree import Change

#: The servers' tickTime, in seconds: sessions are 2 to 20 of these.
TICK = 0.1


class Records:
    """The queues in the newest tree that any server has."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble

    def queue(self, kind: str, name: str) -> list[Stood]:
        path = f"/aiodlock/{kind}s/{quote(name, safe='')}"
        node = self._ensemble.truth.nodes.get(path)
        entries = read_queue(sorted(node.children)) if node is not None else []
        return [Stood(e.request, e.mode, _owner_of(e), e.number) for e in entries]

    def is_closed(self, kind: str, name: str) -> bool:
        return False

    def id_of(self, request: Request) -> str:
        return _short(request.id)


class ZooKeeperScene(Scene):
    """One seed."""

    faults_of_servers = (
        "pause_server",
        "restart_server",
        "cut_servers",
        "slow_disk",
        "lose_leader",
    )
    #: A waiter looks after what it waits for once in each ttl: long ones show that it was not told.
    #: A session of three ticks is too short for some of these ensembles: three writes take as long.
    ttls = (0.5, 0.5, 1.0, 2.0, 2.0)
    idle_patience = 1.0

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed, prepare)
        self.patch(identity, "secrets", SimpleNamespace(token_hex=self._token))

    def make_servers(self) -> Records:
        members = self.random.choice((1, 3, 3, 3))
        self.ensemble = Ensemble(self.world, self.wire, members, TICK)
        self.ensemble.on_first = self._on_change
        self._alive: set[str] = set()
        return Records(self.ensemble)

    @property
    def url(self) -> str:
        hosts = ",".join(
            f"{self.ensemble.address(member)}:2181" for member in self.ensemble.members
        )
        return f"zookeeper://{hosts}/?tick_time={TICK}"

    def _on_change(self, change: Change, member: Member) -> None:
        """A change is applied for the first time: which requests has it ended?"""
        alive = {
            path.rpartition("/")[2].split(":")[1]
            for paths in member.tree.ephemerals.values()
            for path in paths
            if ":" in path
        }
        for step in change.steps:
            if step[0] == "set" and step[2] == BROKEN:
                self.checkers.excused.add(str(step[1]).rpartition("/")[2])
        for gone in self._alive - alive:
            self.checkers.removed(gone)
        self._alive = alive

    def calm_servers(self) -> None:
        self.ensemble.calm()

    def check_servers(self) -> None:
        left = [
            path
            for paths in self.ensemble.truth.ephemerals.values()
            for path in paths
            if "/locks/" in path or "/semaphores/" in path
        ]
        if left:
            self.checkers.wrong("ghost", f"nodes are left: {left}")


class ZooKeeperFaults(ClusterFaults):
    """What goes wrong with the servers: what goes wrong with any that agree."""


ZooKeeperScene.fault_class = ZooKeeperFaults
