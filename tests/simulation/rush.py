"""Nothing goes wrong, but everybody asks at once: votes split, and have to be sorted out.

Every client is nearest to another node, so each has its vote there before the others' messages come. With
leases that outlast the seed, what is not sorted out by asking votes back stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiodlock._request import ASKING, HELD, WAITING, Request

from .checkers import base_of
from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .server import Command
from .world import Process

_LASTING = 6.0
#: One way, as long as a path takes at most; a message may take twice its path's usual time.
_LONGEST = 0.01
_ROUND_TRIP = 2 * _LONGEST
#: To ask for votes, to hear that one is asked back, to give it back, and to write the token; and one more.
_SORTED_OUT_WITHIN = 5 * _ROUND_TRIP
_FIRST, _BETWEEN, _ROUNDS = 1.0, 1.0, 4
_WAITS = (ASKING, WAITING)


class Rush(QuorumSimulation):
    """One seed. Mutable state besides: ``_waits_since`` and ``_free_since`` (true times), ``_held``."""

    reads_late = 0.0

    def __init__(
        self, seed: int, prepare: Callable[[Simulation], None] | None = None, **options: Any
    ) -> None:
        super().__init__(seed, prepare, **options)
        rng = self.random
        self.style = replace(
            self.style,
            processes=len(self.nodes),
            tasks=rng.choice((1, 1, 2)),
            names=1,
            ttls=(_LASTING,),
            waiter_ttl=_LASTING,
            delays=(0.0,),
            shared=rng.choice((0.0, 0.0, 0.3)),
            faults=(),
            breaks=0.02,
            named_owners=0.0,
        )
        self.restart_delay = _LASTING
        #: When all of them ask, in true time, and how much later the last of them does.
        self.rounds = [
            (_FIRST + _BETWEEN * number, rng.choice((0.0, 0.0, _LONGEST, 0.2)))
            for number in range(_ROUNDS)
        ]
        self.chaos_ends = self.rounds[-1][0] + _BETWEEN
        self._waits_since: dict[str, float] = {}
        self._free_since: dict[str, float] = {}
        self._held: set[str] = set()
        for node in self.nodes:
            node.executed.append(self._count_yields)
        self.world.after_turn.append(lambda _: self._look())
        self._tick()

    def _count_yields(self, command: Command, reply: Any) -> None:
        if command.script == "unvote" and command.arguments[1] == b"yield":
            self.outcomes["yields"] = self.outcomes.get("yields", 0) + 1

    def _start(self, name: str) -> None:
        super()._start(name)
        process = self.world.processes[-1]
        nearest = self.random.randrange(len(self.networks))
        for number, network in enumerate(self.networks):
            near = number in (nearest, (nearest + 1) % len(self.networks))
            usual = (
                self.random.uniform(0.0001, 0.001) if near else self.random.uniform(0.001, 0.005)
            )
            network.path(process).usual = usual

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        for moment, spread in self.rounds:
            await self._until(process, moment + rng.uniform(0.0, spread))
            lock = client.rwlock("n0") if rng.random() < self.style.shared else None
            async with lock.read if lock is not None else client.lock("n0"):
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.01)))
            self.outcomes["done"] = self.outcomes.get("done", 0) + 1
        # A client that is closed may leave a vote behind, whose end the others would have to wait for.
        await self._until(process, self.chaos_ends)

    async def _until(self, process: Process, moment: float) -> None:
        come: asyncio.Future[None] = process.loop.create_future()
        self.world.at(moment, process.deliver, lambda: come.set_result(None))
        await come

    # -- what must hold ----------------------------------------------------------------------------

    def _tick(self) -> None:
        self._look()
        self.world.after(_LONGEST, self._tick)

    def _look(self) -> None:
        """A name that is free is not waited for for long, and nobody goes before who came well before."""
        requests: dict[str, list[Request]] = {}
        for session in self.checkers._all_sessions():
            for request in session.requests.values():
                requests.setdefault(base_of(request), []).append(request)
        for base, here in requests.items():
            waiting = [request for request in here if request.state in _WAITS]
            for request in waiting:
                self._waits_since.setdefault(request.id, self.world.time)
            for request in here:
                if request.state is HELD and request.id not in self._held:
                    self._held.add(request.id)
                    self._check_order(request, waiting)
            self._check_split(base, waiting, busy=len(waiting) < len(here))

    def _check_split(self, base: str, waiting: list[Request], *, busy: bool) -> None:
        if busy or not waiting:
            self._free_since.pop(base, None)
            return
        free = self._free_since.setdefault(base, self.world.time)
        since = max(free, min(self._waits_since[request.id] for request in waiting))
        if self.world.time - since > _SORTED_OUT_WITHIN:
            ids = [request.id for request in waiting]
            self.checkers.wrong("split", f"{ids} wait for each other since {since:.3f}")

    def _check_order(self, new: Request, waiting: list[Request]) -> None:
        mine = getattr(new.place, "tally")  # noqa: B009
        for request in waiting:
            theirs = getattr(request.place, "tally")  # noqa: B009
            if new.terms.mode == request.terms.mode == "shared" or theirs is None:
                continue
            ahead = (mine.ticket - theirs.ticket) / 1e6
            if ahead > _ROUND_TRIP:
                self.checkers.wrong(
                    "fairness",
                    f"{new.id} holds while {request.id} waits, {ahead:.3f} s older",
                )
