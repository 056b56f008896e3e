"""True time, the order of events, and the processes that live in it.

Every process has an event loop of its own, whose clock is virtual, runs at its own rate, and stands
still while the machine is suspended. The world steps one loop at a time: nothing here ever waits.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any

from anyio._backends._asyncio import CancelScope

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
        _ages.begin_anew()

    def log(self, text: object) -> None:
        self.trace.append((self.time, text))

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heappush(self._heap, (max(when, self.time), next(self._serials), call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.time + delay, call, *args)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until then; return early, and True, when ``done`` says so."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.time, _, call, args = heappop(heap)
            call(*args)
            if done():
                return True
        self.time = end
        return done()

    @contextmanager
    def as_process(self, process: Process) -> Iterator[None]:
        """Let the library's clock be that of a process, for a look from outside."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before


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
        self._count = count()

    def next(self) -> int:
        return next(self._count)


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
    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._age = _ages.next()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, with the clock of a process and without a selector."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._selector = _NoSelector()
        self._clock_resolution = 1e-7
        #: Tasks take their first step when they are made, as with ``asyncio.eager_task_factory``.
        self.eager = False
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.process.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _write_to_self(self) -> None:
        self.process.wake()  # call_soon_threadsafe asks for it

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def turn(self) -> None:
        """Run what is due, once: what ``_run_once`` does for a loop that has nothing to select."""
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if scheduled:
            end = self.time() + self._clock_resolution
            while scheduled and scheduled[0]._when < end:
                timer = heappop(scheduled)
                timer._scheduled = False
                ready.append(timer)
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def next_due(self) -> float | None:
        """Return when (on its own clock) there is something to do; None: never."""
        if self._ready:  # type: ignore[attr-defined]
            return -1.0
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)._scheduled = False
        when: float | None = scheduled[0]._when if scheduled else None
        return when


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


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
) -> asyncio.Task[Any]:
    if isinstance(loop, SimLoop) and loop.eager and asyncio._get_running_loop() is loop:
        kwargs["eager_start"] = True
    return _Task(coro, loop=loop, **kwargs)


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
        self._inbox: deque[Callable[[], None]] = deque()
        self._planned: float | None = None
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
        while self._inbox:
            self.loop.call_soon(self._inbox.popleft())
        self.wake()

    def crash(self) -> None:
        self.running, self.dead = False, True
        if self._stopped_at is None:
            self._stopped_at = self.world.time

    def deliver(self, call: Callable[[], None]) -> None:
        """Something came in from outside: it is there when the loop looks next."""
        if self.dead:
            return
        if not self.running:
            self._inbox.append(call)
            return
        self.loop.call_soon(call)
        self.wake()

    def wake(self) -> None:
        self._plan_turn(self.world.time)

    def _plan_turn(self, when: float) -> None:
        if self._planned is not None and self._planned <= when:
            return
        self._planned = when
        self._plan += 1
        self.world.at(when, self._turn, self._plan)

    def _turn(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._planned = None
        if not self.running:
            return
        world = self.world
        world.current = self
        try:
            self.loop.turn()
        finally:
            world.current = None
        for look in world.after_turn:
            look(self)
        due = self.loop.next_due()
        if due is None:
            return
        soonest = world.time + _TURN
        if due < 0:
            self._plan_turn(soonest)
        else:
            self._plan_turn(max(soonest, world.time + (due - self.monotonic()) / self.rate))

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
            world.current = None
            world.time, world._heap = keep, heap
