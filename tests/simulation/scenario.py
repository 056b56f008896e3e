"""What one seed does: who locks what, what goes wrong meanwhile, and a quiet end with the last checks."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import anyio._backends._asyncio
import fakeredis.model._stream

import aiodlock
import aiodlock._clock
from aiodlock import AcquireTimeout, BackendError, ClientClosed, DeadlockError, LockLost, WouldBlock
from aiodlock._lease import Lease
from aiodlock._lock import Acquirable
from aiodlock.backends.kept_backend import KeptBackend
from aiodlock.backends.kept_place import KeptPlace
from aiodlock.backends.redis import RedisBackend
from aiodlock.backends.redis.quorum import QuorumBackend
from aiodlock.backends.redis.settings import Settings
from aiodlock.backends.sources import Opener

from .checkers import Body, Checkers
from .hints import Hints
from .network import Network, SimSource
from .onces import Onces, attach
from .server import SimServer
from .world import Process, Scope, World

#: Until when the faults and the new requests go on, and how long the quiet afterwards may take.
_CHAOS = (2.0, 5.0)
#: A dead connection is noticed after 1 to 16 s (a subscription after 15 s), connecting pauses up to 2 s.
_SERVED_WITHIN = 60.0
_READS_EVERY = (0.002, 0.01, 0.03)

_T = TypeVar("_T")


@dataclass
class Style:
    """What a seed is like: drawn once, so that seeds differ more than their parts do."""

    forgetful: bool
    processes: int
    tasks: int
    names: int
    ttls: tuple[float, ...]
    waiter_ttl: float
    delays: tuple[float, ...]
    shared: float
    semaphores: float
    cancels: float
    named_owners: float
    breaks: float
    hold: float
    think: float
    faults: tuple[str, ...]
    pause_between_faults: float
    notifies: bool
    retention: float


_NETWORK = ("slow", "cut", "partition", "one_way", "mute", "stuck", "duplicate", "stall")
_PROCESS = ("pause", "pause", "sleep", "crash", "restart_client")
_SERVER = ("restart_kept", "flush_scripts", "loading", "read_only", "out_of_memory", "busy")


def draw_style(rng: random.Random) -> Style:
    forgetful = rng.random() < 0.3
    faults: list[str] = []
    if only_processes := rng.random() < 0.15:
        forgetful = False
        faults += rng.sample(_PROCESS, 2)
    for group in () if only_processes else (_NETWORK, _PROCESS, _SERVER):
        if rng.random() < 0.6:
            faults += rng.sample(group, rng.randint(1, 3))
    if forgetful:
        faults += rng.sample(
            ["restart_empty", "restart_older", "flush_data", "clock_forward"], rng.randint(1, 2)
        )
        faults += ["snapshot"] if "restart_older" in faults else []
    elif not only_processes and rng.random() < 0.2:
        faults.append("clock_back")
    ttl = rng.choice((0.3, 0.5, 1.0, 2.0))
    return Style(
        forgetful=forgetful,
        processes=rng.randint(2, 3),
        tasks=rng.randint(1, 3),
        names=rng.choice((1, 1, 1, 2)),
        ttls=(ttl,) if rng.random() < 0.5 else (ttl, 0.2, 1.5),
        waiter_ttl=rng.choice((0.3, 0.6, 1.0, 2.0)),
        delays=(0.0,) if rng.random() < 0.6 else (0.0, 0.2, 0.5),
        shared=rng.choice((0.0, 0.0, 0.3, 0.6)),
        semaphores=rng.choice((0.0, 0.0, 0.0, 0.4)),
        cancels=rng.choice((0.0, 0.1, 0.3)),
        named_owners=rng.choice((0.0, 0.0, 0.2)),
        breaks=0.02,
        hold=rng.choice((0.02, 0.1, 0.4)),
        think=rng.choice((0.02, 0.1, 0.5)),
        faults=tuple(faults),
        pause_between_faults=rng.choice((0.2, 0.5, 1.0)),
        notifies=rng.random() < 0.4,
        retention=rng.choice((1.0, 20.0, 3600.0)) if forgetful else rng.choice((20.0, 3600.0)),
    )


class SimClient(aiodlock.Client):
    """The library's client, which connects through the simulated network."""

    def __init__(self, simulation: Simulation, process: Process, **options: Any) -> None:
        super().__init__("memory://", **options)
        self._core.store = SimStore(self._core.store, simulation, process, options)


class SimStore:
    """Opens what the simulated network leads to; what it can is what ``memory://`` can."""

    def __init__(
        self, model: Opener, simulation: Simulation, process: Process, options: Mapping[str, Any]
    ) -> None:
        self.described, self.capabilities = model.described, model.capabilities
        self._simulation = simulation
        self._process = process
        self._options = options

    def open(self) -> KeptBackend:
        simulation, options = self._simulation, self._options
        simulation.clients += 1
        unavailable_after = options.get("unavailable_after", 30.0)
        store = simulation.make_store(
            self._process,
            f"{self._process}.{simulation.clients}",
            prefix=options.get("prefix", "aiodlock"),
            token_retention=options.get("token_retention", 3600.0),
            unavailable_after=unavailable_after,
        )
        return KeptBackend(store, unavailable_after=unavailable_after)


class Simulation:
    """One seed from its first event to its last check."""

    backend_class: type[RedisBackend] = RedisBackend
    #: Whether the store has records of successes, and holds.
    keeps_records = True
    #: Whether a client that was told is expected to act at once, by what one server says.
    heeds_hints = True
    #: What may end a turn.
    expected: tuple[type[BaseException], ...] = (
        AcquireTimeout,
        WouldBlock,
        LockLost,
        DeadlockError,
        ClientClosed,
        BackendError,
    )
    #: In which share of the seeds messages come together.
    reads_late = 0.35
    served_within = _SERVED_WITHIN
    #: One seed of so many is long, the others are brisk; 0: all are long.
    long_share = 4

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        self.seed = seed
        self.world = World(seed)
        self.random = self.world.random
        #: What users' code does besides; of its own, so that the schedules stay what they are.
        self.habits = random.Random(~seed)
        #: Which share of the turns is what users' code does besides a plain block.
        self.odd_turns = 0.12
        self.style = draw_style(self.random)
        self.make_world()
        self.network.on_reply = self.checkers.on_reply
        self.network.on_broken = self.checkers.on_broken
        # Drawn apart, so that the other seeds stay what they were.
        apart = random.Random(f"{seed} apart")
        if apart.random() < 0.1:
            self.style.faults += ("behind",)
            self.style.breaks = 0.2
        self.chaos_ends = self.random.uniform(*_CHAOS)
        #: Turns of tasks and faults, counted from 0; and those that are left out, to shorten a schedule.
        self.steps = 0
        self.skipped: frozenset[int] = frozenset()
        self.clients = 0
        self.done: list[asyncio.Task[None]] = []
        self.mains: dict[Process, asyncio.Task[None]] = {}
        self._closers: dict[Process, asyncio.Event] = {}
        self.stores: dict[str, int] = {}
        self.outcomes: dict[str, int] = {}
        #: Objects that all tasks of a client use.
        self.common: dict[tuple[SimClient, str], Acquirable] = {}
        self._patches: list[tuple[object, str, object]] = [
            (KeptPlace, "extend", _extend_for(self.checkers))
        ]
        turns = random.Random(f"{seed} turns")
        #: Messages that come in within so many seconds are read in one turn of a process's loop.
        self.reads_every = turns.choice(_READS_EVERY) if turns.random() < self.reads_late else 0.0
        #: Whether the loops' timers are those of uvloop.
        self.coarse_timers = random.Random(f"{seed} timers").random() < 0.25
        self.hints: Hints | None = Hints(self) if self.heeds_hints else None
        self.onces: Onces | None = attach(self) if self.keeps_records else None
        if prepare is not None:
            prepare(self)  # what is broken says by itself how long it needs
        elif self.long_share and seed % self.long_share:
            self.be_brisk()

    def be_brisk(self) -> None:
        """Take half of the time, with shorter pauses: that catches more faults per second of CPU time."""
        self.style = replace(
            self.style,
            think=self.style.think * 0.3,
            pause_between_faults=self.style.pause_between_faults * 0.5,
        )
        self.chaos_ends *= 0.5

    def make_world(self) -> None:
        """Make what lies beyond the processes: a server, the network, and who looks at them."""
        self.server = SimServer(self.world)
        self.server.notifies = self.style.notifies
        self.network = Network(self.world, self.server)
        self.checkers = Checkers(self.world, self.server, forgetful=self.style.forgetful)

    def make_store(
        self, process: Process, label: str, **options: Any
    ) -> RedisBackend | QuorumBackend:
        source = SimSource(self.network, process)
        return self.backend_class(source, Settings(**options), label=label)

    def patch(self, target: object, name: str, value: object) -> None:
        """Break something of the library, for this run."""
        self._patches.append((target, name, value))

    # -- the whole ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Raise Wrong when something promised does not hold."""
        world = self.world
        with self._everything_virtual():
            try:
                self._log_errors_are_failures()
                for number in range(self.style.processes):
                    self._start(f"p{number}")
                self._plan_fault()
                self._sweep()
                self._watch_for_idle()
                world.run_until(self.chaos_ends)
                self.calm_down()
                self._run_quiet()
                for warned in self._warnings:
                    self.checkers.wrong("failure", f"it was warned: {warned.message}")
            finally:
                for process in world.processes:
                    process.bury()

    def _watch_for_idle(self) -> None:
        """While connections are well, and long enough after they were not, no free name is kept waiting."""
        patience = self.style.waiter_ttl / 3 + 0.15 + 3 * self.reads_every
        well = set(self.style.faults) <= set(_PROCESS)
        settled = 0.0 if well else self.chaos_ends + 18.0

        def watch() -> None:
            # While nobody waits there is nothing to look at: the next waiter begins it again.
            again = self.checkers.check_idle(patience)
            self.checkers.on_waiter = None if again else begin
            if again:
                self.world.after(0.02, watch)

        def begin() -> None:
            self.checkers.on_waiter = None
            self.world.after(0.02, watch)

        self.world.at(settled, watch)

    def _run_quiet(self) -> None:
        world, checkers = self.world, self.checkers
        end = world.time + self.served_within
        served = world.run_until(end, self._all_done)
        if not served:
            left = [str(p) for p, main in self.mains.items() if not main.done()]
            checkers.wrong(
                "liveness", f"{left} not done {self.served_within} s after the last fault"
            )
        for process, main in self.mains.items():
            if not process.dead and main.exception() is not None:
                raise main.exception()  # type: ignore[misc]
        # What the dead left behind may last as long as its lease, delay and marker.
        longest = max(self.style.ttls) + max(self.style.delays) + self.style.waiter_ttl
        if self.onces is not None:
            longest += max(self.onces.habits.holds)
        world.run_until(world.time + 4 * longest + 10.0)
        self._check_end()

    def _all_done(self) -> bool:
        for main in self.mains.values():  # noqa: SIM110  (asked after each turn)
            if not main.done():
                return False
        return True

    def _check_end(self) -> None:
        checkers = self.checkers
        for process in self.mains:
            if process.dead:
                continue
            tasks = [repr(task.get_coro()) for task in asyncio.all_tasks(process.loop)]
            if tasks:
                checkers.wrong("leak", f"{process} still has tasks: {tasks}")
            if any(conn.open for conn in self.network.connections_of(process)):
                checkers.wrong("leak", f"{process} still has a connection")
        self.server.sweep()
        left = self.names_left()
        if left and "clock_back" not in self.style.faults:
            checkers.wrong("leak", f"keys are left: {left}")

    def names_left(self) -> list[str]:
        """Return the keys of names that somebody holds or waits for."""
        return self.server.names_left()

    @contextmanager
    def _everything_virtual(self) -> Iterator[None]:
        world = self.world
        before = random.getstate()

        def gettime(_: int) -> float:
            assert world.current is not None, "the library's clock was read outside of a process"
            return world.current.boot()

        server_time = SimpleNamespace(time=lambda: world.time + self.server.offset)
        with ExitStack() as stack:
            # Whoever listens inside: other tests read the log.
            stack.callback(logging.getLogger("aiodlock").filters.clear)
            stack.enter_context(_replaced(aiodlock._clock, "_gettime", gettime))
            stack.enter_context(_replaced(anyio._backends._asyncio, "CancelScope", Scope))
            stack.enter_context(_replaced(fakeredis.model._stream, "time", server_time))
            self._warnings = stack.enter_context(warnings.catch_warnings(record=True)) or []
            for target, name, value in self._patches:
                stack.enter_context(patch.object(target, name, value))
            warnings.simplefilter("always")
            random.seed(self.seed)
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                if collects:
                    gc.enable()
                random.setstate(before)

    def _log_errors_are_failures(self) -> None:
        self._logger = logging.getLogger("aiodlock")
        simulation = self

        def look(record: logging.LogRecord) -> bool:
            current = simulation.world.current
            if current is not None and not current.dead:
                if record.levelno >= logging.ERROR:
                    cause = record.exc_info[1] if record.exc_info else ""
                    current.failures.append(f"{record.getMessage()}: {cause!r}")
                if record.levelno >= logging.WARNING:
                    simulation.world.log(f"{current}: {record.getMessage()}")
            return False

        self._logger.filters[:] = [look]

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        process = Process(self.world, name)
        process.reads_every = self.reads_every
        process.loop.coarse = self.coarse_timers
        self.world.log(f"{name} starts")
        self.mains[process] = process.start(self._main(process))

    async def _main(self, process: Process) -> None:
        """One process: a client, some tasks; what they begin before the end of the faults they finish."""
        style, rng = self.style, self.random
        while self._going_on():
            client = self.make_client(
                process,
                ttl=style.ttls[0],
                waiter_ttl=style.waiter_ttl,
                token_retention=style.retention,
                unavailable_after=rng.choice((2.0, 30.0)),
                close_timeout=1.0,
                **self.client_options(process),
            )
            try:
                async with client:
                    await self._live(process, client)
            except BackendError as away:
                self.world.log(f"{process}: the client could not be entered: {away!r}")

    def make_client(self, process: Process, **options: Any) -> Any:
        return SimClient(self, process, **options)

    def client_options(self, process: Process) -> dict[str, Any]:
        """Return what the process gives to its client besides."""
        return {}

    async def _live(self, process: Process, client: SimClient) -> None:
        session = client._core.session
        assert session is not None
        sessions = self.checkers.sessions.setdefault(process, [])
        sessions.append(session)
        self.checkers.entered(session)
        leave_early = asyncio.Event()
        self._closers[process] = leave_early
        try:
            workers = [
                asyncio.ensure_future(self._work(process, client, leave_early))
                for _ in range(self.style.tasks)
            ]
            early: asyncio.Future[Any] = asyncio.ensure_future(leave_early.wait())
            together: asyncio.Future[Any] = asyncio.gather(*workers)
            await asyncio.wait((early, together), return_when="FIRST_COMPLETED")
            if not leave_early.is_set():
                early.cancel()
                await asyncio.wait([early])
                await together
                await self._until_nothing_is_left(session)
                self.checkers.check_nothing_left(process, session)
            else:
                self.world.log(f"{process}: its client is left in the middle")
                await client.__aexit__(None, None, None)
                await together
        finally:
            sessions.remove(session)

    async def _until_nothing_is_left(self, session: Any) -> None:
        """Leaves go on in the background; they have as long as a lease would have lasted."""
        give_up = self.world.time + max(self.style.ttls) + self.style.waiter_ttl + 25.0
        while session.requests and self.world.time < give_up:
            await asyncio.sleep(0.05)

    def _is_skipped(self) -> bool:
        """Count one more step; return whether it is left out."""
        self.steps += 1
        return self.steps - 1 in self.skipped

    def _going_on(self) -> bool:
        return self.world.time < self.chaos_ends

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        while self._going_on() and not over.is_set():
            await asyncio.sleep(rng.expovariate(1 / self.style.think))
            if self._is_skipped():
                continue
            turn = asyncio.ensure_future(self._turn(process, client))
            if rng.random() < self.style.cancels:
                delay = rng.expovariate(1 / (2 * self.style.hold + 0.01))
                for _ in range(rng.choice((1, 1, 2))):
                    await asyncio.wait([turn], timeout=delay)
                    if not turn.done():
                        turn.cancel()
                        delay = rng.uniform(0, 0.002)
            await asyncio.wait([turn])
            self._count(process, turn)

    def _count(self, process: Process, turn: asyncio.Future[None]) -> None:
        outcome = "done"
        if turn.cancelled():
            outcome = "cancelled"
        elif (error := turn.exception()) is not None:
            outcome = type(error).__name__
            if not isinstance(error, self.expected):
                raise error
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.world.log(f"{process}: a turn ends: {outcome}")

    # -- what a task does --------------------------------------------------------------------------

    async def _turn(self, process: Process, client: SimClient) -> None:
        rng, style = self.random, self.style
        if self.onces is not None and self.onces.is_next():
            await self.onces.turn(process, client)
            return
        if self.habits.random() < self.odd_turns:
            odd = (self._close_elsewhere, self._hand_over, self._leave_out_of_order)
            await self.habits.choice(odd)(process, client)
            return
        kind = rng.random()
        lock, weaker = self._some_lock(client)
        base = _base(lock)
        if kind < 0.1:
            lease = await lock.acquire_nowait()
            await self._bare(process, lease, base)
        elif kind < 0.25:
            lease = await lock.acquire(timeout=rng.choice((None, style.hold, 3 * style.hold)))
            await self._bare(process, lease, base)
        elif kind < 0.25 + style.breaks:
            await client.break_lock(lock.name)
        elif kind < 0.27 + style.breaks:
            await client.inspect(lock.name)
        elif kind < 0.30 + style.breaks:
            await lock.acquire()
            await asyncio.sleep(rng.expovariate(1 / style.hold))
            await lock.release()
        elif kind < 0.34 + style.breaks:
            names = [f"n{number}" for number in range(style.names)]
            timeout, hold = rng.choice((None, 0.5, 2.0)), self._hold_at_least()
            async with client.multilock(*names, timeout=timeout, hold_at_least=hold) as leases:
                if self.onces is not None:
                    mine = [lease._request.id for lease in leases.values()]
                    self.onces.checkers.begun.update(mine)
                await asyncio.sleep(rng.expovariate(1 / style.hold))
        else:
            async with lock as lease:
                async with self._body(process, lease):
                    await self._hold(lease, base)
                    if kind > 0.9 and isinstance(lock, aiodlock.Lock):
                        # A writer may read, too; then it holds the name twice.
                        async with weaker if kind > 0.95 else lock as again:
                            await self._hold(again, base)
                    elif kind > 0.85:
                        ttl = rng.choice((None, 0.4, 1.2))
                        if self.habits.random() < 0.5:
                            await lease.extend(ttl)
                        else:
                            with suppress(LockLost):  # and goes on
                                await lease.extend(ttl)
                        await self._hold(lease, base)

    async def _close_elsewhere(self, process: Process, client: SimClient) -> None:
        """Another task closes the exit stack; other tasks may be in blocks of the same object."""
        lock = self._common_lock(client)
        stack = AsyncExitStack()
        lease = await stack.enter_async_context(lock)
        try:
            async with self._body(process, lease):
                await self._hold(lease, _base(lock))
        finally:
            try:
                await _in_another_task(stack.aclose(), cancel=False)
            except (RuntimeError, asyncio.CancelledError) as error:
                unclear = error if isinstance(error, RuntimeError) else error.__cause__
                if isinstance(unclear, RuntimeError) and not isinstance(
                    unclear, aiodlock.LockError
                ):
                    await lock.__aexit__(None, None, None)  # it has ended nobody's block
                if error is not unclear or isinstance(error, aiodlock.LockError):
                    raise

    async def _hand_over(self, process: Process, client: SimClient) -> None:
        """One task acquires, another runs the body; the first one waits for it, or has ended before."""
        lock, _ = self._some_lock(client)
        if self.habits.random() < 0.5:
            lease = await _in_another_task(lock.acquire(), cancel=True)
            await self._entered_body(process, lease, _base(lock))
            return
        lease = await lock.acquire()
        began = asyncio.Event()

        async def body() -> None:
            began.set()
            await self._entered_body(process, lease, _base(lock))

        try:
            await _in_another_task(body(), cancel=True)
        finally:
            if not began.is_set():
                await lease.release()

    async def _entered_body(self, process: Process, lease: Lease, base: str) -> None:
        async with lease, self._body(process, lease):
            await self._hold(lease, base)

    async def _leave_out_of_order(self, process: Process, client: SimClient) -> None:
        """Enter a name by two objects, leave the first one first, and go on."""
        lock, _ = self._some_lock(client)
        again = lock
        if isinstance(lock, aiodlock.Lock):
            again = aiodlock.Lock(lock._described)
        async with AsyncExitStack() as second:
            async with AsyncExitStack() as first:
                lease = await first.enter_async_context(lock)
                if isinstance(lock, aiodlock.Lock):  # a semaphore would wait for itself
                    lease = await second.enter_async_context(again)
                else:
                    second.push_async_exit(first.pop_all())
            async with self._body(process, lease):
                await self._hold(lease, _base(lock))

    def _common_lock(self, client: SimClient) -> Acquirable:
        name = f"n{self.habits.randrange(self.style.names)}"
        lock = self.common.get((client, name))
        if lock is None:
            ttl = self.habits.choice(self.style.ttls)
            if self.style.semaphores:
                lock = client.semaphore(f"s{name}", 2, ttl=ttl, timeout=2.0)
            else:
                lock = client.rwlock(name, ttl=ttl, timeout=2.0).read
            self.common[client, name] = lock
        return lock

    def _some_lock(self, client: SimClient) -> tuple[Acquirable, Acquirable]:
        """Return a lock, and one that its holder gets besides."""
        rng, style = self.random, self.style
        name = f"n{rng.randrange(style.names)}"
        options: dict[str, Any] = {
            "ttl": rng.choice(style.ttls),
            "lock_delay": rng.choice(style.delays),
            "timeout": rng.choice((None, None, None, 0.5, 2.0, 0.0)),
            "on_lost": rng.choice(("cancel", "cancel", "flag")),
            "confirm_release": rng.random() < 0.8,
            "auto_extend": rng.random() < 0.9,
            "hold_at_least": self._hold_at_least(),
        }
        if rng.random() < 0.1:
            options["max_hold"] = rng.choice((0.2, 0.5, 1.0))
        elif rng.random() < 0.1:
            options["margin"] = min(options["ttl"] / 10, 0.3)  # less than any extension
        if rng.random() < style.semaphores:
            semaphore = client.semaphore(f"s{name}", 2, **options)
            return semaphore, semaphore
        if rng.random() < style.named_owners:
            options["owner"] = rng.choice(("ann", "bob"))
        pair = client.rwlock(name, **options)
        return (pair.read if rng.random() < style.shared else pair.write), pair.read

    def _hold_at_least(self) -> float:
        return 0.0 if self.onces is None else self.onces.habits.hold()

    async def _bare(self, process: Process, lease: Lease, base: str) -> None:
        try:
            await self._hold(lease, base)
        finally:
            await lease.release()

    @asynccontextmanager
    async def _body(self, process: Process, lease: Lease) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        body = Body(process, task, lease, cancels=lease._request.options.on_lost == "cancel")
        self.checkers.bodies.append(body)
        try:
            yield
        finally:
            self.checkers.bodies.remove(body)

    async def _hold(self, lease: Lease, base: str) -> None:
        rng = self.random
        length = rng.expovariate(1 / self.style.hold)
        if rng.random() < 0.03:
            length += 2 * lease.ttl
        for _ in range(2):
            if lease.mode == "exclusive":
                # Sent to a store; it may arrive when the lease is long over.
                self.world.after(rng.expovariate(20.0), self._write, lease, base)
            await asyncio.sleep(length / 2)
            if self.habits.random() < 0.3:
                with suppress(LockLost):  # as code that logs what it catches, and goes on
                    lease.ensure_held()
            await self.checkers.step(lease)

    def _write(self, lease: Lease, base: str) -> None:
        accepted = lease.token >= self.stores.get(base, 0)
        if accepted:
            self.stores[base] = lease.token
        self.checkers.write(base, lease, accepted)

    # -- what goes wrong -----------------------------------------------------------------------------

    def _plan_fault(self) -> None:
        if self.style.faults:
            self.world.after(
                self.random.expovariate(1 / self.style.pause_between_faults), self._fault
            )

    def _fault(self) -> None:
        if not self._going_on():
            return
        if not self.mains:
            return
        name = self.random.choice(self.style.faults)
        if not self._is_skipped():
            self.strike(name)
        self._plan_fault()

    def strike(self, name: str) -> None:
        Faults(self).strike(name)

    def _sweep(self) -> None:
        """The server's own cycle of expiry; slow on some servers."""
        self.server.sweep()
        self.world.after(self.random.uniform(0.05, 0.5), self._sweep)

    def calm_down(self) -> None:
        """The faults stop: everything heals, and whoever was stopped goes on."""
        world, server = self.world, self.server
        world.log("-- the faults stop --")
        server.refuses = None
        server.read_only = server.out_of_memory = False
        self.network.duplicate_share = 0.0
        if not server.up:
            server.restart("kept")
        for path in self.network.paths.values():
            path.calm()
        for conn in self.network.connections:
            conn.behind = 0.0
        self.network.released()
        for process in world.processes:
            process.resume()


@contextmanager
def _replaced(target: object, name: str, value: object) -> Iterator[None]:
    """As ``unittest.mock.patch.object`` does; that takes two milliseconds for the three of a seed."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def _base(lock: Acquirable) -> str:
    return f"aiodlock:2:{lock._described.terms.kind}:{{{lock.name}}}"


async def _in_another_task(call: Coroutine[Any, Any, _T], *, cancel: bool) -> _T:
    """Run it to its end, whoever is cancelled; with ``cancel``, it is cancelled along."""
    task = asyncio.ensure_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if cancel:
                task.cancel()
    if cancelled is None:
        return task.result()
    if task.cancelled():
        raise cancelled
    if task.exception() is None and isinstance(task.result(), Lease):
        await task.result().release()  # type: ignore[attr-defined]
    raise cancelled from task.exception()


class Faults:
    """Each fault by its name: it begins now, and some end by themselves."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.random = simulation.random
        self.network = simulation.network
        self.server = simulation.server

    def strike(self, name: str) -> None:
        strike = getattr(self, f"_{name}")
        strike()

    def _log(self, text: str) -> None:
        self.world.log(f"fault: {text}")

    def _someone(self) -> Process:
        return self.random.choice(list(self.simulation.mains))

    def _some_connection(self) -> Any:
        of = self.network.connections_of(self._someone())
        return self.random.choice(of) if of else None

    def _length(self) -> float:
        """Return how long a fault lasts: usually shorter, sometimes longer than a lease."""
        ttl = max(self.simulation.style.ttls)
        return self.random.choice((0.1, 0.5, 1.5)) * ttl * self.random.uniform(0.3, 1.5)

    # -- network -----------------------------------------------------------------------------------

    def _slow(self) -> None:
        process = self._someone()
        path, length = self.network.path(process), self._length()
        path.slow_share, path.slow = 0.5, self.random.choice((0.02, 0.2, 0.6))
        self._log(f"half of {process}'s messages take up to {path.slow} s, for {length:.3f} s")
        self.world.after(length, setattr, path, "slow_share", 0.0)

    def _cut(self) -> None:
        conn = self._some_connection()
        if conn is not None:
            self._log(f"a connection of {conn.process} is cut")
            conn.cut()

    def _partition(self) -> None:
        self._block(True, True)

    def _one_way(self) -> None:
        self._block(*self.random.choice(((True, False), (False, True))))

    def _block(self, outwards: bool, inwards: bool) -> None:
        process, length = self._someone(), self._length()
        path = self.network.path(process)
        path.out_blocked, path.in_blocked = outwards, inwards
        what = {(True, True): "both ways", (True, False): "to the server"}
        where = what.get((outwards, inwards), "to the client")
        self._log(f"nothing passes {where} for {process}, for {length:.3f} s")

        def heal() -> None:
            path.out_blocked = path.in_blocked = False
            self.world.log(f"network: {process} is reachable again")
            self.network.released(process)

        self.world.after(length, heal)

    def _mute(self) -> None:
        conn = self._some_connection()
        if conn is not None:
            self._log(f"replies to a connection of {conn.process} are lost from now on")
            conn.mute = True

    def _stuck(self) -> None:
        conn = self._some_connection()
        if conn is not None:
            self._log(f"requests on a connection of {conn.process} go no further from now on")
            conn.stuck = True

    def _behind(self) -> None:
        """What comes on another connection overtakes it: a break overtakes the reply of its grant."""
        conn = self._some_connection()
        if conn is not None:
            conn.behind = self.random.choice((0.02, 0.2, 0.6))
            self._log(f"replies to a connection of {conn.process} come {conn.behind} s later")

    def _duplicate(self) -> None:
        length = self._length()
        self._log(f"some commands arrive twice, for {length:.3f} s")
        self.network.duplicate_share = 0.3
        self.world.after(length, setattr, self.network, "duplicate_share", 0.0)

    def _stall(self) -> None:
        length = self._length()
        self._log(f"the server answers nobody for {length:.3f} s")
        self.network.stall(self.world.time + length)

    # -- processes ---------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._stop(sleeping=False)

    def _sleep(self) -> None:
        self._stop(sleeping=True)

    def _stop(self, *, sleeping: bool) -> None:
        process, length = self._someone(), self._length()
        if not process.running:
            return
        self._log(f"{process} {'sleeps' if sleeping else 'is stopped'} for {length:.3f} s")
        process.stop(sleeping=sleeping)

        def resume() -> None:
            if not process.running and not process.dead:
                self.world.log(f"{process} goes on")
                process.resume()

        self.world.after(length, resume)

    def _crash(self) -> None:
        process = self._someone()
        power = self.random.random() < 0.3
        self._log(f"{process} {'loses power' if power else 'is killed'}")
        process.crash()
        del self.simulation.mains[process]
        self.simulation.checkers.sessions.pop(process, None)
        bodies = self.simulation.checkers.bodies
        bodies[:] = [body for body in bodies if body.process is not process]
        for conn in self.network.connections_of(process):
            if power:
                conn.open = False  # the server is never told
            else:
                conn.close_by_kernel()
        name = f"{process.name}'"
        self.world.after(self.random.uniform(0.01, 1.0), self.simulation._start, name)

    def _restart_client(self) -> None:
        closer = self.simulation._closers.get(self._someone())
        if closer is not None:
            closer.set()

    # -- the server --------------------------------------------------------------------------------

    def _restart(self, data: str) -> None:
        if not self.server.up:
            return
        away = self.random.uniform(0.01, 0.8)
        self._log(f"the server is away for {away:.3f} s and comes back, data: {data}")
        self.network.stop_server()
        self.world.after(away, self._come_back, data)

    def _come_back(self, data: str) -> None:
        if not self.server.up:
            self.server.restart(data)
            if self.random.random() < 0.5:
                self._loading()

    def _restart_kept(self) -> None:
        self._restart("kept")

    def _restart_empty(self) -> None:
        self._restart("empty")

    def _restart_older(self) -> None:
        self._restart("older")

    def _snapshot(self) -> None:
        self.server.save()

    def _flush_data(self) -> None:
        self._log("FLUSHALL")
        self.server.flush_data()

    def _flush_scripts(self) -> None:
        self._log("SCRIPT FLUSH")
        self.server.flush_scripts()

    def _loading(self) -> None:
        self._refuse("LOADING Redis is loading the dataset in memory")

    def _busy(self) -> None:
        self._refuse("BUSY Redis is busy running a script. You can only call SCRIPT KILL.")

    def _refuse(self, how: str) -> None:
        length = self.random.uniform(0.0, 0.5)
        self._log(f"the server says {how.partition(' ')[0]} for {length:.3f} s")
        self.server.refuses = how
        self.world.after(length, setattr, self.server, "refuses", None)

    def _read_only(self) -> None:
        length = self.random.uniform(0.0, 0.5)
        self._log(f"the server is read-only for {length:.3f} s")
        self.server.read_only = True
        self.world.after(length, setattr, self.server, "read_only", False)

    def _out_of_memory(self) -> None:
        length = self.random.uniform(0.0, 0.5)
        self._log(f"the server is out of memory for {length:.3f} s")
        self.server.out_of_memory = True
        self.world.after(length, setattr, self.server, "out_of_memory", False)

    def _clock_back(self) -> None:
        self._step(-self.random.choice((0.01, 0.3, 3.0)))

    def _clock_forward(self) -> None:
        self._step(self.random.choice((0.01, 0.3, 3.0)))

    def _step(self, by: float) -> None:
        self._log(f"the server's clock steps by {by:+} s")
        self.simulation.checkers.clock_steps(by)


def _extend_for(checkers: Checkers) -> Callable[[KeptPlace, float | None], Awaitable[None]]:
    """Return ``KeptPlace.extend``, and let the checkers know whose answers nobody takes."""
    extend = KeptPlace.extend

    async def extend_or_give_up(place: KeptPlace, ttl: float | None) -> None:
        try:
            await extend(place, ttl)
        except asyncio.CancelledError:
            checkers.on_given_up(place.id)
            raise

    return extend_or_give_up
