"""How a request gets its key, and what its grant has to write. Each step may be sent again: the key is made
once."""

from __future__ import annotations

from typing import NamedTuple

from ..._errors import BackendError
from ..._model import Gone, Refused
from ..base import Unanswered
from ..stage import ASKING, OVER, WAITING
from . import messages as m
from . import transactions
from .leases import SharedLease
from .own_keys import OwnKeys
from .recipe import Keys, Queue, Record, Success, Turn
from .refusals import LeaseNotFound
from .request import Request
from .room import Room

#: So often a single try is repeated when others change the name meanwhile.
_TRIES = 5
#: No revision comes later.
_FAR_FUTURE = (1 << 63) - 1


class Grant(NamedTuple):
    """A request holds, with this token; its keys end with these leases."""

    token: int
    lease: SharedLease
    delay: SharedLease | None


class Entering:
    """The way in of one request. What is found out about its keys is noted in ``own``.

    Mutable state: ``ambiguous`` (a message that makes the key may be carried out later).
    """

    def __init__(self, request: Request, own: OwnKeys) -> None:
        self._request = request
        self._own = own
        self.ambiguous: bool = False

    async def queue(self, room: Room) -> Grant | Refused | Gone | Turn:
        """Take a free name, or a place in its queue; return the turn of one that waits."""
        request, own = self._request, self._own
        cluster, keys, once = request.cluster, request.keys, request.terms.kind == "once"
        holder, waiter, delay = await own.leases()
        leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
        with room.opening() as opens:
            value = request.value()
            entering = transactions.enter(keys, request.id, value, leases, read=opens, once=once)
            answer = await self._send(entering, holder, waiter, delay)
            if opens and not answer.succeeded:
                room.begin(_queue_in(keys, answer, 1))
        made = answer.revision
        if answer.succeeded:
            own.made(made)
            return Grant(made, holder, delay)
        if once:
            there = _queue_in(keys, answer, 1)
            if there.success is not None:
                return self._recorded(there.success)
            there.check()  # behind a record that cannot be read nobody is queued
        nested = answer.responses[0].response_txn
        assert nested is not None
        await room.open()
        if not nested.succeeded:
            # An earlier attempt has made the key, or it has left.
            found = (await cluster.read(keys)).find(request.id)
            if found is None:
                return Gone("gone")
            made = found.created
        return await self._see(await room.reached(made), waiter)

    async def _see(self, known: Queue, waiter: SharedLease) -> Grant | Refused | Gone | Turn:
        """Do what the state of the queue means for a request that was just queued."""
        found = known.find(self._request.id)
        if known.success is not None:
            return self._recorded(known.success)
        if found is None:
            return Gone("gone" if waiter.alive else "expired")
        self._own.use(self._own.were_made(found))
        turn = known.turn_of(found)
        match turn.what:
            case "deadlock" | "limit":
                return Refused(turn.what, turn.used, unsure=True)  # the key is there
            case "waits":
                known.check()
                return turn
        return await self.grant(turn, found, known) or turn

    async def try_once(self) -> Grant | Refused:
        """Be granted at once, or leave nothing behind."""
        request, own = self._request, self._own
        cluster, keys, terms = request.cluster, request.keys, request.terms
        await cluster.leaves.until_arrived(keys.base)
        holder, waiter, delay = await own.leases()
        leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
        entering = transactions.enter_if_free(keys, request.id, request.value(), leases)
        joins = 0
        for _ in range(_TRIES):
            answer = await self._send(entering, holder, delay)
            if answer.succeeded:
                own.made(answer.revision)
                return Grant(joins or own.created, holder, delay)
            known = _queue_in(keys, answer, 0)
            mine = known.find(request.id)
            if mine is not None:  # an earlier attempt was carried out
                return Grant(mine.order, own.were_made(mine), self._delay_in(known) or delay)
            if known.success is not None:
                return self._recorded(known.success)
            joins, far = 0, _FAR_FUTURE  # as one that comes now
            limit, label, mode = terms.limit, cluster.label, terms.mode
            record = Record(request.id, mode, request.owner, label, limit, far, far)
            turn = known.turn_of(record)
            if turn.what == "deadlock" or turn.what == "limit":
                return Refused(turn.what, turn.used, unsure=self.ambiguous)
            if turn.what == "joins":
                mate = known.find(turn.mate)
                assert mate is not None
                joins = turn.order
                joining = Record(request.id, mode, request.owner, label, 0, joins, 0)
                entering = transactions.join(keys, joining, 0, mate, request.value(joins), leases)
            elif known.would_hold(record):
                entering = transactions.enter_unless_changed(
                    keys, request.id, request.value(), leases, known.revision
                )
            else:
                known.check()
                # Nothing is queued, so a holder that lingers is not told by that.
                for blocker in known.holders():
                    if blocker.lingers:
                        cluster.start(cluster.recall, keys, blocker)
                break
        return Refused("busy", unsure=self.ambiguous)

    def _recorded(self, success: Success) -> Refused:
        return Refused("recorded", unsure=self.ambiguous, result=success.result)

    async def grant(self, turn: Turn, record: Record, queue: Queue) -> Grant | None:
        """Write what the grant of one that is queued needs, if it needs anything; None if it is no grant:
        what it was to join is gone, or its key is not as it was known."""
        request, own = self._request, self._own
        async with own.alone:
            if request.stage is not ASKING and request.stage is not WAITING:
                return None  # it has left while its key was moved, or it holds
            if turn.what == "joins":
                return await self._join(turn, record, queue)
            if request.terms.lock_delay and not record.joined:
                holder, delay = await own.wanted(granted=True)
                if not await own.write(request.value(), request.value(turn.order), holder, delay):
                    return None
                return Grant(turn.order, holder, delay)
            assert own.lease is not None
            # The message by which it joined has written its lock-delay.
            return Grant(turn.order, own.lease, self._delay_in(queue))

    async def _join(self, turn: Turn, record: Record, queue: Queue) -> Grant | None:
        """Get in beside the owner's other request."""
        request, own, mate = self._request, self._own, queue.find(turn.mate)
        if mate is None:
            return None
        holder, delay = await own.wanted(granted=True)
        if not own.written:
            return None  # gone meanwhile
        leases = transactions.Leases(holder.id, 0, delay.id if delay else 0)
        value = request.value(turn.order)
        joining = transactions.join(request.keys, record, own.written, mate, value, leases)
        with own.writing(holder):
            answer = await self._send(joining, holder, delay)
        if request.stage is OVER:
            return None  # its leave has overtaken this answer
        if answer.succeeded:
            own.is_at(holder, answer.revision)
            return Grant(turn.order, holder, delay)
        there = _queue_in(request.keys, answer, 0)
        mine = there.find(request.id)
        if mine is not None:
            own.found(mine.lease, mine.written)
        if mine is None or not mine.joined:
            return None
        return Grant(mine.order, own.lease or holder, self._delay_in(there) or delay)

    # -- what is sent and found ------------------------------------------------------------------

    async def _send(self, message: m.TxnRequest, *leases: SharedLease | None) -> m.TxnResponse:
        """Send what may make the key, with one of these leases. Without an answer it may still be carried
        out, now or later."""
        cluster, before, self.ambiguous = self._request.cluster, self.ambiguous, True
        try:
            answer = await cluster.transact(self._request.keys, message)
        except Unanswered:
            raise
        except BackendError as refused:
            self.ambiguous = before
            if isinstance(refused, LeaseNotFound):
                await cluster.look_for(*leases)
            raise
        self.ambiguous = before
        return answer

    def _delay_in(self, queue: Queue) -> SharedLease | None:
        """Return the lease that its lock-delay was found with."""
        found = queue.delays.get(self._request.id)
        return None if found is None else self._request.cluster.leases.by_id(found.lease)


def _queue_in(keys: Keys, answer: m.TxnResponse, step: int) -> Queue:
    """Return what a step of a transaction has read of a name."""
    return Queue(keys, answer.revision, answer.found(step))
