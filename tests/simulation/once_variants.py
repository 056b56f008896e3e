"""Broken variants of what is done once, and of what bodies keep closed. See ``variants.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiodlock import _departure, _once
from aiodlock._errors import LockLost
from aiodlock._model import ENDED, Left
from aiodlock.backends.memory.machine import Entry

from .memory import MachineSimulation
from .scenario import Simulation
from .variants import VARIANTS, Prepare, Variant
from .variants import _both as both
from .variants import _lua as lua
from .variants import _machine as machine


def _busy(simulation: Simulation) -> None:
    """Let nearly all turns do something once, and let processes be stopped and die meanwhile."""
    assert simulation.onces is not None
    habits = simulation.onces.habits
    habits.share, habits.keeps, habits.failing, habits.forgets = 0.9, (0.05, 0.3), 0.3, 0.02
    habits.breaks = 0.15
    _common(simulation, ("slow", "stall", "pause", "cut", "crash"))


def _holding(simulation: Simulation) -> None:
    """Let most bodies keep their names closed."""
    assert simulation.onces is not None
    habits = simulation.onces.habits
    habits.share, habits.holds = 0.0, (0.6, 0.25, 0.0)
    _common(simulation, ("pause", "slow", "partition"))


def _common(simulation: Simulation, faults: tuple[str, ...]) -> None:
    simulation.style = replace(
        simulation.style,
        forgetful=False,
        faults=faults,
        pause_between_faults=0.3,
        processes=3,
        tasks=2,
        names=1,
        ttls=(0.3,),
        waiter_ttl=0.6,
        delays=(0.0,),
        hold=0.1,
        think=0.02,
    )
    simulation.checkers.forgetful = False


def _losing_replies(simulation: Simulation) -> None:
    """Let leaves be repeated: leases outlast a connection."""
    _busy(simulation)
    assert simulation.onces is not None
    simulation.onces.habits.keeps, simulation.onces.habits.forgets = (5.0,), 0.3
    simulation.style = replace(
        simulation.style, ttls=(2.0,), faults=("cut", "mute"), pause_between_faults=0.1, hold=0.02
    )


def _clock_back(simulation: Simulation) -> None:
    simulation.style = replace(simulation.style, faults=("clock_back",))


def _record_failures(simulation: Simulation) -> None:
    def record_at(self: _once.Outcome, *_: object) -> bytes:
        return _once.encode_record(self.result)

    simulation.patch(_once.Outcome, "record_at", record_at)


def _confirm_what_is_unknown(simulation: Simulation) -> None:
    right = _departure.Departure.until_deadline

    async def until_deadline(self: Any, request: Any, serial: Any, end: Any = ENDED) -> Left:
        try:
            left = await right(self, request, serial, end)
        except LockLost:
            return Left("recorded")
        return Left("recorded") if end.record else left

    simulation.patch(_departure.Departure, "until_deadline", until_deadline)


def _close_for_no_body(simulation: Simulation) -> None:
    simulation.patch(_departure, "UNUSED", ENDED)
    simulation.style = replace(simulation.style, cancels=0.7, names=2, hold=0.05)


def _as_long_as_the_lease(simulation: Simulation) -> None:
    """Let holds end just before the deadline of a lease that is not extended."""
    assert simulation.onces is not None
    simulation.onces.habits.holds = (0.299, 0.28)
    simulation.style = replace(simulation.style, hold=0.5, faults=("partition",))


def _forget_holds_of_the_dead(simulation: Simulation) -> None:
    def closed_until(self: Entry) -> int:
        return self.deadline + (self.rest or self.asked.delay)

    simulation.patch(Entry, "closed_until", property(closed_until))


def _busy_machine(old: str, new: str) -> Prepare:
    return both(machine(old, new), _busy)


ONCE_VARIANTS: dict[str, Variant] = {
    "once: recorded without the lease": Variant(
        _busy_machine("elif holder is None or now >= holder.deadline:", "elif False:"),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: recorded again when the leave is repeated": Variant(
        both(
            machine(
                "pass  # the answer to an earlier call was lost",
                "self._record(id, result, now + keep)",
            ),
            _losing_replies,
        ),
        ("record",),
        kind=MachineSimulation,
        seed=11,
    ),
    "once: a repeated leave is not answered from the record": Variant(
        both(
            machine("self.record[0] == id and now < self.record_until:", "False:"), _losing_replies
        ),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: waiters are not told": Variant(
        _busy_machine("self._messages += [\n            Message", "[\n            Message"),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: one waiter of each client is told": Variant(
        _busy_machine('",".join(ids)', "ids[0]"), ("record",), kind=MachineSimulation
    ),
    "once: waiters stay in the queue": Variant(
        _busy_machine("        self.waiters.clear()\n", ""), ("record",), kind=MachineSimulation
    ),
    "once: the one who records goes on holding": Variant(
        _busy_machine(
            "until, self.now\n        self.holders.clear()",
            "until, self.now",
        ),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: an acquire looks at no record": Variant(
        _busy_machine(
            "        if (done := self._on_record()) is not None:\n            return done, self._messages\n"
            "        if self._remembers",
            "        if self._remembers",
        ),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: kept for half of the time": Variant(
        _busy_machine(
            "self._record(id, result, now + keep)", "self._record(id, result, now + keep // 2)"
        ),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: an expired success comes back with the clock": Variant(
        both(
            _busy_machine("        elif now >= self.record_until:\n", "        elif False:\n"),
            _clock_back,
        ),
        ("record",),
        kind=MachineSimulation,
    ),
    "once: failing bodies are recorded": Variant(
        both(_record_failures, _busy), ("record",), kind=MachineSimulation
    ),
    "once: what is unknown is confirmed": Variant(
        both(_confirm_what_is_unknown, _busy), ("record",), kind=MachineSimulation
    ),
    "once: recorded without the lease, in Lua": Variant(
        both(
            lua(
                (
                    "if text and decode_record(id, text).live then\n    need",
                    "if true then\n    need",
                )
            ),
            _busy,
        ),
        ("record",),
    ),
    "once: one client is told, in Lua": Variant(
        both(
            lua(
                ("for _, client in ipairs(clients) do", "for _, client in ipairs({clients[1]}) do")
            ),
            _busy,
        ),
        ("record",),
    ),
    "hold: closed for a body that never ran": Variant(
        both(_holding, _close_for_no_body), ("closed",), kind=MachineSimulation
    ),
    "hold: closed for a ghost that was granted": Variant(
        both(
            machine(
                "self.holders[entry.asked.id] = entry\n",
                "self.holders[entry.asked.id] = entry\n        entry.began = True\n",
            ),
            _holding,
        ),
        ("closed",),
        kind=MachineSimulation,
    ),
    "hold: a body that ends early opens its name": Variant(
        both(machine('if end == "ended" and now < holder.hold_until:', "if False:"), _holding),
        ("closed", "extension"),
        kind=MachineSimulation,
    ),
    "hold: a lease that is lost just before its deadline opens its name": Variant(
        both(
            machine(
                'if end == "lost" and (holder.asked.delay or closes):',
                'if end == "lost" and holder.closed_until > holder.deadline:',
            ),
            _holding,
            _as_long_as_the_lease,
        ),
        ("closed", "extension"),
        seed=33,
        kind=MachineSimulation,
    ),
    "hold: ended by the death of its process": Variant(
        both(_forget_holds_of_the_dead, _holding),
        ("extension", "exclusion", "closed"),
        kind=MachineSimulation,
    ),
    "hold: a body that ends early opens its name, in Lua": Variant(
        both(lua(("elseif why == 'ended' and keeps then", "elseif false then")), _holding),
        ("closed", "extension"),
    ),
}

ALL_VARIANTS: dict[str, Variant] = {**VARIANTS, **ONCE_VARIANTS}
