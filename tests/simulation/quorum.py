"""The same world with three or five servers, and the client that holds by a majority of them.

Nodes may also be dead from some moment on for good, and clocks wrong from the beginning, each a minority at
most. Whether everybody gets in is judged with those.

A node is *faulty* while it is down, cut off from everybody, silent or refusing, for ``restart_delay``
after it came back empty, and for as long after its clock stepped. At most a minority is at a time.
What goes wrong between one client and one node is not counted: it costs progress, never exclusion.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from aiodlock._request import HELD, WAITING
from aiodlock.backends.redis.quorum import QuorumBackend, trust
from aiodlock.backends.redis.settings import Settings

from .breaks import Breaks
from .checkers import Checkers, base_of
from .network import Network, SimSource
from .scenario import Faults, Simulation
from .server import Command, SimServer
from .votes import Node
from .world import Process, World

_BETWEEN = ("slow", "cut", "partition", "one_way", "mute", "stuck", "duplicate")
_PROCESS = ("pause", "pause", "sleep", "crash", "restart_client")
_NODE = (
    "restart_kept",
    "restart_empty",
    "restart_empty",
    "node_cut",
    "node_slow",
    "stall",
    "loading",
)
_REFUSAL = ("read_only", "out_of_memory", "busy", "flush_scripts")
_CLOCK = ("clock_back", "clock_forward")
#: Steps that a connected client notices; of smaller ones it cannot know.
_STEP = 3.0
_GRANTED = re.compile(rb"granted \S+ (\S+) (\d+)")
_BROKEN = re.compile(rb"broken \S+ (\S+) (\d+)")
#: How wrong a clock may be all the time, in seconds.
_WRONG = (-3600.0, -60.0, 60.0, 3600.0)
#: Who asks by so much later has a later ticket, whatever clocks say; and how many may pass all the same.
_LATER, _PASSES = 1.5, 3
#: A lease may be extended by as much in a scenario.
_LONGEST_EXTENSION = 1.2


class QuorumCheckers(Checkers):
    """What a quorum promises, judged by what the clients believe and what the nodes told them.

    Mutable state besides: ``answers`` (per request: each node's latest confirmed deadline, on the process's
    clock), ``confirmed`` and ``noticed`` (which nodes have said that they vote for it with its token, and
    with which token they did last), ``_serials`` (grants in the order in which clients came to hold, by
    base), ``newcomers_until`` (until when a client that is entered may not know that a clock stepped),
    ``_asked`` (when each request began), ``_queued`` (since when it has been known to a majority),
    ``_passed`` (by how many later ones it was passed). One more checker:

    passed      who waits at a majority of the nodes is passed by nobody who asks well after
    kept        a majority of the nodes has the vote of a request that holds, for as long as that is
                believed; a node that is faulty counts as one that has it
    delay       who is lost keeps the name closed for its lock-delay, unless nodes forget or clocks step
    """

    def __init__(self, world: World, servers: list[SimServer]) -> None:
        super().__init__(world, servers[0], forgetful=True)
        servers[0].executed.remove(self._executed)
        servers[0].lost_data.remove(self._lost_data)
        self.majority = len(servers) // 2 + 1
        self.answers: dict[str, dict[int, float]] = {}
        self.confirmed: dict[str, set[int]] = {}
        #: Until when each node is faulty, in true time.
        self.faulty_until: list[float] = [0.0] * len(servers)
        #: Whether lock-delays are promised; the requests that were released; of those that held with one,
        #: by base: id, owner, mode, end of the lease, delay.
        self.keeps_delays = False
        self._released: set[str] = set()
        self._delays: dict[str, dict[str, tuple[str, str, float, float]]] = {}
        self.noticed: dict[str, dict[int, int]] = {}
        self.step_ends = 0.0
        self.unaware: set[int] = set()
        #: When all nodes that knew a token of a clock that is ahead forgot it, nothing is promised.
        self.forget_tokens = False
        self._servers = servers
        self.breaks = Breaks()
        #: Who came to hold although it was broken: perhaps after those that came next.
        self._late: set[str] = set()
        self._asked: dict[str, float] = {}
        self._queued: dict[str, float] = {}
        self._passed: dict[str, int] = {}
        self._granted: dict[str, list[tuple[str, str, str, int]]] = {}
        #: The request that came to hold first, by base, owner and token.
        self._first: dict[tuple[str, str, int], str] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        self._kept_until: dict[str, float] = {}
        for node, server in enumerate(servers):
            server.executed.append(partial(self._node_executed, node, server))
            server.lost_data.append(partial(self.breaks.forgot, node))

    def _node_executed(self, node: int, server: SimServer, command: Command, reply: Any) -> None:
        if command.script == "vote":
            self.count(server, command, reply)
        if command.script == "break_votes" and isinstance(reply, list):
            for id in reply:
                self.breaks.broke(node, id.decode(), _token_broken(server, command.base, id))
            self._delays.pop(command.base, None)  # a break ignores them
        if command.script in ("vote", "unvote"):
            self.breaks.executed(node, command)
        if command.script == "unvote" and command.arguments[1] == b"ended":
            self._released.add(command.id)
        if command.script in ("vote", "unvote"):
            for process, sessions in self.sessions.items():
                for session in () if process.dead else sessions:
                    for request in session.requests.values():
                        if request.state is HELD and request.id != command.id:
                            self._check_kept(process, request)

    def _check_kept(self, process: Process, request: Any) -> None:
        """What is believed is so at the nodes, whatever they have told, but for breaks on their way."""
        if process.boot() >= request.ends_at or request.id in self.excused:
            return
        ends = process.true_time_of(request.place.deadline)
        key = f"{base_of(request)}:state".encode()
        broken = self._breaks_of(request)
        kept = []
        for number, server in enumerate(self._servers):
            if server.votes is None:
                return
            if number in broken or self.faulty_until[number] > self.world.time:
                kept.append(number)
                continue
            name = server.votes.names.get(key)
            vote = name.state.fields.get(request.id) if name is not None else None
            if vote is None:
                continue
            until = min(vote.deadline, server.now_ms() + vote.length)
            if server.true_time_of(until) >= ends - 1e-3:
                kept.append(number)
        if len(kept) < self.majority:
            self.wrong("kept", f"{process}: {request.id} is kept by {kept} alone until {ends:.6f}")

    def _check_delays(self, process: Process, request: Any) -> None:
        if self._breaks_of(request):
            return  # it came to hold although it was broken: perhaps after those that came next
        delays = self._delays.setdefault(base_of(request), {})
        moment = self.world.time
        for id, (owner, mode, ends, delay) in delays.items():
            if id == request.id or owner == request.owner or {id, request.id} & self.excused:
                continue
            if mode == request.terms.mode == "shared" or id in self._released:
                continue
            early = ends + delay - moment
            if early > 1e-3:
                self.wrong("delay", f"{request.id} holds {early:.6f} s early after {id}")
        if request.terms.lock_delay:
            ends = process.true_time_of(request.place.deadline)
            delays[request.id] = request.owner, request.terms.mode, ends, request.terms.lock_delay

    def notices(self, node: int, data: bytes) -> None:
        """Be told of what a node says by itself."""
        for id, token in _GRANTED.findall(data):
            self.noticed.setdefault(id.decode(), {})[node] = int(token)
        for id, token in _BROKEN.findall(data):
            self.breaks.noticed(node, id.decode(), int(token))

    def hears(self, node: int) -> Callable[[Process, Command, float, Any], None]:
        """Return what is told of each reply of a node."""

        def on_reply(process: Process, command: Command, sent: float, reply: Any) -> None:
            if command.script not in ("vote", "unvote") or not isinstance(reply, list):
                return
            if command.id not in self._seen:
                self.breaks.answered(command)  # who holds goes by what a majority answers
            # A vote, and the request before it, are one record, whose deadline never comes nearer.
            if reply[0] not in (b"vote", b"waiting"):
                return
            left = int(reply[2] if reply[0] == b"vote" else reply[1]) / 1000
            deadline = sent + left - (left * 0.01 + 0.002)
            known = self.answers.setdefault(command.id, {})
            known[node] = max(known.get(node, 0.0), deadline)
            if reply[0] == b"vote":
                self.noticed.setdefault(command.id, {})[node] = int(reply[1])
            if reply[0] == b"vote" and reply[3] != b"v":
                self.confirmed.setdefault(command.id, set()).add(node)

        return on_reply

    def _check_deadline(self, process: Process, request: Any) -> None:
        if not request.place.token or process.boot() >= request.ends_at:
            return
        id = request.id
        if request.state is HELD and self._kept_until.get(id) != request.place.deadline:
            self._kept_until[id] = request.place.deadline
            self._check_kept(process, request)
            if self.keeps_delays:
                self._check_delays(process, request)
        if self._seen.get(id) == request.place.deadline:
            fine = self._fine_held if request.state is HELD else self._fine_waiting
            fine[id] = request.place.deadline
            return
        first = id not in self._seen
        self._seen[id] = request.place.deadline
        confirmed = set(self.confirmed.get(id, ()))
        noticed = self.noticed.get(id, {})
        confirmed.update(node for node, token in noticed.items() if token == request.place.token)
        answers = self.answers.get(id, {})
        known = sorted((answers.get(node, 0.0) for node in confirmed), reverse=True)
        most = known[self.majority - 1] if len(known) >= self.majority else 0.0
        if request.place.deadline > most + 1e-6:
            self.wrong(
                "deadline",
                f"{process}: {id} is believed for {request.place.deadline - most:.6f} s too long",
            )
        if first:
            self._check_token(request)
            self._check_passing(request)
        self._check_together(process, request)

    def _check_token(self, request: Any) -> None:
        """Who comes to hold has a larger token than all before that it excludes; its owner's are not.

        (A second hold of an owner whose first one no majority told of has a larger token, and its client
        may hear of it earlier.)
        """
        base = base_of(request)
        ledger = self.ledger(base)
        mine = (request.id, request.terms.mode, request.owner, request.place.token)
        same = self._first.setdefault((base, *mine[2:]), request.id)
        if self._breaks_of(request):
            self._late.add(request.id)
        excused = request.id in self.excused | self._late
        self.grants += 1
        # Of all that were granted before, and of the exclusive ones: the largest tokens.
        largest, exclusive = self._largest.get(base, (0, 0))
        if same != request.id:
            for other in () if self.forget_tokens else self._granted.get(base, ()):
                later = ledger.grants[other[0]] > ledger.grants[same] and other[3] >= mine[3]
                excluded = "exclusive" in (mine[1], other[1]) and other[2] != request.owner
                if later and excluded and not (excused or {same, other[0]} & self.excused):
                    self.wrong("token", f"{mine}, the token of {same}, after {other}")
            ledger.grants[request.id] = ledger.grants[same]
        else:
            ledger.number += 1
            ledger.grants[request.id] = ledger.number
            grows = mine[3] > (largest if mine[1] == "exclusive" else exclusive)
            for other in () if grows or self.forget_tokens else self._granted.get(base, ()):
                if "exclusive" not in (mine[1], other[1]) or other[3] < mine[3]:
                    continue
                if request.owner == other[2]:
                    # Of its owner's holds with larger tokens the first: another may have that one's token.
                    number = ledger.grants[request.id]
                    ledger.grants[request.id] = min(number, ledger.grants[other[0]])
                elif not excused and other[0] not in self.excused:
                    self.wrong("token", f"{mine} after {other}")
        self._granted.setdefault(base, []).append(mine)
        exclusive = max(exclusive, mine[3]) if mine[1] == "exclusive" else exclusive
        self._largest[base] = max(largest, mine[3]), exclusive

    def _check_passing(self, new: Any) -> None:
        base = base_of(new)
        asked = self._asked.get(new.id, 0.0)
        requests = [request for s in self._all_sessions() for request in s.requests.values()]
        here = [request for request in requests if base_of(request) == base]
        if any(one is not new and one.place.token and one.owner == new.owner for one in here):
            return  # an owner that holds gets in again
        for other in here:
            if other.state is not WAITING or not self._is_queued(base, other.id):
                self._queued.pop(other.id, None)
                continue
            since = self._queued.setdefault(other.id, self.world.time)
            if new.terms.mode == other.terms.mode == "shared" or asked < since + _LATER:
                continue
            passed = self._passed[other.id] = self._passed.get(other.id, 0) + 1
            if passed > _PASSES:
                self.wrong("passed", f"{other.id} waits since {since:.3f}, and {new.id} gets in")

    def _is_queued(self, base: str, id: str) -> bool:
        """Whether a majority of the nodes knows of a request now."""
        known = 0
        for server in self._servers:
            known += server.up and server.knows(base, id)
        return known >= self.majority

    def write(self, base: str, lease: Any, accepted: bool) -> None:
        """The order is not told of who came to hold although it was broken, and of who held for no turn."""
        id = lease._request.id
        told = id in self.ledger(base).grants and id not in self._late | self.excused
        if told and not self.forget_tokens:
            super().write(base, lease, accepted)

    def _check_together(self, process: Process, request: Any) -> None:
        """Excuse besides, for now, whose break is on its way."""
        always = self.excused
        requests = [one for s in self._all_sessions() for one in s.requests.values()]
        self.excused = always | {one.id for one in requests if self._breaks_of(one)}
        super()._check_together(process, request)
        self.excused = always

    def _breaks_of(self, request: Any) -> set[int]:
        """Return where an operator broke what it holds, if its client cannot know yet."""
        token = request.place.token
        first = self._first.get((base_of(request), request.owner, token), request.id)
        return self.breaks.on_their_way(request.id, token, of_owner=first != request.id)

    def entered(self, session: Any) -> None:
        """A client that is entered while a clock's step is not over cannot know of it."""
        if self.world.time < self.step_ends:
            self.unaware.add(id(session))

    def _after_turn(self, process: Process) -> None:
        asked = self._asked
        for session in self.sessions.get(process, ()):
            if not session.requests.keys() <= asked.keys():
                for request_id in session.requests:
                    asked.setdefault(request_id, self.world.time)
            if self.unaware and id(session) in self.unaware:
                self.excused.update(session.requests)
        super()._after_turn(process)

    def check_nothing_left(self, process: Process, session: Any) -> None:
        super().check_nothing_left(process, session)
        if tallies := session.backend.store._requests._tallies:
            self.wrong("leak", f"{process} still has tallies: {list(tallies)}")


def _token_broken(server: SimServer, base: str, id: bytes) -> int:
    """Return with which token an operator broke a request's vote last."""
    if server.votes is not None:
        return server.votes.names[f"{base}:state".encode()].broken[id.decode()]
    return int(server.db[f"{base}:broken".encode()].value._values[id])


class QuorumFaults(Faults):
    """Each fault strikes one node, or what lies between one node and one client."""

    simulation: QuorumSimulation

    def strike(self, name: str) -> None:
        sim = self.simulation
        node = self.random.randrange(len(sim.nodes))
        if name in (*_NODE, *_REFUSAL, *_CLOCK):
            faulty = [n for n, until in enumerate(sim.faulty_until) if until > self.world.time]
            if node not in faulty and len(faulty) >= (len(sim.nodes) - 1) // 2:
                node = self.random.choice(faulty)
        self.node = node
        self.network, self.server = sim.networks[node], sim.nodes[node]
        super().strike(name)

    def _log(self, text: str) -> None:
        super()._log(f"node {self.node}: {text}")

    def _faulty_for(self, length: float) -> None:
        until = self.simulation.faulty_until
        until[self.node] = max(until[self.node], self.world.time + length)

    def _restart(self, data: str) -> None:
        if not self.server.up:
            return
        delay = self.simulation.restart_delay
        away = self.random.choice((0.1, 0.5, 1.2)) * delay * self.random.uniform(0.3, 1.5)
        self._log(f"away for {away:.3f} s, then back, data: {data}")
        self._faulty_for(away + (1.1 * delay + 1.5 if data != "kept" else 0.5))
        self.network.stop_server()
        self.world.after(away, self._come_back, data)

    def _come_back(self, data: str) -> None:
        if self.node not in self.simulation.dead:
            super()._come_back(data)

    def _yields_lost(self) -> None:
        length, server = self._length(), self.server
        self._log(f"votes that are given back are refused for {length:.3f} s")
        server.refuses_yields = True
        self.world.after(length, setattr, server, "refuses_yields", False)

    def _node_cut(self) -> None:
        length = self._length()
        self._faulty_for(length)
        self._log(f"cut off from everybody for {length:.3f} s")
        paths = [self.network.path(process) for process in self.simulation.mains]
        for path in paths:
            path.out_blocked = path.in_blocked = True

        def heal() -> None:
            for path in paths:
                path.out_blocked = path.in_blocked = False
            self.network.released()

        self.world.after(length, heal)

    def _node_slow(self) -> None:
        length, slow = self._length(), self.random.choice((0.05, 0.4, 0.8))
        self._faulty_for(length)
        self._log(f"half of all messages take up to {slow} s, for {length:.3f} s")
        for process in self.simulation.mains:
            path = self.network.path(process)
            path.slow_share, path.slow = 0.5, slow
            self.world.after(length, setattr, path, "slow_share", 0.0)

    def _stall(self) -> None:
        length = self._length()
        self._faulty_for(length)
        self._log(f"it answers nobody for {length:.3f} s")
        self.network.stall(self.world.time + length)

    def _refuse(self, how: str) -> None:
        self._faulty_for(0.5)
        super()._refuse(how)

    def _read_only(self) -> None:
        self._faulty_for(0.5)
        super()._read_only()

    def _out_of_memory(self) -> None:
        self._faulty_for(0.5)
        super()._out_of_memory()

    def _clock_back(self) -> None:
        self._step(-self.random.choice((0.01, 0.3, 3.0)))

    def _clock_forward(self) -> None:
        self._step(_STEP)

    def _step(self, by: float) -> None:
        self._log(f"its clock steps by {by:+} s")
        sim = self.simulation
        self._faulty_for(1.1 * sim.restart_delay + 1.0)
        if by > 0:
            checkers = sim.checkers
            checkers.step_ends = max(checkers.step_ends, sim.faulty_until[self.node])
        self.server.offset += by

    def _crash(self) -> None:
        process = self._someone()
        power = self.random.random() < 0.3
        self._log(f"{process} {'loses power' if power else 'is killed'}")
        process.crash()
        sim = self.simulation
        del sim.mains[process]
        sim.checkers.sessions.pop(process, None)
        bodies = sim.checkers.bodies
        bodies[:] = [body for body in bodies if body.process is not process]
        for network in sim.networks:
            for conn in network.connections_of(process):
                if power:
                    conn.open = False
                else:
                    conn.close_by_kernel()
        self.world.after(self.random.uniform(0.01, 1.0), sim._start, f"{process.name}'")


class QuorumSimulation(Simulation):
    """One seed with several nodes."""

    keeps_records = False
    checkers: QuorumCheckers
    #: One seed of so many runs the scripts; in the others they are plain Python.
    lua_share = 40

    heeds_hints = False
    long_share = 0

    def __init__(
        self,
        seed: int,
        prepare: Callable[[Simulation], None] | None = None,
        *,
        nodes: int | None = None,
    ) -> None:
        super().__init__(seed)
        numbers = count(1)
        ids = SimpleNamespace(token_hex=lambda size: f"{next(numbers):0{2 * size}x}")
        self.patch(trust, "secrets", ids)
        rng = self.random
        self.world.after_turn.clear()
        number = nodes or rng.choice((3, 3, 3, 5))
        self.nodes = [SimServer(self.world, f"node{i}") for i in range(number)]
        for node in self.nodes:
            node.offset += rng.uniform(-0.02, 0.02)
            node.notifies = self.style.notifies
        self.networks = [Network(self.world, node) for node in self.nodes]
        self.server, self.network = self.nodes[0], self.networks[0]
        self.checkers = QuorumCheckers(self.world, self.nodes)
        for i, network in enumerate(self.networks):
            network.on_reply = self.checkers.hears(i)
            network.on_message = partial(self.checkers.notices, i)
            network.longest_late = 2.0
        faults: list[str] = []
        for group in (_BETWEEN, _PROCESS, _NODE, _REFUSAL):
            if rng.random() < (0.3 if group is _REFUSAL else 0.6):
                faults += rng.sample(group, rng.randint(1, 3))
        if rng.random() < 0.25:
            faults.append(rng.choice(_CLOCK))
        # Drawn apart, so that what comes and goes stays what it was for a seed.
        lasting = random.Random(f"{seed} lasting")
        self.style = replace(
            self.style,
            forgetful=True,
            semaphores=0.0,
            faults=tuple(faults),
            retention=3600.0,
            named_owners=lasting.choice((0.0, 0.2, 0.5)),
            breaks=lasting.choice((0.02, 0.02, 0.2)),
        )
        #: Nodes that die, when, and never come back.
        self.deaths: dict[int, float] = {}
        #: By how much clocks are wrong all the time.
        self.wrong_clocks: dict[int, float] = {}
        minority = (number - 1) // 2
        if lasting.random() < 0.35:
            dying = lasting.sample(range(number), lasting.randint(1, minority))
            self.deaths = {node: lasting.choice((0.0, lasting.uniform(0.5, 3.0))) for node in dying}
        if lasting.random() < 0.35:
            wrong = lasting.sample(range(number), lasting.randint(1, minority))
            self.wrong_clocks = {node: lasting.choice(_WRONG) for node in wrong}
        if lasting.random() < 0.2:
            self.style.faults += ("yields_lost",)
        if lasting.random() < 0.1:
            self.be_steady()
        self.dead: set[int] = set()
        self.faulty_until = self.checkers.faulty_until
        if prepare is not None:
            prepare(self)
        if seed % self.lua_share and not any(node.patches for node in self.nodes):
            # No Lua: half of a seed's time. Without keys there are no events of keys.
            for node in self.nodes:
                node.votes, node.notifies = Node(), False
        self.restart_delay = max(*self.style.ttls, _LONGEST_EXTENSION)
        for wrong_one, by in self.wrong_clocks.items():
            self.nodes[wrong_one].offset += by
        for dying_one, when in self.deaths.items():
            self.world.at(when, self._die, dying_one)
        forgets = "restart_empty" in self.style.faults
        self.checkers.keeps_delays = not {"restart_empty", *_CLOCK} & set(self.style.faults)
        self.checkers.forget_tokens = forgets and max(self.wrong_clocks.values(), default=0.0) > 0

    def be_steady(self) -> None:
        """Let clients come and go for long, and little else go wrong: who is passed then, starves."""
        self.style = replace(
            self.style, faults=("restart_client",), hold=0.01, think=0.02, names=1, delays=(0.0,)
        )
        self.chaos_ends = 9.0

    def _die(self, node: int) -> None:
        self.world.log(f"fault: node {node} dies, for good")
        self.dead.add(node)
        self.faulty_until[node] = float("inf")
        self.networks[node].stop_server()

    def make_store(self, process: Process, label: str, **options: Any) -> QuorumBackend:
        sources = [SimSource(network, process) for network in self.networks]
        return QuorumBackend(
            sources,
            Settings(**options),
            restart_delay=self.restart_delay,
            described="simulated quorum",
            label=label,
        )

    def strike(self, name: str) -> None:
        QuorumFaults(self).strike(name)

    def _watch_for_idle(self) -> None:
        pass  # who goes first may have to be asked for, node by node; liveness is looked at

    def _sweep(self) -> None:
        for node in self.nodes:
            if node.up:
                node.sweep()
        self.world.after(self.random.uniform(0.05, 0.5), self._sweep)

    def calm_down(self) -> None:
        alive = next(n for n in range(len(self.nodes)) if n not in self.dead)
        self.server, self.network = self.nodes[alive], self.networks[alive]
        super().calm_down()
        for number, (node, network) in enumerate(zip(self.nodes, self.networks, strict=True)):
            node.refuses = None
            node.read_only = node.out_of_memory = node.refuses_yields = False
            network.duplicate_share = 0.0
            if not node.up and number not in self.dead:
                node.restart("kept")
            for path in network.paths.values():
                path.calm()
            network.released()

    def _check_end(self) -> None:
        for node, server in enumerate(self.nodes):
            if node not in self.dead:
                self.server, self.network = server, self.networks[node]
                super()._check_end()
