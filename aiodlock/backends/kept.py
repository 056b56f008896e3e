"""Stores with a lease per request: the few calls that such a store offers, and what is known of a request.

A ``Keeper`` extends what is queued and held, and hears what the store says by itself. ``KeptPlace`` is what
the core asks. ("Kept" means kept alive here. The core's state KEPT is another thing: a lease that lingers.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from .._agenda import NEVER, Entry
from .._clock import now
from .._errors import BackendError, BackendUnavailable, LossReason
from .._model import (
    End,
    Gone,
    Granted,
    Left,
    Refused,
    StoreRequest,
    Terms,
    Waiting,
)
from .base import Listener, StoreBase
from .stage import ASKING, HELD, OVER, Stage


class Notices(Protocol):
    """Whom a store tells what it hears. Called in the event loop, returns at once, never raises."""

    def on_granted(self, request_id: str, token: int, where: str, recalled: bool = False) -> None:
        """A notice: the waiter became the holder. ``where`` is for ``KeptStore.leave_unknown``.
        ``recalled``: it must not linger, since others wait behind it."""

    def was_lost(self, request_id: str, token: int) -> bool:
        """Tell whether this grant, of which a notice comes late, was held and lost: it is not unknown, and
        closes the name for its lock-delay."""

    def on_recalled(self, request_id: str) -> None:
        """Others want what this holder has: it must not linger."""

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        """The waiter became the holder, with what was left of its lease as a waiter."""

    def on_look(self, request_id: str | None) -> None:
        """A hint: ask about this waiter; with None, about all (notices may have been missed)."""

    def on_other_server(self) -> None:
        """Another server answers from now on, which may know less: ask about all, holders too."""

    def on_back(self) -> None:
        """The connection is back, perhaps to a store that was restarted empty: as with another server, but
        there is a little time to ask about holders."""

    def on_broken(self, request_id: str, token: int) -> None:
        """An operator broke the lease that has this token."""

    def may_hold(self) -> bool:
        """Tell whether a lease of this client may still be held by what the store has said."""


class KeptStore(StoreBase, Protocol):
    """A store where each request has a lease of its own."""

    async def run(self, listener: Notices, ready: Callable[[], None]) -> None:
        """Keep the connections up until cancelled; call ``ready`` when the first calls can be made
        and notices arrive."""

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        """Grant, queue or (``wait=False``) refuse the request. Repeating it is harmless."""

    def extend(
        self, batch: Sequence[tuple[StoreRequest, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        """Push the deadline of each request to at least now + the length beside it; never nearer.

        All are sent before this returns; each awaitable gives one outcome or raises. What this call itself
        raises counts for all of them. For the head of a queue this is also the look: whoever can be granted
        is granted.
        """

    def server_of(self, request: StoreRequest) -> object:
        """Return something equal for requests whose messages go to the same server for now."""

    async def leave(
        self, request: StoreRequest, *, lost: bool = False, within: float | None = None
    ) -> Left:
        """Release or withdraw, and hand off. When an acquire of this request went unanswered, a late
        duplicate of it is refused from then on. Unanswered after ``within`` seconds.

        ``lost``: the lease ran out for its holder (whose local deadline is earlier than the store's),
        so a lock-delay is not opened by this.
        """

    def leave_later(
        self,
        request: StoreRequest,
        done: Callable[[Left | BackendError], object],
        *,
        lost: bool = False,
    ) -> bool:
        """Send a leave that nobody waits for; see ``Place.leave_soon``."""

    async def leave_unknown(self, request_id: str, where: str, final: bool) -> Left:
        """Give back a grant that was announced for a request this client does not have.

        ``final``: a late duplicate of its acquire is refused from now on.
        """

    def watch(self, request: StoreRequest, watching: bool) -> None:
        """Start or stop to listen for the end of what blocks this head, where the store can tell."""


class Nobody:
    """The listener of a place that is over: it does nothing."""

    def granted(self) -> None: ...

    def gone(self, reason: LossReason) -> None: ...

    def recorded(self, result: bytes, *, unsure: bool) -> None: ...

    def extension_failed(self, error: Exception) -> None: ...

    def unavailable(self, error: BackendUnavailable) -> None: ...

    def recalled(self) -> None: ...


NOBODY: Final = Nobody()

#: A leave found neither a holder nor a waiter, nor anything that is remembered of one.
NOTHING_LEFT: Final = Left("gone")


async def give_back_unknown(leave: Callable[[bool], Awaitable[Left]]) -> None:
    """Give back what was announced for a request this client does not have.

    Mostly its leave and the notice have crossed: then nothing is there, and no marker needs to be left
    behind. Else that leave was lost, and a late duplicate of an acquire was carried out. It may be one of
    several: the next one is refused.

    :param leave: ``KeptStore.leave_unknown`` of that request.
    """
    if await leave(False) != NOTHING_LEFT:
        await leave(True)


class Schedule:
    """When something is due about a place. The keeper makes it when there is: most places leave before.

    Mutable state: ``beat`` (when the next extension is due; 0.0: now), ``look_at`` (when a head looks at
    its blocker's end), ``asked`` (an extension is on its way), ``due`` (the next of these), ``entry`` (it
    comes up when ``due`` is reached, or before), ``silent_since`` and ``failures`` (of extensions that had
    no answer).
    """

    __slots__ = ("asked", "beat", "due", "entry", "failures", "look_at", "silent_since")

    def __init__(self) -> None:
        self.asked: bool = False
        self.beat: float = NEVER
        self.due: float = 0.0
        self.entry: Entry | None = None
        self.failures: int = 0
        self.look_at: float | None = None
        self.silent_since: float | None = None

    @property
    def is_due_again(self) -> bool:
        """Whether an extension is due now and not sent yet: an answer that comes now may be older than what
        there is to see then."""
        return self.beat == 0.0 and not self.asked


class Kept(StoreRequest):
    """A request whose lease is its own, as its store and the keeper know it.

    Mutable state: ``stage``, ``deadline``, ``token``, ``capped`` (see ``Place``), ``lease_ttl`` (how long a
    holder's extensions are), ``granted`` (it may be too late for a body), ``granted_at``, ``noticed`` (a
    grant was announced before the first reply), ``broken`` (the token of a grant that an operator broke
    before it was known here), ``floor`` (no grant since the last answer has a token that is not larger),
    ``recalled`` (it must not linger), ``answered`` (the core knows that it waits), ``leaves`` (how many
    were sent), and the keeper's ``schedule``, ``silent`` and ``watching`` (the store listens for its
    blocker's end).
    """

    __slots__ = (
        "answered",
        "broken",
        "capped",
        "deadline",
        "floor",
        "granted_at",
        "lease_ttl",
        "leaves",
        "listener",
        "noticed",
        "recalled",
        "schedule",
        "silent",
        "stage",
        "token",
        "watching",
    )

    answered: bool
    broken: int
    capped: bool
    deadline: float
    end: End
    floor: int
    granted_at: float
    lease_ttl: float
    leaves: int
    listener: Listener
    noticed: int | None
    recalled: bool
    schedule: Schedule | None
    #: Whether the last extension had no answer. No property: it is read at both ends of a lingering body.
    silent: bool
    stage: Stage
    terms: Terms
    token: int
    watching: bool

    def __init__(self, terms: Terms, request_id: str, owner: str, listener: Listener) -> None:
        # By super() it takes twice as long, for each acquire.
        StoreRequest.__init__(self, request_id, terms, owner, terms.begins, terms.linger > 0.0)
        self.listener = listener
        self.stage = ASKING
        self.lease_ttl = terms.ttl
        self.answered = self.capped = self.watching = self.recalled = self.silent = False
        self.deadline = self.granted_at = 0.0
        self.token = self.floor = self.broken = self.leaves = 0
        self.noticed = self.schedule = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.terms.mode} {self.stage.value} id={self.id}>"

    # -- times -------------------------------------------------------------------------------------

    @property
    def length(self) -> float:
        """How long the next extension shall be, from now on."""
        if not self.granted:
            return self.terms.waiter_ttl
        maximum = self.terms.max_hold
        if maximum is None:
            return self.lease_ttl
        if self.stage is not HELD:
            return min(self.lease_ttl, maximum)
        return max(0.001, min(self.lease_ttl, self.granted_at + maximum - now()))

    @property
    def is_over(self) -> bool:
        """Whether nothing is extended any more."""
        return self.stage is OVER

    @property
    def surely_over_at(self) -> float:
        """When the longest lease that may have been asked for is over."""
        return max(
            self.deadline, now() + max(self.terms.waiter_ttl, self.terms.ttl, self.lease_ttl)
        )

    @property
    def at_maximum(self) -> bool:
        """Whether a holder must not be extended any more."""
        maximum = self.terms.max_hold
        return maximum is not None and self.deadline >= self.granted_at + maximum

    def planned(self) -> Schedule:
        """Return its schedule, which is made when something is to be planned."""
        if self.schedule is None:
            self.schedule = Schedule()
        return self.schedule

    # -- its life ----------------------------------------------------------------------------------

    def hold(self, token: int, deadline: float) -> None:
        """Become a holder, and tell the core if it waits for that. The place in the queue may have had more
        time left than the lease has: on a quorum, other nodes kept it."""
        self.stage = HELD
        self.granted = True
        self.token = token
        self.deadline = deadline
        if self.terms.max_hold is not None:
            self.granted_at = now()
        if self.answered:
            self.listener.granted()
            if self.recalled:
                self.listener.recalled()

    def recall(self) -> None:
        """It must not linger: tell the core, again if need be: the first time may have been about a grant
        that ended before its answer came."""
        self.recalled = True
        if self.answered or self.stage is HELD:
            self.listener.recalled()
