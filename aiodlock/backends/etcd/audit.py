"""Whether the keys at the cluster are those that this client believes in.

A watch tells what waiters need. The audit finds holders whose key was deleted by others, and keys of
requests that this client does not have: both for as long as their lease lives, which is as long as the
client does.
"""

from __future__ import annotations

import asyncio
import logging

from ..._clock import now
from ..._errors import BackendError
from . import calls as api
from . import messages as m
from . import recipe, transactions
from .cluster import Cluster
from .leases import SharedLease
from .place import EtcdPlace
from .request import Requests

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

    def __init__(self, cluster: Cluster, places: Requests[EtcdPlace]) -> None:
        self._cluster = cluster
        self._places = places
        self._compared: dict[int, float] = {}

    def hurry(self) -> None:
        """Compare the keys of all leases soon: a watch has missed something."""
        self._compared.clear()

    async def run(self) -> None:
        """Compare until cancelled."""
        leases = self._cluster.leases
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
        cluster = self._cluster
        before = {
            place.key: place
            for place in self._places
            if place.own.lease is lease and place.lives and place.own.settled
        }
        request = m.LeaseTimeToLiveRequest(lease.id, keys=True)
        answer = await cluster.link.call(api.LEASE_TIME_TO_LIVE, request)
        if answer.ttl < 0:
            cluster.leases.ended(lease)
            return
        there = set(answer.keys)
        for key, place in before.items():
            known = place.lives and place.own.lease is lease
            if key not in there and known and place.own.settled:
                reason = await place.own.why_gone()
                if reason is not None:
                    place.on_gone(reason)
        for key in there:
            id = recipe.text_of(key.rpartition(b"/")[2])
            if self._places.find(id) is None and id.startswith(cluster.label):
                _logger.info("etcd: deleting a key of a request that is over: %r", key)
                await cluster.link.call(api.TXN, transactions.delete_at(key, lease.id))
