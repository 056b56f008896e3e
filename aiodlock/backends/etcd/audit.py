"""Whether the keys at the cluster are those that this client believes in.

A watch tells what waiters need. The audit finds holders whose key was deleted by others, and keys of
requests that this client does not have: both for as long as their lease lives, which is as long as the
client does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..._clock import now
from ..._errors import BackendError, LossReason
from . import link as api
from . import messages as m
from . import recipe, transactions
from .leases import SharedLease
from .link import Link

if TYPE_CHECKING:
    from .place import EtcdPlace
    from .store import EtcdBackend

_logger = logging.getLogger("aiodlock")

#: The keys of each lease are compared with what this client believes so often, in lengths of the lease, and
#: no more often than this (seconds).
_SHARE, _LEAST = 1 / 3, 1.0
#: Of so many requests with one lease on, that is left out: the answer names each key.
_MOST = 2000


class Audit:
    """Compares the keys of each lease.

    Mutable state: ``_compared`` (when the keys of a lease were compared last, by its id).
    """

    def __init__(self, store: EtcdBackend, link: Link) -> None:
        self._store = store
        self._link = link
        self._compared: dict[int, float] = {}

    def hurry(self) -> None:
        """Compare the keys of all leases soon: a watch has missed something."""
        self._compared.clear()

    async def run(self) -> None:
        """Compare until cancelled."""
        leases = self._store.leases
        while True:
            await asyncio.sleep(_LEAST / 2)
            for lease in leases.all():
                pause = max(_LEAST, lease.pace * 3 * _SHARE)
                if now() - self._compared.get(lease.id, lease.unused_since) < pause:
                    continue
                self._compared[lease.id] = now()
                if lease.users <= _MOST:
                    try:
                        await self._compare(lease)
                    except BackendError as failed:
                        _logger.debug("comparing the keys of a lease failed: %s", failed)
            alive = {lease.id for lease in leases.all()}
            self._compared = {id: at for id, at in self._compared.items() if id in alive}

    async def _compare(self, lease: SharedLease) -> None:
        store = self._store
        before = {
            place.key: place
            for place in store.places_with(lease)
            if place.state in ("waiting", "held") and place.settled
        }
        request = m.LeaseTimeToLiveRequest(lease.id, keys=True)
        answer = await self._link.call(api.LEASE_TIME_TO_LIVE, request)
        if answer.ttl < 0:
            store.leases.ended(lease)
            return
        there = set(answer.keys)
        for key, place in before.items():
            known = place.state in ("waiting", "held") and place.lease is lease
            if key not in there and known and place.settled:
                reason = await why_gone(place)
                if reason is not None:
                    place.on_gone(reason)
        for key in there:
            id = recipe.text_of(key.rpartition(b"/")[2])
            if not store.knows(id) and id.startswith(store.label):
                _logger.info("etcd: deleting a key of a request that is over: %r", key)
                await self._link.call(api.TXN, transactions.delete_at(key, lease.id))


async def why_gone(place: EtcdPlace) -> LossReason | None:
    """Return why a request has no key any more; None if it has."""
    store, keys = place.store, place.keys
    look = transactions.look(keys, place.id, store.message_key(place.id))
    answer = await store.transact(keys, look)
    if answer.succeeded:
        return None
    found = answer.responses[0].response_range
    if found is not None and found.kvs:
        return "broken"
    if place.lease is not None and not place.lease.alive:
        return "expired"
    others = list((await store.read(keys)).holders())
    return "taken_over" if others else "gone"
