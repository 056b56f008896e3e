"""How a request's keys are deleted, and what keeps its name closed after that.

Each leave may be sent again: an earlier one may have been carried out, and its answer lost.
"""

from __future__ import annotations

import logging

from ..._clock import now
from ..._errors import BackendError
from ..._model import RAN_OUT, End, Left
from ..stage import HELD
from . import calls as api
from . import messages as m
from . import transactions
from .entering import Entering
from .leases import SharedLease
from .own_keys import OwnKeys
from .recipe import Queue, value_of_success
from .refusals import NoSpace
from .request import Request

_logger = logging.getLogger("aiodlock")

#: The lease that keeps a name closed is so much longer than asked for: two writes take time (seconds).
_SPARE = 0.05


class Ending:
    """The end of one request.

    Mutable state: ``_leaves`` (how many leaves were sent), ``_closes`` (its ``hold_at_least`` was written),
    ``_hold_lease`` (with which that ends), ``_record_leases`` (one of which its success may end with),
    ``_was_overdue`` (its lease was lost, and its key was deleted when due).
    """

    def __init__(self, request: Request, own: OwnKeys, entering: Entering) -> None:
        self._request = request
        self._own = own
        self._entering = entering
        self._leaves = 0
        self._closes = False
        self._hold_lease: SharedLease | None = None
        self._record_leases: tuple[SharedLease, ...] = ()
        self._was_overdue = False

    async def close_after(self) -> bool:
        """Keep the name closed for ``hold_at_least`` from now on; False if the key is gone."""
        request, cluster = self._request, self._request.cluster
        least = request.terms.hold_at_least
        while least and not self._closes:
            # Never renewed: it has to last for that long from now on, when the body is told.
            before = self._hold_lease
            spare = _SPARE if before is None else 2 * (now() - before.renewed_at)
            lease = await cluster.leases.make(least + spare)
            instead_of = 0 if before is None else before.id
            value = request.value(request.token)
            closing = transactions.close_after(
                request.keys, request.id, self._own.created, value, lease.id, instead_of=instead_of
            )
            answer = await cluster.transact(request.keys, closing)
            if answer.succeeded:
                self._hold_lease = lease
                if before is not None:
                    self._revoke(before)
            else:
                self._revoke(lease)
                if not answer.found():
                    return False
            self._closes = not answer.succeeded or now() + least <= lease.renewed_at + lease.seconds
        return True

    async def end_overdue(self) -> None:
        """Its lease is over here, and the key would live on with the client."""
        await self._request.repeat(HELD, self._end_overdue)

    async def _end_overdue(self) -> bool:
        try:
            await self.leave(RAN_OUT)
        except BackendError as failed:
            _logger.debug("ending an overdue lease failed: %s", failed)
            return True
        self._was_overdue = True
        self._own.vanished()
        return False

    async def leave(self, end: End, *, passed: bool = False) -> Left:
        """Send one leave. An earlier one may have been carried out.

        ``passed``: requests of this client alone wait for it, and they do not wait for its answer.
        """
        if end.lost and self._was_overdue:
            return Left("gone", "expired")  # to send it again would begin its lock-delay anew
        repeated, self._leaves = self._leaves > 0, self._leaves + 1
        if end.record is not None:
            return await self._record(*end.record)
        if end.lost and self._own.delay_lease is not None:
            return await self._close()
        opens = end.unused and self._request.terms.hold_at_least > 0
        answer = await self._delete(opens=opens, passed=passed)
        if opens and self._hold_lease is not None:
            self._revoke(self._hold_lease)  # nothing ends with it any more
        if answer.succeeded:
            self._keep_record_lease(0)  # no attempt to record a success can be carried out any more
        elif answer.found():
            return Left("gone", "broken")
        if answer.succeeded or repeated:
            return Left("released" if self._request.token else "withdrawn")
        if self._own.delay_lease is not None:
            # It ended before, so the name is closed for a while: from now on, as this client keeps that
            # lease.
            await self._close()
        return self._gone

    async def _delete(self, *, opens: bool, passed: bool) -> m.TxnResponse:
        request, cluster = self._request, self._request.cluster
        keys, id, delay = request.keys, request.id, request.terms.lock_delay > 0
        try:
            marker = await self._marker_lease()
            leaving = transactions.leave(
                keys, id, self._message, delay=delay, opens=opens, marker_lease=marker
            )
            return await cluster.transact(keys, leaving, own=id, gather=passed)
        except NoSpace:
            # Nothing can be written, so no late duplicate either: delete alone.
            leaving = transactions.leave(keys, id, self._message, delay=delay, opens=opens)
            return await cluster.transact(keys, leaving)

    @property
    def _message(self) -> bytes:
        """The key that tells that the request was broken."""
        return self._request.cluster.message_key(self._request.id)

    def _revoke(self, lease: SharedLease) -> None:
        cluster = self._request.cluster
        cluster.start(cluster.leases.revoke, lease)

    @property
    def _gone(self) -> Left:
        return Left(
            "gone", "gone" if self._own.lease is None or self._own.lease.alive else "expired"
        )

    async def _marker_lease(self) -> int:
        """Return the lease of the marker that refuses late duplicates; 0 if there are none to come."""
        cluster = self._request.cluster
        return (await cluster.leases.make(cluster.marker_ttl)).id if self._entering.ambiguous else 0

    async def _record(self, result: bytes, keep: float) -> Left:
        """Put a success on record. Each attempt has a lease of its own: the record is kept for so long
        from then on, and an attempt whose answer was lost may have been carried out."""
        request, cluster = self._request, self._request.cluster
        lease = await cluster.leases.make(keep + api.CALL_WITHIN)
        self._record_leases += (lease,)
        value, marker = value_of_success(request.id, result), await self._marker_lease()
        recording = transactions.record(
            request.keys, request.id, self._message, value, lease.id, marker
        )
        answer = await cluster.transact(request.keys, recording)
        if answer.succeeded:
            self._keep_record_lease(lease.id)
            return Left("recorded")
        success = Queue(request.keys, 0, answer.found(1)).success
        if success is not None and success.request == request.id:
            self._keep_record_lease(success.lease)
            return Left("recorded")
        self._keep_record_lease(0)
        return Left("gone", "broken") if answer.found() else self._gone

    def _keep_record_lease(self, id: int) -> None:
        """End the other leases of attempts to record a success: they found its key gone. It was deleted for
        good, so a late duplicate of them records nothing."""
        leases, self._record_leases = self._record_leases, ()
        for lease in leases:
            if lease.id != id:
                self._revoke(lease)

    async def _close(self) -> Left:
        """Delete the key, and have the lock-delay end so much later."""
        request, cluster = self._request, self._request.cluster
        marker = await self._marker_lease()
        delay = await cluster.leases.make(request.terms.lock_delay)
        value = request.value(request.token)
        closing = transactions.leave_closed(
            request.keys, request.id, value, self._message, delay.id, marker
        )
        answer = await cluster.transact(request.keys, closing)
        broken = not answer.succeeded and answer.found(1)
        return Left("gone", "broken" if broken else "expired")
