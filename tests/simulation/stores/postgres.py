"""One seed on PostgreSQL: one server, or a primary and its standby, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from aiodlock._request import Request
from aiodlock.backends.memory.machine import Asked
from aiodlock.backends.postgres import link

from ..scenario import Simulation
from .postgres_connection import connect
from .postgres_servers import Cluster, Server, Transaction
from .promises import Stood
from .scene import Scene, StoreFaults


class Records:
    """The queues as the newest primary has committed them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def queue(self, kind: str, name: str) -> list[Stood]:
        found = self._cluster.primary.seen(f"aiodlock:{kind[0]}:{quote(name, safe='')}")
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
        return False

    def id_of(self, request: Request) -> str:
        return request.id


def _mode(asked: Asked) -> str:
    return str(asked.limit) if asked.limit else "x" if asked.mode == "exclusive" else "s"


class PostgresScene(Scene):
    """One seed."""

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed, prepare)
        self.patch(link, "connect", connect)

    def make_servers(self) -> Records:
        self.cluster = Cluster(self.world, self.wire, self.random.choice((1, 2)), unlogged=False)
        self.cluster.on_commit = self._on_commit
        return Records(self.cluster)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{server.address}:5432" for server in self.cluster.servers)
        return f"postgresql://user@{hosts}/db"

    def _on_commit(self, server: Server, transaction: Transaction) -> None:
        """A transaction is visible: which requests has it ended?"""
        if server is not self.cluster.primary:
            return
        for key, before in transaction.before.items():
            if before is None:
                continue
            after = server.tables.names.get(key)
            known = set() if after is None else {*after.holders, *after.waiters}
            gone = [id for id in (*before.holders, *before.waiters) if id not in known]
            if after is not None:
                self.checkers.excused.update(after.broken)
            for id in gone:
                self.checkers.removed(id)

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


class PostgresFaults(StoreFaults):
    """What goes wrong."""


PostgresScene.fault_class = PostgresFaults
