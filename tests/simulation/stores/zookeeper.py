"""One seed on ZooKeeper: an ensemble of one or three servers, their faults, and what must be left."""

from __future__ import annotations

from urllib.parse import quote

from aiodlock._request import Request
from aiodlock.backends.zookeeper.node import BROKEN, _short
from aiodlock.backends.zookeeper.queue import _owner_of, read_queue

from ..world import Process
from .promises import Stood
from .scene import Scene, StoreFaults
from .zookeeper_ensemble import Ensemble, Member
from .zookeeper_tree import Change, Tree

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
    idle_patience = 1.0

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

    def _on_change(self, change: Change, tree: Tree) -> None:
        """A change is applied for the first time: which requests has it ended?"""
        alive = {
            path.rpartition("/")[2].split(":")[1]
            for paths in tree.ephemerals.values()
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
        ensemble = self.ensemble
        for pair in list(ensemble.cut):
            ensemble.heal(pair)
        for member in ensemble.members:
            member.disk = min(member.disk, 0.002)
            if member.paused:
                member.resume()
            if member.role == "down":
                member.role = "looking"

    def check_servers(self) -> None:
        left = [
            path
            for paths in self.ensemble.truth.ephemerals.values()
            for path in paths
            if "/locks/" in path or "/semaphores/" in path
        ]
        if left:
            self.checkers.wrong("ghost", f"nodes are left: {left}")


class ZooKeeperFaults(StoreFaults):
    """What goes wrong with the servers."""

    def _some_server(self) -> Member:
        member: Member = self.random.choice(self.simulation.ensemble.members)
        return member

    def _pause_server(self) -> None:
        self._pause_member(self._some_server())

    def _lose_leader(self) -> None:
        leader = self.simulation.ensemble.leader
        if leader is not None:
            self._pause_member(leader)

    def _pause_member(self, member: Member) -> None:
        if member.paused or member.role == "down":
            return
        length = self._length()
        self._log(f"{member!r} is stopped for {length:.3f} s")
        member.paused = True
        self.world.after(length, self._resume, member)

    def _resume(self, member: Member) -> None:
        if member.paused:
            self.world.log(f"{member!r} goes on")
            member.resume()

    def _restart_server(self) -> None:
        member, away = self._some_server(), self._length()
        if member.role != "down":
            self._log(f"{member!r} is killed, and back after {away:.3f} s")
            member.down()
            self.world.after(away, self._start, member)

    @staticmethod
    def _start(member: Member) -> None:
        if member.role == "down":
            member.role = "looking"

    def _cut_servers(self) -> None:
        ensemble = self.simulation.ensemble
        member, length = self._some_server(), self._length() + 6 * TICK * self.random.random()
        pairs = [
            frozenset((member.number, other.number))
            for other in ensemble.members
            if other is not member
        ]
        if pairs and self.random.random() < 0.3:
            pairs = [self.random.choice(pairs)]
        self._log(f"{member!r} is cut off from {len(pairs)} others for {length:.3f} s")
        for pair in pairs:
            ensemble.cut.add(pair)
            self.world.after(length, ensemble.heal, pair)

    def _strand(self) -> None:
        """A server is cut off from the others, and a client that is connected to it, too."""
        process, length = self._someone(), 1.2 * max(self.simulation.style.ttls) + TICK
        followers = {
            self.simulation.ensemble.address(member)
            for member in self.simulation.ensemble.members
            if member.role == "following"
        }
        streams = self.simulation.wire.streams_of(process)
        addresses = [stream.address for stream in streams if stream.address in followers]
        if not addresses:
            return
        address = self.random.choice(addresses)
        self._log(f"{process} reaches {address} alone, which reaches nobody, for {length:.3f} s")
        for member in self.simulation.ensemble.members:
            if self.simulation.ensemble.address(member) == address:
                self._cut_off(member, length)
            else:
                path = self.simulation.wire.path(process, self.simulation.ensemble.address(member))
                path.out_blocked = path.in_blocked = True
        self.world.after(length, self._unstrand, process)

    def _unstrand(self, process: Process) -> None:
        for path in self.simulation.wire.paths_of(process):
            path.out_blocked = path.in_blocked = False
        self.simulation.wire.released()

    def _cut_off(self, member: Member, length: float) -> None:
        ensemble = self.simulation.ensemble
        for other in ensemble.members:
            if other is not member:
                pair = frozenset((member.number, other.number))
                ensemble.cut.add(pair)
                self.world.after(length, ensemble.heal, pair)

    def _slow_disk(self) -> None:
        member, length = self._some_server(), self._length()
        self._log(f"{member!r}'s disk is slow for {length:.3f} s")
        usual, member.disk = min(member.disk, 0.002), self.random.choice((0.02, 0.1, 0.4))
        self.world.after(length, setattr, member, "disk", usual)


ZooKeeperScene.fault_class = ZooKeeperFaults
