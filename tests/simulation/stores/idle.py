"""Clients that hold nothing and wait for nothing, or only linger, while their store goes silent, is cut
off, and comes back: itself, another one, or an older state. Then they are used again.

Nothing else goes wrong. Besides the promises of every store, these are checked:

stranger    no request is made at another store before the known one was silent for ``unavailable_after``
liveness    a store that has been there for long enough is used; another one after that silence
storm, log  an idle client sends little, dials rarely and logs a line now and then
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict, deque
from dataclasses import replace
from functools import partial
from typing import Any

import aiodlock
from aiodlock import AcquireTimeout, BackendError, LockLost

from ..scenario import SimClient
from ..world import Process
from .consensus import Ensemble
from .etcd import EtcdScene
from .etcd_cluster import Cluster as EtcdCluster
from .postgres import PostgresScene
from .postgres_servers import Cluster as PostgresCluster
from .redis_cluster import PORT, Session
from .redis_cluster_scene import RedisClusterScene
from .scene import Scene
from .wire import Accept, Wire
from .zookeeper import ZooKeeperScene
from .zookeeper_ensemble import Ensemble as ZooKeeperEnsemble

#: An idle client may do so much within so many seconds: send.
_WINDOW = 10.0
_MOST_SENT = 400
#: A store that has been there for so long is used, and so quickly (seconds).
_SETTLED, _SOON = 12.0, 6.0
_IDLE = (0.3, 3.0, 12.0, 40.0)
_LONGEST_LINGER = 30.0
_NAMES = ("n0", "n1")


class Idle(Scene):
    """One seed. Mutable state besides: ``present`` (the servers that are there now: "same" or how they
    differ), ``since`` (when that, or whether they are reached, changed last; ``reached``),
    ``silent_since`` (when the known store was last there), ``busy`` (processes that use their client),
    ``known`` (requests made at the known store), ``did`` (what idle processes did, and when)."""

    instead: tuple[str, ...] = ("stranger",)
    most_dialled, most_logged = 100, 12
    long_share = 0
    served_within = 120.0

    def __init__(self, seed: int, *args: Any) -> None:
        self.idle = random.Random(f"{seed} idle clients")
        self.silence = self.idle.choice((4.0, 10.0, 30.0))
        self.present, self.reached, self.since = "same", True, 0.0
        self.silent_since: float | None = None
        self.busy: dict[Process, int] = defaultdict(int)
        self.known: set[str] = set()
        self.did: dict[tuple[Process, str], deque[float]] = defaultdict(deque)
        self.uses: dict[str, int] = defaultdict(int)
        self.used_elsewhere = 0
        super().__init__(seed, *args)
        self.style.faults = ()
        self.chaos_ends = self.idle.choice((20.0, 60.0, 150.0))
        connect = self.wire.connect

        async def dial(process: Process, *args: Any) -> Any:
            self._does(process, "dials", self.most_dialled)
            return await connect(process, *args)

        self.wire.connect = dial  # type: ignore[assignment,method-assign]
        send = self.wire.on_send

        def on_send(process: Process) -> None:
            send(process)
            self._does(process, "messages", _MOST_SENT)

        self.wire.on_send = on_send
        listened = dict(self.wire.listening)
        self.doors: dict[str, dict[tuple[str, int], Accept]] = {"same": listened}
        self._plan_trouble()

    def _restyle(self) -> None:
        super()._restyle()
        self.style = replace(
            self.style,
            faults=(),
            processes=self.idle.choice((1, 2)),
            tasks=1,
            ttls=(1.0,),
            waiter_ttl=1.0,
        )

    # -- what a store says ---------------------------------------------------------------------------

    def make_other(self, how: str) -> dict[tuple[str, int], Accept]:
        """Make the servers that will be there instead; return who listens at which of our addresses."""
        raise NotImplementedError

    def look_at(self, how: str) -> None:
        """Those servers have the truth from now on."""
        raise NotImplementedError

    @property
    def settled(self) -> float:
        """Return after how long everybody knows what is there."""
        return _SETTLED + (self.silence if len(self.doors) > 1 else 0.0)

    # -- what idle clients do ------------------------------------------------------------------------

    def _does(self, process: Process, what: str, most: int) -> None:
        if self.busy[process] or process.dead or self.world.time < self.started.get(process, 1e9):
            return
        times, now = self.did[process, what], self.world.time
        times.append(now)
        while times[0] <= now - _WINDOW:
            times.popleft()
        if len(times) > most:
            checker = "log" if what == "lines" else "storm"
            self.checkers._found.append(
                (checker, f"{process} is idle: {len(times)} {what} in {_WINDOW} s")
            )

    def _log_errors_are_failures(self) -> None:
        super()._log_errors_are_failures()
        look = self._logger.filters[0]

        def look_thrice(record: logging.LogRecord) -> bool:
            current = self.world.current
            if current is not None and record.levelno >= logging.WARNING:
                self._does(current, "lines", self.most_logged)
            return bool(look(record))  # type: ignore[operator]

        self._logger.filters[:] = [look_thrice]

    def on_request_elsewhere(self, id: str) -> None:
        """A request is made at servers that are not the known ones."""
        if id in self.known:
            return
        assert self.silent_since is not None
        silent = self.world.time - self.silent_since
        if silent < self.silence:
            self.checkers.wrong(
                "stranger", f"{id} is made elsewhere, after {silent:.3f} s of silence"
            )

    # -- what goes wrong -----------------------------------------------------------------------------

    def _plan_trouble(self) -> None:
        self.world.after(
            self.idle.choice((0.5, 3.0, 15.0, 40.0)) + self.idle.random(), self._trouble
        )

    def _trouble(self) -> None:
        """The store goes away, for a while; then something is there again."""
        if not self._going_on():
            return
        how = self.idle.choice(("silent", "refused", "cut"))
        away = 0.0 if how == "cut" else self.idle.choice((0.3, 3.0, 12.0, 40.0))
        then = self.idle.choice(("same", *self.instead))
        if self.present != "same":
            then = "same"
        self.world.log(f"the store is {how} for {away:.1f} s, and then: {then}")
        # What was there for a moment may have been met by nobody, and some may know the other one still.
        there = self.world.time - self.since >= self.settled or self.silent_since is None
        if self.present == "same" and there:
            self.silent_since = self.world.time
        self.reached, self.since = False, self.world.time
        if then not in self.doors:
            self.doors[then] = self.make_other(then)
        if how == "silent":
            for path in self.wire.paths.values():
                path.out_blocked = path.in_blocked = True
        else:
            self._shut()
        self.world.after(away, self._come_back, then)

    def _shut(self) -> None:
        for stream in list(self.wire.streams):
            stream.break_off()
        self.wire.listening.clear()

    def _come_back(self, then: str) -> None:
        if then != self.present:
            self._shut()
            self.checkers.excused.update(self.known)
            for session in (one for all in self.checkers.sessions.values() for one in all):
                self.checkers.excused.update(map(self.truth.id_of, session.requests.values()))
            # Another store counts anew.
            self.checkers._tokens.clear()
            self.checkers._writes.clear()
            self.stores.clear()
            self.look_at(then)
        self.wire.listening.update(self.doors[then])
        for path in self.wire.paths.values():
            path.out_blocked = path.in_blocked = False
        self.wire.released()
        self.present, self.reached, self.since = then, True, self.world.time
        self.world.log(f"there is again: {then}")
        if self._going_on():
            self._plan_trouble()

    def calm_down(self) -> None:
        super().calm_down()
        if not self.reached:
            self._come_back(self.present)

    # -- users ---------------------------------------------------------------------------------------

    def make_client(self, process: Process, **options: Any) -> aiodlock.Client:
        self.started = {process: self.world.time + _WINDOW, **getattr(self, "started", {})}
        options["unavailable_after"] = self.silence
        return super().make_client(process, **options)

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        while self._going_on():
            self.busy[process] += 1
            try:
                await self._use(process, client)
            finally:
                self.busy[process] -= 1
                self.did.clear()
            await asyncio.sleep(self.idle.choice(_IDLE) * self.idle.uniform(0.5, 1.0))

    async def _until_nothing_is_left(self, session: Any) -> None:
        give_up = self.world.time + self.silence + _LONGEST_LINGER + _SETTLED
        while session.requests and self.world.time < give_up:
            await asyncio.sleep(0.2)

    async def _use(self, process: Process, client: SimClient) -> None:
        began, since, present = self.world.time, self.since, self.present
        linger = self.idle.choice((0.0, 0.0, 0.3, _LONGEST_LINGER))
        name = self.idle.choice(_NAMES)
        lock = client.lock(name, timeout=_SOON, linger=linger, ttl=1.0)
        try:
            async with lock as lease, self._body(process, lease):
                await self._hold(lease, f"lock {name}")
            how = "done"
        except (AcquireTimeout, BackendError, LockLost) as error:
            how = repr(error)
        self.world.log(f"{process} has used {name} (linger {linger}): {how}")
        self.uses[how.partition("(")[0]] += 1
        self.used_elsewhere += how == "done" and self.present != "same"
        if how == "done" or since != self.since or not self.reached:
            return
        # What has been there for long enough may be used, also if it is another one.
        if began - since > self.settled:
            self.checkers.wrong(
                "liveness", f"{process}: {present} is there for {began - since:.1f} s: {how}"
            )


class IdleEtcd(Idle, EtcdScene):
    """etcd."""

    instead = ("stranger", "older")

    def make_other(self, how: str) -> dict[tuple[str, int], Accept]:
        wire = Wire(self.world)
        other = EtcdCluster(self.world, wire, len(self.ensemble.members), self.ensemble.tick)
        other.password = self.ensemble.password
        if how == "stranger":
            other.id += 1
        else:
            _set_back(other, self.ensemble, self.idle)
        other.on_first = self._on_other_change
        self.worlds[how] = other
        return wire.listening

    def make_servers(self) -> Any:
        truth = super().make_servers()
        self.worlds: dict[str, Any] = {"same": self.ensemble}
        return truth

    def look_at(self, how: str) -> None:
        self.truth._cluster = self.worlds[how]  # type: ignore[attr-defined]

    def _on_change(self, change: object, member: Any) -> None:
        super()._on_change(change, member)
        self.known |= self._alive

    def _trouble(self) -> None:
        if self.present == "same":
            sessions = [one for all in self.checkers.sessions.values() for one in all]
            known = [one.backend.acquaintance.revision for one in sessions]
            self.revision = min(known, default=0)
        super()._trouble()

    def _on_other_change(self, change: object, member: Any) -> None:
        if member.ensemble.id == self.ensemble.id and member.store.revision > self.revision:
            return  # an older state that has grown since is taken for the newest
        for key in member.store.keys:
            if b"/q/" in key:
                self.on_request_elsewhere(key.partition(b"/q/")[2].decode())

    def _check_ghost(self, id: str) -> None:
        """A store that has been away is not the one that a client asks to forget."""

    def check_servers(self) -> None:
        self.ensemble = self.worlds[self.present]
        super().check_servers()


def _set_back(other: Ensemble, known: Ensemble, chance: random.Random) -> None:
    """Let the others begin with what the known ones had."""
    newest = known.newest
    had = newest.log[: chance.randint(0, newest.applied)]
    other.epoch = known.epoch
    for member in other.members:
        member.log = [replace(one, answer=None, accepted=set()) for one in had]
        member.look()  # a leader was found before


class IdleZooKeeper(Idle, ZooKeeperScene):
    """ZooKeeper."""

    def make_other(self, how: str) -> dict[tuple[str, int], Accept]:
        wire = Wire(self.world)
        other = ZooKeeperEnsemble(self.world, wire, len(self.ensemble.members), self.ensemble.tick)
        other.on_first = self._on_other_change
        self.worlds[how] = other
        return wire.listening

    def make_servers(self) -> Any:
        truth = super().make_servers()
        self.worlds: dict[str, Any] = {"same": self.ensemble}
        return truth

    def look_at(self, how: str) -> None:
        self.truth._ensemble = self.worlds[how]  # type: ignore[attr-defined]

    def _on_change(self, change: Any, member: Any) -> None:
        super()._on_change(change, member)
        self.known |= self._alive

    def _on_other_change(self, change: Any, member: Any) -> None:
        for paths in member.tree.ephemerals.values():
            for path in paths:
                if ":" in path:
                    self.on_request_elsewhere(path.rpartition("/")[2].split(":")[1])

    def check_servers(self) -> None:
        self.ensemble = self.worlds[self.present]
        super().check_servers()


class IdlePostgres(Idle, PostgresScene):
    """PostgreSQL."""

    instead = ("stranger", "fork")

    def make_servers(self) -> Any:
        self.deployment = self.idle.choice(("single", "unlogged"))
        truth = super().make_servers()
        self.worlds: dict[str, Any] = {"same": self.cluster}
        return truth

    def make_other(self, how: str) -> dict[tuple[str, int], Accept]:
        wire = Wire(self.world)
        other = PostgresCluster(self.world, wire, 1, unlogged=self.cluster.unlogged)
        if how == "stranger":
            other.system = "another"
        other.on_commit = self._on_other_commit
        self.worlds[how] = other
        return wire.listening

    def look_at(self, how: str) -> None:
        self.truth._cluster = self.cluster = self.checkers.cluster = self.worlds[how]  # type: ignore[attr-defined]
        self.checkers.forgets()
        self.checkers._done.clear()

    def _on_commit(self, server: Any, transaction: Any) -> None:
        super()._on_commit(server, transaction)
        for key in transaction.before:
            name = server.tables.names.get(key)
            self.known.update(() if name is None else (*name.holders, *name.waiters))

    def _on_other_commit(self, server: Any, transaction: Any) -> None:
        for key in transaction.before:
            name = server.tables.names.get(key)
            for id in () if name is None else (*name.holders, *name.waiters):
                self.on_request_elsewhere(id)
        if self.present != "same":
            super()._on_commit(server, transaction)


class IdleCluster(Idle, RedisClusterScene):
    """Redis Cluster."""

    #: Six addresses and three nodes are dialled, the latter twice, and the log tells of each.
    most_dialled, most_logged = 200, 24

    def __init__(self, seed: int, *args: Any) -> None:
        super().__init__(seed, *args)
        addresses = {node.address for node in self.others.nodes}
        self.elsewhere = {
            door: accept for door, accept in self.doors["same"].items() if door[0] in addresses
        }
        for door in self.elsewhere:
            del self.doors["same"][door], self.wire.listening[door]

    def _restyle(self) -> None:
        self.deployment = "slots"
        super()._restyle()

    def make_world(self) -> None:
        super().make_world()
        self.cluster.on_call = self._on_call
        self.worlds = {"same": self.cluster, "stranger": self.others}

    def make_other(self, how: str) -> dict[tuple[str, int], Accept]:
        doors = self.elsewhere
        for number, node in enumerate(self.cluster.nodes):
            stranger = self.others.nodes[number % len(self.others.nodes)]
            doors[node.address, PORT] = partial(Session, stranger)
        return doors

    def look_at(self, how: str) -> None:
        self.truth._cluster = self.checkers.cluster = self.worlds[how]  # type: ignore[attr-defined]

    def _on_call(self, node: Any, script: str, base: str, id: str, *told: Any) -> None:
        self.known.add(id)
        self.checkers.on_call(node, script, base, id, *told)

    def _on_stranger(self, node: Any, script: str, base: str, id: str, *told: Any) -> None:
        self.on_request_elsewhere(id)
        self.checkers.on_call(node, script, base, id, *told)


IDLE: dict[str, type[Idle]] = {
    "etcd": IdleEtcd,
    "zookeeper": IdleZooKeeper,
    "postgres": IdlePostgres,
    "cluster": IdleCluster,
}
