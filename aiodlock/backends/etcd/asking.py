"""How a request gets in: its first messages, until it holds, waits or is refused.

Each may be sent again: the key is made once. What one of them means for the request is told to its place
(``hold``, ``state``); the answer goes to the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import LOST, Gone, Granted, Refused, Waiting
from ..base import Unanswered
from . import messages as m
from . import transactions
from .leases import SharedLease
from .recipe import Queue, Record, Success, Turn
from .refusals import LeaseNotFound

if TYPE_CHECKING:
    from .place import EtcdPlace

#: So often a single try is repeated when others change the name meanwhile.
_TRIES = 5
#: The lease that keeps a name closed is so much longer than asked for: two writes take time (seconds).
_SPARE = 0.05


async def queue(place: EtcdPlace) -> Granted | Waiting | Refused | Gone:
    """Take a free name, or a place in its queue."""
    store, keys, own = place.store, place.keys, place.own
    holder, waiter, delay = await own.leases()
    leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
    room = store.rooms.of(keys)
    place.room = room
    room.add(place)
    sent = now()
    with room.opening() as opens:
        once = place.terms.kind == "once"
        request = transactions.enter(keys, place.id, place.value(), leases, read=opens, once=once)
        answer = await _send(place, request, holder, waiter, delay)
        assert answer.header is not None
        if opens and not answer.succeeded:
            read = answer.responses[1].response_range
            assert read is not None
            room.begin(Queue(keys, answer.header.revision, read.kvs))
    if answer.succeeded:
        place.created = own.written = answer.header.revision
        return place.hold(place.created, holder, delay, sent)
    if once:
        read = answer.responses[1].response_range
        assert read is not None
        there = Queue(keys, 0, read.kvs)
        if there.success is not None:
            return _recorded(place, there.success)
        there.check()  # behind a record that cannot be read nobody is queued
    nested = answer.responses[0].response_txn
    assert nested is not None
    await room.open()
    if nested.succeeded:
        known = await room.reached(answer.header.revision)
    else:
        # An earlier attempt has made the key, or it has left.
        found = (await store.read(keys)).find(place.id)
        if found is None:
            return Gone("gone")
        known = await room.reached(found.created)
    found = known.find(place.id)
    if known.success is not None:
        return _recorded(place, known.success)
    if found is None:
        return Gone("expired" if not waiter.alive else "gone")
    lease = _lease_at(place, found)
    place.created, own.written = found.created, found.written
    own.use(lease)
    turn = known.turn_of(found)
    if turn.what == "waits":
        known.check()
    return await _take(place, turn, found, known)


async def try_once(place: EtcdPlace) -> Granted | Refused | Gone:
    """Be granted at once, or leave nothing behind."""
    store, keys, own = place.store, place.keys, place.own
    await store.until_left(keys)
    holder, waiter, delay = await own.leases()
    leases = transactions.Leases(holder.id, waiter.id, delay.id if delay else 0)
    sent = now()
    request = transactions.enter_if_free(keys, place.id, place.value(), leases)
    joins = 0
    for _ in range(_TRIES):
        answer = await _send(place, request, holder, delay)
        assert answer.header is not None
        if answer.succeeded:
            place.created = own.written = answer.header.revision
            return place.hold(joins or place.created, holder, delay, sent)
        read = answer.responses[0].response_range
        assert read is not None
        known = Queue(keys, answer.header.revision, read.kvs)
        mine = known.find(place.id)
        if mine is not None:  # an earlier attempt was carried out
            lease, delay = _lease_at(place, mine), _delay_at(place, known) or delay
            place.created, own.written = mine.created, mine.written
            return place.hold(mine.order, lease, delay, sent)
        if known.success is not None:
            return _recorded(place, known.success)
        joins, record = 0, _record(place)
        turn = known.turn_of(record)
        if turn.what == "deadlock" or turn.what == "limit":
            return Refused(turn.what, turn.used, unsure=place.ambiguous)
        if turn.what == "joins":
            mate = known.find(turn.mate)
            assert mate is not None
            joining = Record(place.id, record.mode, place.owner, record.client, 0, turn.order, 0)
            request = transactions.join(keys, joining, 0, mate, place.value(turn.order), leases)
            joins = turn.order
        elif known.would_hold(record):
            request = transactions.enter_unless_changed(
                keys, place.id, place.value(), leases, known.revision
            )
        else:
            known.check()
            # Nothing is queued, so a holder that lingers is not told by that.
            for blocker in known.holders():
                if blocker.lingers:
                    store.start(store.recall, keys, blocker)
            break
    return Refused("busy", unsure=place.ambiguous)


async def confirm(place: EtcdPlace, turn: Turn, record: Record, queue: Queue) -> int | None:
    """Write what a grant needs, if it needs anything; return the token, or None if it is no grant."""
    async with place.own.alone():
        if place.state not in ("asking", "waiting"):
            return None  # it has left while its key was moved, or it holds
        if turn.what == "joins":
            return await _join(place, turn, record, queue)
        return await _delay(place, turn.order, record, queue)


async def close_after(place: EtcdPlace) -> bool:
    """Keep the name closed for ``hold_at_least`` from now on; False if the key is gone."""
    store, keys, least = place.store, place.keys, place.terms.hold_at_least
    if place.closes or not least:
        return True
    while True:
        # Never renewed: it has to last for that long from now on, when the body is told.
        before, spare = place.hold_lease, _SPARE
        if before is not None:
            spare = 2 * (now() - before.renewed_at)
        lease = await store.leases.make(least + spare)
        closing = transactions.close_after(
            keys,
            place.id,
            place.created,
            place.value(place.token),
            lease.id,
            instead_of=0 if before is None else before.id,
        )
        answer = await store.transact(keys, closing)
        if not answer.succeeded:
            store.start(store.leases.revoke, lease)
            found = answer.responses[0].response_range
            if found is None or not found.kvs:
                return False
        else:
            place.hold_lease = lease
            if before is not None:
                store.start(store.leases.revoke, before)
        if not answer.succeeded or now() + least <= lease.renewed_at + lease.seconds:
            place.closes = True
            return True


def _recorded(place: EtcdPlace, success: Success) -> Refused:
    return Refused("recorded", unsure=place.ambiguous, result=success.result)


def _record(place: EtcdPlace) -> Record:
    """Return this request as one that comes now."""
    terms, store = place.terms, place.store
    order = store.far_future
    return Record(place.id, terms.mode, place.owner, store.label, terms.limit, order, order)


async def _send(
    place: EtcdPlace, request: m.TxnRequest, *leases: SharedLease | None
) -> m.TxnResponse:
    """Send what may make the key, with one of these leases. Without an answer it may still be carried out,
    now or later."""
    before, place.ambiguous = place.ambiguous, True
    try:
        answer = await place.store.transact(place.keys, request)
    except LeaseNotFound:
        place.ambiguous = before
        await place.store.look_for(*leases)
        raise
    except Unanswered:
        raise
    except BackendError:
        place.ambiguous = before
        raise
    place.ambiguous = before
    return answer


def _lease_at(place: EtcdPlace, found: Record) -> SharedLease:
    """Return the lease that the key was found with, which may be that of an earlier attempt."""
    lease = place.store.leases.by_id(found.lease)
    if lease is None:
        raise BackendUnavailable("a key ends with a lease that is renewed no more: ask again then")
    return lease


def _delay_at(place: EtcdPlace, queue: Queue) -> SharedLease | None:
    found = queue.delays.get(place.id)
    return None if found is None else place.store.leases.by_id(found.lease)


async def _take(
    place: EtcdPlace, turn: Turn, record: Record, queue: Queue
) -> Granted | Waiting | Refused | Gone:
    """Do what the state of the queue means for a request that was just queued."""
    match turn.what:
        case "waits":
            place.state = "waiting"
            return Waiting(place.deadline, None)
        case "holds" | "joins":
            held = await confirm(place, turn, record, queue)
            if held is None:
                # What it was to join is gone, or its key is not as it was known. What the room heard
                # meanwhile it has told to nobody.
                place.state = "waiting"
                place.look_again()
                return Waiting(place.deadline, None)
            return Granted(held, place.deadline)
        case "gone":
            return Gone("gone")
        case "deadlock" | "limit":
            pass
    try:
        await place.leave(LOST)
    except BackendError:
        return Refused(turn.what, turn.used, unsure=True)
    return Refused(turn.what, turn.used, unsure=place.ambiguous)


async def _join(place: EtcdPlace, turn: Turn, record: Record, queue: Queue) -> int | None:
    """Get in beside the owner's other request."""
    own, order = place.own, turn.order
    mate = queue.find(turn.mate)
    if mate is None:
        return None
    holder, delay = await own.wanted(granted=True)
    if not own.written:
        return None  # gone meanwhile
    leases = transactions.Leases(holder.id, 0, delay.id if delay else 0)
    joining = transactions.join(place.keys, record, own.written, mate, place.value(order), leases)
    with own.writing(holder):
        answer = await _send(place, joining, holder, delay)
    if place.state == "left":
        return None  # its leave has overtaken this answer
    assert answer.header is not None
    if answer.succeeded:
        own.is_at(holder, answer.header.revision)
    else:
        assert answer.responses[0].response_range is not None
        now_there = Queue(place.keys, 0, answer.responses[0].response_range.kvs)
        mine = now_there.find(place.id)
        if mine is not None:
            own.found(mine.lease, mine.written)
            delay = _delay_at(place, now_there) or delay
        if mine is None or not mine.joined:
            return None
        order = mine.order
    place.hold(order, own.lease or holder, delay, now())
    return order


async def _delay(place: EtcdPlace, order: int, record: Record, queue: Queue) -> int | None:
    """Write the lock-delay that the grant needs, if any."""
    own = place.own
    if place.terms.lock_delay and not record.joined:
        holder, delay = await own.wanted(granted=True)
        if not await own.write(place.value(), place.value(order), holder, delay):
            return None
        place.hold(order, holder, delay, now())
        return order
    assert own.lease is not None
    # The message by which it joined has written its lock-delay.
    place.hold(order, own.lease, _delay_at(place, queue), now())
    return order
