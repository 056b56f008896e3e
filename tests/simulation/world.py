"""True time, the order of events, and the processes that live in it.

Every process has an event loop of its own, whose clock is virtual, runs at its own rate, and stands
still while the machine is suspended. The world steps one loop at a time: nothing here ever waits.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import _set_running_loop, format_helpers
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from anyio._backends._asyncio import CancelScope

if TYPE_CHECKING:
    from .stores.wire import Wire

#: What one turn of an event loop takes, in true seconds. Not nothing, or a loop could turn for ever.
_TURN = 10e-6


class Wrong(AssertionError):
    """A checker found that something promised does not hold."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker


class World:
    """The heap of what happens when, in true seconds from 0."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.time = 0.0
        #: What happened when; what is not text yet is read when somebody wants to.
        self.trace: list[tuple[float, object]] = []
        self.processes: list[Process] = []
        #: Whose code runs at this moment; its clocks are the ones that the library reads.
        self.current: Process | None = None
        #: After each turn of a process's loop.
        self.after_turn: list[Callable[[Process], None]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serials = count()
        #: Of the ``run_until`` that is under way.
        self._end = 0.0
        self._done: Callable[[], bool] = _never
        _ages.begin_anew()

    def log(self, text: object) -> None:
        self.trace.append((self.time, text))

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        time = self.time
        heappush(self._heap, (when if when > time else time, next(self._serials), call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        time = self.time
        when = time + delay
        heappush(self._heap, (when if when > time else time, next(self._serials), call, args))

    def run_until(self, end: float, done: Callable[[], bool] | None = None) -> bool:
        """Let things happen until then; return early, and True, when ``done`` says so."""
        heap = self._heap
        self._end, self._done = end, done or _never
        while heap and heap[0][0] <= end:
            self.time, _, call, args = heappop(heap)
            call(*args)
            if done is not None and done():
                return True
        self.time = end
        return self._done()

    @contextmanager
    def as_process(self, process: Process) -> Iterator[None]:
        """Let the library's clock be that of a process, for a look from outside."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before


def _never() -> bool:
    return False


class _NoSelector:
    """What a loop asks for I/O: there is none, and nothing waits."""

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class _Ages:
    """Hands out ages. Begins anew with each world: a set is walked in order of the hashes' last bits."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self.next = count().__next__


_ages = _Ages()


class _Task(asyncio.Task[Any]):
    """Hashed by age, not by address: sets of tasks are walked in the same order in every run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._age = _ages.next()
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(asyncio.Future[Any]):
    """Hashed by age too; ``SimLoop.create_future`` sets it."""

    _age: int

    def __hash__(self) -> int:
        return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class _Handle:
    """What ``asyncio.Handle`` is, without a debug mode and a ``repr``."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context")

    _args: Any
    _callback: Any
    _cancelled: bool
    _context: Context

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._cancelled


class _Timer(float):
    """A handle that is its own time: the heap compares numbers, and calls nothing of ours."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context")

    _args: Any
    _callback: Any
    _cancelled: bool
    _context: Context

    # It has no ``when()``: uvloop's handles have none if the pause rounds to nothing.

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._cancelled


class SimLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, with the clock of a process and without a selector."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._selector = _NoSelector()
        self._clock_resolution = 1e-7
        #: Tasks take their first step when they are made, as with ``asyncio.eager_task_factory``.
        self.eager = False
        #: Timers come at whole milliseconds from now, up to half of one early or late, as uvloop's.
        self.coarse = False
        #: Where connections lead that are dialled by asyncio itself.
        self.wire: Wire | None = None

    def time(self) -> float:
        return self.process.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future._age = _ages.next()
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        if self.eager and asyncio._get_running_loop() is self:
            kwargs["eager_start"] = True
        return _Task(coro, loop=self, **kwargs)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: str, port: int, **options: Any
    ) -> tuple[Any, Any]:
        assert self.wire is not None, "this world has no servers to dial"
        return await self.wire.connect(self.process, factory, host, port)

    async def getaddrinfo(  # type: ignore[override]
        self, host: str, port: int, **options: Any
    ) -> list[tuple[Any, ...]]:
        assert self.wire is not None, "this world has no servers to look up"
        return await self.wire.resolve(self.process, host, port)

    def _write_to_self(self) -> None:
        self.process.wake()  # call_soon_threadsafe asks for it

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> _Handle:
        handle = _Handle()
        handle._callback = callback
        handle._args = args
        handle._context = copy_context() if context is None else context
        handle._cancelled = False
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> _Timer:
        return self.call_at(self.process.monotonic() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> _Timer:
        if self.coarse:
            moment = self.process.monotonic()
            # uvloop takes what is too far away for a century
            when = moment + round(min(max(0.0, when - moment), 3e9) * 1000) / 1000
        timer = _Timer(when)
        timer._callback = callback
        timer._args = args
        timer._context = copy_context() if context is None else context
        timer._cancelled = False
        heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        return timer

    def turn(self) -> None:
        """Run what is due, once: what ``_run_once`` does for a loop that has nothing to select."""
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if scheduled:
            end = self.process.monotonic() + self._clock_resolution
            while scheduled and scheduled[0] < end:
                ready.append(heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                callback, args = handle._callback, handle._args
                try:
                    handle._context.run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    source = format_helpers._format_callback_source(callback, args)
                    self.call_exception_handler(
                        {"message": f"Exception in callback {source}", "exception": error}
                    )

    def next_due(self) -> float | None:
        """Return when (on its own clock) there is something to do; None: never."""
        if self._ready:  # type: ignore[attr-defined]
            return -1.0
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)
        return scheduled[0] if scheduled else None


class Scope(CancelScope):
    """Hashed by age too: anyio cancels the scopes inside of one in a set's order."""

    __slots__ = ("_age",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._age = _ages.next()
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class Process:
    """One process on one machine: two clocks, an event loop, and whether it runs.

    ``pause``: stopped as by SIGSTOP, both clocks go on. ``suspend``: the machine sleeps, CLOCK_MONOTONIC
    (the loop's) stands still. ``crash``: it never runs again.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        rng = world.random
        #: Within what the library allows for the drift of two clocks.
        self.rate = 1.0 + rng.uniform(-0.004, 0.004)
        self._boot_at_zero = rng.uniform(1e3, 1e5)
        self._asleep = 0.0
        self._stopped_at: float | None = None
        self._sleeping = False
        self.running = True
        self.dead = False
        #: When it last ran on after a stop.
        self.resumed_at = 0.0
        self._sleeps: list[tuple[float, float]] = []
        #: What comes in is read at multiples of this, in true seconds; 0: at once.
        self.reads_every = 0.0
        #: What has come in, by connection, and is not read yet.
        self._inbox: dict[object, list[Callable[[], None]]] = {}
        self._order = random.Random(f"{world.seed} {name}")
        #: When the next turn is; never, so far.
        self._planned = inf
        self._plan = 0
        self.failures: list[str] = []
        self.loop = SimLoop(self)
        self.loop.set_exception_handler(self._on_exception)
        world.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    # -- clocks ------------------------------------------------------------------------------------

    def boot(self) -> float:
        return self._boot_at_zero + self.rate * self.world.time

    def monotonic(self) -> float:
        asleep = self._asleep
        if self._sleeping and self._stopped_at is not None:
            asleep += self.rate * (self.world.time - self._stopped_at)
        return 100.0 + self.rate * self.world.time - asleep

    def true_time_of(self, boot: float) -> float:
        """Return the true time at which CLOCK_BOOTTIME of this process shows that."""
        return (boot - self._boot_at_zero) / self.rate

    def slept(self, since: float) -> float:
        """Return for how long its monotonic clock has stood still since a true time."""
        return sum(asleep for woken, asleep in self._sleeps if woken >= since)

    # -- life --------------------------------------------------------------------------------------

    def start(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.loop.create_task(main)
        self.wake()
        return task

    def stop(self, *, sleeping: bool) -> None:
        if not self.running:
            return
        self.running = False
        self._sleeping = sleeping
        self._stopped_at = self.world.time

    def resume(self) -> None:
        if self.running or self.dead:
            return
        assert self._stopped_at is not None
        if self._sleeping:
            asleep = self.rate * (self.world.time - self._stopped_at)
            self._asleep += asleep
            self._sleeps.append((self.world.time, asleep))
        self._stopped_at = None
        self.running = True
        self.resumed_at = self.world.time
        self._read()
        self.wake()

    def crash(self) -> None:
        self.running, self.dead = False, True
        if self._stopped_at is None:
            self._stopped_at = self.world.time

    def deliver(self, call: Callable[[], None], connection: object = None) -> None:
        """Something came in from outside: it is there when the loop looks next."""
        if self.dead:
            return
        if self.running and not self.reads_every:
            self.loop.call_soon(call)
            self.wake()
            return
        if self.running and not self._inbox:
            ticks = self.world.time // self.reads_every + 1
            self.world.at(ticks * self.reads_every, self._read)
        self._inbox.setdefault(connection or call, []).append(call)

    def _read(self) -> None:
        """Read in one turn what has come in: each connection in its order, and these in any order."""
        if not self.running or not self._inbox:
            return
        inbox, self._inbox = self._inbox, {}
        connections = list(inbox)
        self._order.shuffle(connections)
        for connection in connections:
            for call in inbox[connection]:
                self.loop.call_soon(call)
        self.wake()

    def wake(self) -> None:
        self._plan_turn(self.world.time)

    def _plan_turn(self, when: float) -> None:
        if self._planned <= when:
            return
        self._planned = when
        self._plan += 1
        self.world.at(when, self._turn, self._plan)

    def _turn(self, plan: int) -> None:
        """Turn the loop until something else happens before it has to turn again.

        (Most turns follow a turn of the same loop. So all that surrounds a turn stands here, and the
        world's heap is not needed for the next one.)
        """
        if plan != self._plan:
            return
        world, loop, rate, looks = self.world, self.loop, self.rate, self.world.after_turn
        turn, heap, end, done = loop.turn, world._heap, world._end, world._done
        ready, scheduled = loop._ready, loop._scheduled  # type: ignore[attr-defined]
        self._planned = inf
        world.current = self
        _set_running_loop(loop)
        try:
            while self.running:
                turn()
                for look in looks:
                    look(self)
                when = world.time + _TURN
                if not ready:
                    while scheduled and scheduled[0]._cancelled:
                        heappop(scheduled)
                    if not scheduled:
                        return
                    later = world.time + (scheduled[0] - self.monotonic()) / rate
                    if later > when:
                        when = later
                if self._planned <= when or when > end or (heap and heap[0][0] <= when) or done():
                    self._plan_turn(when)
                    return
                world.time = when
        finally:
            _set_running_loop(None)
            world.current = None

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.dead:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # -- the end -----------------------------------------------------------------------------------

    def bury(self) -> None:
        """Let a dead process's tasks come to an end where nobody sees it, and close its loop.

        (Coroutines that are collected half-way would run their ``finally`` at a moment of the collector's.)
        """
        world = self.world
        keep, heap = world.time, world._heap
        world._heap = []
        self.dead = True
        world.current = self
        _set_running_loop(self.loop)
        try:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            for turn in range(20_000):
                due = self.loop.next_due()
                if due is None:
                    break
                if turn % 500 == 499:
                    for task in asyncio.all_tasks(self.loop):
                        task.cancel()
                late = 0.0 if due < 0 else max(0.0, due - self.monotonic())
                world.time += _TURN + late / self.rate
                self.loop.turn()
            self.loop.close()
        finally:
            _set_running_loop(None)
            world.current = None
            world.time, world._heap = keep, heap
