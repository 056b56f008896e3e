"""The change of seats: a request's node goes over to its owner's, who holds by another request."""

from __future__ import annotations

import asyncio

from ..._errors import BackendError
from . import jute
from .node import QueueNode
from .queue import Entry
from .queues import Queues
from .stands import Stand


class Seat:
    """Where one request's node is, as this client's other places know it.

    Mutable state: ``_stand`` (the node, while others may stand behind it), ``moving`` (while a waiter's
    node changes over).
    """

    def __init__(self, queues: Queues, node: QueueNode) -> None:
        self.moving: asyncio.Future[None] | None = None
        self._node = node
        self._queues = queues
        self._stand: Stand | None = None

    def begin(self) -> Stand | None:
        """Tell other places of this client of the node; return the one right in front, if it is ours."""
        node = self._node
        if self._stand is None and node.path is not None and not node.asked.limit:
            exclusive = node.asked.mode == "x"
            self._stand = Stand(
                node.path, session=node.session, exclusive=exclusive, alone=node.is_alone
            )
            self._queues.stands.begin(self._stand)
        return None if self._stand is None else self._queues.stands.in_front_of(self._stand)

    def end(self, held_until: int = 0) -> None:
        """The node has gone, or nobody here hears of its end any more; see ``Stands.end``."""
        stand, self._stand = self._stand, None
        if stand is not None:
            self._queues.stands.end(stand, held_until=held_until)

    async def join(self, seat: Entry) -> None:
        """Change over to this seat, unless its owner has just left it."""
        self.end()
        self._queues.stands.share(self._node.directory, seat.number)
        await self._node.join(seat)

    async def change_over(self, seat: Entry) -> None:
        """Do the same for a waiter, which looks where it is afterwards."""
        moving = self.moving = asyncio.get_running_loop().create_future()
        try:
            await self.join(seat)
        except (jute.ZooKeeperError, BackendError):
            pass
        finally:
            self.moving = None
            moving.set_result(None)

    async def settle(self) -> None:
        """Wait until it is known which node is the request's."""
        under_way = self.moving or self._node.making
        if under_way is not None:
            await asyncio.wait([under_way])
