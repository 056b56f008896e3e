"""Two primaries at once: a replica is promoted, the old one lives on, three sentinels tell of it in time.

Acknowledged writes may be lost then, so exclusion is not promised at every instant. What is promised:
from ``SETTLED_AFTER`` seconds after the first sentinel names the new primary, nobody is certain to hold
what another one holds; and the connections of one client are to one server, but for the round trips
that it takes to notice.

In some seeds, one or two of the addresses belong to sentinels of other deployments: they have a larger
epoch, know none of the others, and name a server of their own, which nobody may call. In some, a sentinel
hangs. In some, all sentinels name the primary by a host name, which leads to the new one some time after
the promotion."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock._request import HELD, Request
from aiodlock.backends.redis import RedisBackend, sentinels
from aiodlock.backends.redis.sentinel import Named, Sentinel
from aiodlock.backends.redis.sentinels import PrimaryLookup
from aiodlock.backends.redis.settings import Settings

from .checkers import Checkers, read_name
from .network import Network, SimConnection, SimSource
from .scenario import Simulation
from .server import Command, SimServer
from .world import Process, World

#: A question a second, an answer of half a second, connecting anew, and asking about what is held.
SETTLED_AFTER = 3.0
#: A connection that has come up is compared with the others in a round trip. One on which nothing comes
#: back is given up after a second.
TOGETHER_WITHIN, TOGETHER_WITHIN_IF_STUCK = 0.3, 2.5
_LASTING = 30.0
#: A host name is looked up again after 5 s, when a sentinel answers next.
SETTLED_AFTER_NAMES = SETTLED_AFTER + 6.0
#: An answer that does not come is given up after so long, and the connection with it.
_HANGS_FOR = 3.0
_NAME = "primary"
_NEVER = float("inf")


class FailoverCheckers(Checkers):
    """Judged by what the clients believe. Mutable state besides: ``settled_at``, ``together_within``,
    ``_apart_since``, ``_holders``."""

    def __init__(self, world: World, server: SimServer) -> None:
        super().__init__(world, server, forgetful=True)
        server.executed.remove(self._executed)
        server.lost_data.remove(self._lost_data)
        self.settled_at = _NEVER
        self.together_within = TOGETHER_WITHIN
        self._apart_since: dict[int, float] = {}
        self._holders: dict[tuple[str, str], list[str]] = {}

    def looks_at(self, server: SimServer) -> Callable[[Command, Any], None]:
        """Return what is told of each command of a server: what an operator breaks is excused."""

        def on_executed(command: Command, _: Any) -> None:
            if command.script not in ("acquire", "extend", "leave", "break"):
                return
            base = command.base
            if command.script == "break":
                self.excused.update(self._holders.get((server.name, base), ()))
            self._holders[server.name, base] = list(read_name(server, base).holders)

        return on_executed

    def write(self, base: str, lease: Any, accepted: bool) -> None:
        """The order of writes is not promised: one of two holders has the smaller token, either of them."""

    def _check_deadline(self, process: Process, request: Request) -> None:
        super()._check_deadline(process, request)
        if request.state is HELD and self._seen.get(f"granted {request.id}") is None:
            self._seen[f"granted {request.id}"] = self.world.time
            self.grants += 1

    def _after_turn(self, process: Process) -> None:
        super()._after_turn(process)
        for session in self.sessions.get(process, ()):
            self._check_one_server(process, session)
            if self.world.time < self.settled_at:
                continue
            for request in session.requests.values():
                if request.state is HELD and not request.options.auto_extend:
                    self.excused.add(request.id)  # it ends by itself, and is not asked about
                elif request.state is HELD:
                    self._check_together(process, request)

    def _check_one_server(self, process: Process, session: Any) -> None:
        wires = session.backend.store.server.connections.wires()
        if len({wire.peer for wire in wires}) < 2:
            self._apart_since.pop(id(session), None)
            return
        since = self._apart_since.setdefault(id(session), self.world.time)
        if self.world.time - since > self.together_within:
            peers = [wire.peer for wire in wires]
            self.wrong("apart", f"{process} is at {peers} since {since:.3f}")


class SimSentinel(Sentinel):
    """One of the sentinels, as one process reaches it."""

    def __init__(self, simulation: FailoverSimulation, number: int) -> None:
        super().__init__((f"sentinel{number}", 26379), lambda: None)  # type: ignore[arg-type, return-value]
        self._simulation = simulation
        self._number = number

    async def _ask(self, service: str, least_others: int) -> Named:
        simulation = self._simulation
        if self._number in simulation.strangers:
            await asyncio.sleep(simulation.answers_within[0] * simulation.chance.random())
            id = f"stranger{self._number}"
            return Named(("stranger", 6379), 99, id=id, knows=frozenset({id, f"{id}'s"}))
        if self._number == simulation.hangs:
            await asyncio.sleep(_HANGS_FOR)
            raise RedisConnectionError("simulated: no reply")
        await asyncio.sleep(simulation.answers_within[self._number] * simulation.random.random())
        if simulation.knows_at[self._number] == _NEVER and simulation.random.random() < 0.3:
            raise RedisConnectionError("simulated: no answer")
        knows = simulation.world.time >= simulation.knows_at[self._number]
        host = "new" if knows else "old"
        if simulation.by_name:
            host = _NAME
        ids = frozenset(f"ours{number}" for number in range(3))
        return Named((host, 6379), 1 + knows, id=f"ours{self._number}", knows=ids)


class SimLookup(PrimaryLookup):
    """The library's own, with simulated sentinels."""

    def __init__(self, simulation: FailoverSimulation) -> None:
        self._numbers = [*sorted(simulation.strangers), *range(3)]
        addresses = [(f"sentinel{number}", 26379) for number in self._numbers]
        super().__init__(addresses, "service", {})
        self._simulation = simulation

    def _make_sentinels(self) -> list[Sentinel]:
        return [SimSentinel(self._simulation, number) for number in self._numbers]


class FailoverSource(SimSource):
    """A Sentinel service, for the clients of one process."""

    def __init__(self, simulation: FailoverSimulation, process: Process) -> None:
        super().__init__(simulation.network, process)
        self._simulation = simulation
        self._lookup = SimLookup(simulation)

    def make_connection(self) -> Any:
        return FailoverConnection(self._simulation, self._process, self._lookup)


class FailoverConnection(SimConnection):
    """Asks the sentinels where to, and looks at the server's role."""

    def __init__(
        self, simulation: FailoverSimulation, process: Process, lookup: PrimaryLookup | None
    ) -> None:
        super().__init__(simulation.network, process)
        self._simulation = simulation
        self._lookup = lookup

    async def connect(self) -> None:
        assert self._lookup is not None
        address = await self._lookup.get_master_address()
        ((*_, (host, _)),) = await self._simulation.resolve(*address)
        self._network = self._simulation.networks[host]
        await super().connect()
        assert self._writer is not None
        self._lookup.reached(address, self._writer.get_extra_info("peername"))
        if self._network.server.read_only:
            self._lookup.distrust(address)
            raise RedisConnectionError("simulated: it is a replica")


class FailoverSimulation(Simulation):
    """One seed with a failover. ``knows_at``: from when on each sentinel names the new primary."""

    keeps_records = False
    checkers: FailoverCheckers

    heeds_hints = False
    long_share = 0

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed)
        rng = self.random
        #: Of its own, so that schedules stay what they are.
        self.chance = random.Random(f"{seed} sentinels")
        self.strangers = frozenset(range(3, 3 + self.chance.choice((0, 0, 0, 1, 2))))
        self.hangs = self.chance.choice((None, None, None, 0, 1, 2))
        self.by_name = self.chance.random() < 0.2
        self.leads_to = "old"
        self.world.after_turn.clear()
        old, new = SimServer(self.world, "old"), SimServer(self.world, "new")
        new.read_only = True
        new.offset += rng.choice((0.02, 0.02, 5.0)) * rng.uniform(-1.0, 1.0)
        stranger = SimServer(self.world, "stranger")
        self.networks = {node.name: Network(self.world, node) for node in (old, new, stranger)}
        self.old, self.new = old, new
        self.server, self.network = old, self.networks["old"]
        self.checkers = FailoverCheckers(self.world, old)
        stranger.executed.append(self._on_stranger)
        for network in self.networks.values():
            network.server.executed.append(self.checkers.looks_at(network.server))
            network.on_reply = self.checkers.on_reply
            network.longest_late = 1.0
        self.style = replace(
            self.style,
            forgetful=True,
            ttls=(_LASTING,),
            waiter_ttl=_LASTING,
            delays=(0.0,),
            names=1,
            semaphores=0.0,
            named_owners=0.0,
            cancels=rng.choice((0.0, 0.1)),
            faults=rng.choice(((), ("cut",), ("cut", "stuck"))),
            pause_between_faults=0.2,
            retention=3600.0,
        )
        if "stuck" in self.style.faults:
            self.checkers.together_within = TOGETHER_WITHIN_IF_STUCK
        self.promoted_at = rng.uniform(1.0, 3.0)
        self.chaos_ends = self.promoted_at + rng.uniform(6.0, 9.0)
        first = rng.randrange(3)
        self.knows_at = [
            self.promoted_at + (rng.uniform(0.0, 1.2) if n == first else rng.uniform(0.5, 4.0))
            for n in range(3)
        ]
        if rng.random() < 0.4:
            self.knows_at[(first + 1) % 3] = _NEVER  # cut off from the others, but not from clients
        self.answers_within = [rng.choice((0.001, 0.01, 0.45)) for _ in range(3)]
        if self.hangs is not None and self.knows_at[self.hangs] == min(self.knows_at):
            self.hangs = None  # nobody else may know for long
        self.checkers.settled_at = min(self.knows_at) + SETTLED_AFTER
        if self.by_name:
            moved_at = self.promoted_at + self.chance.uniform(0.0, 1.0)
            self.world.at(moved_at, setattr, self, "leads_to", "new")
            self.checkers.settled_at = moved_at + SETTLED_AFTER_NAMES
            self.checkers.together_within = SETTLED_AFTER_NAMES
            self.chaos_ends += SETTLED_AFTER_NAMES
        self.patch(sentinels, "resolve", self.resolve)
        lag = rng.choice((0.0, 0.02, 0.3))
        self.world.at(self.promoted_at - lag, old.save)
        self.world.at(self.promoted_at, self._promote)
        if rng.random() < 0.5:
            self.world.at(self.promoted_at + rng.uniform(3.0, 6.0), self._demote)
        if prepare is not None:
            prepare(self)

    def _on_stranger(self, command: Command, reply: object) -> None:
        self.checkers.wrong("stranger", f"{command} at a server that only strangers name")

    async def resolve(self, host: str, port: int) -> list[tuple[Any, ...]]:
        """Look a name up, as ``getaddrinfo`` does."""
        return [(None, None, None, "", (self.leads_to if host == _NAME else host, port))]

    def _promote(self) -> None:
        self.world.log("fault: the replica is promoted, and the old primary lives")
        database = self.new.db
        for key, item in copy.deepcopy(self.old.snapshot).items():
            database[key] = item
        self.new.read_only = False

    def _demote(self) -> None:
        self.world.log("fault: the old primary is told, and takes no writes any more")
        self.old.read_only = True

    def make_store(self, process: Process, label: str, **options: Any) -> RedisBackend:
        source = FailoverSource(self, process)
        return self.backend_class(source, Settings(**options), label=label)

    def strike(self, name: str) -> None:
        self.network = self.networks[self.random.choice(("old", "new"))]
        super().strike(name)

    async def _hold(self, lease: Any, base: str) -> None:
        rng = self.random
        length = rng.expovariate(1 / self.style.hold)
        if rng.random() < 0.1:
            length += rng.uniform(2.0, 6.0)
        await asyncio.sleep(length)

    def _watch_for_idle(self) -> None:
        pass  # a name is free at one server, and not at the other

    def _sweep(self) -> None:
        for node in (self.old, self.new):
            node.sweep()
        self.world.after(self.random.uniform(0.05, 0.5), self._sweep)

    def calm_down(self) -> None:
        demoted = self.old.read_only
        super().calm_down()
        self.old.read_only = demoted
        for network in self.networks.values():
            for path in network.paths.values():
                path.calm()
            network.released()

    def _check_end(self) -> None:
        self.server, self.network = self.new, self.networks["old"]
        for process in self.mains:
            if any(conn.open for conn in self.network.connections_of(process)):
                self.checkers.wrong("leak", f"{process} still has a connection to the old primary")
        self.network = self.networks["new"]
        super()._check_end()
