"""What goes wrong with servers that agree: they stop, die, are cut off, and their disks are slow."""

from __future__ import annotations

from ..world import Process
from .consensus import Member
from .scene import StoreFaults


class ClusterFaults(StoreFaults):
    """The faults, by name."""

    def _some_server(self) -> Member:
        member: Member = self.random.choice(self.simulation.ensemble.members)
        return member

    def _pause_server(self) -> None:
        self._pause_member(self._some_server())

    def _lose_leader(self) -> None:
        leader = self.simulation.ensemble.leader
        if leader is not None:
            self._pause_member(leader)

    def _pause_member(self, member: Member, length: float | None = None) -> None:
        if member.paused or member.role == "down":
            return
        length = self._length() if length is None else length
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
            self.world.after(away, member.start)

    def _cut_servers(self) -> None:
        ensemble = self.simulation.ensemble
        member, length = (
            self._some_server(),
            self._length() + 6 * self.simulation.ensemble.tick * self.random.random(),
        )
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
        process, length = (
            self._someone(),
            1.2 * max(self.simulation.style.ttls) + self.simulation.ensemble.tick,
        )
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
