"""Which requests go to another lease when theirs counts no more (``leases.py`` says why one does not)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from ..._errors import BackendError, BackendUnavailable
from . import calls as api
from . import transactions
from .cluster import Cluster
from .leases import SharedLease
from .place import EtcdPlace
from .refusals import LeaseNotFound
from .request import Requests

_logger = logging.getLogger("aiodlock")

#: So many requests are moved to another lease in one transaction. It is looked so often whether there are
#: such, and again so long after a move that failed (seconds).
_TOGETHER, _LOOK_AGAIN, _PAUSE = 60, 0.5, 0.1


class Moving:
    """Moves the keys of requests whose lease is outdated, many in one transaction.

    Mutable state: ``_outdated`` (set when a lease has become outdated).
    """

    def __init__(self, cluster: Cluster, places: Requests[EtcdPlace]) -> None:
        self._cluster = cluster
        self._places = places
        self._outdated = asyncio.Event()

    def on_outdated(self, lease: SharedLease) -> None:
        """The lease counts no more."""
        level = logging.INFO if lease.users else logging.DEBUG
        _logger.log(
            level,
            "etcd: the leader has changed, or a renewal was answered too late: a lease of %d s counts no "
            "more. Moving %d requests to another one",
            lease.seconds,
            lease.users,
        )
        self._outdated.set()

    async def run(self) -> None:
        """Move the keys until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_AGAIN):  # a request may come to such a lease later
                    await self._outdated.wait()
            except TimeoutError:
                pass
            self._outdated.clear()
            while places := [place for place in self._places if place.own.outdated]:
                some = places[:_TOGETHER]
                if not await self._move(some):
                    # Together they are more than the cluster takes in a transaction, or one of them is.
                    for place in some:
                        await self._move([place])
                if any(place.own.outdated for place in some):
                    await asyncio.sleep(_PAUSE)

    async def _move(self, places: list[EtcdPlace]) -> bool:
        """Try once; return whether it makes sense to try the same again."""
        try:
            await self._move_together(places)
        except BackendError as failed:
            _logger.debug("moving requests to another lease failed: %s", failed)
            return isinstance(failed, BackendUnavailable | LeaseNotFound)
        return True

    async def _move_together(self, places: list[EtcdPlace]) -> None:
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(place.own.moving()) for place in places]
            moves = [move for move in found if move is not None]
            if not moves:
                return
            request = transactions.together([move.request for move in moves])
            try:
                answer = await self._cluster.link.call(api.TXN, request)
            except LeaseNotFound:
                await self._cluster.look_for(*(lease for move in moves for lease in move.leases))
                raise
            for move, step in zip(moves, answer.responses, strict=True):
                assert step.response_txn is not None
                step.response_txn.header = answer.header
                move.answered(step.response_txn)
