"""When something is due about a request on this side: the end of a lease or of its lingering, or a wait
that takes long.

The store is not asked here. A lease is lost in the timer's callback, at no hop's distance: a body must not
take another step after its lease has ended. A place's deadline is looked at only when it was the last time
to come up, and the request is put back if the lease has been extended meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ._agenda import NEVER, Agenda
from ._clock import now
from ._request import HELD, KEPT, WAITING, Request

#: The loop's clock stands still while the machine sleeps, leases end: how late a body may hear of it.
_LONGEST_TIMER = 1.0
#: Some loops have timers of whole milliseconds (uvloop), up to half of one late: a body would take steps
#: meanwhile. So the timer is set that much early. When it comes, it is set again until the moment is there.
_EARLY = 0.0005
#: While somebody holds, the timer comes at least so often in the shortest ttl. A loop that was blocked for
#: that part of it is worth a warning: a little longer, and leases are lost.
_TICKS, _BLOCKED = 8, 0.5
#: A request that waits for so many ttls while its task is in other blocks is worth a warning.
_LONG_WAIT = 3
#: So many leases that nobody uses are released in one turn of the loop.
_SLICE = 100


class Deadlines:
    """What is due, and the timer of the earliest.

    Most leases are released before the timer comes next: those stand in a dict alone, and the others are
    moved to the agenda then.

    Mutable state: ``_fresh`` (added since the timer came last), ``_agenda`` (an entry is the request's
    ``alarm``), ``_wake_at``, ``_timer`` and ``_comes_at`` (when that comes, on the loop's clock),
    ``_shortest`` (the shortest ttl of a holder since there was none).

    :param due: called with a holder whose time is over, with a kept lease whose time is over (some, in each
        turn of the loop), and with a request that has waited for long.
    :param blocked: called with the seconds for which the loop did nothing, and the shortest ttl held.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        due: Callable[[Request], object],
        blocked: Callable[[float, float], object],
    ) -> None:
        self._loop = loop
        self._on_due = due
        self._blocked = blocked
        self._fresh: dict[Request, None] = {}
        self._agenda: Agenda[Request] = Agenda()
        self._wake_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._comes_at = NEVER
        self._shortest = NEVER

    def __len__(self) -> int:
        return len(self._fresh) + len(self._agenda)

    def add(self, request: Request) -> None:
        """Look after a holder until it is removed, and after a waiter until it has waited for long."""
        if request.alarm is not None:
            self._agenda.remove(request.alarm)
            request.alarm = None
        self._fresh[request] = None
        if request.state is HELD:
            moment = request.ends_at
            if request.ttl < self._shortest:
                self._shortest = request.ttl
        else:
            moment = _due(request)
        if moment < self._wake_at:
            self._set_timer(moment)
        elif self._wake_at <= request.granted_at:
            self._set_timer(self._wake_at)  # the machine has slept, and the timer is late

    def keep(self, request: Request) -> None:
        """A holder lingers from now on, and its time ends before its alarm would come."""
        if request.alarm is not None or request.kept_until < self._wake_at:
            self.add(request)

    def remove(self, request: Request) -> None:
        """Care no longer."""
        if request.alarm is not None:
            self._agenda.remove(request.alarm)
            request.alarm = None
        else:
            self._fresh.pop(request, None)

    def stop(self) -> None:
        """The session is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, moment: float) -> None:
        if self._timer is not None:
            if self._comes_at <= self._loop.time():
                return  # it may come in this turn of the loop; a new one would come in the next
            self._timer.cancel()
        self._wake_at = moment
        # It comes often enough to tell for how long the loop was blocked.
        longest = min(_LONGEST_TIMER, self._shortest / _TICKS)
        pause = min(max(0.0, moment - _EARLY - now()), longest)
        # Not asked of the handle: uvloop's has no ``when()`` if the pause rounds to no millisecond.
        self._comes_at = self._loop.time() + pause
        self._timer = self._loop.call_later(pause, self._on_timer)

    def _on_timer(self) -> None:
        assert self._timer is not None
        late = self._loop.time() - self._comes_at
        self._timer, self._wake_at = None, NEVER
        if late > self._shortest * (_BLOCKED - 1 / _TICKS):
            self._warn_of_block(late)
        self._collect(now())
        first = self._agenda.first
        if first < self._wake_at:
            self._set_timer(first)
        elif first == NEVER and not self._fresh:
            self._shortest = NEVER

    def _collect(self, moment: float) -> None:
        """Mark what has ended as lost, and tell of long waits."""
        fresh, self._fresh = self._fresh, {}
        for request in fresh:
            self._push(request, _due(request))
        early: list[tuple[Request, float]] = []
        room = _SLICE
        while (entry := self._agenda.take(moment + _EARLY)) is not None:
            found: Request = entry[2]
            found.alarm = None
            due = _due(found)
            if due > moment:
                early.append((found, due))
            elif found.state is KEPT and not room:
                early.append((found, moment))  # in the next turn
            else:
                if found.state is KEPT:
                    room -= 1
                self._on_due(found)
        for request, due in early:
            self._push(request, due)

    def _push(self, request: Request, when: float) -> None:
        if when < NEVER:
            request.alarm = self._agenda.add(request, when)

    def _warn_of_block(self, late: float) -> None:
        requests = [*self._fresh, *self._agenda]
        held = (request.ttl for request in requests if request.state is HELD)
        self._shortest = min(held, default=NEVER)
        if late > self._shortest * (_BLOCKED - 1 / _TICKS):
            self._blocked(late, self._shortest)


def _due(request: Request) -> float:
    if request.state is HELD:
        return request.ends_at
    if request.state is KEPT:
        return min(request.kept_until, request.ends_at)
    if request.state is WAITING:
        return request.asked_at + _LONG_WAIT * request.ttl
    return NEVER
