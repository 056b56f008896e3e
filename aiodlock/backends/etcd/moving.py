"""Which requests go to another lease when theirs counts no more (``leases.py`` says why one does not)."""

from __future__ import annotations

import asyncio
import logging

from ..._errors import BackendError
from .leases import SharedLease
from .place import EtcdPlace
from .request import Requests

_logger = logging.getLogger("aiodlock")

#: So many requests are moved to another lease at a time. It is looked so often whether there are such, and
#: again so long after a move that failed (seconds).
_TOGETHER, _LOOK_AGAIN, _PAUSE = 60, 0.5, 0.1


class Moving:
    """Moves the keys of requests whose lease is outdated.

    Mutable state: ``_outdated`` (set when a lease has become outdated).
    """

    def __init__(self, places: Requests[EtcdPlace]) -> None:
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
                # The first one has the new lease made. The transactions of the others go out as one.
                await self._move(some[0])
                await asyncio.gather(*(self._move(place) for place in some[1:]))
                if any(place.own.outdated for place in some):
                    await asyncio.sleep(_PAUSE)

    async def _move(self, place: EtcdPlace) -> None:
        try:
            await place.own.move(gather=True)
        except BackendError as failed:
            _logger.debug("moving a request to another lease failed: %s", failed)
