"""Locks that linger: seeds in which most of them do, and what must hold then, besides the rest.

linger      while anybody waits, each holder on the server that lingers is recalled, and its client told;
            a client that was told hands the lease to no body any more, and keeps no idle one;
            no body begins with a lease that is over for it, by its own margin;
            two bodies of one client have a name together only if both read, or are one owner's
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiodlock
from aiodlock._description import Description
from aiodlock._lock import Acquirable
from aiodlock._request import HELD, KEPT, Request

from .checkers import _PROMPT, Body, base_of
from .memory import MachineServer, MachineSimulation
from .scenario import SimClient, Simulation
from .world import Process

#: Which share of the turns is a writer's that reads for a moment, or a reader's.
_READING = 0.3


class _Recalls:
    """What clients have heard of recalls, and what they do afterwards."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.checkers = checkers = simulation.checkers
        self.world = simulation.world
        #: When a client has heard first that a request is recalled.
        self.heard: dict[str, float] = {}
        #: Bodies that got a lease without a message.
        self.handed_out = 0
        network, on_reply = simulation.network, simulation.network.on_reply
        network.on_recalled = self._hear

        def hear_reply(process: Process, command: Any, sent: float, reply: Any) -> None:
            on_reply(process, command, sent, reply)
            if isinstance(reply, Exception) or not command.id:
                return
            if reply[0] == b"recalled":
                self._hear(command.id)
            elif reply[0] == b"released":
                for id, token in zip(reply[2::2], reply[3::2], strict=True):
                    if token.endswith(b"r"):
                        self._hear(id.decode())

        network.on_reply = hear_reply
        simulation.server.executed.append(self._look_at_server)
        simulation.world.after_turn.append(self._look_at_client)
        hold_again = Request.hold_again

        def observed(request: Request, *about: Any) -> None:
            hold_again(request, *about)
            self.handed_out += 1
            process = self.world.current
            assert process is not None
            if process.boot() >= request.ends_at:
                checkers.wrong("linger", f"{process}: {request!r} begins a body, and is over")
            if self._knows(process, request):
                checkers.wrong(
                    "linger", f"{process}: {request.id} begins another body, and was recalled"
                )

        simulation.patch(Request, "hold_again", observed)

    def _hear(self, id: str) -> None:
        self.heard.setdefault(id, self.world.time)

    def _knows(self, process: Process, request: Request) -> bool:
        """Whether the process has heard of the recall, and had the time to act on it."""
        heard = self.heard.get(request.id)
        return heard is not None and self.world.time - max(heard, process.resumed_at) > _PROMPT

    def _look_at_client(self, process: Process) -> None:
        for session in self.checkers.sessions.get(process, ()):
            for request in session.requests.values():
                if request.state is KEPT and self._knows(process, request):
                    self.checkers.wrong(
                        "linger", f"{process}: {request.id} was recalled, and is kept"
                    )
        mine = [body for body in self.checkers.bodies if body.process is process]
        for number, one in enumerate(mine):
            for other in mine[:number]:
                self._check_beside(process, one, other)

    def _check_beside(self, process: Process, one: Body, other: Body) -> None:
        first, second = one.lease._request, other.lease._request
        if one.task is other.task or base_of(first) != base_of(second):
            return
        for body, request in ((one, first), (other, second)):
            held = request.state is HELD and body.lease._acquired.serial in request.handles
            if not held or process.boot() >= request.ends_at:
                return
        if first.terms.mode == second.terms.mode == "shared":
            return
        named = first.options.owner
        if named is not None and named == second.options.owner:
            return
        if not self.checkers.forgetful and not {first.id, second.id} & self.checkers.excused:
            self.checkers.wrong(
                "linger", f"bodies of two tasks have it, by {first.id} and {second.id}"
            )

    def _look_at_server(self, command: Any, reply: Any) -> None:
        if command.script not in ("acquire", "extend", "leave", "break"):
            return
        if isinstance(reply, Exception):
            return
        base = command.base
        now = self.simulation.server.now_ms()
        name = self.checkers.ledger(base).known
        if not any(now < waiter.deadline for waiter in name.waiters.values()):
            return
        free = self._may_linger(base)
        for record in name.live(now):
            # One that has left stays for its lock-delay, and is live again when the clock is set back.
            if record.id in free and record.id not in self.checkers.left:
                self.checkers.wrong("linger", f"{record} is not recalled, and somebody waits")

    def _may_linger(self, base: str) -> set[str]:
        """Return the ids of the holders that linger and are not recalled, as the server has them."""
        server: Any = self.simulation.server
        if isinstance(server, MachineServer):
            key = server._keys.get(base)
            found = None if key is None else server.names.find(key)
            entries = {} if found is None else found.holders
            return {id for id, e in entries.items() if e.asked.lingers and not e.recalled}
        state = server.db.get(f"{base}:state".encode())
        texts = {} if state is None else state.value._values
        return {id.decode() for id, text in texts.items() if b" g=1" in text}


class _Locks:
    """Makes locks linger. Every other time a client takes the very lock again that it took of the name
    last: so blocks begin and end by the short way, too."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._last: dict[tuple[SimClient, str], Acquirable] = {}

    def pair(
        self, client: SimClient, lock: Acquirable, weaker: Acquirable
    ) -> tuple[Acquirable, Acquirable]:
        """Return a lock, and one that its holder gets besides, of which most linger."""
        last = self._last.get((client, lock.name))
        if last is not None and self._chance.random() < 0.5:
            lock = last
        else:
            lock = self._lingering(client, lock)
            if lock._described.options.linger:
                self._last[client, lock.name] = lock
        return lock, self._lingering(client, weaker)

    def _lingering(self, client: SimClient, lock: Acquirable) -> Acquirable:
        if not isinstance(lock, aiodlock.Lock) or not lock._described.options.auto_extend:
            return lock
        if self._chance.random() < 0.2:
            return lock
        known = lock._described.options
        shortest = min(known.ttl, known.max_hold or known.ttl)
        options = replace(
            known,
            linger=self._chance.choice((0.05, 0.5, 2.0)),
            margin=self._chance.choice((0.0, 0.0, 0.0, 0.7)) * shortest,
        )
        return aiodlock.Lock(Description(client._core, lock.name, lock.mode, options))


class Lingers(Simulation):
    """One seed on the scripts."""

    keeps_records = False  # a lock with hold_at_least does not linger

    long_share = 0

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        self._chance = random.Random(f"{seed} lingers")
        self._locks = _Locks(self._chance)
        super().__init__(seed)
        self.recalls = _Recalls(self)
        _tame(self, self._chance)
        if prepare is not None:
            prepare(self)

    def _some_lock(self, client: SimClient) -> tuple[Acquirable, Acquirable]:
        return self._locks.pair(client, *super()._some_lock(client))

    async def _turn(self, process: Process, client: SimClient) -> None:
        if self._chance.random() < _READING:
            await _read_while_writing(self, process, client, self._chance)
        else:
            with _refused_extensions():
                await super()._turn(process, client)


class LingersOnTheMachine(MachineSimulation):
    """One seed on the machine."""

    keeps_records = False  # a lock with hold_at_least does not linger

    long_share = 0

    def __init__(self, seed: int, prepare: Callable[[Simulation], None] | None = None) -> None:
        self._chance = random.Random(f"{seed} lingers")
        self._locks = _Locks(self._chance)
        super().__init__(seed)
        self.recalls = _Recalls(self)
        _tame(self, self._chance)
        if prepare is not None:
            prepare(self)

    def _some_lock(self, client: SimClient) -> tuple[Acquirable, Acquirable]:
        return self._locks.pair(client, *super()._some_lock(client))

    async def _turn(self, process: Process, client: SimClient) -> None:
        if self._chance.random() < _READING:
            await _read_while_writing(self, process, client, self._chance)
        else:
            with _refused_extensions():
                await super()._turn(process, client)


@contextmanager
def _refused_extensions() -> Iterator[None]:
    """A body may ask for a ttl that its margin does not leave anything of."""
    try:
        yield
    except ValueError as error:
        if "margin" not in str(error):
            raise


async def _read_while_writing(
    simulation: Simulation, process: Process, client: SimClient, chance: random.Random
) -> None:
    """A writer reads for a moment, and goes on writing. Or a reader comes by."""
    style = simulation.style
    name = f"n{chance.randrange(style.names)}"
    both = client.rwlock(name, ttl=style.ttls[0], linger=0.5, timeout=2.0)
    base = f"aiodlock:2:lock:{{{name}}}"
    if chance.random() < 0.5:
        async with both.read as lease, simulation._body(process, lease):
            await simulation._hold(lease, base)
        return
    async with both.write as lease, simulation._body(process, lease):
        async with both.read:
            pass
        await simulation._hold(lease, base)


def _tame(simulation: Simulation, chance: random.Random) -> None:
    """Where each wait is followed by the next, hardly any lease would ever be idle."""
    style = simulation.style
    simulation.style = replace(
        style,
        processes=chance.choice((1, 2, 2)),
        tasks=chance.choice((1, 2, 3)),
        names=chance.choice((1, 2, 4)),
        ttls=style.ttls[:1],
        shared=chance.choice((0.0, 0.3, 0.6)),
        hold=chance.choice((0.002, 0.01, 0.05)),
        think=chance.choice((0.005, 0.02, 0.1)),
        breaks=0.05,
        delays=style.delays[:1] if chance.random() < 0.7 else style.delays,
    )
