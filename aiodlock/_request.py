"""One attempt to get a lock, as the core sees it: its state, and what follows from what the store tells.

Decide first, do the I/O after: everything here is synchronous. Nobody else assigns ``state``.

What holds at every moment (``check`` asserts it):

- A request is granted once at most: ``token`` and ``granted_at`` are set when it becomes HELD, and stay.
- A request that was lost has a ``Loss``; one that asks, waits, holds or is kept has none.
- A request that is kept has no handles and no armed bodies.
- Only what has been granted has handles, and armed bodies.
- Only a request that waits has a task to wake.
- A request that holds or waits is on its session's list, and so is one that was lost and is not left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ._clock import now
from ._errors import BackendError, BackendUnavailable, LockLost, LossReason
from ._hold import Hold
from ._model import RequestInfo, Terms
from ._options import LockOptions
from ._slices import Woken

if TYPE_CHECKING:
    from .backends.base import Backend, Place


class AlreadyDone(Exception):
    """A success is on record, with this result; ``Once`` catches it.

    ``unsure``: an earlier attempt to ask may still be carried out.
    """

    def __init__(self, result: bytes, *, unsure: bool = False) -> None:
        super().__init__()
        self.result: bytes = result
        self.unsure: bool = unsure


@dataclass(frozen=True, slots=True)
class Events:
    """Who is told what becomes of a session's requests: one function for each event."""

    holds: Callable[[Request], object]
    #: One acquisition has ended, and others of the request go on.
    acquisition_ended: Callable[[Request], object]
    #: The store knows a holder no more.
    gone: Callable[[Request, LossReason], object]
    #: A kept lease is not to be kept any longer.
    idle_over: Callable[[Request], object]
    extension_failed: Callable[[Request, Exception], object]


class Loss:
    """Why a lease was lost, and of which acquisitions: of those that were not released then, and no other.

    Mutable state: ``reported`` (its task was told by ``Lock.release``), ``told_to`` (which functions of
    threads were told).

    :param failure: what bodies get instead of ``LockLost``.
    """

    __slots__ = ("failure", "handles", "reason", "reported", "told_to")

    def __init__(
        self, reason: LossReason, handles: tuple[int, ...], failure: BackendError | None = None
    ) -> None:
        self.reason: LossReason = reason
        self.handles: tuple[int, ...] = handles
        self.failure: BackendError | None = failure
        self.reported: bool = False
        self.told_to: list[Callable[[LockLost], object]] = []


class State(Enum):
    ASKING = "asking"  # not acknowledged yet
    WAITING = "waiting"
    HELD = "held"
    KEPT = "kept"  # no body: it lingers for the next one
    LOST = "lost"  # the body may not have ended yet
    LEAVING = "leaving"
    OVER = "over"


# What all modules read, here and elsewhere: on Python 3.11 an attribute of an Enum takes a hundred times as
# long as a global, and each acquire and release reads some thirty.
ASKING: Final = State.ASKING
WAITING: Final = State.WAITING
HELD: Final = State.HELD
KEPT: Final = State.KEPT
LOST: Final = State.LOST
LEAVING: Final = State.LEAVING
OVER: Final = State.OVER


class Request(Hold):
    """Mutable state of one request on this side. It listens to its place, and tells ``Events``.

    ``state``, ``token``, ``granted_at``, ``asked_at``, ``ttl`` (of its extensions), ``patient`` (it waits
    without a timeout), ``inside`` (the blocks that its thread is in; of a task ``Bodies`` knows them),
    ``unanswered`` (why the last message had no answer), ``woken`` (the future of the waiting task),
    ``left`` (resolved when the store knows nothing of it any more, if somebody waits for that), ``loss``
    (of the lease, if it was lost), ``told`` (what hooks were told of the lease, until they are told its
    end), ``alarm`` (its entry among the deadlines), ``used`` (its body has begun, or may have),
    ``may_linger`` (its lease may be kept when its body has ended; a recall ends that), ``kept_until``, and
    what a ``Hold`` has.

    State        Next
    ASKING       WAITING (``queue``), HELD (``hold``), LEAVING
    WAITING      HELD, ASKING (``unqueue``), LEAVING
    HELD         LOST (``lose``), LEAVING, KEPT (``keep``)
    KEPT         HELD (``hold_again``), LEAVING
    LOST         LEAVING
    LEAVING      OVER (``end``)
    ASKING       OVER (refused: there is nothing to leave)
    """

    __slots__ = (
        "alarm",
        "asked_at",
        "events",
        "granted_at",
        "id",
        "inside",
        "kept_until",
        "left",
        "loss",
        "may_linger",
        "options",
        "owner",
        "patient",
        "place",
        "state",
        "terms",
        "token",
        "told",
        "ttl",
        "unanswered",
        "used",
        "woken",
    )

    alarm: list[Any] | None
    events: Events
    granted_at: float
    id: str
    inside: tuple[Block, ...]
    kept_until: float
    left: asyncio.Future[None] | None
    loss: Loss | None
    may_linger: bool
    options: LockOptions
    owner: str
    patient: bool
    place: Place
    asked_at: float
    state: State
    terms: Terms
    token: int
    told: RequestInfo | None
    ttl: float
    unanswered: str
    used: bool
    woken: Woken | None

    def __init__(
        self,
        backend: Backend,
        events: Events,
        terms: Terms,
        options: LockOptions,
        request_id: str,
        owner: str,
        task: asyncio.Task[Any] | None,
    ) -> None:
        Hold.__init__(self, task)  # by super() it takes twice as long, for each acquire
        self.events = events
        self.terms = terms
        self.options = options
        self.id = request_id
        self.owner = owner
        self.ttl = terms.ttl
        self.patient = False
        self.inside = ()
        self.state = ASKING
        self.used = False
        self.may_linger = terms.linger > 0.0
        self.kept_until = 0.0
        self.token = 0
        self.granted_at = self.asked_at = 0.0
        self.unanswered = ""
        self.woken = self.left = self.loss = self.told = self.alarm = None
        self.place = backend.place(terms, request_id, owner, self)

    def __repr__(self) -> str:
        terms = self.terms
        return f"<Request {terms.name!r} {terms.mode} {self.state.value} id={self.id}>"

    @property
    def name(self) -> str:
        """The lock's name."""
        return self.terms.name

    @property
    def ends_at(self) -> float:
        """When the lease counts as lost unless it is extended."""
        terms = self.terms
        end = self.place.deadline - terms.margin
        if terms.max_hold is not None:
            end = min(end, self.granted_at + terms.max_hold)
        return end

    # -- transitions -----------------------------------------------------------------------------

    def hold(self) -> None:
        """The store has granted it: ASKING or WAITING → HELD. The place has the token."""
        assert self.state is ASKING or self.state is WAITING, self
        self.state = HELD
        self.token = self.place.token
        self.granted_at = now()
        self.events.holds(self)

    def keep(self, until: float) -> None:
        """Its last body has ended, and its lease stays for the next one: HELD → KEPT."""
        assert self.state is HELD, self
        self.state = KEPT
        self.kept_until = until
        if self.on_task_end is not None:
            self.forget_task_end()
        if self.watchers:
            self.wake_watchers()
            self.forget_watchers()

    def share_owner(self) -> None:
        """Its task has another hold of the name. Neither may be handed to another task: the store lets in
        whoever has their owner."""
        self.may_linger = False

    def hold_again(self, terms: Terms, options: LockOptions, moment: float) -> None:
        """The next body has it: KEPT → HELD. The place has the token still."""
        assert self.state is KEPT, self
        self.state = HELD
        self.terms, self.options = terms, options
        self.granted_at = moment

    def queue(self, asked_at: float) -> None:
        """The store has queued it: ASKING → WAITING. Nobody has seen it there before ``asked_at``."""
        assert self.state is ASKING, self
        self.state = WAITING
        self.asked_at = asked_at

    def unqueue(self) -> None:
        """The store has forgotten it, or granted it too late: WAITING → ASKING.

        It is not asked for again: its task has this one left, and begins again with another request.
        """
        assert self.state is WAITING, self
        self.state = ASKING
        self.wake()

    def loss_of(self, serial: int) -> LockLost | None:
        """Return why that acquisition was lost; None while it is held and after a release."""
        if self.state is HELD and serial in self.handles and now() >= self.ends_at:
            # Only told: it is ``Deadlines`` that marks the loss and cancels the bodies.
            return self.overdue_error()
        return self.lost if self.has_lost(serial) else None

    def has_lost(self, serial: int) -> bool:
        """Whether it is marked that this acquisition was lost."""
        return self.loss is not None and serial in self.loss.handles

    def lose(
        self,
        reason: LossReason,
        failure: BackendError | None = None,
        *,
        spare: asyncio.Task[Any] | None = None,
    ) -> None:
        """Tell everybody who believes in this lease that it is over: HELD → LOST.

        ``spare`` is the task that closes the client, perhaps from inside a body: it is not cancelled.
        """
        assert self.state is HELD, self
        self.state = LOST
        self.loss = Loss(reason, self.handles, failure)
        self.wake_watchers()
        self._cancel_bodies(spare)

    def lose_on_leaving(self, reason: LossReason, serial: int) -> None:
        """The leave of this acquisition, the last, found that the lease had ended before; perhaps the leave
        was long on its way."""
        assert self.state is LEAVING or self.state is OVER, self
        moment = now()
        if moment >= self.ends_at:
            reason = self.overdue_reason(moment)
        self.loss = Loss(reason, (serial,))
        self._cancel_bodies()  # it may have been left in a body, that goes on

    def one_ended(self) -> None:
        """One acquisition has ended, and others hold on: the block of that one makes no edge any more."""
        Hold.one_ended(self)
        self.events.acquisition_ended(self)

    def leave(self) -> None:
        """Neither wait nor hold any more, whatever the store knows of it yet: any but OVER → LEAVING."""
        assert self.state is not OVER, self
        self.state = LEAVING
        if self.watchers:
            self.wake_watchers()

    def end(self) -> None:
        """The store knows nothing of it any more, or nobody asks: LEAVING (or refused: ASKING) → OVER."""
        assert self.state is LEAVING or self.state is ASKING, self
        self.state = OVER
        if self.left is not None and not self.left.done():
            self.left.set_result(None)

    def wake(self, error: BaseException | None = None) -> None:
        """Let the waiting task go on; it looks at the state, or gets the error."""
        woken = self.woken
        if woken is not None and not woken.done():
            if woken.cancelled_with is not None:
                woken.cancel_now()  # the task was cancelled before: that must not be lost
            elif error is None:
                woken.set_result(None)
            else:
                woken.set_exception(error)

    # -- what the place tells ----------------------------------------------------------------------

    def granted(self) -> None:
        """The waiter became the holder."""
        if self.state is WAITING:
            self.hold()
            self.wake()

    def gone(self, reason: LossReason) -> None:
        """The store knows it no more."""
        if self.state is WAITING:
            self.unqueue()
        elif self.state is KEPT:
            self.events.idle_over(self)  # no body has lost it
        else:
            self.events.gone(self, reason)

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        """A success is on record: the waiting task gets its result."""
        self.wake(AlreadyDone(result, unsure=unsure))

    def recalled(self) -> None:
        """Others want what it has: it must not linger."""
        self.may_linger = False
        if self.state is KEPT:
            self.events.idle_over(self)

    def extension_failed(self, error: Exception) -> None:
        """Keeping it alive had no answer."""
        self.unanswered = str(error)
        self.events.extension_failed(self, error)

    def unavailable(self, error: BackendUnavailable) -> None:
        """Nothing has answered about this waiter for too long."""
        self.wake(error)

    # -- losses ------------------------------------------------------------------------------------

    def _cancel_bodies(self, spare: asyncio.Task[Any] | None = None) -> None:
        if self.options.on_lost == "cancel" and self.armed:
            for task, scope in self.armed.items():
                if task is not spare:
                    scope.cancel()

    @property
    def lost(self) -> LockLost | None:
        """The loss in an exception of its own, whose text is of this moment."""
        return None if self.loss is None else self._lost_by(self.loss.reason)

    def overdue_error(self) -> LockLost:
        """Say what losing by time would, and change nothing: this may be called on any thread."""
        return self._lost_by(self.overdue_reason(now()))

    def overdue_reason(self, moment: float) -> LossReason:
        """Return why a lease that is over at this moment is over."""
        maximum = self.terms.max_hold
        over = maximum is not None and (self.place.capped or moment >= self.granted_at + maximum)
        return "max_hold" if over else "expired"

    def _lost_by(self, reason: LossReason) -> LockLost:
        text = f"lease on {self.name!r} {self._what_happened(reason)} (token {self.token}): stop writing"
        return LockLost(text, name=self.name, reason=reason)

    def _what_happened(self, reason: LossReason) -> str:
        match reason:
            case "expired":
                left = self.place.deadline - now()
                if left <= 0.0:
                    return f"expired {-left:.1f} s ago{self.why_silent}"
                margin = f" (margin {self.terms.margin:g} s)" if self.terms.margin else ""
                return f"is over, and another may hold it in {left:.1f} s{margin}{self.why_silent}"
            case "broken":
                return "was broken by an operator"
            case "taken_over":
                return "was taken over by another holder"
            case "gone":
                return (
                    "is unknown to the server (flushed, evicted, failed over, or its clock jumped)"
                )
            case "max_hold":
                limit = self.terms.max_hold  # None in tests that simulate this loss
                return "reached max_hold" + ("" if limit is None else f" ({limit:g} s)")
            case "closed":
                return "ended because its client was closed"

    @property
    def why_silent(self) -> str:
        """Why its last message had no answer, to go on with in a sentence; nothing if it had one."""
        return f": {self.unanswered}" if self.unanswered and self.place.silent else ""

    @property
    def ran_out(self) -> bool:
        """Whether the lease was lost to time, which is what a lock-delay is for."""
        return self.loss is not None and self.loss.reason in ("expired", "max_hold")

    def error(self) -> LockLost | BackendError:
        """Return a fresh exception for whoever must hear of the loss."""
        assert self.loss is not None
        failure = self.loss.failure
        if failure is None:
            return self._lost_by(self.loss.reason)
        error = type(failure)(str(failure), name=self.name)
        error.__cause__ = failure.__cause__
        return error


#: What an open block relies on: a request, and the serial of the acquisition that is its own.
Block: TypeAlias = tuple[Request, int]


def held_in(blocks: Iterable[Block]) -> list[Request]:
    """Return what is held by these blocks themselves: not what only another acquisition holds, as a bare
    lease, or a later body of a lease that was kept."""
    return [
        request for request, serial in blocks if request.state is HELD and serial in request.handles
    ]


def check(request: Request, *, is_kept: bool, is_listed: bool) -> None:
    """Assert what this module promises at its top; for tests.

    :param is_kept: whether it is among the leases that linger.
    :param is_listed: whether it is on its session's list.
    """
    state, held_once = request.state, request.granted_at > 0.0
    assert (request.token > 0) == held_once, request
    if state in (ASKING, WAITING, HELD, KEPT):
        assert request.loss is None, request
    if state is LOST:
        assert request.loss is not None, request
    if state in (HELD, LOST, KEPT):
        assert held_once, request
    if state is KEPT:
        assert not request.handles, request
        assert not request.armed, request
        assert is_kept, request
    if not held_once:
        assert not request.handles, request
        assert not request.armed, request
    if request.woken is not None and not request.woken.done():
        assert state in (WAITING, LEAVING, OVER), request
    if state in (WAITING, HELD, LOST, KEPT):
        assert is_listed, request
