"""Leases that stay with the client when their body has ended (``linger``), until their time or a recall.

A kept lease is a request in state KEPT. The store goes on extending it, and knows that it lingers. The next
acquire of the client gets it without a message, if it asks for the same. Whoever wants the name elsewhere
makes the store recall it. An idle lease is released at once then; one in use when its body ends.

Everything here is synchronous but ``give_back``: between the decision to hand out a kept lease and the
moment at which it holds nothing else runs, so no recall comes between.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

from . import _process
from ._clock import now
from ._request import HELD, Request
from ._tasks import task_of

if TYPE_CHECKING:
    from ._bodies import Blocks
    from ._lease import Lease
    from ._model import Terms
    from ._options import LockOptions
    from ._session import Session

#: So many are kept at most; then the oldest goes. Each costs the store three extensions per ttl.
_MOST = 1000
#: Bodies that await nothing would keep the event loop for ever, and nothing would be extended: all tasks
#: together get so many seconds of one turn.
_TURN = 0.002
#: Tasks that begin eagerly are all new ones in one turn, each with its share: when the turn has lasted so
#: long (seconds), the next one waits for another.
_LONGEST_TURN = 0.02


class Later(Enum):
    """Why a block does not begin now, though what it asks for is kept."""

    NEXT_TURN = "the task has had its share of this turn of the loop"


#: Let the loop have its turn, and ask again.
NEXT_TURN: Final = Later.NEXT_TURN


class Lingering:
    """The kept leases of one session, by name.

    ``Deadlines`` releases them when their time is over.

    Mutable state: ``kept`` (the oldest first); ``_task`` and ``_since`` (which task was handed leases last
    in this turn of the loop, and since when), ``_tasks`` (how many were, in this turn), ``_began`` (when
    the first was), ``_share`` (the seconds that each has).
    """

    def __init__(self, session: Session) -> None:
        self.kept: dict[str, Request] = {}
        self._session = session
        self._loop = session.loop
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
        terms, name, session = request.terms, request.terms.name, self._session
        if (
            request.state is not HELD
            or not terms.linger
            or request.armed
            or request.ttl != terms.ttl
            or name in self.kept
            or session.closing
            or request.place.silent
            or (session.deadlocks is not None and session.deadlocks.tells_of(request))
        ):
            return False
        until = now() + terms.linger
        if terms.max_hold is not None:
            until = min(until, request.ends_at)
        self._keep(request, until)
        return True

    def _keep(self, request: Request, until: float) -> None:
        request.keep(until)
        self.kept[request.terms.name] = request
        self._session.deadlines.keep(request)
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
        self._session.drop_hold(request)
        request.hold_again(terms, options, task, moment)
        if other or terms.max_hold is not None:
            request.place.reuse(terms)
            self._session.deadlines.add(request)
        self._session.add_hold(request)
        return request

    # -- the short way -------------------------------------------------------------------------------

    def enter(
        self,
        terms: Terms,
        options: LockOptions,
        entered: Blocks[Lease],
        kind: type[Lease],
        frame: FrameType,
    ) -> Lease | Literal[Later.NEXT_TURN] | None:
        """Begin a block of the lock that was the last to have what is kept, or of one that is described
        like it; None: go the long way.

        Nothing is different from the long way, which this is for the commonest case: the lock is exclusive,
        without owner and ``max_hold``, so while it is kept no task here can have another live hold of the
        name; and the task is in no other block. What calls are saved stands here instead of them.
        """
        request = self.kept.get(terms.name)
        if (
            request is None
            or (request.terms is not terms and request.terms != terms)
            or (request.options is not options and request.options != options)
        ):
            return None
        session = self._session
        if (
            _process.pid != session.pid
            or asyncio._get_running_loop() is not self._loop
            or (task := task_of(self._loop)) is None
            or task in session.bodies.open
            or session.death is not None
        ):
            return None
        moment, place = now(), request.place
        if (
            moment >= request.kept_until
            or place.deadline - moment < (terms.ttl + terms.margin) / 2
            or place.silent
        ):
            return None
        if not (
            (task is self._task and moment - self._since < self._share)
            or self.has_turn(task, moment)
        ):
            return NEXT_TURN
        del self.kept[terms.name]
        if request.task_id == id(task) and request.task is not None and request.task() is task:
            request.hold_again(terms, options, task, moment)  # it is among its holds still
        else:
            session.drop_hold(request)
            request.hold_again(terms, options, task, moment)
            session.add_hold(request)
        lease = kind(session, request)
        lease._tasks.append(task)
        if session.telling.hooks:
            try:
                session.telling.handed_out(request)
            except BaseException:
                session.give_up(request, lease._serial)
                raise
        session.bodies.enter_first(task, request)
        entered.enter(task, lease, frame)
        return lease

    def exit(self, entered: Blocks[Lease]) -> bool:
        """End the last block of a lock and keep its lease, if nothing has happened to either; else do
        nothing, and return False: go the long way."""
        if not entered.open:
            return False
        task, lease, _ = entered.open[-1]
        session, request = self._session, lease._request
        if (
            request.state is not HELD
            or not request.may_linger
            or lease._session is not session  # the client was left and entered again
            or _process.pid != session.pid
            or asyncio._get_running_loop() is not self._loop
            or task_of(self._loop) is not task
        ):
            return False
        terms, place, moment = request.terms, request.place, now()
        if (
            moment >= place.deadline - terms.margin
            or request.handles != (lease._serial,)
            or len(lease._tasks) != 1
            or request.ttl != terms.ttl
            or terms.name in self.kept
            or session.closing
            or place.silent
            or not session.bodies.leave_only(task, request)
        ):
            return False
        entered.open.pop()
        lease._tasks.clear()
        request.handles = ()
        self._keep(request, moment + terms.linger)
        if request.told is not None:
            session.telling.released(request, request.granted_at)
        return True

    # -- releasing -----------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """Release a kept lease, as one whose body has ended; nobody waits for that."""
        self.forget(request)
        self._session.departure.in_background(request)

    def forget(self, request: Request) -> None:
        """It is not kept any more."""
        if self.kept.get(request.terms.name) is request:
            del self.kept[request.terms.name]

    async def give_back(self, name: str) -> None:
        """Release what is kept of a name, and wait for that a second at most."""
        request = self.kept.get(name)
        if request is not None:
            self.forget(request)
            await self._session.departure.withdraw(request)

    def release_all(self) -> list[Request]:
        """Release all at once; return those that are being left."""
        left = list(self.kept.values())
        for request in left:
            self.leave(request)
        return left

    def stop(self) -> None:
        """The session is over."""
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
