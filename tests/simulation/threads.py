"""``aiodlock.sync``: threads in the place of tasks, on the machine of ``memory://``.

The portal's loop is the process's simulated one, and threads take their turns as ``baton.py`` says. All
else of ``aiodlock.sync`` is the real code. What the other worlds check holds here too, and besides:

told        a block whose lease was lost does not end as if nothing had happened; a function given as
            ``on_lost`` is called, once for each such lease, and for no other
beside      bodies of two threads do not hold a name together, unless both read or are one owner's
again       a thread gets in again with the token that it has, and never with that of another thread
interrupt   after a KeyboardInterrupt nothing is left of what the thread waited for
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from aiodlock import (
    AcquireTimeout,
    BackendError,
    ClientClosed,
    DeadlockError,
    LockError,
    LockLost,
    NotHeld,
    WouldBlock,
    sync,
)
from aiodlock._lease import Lease as CoreLease
from aiodlock._options import _checked_before
from aiodlock._register import Register
from aiodlock._request import Request
from aiodlock.backends.memory import sources as sources  # now: other seeds would not load it
from aiodlock.sync import _holds, _life, _portal
from aiodlock.sync._body import Body
from aiodlock.sync._lease import Lease
from aiodlock.sync._life import Life
from aiodlock.sync._lock import Acquirable

from .baton import Lock, Thread, current
from .memory import MachineSimulation
from .onces import _BASE, BodyFailed
from .scenario import SimClient, Simulation
from .world import Process

_T = TypeVar("_T")
_begin, _begin_leaving = Body.begin, Register.begin_leaving

#: So long after an interrupt nothing of the call goes on (seconds).
_ENDED_WITHIN = 2.5
_EXPECTED = (AcquireTimeout, WouldBlock, LockLost, DeadlockError, ClientClosed, BackendError)


class SimPortal(_portal.Portal):
    """The process's loop in the place of a thread."""

    def __init__(self, simulation: Threads, process: Process) -> None:
        self.pid = os.getpid()
        self.loop = process.loop
        self.ended = self.stopped = False
        self._calls = set()
        self._selector: Any = SimpleNamespace(hand=process.loop.call_soon_threadsafe)
        self._simulation = simulation
        self._process = process
        self._at_exit: dict[object, Callable[[], Coroutine[Any, Any, None]]] = {}

    def call(
        self,
        call: Callable[[], Coroutine[Any, Any, _T]],
        take_back: Callable[[_T], Coroutine[Any, Any, object]] | None = None,
        *,
        within: float | None = None,  # the loop always turns
    ) -> _T:
        calls, mine = self._simulation.calls[current()], object()

        async def counted() -> _T:
            calls.add(mine)
            try:
                return await call()
            finally:
                calls.discard(mine)

        return super().call(counted, take_back)

    def start_thread(self, run: Callable[[], object], name: str) -> None:
        self._simulation.start_thread(self._process, run, "on_lost")


class ThreadClient(sync.Client):
    """The library's client, which connects through the simulated network."""

    def __init__(self, simulation: Simulation, process: Process, **options: Any) -> None:
        self._life = Life(SimClient(simulation, process, **options))


class Flag:
    """Somebody says that a client is to be left in the middle."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True


@dataclass
class Crew:
    """The threads of a process, which end when the first one has: it waits for the others."""

    first: Thread

    def done(self) -> bool:
        return self.first.ended

    def exception(self) -> None:
        """What a thread raises is raised in the world at once."""


@dataclass(eq=False)
class Inside:
    """A block in which a thread is at this moment."""

    thread: Thread
    lease: Lease
    base: str
    owner: str | None


class Watched:
    """A function that is to be told of losses. ``requests`` are those that it is given for.

    (Not their leases: whoever has one keeps the hold.)
    """

    def __init__(self) -> None:
        self.told = 0
        self.requests: list[Request] = []

    def __call__(self, lost: LockLost) -> None:
        self.told += 1


class Begun(set[str]):
    """The requests with which a thread has begun its body.

    A thread that finds a loss when it begins may do so in the moment in which the leave is made. Then
    either is right, and ``taken_for`` has what the leave took it for.
    """

    def __init__(self) -> None:
        self.unsure: set[str] = set()
        self.taken_for: dict[str, bool] = {}

    def __contains__(self, id: object) -> bool:
        if id in self.unsure:
            return self.taken_for.get(str(id), False)
        return super().__contains__(id)

    def add(self, id: str) -> None:
        """The loop has its lease, and its thread has not."""

    def begin(self, body: Body) -> None:
        new = {hold.request.id for hold in body.holds if hold.request.id not in self}
        self.unsure |= new
        _begin(body)
        self.unsure -= new
        self.update(new)

    def begin_leaving(self, register: Register, request: Request) -> None:
        self.taken_for.setdefault(request.id, request.used)
        _begin_leaving(register, request)


class Threads(MachineSimulation):
    """One seed. Mutable state besides: what is listed in ``__init__``."""

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        apart = random.Random(f"{seed} threads")
        #: How often a thread stands still before a line of the library.
        self.preempts = apart.choice((0.0, 0.01, 0.1))
        #: Which share of the turns of a process's first worker is interrupted, and whether at any line.
        self.interrupts = apart.choice((0.0, 0.0, 0.3))
        self.strikes_anywhere = apart.random() < 0.5
        self.threads: list[Thread] = []
        self.portals: dict[Process, SimPortal] = {}
        self.inside: list[Inside] = []
        self.watched: dict[Watched, Process] = {}
        #: Requests that were lost while somebody had their lease.
        self.lost: set[Request] = set()
        #: The calls into the loop that are under way, by the thread that has made them.
        self.calls: defaultdict[Thread, set[object]] = defaultdict(set)
        #: How much there was to look at.
        self.seen: Counter[str] = Counter()
        super().__init__(seed, prepare)
        begun = Begun()
        if self.onces is not None:
            self.onces.checkers.begun = begun
        self.patch(Body, "begin", lambda body: begun.begin(body))
        self.patch(Register, "begin_leaving", lambda *call: begun.begin_leaving(*call))

    # -- the world ---------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            super().run()
            self._check_told_by_functions()
        finally:
            for thread in self.threads:
                thread.end()

    @contextmanager
    def _everything_virtual(self) -> Iterator[None]:
        _checked_before.cache_clear()  # else lines that other seeds have run are not run again
        threads = SimpleNamespace(Lock=Lock, TIMEOUT_MAX=threading.TIMEOUT_MAX)
        self.patch(_portal, "threading", threads)
        self.patch(_life, "_changing", _OneEach())
        self.patch(Request, "lose", _noting(self.lost))
        self.patch(_life, "portal", lambda: self.portals[current().process])
        with super()._everything_virtual():
            yield

    def _run_quiet(self) -> None:
        super()._run_quiet()
        if self.seen["interrupted"] or self.seen["dropped"]:
            # What a thread had just got, and has not kept, is released with a warning.
            warned = self._warnings
            warned[:] = [one for one in warned if not issubclass(one.category, ResourceWarning)]

    def start_thread(
        self, process: Process, run: Callable[[], object], name: str, preempts: float | None = None
    ) -> Thread:
        """Let a process have one more thread."""

        def run_to_its_end() -> None:
            try:
                run()
            finally:  # in its turn, and not when the real thread ends
                current().strikes_anywhere = False  # a signal strikes nothing of the thread's now
                vars(_holds._local).pop("here", None)

        thread = Thread(
            process,
            run_to_its_end,
            f"{name}.{len(self.threads)}",
            self.preempts if preempts is None else preempts,
        )
        self.threads.append(thread)
        return thread

    def _start(self, name: str) -> None:
        process = Process(self.world, name)
        process.reads_every = self.reads_every
        process.loop.coarse = self.coarse_timers
        self.portals[process] = SimPortal(self, process)
        self.world.log(f"{name} starts")
        first = self.start_thread(process, lambda: self._run_process(process), "main")
        self.mains[process] = Crew(first)  # type: ignore[assignment]

    # -- a process ---------------------------------------------------------------------------------

    def _run_process(self, process: Process) -> None:
        while self._going_on():
            client = ThreadClient(
                self,
                process,
                ttl=self.style.ttls[0],
                waiter_ttl=self.style.waiter_ttl,
                token_retention=self.style.retention,
                unavailable_after=self.random.choice((2.0, 30.0)),
                close_timeout=1.0,
            )
            try:
                client.__enter__()
            except BackendError as away:
                self.world.log(f"{process}: the client could not be entered: {away!r}")
            else:
                self._use(process, client)

    def _use(self, process: Process, client: ThreadClient) -> None:
        session: Any = client._life._runnings[os.getpid()].inner._core.session
        sessions = self.checkers.sessions.setdefault(process, [])
        sessions.append(session)
        self.checkers.entered(session)
        over = Flag()
        self._closers[process] = over  # type: ignore[assignment]
        workers = [
            self.start_thread(process, lambda: self._work_in_thread(process, client, over), "work")
            for _ in range(self.style.tasks)
        ]
        if self.random.random() < self.interrupts:
            workers[0].strikes_anywhere = self.strikes_anywhere
            self._plan_interrupt(workers[0])
        while not over.is_set and not all(worker.ended for worker in workers):
            self._pass_some_time()
        if over.is_set:
            self.world.log(f"{process}: its client is left in the middle")
            client.close()
        while not all(worker.ended for worker in workers):
            self._pass_some_time()
        if not over.is_set:
            give_up = self.world.time + max(self.style.ttls) + self.style.waiter_ttl + 25.0
            while session.requests and self.world.time < give_up:
                self._pass_some_time()
            self.checkers.check_nothing_left(process, session)
            client.close()
        sessions.remove(session)

    def _pass_some_time(self) -> None:
        current().sleep(0.02)
        if self.seen["interrupted"] and self.random.random() < 0.05:
            # A signal that strikes in an ``__exit__`` leaves the lease to the collector.
            current().collect()

    def _plan_interrupt(self, thread: Thread) -> None:
        def strike() -> None:
            if not thread.ended and self._going_on():
                thread.interrupt()
                self._plan_interrupt(thread)

        self.world.after(self.random.expovariate(1 / (4 * self.style.hold + 0.05)), strike)

    def _look_for_rest(self, thread: Thread, calls: frozenset[object]) -> None:
        """See to it that what a thread was interrupted in comes to its end."""
        process = thread.process

        def look() -> None:
            left = self.calls[thread] & calls
            if not left or process.dead:
                return
            if process.running and self.world.time - process.resumed_at >= _ENDED_WITHIN:
                self.checkers.wrong("interrupt", f"{thread!r}: its call goes on after a signal")
            self.world.after(_ENDED_WITHIN, look)

        self.world.after(_ENDED_WITHIN, look)

    def _work_in_thread(self, process: Process, client: ThreadClient, over: Flag) -> None:
        rng, me = self.random, current()
        while self._going_on() and not over.is_set:
            outcome = "done"
            try:
                me.sleep(rng.expovariate(1 / self.style.think))
                if self._is_skipped():
                    continue
                self._turn_in_thread(process, client)
            except _EXPECTED as error:
                outcome = type(error).__name__
            except KeyboardInterrupt:
                outcome = "interrupted"
                self.seen[outcome] += 1
                self._look_for_rest(me, frozenset(self.calls[me]))
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.world.log(f"{me!r}: a turn ends: {outcome}")

    # -- what a thread does ------------------------------------------------------------------------

    def _turn_in_thread(self, process: Process, client: ThreadClient) -> None:
        rng, style, onces = self.random, self.style, self.onces
        if onces is not None and onces.is_next():
            self._once(client)
            return
        lock, weaker = self._some_locks(client)
        kind = rng.random()
        if kind < style.breaks:
            client.break_lock(lock.name)
        elif kind < 0.02 + style.breaks:
            client.inspect(lock.name)
        elif kind < 0.10:
            self._bare_in_thread(lock, lock.acquire_nowait())
        elif kind < 0.12:
            self._end_with_a_hold(process, lock)
        elif kind < 0.22:
            self._bare_in_thread(
                lock, lock.acquire(timeout=rng.choice((None, style.hold, 3 * style.hold)))
            )
        elif kind < 0.28:
            self._give_to_another_thread(process, lock)
        elif kind < 0.36:
            self._leave_in_another_thread(process, client)
        elif kind < 0.42:
            self._several(client)
        else:
            with self._block(lock) as lease:
                self._hold_in_thread(lease, lock)
                if kind > 0.85 and isinstance(lock, sync.Lock):
                    self._again(lock, weaker if kind > 0.92 else lock, lease)
                elif kind > 0.75:
                    lease.extend(rng.choice((None, 0.4, 1.2)))
                    self._hold_in_thread(lease, lock)

    def _some_locks(self, client: ThreadClient) -> tuple[Acquirable, Acquirable]:
        """Return a lock, and one that its holder gets besides."""
        rng, style = self.random, self.style
        name = f"n{rng.randrange(style.names)}"
        options: dict[str, Any] = {
            "ttl": rng.choice(style.ttls),
            "lock_delay": rng.choice(style.delays),
            "timeout": rng.choice((None, None, None, 0.5, 2.0, 0.0)),
            "confirm_release": rng.random() < 0.8,
            "auto_extend": rng.random() < 0.9,
            "hold_at_least": self._hold_at_least(),
        }
        if rng.random() < 0.3:
            options["on_lost"] = Watched()
        if rng.random() < 0.1:
            options["max_hold"] = rng.choice((0.2, 0.5, 1.0))
        if rng.random() < style.semaphores:
            semaphore = client.semaphore(f"s{name}", 2, **options)
            return semaphore, semaphore
        if rng.random() < style.named_owners:
            options["owner"] = rng.choice(("ann", "bob"))
        pair = client.rwlock(name, **options)
        return (pair.read if rng.random() < style.shared else pair.write), pair.read

    @contextmanager
    def _block(self, lock: Acquirable) -> Iterator[Lease]:
        """A user's block; whatever the body does, the loss has to come out of it."""
        before: LockLost | None = None
        with ExitStack() as stack:
            lease = stack.enter_context(lock)
            self._watch(lock, lease)
            with self._beside(lock, lease):
                yield lease
            before = lease.lost
        if before is not None:
            self.checkers.wrong("told", f"{lease!r} was lost, and its block ends well")

    @contextmanager
    def _beside(self, lock: Acquirable, lease: Lease) -> Iterator[None]:
        base = f"{lease._request.terms.kind}:{lock.name}"
        one = Inside(current(), lease, base, lock._of.template._described.options.owner)
        self._check_beside(one)
        self.inside.append(one)
        try:
            yield
        finally:
            self.inside.remove(one)

    def _check_beside(self, one: Inside) -> None:
        request = one.lease._request
        if self.checkers.forgetful or request.terms.kind == "semaphore":
            return
        for other in self.inside:
            if other.base != one.base or other.thread is one.thread or other.thread.process.dead:
                continue
            beside = other.lease._request
            if request is not beside or (one.owner is not None and one.owner == other.owner):
                continue  # of two requests, exclusion is looked at on the server
            if one.lease.held and other.lease.held:
                self.checkers.wrong(
                    "beside", f"{one.thread!r} got into the block of {other.thread!r}"
                )

    def _watch(self, lock: Acquirable, lease: Lease) -> None:
        """Expect that the lock's function is told of a loss, once for all holds of a request."""
        function, request = lock._of.on_lost, lease._request
        if isinstance(function, Watched) and len(request.handles) == 1:
            function.requests.append(request)
            self.watched[function] = current().process

    def _check_told_by_functions(self) -> None:
        for function, process in self.watched.items():
            lost = [request for request in function.requests if request in self.lost]
            if process in self.mains and function.told != len(lost):  # else it was killed
                self.checkers.wrong("told", f"on_lost was called {function.told} times for {lost}")
            self.seen["on_lost"] += function.told

    def _hold_in_thread(self, lease: Lease, lock: Acquirable | sync.Once) -> None:
        rng, me = self.random, current()
        base = f"aiodlock:2:{lock._of.template._described.terms.kind}:{{{lock.name}}}"
        length = rng.expovariate(1 / self.style.hold)
        if rng.random() < 0.03:
            length += 2 * lease.ttl
        for _ in range(2):
            if lease.mode == "exclusive" and lease.held:
                self.world.after(
                    rng.expovariate(20.0), self._write, CoreLease(lease._acquired), base
                )
            me.sleep(length / 2)
            if rng.random() < 0.3:
                lease.ensure_held()

    def _again(self, outer: Acquirable, lock: Acquirable, lease: Lease) -> None:
        """Get in once more: with the same token, and not when the lease was lost before."""
        was = lease.lost
        with self._block(lock) as again:
            # An operator's break may be on its way, and a server that forgets grants anew.
            unsure = self.checkers.forgetful or lease._request.id in self.checkers.excused
            if was is not None or not (again.token == lease.token or unsure):
                self.checkers.wrong("again", f"{again!r} is not the hold of {lease!r}")
            self._hold_in_thread(again, lock)

    def _bare_in_thread(self, lock: Acquirable, lease: Lease) -> None:
        self._watch(lock, lease)
        try:
            self._hold_in_thread(lease, lock)
        finally:
            if self.random.random() < 0.3:
                lock.release()
            else:
                lease.release()

    def _give_to_another_thread(self, process: Process, lock: Acquirable) -> None:
        """One thread acquires, another one runs the body."""
        lease = lock.acquire()

        def body() -> None:
            with suppress(*_EXPECTED), lease, self._beside(lock, lease):
                self._hold_in_thread(lease, lock)

        self._join(self.start_thread(process, body, "body"))

    def _end_with_a_hold(self, process: Process, lock: Acquirable) -> None:
        def body() -> None:
            with suppress(*_EXPECTED):
                self._watch(lock, lock.acquire())  # and nobody has it any more
                self.seen["dropped"] += 1

        self._join(self.start_thread(process, body, "drops"))

    def _leave_in_another_thread(self, process: Process, client: ThreadClient) -> None:
        """Of one object that all threads of the client use, in blocks of their own."""
        key: Any = (client, f"n{self.random.randrange(self.style.names)}")
        lock: Any = self.common.get(key)
        if lock is None:
            ttl = self.random.choice(self.style.ttls)
            lock = client.rwlock(key[1], ttl=ttl, timeout=2.0).read
            self.common[key] = lock
        lease = lock.__enter__()
        unclear: list[RuntimeError] = []

        def leave() -> None:
            try:
                lock.__exit__(None, None, None)
            except RuntimeError as error:
                if not isinstance(error, LockError):
                    unclear.append(error)
            except LockError:
                pass

        try:
            with self._beside(lock, lease):
                self._hold_in_thread(lease, lock)
        finally:
            self._join(self.start_thread(process, leave, "leave"))
            if unclear:  # nobody's block was ended
                lock.__exit__(None, None, None)

    def _join(self, thread: Thread) -> None:
        """Wait for a thread, whatever strikes meanwhile."""
        me = current()
        struck: KeyboardInterrupt | None = None
        while not thread.ended:
            try:
                me.sleep(0.001)
            except KeyboardInterrupt as signal:
                struck = signal
        if struck is not None:
            raise struck

    def _several(self, client: ThreadClient) -> None:
        names = [f"n{number}" for number in range(self.style.names)]
        timeout = self.random.choice((None, 0.5, 2.0))
        hold = self._hold_at_least()
        with client.multilock(*names, timeout=timeout, hold_at_least=hold) as leases:
            current().sleep(self.random.expovariate(1 / self.style.hold))
            was = leases.lost
            if was is None:
                return
        self.checkers.wrong("told", f"{leases!r} were lost, and their block ends well")

    def _once(self, client: ThreadClient) -> None:
        assert self.onces is not None
        habits, checkers = self.onces.habits, self.onces.checkers
        rng, style = habits.random, self.style
        name = f"o{rng.randrange(2)}"
        base, entered = f"{_BASE}{{{name}}}", self.world.time
        kind = rng.random()
        if kind < habits.forgets:
            client.forget(name)
            return
        if kind < habits.forgets + habits.breaks:
            client.break_lock(name, kind="once")
            return
        keep = rng.choice(habits.keeps)
        once = client.once(
            name,
            keep=keep,
            ttl=rng.choice(style.ttls),
            timeout=rng.choice((None, None, 0.5, 2.0, 0.0)),
            hold_at_least=min(keep, habits.hold()),
        )
        with suppress(BodyFailed, NotHeld):
            with once as run:
                lease = run.lease
                if run.first:
                    assert lease is not None
                    try:
                        self._hold_in_thread(lease, once)
                        if rng.random() < habits.failing:
                            raise BodyFailed
                        run.result = rng.choice((f"of {lease.token}", b"done", None))
                    except BaseException:
                        checkers.failed.add(lease._request.id)
                        raise
            if lease is not None:
                checkers.confirmed(base, CoreLease(lease._acquired), run.result)
            else:
                checkers.given(base, run.result, entered)


def _noting(lost: set[Request]) -> Callable[..., None]:
    lose = Request.lose

    def noting(request: Request, *about: Any, **more: Any) -> None:
        if request.handles:
            lost.add(request)
        lose(request, *about, **more)

    return noting


class _OneEach:
    """A lock that is a module's global: each process has its own."""

    def __init__(self) -> None:
        self._locks: dict[Process, Lock] = {}

    def _own(self) -> Lock:
        return self._locks.setdefault(current().process, Lock())

    def __enter__(self) -> bool:
        return self._own().acquire()

    def __exit__(self, *_: object) -> None:
        self._own().release()
