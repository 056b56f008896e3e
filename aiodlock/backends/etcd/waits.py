"""What clients tell of their waits: a key for each client, which ends with a lease of that client."""

from __future__ import annotations

from collections.abc import Sequence

from . import calls as api
from . import messages as m
from . import recipe, transactions
from .cluster import Cluster
from .leases import SharedLease

#: A key's value: the serial, then the record.
_DIGITS = 20
#: So often a key is found to be older than was known, and written again.
_TRIES = 3


class Waits:
    """Tells and reads records.

    Mutable state: ``_lease`` (of the key), ``_told`` (the serial of the last acknowledged record),
    ``_revision`` (in which it was written).
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._key = recipe.waits_key(cluster.prefix, cluster.label)
        self._lease: SharedLease | None = None
        self._told = self._revision = 0

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        """Write this client's record, unless the cluster has it."""
        leases = self._cluster.leases
        lease = await leases.get(keep)
        if serial == self._told and lease is self._lease:
            return  # the lease is extended anyway
        if lease is not self._lease:
            self._told = 0
            self._lease = leases.use(lease, self._lease)
        value = f"{serial:0{_DIGITS}}".encode() + record
        for _ in range(_TRIES):
            request = transactions.tell(self._key, value, lease.id, self._revision)
            # Not twice: an old message that arrives late finds another revision.
            answer = await self._cluster.link.call(api.TXN, request)
            if answer.succeeded:
                self._revision, self._told = answer.revision, serial
                break
            there = next(iter(answer.found()), None)
            self._revision = there.mod_revision if there is not None else 0
            if there is not None and _serial_of(there.value) > serial:
                break
        if not record:
            self._lease = leases.use(None, self._lease)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        """Return the records of these clients."""
        found: dict[str, bytes] = {}
        for label in labels:
            request = m.RangeRequest(recipe.waits_key(self._cluster.prefix, label))
            answer = await self._cluster.link.call(api.RANGE, request)
            if answer.kvs and len(answer.kvs[0].value) > _DIGITS:
                found[label] = answer.kvs[0].value[_DIGITS:]
        return found


def _serial_of(value: bytes) -> int:
    digits = value[:_DIGITS]
    return int(digits) if digits.isdigit() else 0
