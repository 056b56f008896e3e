"""One seed on a Redis Cluster: what is moved, what fails, who takes over, and what must be left.

A failover may lose what was acknowledged. The requests of which something was lost are excused, until their
client is told so or asks the new primary: that has a bound (*lost*), where nothing else is in the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiodlock._request import HELD, Request
from aiodlock.backends.memory.machine import Asked, Name
from aiodlock.backends.redis import source as redis_source

from ..scenario import Simulation
from ..world import Process
from .promises import Promises, Stood
from .redis_cluster import PORT, Cluster, Move, Node, Session, key_slot, move_at_once
from .redis_dialling import make_connection
from .scene import Scene, StoreFaults

_NAMES = ("n0", "n1", "n2", "sn0", "sn1", "sn2")
#: What a holder has lost, its client knows so soon after the promotion: when the old primary was killed,
#: and when it hangs, or lives on where nobody but clients reaches it (seconds).
LOST_WITHIN, LOST_WITHIN_IF_SILENT = 3.0, 12.0
_LASTING = 18.0
_DEPLOYMENTS = (
    "slots", "slots", "moving", "moving", "failing", "failing", "lost", "strangers", "strangers",
)  # fmt: skip
_MOVING = ("move", "move", "move_at_once", "join", "fail_over", "cut_between")
_FAILING = ("kill_node", "pause_node", "cut_node", "fail_over", "move")


class Records:
    """The queues at the nodes that have claimed the names last."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def queue(self, kind: str, name: str) -> list[Stood]:
        found = self._cluster.find(base_of(kind, name))
        if found is None:
            return []
        now = self._cluster.nodes[0].now_ms()
        return [
            Stood(id, _mode(entry.asked), entry.asked.owner, id)
            for entries in (found.holders, found.waiters)
            for id, entry in entries.items()
            if now < entry.closed_until
        ]

    def is_closed(self, kind: str, name: str) -> bool:
        """What keeps a name closed is in its queue."""
        return False

    def id_of(self, request: Request) -> str:
        return request.id


def base_of(kind: str, name: str) -> str:
    return f"aiodlock:2:{kind}:{{{name}}}"


def _mode(asked: Asked) -> str:
    return str(asked.limit) if asked.limit else "x" if asked.mode == "exclusive" else "s"


class ClusterPromises(Promises):
    """Mutable state besides: ``lost`` (requests of which a failover has lost something, and since when),
    ``within`` (how soon their clients have to know; None: other faults are in the way), ``_left``,
    ``_troubled_at`` (when some slot was last not served)."""

    cluster: Cluster

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lost: dict[str, float] = {}
        self.within: float | None = None
        self._left: set[str] = set()
        self._troubled_at = 0.0

    def _believes(self, process: Process, request: Request) -> bool:
        return request.id not in self.lost and super()._believes(process, request)

    def on_call(
        self, node: Node, script: str, base: str, id: str, reply: Any, before: tuple[str, ...]
    ) -> None:
        """A node has run a script on a name."""
        name = node.keys.names[base]
        granted = isinstance(reply, list) and reply[0] in (b"granted", b"held", b"recalled")
        if name is not self.cluster.find(base):
            if granted:  # by one that is deposed, as what it hands over
                self.lost[id] = self.world.time
            self._compare(name, self.cluster.find(base))
            return
        if granted or (isinstance(reply, list) and reply[0] == b"waiting"):
            self.lost.pop(id, None)
        known = (*name.holders, *name.waiters)
        self.excused.update(name.broken)
        for one in before:
            if one not in known:
                self.removed(one)
        back = [one for one in known if one in self._left and one not in before]
        if back:
            self.wrong("ghost", f"{back} come back after they have left")
        if script == "leave":
            self._left.add(id)

    def on_promotion(self, new: Node, old: Node, parts: list[int]) -> None:
        """What does the new primary not have that was acknowledged?"""
        self._left.clear()
        ranges = [self.cluster.parts[part] for part in parts]
        for node in self.cluster.nodes:
            if node is new or (node.master is not None and node is not old):
                continue
            for base, name in node.keys.names.items():
                slot = key_slot(base.encode())
                if any(first <= slot <= last for first, last in ranges):
                    self._compare(name, new.keys.names.get(base))

    def _compare(self, name: Name, kept: Name | None) -> None:
        there = {} if kept is None else {**kept.waiters, **kept.holders}
        for id, entry in {**name.waiters, **name.holders}.items():
            twin = there.get(id)
            if (
                twin is None
                or twin.deadline < entry.deadline
                or bool(twin.token) != bool(entry.token)
            ):
                self.lost.setdefault(id, self.world.time)

    def is_lost(self, ids: list[str]) -> None:
        """Operators have lost these."""
        self.lost.update(dict.fromkeys(ids, self.world.time))

    def _after_turn(self, process: Process) -> None:
        super()._after_turn(process)
        if self.within is None or not self.lost:
            return
        if not all(node.is_ok and node.up and not node.paused for _, node in self.cluster.claims):
            self._troubled_at = self.world.time  # nobody can be asked
        for session in self.sessions.get(process, ()):
            for request in session.requests.values():
                since = self.lost.get(request.id)
                if since is None or request.state is not HELD or not request.options.auto_extend:
                    continue
                since = max(since, process.resumed_at, self._troubled_at)
                late = self.world.time - since - self.within
                if late > 0 and process.boot() < request.ends_at:
                    self.wrong("lost", f"{process} believes in {request.id}, which was lost")

    def _check_record(self, process: Process, request: Request) -> None:
        super()._check_record(process, request)
        found = self.cluster.find(base_of(request.terms.kind, request.name))
        assert found is not None
        entry = found.holders.get(request.id)
        if entry is None:
            self.wrong("honesty", f"{process} believes in {request.id}, which waits")
        early = process.true_time_of(request.ends_at) + _EPOCH - entry.deadline / 1000
        if early > 0:
            self.wrong("honesty", f"{process} believes in {request.id} {early:.6f} s too long")


_EPOCH = 1_700_000_000.0


class ClusterFaults(StoreFaults):
    """What goes wrong with the nodes, by name."""

    simulation: RedisClusterScene

    def _primaries(self) -> list[Node]:
        return [node for node in self.simulation.cluster.nodes if node.up and not node.master]

    def _some_node(self) -> Node:
        return self.random.choice(self.simulation.cluster.nodes)

    def _owner_of_some_name(self) -> Node:
        cluster = self.simulation.cluster
        return cluster.owner_of(base_of("lock", self.random.choice(self.simulation.names)))

    def _outage(self) -> float:
        timeout = self.simulation.cluster.timeout
        return self.random.choice((0.3, 2.5, 5.0)) * timeout * self.random.uniform(0.7, 1.3)

    # -- slots ---------------------------------------------------------------------------------------

    def _moving(self) -> tuple[int, list[Node]]:
        cluster = self.simulation.cluster
        slot = key_slot(self.random.choice(self.simulation.names).encode())
        owner = cluster.claims[cluster.part_of(slot)][1]
        # One at a time: a node that is not told yet what it has given away claims it with its next epoch.
        if cluster.moves or not owner.owns(slot):
            return slot, []
        return slot, [node for node in self._primaries() if node is not owner and not node.paused]

    def _move(self) -> None:
        slot, targets = self._moving()
        if targets:
            target, pause = self.random.choice(targets), self.random.choice((0.001, 0.02, 0.1))
            Move(self.simulation.cluster, slot, target, pause)

    def _move_at_once(self) -> None:
        slot, targets = self._moving()
        owner = self.simulation.cluster.claims[self.simulation.cluster.part_of(slot)][1]
        if targets and owner.up and not owner.paused:
            self._log(f"slot {slot} is moved at once")
            move_at_once(self.simulation.cluster, slot, self.random.choice(targets))

    def _join(self) -> None:
        cluster = self.simulation.cluster
        if len(cluster.nodes) < 8:
            self._log(f"{cluster.join()!r} joins")

    # -- nodes ---------------------------------------------------------------------------------------

    def _fail_over(self) -> None:
        replicas = [n for n in self.simulation.cluster.nodes if n.master and n.up and not n.paused]
        if replicas:
            replica = self.random.choice(replicas)
            self._log(f"CLUSTER FAILOVER at {replica!r}")
            self.simulation.cluster.fail_over(replica)

    def _kill_node(self) -> None:
        node, away = self._owner_of_some_name(), self._outage()
        if node.up:
            self._log(f"{node!r} is killed, and back after {away:.3f} s")
            node.down()
            self.world.after(away, node.start)

    def _pause_node(self) -> None:
        node, length = self._owner_of_some_name(), self._outage()
        if node.up and not node.paused:
            self._log(f"{node!r} is stopped for {length:.3f} s")
            node.paused = True
            self.world.after(length, self._resume_node, node)

    def _resume_node(self, node: Node) -> None:
        if node.paused:
            self.world.log(f"{node!r} goes on")
            node.resume()

    def _cut_node(self) -> None:
        """Clients reach it, other nodes do not."""
        cluster, length = self.simulation.cluster, self._outage()
        node = self._owner_of_some_name()
        self._log(f"{node!r} is cut off from other nodes for {length:.3f} s")
        for other in cluster.nodes:
            if other is not node:
                self._cut_pair(node, other, length)

    def _cut_between(self) -> None:
        """Two nodes do not hear each other: what they know of the slots differs for longer."""
        one, other = self._some_node(), self._some_node()
        if one is not other:
            length = min(self._outage(), 0.9 * self.simulation.cluster.timeout)
            self._log(f"{one!r} and {other!r} do not hear each other for {length:.3f} s")
            self._cut_pair(one, other, length)

    def _cut_pair(self, one: Node, other: Node, length: float) -> None:
        pair = frozenset((one.number, other.number))
        self.simulation.cluster.cut.add(pair)
        self.world.after(length, self.simulation.cluster.cut.discard, pair)

    # -- strangers -----------------------------------------------------------------------------------

    def _misroute(self) -> None:
        """An address leads to another cluster; who was there has another one, or cannot be reached."""
        simulation, wire = self.simulation, self.simulation.wire
        node, length = self._owner_of_some_name(), self._length() + self._outage()
        if not node.up or simulation.misled:
            return
        address, stranger = node.address, self.random.choice(simulation.others.nodes)
        simulation.misled.add(address)
        moves = self.random.random() < 0.5
        self._log(f"{address}, of {node!r}, leads to {stranger!r} for {length:.3f} s")
        wire.close(address)
        node.sessions.clear()
        wire.listening[address, PORT] = lambda stream: Session(stranger, stream)
        if moves:
            simulation.moved_addresses += 1
            node.address = f"10.1.1.{simulation.moved_addresses}"
            node.known[node.id] = node.address
            node.listen()
        self.world.after(length, self._route_back, node, address)

    def _route_back(self, node: Node, address: str) -> None:
        wire, simulation = self.simulation.wire, self.simulation
        if address not in simulation.misled:
            return
        simulation.misled.discard(address)
        wire.close(address)
        wire.listening.pop((address, PORT), None)
        if node.address == address and node.up:
            node.listen()


class RedisClusterScene(Scene):
    """One seed."""

    fault_class = ClusterFaults
    lock_delays = (0.0, 0.3)
    idle_patience = 1.0
    served_within = 240.0
    cluster: Cluster

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        #: Of its own, so that schedules stay what they are.
        self.chance = random.Random(f"{seed} cluster")
        self.deployment = self.chance.choice(_DEPLOYMENTS)
        self.misled: set[str] = set()
        self.moved_addresses = 0
        super().__init__(seed, prepare)
        self.patch(redis_source.Source, "make_connection", make_connection)
        self.chaos_ends = self.chaos_ends * 2 + 25.0 * (self.deployment == "lost")

    # -- servers -------------------------------------------------------------------------------------

    def _restyle(self) -> None:
        chance, deployment = self.chance, self.deployment
        self.faults_of_servers = _FAILING if deployment == "failing" else _MOVING
        super()._restyle()
        self.style = replace(self.style, names=chance.randint(1, 3))
        if deployment == "failing":
            faults = (*self.style.faults, *chance.sample(_FAILING[:3], 2))
            self.style = replace(self.style, faults=faults, pause_between_faults=1.0)
        elif deployment == "strangers":
            faults = (*chance.sample(("cut", "move", "pause", "fail_over"), 2), "misroute")
            self.style = replace(self.style, faults=faults)
        elif deployment == "slots":
            # Nothing else goes wrong, and waiters that are not told ask too late.
            self.style = replace(
                self.style, faults=("move",), ttls=(9.0,), waiter_ttl=9.0, delays=(0.0,)
            )
            self.style = replace(self.style, hold=min(self.style.hold, 0.1))
            self.harmless, self.idle_patience = ("move",), 2.5
        elif deployment == "lost":
            how = chance.choice(("kill_node", "kill_node", "pause_node", "cut_node"))
            self.style = replace(
                self.style,
                faults=(how,),
                ttls=(_LASTING,),
                waiter_ttl=_LASTING,
                pause_between_faults=5.0,
                hold=6.0,
                think=0.1,
                delays=(0.0,),
                cancels=0.0,
            )

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(self.style.names)]

    def make_servers(self) -> Records:
        chance = self.chance
        timeout, tick = chance.choice((0.6, 1.0, 1.5)), chance.choice((0.05, 0.1, 0.2))
        self.cluster = Cluster(
            self.world, self.wire, _NAMES, replicas=1, timeout=timeout, tick=tick
        )
        self.others = Cluster(
            self.world, self.wire, _NAMES, letter="f", net=9, primaries=2, replicas=0
        )
        self.cluster.tries_again = chance.random() < 0.8
        self.cluster.sharded = chance.random() < 0.8
        self.cluster.channels_when_down = chance.random() < 0.7
        lag = chance.choice((0.3, 1.0) if self.deployment == "lost" else (0.0, 0.001, 0.05, 0.3))
        for node in self.cluster.nodes:
            node.lag = lag
        return Records(self.cluster)

    def make_world(self) -> None:
        super().make_world()
        self.world.after_turn.clear()
        self.checkers = ClusterPromises(self.world, self.truth)
        self.checkers.cluster = self.cluster
        self.cluster.on_call = self.checkers.on_call
        self.cluster.on_promotion = self.checkers.on_promotion
        self.cluster.on_lost = self.checkers.is_lost
        self.others.on_call = self._on_stranger
        self.wire.on_send = self.checkers.on_send
        if self.deployment == "lost":
            killed = "kill_node" in self.style.faults
            self.checkers.within = LOST_WITHIN if killed else LOST_WITHIN_IF_SILENT

    def _on_stranger(self, node: Node, script: str, base: str, id: str, *_: object) -> None:
        self.checkers.wrong(
            "stranger", f"{script} of {base} is called at {node!r}, of another cluster"
        )

    @property
    def url(self) -> str:
        # Who reaches no node of the right cluster while entering cannot know that it is another one.
        least = 4 if self.deployment == "strangers" else 1
        nodes = self.chance.sample(self.cluster.nodes[:6], self.chance.randint(least, 4))
        hosts = [node.address for node in nodes]
        if self.deployment == "strangers" and self.chance.random() < 0.5:
            hosts.insert(self.chance.randrange(len(hosts)), self.others.nodes[0].address)
        return "redis+cluster://" + ",".join(f"{host}:{PORT}" for host in hosts)

    def make_client(self, process: Process, **options: Any) -> Any:
        if self.deployment == "strangers":
            options["unavailable_after"] = (
                30.0  # another cluster is never the known one's successor
            )
        return super().make_client(process, **options)

    def calm_servers(self) -> None:
        for address in list(self.misled):
            node = next((n for n in self.cluster.nodes if n.address == address), None)
            ClusterFaults(self)._route_back(node or self.cluster.nodes[0], address)
        self.cluster.calm()

    def check_servers(self) -> None:
        """What the dead have left is over by now."""
        now = self.cluster.nodes[0].now_ms()
        left = [
            id
            for node in self.cluster.nodes
            if node.master is None
            for name in node.keys.names.values()
            for id, entry in (*name.holders.items(), *name.waiters.items())
            if now < entry.closed_until
        ]
        if left:
            self.checkers.wrong("ghost", f"requests are left: {left}")
