"""What operators ask: who holds and waits, which names there are; and break a lock by force, or forget a
success."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import AsyncIterator, Sequence

from ..._errors import BackendError
from ..._model import HolderInfo, Kind, LockInfo, Mode, RecordedInfo, Tokens, WaiterInfo
from ..asked import by_owner, shown
from . import calls as api
from . import messages as m
from . import recipe, transactions
from .cluster import Cluster

_logger = logging.getLogger("aiodlock")

#: For so long a broken lease is known (seconds).
_REMEMBERED = 60.0
_PAGE = 1000
#: A transaction takes 128 steps: four for each holder, and two for each that keeps the name closed.
_BROKEN_TOGETHER = 20


class Inspection:
    """The calls of ``StoreBase`` that are for people."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool
    ) -> list[LockInfo]:
        """Return who holds and who waits."""
        return [await self._inspect(kind, name) for name in names]

    async def _inspect(self, kind: Kind, name: str) -> LockInfo:
        keys = self._cluster.keys(kind, name)
        await self._cluster.leaves.until_arrived(keys.base)
        queue = await self._cluster.read(keys)
        closed = 0.0
        gone = queue.closed()
        for lease in queue.closing():
            request = m.LeaseTimeToLiveRequest(lease)
            answer = await self._cluster.link.call(api.LEASE_TIME_TO_LIVE, request)
            # Whole seconds, rounded down: what is closed has some time left.
            closed = max(closed, float(answer.ttl), 1.0)
        recorded = None
        if queue.success is not None:
            request = m.LeaseTimeToLiveRequest(queue.success.lease)
            answer = await self._cluster.link.call(api.LEASE_TIME_TO_LIVE, request)
            if answer.ttl >= 0:
                recorded = RecordedInfo(float(answer.granted_ttl - answer.ttl), float(answer.ttl))
        holders = list(queue.holders())
        token = max((record.order for record in (*holders, *gone)), default=0)
        return LockInfo(
            name,
            by_owner(
                HolderInfo(
                    owner=holder.owner,
                    mode=holder.mode,
                    token=holder.order,
                    count=1,
                    remaining=None,
                    client=holder.client,
                    note=holder.note,
                    description=holder.description,
                )
                for holder in holders
            ),
            tuple(
                WaiterInfo(
                    shown(waiter.owner),
                    waiter.mode,
                    position,
                    None,
                    waiter.client,
                    waiter.note,
                    waiter.description,
                )
                for position, waiter in enumerate(queue.waiters())
            ),
            token,
            closed,
            len(gone),
            kind=kind,
            recorded=recorded,
        )

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether this grant holds still.

        Who knows a token has it of a grant, which lasts until its key is gone. It may stand behind one of
        the same client still, which has left, and whose key is about to be deleted.
        """
        queue = await self._cluster.read(self._cluster.keys(kind, name))
        there = (*queue.requests.values(), *queue.joined.values())
        return any(record.order == token and record.mode == mode for record in there)

    async def names(self, match: str, kind: Kind) -> AsyncIterator[str]:
        """Iterate over every name of the kind that is held or waited for and matches the glob."""
        key, end = recipe.all_names(self._cluster.prefix, kind)
        last: str | None = None
        while True:
            request = m.RangeRequest(key, end, limit=_PAGE, keys_only=True)
            answer = await self._cluster.link.call(api.RANGE, request)
            for kv in answer.kvs:
                name = recipe.name_of(self._cluster.prefix, kind, kv.key)
                if name is not None and name != last:
                    last = name
                    if fnmatch.fnmatchcase(name, match):
                        yield name
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"

    async def forget(self, name: str) -> bool:
        """Take the record of a success back; return whether there was one."""
        keys = self._cluster.keys("once", name)
        answer = await self._cluster.transact(keys, transactions.forget(keys))
        if not (found := answer.found()):
            return False
        lease = found[0].lease  # of this record alone
        self._cluster.start(self._revoke, lease)
        return True

    async def _revoke(self, lease: int) -> None:
        try:
            await self._cluster.link.call(api.LEASE_REVOKE, m.LeaseRevokeRequest(lease))
        except BackendError as failed:
            _logger.debug("a lease was not revoked, it ends by itself: %s", failed)

    async def break_lock(self, name: str, kind: Kind, tokens: Tokens | None) -> int:
        """Release all holders of a name by force, or those with these tokens; return their number."""
        keys = self._cluster.keys(kind, name)
        told = await self._cluster.leases.make(_REMEMBERED)
        broken, meant = 0, set[str]()
        while True:
            queue = await self._cluster.read(keys)
            holders, closed = list(queue.holders()), queue.closed()
            if tokens is not None:
                holders, closed = [one for one in holders if one.order in tokens], []
            if meant:  # others were let in by the first transaction
                holders = [holder for holder in holders if holder.id in meant]
                closed = [one for one in closed if one.id in meant]
            if not holders and not closed:
                return broken
            some, gone = holders[:_BROKEN_TOGETHER], closed[:_BROKEN_TOGETHER]
            request = transactions.break_holders(
                keys, self._cluster.prefix, some, gone, queue.revision, told.id
            )
            if (await self._cluster.transact(keys, request)).succeeded:
                for record in gone:
                    if (hold := queue.holds.get(record.id)) is not None:
                        self._cluster.start(self._revoke, hold.lease)  # of this hold alone
                broken += len(some)
                meant = meant or {record.id for record in (*holders, *closed)}
                if (some, gone) == (holders, closed):
                    return broken
