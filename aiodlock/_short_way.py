"""A block that begins and ends on a lease which lingers, without a message and without a call too many.

Nothing is different from the long way, which this is for the commonest case: the lock is exclusive, without
owner and ``max_hold``, so while its lease is kept no task here can have another live hold of the name; and
the task is in no other block. ``begin`` inlines ``Acquiring._kept``, ``Lingering.hand_out``, ``Body.arm``;
``end`` inlines ``Body.end_block``, ``Acquisition.leave`` and ``Lingering.keep``. A change there is one here
too.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

from . import _process
from ._acquisition import Acquisition
from ._body import Blocks
from ._clock import now
from ._model import Terms
from ._options import LockOptions
from ._request import HELD
from ._session import Session
from ._tasks import running_loop, task_of


class Later(Enum):
    """Why a block does not begin now, though what it asks for is kept."""

    NEXT_TURN = "the task has had its share of this turn of the loop"


#: Let the loop have its turn, and ask again.
NEXT_TURN: Final = Later.NEXT_TURN


def is_open(terms: Terms, options: LockOptions) -> bool:
    """Whether blocks of such a lock may begin and end by this."""
    return (
        terms.linger > 0.0
        and terms.kind == "lock"
        and terms.mode == "exclusive"
        and options.owner is None
        and terms.max_hold is None
    )


def begin(
    session: Session, terms: Terms, options: LockOptions
) -> Acquisition | Literal[Later.NEXT_TURN] | None:
    """Begin a block of the lock that was the last to have what is kept, or of one that is described like
    it; None: go the long way."""
    lingering, loop = session.lingering, session.loop
    request = lingering.kept.get(terms.name)
    if (
        request is None
        or (request.terms is not terms and request.terms != terms)
        or (request.options is not options and request.options != options)
        or _process.pid != session.pid
        or running_loop() is not loop
        or (task := task_of(loop)) is None
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
    if not lingering.has_turn(task, moment):
        return NEXT_TURN
    del lingering.kept[terms.name]
    if request.task_id != id(task) or request.task is None or request.task() is not task:
        session.register.give_to(request, task)
    request.hold_again(terms, options, moment)
    acquired = Acquisition(session, request)
    acquired.tasks = (task,)
    if session.telling.hooks:
        try:
            session.telling.handed_out(request)
        except BaseException:
            session.departure.give_up(request, acquired.serial)
            raise
    session.bodies.enter_first(task, request, acquired.serial)
    return acquired


def end(session: Session, entered: Blocks[Acquisition]) -> bool:
    """End the last block of a lock and keep its lease, if nothing has happened to either; else do nothing,
    and return False: go the long way."""
    if not entered.open:
        return False
    task, acquired, _ = entered.open[-1]
    request = acquired.request
    if (
        request.state is not HELD
        or not request.may_linger
        or acquired.session is not session  # the client was left and entered again
        or _process.pid != session.pid
        or running_loop() is not session.loop
        or task_of(session.loop) is not task
    ):
        return False
    terms, place, moment = request.terms, request.place, now()
    if (
        moment >= place.deadline - terms.margin
        or request.handles != (acquired.serial,)
        or acquired.tasks != (task,)
        or request.ttl != terms.ttl
        or terms.name in session.lingering.kept
        or session.closing
        or place.silent
        or not session.bodies.leave_only(task, request)
    ):
        return False
    entered.open.pop()
    acquired.tasks = ()
    request.handles = ()
    session.lingering.keep_until(request, moment + terms.linger)
    if request.told is not None:
        session.telling.released(request)
    return True
