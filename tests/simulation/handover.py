"""Nothing goes wrong, and the next one waits at every node when the holder leaves: then it asks nobody.

asks        who has waited at all nodes for a while when the holder leaves, sends nothing to any node before
            its body begins, whether it has a timeout or not
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiodlock._request import HELD, WAITING

from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .server import Command
from .world import Process

#: Leases are extended later than anybody waits.
_LASTING = 60.0
#: Longer than a request and its answer take to all nodes and back.
_SETTLED = 0.1
_TURNS = 5


def _all_well(simulation: Simulation) -> None:
    assert isinstance(simulation, QuorumSimulation)
    simulation.deaths, simulation.wrong_clocks = {}, {}


class HandOver(QuorumSimulation):
    """One seed. Mutable state besides: ``_waits_since`` (by request id),
    ``_left_at`` (when a holder's leave reached a node last), ``_asked_at`` (by request id: when a node was
    asked), ``_held`` (the requests that have come to hold)."""

    def __init__(
        self, seed: int, prepare: Callable[[Simulation], None] | None = None, **options: Any
    ) -> None:
        super().__init__(seed, _all_well, **options)
        self.style = replace(
            self.style,
            processes=self.random.choice((1, 2, 3)),
            tasks=2,
            names=1,
            ttls=(_LASTING,),
            waiter_ttl=_LASTING,
            delays=(0.0,),
            shared=0.0,
            faults=(),
            breaks=0.0,
            named_owners=0.0,
        )
        self._waits_since: dict[str, float] = {}
        self._left_at = 0.0
        self._asked_at: dict[str, float] = {}
        self._held: set[str] = set()
        self.restart_delay = _LASTING
        for node in self.nodes:
            node.executed.append(self._executed)
        self.world.after_turn.append(self._look)
        if prepare is not None:
            prepare(self)

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        for _ in range(_TURNS):
            timeout = rng.choice((None, 30.0))
            async with client.lock("n0", timeout=timeout):
                await asyncio.sleep(rng.uniform(0.5, 2.0) * _SETTLED)

    # -- what must hold ----------------------------------------------------------------------------

    def _executed(self, command: Command, reply: Any) -> None:
        if command.script == "unvote" and command.arguments[1] != b"yield":
            self._left_at = self.world.time
        elif command.script == "vote":
            self._asked_at[command.id] = self.world.time

    def _look(self, process: Process) -> None:
        for session in self.checkers.sessions.get(process, ()):
            for request in session.requests.values():
                if request.state is WAITING:
                    self._waits_since.setdefault(request.id, self.world.time)
                elif request.state is HELD and request.id not in self._held:
                    self._held.add(request.id)
                    self._check(process, request.id)

    def _check(self, process: Process, id: str) -> None:
        since = self._waits_since.get(id)
        if since is None or since + _SETTLED > self._left_at:
            return
        self.outcomes["handed over"] = self.outcomes.get("handed over", 0) + 1
        if self._asked_at[id] > since:
            self.checkers.wrong(
                "asks", f"{process}: {id} waited since {since:.3f}, and asked again"
            )
