"""How a request's keys are deleted, and what that finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._model import End, Left
from . import link as api
from . import transactions
from .leases import SharedLease
from .recipe import Queue, value_of_success
from .refusals import NoSpace

if TYPE_CHECKING:
    from .place import EtcdPlace


async def leave(place: EtcdPlace, end: End, *, repeated: bool, passed: bool = False) -> Left:
    """Send one leave.

    ``repeated``: an earlier one may have been carried out. ``passed``: requests of this client alone
    wait for it, and they do not wait for its answer.
    """
    store, terms, own = place.store, place.terms, place.own
    message = store.message_key(place.id)
    if end.record is not None:
        return await _record(place, message, *end.record)
    if end.lost and own.delay_lease is not None:
        return await _close(place, message)
    delayed, opens = terms.lock_delay > 0, end.unused and terms.hold_at_least > 0
    try:
        leaving = transactions.leave(
            place.keys,
            place.id,
            message,
            delay=delayed,
            opens=opens,
            marker_lease=await _marker_lease(place),
        )
        answer = await store.transact(place.keys, leaving, own=True, gather=passed)
    except NoSpace:
        # Nothing can be written, so no late duplicate either: delete alone.
        leaving = transactions.leave(place.keys, place.id, message, delay=delayed, opens=opens)
        answer = await store.transact(place.keys, leaving)
    if opens and place.hold_lease is not None:
        store.start(store.leases.revoke, place.hold_lease)  # nothing ends with it any more
    if answer.succeeded:
        _revoke_all_but(place, 0)  # no attempt to record a success can be carried out any more
        return Left("released" if place.token else "withdrawn")
    found = answer.responses[0].response_range
    if found is not None and found.kvs:
        return Left("gone", "broken")
    if repeated:
        return Left("released" if place.token else "withdrawn")
    if own.delay_lease is not None:
        # It ended before, so the name is closed for a while: from now on, as this client keeps that
        # lease.
        await _close(place, message)
    return Left("gone", "gone" if own.lease is None or own.lease.alive else "expired")


async def _marker_lease(place: EtcdPlace) -> int:
    """Return the lease of the marker that refuses late duplicates; 0 if there are none to come."""
    if not place.ambiguous:
        return 0
    return (await place.store.leases.make(place.store.marker_ttl)).id


async def _record(place: EtcdPlace, message: bytes, result: bytes, keep: float) -> Left:
    """Put a success on record. Each attempt has a lease of its own: the record is kept for so long from
    then on, and an attempt whose answer was lost may have been carried out."""
    store = place.store
    lease = await store.leases.make(keep + api.CALL_WITHIN)
    place.record_leases += (lease,)
    recording = transactions.record(
        place.keys,
        place.id,
        message,
        value_of_success(place.id, result),
        lease.id,
        await _marker_lease(place),
    )
    answer = await store.transact(place.keys, recording)
    if answer.succeeded:
        _revoke_all_but(place, lease.id)
        return Left("recorded")
    broken, there = (step.response_range for step in answer.responses[:2])
    if there is not None and there.kvs:
        success = Queue(place.keys, 0, there.kvs).success
        if success is not None and success.request == place.id:
            _revoke_all_but(place, success.lease)
            return Left("recorded")
    _revoke_all_but(place, 0)
    if broken is not None and broken.kvs:
        return Left("gone", "broken")
    own = place.own
    return Left("gone", "gone" if own.lease is None or own.lease.alive else "expired")


def _revoke_all_but(place: EtcdPlace, id: int) -> None:
    """End the leases of attempts to record a success that found its key gone. It was deleted for good, so
    a late duplicate of them records nothing."""
    unused = [lease for lease in place.record_leases if lease.id != id]
    place.record_leases = ()
    if unused:
        place.store.start(_revoke, place, unused)


async def _revoke(place: EtcdPlace, leases: list[SharedLease]) -> None:
    for lease in leases:
        await place.store.leases.revoke(lease)


async def _close(place: EtcdPlace, message: bytes) -> Left:
    """Delete the key, and have the lock-delay end so much later."""
    store = place.store
    marker_lease = await _marker_lease(place)
    delay = await store.leases.make(place.terms.lock_delay)
    closing = transactions.leave_closed(
        place.keys, place.id, place.value(place.token), message, delay.id, marker_lease
    )
    answer = await store.transact(place.keys, closing)
    found = None if answer.succeeded else answer.responses[1].response_range
    if found is not None and found.kvs:
        return Left("gone", "broken")
    return Left("gone", "expired")
