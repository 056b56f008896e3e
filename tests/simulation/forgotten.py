"""A node forgets a holder whose token is larger than all that the node will know from then on.

One clock is ahead from the beginning. A waiter that asked first is heard late, so its ticket is smaller
than the holder's token. Another node comes back empty, is waited for properly, and hears of the waiter
before it hears of the holder. Then the holder misses one more node: it needs the one that has forgotten it.

In half of the seeds the waiter is stopped when the node hears of the holder, until the node that is missed
has dropped it. So it gives no vote back, and wakes with a majority: the node counts for the waiter alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from aiodlock import LockLost

from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .server import Command
from .world import Process

#: How long the leases of the holder and of the waiter are (seconds).
_TTL, _WAITER_TTL = 1.0, 4.0
_ASKS_AT, _RESTART_AT, _OVER = 1.0, 2.0, 16.0


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
            waiter_ttl=_WAITER_TTL,
            delays=(0.0,),
            faults=(),
        )
        self.chaos_ends = _OVER
        self.wrong_clocks.clear()
        self.checkers.forget_tokens = True  # as a clock is ahead, and a node restarts empty
        self._late, self._ahead, self._forgets = rng.sample(range(3), 3)
        self.nodes[self._ahead].offset += rng.choice((1.0, 60.0, 3600.0))
        self.restart_delay = _WAITER_TTL
        restart = _RESTART_AT + rng.uniform(0.0, 0.5)
        self.world.at(restart, self._restart)
        if rng.random() < 0.5:
            self._cut_at(restart + self.restart_delay + rng.uniform(0.0, 4.0))
            back = restart + rng.uniform(0.0, 0.9)
        else:
            back = restart + self.restart_delay + rng.uniform(0.1, 1.0)
            settles, wakes = rng.uniform(0.3, 0.9), rng.uniform(0.0, 0.5)
            self.world.at(restart, self._stop_waiter_when_heard, settles, wakes)
        self.world.at(back, self._pass, 0, self._forgets, True)

    def _cut_at(self, moment: float) -> None:
        """Let the holder miss one more node, for a while."""
        self.world.at(moment, self._pass, 0, self._late, False)
        self.world.at(moment + 3.0, self._pass, 0, self._late, True)

    def _pass(self, process: int, node: int, passes: bool) -> None:
        """Say whether messages between a process and a node pass."""
        path = self.networks[node].path(self.world.processes[process])
        path.out_blocked = path.in_blocked = not passes
        if passes:
            self.networks[node].released()

    def _stop_waiter_when_heard(self, settles: float, wakes: float) -> None:
        """Stop it when the node has heard of the holder, and before the waiter is asked for its vote.

        :param settles: after so many seconds the node counts for the holder, and is needed.
        :param wakes: the waiter is stopped for so long after it could have had the missed node's vote.
        """
        executed, waiter = self.nodes[self._forgets].executed, self.world.processes[1]

        def on_executed(command: Command, _: object) -> None:
            if b"held" not in command.arguments:
                return
            executed.remove(on_executed)
            cut = self.world.time + settles
            waiter.stop(sleeping=False)
            self.world.at(cut + _TTL + wakes, waiter.resume)
            self._cut_at(cut)

        executed.append(on_executed)

    def _restart(self) -> None:
        self._pass(0, self._forgets, False)
        self.networks[self._forgets].stop_server()
        # Who was connected before tells by the node's mark that it came back later than it was heard.
        self.world.after(0.3, self.nodes[self._forgets].restart, "empty")

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        holds = process is self.world.processes[0]
        # A ticket is made once the nodes know how long the lease is: let them, before they are cut off.
        async with client.lock(f"own{process.name}", ttl=_WAITER_TTL):
            pass
        if not holds:
            for node in range(3):
                self._pass(1, node, False)
            heard = _ASKS_AT + rng.uniform(0.0, 0.5)
            for node in range(3):
                self.world.at(heard, self._pass, 1, node, True)
        await self._until(process, _ASKS_AT + (rng.uniform(0.0, 0.1) if holds else 0.0))
        with suppress(LockLost):
            async with client.lock("n0", ttl=_TTL if holds else _WAITER_TTL) as lease:
                async with self._body(process, lease):
                    await asyncio.sleep(rng.uniform(9.0, 12.0) if holds else 0.5)
        await self._until(process, self.chaos_ends)

    async def _until(self, process: Process, moment: float) -> None:
        come: asyncio.Future[None] = process.loop.create_future()
        self.world.at(moment, process.deliver, lambda: come.set_result(None))
        await come
