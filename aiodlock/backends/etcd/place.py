"""One request's place: what the core asks of it, and what it is told.

``entering`` is how it gets its keys, ``waiting`` how it comes to hold, ``own_keys`` where its keys are, and
``ending`` how they are deleted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable, LossReason
from ..._model import End, Gone, Granted, Left, Refused, Terms, Waiting, first_request
from ..._tasks import start_soon
from ..base import Listener, Unanswered
from ..hold_end import HoldEnd
from ..stage import ASKING, HELD, NEW, OVER, WAITING, Stage
from .cluster import Cluster
from .ending import Ending
from .entering import Entering, Grant
from .own_keys import OwnKeys
from .recipe import Turn
from .refusals import LeaseNotFound
from .request import PAUSE, Request, Requests
from .successors import Successors
from .waiting import Waiter

#: So much is left for a body when it begins, beside the margin (seconds; of a short lease a tenth): a
#: waiter's key is moved to the lease of a holder a moment after that.
_FOR_A_BODY = 0.5


class EtcdPlace(Request):
    """What the core asks. Mutable state, besides that of a request:

    ``own`` (its keys), ``entering`` (makes them), ``ending`` (deletes them) and ``_waiter`` (while
    it is queued); ``_end`` (of the hold, by its own terms); ``_failed`` (the last message had no answer);
    ``_successors`` (of a holder that lingers), ``recalled`` (others want what it has), ``_answered`` (the
    core knows that it waits or holds).
    """

    stage: Stage
    token: int

    #: A lease that is shared does not end while the client lives.
    surely_over_at: float = math.inf

    def __init__(
        self,
        cluster: Cluster,
        requests: Requests[EtcdPlace],
        terms: Terms,
        request_id: str,
        owner: str,
        listener: Listener,
    ) -> None:
        super().__init__(cluster, terms, request_id, owner)
        self.own: OwnKeys = OwnKeys(self)
        self.entering: Entering = Entering(self, self.own)
        self.ending: Ending = Ending(self, self.own, self.entering)
        self._waiter = Waiter(self, self.own, self.entering, self._on_granted, self._on_recorded)
        self._end = HoldEnd()
        self._requests = requests
        self._listener = listener
        self._failed = self._answered = False
        self._successors: Successors | None = None
        self.recalled: bool = False

    def __repr__(self) -> str:
        return f"<EtcdPlace {self.terms.name!r} {self.stage.value} id={self.id}>"

    # -- what the core reads ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the store certainly honours the request: it lives as long as its lease, or until it
        ends by its own terms."""
        return self._end.before(self.own.deadline)

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``."""
        return self._end.is_capped(self.terms, self.own.ttl, self.own.deadline)

    @property
    def silent(self) -> bool:
        """Whether the last message had no answer."""
        lease = self.own.lease
        if lease is not None and lease.silent_since is not None:
            return self._failed or now() - lease.silent_since > PAUSE
        return self._failed

    # -- asking ----------------------------------------------------------------------------------

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        """Ask. Repeating it is harmless: the key is made once."""
        if self.stage is OVER:
            return Gone("gone")
        if self.stage is WAITING:
            return Waiting(self.deadline, None)
        try:
            answer = await self._ask(wait=wait)
        except BackendUnavailable:
            self._failed = True
            raise
        except LeaseNotFound as ended:
            # Nothing was written. Another lease is made for the next attempt.
            raise BackendUnavailable(f"a lease ended before it was used: {ended}") from ended
        self._failed = False
        if isinstance(answer, Refused):
            if not answer.unsure:
                self.abandon()
        elif not isinstance(answer, Gone):
            self._answered = True
            if self.recalled and isinstance(answer, Granted):
                answer.recalled = True
        return answer

    async def _ask(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        if self.stage is not HELD:
            self.stage = ASKING
            self._requests.add(self)
            entering = self.entering
            found = await (entering.queue(self._waiter.begin()) if wait else entering.try_once())
            if isinstance(found, Turn):
                self.stage = WAITING
                if found.what != "waits":
                    self._waiter.confirm_soon()
                return Waiting(self.deadline, None)
            if not isinstance(found, Grant):
                return found
            self._hold(found)
        # What a body needs that begins with this answer.
        if not self._lasts:
            await self._renew()  # it is at the lease of a waiter still
        if self.terms.begins and not await self.ending.close_after():
            return Gone("gone")
        # It may be gone since an earlier attempt: until this one is answered the core heeds nothing else.
        if not self.own.written:
            return Gone("gone")
        self._end.begin(self.terms)
        return Granted(self.token, self.deadline)

    def _hold(self, grant: Grant) -> None:
        own, terms = self.own, self.terms
        self.token, self.stage = grant.token, HELD
        own.use(grant.lease)
        if grant.delay is not None:
            own.use_delay(grant.delay)
        known = None if self._waiter.room is None else self._waiter.room.queue
        self._waiter.end()
        if terms.linger and self._successors is None:
            self._successors = Successors(self, self.on_recalled)
            self._successors.begin(own.created, known)
        self._end.extended(terms, own.ttl)
        if grant.lease.seconds < own.ttl:
            own.move_later()

    # -- what is heard ---------------------------------------------------------------------------

    def _on_granted(self, grant: Grant) -> None:
        """It has waited, and holds."""
        self._hold(grant)
        if self.terms.begins and self.terms.hold_at_least:
            self.cluster.start(self.repeat, HELD, self._close_and_tell)
        else:
            self._tell_granted()

    async def _close_and_tell(self) -> None:
        """Tell the grant once the name stays closed after it."""
        closes = await self.ending.close_after()
        if not closes:
            self.on_gone("gone")
        elif self.stage is HELD:  # it has not left meanwhile
            self._tell_granted()

    def _tell_granted(self) -> None:
        if self._lasts:
            self._end.begin(self.terms)
            self._listener.granted()
        else:
            self.cluster.start(self._extend_first)

    @property
    def _left(self) -> float:
        """How much is left, without the margin."""
        return self.deadline - self.terms.margin - now()

    @property
    def _lasts(self) -> bool:
        """Whether a body can begin with what is left."""
        return self._left > min(_FOR_A_BODY, self.own.useful / 10)

    async def _renew(self) -> None:
        """Have it end with the lease of its ttl, and renew that if need be."""
        await self.own.move()
        if self.own.lease is not None and not self._lasts:
            await self.cluster.leases.renew(self.own.lease)

    async def _extend_first(self) -> None:
        """Too little is left for a body: renew, and tell then."""
        try:
            await self._renew()
        except BackendError:
            pass
        lease = self.own.lease
        if self.stage is HELD and lease is not None:
            if lease.alive and self._left > 0.0:
                self._end.begin(self.terms)
                self._listener.granted()
            else:
                self._listener.gone("expired")

    def on_failed(self, error: BackendError) -> None:
        """What was sent in the background had no answer, or was refused."""
        if self.lives:
            self._failed = isinstance(error, BackendUnavailable)
            self._listener.extension_failed(error)

    def on_gone(self, reason: LossReason) -> None:
        """The store does not know the request any more. Told once: a message that moves its keys may find
        them gone, too."""
        if not self.lives or not self.own.written:
            return
        self._stop()
        self.own.vanished()
        if self.stage is WAITING:
            self.stage = OVER
        self._listener.gone(reason)

    def _on_recorded(self, result: bytes) -> None:
        """A success is on record: the store has forgotten this waiter, and all others."""
        if self.stage is not WAITING:
            return  # who is asking is told in the answer
        unsure = self.entering.ambiguous
        if unsure:
            self._stop()
            self.own.vanished()
            self.stage = OVER
        else:
            self.abandon()
        self._listener.recorded(result, unsure=unsure)

    def on_recalled(self) -> None:
        """Others want the name, and this holder was to linger."""
        self.recalled = True
        if self._answered and self.lives:
            self._listener.recalled()

    def on_silent(self, error: Exception) -> None:
        """What keeps it alive has had no answer."""
        if self.lives:
            self._listener.extension_failed(error)

    def on_unavailable(self, error: BackendUnavailable) -> None:
        """Nothing has answered for too long."""
        if self.stage is WAITING:
            self._listener.unavailable(error)

    # -- holding ---------------------------------------------------------------------------------

    async def extend(self, ttl: float | None) -> None:
        """Extend now; with ``ttl`` by that from now on."""
        own = self.own
        if ttl is not None:
            own.ttl = ttl
        await own.move()
        if self.stage is not HELD or own.lease is None:
            return
        await self.cluster.leases.renew(own.lease)
        reason = await self.own.why_gone()
        if reason is not None:
            self.on_gone(reason)
        else:
            self._end.extended(self.terms, own.ttl)

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease that lingered, with a ``max_hold`` of its own."""
        self.terms = terms
        self._end.begin(terms)
        self.own.hurry()

    async def begin(self) -> None:
        """A body begins: keep the name closed for ``hold_at_least`` from now on."""
        if self.stage is HELD and not await self.ending.close_after():
            self.on_gone("gone")

    def run_out(self) -> None:
        """The lease counts as lost here. Its key would live on with the client: end it when it is due."""
        if self.stage is HELD and self.own.lease is not None:
            pause = max(0.0, self.deadline - now())
            self.set_timer(pause, lambda: self.cluster.start(self.ending.end_overdue))

    # -- leaving ---------------------------------------------------------------------------------

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        """Delete the key."""
        self._stop()
        if self.stage is NEW:
            self.stage = OVER
            return Left("withdrawn")
        before, self.stage = self.stage, OVER
        passed = self._pass_on() if before is HELD and self._may_pass_on(end) else None
        try:
            async with asyncio.timeout(within):
                left = await self.ending.leave(end, passed=passed is not None)
        except TimeoutError as silent:
            raise Unanswered(f"no answer for {within:g} s") from silent
        finally:
            if passed is not None:
                passed.set_result(None)
        self.abandon()
        return left

    def _may_pass_on(self, end: End) -> bool:
        """Whether the next request of this client may begin before the key is deleted.

        Not if something else than the key has a say, or will: a success, a lock-delay, a hold. And not if
        a request of the same owner could still get in beside this one, as long as its key is there.
        """
        terms = self.terms
        closes = end.lost or terms.lock_delay or terms.hold_at_least
        return (
            not closes
            # A success of the next one would delete its key, and the leave find it gone.
            and terms.kind != "once"
            and first_request(self.owner) == self.id
            and not self._requests.has_mates(self.owner)
        )

    def _pass_on(self) -> asyncio.Future[None] | None:
        room = self.cluster.rooms.find(self.keys)
        if room is None or not room.left(self.id):
            return None
        return self.cluster.leaves.begin(self.keys.base)  # who inspects the name waits for that

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        """Send a leave that nobody awaits."""
        cluster = self.cluster
        if not cluster.is_up:
            return False
        return cluster.leaves.send(
            self.keys.base,
            lambda: self.leave(end),
            done,
            lambda run: start_soon(cluster.tasks, run),
        )

    def abandon(self) -> None:
        """Forget what is kept of it here."""
        self._stop()
        self.stage = OVER
        self._requests.remove(self)
        self.own.forget()

    def _stop(self) -> None:
        self._waiter.end()
        if self._successors is not None:
            self._successors.end()
        self.cancel_timer()
