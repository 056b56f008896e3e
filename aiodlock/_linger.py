"""Leases that stay with the client when their body has ended (``linger``), until their time or a recall.

A kept lease is a request in state KEPT. The store goes on extending it, and knows that it lingers. The next
acquire of the client gets it without a message, if it asks for the same. Whoever wants the name elsewhere
makes the store recall it. An idle lease is released at once then; one in use when its body ends.

Everything here is synchronous but ``give_back``: between the decision to hand out a kept lease and the
moment at which it holds nothing else runs, so no recall comes between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ._clock import now
from ._deadlines import Deadlines
from ._departure import Departure
from ._model import Terms
from ._options import LockOptions
from ._register import Register
from ._request import HELD, Request

#: So many are kept at most; then the oldest goes. Each costs the store three extensions per ttl.
_MOST = 1000
#: Bodies that await nothing would keep the event loop for ever, and nothing would be extended: all tasks
#: together get so many seconds of one turn.
_TURN = 0.002
#: Tasks that begin eagerly are all new ones in one turn, each with its share: when the turn has lasted so
#: long (seconds), the next one waits for another.
_LONGEST_TURN = 0.02


class Lingering:
    """The kept leases of one session, by name.

    ``Deadlines`` releases them when their time is over.

    Mutable state: ``kept`` (the oldest first); ``_task`` and ``_since`` (which task was handed leases last
    in this turn of the loop, and since when), ``_tasks`` (how many were, in this turn), ``_began`` (when
    the first was), ``_share`` (the seconds that each has), ``_is_over``.

    :param tells_of: whether others may read that a waiting task relies on this hold.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        register: Register,
        departure: Departure,
        deadlines: Deadlines,
        tells_of: Callable[[Request], bool],
    ) -> None:
        self.kept: dict[str, Request] = {}
        self._loop = loop
        self._register = register
        self._departure = departure
        self._deadlines = deadlines
        self._tells_of = tells_of
        self._is_over = False
        self._task: asyncio.Task[Any] | None = None
        self._since = self._began = 0.0
        self._tasks = 0
        self._share = _TURN

    # -- keeping -------------------------------------------------------------------------------------

    def keep(self, request: Request) -> bool:
        """The last body of a request that may linger has ended; return whether its lease is kept.

        Not kept, and left as ever: what is lost, was recalled, or is kept already by another request; what
        had an extension without an answer, or another ttl by hand; what a block relies on that goes on; and
        what was told to others as held by a task that waits (another one has left its block).
        """
        terms, name = request.terms, request.terms.name
        if (
            request.state is not HELD
            or not terms.linger
            or request.armed
            or request.ttl != terms.ttl
            or name in self.kept
            or self._is_over
            or request.place.silent
            or self._tells_of(request)
        ):
            return False
        until = now() + terms.linger
        if terms.max_hold is not None:
            until = min(until, request.ends_at)
        self.keep_until(request, until)
        return True

    def keep_until(self, request: Request, until: float) -> None:
        """Keep it; the caller has looked at what ``keep`` looks at."""
        request.keep(until)
        self.kept[request.terms.name] = request
        alarm = request.alarm
        if alarm is None or until < alarm[0]:  # else it comes up in time
            self._deadlines.keep(request)
        if len(self.kept) > _MOST:
            self.leave(next(iter(self.kept.values())))

    def hand_out(
        self, terms: Terms, options: LockOptions, task: asyncio.Task[Any] | None, moment: float
    ) -> Request | None:
        """Let a new body of this task hold a kept lease; None if what is kept is not what it asks for."""
        request = self.kept.get(terms.name)
        if request is None:
            return None
        other = request.terms is not terms
        if (
            (other and not (_same(request.terms, terms) and request.options.owner == options.owner))
            or moment >= request.kept_until
            # Less than half is left, without the margin that is asked for now: it was not extended in time,
            # or for a smaller margin. The store has to be asked.
            or request.place.deadline - moment < (terms.ttl + terms.margin) / 2
            or request.place.silent
        ):
            return None
        del self.kept[terms.name]
        self._register.give_to(request, task)
        request.hold_again(terms, options, moment)
        if other or terms.max_hold is not None:
            request.place.reuse(terms)
            self._deadlines.add(request)
        return request

    # -- releasing -----------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """Release a kept lease, as one whose body has ended; nobody waits for that."""
        self.forget(request)
        self._departure.in_background(request)

    def forget(self, request: Request) -> None:
        """It is not kept any more."""
        if self.kept.get(request.terms.name) is request:
            del self.kept[request.terms.name]

    async def give_back(self, name: str) -> None:
        """Release what is kept of a name, and wait for that a second at most."""
        request = self.kept.get(name)
        if request is not None:
            self.forget(request)
            await self._departure.withdraw(request)

    def release_all(self) -> None:
        """The client is being left: release all at once, and keep no more."""
        self._is_over = True
        for request in list(self.kept.values()):
            self.leave(request)

    def stop(self) -> None:
        """The session is over."""
        self._is_over = True
        self.kept.clear()

    # -- the loop's other work -----------------------------------------------------------------------

    def has_turn(self, task: asyncio.Task[Any], moment: float) -> bool:
        """Whether the task may have one more body in this turn of the loop."""
        if self._task is task:
            return moment - self._since < self._share
        if not self._tasks:
            self._loop.call_soon(self._new_turn)
            self._began = moment
        elif moment - self._began >= _LONGEST_TURN:
            return False
        self._tasks += 1
        self._task, self._since = task, moment
        return True

    def _new_turn(self) -> None:
        self._share = _TURN / self._tasks
        self._task, self._tasks = None, 0


def _same(kept: Terms, asked: Terms) -> bool:
    """Whether a kept lease is what is asked for. (Margin, max_hold and linger are each body's own.)"""
    return (
        kept.mode == asked.mode
        and kept.ttl == asked.ttl
        and kept.lock_delay == asked.lock_delay
        and asked.auto_extend
        and not asked.hold_at_least
    )
