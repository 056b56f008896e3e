"""What a client has of a cluster: a connection, leases, what it watches; how it reads and writes names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ..._errors import BackendError
from ..._tasks import start_soon
from .._label import make_label
from .._leaves import Leaves
from . import calls as api
from . import messages as m
from . import recipe, transactions
from .batches import Batches
from .leases import Leases, SharedLease
from .link import Link
from .recipe import Keys, Queue, Record
from .room import Rooms
from .watching import Watches

_logger = logging.getLogger("aiodlock")

#: For so long a late duplicate of an acquire is refused, at the least (seconds).
_REMEMBERED = 60.0


class Cluster:
    """It knows of no request. Mutable state: ``tasks`` while it is used, ``is_up`` (messages can be sent),
    ``leaves`` (those on their way, by the keys' base)."""

    def __init__(
        self,
        link: Link,
        probe: m.RangeRequest,
        prefix: str,
        *,
        description: str,
        remembered: float,
        on_ended: Callable[[SharedLease], None],
        on_silent: Callable[[SharedLease, Exception], None],
        on_outdated: Callable[[SharedLease], None],
    ) -> None:
        """
        :param remembered: for so long a late duplicate of an acquire is refused (seconds); a minute at
            least.
        :param on_ended, on_silent, on_outdated: what ``Leases`` tells.
        """
        self.label: str = make_label()
        self.description: str = description
        self.marker_ttl: float = max(remembered, _REMEMBERED)
        self.prefix: str = prefix
        self.link: Link = link
        self.leases: Leases = Leases(link, probe, on_ended, on_silent, on_outdated, self.start)
        self.watches: Watches = Watches(link)
        self.rooms: Rooms = Rooms(self.label, self.watches, self.read, self.start)
        self.leaves: Leaves = Leaves()
        self.tasks: asyncio.TaskGroup | None = None
        self.is_up: bool = False
        self._batches = Batches(link, self.start)

    def start(self, call: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> bool:
        """Run something in the background; False when that is over."""
        return start_soon(self.tasks, call(*args))

    def later(self, pause: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Call something after a while."""
        return asyncio.get_running_loop().call_later(pause, call)

    # -- calls -----------------------------------------------------------------------------------

    def keys(self, kind: str, name: str) -> Keys:
        """Return the keys of a name."""
        return Keys.of(self.prefix, kind, name)

    def message_key(self, request_id: str) -> bytes:
        """Return the key by which a break of one of this client's requests is told."""
        return recipe.mailbox(self.prefix, self.label)[0] + request_id.encode()

    async def transact(
        self, keys: Keys, request: m.TxnRequest, *, own: str = "", gather: bool = False
    ) -> m.TxnResponse:
        """Carry out a transaction about one name. ``own``: it looks at the keys of this request alone;
        ``gather``: and there is a moment's time for it."""
        return await self._batches.transact(keys.base, request, own=own, gather=gather)

    async def read(self, keys: Keys) -> Queue:
        """Read a name."""
        answer = await self.link.call(api.RANGE, m.RangeRequest(keys.base, keys.end))
        assert answer.header is not None
        return Queue(keys, answer.header.revision, answer.kvs)

    async def recall(self, keys: Keys, holder: Record) -> None:
        """Tell a holder that lingers that somebody wants its name who does not queue. One attempt: who
        tries again tells it again."""
        try:
            await self.transact(keys, transactions.recall(keys, self.prefix, holder))
        except BackendError as failed:
            _logger.debug("recalling a lease that lingers failed: %s", failed)

    async def look_for(self, *leases: SharedLease | None) -> None:
        """Find out which of these leases have ended: the cluster does not know one of them."""
        for lease in {lease for lease in leases if lease is not None}:
            request = m.LeaseTimeToLiveRequest(lease.id)
            if (await self.link.call(api.LEASE_TIME_TO_LIVE, request)).ttl < 0:
                self.leases.ended(lease)
