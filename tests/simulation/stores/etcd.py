"""One seed on etcd: one or three members, their faults, and what must be left."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

from aiodlock._request import Request
from aiodlock.backends.etcd import leases, ways
from aiodlock.backends.etcd.messages import KeyValue, Message
from aiodlock.backends.etcd.recipe import Keys, Queue, Record, read_record

from ..scenario import Simulation
from .cluster_faults import ClusterFaults
from .etcd_cluster import Cluster, Member, connect
from .promises import Stood
from .scene import Scene

#: Heartbeats come each half of it, elections after five (seconds).
TICK = 0.2


class Records:
    """The requests' keys in the newest state that any member has."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: By request's key; each is read once.
        self._read: dict[bytes, tuple[KeyValue, Record]] = {}

    def queue(self, kind: str, name: str) -> list[Stood]:
        keys = Keys.of("aiodlock", kind, name)
        records = [self._record(keys, kv) for kv in self._cluster.truth.range(*keys.all("q"))]
        records.sort(key=lambda record: record.order)
        return [
            Stood(r.id, str(r.limit) if r.limit else r.mode[:1].replace("e", "x"), r.owner, r.order)
            for r in records
        ]

    def _record(self, keys: Keys, kv: KeyValue) -> Record:
        known = self._read.get(kv.key)
        if known is None or known[0] is not kv:
            known = self._read[kv.key] = kv, read_record(keys.split(kv.key)[1], kv)
        return known[1]

    def is_closed(self, kind: str, name: str) -> bool:
        keys = Keys.of("aiodlock", kind, name)
        queue = Queue(keys, 0, self._cluster.truth.range(keys.base, keys.end))
        return bool(queue.closed())

    def id_of(self, request: Request) -> str:
        return request.id


class EtcdScene(Scene):
    """One seed."""

    faults_of_servers = (
        "pause_server", "restart_server", "cut_servers", "slow_disk", "lose_leader", "strand",
        "compact", "fill",
    )  # fmt: skip
    rare_faults = ("lose_leader", "doze")
    lock_delays = (0.0, 0.5, 1.0)
    #: Leases are whole seconds.
    ttls = (1.0, 1.0, 2.0)
    idle_patience = 1.0
    long_share = 2

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed, prepare)
        self.patch(ways, "connect", connect)
        numbers = SimpleNamespace(randbits=lambda bits: 10_000 + next(self._numbers))
        self.patch(leases, "secrets", numbers)
        # Messages travel as objects. Their bytes are compared with protobuf's elsewhere.
        self.patch(Message, "encode", lambda message: message)
        self.patch(Message, "decode", classmethod(lambda cls, message: message))
        if random.Random(f"{seed} idle").random() < 0.25:
            self.patch(leases, "_IDLE", 3.0)
        self.chaos_ends *= 2

    def make_servers(self) -> Records:
        members = self.random.choice((1, 3, 3, 3))
        self.ensemble = Cluster(self.world, self.wire, members, TICK)
        self.ensemble.on_first = self._on_change
        if random.Random(f"{self.seed} users").random() < 0.25:
            self.ensemble.password = "secret"
        self._alive: set[str] = set()
        self._keys: set[bytes] = set()
        return Records(self.ensemble)

    @property
    def url(self) -> str:
        cluster = self.ensemble
        user = "" if cluster.password is None else f"user:{cluster.password}@"
        return f"etcd://{user}" + ",".join(
            f"{cluster.address(one)}:2379" for one in cluster.members
        )

    def _on_change(self, change: object, member: Member) -> None:
        """A change is carried out for the first time: which requests has it ended?"""
        keys = member.store.keys
        if keys.keys() == self._keys:
            return  # values have changed, or leases
        self._keys = set(keys)
        for key in keys:
            if key.startswith(b"aiodlock/1/c/") and not key.endswith(b"/recall"):
                self.checkers.excused.add(key.rpartition(b"/")[2].decode())  # broken
        alive = {key.partition(b"/q/")[2].decode() for key in keys if b"/q/" in key}
        for gone in self._alive - alive:
            self.checkers.removed(gone)
        for made in alive - self._alive:
            self._check_ghost(made)
        self._alive = alive

    def _check_ghost(self, id: str) -> None:
        """A request is made: its client has it still."""
        for process, sessions in self.checkers.sessions.items():
            for session in sessions:
                store = session.backend
                is_its = id.startswith(store.label) and store.cluster.is_up
                if is_its and not process.dead and id not in session.requests:
                    self.checkers.wrong("ghost", f"{process} has left {id}, and it is made anew")

    def calm_servers(self) -> None:
        self.ensemble.full = False
        self.ensemble.calm()

    def check_servers(self) -> None:
        left = [key for key in self.ensemble.truth.keys if b"/q/" in key]
        if left:
            self.checkers.wrong("ghost", f"keys are left: {left}")


class EtcdFaults(ClusterFaults):
    """What goes wrong with the members."""

    def _lose_leader(self) -> None:
        """It wakes when leases are over by its clock."""
        leader = self.simulation.ensemble.leader
        if leader is not None:
            self._pause_member(leader, self._length() + max(self.simulation.style.ttls))

    def _doze(self) -> None:
        """One that does not lead is stopped for longer than clients wait: it carries out late what it has
        received."""
        members = [m for m in self.simulation.ensemble.members if m.role == "following"]
        if members:
            self._pause_member(self.random.choice(members), self.random.uniform(2.2, 5.0))

    def _compact(self) -> None:
        """A client is cut off; what is changed meanwhile is forgotten before it comes back."""
        process, length = self._someone(), self._length()
        self._log(f"{process} is cut off for {length:.3f} s, and what is changed is forgotten")
        wire = self.simulation.wire
        for stream in wire.streams_of(process):
            stream.break_off()
        paths = wire.paths_of(process)
        for path in paths:
            path.out_blocked = path.in_blocked = True

        def heal() -> None:
            for path in paths:
                path.out_blocked = path.in_blocked = False
            wire.released()

        self.world.after(length, self.simulation.ensemble.compact)
        self.world.after(length + 0.05, heal)

    def _fill(self) -> None:
        """It takes deletions alone."""
        ensemble, length = self.simulation.ensemble, self._length()
        self._log(f"the database is full for {length:.3f} s")
        ensemble.full = True
        self.world.after(length, setattr, ensemble, "full", False)


EtcdScene.fault_class = EtcdFaults
