"""Broken ways to lock for threads, each caught within sixty seeds. See ``variants.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from aiodlock import LockLost
from aiodlock._acquire import Acquiring
from aiodlock._request import Request, State
from aiodlock.sync import _block, _body, _holds, _life, _lock, _portal, _recipe
from aiodlock.sync._body import start_thread
from aiodlock.sync._holds import Hold

from .scenario import Simulation
from .threads import Threads
from .variants import Prepare, Variant
from .variants import _both as both


def _often(**style: Any) -> Prepare:
    """Let what a variant needs come often. What is not a part of ``Style`` is set on the simulation."""

    def prepare(simulation: Simulation) -> None:
        assert isinstance(simulation, Threads)
        for name, value in style.items():
            if hasattr(simulation.style, name):
                simulation.style = replace(simulation.style, **{name: value})
            else:
                assert hasattr(simulation, name), name
                setattr(simulation, name, value)

    return prepare


def _without(target: object, name: str, value: Callable[..., Any]) -> Prepare:
    """Do something else, or nothing, in the place of a function."""

    def prepare(simulation: Simulation) -> None:
        simulation.patch(target, name, value)

    return prepare


class _OneContext:
    """A context variable that all contexts share."""

    def __init__(self) -> None:
        self.value: tuple[int, ...] = ()

    def get(self) -> tuple[int, ...]:
        return self.value

    def set(self, value: tuple[int, ...]) -> None:
        self.value = value


def _one_here(simulation: Simulation) -> None:
    """All threads of all processes share their open blocks."""
    shared = _holds.Here()
    simulation.patch(_holds, "_inside", _OneContext())
    for module in (_holds, _block, _life, _lock, _recipe):
        simulation.patch(module, "here", lambda: shared)


def _keeps_the_lease(hold: Hold, function: Callable[[LockLost], object]) -> None:
    """Watch over the lease, and so keep it: as it was before a seed found it."""
    portal, request, lease = hold.running.portal, hold.request, hold.core

    def look(_: asyncio.Future[None] | None = None) -> None:
        lost = lease.lost
        if lost is not None:
            start_thread(portal, function, copy(lost))
        elif request.state is State.HELD and hold.core.serial in request.handles:
            watcher: asyncio.Future[None] = hold.core.session.loop.create_future()
            watcher.add_done_callback(look)
            request.add_watcher(watcher)

    look()


def _begins_in_the_loop(simulation: Simulation) -> None:
    """A body counts as begun before its thread has the lease."""
    assert simulation.onces is not None
    simulation.onces.habits.holds = (0.3,)
    simulation.patch(Hold, "wait_for_thread", lambda _: None)


def _checks_once(acquiring: Acquiring, bodies: Sequence[Request]) -> None:
    """Not look at the leases of the blocks around it any more once the turn has come."""
    if not hasattr(acquiring, "_request"):
        _check_bodies(acquiring, bodies)


_check_bodies = Acquiring._check_bodies


_INTERRUPTED = _often(interrupts=1.0, hold=0.4, think=0.02, names=1, tasks=3, shared=0.0)

THREAD_VARIANTS = {
    "an interrupted call goes on": Variant(
        both(_INTERRUPTED, _without(_portal.Portal, "_abandon", lambda *_: None)),
        ("interrupt", "closed"),
        kind=Threads,
    ),
    "a body begins before its thread has the lease": Variant(
        both(_INTERRUPTED, both(_often(strikes_anywhere=True, names=4), _begins_in_the_loop)),
        ("closed",),
        seed=29,
        kind=Threads,
    ),
    "threads share their blocks": Variant(
        both(_often(tasks=3, processes=2, names=1, faults=()), _one_here),
        ("beside", "again", "told", "failure"),
        kind=Threads,
    ),
    "a block whose lease was lost ends well": Variant(
        both(_often(breaks=0.3, names=1), _without(_body, "raise_loss", lambda *_: None)),
        ("told",),
        kind=Threads,
    ),
    "no function is told of a loss": Variant(
        both(
            _often(breaks=0.3, names=1),
            _without(_body, "start_thread", lambda *_: None),
        ),
        ("told",),
        kind=Threads,
    ),
    "a hold outlives its thread while somebody watches over it": Variant(
        both(
            _without(_recipe, "call_when_lost", _keeps_the_lease),
            _without(Hold, "forget", lambda _: None),
        ),
        ("leak", "liveness"),
        kind=Threads,
    ),
    "a turn inside a lost block is kept": Variant(
        both(
            _often(
                names=1,
                ttls=(0.2,),
                hold=0.1,
                think=0.02,
                breaks=0.0,
                semaphores=0.0,
                faults=("stuck", "pause", "slow"),
                pause_between_faults=0.1,
            ),
            _without(Acquiring, "_check_bodies", _checks_once),
        ),
        ("again",),
        kind=Threads,
    ),
}
