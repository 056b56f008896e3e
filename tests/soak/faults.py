"""What a soak does to workers, to the network and to disks, whatever the store.

Each fault is one coroutine that does harm, waits, and mends it again. No server loses anything that it
acknowledged, so all of the promises stand, whatever happens here.
"""

from __future__ import annotations

import asyncio
import random
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from aiodlock._clock import now

from .disk import Disk

Fault = Callable[[], Awaitable[None]]


class Span(NamedTuple):
    """From when to when something was done."""

    began: float
    ended: float
    what: str
    to_servers: bool


def end_if_cancelled() -> None:
    """End this task if it was cancelled and goes on.

    The clean-up of a driver's call meets the fault, too. Its error takes the place of the cancellation,
    and a driver that tries again after such an error has swallowed it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Line(Protocol):
    """A way to a server that can be disturbed: a `Wire`, or a `FaultProxy`."""

    def cut(self) -> object: ...
    def delay(self, seconds: float) -> None: ...
    def trickle(self, pause: float = 0.0) -> None: ...
    def half_open(self) -> None: ...
    def stall(self) -> None: ...
    async def refuse(self) -> None: ...
    async def heal(self) -> None: ...


class Crew(ABC):
    """The workers, as a tormentor meets them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @abstractmethod
    def signal_one(self, number: int, what: signal.Signals) -> None:
        """Send a signal to one of them."""

    @abstractmethod
    async def kill_one(self) -> None:
        """Kill one that may be killed, and start another."""


class Tormentor(ABC):
    """Runs the servers of one kind of store, and disturbs workers, network and servers one after the other.

    Mutable state: ``crew`` (set before `run`), ``lines`` (what half of the workers go through, made in
    `start`), ``counts``, ``spans`` (from when to when each fault lasted).
    """

    #: The ttl of leases in seconds.
    ttl: float = 3.0
    #: Seconds by which a name may stay without a holder longer than the promise says: to be connected
    #: again, and what the servers do among themselves.
    recovery: float = 2.0
    #: Whether the servers keep what they have in their memory, and no more: then it must not grow.
    memory_is_judged: bool = False
    #: What the workers' clients are given besides.
    client_options: Mapping[str, Any] = {}

    def __init__(self, rng: random.Random, disk: Disk | None) -> None:
        self._rng, self._disk = rng, disk
        self.crew: Crew | None = None
        self.lines: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.spans: list[Span] = []

    # -- what each kind of store has -------------------------------------------------------------

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Start the servers, and the lines to them."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Stop both."""

    @abstractmethod
    def source(self, *, through_lines: bool) -> str | list[str]:
        """Return what a worker's client is made with."""

    @abstractmethod
    async def heal(self) -> None:
        """Have all servers run and answer."""

    @abstractmethod
    async def left(self) -> list[str]:
        """Return what is kept of requests, once there are none; and what would be kept for ever."""

    @abstractmethod
    async def memory(self) -> tuple[str, int]:
        """Return what is measured of the servers, and how many bytes that is now."""

    @abstractmethod
    def of_server(self) -> dict[str, Fault]:
        """Return what may happen to a server."""

    async def explain(self, violation: str) -> list[str]:
        """Return what the servers have on record about what a worker saw. They run."""
        return []

    def broke(self) -> tuple[float, str] | None:
        """Return when the servers first said that they lost what they had acknowledged, and how."""
        return None

    def may_forget(self, moment: float) -> bool:
        """Tell whether a lease may be gone at this moment because several faults have met."""
        return False

    def keep(self, folder: Path) -> None:  # noqa: B027 - most keep nothing
        """Keep in this folder what tells more of a violation."""

    def logs(self) -> Sequence[Path]:
        """Return what the servers have written about what they did, a file each."""
        return ()

    def lose(self, line: Any, *, replies: bool, times: int) -> None:
        """Lose the next commands on a line, or their replies."""
        (line.lose_replies if replies else line.lose_commands)(times)

    async def after(self, seconds: float) -> None:
        """Have all servers run and answer after so long, or when the soak ends."""
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.shield(self.heal())

    # -- running ---------------------------------------------------------------------------------

    async def run(self, pause: float) -> None:
        """Go on until cancelled: three kinds of harm beside each other."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._one_after_the_other(self.of_workers(), pause))
            group.create_task(self._one_after_the_other(self.of_network(), pause))
            group.create_task(self._one_after_the_other(self.of_server(), pause, to_servers=True))

    async def mend(self) -> None:
        """End every fault. Until all servers serve again that is one, too."""
        began = now()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.thaw)
            self._disk.make_room()
        for line in self.lines:
            await line.heal()
        await self.heal()
        self.spans.append(Span(began, now(), "mending", to_servers=True))

    async def _one_after_the_other(
        self, faults: dict[str, Fault], pause: float, *, to_servers: bool = False
    ) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / pause))
            name = self._rng.choice(list(faults))
            self.counts[name] += 1
            began = now()
            try:
                await faults[name]()
            except Exception:
                # Another fault was in the way: each driver has its own words for it.
                self.counts[f"{name}: did not get through"] += 1
            finally:
                self.spans.append(Span(began, now(), name, to_servers))
            end_if_cancelled()

    def up_to(self, seconds: float) -> float:
        return self._rng.uniform(0.1, seconds)

    # -- workers ---------------------------------------------------------------------------------

    def of_workers(self) -> dict[str, Fault]:
        return {"SIGSTOP of a worker": self._stop_worker, "SIGKILL of a worker": self._kill_worker}

    async def _stop_worker(self) -> None:
        assert self.crew is not None
        victim = self._rng.randrange(self.crew.size)
        self.crew.signal_one(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.up_to(5.0))
        finally:
            self.crew.signal_one(victim, signal.SIGCONT)

    async def _kill_worker(self) -> None:
        assert self.crew is not None
        await self.crew.kill_one()

    # -- network ---------------------------------------------------------------------------------

    def of_network(self) -> dict[str, Fault]:
        return {
            "connections cut": self._cut,
            "replies lost": self._lose_replies,
            "commands lost": self._lose_commands,
            "slow network": self._delay,
            "trickle": self._trickle,
            "half-open connections": self._half_open,
            "stalled network": self._stall,
            "connections refused": self._refuse,
        }

    def _some(self) -> Sequence[Line]:
        """Return one line, or all."""
        return self.lines if self._rng.random() < 0.5 else [self._rng.choice(self.lines)]

    async def _cut(self) -> None:
        for line in self._some():
            line.cut()

    async def _lose_replies(self) -> None:
        for line in self._some():
            self.lose(line, replies=True, times=self._rng.randint(1, 5))

    async def _lose_commands(self) -> None:
        for line in self._some():
            self.lose(line, replies=False, times=self._rng.randint(1, 5))

    async def _delay(self) -> None:
        some, seconds = self._some(), self.up_to(0.5)
        for line in some:
            line.delay(seconds)
        await self._heal_after(some, self.up_to(3.0))

    async def _trickle(self) -> None:
        some = self._some()
        for line in some:
            line.trickle()
        await self._heal_after(some, self.up_to(2.0))

    async def _half_open(self) -> None:
        some = self._some()
        for line in some:
            line.half_open()
        await self._heal_after(some, self.up_to(4.0))

    async def _stall(self) -> None:
        some = self._some()
        for line in some:
            line.stall()
        await self._heal_after(some, self.up_to(4.0))

    async def _refuse(self) -> None:
        some = self._some()
        for line in some:
            await line.refuse()
            line.cut()
        await self._heal_after(some, self.up_to(2.0))

    async def _heal_after(self, some: Sequence[Line], seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            for line in some:
                await line.heal()

    # -- disks -----------------------------------------------------------------------------------

    def of_disk(self) -> dict[str, Fault]:
        """Return what may happen to the disk; nothing where there is none to disturb."""
        return (
            {}
            if self._disk is None
            else {"disk stands still": self._freeze, "disk full": self._fill}
        )

    async def _freeze(self) -> None:
        assert self._disk is not None
        await asyncio.to_thread(self._disk.freeze)
        try:
            await asyncio.sleep(self.up_to(4.0))
        finally:
            await asyncio.shield(asyncio.to_thread(self._disk.thaw))

    async def _fill(self) -> None:
        """A server may stop itself for it; then it is started again."""
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill)
        try:
            await asyncio.sleep(self.up_to(3.0))
        finally:
            self._disk.make_room()
            with suppress(OSError, AssertionError):
                await asyncio.shield(self.heal())
