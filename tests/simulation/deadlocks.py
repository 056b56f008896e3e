"""Programs that deadlock: tasks of several clients take names inside of each other, in any order.

Meanwhile they leave, are cancelled, lose and break; messages get lost, processes stop and die. An oracle
knows all requests by their ids, each task's open blocks, and what the server had at every moment.

false       who gets DeadlockError was in exactly that cycle, by request ids and tokens, when the second
            pass began; where connections fail, at some moment since the first one began
found       a cycle that nothing disturbs lasts no longer than ``deadlock_after`` and a second
victim      a cycle has one victim, its youngest request; its task gets the error, with that cycle
leak        nothing that was told of a wait is left on the client's side
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiodlock
from aiodlock import _deadlocks
from aiodlock._cycles import Cycle
from aiodlock._lease import Lease
from aiodlock._model import IMPATIENT
from aiodlock._request import WAITING, Request
from aiodlock._session import Session
from aiodlock._telling import Telling

from .checkers import Name, Record, Waiter, base_of
from .memory import MachineSimulation
from .scenario import Faults, SimClient, Simulation
from .world import Process, Wrong

if TYPE_CHECKING:
    _Base = Simulation
else:
    _Base = object

#: Which share of the turns takes several names.
_SHARE = 0.85
#: A cycle is found so much later than ``deadlock_after``, in seconds.
_WITHIN = 1.0
#: How often cycles are looked for. One may be this much older than it is known to be.
_LOOKS_EVERY = 0.05
#: When clocks disagree, the youngest request by those clocks may have to look again. So it has when a name
#: is no longer held for two clients by one ``owner``: of such holders only one is told.
_LATER = 2.0
#: A connection that breaks is noticed and replaced within so many seconds.
_RECONNECTED = 20.0
_CLOCKS = ("clock_back", "clock_forward")
_STOPS = ("pause", "sleep")
#: What does not keep a client from its server.
_HARMLESS = ("duplicate", "crash", "restart_client", "snapshot")
_EPOCH = 1_700_000_000.0

#: From which waiting request to which one, and by which holder's token; 0 if it stands in front.
_Edge = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Fact:
    """A request that began to wait: what its task is inside of stays as it is until the wait ends."""

    id: str
    process: Process
    base: str
    task: asyncio.Task[Any] | None
    patient: bool
    named: bool
    looked_for: bool
    #: By the wall clock of its machine, in microseconds.
    arrived: int
    inside: frozenset[tuple[str, int]]

    @property
    def age(self) -> tuple[int, str]:
        return self.arrived, self.id


@dataclass(slots=True)
class _Step:
    """What one task takes inside of what it has: by a block, as a bare lease, or as a multilock. Or by a
    block of a generator, which another task may close."""

    way: str
    names: tuple[str, ...]
    mode: str
    timeout: float | None
    owner: str | None
    linger: float
    #: How many places a semaphore has; 0 for a lock.
    limit: int


class Oracle:
    """Mutable state: ``facts`` (by request id), ``blocks`` (of each task), ``history`` (per base: since
    when the server has had what), ``edges`` (since when each has been seen), ``disturbed_until`` (per
    process), ``victims`` (of which cycle, by request ids), ``expected`` (by task: what it is to get),
    ``left`` (since when a task's block has been left by another task) and ``released`` (and nothing else
    of that task holds the lease), ``_reached`` (when the server last heard each request ask)."""

    def __init__(self, simulation: _Deadlocks) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.checkers = simulation.checkers
        self.facts: dict[str, Fact] = {}
        self.blocks: dict[asyncio.Task[Any], list[tuple[str, int]]] = {}
        self.history: dict[str, tuple[list[float], list[tuple[int, Name]]]] = {}
        self.edges: dict[_Edge, float] = {}
        self.disturbed_until: dict[Process, float] = {}
        self.victims: dict[frozenset[str], str] = {}
        self.expected: dict[asyncio.Task[Any], Cycle] = {}
        self.left: dict[tuple[asyncio.Task[Any], tuple[str, int]], float] = {}
        self.released: dict[tuple[asyncio.Task[Any], tuple[str, int]], float] = {}
        self.always_disturbed = False
        self._reached: dict[str, float] = {}
        #: When the passes of a client's latest look began.
        self._passes: dict[Process, list[float]] = {}
        simulation.server.executed.append(self._executed)
        simulation.server.lost_data.append(self._lost_data)
        self.world.after_turn.append(self._after_turn)

    # -- what happens ------------------------------------------------------------------------------

    def _executed(self, command: Any, reply: Any) -> None:
        if command.script == "acquire":
            self._reached[command.id] = self.world.time
        if command.script in ("acquire", "extend", "leave", "break"):
            self._remember(command.base)

    def _lost_data(self) -> None:
        for base in list(self.history):
            self._remember(base)

    def _remember(self, base: str) -> None:
        if ":lock:" not in base and ":semaphore:" not in base:
            return
        moments, states = self.history.setdefault(base, ([], []))
        offset = self.simulation.server.offset
        moments.append(self.world.time)
        states.append((round(offset * 1000), self.checkers.ledger(base).known))

    def _after_turn(self, process: Process) -> None:
        for session in self.checkers.sessions.get(process, ()):
            for request in session.requests.values():
                if request.state is WAITING and request.id not in self.facts:
                    self._check_age(process, request)
                    self.facts[request.id] = self._fact_of(process, session, request)

    def _check_age(self, process: Process, request: Request) -> None:
        """It asked before the server heard it: who saw it there, and asks then, is younger."""
        since_heard = self.world.time - self._reached[request.id]
        if process.boot() - request.asked_at < since_heard * 0.98 - 0.0005:  # clocks are slewed
            raise Wrong("victim", f"{request} has waited for {since_heard:.4f} s, and is younger")

    def _fact_of(self, process: Process, session: Session, request: Request) -> Fact:
        task = request.task() if request.task is not None else None
        return Fact(
            request.id,
            process,
            base_of(request),
            task,
            request.patient,
            request.options.owner is not None,
            session.deadlocks is not None,
            int((self.simulation.wall(process) - (process.boot() - request.asked_at)) * 1e6),
            frozenset(self.blocks.get(task, ()) if task is not None else ()),
        )

    @contextmanager
    def inside(self, *leases: Lease) -> Iterator[None]:
        """The current task is in a block of these."""
        task = asyncio.current_task()
        assert task is not None
        entered = [_block_of(lease) for lease in leases]
        self.blocks.setdefault(task, []).extend(entered)
        for one in entered:
            self.left.pop((task, one), None)
            self.released.pop((task, one), None)
        try:
            yield
        finally:
            for one in entered:
                self.blocks[task].remove(one)

    def leaves(self, task: asyncio.Task[Any], lease: Lease) -> None:
        """Another task begins to leave a block of this one, which may be waiting inside."""
        one = _block_of(lease)
        if self.blocks[task].count(one) > 1:
            return  # it is in another block of that lease
        self.left[task, one] = self.world.time
        if len(lease._request.handles) == 1:
            self.released[task, one] = self.world.time

    def disturbed(self, process: Process, until: float) -> None:
        self.disturbed_until[process] = max(until, self.disturbed_until.get(process, 0.0))

    # -- what is true ------------------------------------------------------------------------------

    def _at(self, base: str, moment: float) -> tuple[int, Name] | None:
        """Return what the server had of a name then, with its clock in milliseconds."""
        moments, states = self.history.get(base, ([], []))
        index = bisect_right(moments, moment) - 1
        if index < 0:
            return None
        offset, name = states[index]
        return int(moment * 1000) + offset, name

    def stands(self, cycle: Cycle, moment: float) -> str:
        """Return why the cycle does not stand at a moment; an empty string if it does."""
        following = (*cycle.edges[1:], cycle.edges[0])
        for edge, after in zip(cycle.edges, following, strict=True):
            mine, others = self.facts.get(edge.wait.id), self.facts.get(after.wait.id)
            if mine is None or others is None:
                return f"nobody knows {edge.wait.id} or {after.wait.id}"
            found = self._at(mine.base, moment)
            if found is None or mine.id not in found[1].waiters:
                return f"{mine.id} is not queued"
            if not mine.patient:
                return f"{mine.id} has a timeout"
            now, name = found
            waiter = name.waiters[mine.id]
            for queued in edge.queued:
                ahead = [w for w in _ahead(name, waiter) if _owner_of(w) == queued.owner]
                ahead = [w for w in ahead if self._is_patient(w) and _conflict(waiter, w)]
                if not ahead:
                    return f"{queued.owner} is not in front of {waiter.id}"
                waiter = ahead[0]
            holders = [r for r in name.live(now) if _conflict(waiter, r)]
            if edge.holder.token not in [r.token for r in holders]:
                return f"{edge.holder.token} does not block {waiter.id}"
            block = mine.base, edge.holder.token
            ended = (
                math.inf
                if others.task is None
                else self.released.get((others.task, block), math.inf)
            )
            if block not in others.inside or moment >= ended:
                return f"the task of {others.id} is not in a block with {edge.holder.token}"
        return ""

    def _is_patient(self, waiter: Waiter) -> bool:
        fact = self.facts.get(waiter.id)
        if fact is None:  # its client has not heard yet that it waits; a task's id tells it
            return waiter.owner.startswith("t") and not waiter.owner.endswith(IMPATIENT)
        return fact.patient

    def moments(self, first: float, last: float) -> list[float]:
        found = {first, last}
        for moments, _ in self.history.values():
            found.update(moments[bisect_right(moments, first) : bisect_right(moments, last)])
        return sorted(found)

    # -- who gets the error ------------------------------------------------------------------------

    def pass_begins(self, process: Process, *, first: bool) -> None:
        if first:
            self._passes[process] = []
        self._passes[process].append(self.world.time)

    def hurt(self, process: Process, request: Request, cycle: Cycle) -> None:
        """A request is told that it is in a cycle."""
        began, *later = self._passes[process]
        strict = not self.simulation.style.faults
        moments = later[-1:] or [began] if strict else self.moments(began, self.world.time)
        reasons = [self.stands(cycle, moment) for moment in moments]
        if all(reasons):
            self.checkers.wrong("false", f"{request.id}: {reasons[-1]}: {cycle.words()}")
        ids = frozenset(edge.wait.id for edge in cycle.edges)
        if ids in self.victims:
            self.checkers.wrong(
                "victim", f"{request.id} after {self.victims[ids]}: {cycle.words()}"
            )
        self.victims[ids] = request.id
        mine = self.facts[request.id]
        for edge in cycle.edges:
            fact = self.facts[edge.wait.id]
            # Both clocks were read, and rounded.
            if fact is not mine and fact.arrived > mine.arrived + 2:
                self.checkers.wrong("victim", f"{request.id} is older than {fact.id}")
        if mine.task is not None:
            self.expected[mine.task] = cycle

    def got(self, error: aiodlock.DeadlockError) -> None:
        """The current task has got the error."""
        task = asyncio.current_task()
        cycle = None if task is None else self.expected.pop(task, None)
        if cycle is None or cycle.members() != error.cycle:
            self.simulation.alarm = Wrong("victim", f"{task} got {error!r}, and not {cycle}")

    # -- what has to be found ----------------------------------------------------------------------

    def look(self) -> None:
        """Raise if a cycle has lasted for too long."""
        seen = set(self._promised_edges())
        moment = self.world.time
        self.edges = {edge: self.edges.get(edge, moment) for edge in seen}
        patience = self.simulation.deadlock_after + _WITHIN + _LOOKS_EVERY
        if self.simulation.clocks_differ or self.simulation.style.named_owners:
            patience += _LATER
        old = [edge for edge, since in self.edges.items() if moment - since > patience]
        if not old:
            return
        calm = {id for id in self.facts if self._is_calm(self.facts[id].process, patience)}
        left = _without_ends([e for e in old if e[0] in calm and e[1] in calm])
        if left:
            self.checkers.wrong("found", f"a cycle is older than {patience:.2f} s: {sorted(left)}")

    def _is_calm(self, process: Process, patience: float) -> bool:
        if self.always_disturbed:
            return False
        until = self.disturbed_until.get(process, -_LATER - patience)
        return process.running and self.world.time - until > patience + _LATER

    def _promised_edges(self) -> Iterator[_Edge]:
        """Yield the edges of this moment that the library promises to see."""
        told_of: dict[tuple[str, int], list[Fact]] = {}
        waiting: list[tuple[Fact, Name, int]] = []
        for base in self.history:
            found = self._at(base, self.world.time)
            assert found is not None
            now, name = found
            for waiter in name.waiters.values():
                fact = self.facts.get(waiter.id)
                if fact is None or fact.process.dead or now >= waiter.deadline:
                    continue
                if not fact.patient or fact.task is None or fact.task.done():
                    continue
                waiting.append((fact, name, now))
                if fact.looked_for:
                    for block in fact.inside:
                        if (fact.task, block) not in self.left:
                            told_of.setdefault(block, []).append(fact)
        for fact, name, now in waiting:
            mine = name.waiters[fact.id]
            for record in name.live(now):
                if _conflict(mine, record) and not _is_hidden(record, name):
                    for other in told_of.get((fact.base, record.token), ()):
                        yield fact.id, other.id, record.token
            for ahead in _ahead(name, mine):
                known = self.facts.get(ahead.id)
                if known is None or not known.patient or known.named:
                    continue
                if _conflict(mine, ahead) and now < ahead.deadline:
                    yield fact.id, ahead.id, 0


def _block_of(lease: Lease) -> tuple[str, int]:
    return base_of(lease._request), lease.token


def _ahead(name: Name, waiter: Waiter) -> list[Waiter]:
    order = list(name.waiters.values())
    return order[: order.index(waiter)]


def _conflict(one: Waiter | Record, other: Waiter | Record) -> bool:
    if one.mode[1:]:  # a semaphore, with so many places
        return one.mode == "s1"
    return one.owner != other.owner and "x" in (one.mode, other.mode)


def _is_hidden(record: Record, name: Name) -> bool:
    """Whether another client holds the name for the same owner, too."""
    return any(
        other.owner == record.owner and other.client != record.client
        for other in name.holders.values()
    )


def _owner_of(waiter: Waiter) -> str:
    """Return the owner as it is told."""
    named = {quote(name, safe=""): name for name in _OWNERS}
    return named.get(waiter.owner[1:], waiter.owner[1:])


def _without_ends(edges: list[_Edge]) -> list[_Edge]:
    """Leave out edges that lead nowhere, until only cycles, and what lies between them, are left."""
    while True:
        begin, end = {edge[0] for edge in edges}, {edge[1] for edge in edges}
        left = [edge for edge in edges if edge[1] in begin and edge[0] in end]
        if len(left) == len(edges):
            return left
        edges = left


_OWNERS = ("ann", "bob x")


class _DeadlockFaults(Faults):
    """Notes which processes a fault keeps from the server, and until when."""

    simulation: _Deadlocks

    def strike(self, name: str) -> None:
        self._struck: set[Process] = set()
        self._lasts = 0.0
        super().strike(name)
        if name in _HARMLESS:
            return
        oracle, until = self.simulation.oracle, self.world.time + self._lasts
        if name in _STOPS:
            until += 1.0
        else:
            until += _RECONNECTED
        for process in self._struck or self.world.processes:
            oracle.disturbed(process, until)

    def _someone(self) -> Process:
        process = super()._someone()
        self._struck.add(process)
        return process

    def _length(self) -> float:
        length = super()._length()
        self._lasts = max(self._lasts, length)
        return length


class _Deadlocks(_Base):
    """Mutable state besides: ``chance`` (draws of its own), ``oracle``, ``alarm`` (found inside a task)."""

    keeps_records = False

    long_share = 0

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        self.chance = chance = random.Random(f"{seed} deadlocks")
        super().__init__(seed)
        style = self.style
        calm = chance.random() < 0.4
        self.style = replace(
            style,
            processes=chance.choice((2, 2, 3)),
            tasks=chance.choice((2, 2, 3)),
            names=chance.choice((2, 2, 3)),
            semaphores=0.0,
            shared=chance.choice((0.0, 0.0, 0.3, 0.5)),
            cancels=chance.choice((0.0, 0.0, 0.1, 0.3)),
            named_owners=chance.choice((0.0, 0.0, 0.3)),
            breaks=chance.choice((0.0, 0.02, 0.1)),
            hold=chance.choice((0.02, 0.1, 0.3)),
            think=chance.choice((0.005, 0.02, 0.1)),
            delays=style.delays[:1],
            pause_between_faults=chance.choice((0.5, 1.0, 2.0)),
            forgetful=style.forgetful and not calm,
            faults=() if calm else tuple(f for f in style.faults if f not in _CLOCKS),
        )
        if calm:
            self.checkers.forgetful = False
        self.chaos_ends = chance.uniform(4.0, 7.0)
        self.deadlock_after = chance.choice((0.05, 0.1, 0.3, 1.0, 2.0))
        #: Of how many processes nobody looks for deadlocks.
        self.blind_share = chance.choice((0.0, 0.0, 0.0, 0.3))
        #: By how many seconds a machine's wall clock is wrong.
        self.clocks_differ = chance.random() < 0.2
        self.skews: dict[Process, float] = {}
        #: How often a wait has a timeout, and a lease no block.
        self.timeouts = chance.choice((0.0, 0.1, 0.4))
        self.bares = chance.choice((0.0, 0.0, 0.2))
        #: How often a block is a generator's, which another task may close.
        self.generators = chance.choice((0.0, 0.0, 0.3))
        self.multilocks = chance.choice((0.0, 0.2))
        self.lingers = chance.choice((0.0, 0.0, 0.3))
        #: How many places semaphores have, and how often one is taken instead of a lock.
        self.limit = chance.choice((1, 1, 2))
        self.places = chance.choice((0.0, 0.0, 0.4))
        self.swallows = chance.choice((0.0, 0.3))
        self.gives_up = chance.choice((0.0, 0.0, 0.3))
        self.gives_up_within = 1.0
        #: How long users wait for what nobody finds.
        self.patience = chance.choice((0.5, 3.0))
        self.alarm: Wrong | None = None
        self.oracle = Oracle(self)
        self._observe()
        self.world.after_turn.append(self._raise_alarm)
        if prepare is not None:
            prepare(self)

    def _observe(self) -> None:
        simulation, oracle, run = self, self.oracle, _deadlocks.Asked._run

        async def run_one(asked: _deadlocks.Asked, asking: Any) -> Any:
            first = not hasattr(asked, "passes")
            asked.passes = True  # type: ignore[attr-defined]
            oracle.pass_begins(simulation.running(), first=first)
            return await run(asked, asking)

        tell = Telling.deadlock

        def deadlock(telling: Telling, request: Request, cycle: Cycle) -> None:
            tell(telling, request, cycle)
            simulation.outcomes["deadlocks"] = simulation.outcomes.get("deadlocks", 0) + 1
            try:
                oracle.hurt(simulation.running(), request, cycle)
            except Wrong as wrong:  # to the library it would be a probe that failed
                simulation.alarm = simulation.alarm or wrong

        self.patch(_deadlocks.Asked, "_run", run_one)
        self.patch(Telling, "deadlock", deadlock)
        clock = SimpleNamespace(time=lambda: self.wall(self.running()))
        self.patch(_deadlocks, "time", clock)

    def running(self) -> Process:
        process = self.world.current
        assert process is not None
        return process

    def wall(self, process: Process) -> float:
        """Return the wall clock of a process."""
        skew = self.skews.get(process)
        if skew is None:
            limit = 5.0 if self.clocks_differ else 0.002
            skew = self.skews[process] = self.chance.uniform(-limit, limit)
            skew -= process.boot() - self.world.time  # at true time 0 it is the epoch and the skew
            self.skews[process] = skew
        return _EPOCH + skew + process.boot()

    def _raise_alarm(self, process: Process) -> None:
        # In a task it would be one exception among others.
        if self.alarm is not None:
            raise self.alarm

    def client_options(self, process: Process) -> dict[str, Any]:
        blind = self.chance.random() < self.blind_share
        return {"deadlock_after": None if blind else self.deadlock_after}

    def strike(self, name: str) -> None:
        _DeadlockFaults(self).strike(name)

    def _watch_for_idle(self) -> None:
        super()._watch_for_idle()

        def look() -> None:
            self.oracle.look()
            self.world.after(_LOOKS_EVERY, look)

        look()

    async def _until_nothing_is_left(self, session: Any) -> None:
        await super()._until_nothing_is_left(session)
        give_up = self.world.time + 10.0
        while session.backend.keeper.places and self.world.time < give_up:
            await asyncio.sleep(0.05)
        looks = session.deadlocks
        if looks is not None:
            record = looks._record
            left = (looks._short, looks._long, looks._inside_of, record.waits)
            if any(left):
                self.alarm = Wrong("leak", f"waits are known still: {left}")
            while record._running and self.world.time < give_up + 10.0:
                await asyncio.sleep(0.05)
            if record._running or record._named or record._maybe_named:
                self.alarm = Wrong("leak", f"a record is told still: {record._named}")

    # -- what a task does --------------------------------------------------------------------------

    async def _turn(self, process: Process, client: SimClient) -> None:
        chance = self.chance
        blind = client._core.session is not None and client._core.session.deadlocks is None
        if chance.random() > _SHARE:
            await self._limited(super()._turn(process, client))
            return
        steps = [self._step() for _ in range(chance.choice((2, 2, 3)))]
        whole = all(step.way == "block" and step.owner is None and step.limit < 2 for step in steps)
        program = self._take(client, steps)
        if whole and not blind and not self.blind_share:
            await program
        else:
            await self._limited(program)

    async def _limited(self, turn: Any) -> None:
        """What nobody finds ends by the user's own patience."""
        try:
            async with asyncio.timeout(self.deadlock_after + self.patience):
                await turn
        except TimeoutError as error:
            if isinstance(error, aiodlock.LockError):
                raise

    def _step(self) -> _Step:
        chance = self.chance
        names = [f"n{number}" for number in range(self.style.names)]
        way = "block"
        if chance.random() < self.bares:
            way = "bare"
        elif chance.random() < self.multilocks:
            way = "multilock"
        elif chance.random() < self.generators:
            way = "generator"
        return _Step(
            way,
            tuple(chance.sample(names, 2 if way == "multilock" else 1)),
            "shared" if chance.random() < self.style.shared else "exclusive",
            chance.choice((0.1, 0.5, 3.0)) if chance.random() < self.timeouts else None,
            chance.choice(_OWNERS) if chance.random() < self.style.named_owners else None,
            chance.choice((0.05, 0.5)) if chance.random() < self.lingers else 0.0,
            self.limit if chance.random() < self.places else 0,
        )

    async def _take(self, client: SimClient, steps: list[_Step]) -> None:
        chance = self.chance
        if not steps:
            await asyncio.sleep(chance.expovariate(1 / self.style.hold))
            return
        step, *rest = steps
        try:
            if step.way == "multilock":
                async with client.multilock(*step.names, timeout=step.timeout) as leases:
                    with self.oracle.inside(*leases.values()):
                        await self._go_on(client, rest)
                return
            lock: aiodlock.Lock | aiodlock.Semaphore = self._lock_of(client, step)
            if step.limit:
                lock = client.semaphore(f"s{step.names[0]}", step.limit, timeout=step.timeout)
            if step.way == "bare":
                lease = await lock.acquire()
                try:
                    await self._go_on(client, rest)
                finally:
                    await lease.release()
                return
            if step.way == "generator":
                await self._by_a_generator(client, lock, rest)
                return
            async with lock as lease:
                with self.oracle.inside(lease):
                    await self._go_on(client, rest)
        except aiodlock.DeadlockError as error:
            if error.cycle and not getattr(error, "was_looked_at", False):
                error.was_looked_at = True  # type: ignore[attr-defined]
                self.oracle.got(error)
            if chance.random() > self.swallows:
                raise
            await asyncio.sleep(chance.expovariate(1 / self.style.hold))

    async def _by_a_generator(
        self, client: SimClient, lock: aiodlock.Lock | aiodlock.Semaphore, rest: list[_Step]
    ) -> None:
        """Another task may close the block while this one waits for more."""
        task = asyncio.current_task()
        assert task is not None

        async def leases() -> AsyncGenerator[Lease, None]:
            async with lock as lease:
                yield lease

        async def leave_early() -> None:
            with suppress(aiodlock.LockError):
                try:
                    length = self.deadlock_after + self.style.hold
                    await asyncio.sleep(self.chance.uniform(0.0, 2.0) * length)
                    self.oracle.leaves(task, lease)
                finally:
                    await found.aclose()
                async with lock as again:  # perhaps the very lease, if it lingers
                    with self.oracle.inside(again):
                        await asyncio.sleep(self.chance.expovariate(1 / self.style.hold))

        found = leases()
        lease = await anext(found)
        with self.oracle.inside(lease):
            leaving = asyncio.create_task(leave_early())
            try:
                await self._go_on(client, rest)
            finally:
                leaving.cancel()
                await asyncio.wait([leaving])

    async def _go_on(self, client: SimClient, rest: list[_Step]) -> None:
        """Take what is left; some users have no patience for it, and go on with what they have."""
        chance = self.chance
        await asyncio.sleep(chance.expovariate(1 / self.style.hold))
        limit = None
        if rest and chance.random() < self.gives_up:
            limit = self.deadlock_after + chance.uniform(0.0, self.gives_up_within)
        try:
            async with asyncio.timeout(limit):
                await self._take(client, rest)
        except TimeoutError as error:
            if isinstance(error, aiodlock.LockError):
                raise
            await asyncio.sleep(chance.expovariate(1 / self.style.hold))

    def _lock_of(self, client: SimClient, step: _Step) -> aiodlock.Lock:
        options: dict[str, Any] = {
            "ttl": self.chance.choice(self.style.ttls),
            "timeout": step.timeout,
            # A loss cancels the task that has entered, which another task's leaving does not take back.
            "on_lost": "flag"
            if step.way == "generator"
            else self.chance.choice(("cancel", "cancel", "flag")),
        }
        if step.owner is not None:
            options["owner"] = step.owner
        if step.linger:
            options["linger"] = step.linger
        pair = client.rwlock(step.names[0], **options)
        return pair.read if step.mode == "shared" else pair.write


class Deadlocks(_Deadlocks, MachineSimulation):
    """One seed on the machine."""


class DeadlocksOnRedis(_Deadlocks, Simulation):
    """One seed on the scripts."""
