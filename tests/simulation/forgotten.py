"""A node forgets a holder whose token is larger than all that the node will know from then on.

One clock is ahead from the beginning. A waiter that asked first is heard late, so its ticket is smaller
than the holder's token. Another node comes back empty, is waited for properly, and hears of the waiter
before it hears of the holder. Then the holder misses one more node: it needs the one that has forgotten it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from aiodlock import LockLost

from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .world import Process

_TTL = 1.0
_ASKS_AT, _RESTART_AT, _OVER = 1.0, 2.0, 14.0


class Forgotten(QuorumSimulation):
    """One seed: which node does what, how wrong the clock is, and when what happens, within bounds."""

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        super().__init__(seed, prepare, nodes=3)
        rng = self.random
        self.style = replace(
            self.style,
            processes=2,
            tasks=1,
            names=1,
            ttls=(_TTL,),
            waiter_ttl=_TTL,
            delays=(0.0,),
            faults=(),
        )
        self.chaos_ends = _OVER
        self.wrong_clocks.clear()
        self.checkers.forget_tokens = True  # as a clock is ahead, and a node restarts empty
        self._late, self._ahead, self._forgets = rng.sample(range(3), 3)
        self.nodes[self._ahead].offset += rng.choice((1.0, 60.0, 3600.0))
        restart = _RESTART_AT + rng.uniform(0.0, 0.5)
        self.world.at(restart, self._restart)
        self.world.at(restart + rng.uniform(0.0, 0.9), self._pass, 0, self._forgets, True)
        cut = restart + self.restart_delay + rng.uniform(0.0, 4.0)
        self.world.at(cut, self._pass, 0, self._late, False)
        self.world.at(cut + 3.0, self._pass, 0, self._late, True)

    def _pass(self, process: int, node: int, passes: bool) -> None:
        """Say whether messages between a process and a node pass."""
        path = self.networks[node].path(self.world.processes[process])
        path.out_blocked = path.in_blocked = not passes
        if passes:
            self.networks[node].released()

    def _restart(self) -> None:
        self._pass(0, self._forgets, False)
        self.networks[self._forgets].stop_server()
        self.nodes[self._forgets].restart("empty")

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        holds = process is self.world.processes[0]
        if not holds:
            for node in range(3):
                self._pass(1, node, False)
            heard = _ASKS_AT + rng.uniform(0.0, 0.5)
            for node in range(3):
                self.world.at(heard, self._pass, 1, node, True)
        await self._until(process, _ASKS_AT + rng.uniform(0.0, 0.1))
        with suppress(LockLost):
            async with client.lock("n0") as lease:
                async with self._body(process, lease):
                    await asyncio.sleep(rng.uniform(6.0, 10.0) if holds else 0.5)
        await self._until(process, self.chaos_ends)

    async def _until(self, process: Process, moment: float) -> None:
        come: asyncio.Future[None] = process.loop.create_future()
        self.world.at(moment, process.deliver, lambda: come.set_result(None))
        await come
