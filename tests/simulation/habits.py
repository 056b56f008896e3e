"""What users' code does: most turns of these seeds are not a plain block.

Bodies swallow their cancellation, run task groups, are suspended in generators that another task closes,
and block their loop. On Python 3.12 and later, half of the processes start tasks eagerly. One more checker:

steps       after its lease has ended, a body takes no second step; a body that swallowed its cancellation
            is not left as if nothing had happened, and a generator is not closed so
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from aiodlock._lease import Lease

from .checkers import _AFTER_SLEEP
from .memory import MachineSimulation
from .scenario import SimClient, Simulation, _in_another_task
from .world import Process

#: Which share of the turns is one of these.
_SHARE = 0.7

if TYPE_CHECKING:
    _Base = Simulation
else:
    _Base = object


class _Habits(_Base):
    """Mutable state besides: ``steps_after`` (by task and request), ``swallowed`` (cancellations)."""

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed, prepare)
        self.steps_after: dict[tuple[object, str], int] = {}
        self.swallowed = 0
        self._wrong = ""
        self.world.after_turn.append(self._look)

    def _look(self, process: Process) -> None:
        # In a task it would be one exception among others.
        if self._wrong:
            self.checkers.wrong("steps", self._wrong)

    def _start(self, name: str) -> None:
        super()._start(name)
        if sys.version_info >= (3, 12):
            self.world.processes[-1].loop.eager = self.habits.random() < 0.5

    async def _turn(self, process: Process, client: SimClient) -> None:
        if self.habits.random() > _SHARE:
            await super()._turn(process, client)
            return
        ways = (self._swallow, self._in_a_group, self._by_a_generator, self._block)
        await self.habits.choice(ways)(process, client)

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, process: Process, lease: Lease) -> None:
        """A body takes a step."""
        request = lease._request
        if lease.held or request.options.on_lost != "cancel":
            return
        if process.slept(self.world.time - _AFTER_SLEEP):
            return  # its timers stood still meanwhile
        key = asyncio.current_task(), request.id
        steps = self.steps_after[key] = self.steps_after.get(key, 0) + 1
        if steps > 1:
            self._wrong = f"{process}: a body takes step {steps} after the end of {request.id}"

    async def _walk(self, process: Process, lease: Lease, pauses: float = 0.05) -> None:
        """Take steps, and once the lease has ended as fast as a loop turns."""
        rng = self.habits
        ends = self.world.time + rng.expovariate(1 / self.style.hold)
        if rng.random() < 0.1:
            ends += 2 * lease.ttl
        while self.world.time < ends:
            self._step(process, lease)
            await asyncio.sleep(rng.uniform(0.001, pauses) if lease.held else 0)

    # -- habits ------------------------------------------------------------------------------------

    async def _swallow(self, process: Process, client: SimClient) -> None:
        """Catch whatever comes, clean up, and leave the block as if nothing had happened."""
        lock, _ = self._some_lock(client)
        caught: asyncio.CancelledError | None = None
        async with lock as lease, self._body(process, lease):
            try:
                await self._walk(process, lease)
            except asyncio.CancelledError as error:
                if lease.lost is None:
                    raise
                caught = error
                self.swallowed += 1
                await asyncio.sleep(self.habits.uniform(0.0, 0.01))
        if caught is not None:
            self._wrong = f"{process}: {lease._request.id} was lost, and its block ends well"

    async def _in_a_group(self, process: Process, client: SimClient) -> None:
        """Let children take the steps."""
        lock, _ = self._some_lock(client)
        async with lock as lease, self._body(process, lease):
            async with asyncio.TaskGroup() as group:
                for _ in range(self.habits.randint(1, 3)):
                    group.create_task(self._paced(process, lease))

    async def _paced(self, process: Process, lease: Lease) -> None:
        """As ``_walk``; a group cancels its children some turns after it is cancelled itself."""
        rng = self.habits
        ends = self.world.time + rng.expovariate(1 / self.style.hold)
        while self.world.time < ends:
            self._step(process, lease)
            await asyncio.sleep(rng.uniform(0.001, 0.05))

    async def _by_a_generator(self, process: Process, client: SimClient) -> None:
        """Enter the block in a generator, take the steps outside of it, and close it, perhaps elsewhere.

        Often the lock is an object that other generators are in, too.
        """
        rng = self.habits
        lock = self._common_lock(client) if rng.random() < 0.6 else self._some_lock(client)[0]
        last: Lease | None = None

        async def leases() -> AsyncGenerator[Lease, None]:
            async with lock as lease, self._body(process, lease):
                while True:
                    yield lease

        found = leases()
        try:
            ends = self.world.time + rng.expovariate(1 / self.style.hold)
            async for lease in found:
                last = lease
                self._step(process, lease)
                if self.world.time > ends:
                    break
                await asyncio.sleep(rng.uniform(0.001, 0.05) if lease.held else 0)
        finally:
            if rng.random() < 0.5:
                await found.aclose()
            else:
                await _in_another_task(found.aclose(), cancel=False)
        if last is not None and last.lost is not None:
            self._wrong = (
                f"{process}: {last._request.id} was lost, and its generator is closed as if well"
            )

    async def _block(self, process: Process, client: SimClient) -> None:
        """Block the loop, often for longer than the lease, and go on."""
        lock, _ = self._some_lock(client)
        async with lock as lease, self._body(process, lease):
            await self._walk(process, lease)
            length = self.habits.choice((0.3, 1.2)) * lease.ttl
            self.world.log(f"{process}: the loop is blocked for {length:.3f} s")
            if process.running:
                process.stop(sleeping=False)
                self.world.after(length, process.resume)
            await asyncio.sleep(0)  # what follows runs when it is over
            await self._walk(process, lease)


class Habits(_Habits, MachineSimulation):
    """One seed on the machine."""


class HabitsOnRedis(_Habits, Simulation):
    """One seed on the scripts."""
