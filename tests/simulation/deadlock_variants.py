"""Broken searches for deadlocks, each caught within sixty seeds. See ``variants.py``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from aiodlock import _cycles, _deadlocks, _waits
from aiodlock._clock import now
from aiodlock._cycles import Asking, Block, Cycle
from aiodlock._register import Register
from aiodlock._request import Request

from .deadlocks import Deadlocks
from .memory import Line
from .scenario import Simulation
from .variants import Prepare, Variant
from .variants import _both as both


def _cycles_with(*changes: tuple[str, str]) -> Prepare:
    """Look for cycles with another text."""
    assert _cycles.__file__ is not None
    source = Path(_cycles.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"this is not in the search any more: {old}"
        source = source.replace(old, new)

    def prepare(simulation: Simulation) -> None:
        module = ModuleType("aiodlock._cycles_mutant")
        module.__package__ = "aiodlock"
        sys.modules[module.__name__] = module  # dataclasses look there
        exec(compile(source, "mutant", "exec"), module.__dict__)
        # What it is given, and gives, has the usual types.
        for name in ("TURN", "Answer", "Cycle", "Edge", "Question", "Wait"):
            module.__dict__[name] = getattr(_cycles, name)
        simulation.patch(_deadlocks, "search", module.__dict__["search"])
        simulation.patch(_deadlocks, "verify", module.__dict__["verify"])

    return prepare


def _world(**style: Any) -> Prepare:
    """Let nothing go wrong but what users do, and let what a variant needs come often.

    What is not a part of ``Style`` is set on the simulation.
    """

    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, Deadlocks)
        of_style = {name: value for name, value in style.items() if hasattr(simulation.style, name)}
        plain: dict[str, Any] = {
            "forgetful": False,
            "faults": (),
            "processes": 3,
            "tasks": 2,
            "names": 2,
            "ttls": (2.0,),
            "waiter_ttl": 2.0,
            "hold": 0.02,
            "think": 0.005,
            "breaks": 0.0,
            "cancels": 0.0,
            "named_owners": 0.0,
            "shared": 0.0,
        }
        simulation.style = replace(simulation.style, **plain | of_style)
        simulation.checkers.forgetful = False
        others = {"deadlock_after": 0.1, "blind_share": 0.0, "clocks_differ": False, "bares": 0.0}
        others |= {
            "timeouts": 0.0,
            "multilocks": 0.0,
            "places": 0.0,
            "generators": 0.0,
            "lingers": 0.0,
            "swallows": 0.0,
            "gives_up": 0.0,
            "patience": 0.5,
        }
        for name, value in (others | style).items():
            if name not in of_style:
                assert hasattr(simulation, name), name
                setattr(simulation, name, value)

    return prepare


def _answered_late(late: float) -> Prepare:
    """Let each answer take long on its way back: what it tells may be over."""

    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, Deadlocks)
        simulation.patch(Line, "behind", late)
        simulation.oracle.always_disturbed = True  # a search takes its time then

    return prepare


_RESTLESS: dict[str, Any] = {"gives_up": 0.7, "hold": 0.05, "deadlock_after": 0.0}


def _believe_the_first_pass(simulation: Simulation) -> None:
    def verify(found: list[Cycle], me: str) -> Asking[list[Cycle]]:
        yield from ()
        return found

    simulation.patch(_deadlocks, "verify", verify)


def _keep_what_was_told(simulation: Simulation) -> None:
    """Waits that are over stay told, and are believed although they are not in the queue."""
    simulation.patch(_waits.Record, "remove", lambda self, id, granted: None)
    simulation.patch(simulation.checkers, "check_nothing_left", lambda process, session: None)


def _look_once(simulation: Simulation) -> None:
    simulation.patch(_deadlocks, "_SECOND", 1e6)
    simulation.patch(_deadlocks, "_LATER", 1e6)


def _sleep_until_the_next(simulation: Simulation) -> None:
    """A wait that becomes long is told when the others are looked at again."""

    async def until_due(self: _deadlocks.Deadlocks) -> None:
        due = min((long.due for long in self._long.values()), default=0.0)
        await asyncio.sleep(max(0.0, due - now()))
        self._looked_at = now()

    simulation.patch(_deadlocks.Deadlocks, "_until_due", until_due)


def _count_bare_leases(simulation: Simulation) -> None:
    """Whatever a task holds counts as a block of its own."""

    registers: list[Register] = []
    make = Register.__init__

    def noted(self: Register, *about: Any) -> None:
        make(self, *about)
        registers.append(self)

    def inside(self: _deadlocks.Deadlocks, request: Any) -> frozenset[Block]:
        mine = (one for one in registers if request.id in one.requests)
        return frozenset(held for register in mine for held in _held(register, request))

    simulation.patch(Register, "__init__", noted)
    simulation.patch(_deadlocks.Deadlocks, "_inside", inside)


def _count_every_semaphore(simulation: Simulation) -> None:
    """A semaphore is taken for a name that everybody takes exclusively, however many places it has."""
    simulation.patch(_deadlocks, "_is_watched", lambda request: True)
    _cycles_with(("return holder is not None and holder.count == 1 and", "return True or"))(
        simulation
    )


def _keep_telling_of_left_blocks(simulation: Simulation) -> None:
    """What was told of a wait stays when another task ends what the one that waits is inside of."""
    simulation.patch(_deadlocks.Deadlocks, "_tell_anew", lambda self, request: None)


def _held(register: Register, request: Any) -> Iterator[Block]:
    task = request.task()
    for holds in register.holds_of.values():
        for one in holds:
            if one.task is not None and one.task() is task and one.terms.kind == "lock":
                yield (one.terms.kind, one.name), one.token


def _count_from_the_answer(simulation: Simulation) -> None:
    queue = Request.queue
    simulation.patch(Request, "queue", lambda self, asked_at: queue(self, now()))


DEADLOCK_VARIANTS = {
    "deadlocks: the first pass is believed": Variant(
        both(
            _believe_the_first_pass,
            _world(**_RESTLESS | {"names": 3, "gives_up_within": 3.0}),
            _answered_late(0.4),
        ),
        ("false",),
        kind=Deadlocks,
        seed=75,
    ),
    "deadlocks: tokens are not compared": Variant(
        both(
            _cycles_with(
                (".get((where, holder.token), ())", ".get((where, 0), ())"),
                (
                    "index.setdefault(block, []).append(wait)",
                    "index.setdefault((block[0], 0), []).append(wait)",
                ),
                (
                    "self._holders.setdefault((holder.owner, holder.token), [])",
                    "self._holders.setdefault((holder.owner, 0), [])",
                ),
                (
                    "self._holders.get((holder.owner, holder.token), ())",
                    "self._holders.get((holder.owner, 0), ())",
                ),
                (
                    "and (edge.wait.where, edge.holder.token) in following.wait.inside",
                    "and edge.wait.where in dict(following.wait.inside)",
                ),
            ),
            _world(processes=1, tasks=6, bares=0.4, names=3, shared=0.5),
        ),
        ("false",),
        kind=Deadlocks,
    ),
    "deadlocks: who left the queue still waits": Variant(
        both(
            _keep_what_was_told,
            _cycles_with(
                ("if place is None and not known.needs_queue(wait):", "if place is None:"),
                (
                    "if place is None and (edge.queued or wait.client != me):",
                    "if place is None and edge.queued:",
                ),
            ),
            _world(**_RESTLESS),
        ),
        ("false",),
        kind=Deadlocks,
    ),
    "deadlocks: the oldest gives up": Variant(
        both(_cycles_with(("other.age < start.age", "other.age > start.age")), _world()),
        ("victim",),
        kind=Deadlocks,
    ),
    "deadlocks: everybody gives up": Variant(
        both(
            _cycles_with(
                (" and other.age < start.age", ""), ("if few and len(victims) > 1:", "if False:")
            ),
            _world(),
        ),
        ("victim",),
        kind=Deadlocks,
    ),
    "deadlocks: requests with a timeout are edges": Variant(
        both(
            _cycles_with(
                ('waiter.mode == "exclusive" and is_patient(waiter)', 'waiter.mode == "exclusive"')
            ),
            _world(shared=0.5, timeouts=0.5),
        ),
        ("false",),
        kind=Deadlocks,
    ),
    "deadlocks: bare leases are blocks": Variant(
        both(_count_bare_leases, _world(bares=0.4, names=3)), ("false",), kind=Deadlocks, seed=20
    ),
    "deadlocks: a block that another task has left stays told": Variant(
        both(
            _keep_telling_of_left_blocks,
            _world(generators=0.8, named_owners=0.6, hold=0.1, deadlock_after=0.05),
        ),
        ("false",),
        kind=Deadlocks,
    ),
    "deadlocks: semaphores of several places are edges": Variant(
        both(_count_every_semaphore, _world(places=0.6, limit=2)), ("false",), kind=Deadlocks
    ),
    "deadlocks: nobody in front of the queue is an edge": Variant(
        both(
            _cycles_with(("        ][:2]", "        ][:0]")),
            _world(shared=0.6),
        ),
        ("found", "liveness"),
        kind=Deadlocks,
    ),
    "deadlocks: one look for each wait": Variant(
        both(_look_once, _world()), ("found", "liveness"), kind=Deadlocks
    ),
    "deadlocks: told when the others are looked at again": Variant(
        both(_sleep_until_the_next, _world(deadlock_after=0.3)), ("found",), kind=Deadlocks
    ),
    "deadlocks: a request is as old as its answer": Variant(
        both(_count_from_the_answer, _world(names=3)), ("victim",), kind=Deadlocks
    ),
}
