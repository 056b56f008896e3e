"""One request's place: its state, what the core asks of it, and what it is told.

What is sent about its keys, and what the answers mean for them, is in ``own_keys`` and ``ending``. (Above
400 lines: a place is one machine of states.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from ..._backoff import pauses
from ..._clock import local_deadline, now
from ..._errors import BackendError, BackendUnavailable, LossReason
from ..._model import RAN_OUT, End, Gone, Granted, Left, Refused, Terms, Waiting, first_request
from ..._tasks import start_soon
from ..base import Listener, Unanswered
from . import messages as m
from . import transactions
from .cluster import Cluster
from .ending import Ending
from .leases import SharedLease
from .own_keys import OwnKeys
from .recipe import Keys, Queue, Record, Success, Turn
from .refusals import LeaseNotFound
from .request import PAUSE, Request, Requests, State
from .room import Room
from .successors import Successors

_logger = logging.getLogger("aiodlock")

#: So much is left for a body when it begins, beside the margin (seconds; of a short lease a tenth): a
#: waiter's key is moved to the lease of a holder a moment after that.
_FOR_A_BODY = 0.5
#: So often a single try is repeated when others change the name meanwhile.
_TRIES = 5
#: No revision comes later.
_FAR_FUTURE = (1 << 63) - 1


class EtcdPlace(Request):
    """What the core asks. Mutable state, besides that of a request:

    ``own`` (its keys) and ``ending`` (what deletes them); ``room`` (while it waits); ``_failed`` (the last
    message had no answer); ``_is_gone`` (the store knows it no more); ``_successors`` (of a holder that
    lingers), ``recalled`` (others want what it has), ``_answered`` (the core knows that it waits or holds),
    ``_closes`` (when its ``max_hold`` is over), ``_confirming`` (a waiter's grant is being written),
    ``_was_ended`` (its lease was lost, and its key was deleted when due).
    """

    __slots__ = (
        "_answered",
        "_closes",
        "_confirming",
        "_failed",
        "_is_gone",
        "_listener",
        "_requests",
        "_successors",
        "_was_ended",
        "ending",
        "own",
        "recalled",
        "room",
    )

    #: A lease that is shared does not end while the client lives.
    surely_over_at: float = math.inf
    state: State
    terms: Terms
    token: int

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
        self.ending: Ending = Ending(self, self.own)
        self.room: Room | None = None
        self._requests = requests
        self._listener = listener
        self._failed = self._is_gone = self._confirming = False
        self._successors: Successors | None = None
        self.recalled: bool = False
        self._answered = False
        self._closes = math.inf
        self._was_ended = False

    def __repr__(self) -> str:
        return f"<EtcdPlace {self.terms.name!r} {self.state} id={self.id}>"

    # -- what the core reads ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the store certainly honours the request: it lives as long as its lease, or until its
        ``max_hold`` is over."""
        return min(self.own.deadline, self._closes)

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``, extended or not."""
        maximum = self.terms.max_hold
        return maximum is not None and (self.own.ttl >= maximum or self._closes < self.own.deadline)

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
        if self.state == "left":
            return Gone("gone")
        if self.state == "waiting":
            return Waiting(self.deadline, None)
        try:
            if self.state == "held":
                answer: Granted | Waiting | Refused | Gone = Granted(self.token, self.deadline)
            else:
                self.state = "asking"
                self._requests.add(self)
                answer = await (self._queue() if wait else self._try_once())
            if isinstance(answer, Granted):
                answer = await self._begin_at_once()
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

    async def _queue(self) -> Granted | Waiting | Refused | Gone:
        """Take a free name, or a place in its queue. The key is made once, so it may be sent again."""
        keys, own = self.keys, self.own
        holder, waiter, delay = await own.leases()
        leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
        self.room = room = self.cluster.rooms.of(keys)
        room.add(self)
        sent, once = now(), self.terms.kind == "once"
        with room.opening() as opens:
            value = self.value()
            request = transactions.enter(keys, self.id, value, leases, read=opens, once=once)
            answer = await own.send(request, holder, waiter, delay)
            assert answer.header is not None
            if opens and not answer.succeeded:
                room.begin(_queue_in(keys, answer, 1))
        if answer.succeeded:
            own.created = own.written = answer.header.revision
            return self.hold(own.created, holder, delay, sent)
        if once:
            there = _queue_in(keys, answer, 1)
            if there.success is not None:
                return self._recorded(there.success)
            there.check()  # behind a record that cannot be read nobody is queued
        nested = answer.responses[0].response_txn
        assert nested is not None
        await room.open()
        made = answer.header.revision
        if not nested.succeeded:
            # An earlier attempt has made the key, or it has left.
            found = (await self.cluster.read(keys)).find(self.id)
            if found is None:
                return Gone("gone")
            made = found.created
        return await self._see(await room.reached(made), waiter)

    async def _see(self, known: Queue, waiter: SharedLease) -> Granted | Waiting | Refused | Gone:
        """Do what the state of the queue means for a request that was just queued."""
        found = known.find(self.id)
        if known.success is not None:
            return self._recorded(known.success)
        if found is None:
            return Gone("gone" if waiter.alive else "expired")
        self.own.use(self.own.were_made(found))
        turn = known.turn_of(found)
        match turn.what:
            case "gone":
                return Gone("gone")
            case "deadlock" | "limit":
                unsure = True
                with contextlib.suppress(BackendError):
                    await self.leave(RAN_OUT)
                    unsure = self.own.ambiguous
                return Refused(turn.what, turn.used, unsure=unsure)
            case "waits":
                known.check()
            case _:
                held = await self._confirm(turn, found, known)
                if held is not None:
                    return held
                # What it was to join is gone, or its key is not as it was known. What the room heard
                # meanwhile it has told to nobody.
                self._confirm_soon()
        self.state = "waiting"
        return Waiting(self.deadline, None)

    async def _try_once(self) -> Granted | Refused | Gone:
        """Be granted at once, or leave nothing behind."""
        cluster, keys, own = self.cluster, self.keys, self.own
        await cluster.leaves.until_arrived(keys.base)
        holder, waiter, delay = await own.leases()
        leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
        sent = now()
        request = transactions.enter_if_free(keys, self.id, self.value(), leases)
        joins = 0
        for _ in range(_TRIES):
            answer = await own.send(request, holder, delay)
            assert answer.header is not None
            if answer.succeeded:
                own.created = own.written = answer.header.revision
                return self.hold(joins or own.created, holder, delay, sent)
            known = _queue_in(keys, answer, 0)
            mine = known.find(self.id)
            if mine is not None:  # an earlier attempt was carried out
                lease = own.were_made(mine)
                return self.hold(mine.order, lease, own.delay_in(known) or delay, sent)
            if known.success is not None:
                return self._recorded(known.success)
            joins, far = 0, _FAR_FUTURE  # as one that comes now
            limit, label = self.terms.limit, cluster.label
            record = Record(self.id, self.terms.mode, self.owner, label, limit, far, far)
            turn = known.turn_of(record)
            if turn.what == "deadlock" or turn.what == "limit":
                return Refused(turn.what, turn.used, unsure=own.ambiguous)
            if turn.what == "joins":
                mate = known.find(turn.mate)
                assert mate is not None
                joins = turn.order
                joining = Record(self.id, record.mode, self.owner, label, 0, joins, 0)
                value = self.value(joins)
                request = transactions.join(keys, joining, 0, mate, value, leases)
            elif known.would_hold(record):
                request = transactions.enter_unless_changed(
                    keys, self.id, self.value(), leases, known.revision
                )
            else:
                known.check()
                # Nothing is queued, so a holder that lingers is not told by that.
                for blocker in known.holders():
                    if blocker.lingers:
                        cluster.start(cluster.recall, keys, blocker)
                break
        return Refused("busy", unsure=own.ambiguous)

    async def _confirm(self, turn: Turn, record: Record, queue: Queue) -> Granted | None:
        granted = await self.own.grant(turn, record, queue)
        return None if granted is None else self.hold(*granted, now())

    def _recorded(self, success: Success) -> Refused:
        return Refused("recorded", unsure=self.own.ambiguous, result=success.result)

    async def _begin_at_once(self) -> Granted | Gone:
        """Do what a body needs that begins with the answer to ``acquire``."""
        if not self._lasts:
            await self._renew()  # it is at the lease of a waiter still
        if self.terms.begins and not await self.ending.close_after():
            return Gone("gone")
        # It may be gone since an earlier attempt: until this one is answered the core heeds nothing else.
        if not self.own.written:
            return Gone("gone")
        self._count_max_hold()
        return Granted(self.token, self.deadline)

    def _count_max_hold(self) -> None:
        """It is told now that it holds."""
        maximum = self.terms.max_hold
        self._closes = math.inf if maximum is None else now() + maximum

    def hold(
        self, order: int, lease: SharedLease, delay: SharedLease | None, sent: float
    ) -> Granted:
        """Be the holder, whose keys end with these leases."""
        own = self.own
        own.created = own.created or order
        self.token, self.state = order, "held"
        own.use(lease)
        if delay is not None:
            own.use_delay(delay)
        known = None if self.room is None else self.room.queue
        self._wait_no_more()
        if self.terms.linger and self._successors is None:
            self._successors = Successors(self, self.on_recalled)
            self._successors.begin(own.created, known)
        if not self.terms.auto_extend:
            own.until = local_deadline(sent, round(own.ttl * 1000))
        if lease.seconds < own.ttl:
            own.move_later()
        return Granted(order, self.deadline)

    def _wait_no_more(self) -> None:
        if self.room is not None:
            self.room.remove(self)
            self.room = None

    # -- what is heard ---------------------------------------------------------------------------

    def on_turn(self, turn: Turn) -> None:
        """The room has seen that it holds, or may join its owner's other request."""
        if self.state != "waiting":
            return
        closes = self.terms.hold_at_least and self.terms.begins
        if turn.what == "holds" and not self.terms.lock_delay and not closes:
            assert self.own.lease is not None
            self.hold(turn.order, self.own.lease, None, now())
            self._tell_granted()
        elif self._timer is None:
            self._confirm_soon()

    def _tell_granted(self) -> None:
        if self._lasts:
            self._count_max_hold()
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
        if self.state == "held" and lease is not None:
            if lease.alive and self._left > 0.0:
                self._count_max_hold()
                self._listener.granted()
            else:
                self._listener.gone("expired")

    def _confirm_soon(self) -> None:
        self.set_timer(0.0, lambda: self.cluster.start(self._confirm_waiting))

    async def _confirm_waiting(self) -> None:
        """Write what the grant of a waiter needs, until that is answered."""
        if self._confirming:
            return  # each attempt begins with what the room knows then
        self._confirming = True
        try:
            await self._until_confirmed()
        finally:
            self._confirming = False

    async def _until_confirmed(self) -> None:
        pause = pauses(first=PAUSE)
        while self.state == "waiting" and self.room is not None:
            queue = self.room.queue
            if queue is None:
                return  # the room tells when it knows more
            if queue.success is not None:
                self.on_recorded(queue.success.result)
                return
            record = queue.find(self.id)
            if record is None:
                return  # the room may not have heard of the key yet: it tells when it has
            turn = queue.turn_of(record)
            if turn.what not in ("holds", "joins"):
                return
            try:
                granted = await self._confirm(turn, record, queue)
            except BackendError as failed:
                self.on_failed(failed)
            else:
                if granted is not None:
                    await self._begin_waiting()
                    return
            await asyncio.sleep(next(pause))

    async def _begin_waiting(self) -> None:
        """Tell a waiter its grant, once the name stays closed if it has to."""
        pause = pauses(first=PAUSE)
        while self.state == "held":
            try:
                if not self.terms.begins or await self.ending.close_after():
                    self._tell_granted()
                else:
                    self.on_gone("gone")
                return
            except BackendError as failed:
                self.on_failed(failed)
            await asyncio.sleep(next(pause))

    def on_failed(self, error: BackendError) -> None:
        """What was sent in the background had no answer, or was refused."""
        if self.lives:
            self._failed = isinstance(error, BackendUnavailable)
            self._listener.extension_failed(error)

    def on_vanished(self) -> None:
        """The room has seen that its key is gone."""
        self.on_gone("gone")

    def on_gone(self, reason: LossReason) -> None:
        """The store does not know the request any more. Told once: a message that moves its keys may find
        them gone, too."""
        if self._is_gone or not self.lives:
            return
        self._is_gone = True
        self._stop()
        self.own.vanished()
        self.state = "left" if self.state == "waiting" else "held"
        self._listener.gone(reason)

    def on_recorded(self, result: bytes) -> None:
        """A success is on record: the store has forgotten this waiter, and all others."""
        if self.state != "waiting":
            return  # who is asking is told in the answer
        unsure = self.own.ambiguous
        if unsure:
            self._stop()
            self.own.vanished()
            self.state = "left"
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
        if self.state == "waiting":
            self._listener.unavailable(error)

    # -- holding ---------------------------------------------------------------------------------

    async def extend(self, ttl: float | None) -> None:
        """Extend now; with ``ttl`` by that from now on."""
        own = self.own
        if ttl is not None:
            own.ttl = ttl
        sent = now()
        await own.move()
        if self.state != "held" or own.lease is None:
            return
        await self.cluster.leases.renew(own.lease)
        reason = await self.own.why_gone()
        if reason is not None:
            self.on_gone(reason)
        elif not self.terms.auto_extend:
            own.until = local_deadline(sent, round(own.ttl * 1000))

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease that lingered, with a ``max_hold`` of its own."""
        self.terms = terms
        self._count_max_hold()
        self.own.hurry()

    async def begin(self) -> None:
        """A body begins: keep the name closed for ``hold_at_least`` from now on."""
        if self.state == "held" and not await self.ending.close_after():
            self.on_gone("gone")

    def run_out(self) -> None:
        """The lease counts as lost here. Its key would live on with the client: end it when it is due."""
        if self.state == "held" and self.own.lease is not None:
            pause = max(0.0, self.deadline - now())
            self.set_timer(pause, lambda: self.cluster.start(self._end_overdue))

    async def _end_overdue(self) -> None:
        pause = pauses(first=PAUSE)
        while self.state == "held":
            try:
                await self.ending.leave(RAN_OUT)
                self._was_ended = True
                self.own.vanished()
                return
            except BackendError as failed:
                _logger.debug("ending an overdue lease failed: %s", failed)
            await asyncio.sleep(next(pause))

    # -- leaving ---------------------------------------------------------------------------------

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        """Delete the key."""
        self._stop()
        if self.state == "new":
            self.state = "left"
            return Left("withdrawn")
        before, self.state = self.state, "left"
        if end.lost and self._was_ended:
            self.abandon()  # to send it again would begin its lock-delay anew
            return Left("gone", "expired")
        passed = self._pass_on() if before == "held" and self._may_pass_on(end) else None
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
        self.state = "left"
        self._requests.remove(self)
        self.own.forget()

    def _stop(self) -> None:
        self._wait_no_more()
        if self._successors is not None:
            self._successors.end()
        self.cancel_timer()


def _queue_in(keys: Keys, answer: m.TxnResponse, step: int) -> Queue:
    """Return what a step of a transaction has read of a name."""
    read = answer.responses[step].response_range
    assert answer.header is not None
    assert read is not None
    return Queue(keys, answer.header.revision, read.kvs)
