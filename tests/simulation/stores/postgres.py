"""One seed on PostgreSQL: one server, alone or behind a pooler, or a primary and its standby; what goes
wrong with them, and what must be left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiodlock
from aiodlock._description import Description
from aiodlock._lock import Acquirable
from aiodlock._request import Request
from aiodlock._session import Session
from aiodlock.backends.memory.machine import Asked
from aiodlock.backends.postgres import dialing

from ..scenario import SimClient, Simulation
from ..world import Process
from . import postgres_pooler as pooler
from .postgres_connection import connect
from .postgres_faults import PAIR, SINGLE, PostgresFaults
from .postgres_pooler import Pooler
from .postgres_promises import PostgresPromises
from .postgres_servers import Cluster, Server, Transaction
from .promises import Stood
from .scene import Scene

_DEPLOYMENTS = ("single", "single", "unlogged", "pair", "pair", "pair", "pooled", "pooled")
_LOOKS_EVERY = 0.25
#: What most seeds with a standby have, undisturbed by most others.
_FAILOVERS = (
    ("lose_waits",),
    ("lose_waits", "lose_waits", "cancel_waits"),
    ("lose_waits", "cut", "pause"),
    ("promote", "promote", "cancel_waits", "stall_standby"),
    ("promote", "restart_client", "crash"),
    ("long_stall", "cut", "cut"),
)


class Records:
    """The queues as the newest primary has committed them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def queue(self, kind: str, name: str) -> list[Stood]:
        found = self._cluster.primary.seen(self._cluster.key_of(kind, name))
        if found is None:
            return []
        now = self._cluster.primary.clock_us() // 1000
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


def _mode(asked: Asked) -> str:
    return str(asked.limit) if asked.limit else "x" if asked.mode == "exclusive" else "s"


class PostgresScene(Scene):
    """One seed."""

    lock_delays = (0.0, 0.3)
    fault_class = PostgresFaults

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        #: Of its own, so that schedules stay what they are.
        self.chance = random.Random(f"{seed} postgres")
        self.deployment = self.chance.choice(_DEPLOYMENTS)
        self.lingers = self.chance.choice((0.0, 0.0, 0.6))
        self.holds = self.chance.choice(((0.0,), (0.0,), (0.0, 0.3)))
        self.once_share = self.chance.choice((0.0, 0.0, 0.3, 0.7))
        self.keeps: tuple[float, ...] = (0.3, 3.0, 30.0)
        super().__init__(seed, prepare)
        self.patch(dialing, "connect", connect)
        if self.deployment == "pair":
            self.chaos_ends = self.chaos_ends * 2 + 12.0 * ("long_stall" in self.style.faults)

    # -- servers -------------------------------------------------------------------------------------

    def _restyle(self) -> None:
        pair = self.deployment == "pair"
        self.faults_of_servers = PAIR if pair else SINGLE
        super()._restyle()
        if self.chance.random() < (0.1 if pair else 0.3):
            self._be_quiet()
        elif pair and self.chance.random() < 0.7:
            network = () if self.chance.random() < 0.5 else ("slow", "distant", "partition")
            self.style = replace(self.style, faults=(*self.chance.choice(_FAILOVERS), *network))
            if "lose_waits" in self.style.faults:
                # What was told too early has to last until the standby takes over.
                self.style = replace(self.style, ttls=(2.0,), hold=self.chance.choice((0.1, 0.5)))
                self.once_share = self.chance.choice((0.0, 0.9))
                if self.once_share:
                    # Others wait while somebody is at it, and ask soon after it was done.
                    self.keeps = (2.0,)
                    self.style = replace(self.style, processes=3, tasks=2, hold=0.1, cancels=0.0)
        if self.deployment == "pooled" and self.seed % 2 == 0:
            self.idle_patience = 1.8  # waiters poll each second

    def _be_quiet(self) -> None:
        """Nothing goes wrong, and leases are so long that nobody is helped by what looks at their ends."""
        style = self.style
        self.style = replace(
            style, faults=(), ttls=(6.0,), waiter_ttl=9.0, delays=(0.0,), hold=min(style.hold, 0.1)
        )

    def make_servers(self) -> Records:
        servers, unlogged = 1 + (self.deployment == "pair"), self.deployment == "unlogged"
        self.cluster = Cluster(self.world, self.wire, servers, unlogged=unlogged)
        self.cluster.on_commit = self._on_commit
        self.cluster.on_promotion = self._on_promotion
        if self.deployment == "pooled":
            Pooler(self.cluster.primary)
        return Records(self.cluster)

    def make_world(self) -> None:
        super().make_world()
        self.world.after_turn.clear()
        self.checkers = PostgresPromises(self.world, self.truth)
        self.checkers.cluster = self.cluster
        if self.deployment == "pooled":
            self.checkers.most_messages *= 3  # each call is begun and committed
        if set(self.style.faults) == {"long_stall", "cut"}:  # who cannot connect ends nothing
            self.checkers.most_given_up = 1
        self.wire.on_send = self.checkers.on_send
        self.world.after(_LOOKS_EVERY, self._look_at_sessions)

    def _look_at_sessions(self) -> None:
        self.checkers.check_sessions()
        self.world.after(_LOOKS_EVERY, self._look_at_sessions)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{server.address}:5432" for server in self.cluster.servers)
        if self.deployment == "pooled":
            hosts = f"{pooler.ADDRESS}:5432"
        attributes = "?target_session_attrs=read-write" if self.seed % 3 == 0 else ""
        return f"postgresql://user@{hosts}/db{attributes}"

    def make_client(self, process: Process, **options: Any) -> aiodlock.Client:
        if self.deployment == "pooled" and self.seed % 2:
            options["listen_source"] = f"postgresql://user@{self.cluster.primary.address}:5432/db"
        return super().make_client(process, **options)

    def _on_promotion(self) -> None:
        self.checkers.forgets()
        self.checkers.check_all()

    def _on_commit(self, server: Server, transaction: Transaction) -> None:
        """A transaction is visible: which requests has it ended?"""
        if server is not self.cluster.primary:
            return
        for key, before in transaction.before.items():
            after = server.tables.names.get(key)
            old = () if before is None else (*before.holders, *before.waiters)
            known = () if after is None else (*after.holders, *after.waiters)
            if after is not None:
                self.checkers.excused.update(after.broken)
            self.checkers.check_ghosts([id for id in known if id not in old], ())
            for id in old:
                if id not in known:
                    self.checkers.removed(id)
        lines = [line for call in transaction.calls for line in call.text.split("\n")]
        left = [line.split("\t")[2] for line in lines if line.startswith("leave")]
        self.checkers.check_ghosts((), left)

    def calm_servers(self) -> None:
        self.cluster.calm()

    def check_servers(self) -> None:
        """What the dead have left is over by now."""
        server = self.cluster.primary
        now = server.clock_us() // 1000
        left = [
            id
            for name in server.tables.names.values()
            for id, entry in (*name.holders.items(), *name.waiters.items())
            if now < entry.closed_until
        ]
        if left:
            self.checkers.wrong("ghost", f"requests are left: {left}")

    # -- users ---------------------------------------------------------------------------------------

    def _hold_at_least(self) -> float:
        return self.chance.choice(self.holds) if len(self.holds) > 1 else 0.0

    def _some_lock(self, client: SimClient) -> tuple[Acquirable, Acquirable]:
        lock, weaker = super()._some_lock(client)
        if not self.lingers or self.chance.random() > self.lingers:
            return lock, weaker
        known = lock._described.options
        if not isinstance(lock, aiodlock.Lock) or not known.auto_extend or known.hold_at_least:
            return lock, weaker
        options = replace(known, linger=self.chance.choice((0.05, 0.5)))
        return aiodlock.Lock(Description(client._core, lock.name, lock.mode, options)), weaker

    async def _turn(self, process: Process, client: SimClient) -> None:
        session = client._core.session
        if session is not None and self.chance.random() < self.once_share:
            await self._do_once(process, client, session)
        else:
            await super()._turn(process, client)

    async def _do_once(self, process: Process, client: SimClient, session: Session) -> None:
        chance, style = self.chance, self.style
        name, keep = f"o{chance.randrange(2)}", chance.choice(self.keeps)
        options: dict[str, Any] = {
            "ttl": chance.choice(style.ttls),
            "timeout": chance.choice((None, None, 1.0, 3.0)),
        }
        async with client.once(name, keep=keep, **options) as run:
            if run.first:
                assert run.lease is not None
                self.checkers.begins(process, session, name)
                async with self._body(process, run.lease):
                    await self._hold(run.lease, f"once {name}")
                run.result = f"{run.lease.token}"
                self.checkers.is_done(name, run.result, self.world.time + keep)
        self.checkers.told(process, session, name, str(run.result))
