"""How a queued request comes to hold: its room tells when it is its turn, and what the grant needs is
written then, until that is answered."""

from __future__ import annotations

from collections.abc import Callable

from ..stage import WAITING
from .entering import Entering, Grant
from .own_keys import OwnKeys
from .recipe import Turn
from .request import Request
from .room import Room


class Waiter:
    """One request, as its room knows it.

    Mutable state: ``room`` (from before it queues until it waits no more), ``_confirming`` (its grant is
    being written).

    :param granted: is told that it holds, with what.
    :param recorded: is told that a success is on record, with its result.
    """

    def __init__(
        self,
        request: Request,
        own: OwnKeys,
        entering: Entering,
        granted: Callable[[Grant], object],
        recorded: Callable[[bytes], None],
    ) -> None:
        self.id: str = request.id
        self.owner: str = request.owner
        self.room: Room | None = None
        self.on_recorded: Callable[[bytes], None] = recorded
        self._request = request
        self._own = own
        self._entering = entering
        self._granted = granted
        self._confirming = False

    def begin(self) -> Room:
        """It is about to queue: return where."""
        self.room = self._request.cluster.rooms.of(self._request.keys)
        self.room.add(self)
        return self.room

    def end(self) -> None:
        """It waits no more."""
        if self.room is not None:
            self.room.remove(self)
            self.room = None

    def on_turn(self, turn: Turn) -> None:
        """The room has seen that it holds, or may join its owner's other request."""
        request = self._request
        if request.stage is not WAITING:
            return
        if turn.what == "holds" and not request.terms.lock_delay:
            assert self._own.lease is not None
            self._granted(Grant(turn.order, self._own.lease, None))
        elif not request.is_due:
            self.confirm_soon()

    def on_vanished(self) -> None:
        """The room has seen that its key is gone."""
        self._request.on_gone("gone")

    def confirm_soon(self) -> None:
        """Write what its grant needs. What the room heard before it waited it has told to nobody."""
        request = self._request
        request.set_timer(0.0, lambda: request.cluster.start(self._confirm))

    async def _confirm(self) -> None:
        if self._confirming:
            return  # each attempt begins with what the room knows then
        self._confirming = True
        try:
            await self._request.repeat(WAITING, self._confirm_once)
        finally:
            self._confirming = False

    async def _confirm_once(self) -> bool:
        """Write it; True: again."""
        queue = None if self.room is None else self.room.queue
        if queue is None:
            return False  # the room tells when it knows more
        if queue.success is not None:
            self.on_recorded(queue.success.result)
            return False
        record = queue.find(self.id)
        if record is None:
            return False  # the room may not have heard of the key yet: it tells when it has
        turn = queue.turn_of(record)
        if turn.what not in ("holds", "joins"):
            return False
        grant = await self._entering.grant(turn, record, queue)
        if grant is not None and self._request.stage is WAITING:  # else the room has told meanwhile
            self._granted(grant)
        return grant is None
