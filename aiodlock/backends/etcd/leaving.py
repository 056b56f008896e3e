"""How a request's keys are deleted, and what that finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._model import End, Left
from . import recipe
from .link import NoSpace

if TYPE_CHECKING:
    from .place import EtcdPlace


async def leave(place: EtcdPlace, end: End, *, repeated: bool) -> Left:
    """Send one leave. ``repeated``: an earlier one may have been carried out."""
    store, terms, own = place.store, place.terms, place.own
    message = store.message_key(place.id)
    if end.lost and own.delay_lease is not None:
        return await _close(place, message)
    marker = await store.leases.make(store.marker_ttl) if place.ambiguous else None
    opens = end.unused and terms.hold_at_least > 0
    leaving = recipe.leave(
        place.keys,
        place.id,
        message,
        delay=terms.lock_delay > 0,
        opens=opens,
        marker_lease=marker.id if marker is not None else 0,
    )
    try:
        answer = await store.transact(place.keys, leaving)
    except NoSpace:
        # Nothing can be written, so no late duplicate either: delete alone.
        delayed = terms.lock_delay > 0
        leaving = recipe.leave(place.keys, place.id, message, delay=delayed, opens=opens)
        answer = await store.transact(place.keys, leaving)
    if answer.succeeded:
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


async def _close(place: EtcdPlace, message: bytes) -> Left:
    """Delete the key, and have the lock-delay end so much later."""
    store = place.store
    delay = await store.leases.make(place.terms.lock_delay)
    closing = recipe.leave_closed(place.keys, place.id, place.value(place.token), message, delay.id)
    answer = await store.transact(place.keys, closing)
    found = None if answer.succeeded else answer.responses[1].response_range
    if found is not None and found.kvs:
        return Left("gone", "broken")
    return Left("gone", "expired")
