"""A request's place: in the queue, then among the holders, until it has left.

Decide first, do the I/O after: everything here is synchronous. What the server said goes in, what
the waiting task, the extender and the body must know comes out.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from ._clock import now
from ._errors import BackendError, LockLost, LossReason
from ._model import Request, RequestInfo
from ._options import LockOptions
from ._scope import BodyScope
from ._slices import Woken


class State(Enum):
    ASKING = "asking"  # not acknowledged yet
    WAITING = "waiting"
    HELD = "held"
    LOST = "lost"  # the body may not have ended yet
    LEAVING = "leaving"
    OVER = "over"


class Place:
    """Mutable state of one request on this side. It alone assigns its ``state``; the session owns it.

    ``state``, ``deadline`` (until when the server certainly honours it; 0 before the first reply),
    ``token``, ``granted`` (the server said so; it may be too late for a body), ``noticed`` (a grant
    was announced before the first reply), ``broken`` (the token of a grant that an operator broke before
    it was known here), ``queued_at``, ``floor`` (no grant since the last answer has a
    token that is not larger), ``woken`` (the future of the waiting task), ``reason`` (why the lease was
    lost), ``failure`` (what bodies get instead of ``LockLost``), ``armed`` (what cancels the body, per task
    that is in a block), ``handles`` (serials of the leases not released), ``dropped`` (those of them whose
    ``Lease`` nobody references any more), ``reported`` (its task was told of the loss by ``Lock.release``),
    ``successor``, and the extender's: ``beat``, ``due``, ``look_at``, ``watching``, ``failures``,
    ``silent_since``, ``entry`` (it comes up when ``due`` is reached, or before), ``asked``.

    State        Next
    ASKING       WAITING (``queue``), HELD (``grant``), LEAVING
    WAITING      HELD, ASKING (``unqueue``: ask anew), LEAVING
    HELD         LOST (``lose``), LEAVING
    LOST         LEAVING
    LEAVING      OVER
    """

    __slots__ = (
        "__weakref__",
        "armed",
        "asked",
        "beat",
        "broken",
        "capped",
        "deadline",
        "dropped",
        "due",
        "entry",
        "failure",
        "failures",
        "floor",
        "granted",
        "granted_at",
        "handles",
        "left",
        "look_at",
        "noticed",
        "on_task_end",
        "options",
        "queued_at",
        "reason",
        "reported",
        "request",
        "serial",
        "silent_since",
        "state",
        "successor",
        "task",
        "task_id",
        "token",
        "told",
        "ttl",
        "watchers",
        "watching",
        "woken",
    )

    def __init__(
        self, request: Request, options: LockOptions, task: asyncio.Task[Any] | None
    ) -> None:
        self.request: Request = request
        self.options: LockOptions = options
        self.ttl: float = request.ttl
        self.state: State = State.ASKING
        self.deadline: float = 0.0
        self.token: int = 0
        self.floor: int = 0
        # Moved to never once a long wait was told.
        self.queued_at: float = 0.0
        self.granted: bool = False
        self.granted_at: float = 0.0
        # Ends when max_hold does: by drift and round trip its deadline falls short of that moment.
        self.capped: bool = False
        self.noticed: int | None = None
        self.broken: int = 0
        self.woken: Woken | None = None
        # Resolved when the store knows nothing of it any more, if somebody waits for that.
        self.left: asyncio.Future[None] | None = None
        self.reason: LossReason | None = None
        self.failure: BackendError | None = None
        self.armed: dict[asyncio.Task[Any], BodyScope] | None = None
        self.watchers: list[asyncio.Future[None]] | None = None
        self.handles: list[int] = []
        self.dropped: tuple[int, ...] = ()
        self.reported: bool = False
        # Watches for the end of the task while there are dropped handles.
        self.on_task_end: Callable[[asyncio.Task[Any]], None] | None = None
        self.serial: int = 0
        # id(task) is reused after a task is gone: the reference tells.
        self.task: weakref.ref[asyncio.Task[Any]] | None = (
            weakref.ref(task) if task is not None else None
        )
        self.task_id: int = id(task)
        self.beat: float = 0.0
        self.due: float = 0.0
        self.look_at: float | None = None
        self.watching: bool = False
        self.failures: int = 0
        self.silent_since: float | None = None
        self.entry: list[Any] | None = None
        self.asked: bool = False
        # What hooks were told of the lease, until they are told its end.
        self.told: RequestInfo | None = None
        # The place that the same acquire took when this one was lost.
        self.successor: Place | None = None

    def __repr__(self) -> str:
        return f"<Place {self.request.name!r} {self.request.mode} {self.state.value} id={self.request.id}>"

    # -- times -----------------------------------------------------------------------------------

    @property
    def ends_at(self) -> float:
        """When the lease counts as lost unless it is extended."""
        end = self.deadline - self.options.margin
        if self.options.max_hold is not None:
            end = min(end, self.granted_at + self.options.max_hold)
        return end

    @property
    def length(self) -> float:
        """How long the next extension shall be, from now on."""
        if not self.granted:
            return self.request.waiter_ttl
        if self.options.max_hold is None:
            return self.ttl
        if self.state is not State.HELD:
            return min(self.ttl, self.options.max_hold)
        left = self.granted_at + self.options.max_hold - now()
        return max(0.001, min(self.ttl, left))

    # -- what the server said --------------------------------------------------------------------

    def grant(self, token: int, deadline: float) -> None:
        """Become a holder."""
        maximum, at_once = self.options.max_hold, self.state is State.ASKING
        self.capped = maximum is not None and at_once and self.request.ttl >= maximum
        self.state = State.HELD
        self.granted = True
        self.token = token
        self.deadline = max(self.deadline, deadline)
        self.granted_at = now()
        if self.woken is not None:
            self.wake()

    def queue(self, deadline: float, floor: int) -> None:
        """Become a waiter."""
        self.state = State.WAITING
        self.deadline, self.floor = deadline, floor
        self.queued_at = now()

    def unqueue(self) -> None:
        """The store has forgotten the waiter, or granted it too late: let its task ask anew."""
        self.state = State.ASKING
        self.wake()

    def leave(self) -> None:
        """Neither wait nor hold any more, whatever the store knows of it yet."""
        self.state = State.LEAVING
        if self.watchers:
            self.wake_watchers()

    def end(self) -> None:
        """The store knows nothing of it any more, or nobody asks."""
        self.state = State.OVER

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

    # -- the end of a lease ----------------------------------------------------------------------

    def lose(
        self,
        reason: LossReason,
        failure: BackendError | None = None,
        *,
        spare: asyncio.Task[Any] | None = None,
    ) -> None:
        """Tell everybody who believes in this lease that it is over. Once.

        ``spare`` is the task that closes the client, perhaps from inside a body: it is not cancelled.
        """
        if self.state is not State.HELD:
            return
        self.state = State.LOST
        self.reason, self.failure = reason, failure
        self.wake_watchers()
        self._cancel_bodies(spare)

    def lose_if_overdue(self, *, spare: asyncio.Task[Any] | None = None) -> None:
        """The clock decides when no message came."""
        if self.state is State.HELD:
            moment = now()
            if moment >= self.ends_at:
                self.lose(self._overdue_reason(moment), spare=spare)

    def lose_on_leaving(self, reason: LossReason) -> None:
        """The leave found that the lease had ended before; perhaps the leave was long on its way."""
        moment = now()
        self.reason = self._overdue_reason(moment) if moment >= self.ends_at else reason
        self._cancel_bodies()  # it may have been left in a body, that goes on

    def _cancel_bodies(self, spare: asyncio.Task[Any] | None = None) -> None:
        if self.options.on_lost == "cancel" and self.armed:
            for task, scope in self.armed.items():
                if task is not spare:
                    scope.cancel()

    def wake_watchers(self) -> None:
        """Let those who wait for the loss look again."""
        for watcher in self.watchers or ():
            if not watcher.done():
                watcher.set_result(None)

    @property
    def lost(self) -> LockLost | None:
        """The loss in an exception of its own, whose text is of this moment."""
        return None if self.reason is None else self._loss(self.reason)

    def overdue_error(self) -> LockLost:
        """Say what ``lose_if_overdue`` would, and change nothing: this may be called on any thread."""
        return self._loss(self._overdue_reason(now()))

    def _overdue_reason(self, moment: float) -> LossReason:
        maximum = self.options.max_hold
        over = maximum is not None and (self.capped or moment >= self.granted_at + maximum)
        return "max_hold" if over else "expired"

    def _loss(self, reason: LossReason) -> LockLost:
        name = self.request.name
        text = f"lease on {name!r} {self._what_happened(reason)} (token {self.token}): stop writing"
        return LockLost(text, name=name, reason=reason)

    def _what_happened(self, reason: LossReason) -> str:
        match reason:
            case "expired":
                left = self.deadline - now()
                if left <= 0.0:
                    return f"expired {-left:.1f} s ago"
                margin = f" (margin {self.options.margin:g} s)" if self.options.margin else ""
                return f"is over, and another may hold it in {left:.1f} s{margin}"
            case "broken":
                return "was broken by an operator"
            case "taken_over":
                return "was taken over by another holder"
            case "gone":
                return "is unknown to the server (flushed, evicted, or lost in a failover)"
            case "max_hold":
                limit = self.options.max_hold  # None in tests that simulate this loss
                return "reached max_hold" + ("" if limit is None else f" ({limit:g} s)")
            case "closed":
                return "ended because its client was closed"

    @property
    def ran_out(self) -> bool:
        """Whether the lease was lost to time, which is what a lock-delay is for."""
        return self.reason in ("expired", "max_hold")

    def error(self) -> LockLost | BackendError:
        """Return a fresh exception for whoever must hear of the loss."""
        if self.failure is not None:
            error = type(self.failure)(str(self.failure), name=self.request.name)
            error.__cause__ = self.failure.__cause__
            return error
        assert self.reason is not None
        return self._loss(self.reason)

    # -- handles ---------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """Count one more acquisition; return its serial."""
        self.serial += 1
        self.handles.append(self.serial)
        return self.serial

    def end_handle(self, serial: int) -> bool:
        """One acquisition ends; return whether it was the last."""
        self.handles.remove(serial)
        if self.dropped:
            self.dropped = tuple(dropped for dropped in self.dropped if dropped != serial)
        if not self.handles:
            return True
        self.wake_watchers()
        return False

    @property
    def is_dropped(self) -> bool:
        """Whether nobody references any of its leases."""
        return len(self.dropped) == len(self.handles)
