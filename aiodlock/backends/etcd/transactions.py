"""What is sent to read and write the keys of the recipe: each step is one transaction. Pure: no I/O.

They stand side by side, to be read against the model. What each of them may find was written by another
client, or by an earlier copy of itself: a message that had no answer is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import messages as m
from .recipe import RECALL, Keys, Record, mailbox


def _absent(key: bytes, end: bytes = b"") -> m.Compare:
    return m.Compare(m.EQUAL, m.CREATE, key, create_revision=0, range_end=end)


def _present(key: bytes) -> m.Compare:
    return m.Compare(m.GREATER, m.CREATE, key, create_revision=0)


def _made_in(key: bytes, revision: int) -> m.Compare:
    return m.Compare(m.EQUAL, m.CREATE, key, create_revision=revision)


def _written_in(key: bytes, revision: int) -> m.Compare:
    return m.Compare(m.EQUAL, m.MOD, key, mod_revision=revision)


def _put(key: bytes, value: bytes, lease: int) -> m.RequestOp:
    return m.RequestOp(request_put=m.PutRequest(key, value, lease))


def _delete(key: bytes, end: bytes = b"") -> m.RequestOp:
    return m.RequestOp(request_delete_range=m.DeleteRangeRequest(key, end))


def _read(key: bytes, end: bytes = b"") -> m.RequestOp:
    return m.RequestOp(request_range=m.RangeRequest(key, end))


def tell(key: bytes, value: bytes, lease: int, revision: int) -> m.TxnRequest:
    """Write what a client tells of its waits, if there is still what was written in this revision (0:
    nothing); else read it."""
    return m.TxnRequest([_written_in(key, revision)], [_put(key, value, lease)], [_read(key)])


@dataclass(frozen=True, slots=True)
class Leases:
    """Ids of the leases of one request's keys: as a holder, as a waiter, for the lock-delay (0: has
    none)."""

    holder: int
    waiter: int
    delay: int = 0


def _put_held(
    keys: Keys, id: str, value: bytes, leases: Leases, delay_value: bytes | None = None
) -> list[m.RequestOp]:
    """Return what writes the keys of a holder; that of its lock-delay has the same value, unless given."""
    steps = [_put(keys.request(id), value, leases.holder)]
    if leases.delay:
        steps.append(_put(keys.delay(id), delay_value or value, leases.delay))
    return steps


def enter(
    keys: Keys, id: str, value: bytes, leases: Leases, *, read: bool, once: bool = False
) -> m.TxnRequest:
    """Take a free name at once; else queue, and with ``read`` tell all there is.

    With ``once``, queue unless a success is on record, and tell what is.

    Repeating it changes nothing, and neither does it once the request has left a marker.
    """
    key = keys.request(id)
    queue = m.TxnRequest(
        compare=[_absent(key), _absent(keys.marker(id))],
        success=[_put(key, value, leases.waiter)],
    )
    otherwise = [m.RequestOp(request_txn=queue)]
    if once:
        queue.compare.append(_absent(keys.record))
    if read:
        otherwise.append(_read(keys.base, keys.end))
    elif once:
        otherwise.append(_read(keys.record))
    taking = _put_held(keys, id, value, leases)
    return m.TxnRequest([_absent(keys.base, keys.end)], taking, otherwise)


def enter_if_free(keys: Keys, id: str, value: bytes, leases: Leases) -> m.TxnRequest:
    """Take a free name at once; else tell all there is."""
    taking = enter(keys, id, value, leases, read=False)
    taking.failure = [_read(keys.base, keys.end)]
    return taking


def enter_unless_changed(
    keys: Keys, id: str, value: bytes, leases: Leases, revision: int
) -> m.TxnRequest:
    """Take a name that was seen, if nothing was added to it since that revision."""
    unchanged = m.Compare(m.LESS, m.MOD, keys.base, mod_revision=revision + 1, range_end=keys.end)
    compare = [unchanged, _absent(keys.request(id)), _absent(keys.marker(id))]
    taking = _put_held(keys, id, value, leases)
    return m.TxnRequest(compare, taking, [_read(keys.base, keys.end)])


def join(
    keys: Keys, record: Record, written: int, mate: Record, value: bytes, leases: Leases
) -> m.TxnRequest:
    """Get in beside the owner's other request, if that one still holds.

    Who holds goes on holding until its key is gone: so the same key is enough to know it. ``written``:
    the revision in which the own key was written last; 0 for one that is not there yet.
    """
    key = keys.request(record.id)
    mine = _written_in(key, written) if written else _absent(key)
    compare = [mine, _absent(keys.marker(record.id)), _made_in(keys.request(mate.id), mate.created)]
    taking = _put_held(keys, record.id, value, leases)
    return m.TxnRequest(compare, taking, [_read(keys.base, keys.end)])


def move(
    keys: Keys, id: str, written: int, value: bytes, delay_value: bytes, leases: Leases
) -> m.TxnRequest:
    """Move a request's keys to these leases; the lock-delay's is made if it is not there yet.

    ``written``: the revision in which its key was written last. So a late duplicate cannot undo a later
    move. Else tell the key as it is.
    """
    key = keys.request(id)
    moving = _put_held(keys, id, value, leases, delay_value)
    return m.TxnRequest([_written_in(key, written)], moving, [_read(key)])


def delete_at(key: bytes, lease: int) -> m.TxnRequest:
    """Delete a key of a request that is over, if it ends with this lease still: its lock-delay may have
    begun meanwhile."""
    return m.TxnRequest([m.Compare(m.EQUAL, m.LEASE, key, lease=lease)], [_delete(key)])


def size(request: m.TxnRequest) -> int:
    """Return about how many bytes a request has, at the most. (To encode it takes ten times as long.)"""
    total = 64 * (len(request.compare) + len(request.success) + len(request.failure))
    for compare in request.compare:
        total += len(compare.key) + len(compare.range_end)
    for steps in (request.success, request.failure):
        for step in steps:
            if (put := step.request_put) is not None:
                total += len(put.key) + len(put.value)
            elif (inner := step.request_txn) is not None:
                total += size(inner)
            elif (found := step.request_range or step.request_delete_range) is not None:
                total += len(found.key) + len(found.range_end)
    return total


def close_after(
    keys: Keys, id: str, created: int, value: bytes, lease: int, *, instead_of: int = 0
) -> m.TxnRequest:
    """Keep the name closed for as long as this lease lives, also without the holder; else tell its key.

    Repeated with another lease, it changes nothing, unless that is named.
    """
    hold = keys.hold(id)
    kept = _absent(hold)
    if instead_of:
        kept = m.Compare(result=m.EQUAL, target=m.LEASE, key=hold, lease=instead_of)
    compare = [_made_in(keys.request(id), created), kept]
    return m.TxnRequest(compare, [_put(keys.hold(id), value, lease)], [_read(keys.request(id))])


def _marker(keys: Keys, id: str, lease: int) -> list[m.RequestOp]:
    return [_put(keys.marker(id), b"{}", lease)] if lease else []


def leave(
    keys: Keys, id: str, message: bytes, *, delay: bool, opens: bool, marker_lease: int = 0
) -> m.TxnRequest:
    """Release or withdraw; else tell whether it was broken. With ``marker_lease`` refuse late
    duplicates. ``opens``: no body has begun, so nothing keeps the name closed."""
    key = keys.request(id)
    success, failure = [_delete(key)], [_read(message)]
    if delay:
        success.append(_delete(keys.delay(id)))
    besides = [_delete(keys.hold(id))] if opens else []
    besides += _marker(keys, id, marker_lease)
    return m.TxnRequest([_present(key)], success + besides, failure + besides)


def leave_closed(
    keys: Keys, id: str, value: bytes, message: bytes, delay_lease: int, marker_lease: int = 0
) -> m.TxnRequest:
    """End a lease that was lost: its lock-delay begins now, unless it has ended already. With
    ``marker_lease`` refuse late duplicates."""
    key, delay = keys.request(id), keys.delay(id)
    marker = _marker(keys, id, marker_lease)
    success = [_delete(key), _put(delay, value, delay_lease), *marker]
    return m.TxnRequest([_present(delay)], success, [_delete(key), _read(message), *marker])


def record(
    keys: Keys, id: str, message: bytes, value: bytes, lease: int, marker_lease: int = 0
) -> m.TxnRequest:
    """Put a success on record if the request is there still, and end all others; else tell whether it was
    broken, and what is on record."""
    success = [_delete(*keys.all(what)) for what in ("q", "d", "h")]
    marker = _marker(keys, id, marker_lease)
    success += [_put(keys.record, value, lease), *marker]
    failure = [_read(message), _read(keys.record), *marker]
    return m.TxnRequest([_present(keys.request(id))], success, failure)


def forget(keys: Keys) -> m.TxnRequest:
    """Take the success off the record; tell what it was."""
    return m.TxnRequest(success=[_read(keys.record), _delete(keys.record)])


def break_holders(
    keys: Keys,
    prefix: str,
    holders: list[Record],
    closed: list[Record],
    revision: int,
    message_lease: int,
) -> m.TxnRequest:
    """End these holders, and have those that are gone keep the name closed no more, if that is how it was
    read in this revision; tell the holders' clients.

    What others keep the name closed with stays: one of them may hold already that stands behind a request
    of its own client, which has left.
    """
    compare: list[m.Compare] = []
    steps: list[m.RequestOp] = []
    for record in holders:
        compare.append(_made_in(keys.request(record.id), record.created))
        compare += [
            m.Compare(m.LESS, m.MOD, key, mod_revision=revision + 1)
            for key in (keys.delay(record.id), keys.hold(record.id))
        ]
        start, _ = mailbox(prefix, record.client)
        steps.append(_delete(keys.request(record.id)))
        steps.append(_put(start + record.id.encode(), keys.base, message_lease))
    for record in (*holders, *closed):
        steps += [_delete(keys.delay(record.id)), _delete(keys.hold(record.id))]
    return m.TxnRequest(compare, steps, [])


def recall(keys: Keys, prefix: str, holder: Record) -> m.TxnRequest:
    """Tell a holder's client that others want its name. The message ends with the lease of its key."""
    start, _ = mailbox(prefix, holder.client)
    message = _put(start + RECALL.encode(), holder.id.encode(), holder.lease)
    return m.TxnRequest([_made_in(keys.request(holder.id), holder.created)], [message], [])


def look(keys: Keys, id: str, message: bytes) -> m.TxnRequest:
    """Tell whether a request has its key; if not, whether it was broken."""
    return m.TxnRequest([_present(keys.request(id))], [], [_read(message)])
