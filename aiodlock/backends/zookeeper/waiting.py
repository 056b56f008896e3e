"""How a request waits: it reads the queue when what blocks it may have gone, and does what that says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..._errors import BackendError, BackendUnavailable, LossReason
from . import jute
from .blockers import Blockers
from .node import QueueNode
from .own_watch import OwnWatch
from .queue import Barred, Blocked, Entry, Holds, Joins, Queue
from .queues import Queues
from .seat import Seat
from .stands import Stand


class Waiter:
    """One of them.

    ``turn`` is called when it stands where it holds, with whether others stand behind it; ``lost`` when its
    node is not there; ``unavailable`` when the servers do not let this client watch what blocks it.

    Mutable state: ``_waits`` (from ``begin`` to ``end``), ``_looking`` (the queue is being read).
    """

    def __init__(
        self,
        queues: Queues,
        node: QueueNode,
        seat: Seat,
        own_watch: OwnWatch,
        turn: Callable[[bool], object],
        lost: Callable[[LossReason], object],
        unavailable: Callable[[BackendUnavailable], object],
    ) -> None:
        self._queues = queues
        self._node = node
        self._seat = seat
        self._own_watch = own_watch
        self._turn = turn
        self._lost = lost
        self._unavailable = unavailable
        self._blockers = Blockers(queues, node, self.look, self._on_ahead_gone, self._on_refused)
        self._waits = False
        self._looking = False

    def begin(self, behind: Blocked | Stand | Holds) -> None:
        """Wait for these nodes, for another place of this client, or for nothing that is in the queue."""
        self._wait()
        if isinstance(behind, Stand):
            self._blockers.follow(behind)
        elif isinstance(behind, Blocked) and self._node.session.is_up:
            self._blockers.wait_for(behind)  # else it looks when there is a connection

    def end(self) -> None:
        """It waits no more."""
        if self._waits:
            self._waits = False
            self._stop()

    def _wait(self) -> None:
        self._waits = True
        if self._node.may_join:
            # Nothing tells it that its owner holds now.
            self._node.session.members.looking[self.look] = None
        self._own_watch.begin()

    def _stop(self) -> None:
        self._blockers.clear()
        self._node.session.members.looking.pop(self.look, None)

    # -- what it hears -------------------------------------------------------------------------------

    def _on_ahead_gone(self, held_until: int) -> None:
        if not self._waits:
            return
        # A node that is younger than that deletion stands in another queue, which was made since.
        next_then = held_until >= self._node.created > 0
        if next_then and self._node.asked.is_plain and not self._node.is_over():
            self._turn(False)
        else:
            self.look()

    def _on_refused(self, refused: jute.ZooKeeperError) -> None:
        """The request would not hear of the end of what blocks it: another user has made that."""
        if self._waits:
            self._unavailable(BackendUnavailable(str(self._node.refused(refused))))

    # -- looking -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the queue, as what blocked the request may have gone. Without a connection, or while its
        node moves, it looks afterwards."""
        session = self._node.session
        if self._looks and not self._looking and session.is_up:
            self._looking = True
            reading = self._queues.read_queue(session, self._node.directory)
            reading.add_done_callback(self._on_looked)

    def look_after(self) -> None:
        """All that ends a wait is told, by a watch or by this client's own places. What was told and not
        heard must not block a name for as long as the client lives; nor a node of its own that no request
        counts as its own."""
        if self._looks and not self._looking and self._node.session.is_up:
            self._blockers.look_after()

    @property
    def _looks(self) -> bool:
        """Whether it waits, and nothing is about to change where it stands."""
        return self._waits and self._seat.moving is None

    def _on_looked(self, reading: asyncio.Future[Queue]) -> None:
        self._looking = False
        node, error = self._node, reading.exception()
        if not self._looks:
            return
        if isinstance(error, jute.ZooKeeperError):
            self._lost("gone")  # the queue itself was deleted
            return
        if error is not None or node.is_over():
            return  # it looks again when there is a connection
        entries = reading.result()
        where = node.where(entries)
        if node.path is None and where is not None:
            # The answer to its move into a seat was lost: it is at one of two places.
            self._queues.start(self._adopt(entries))
            return
        match where:
            case None:
                self._lost("gone")
            case Holds(followed):
                self._turn(followed)
            case Blocked() as blocked:
                if node.session.is_up:  # else it looks again when there is a connection
                    self._blockers.wait_for(blocked)
            case Joins(seat):
                self._queues.start(self._change_over(seat))
            case Barred():
                pass  # it waits on: the owner came to hold by another request meanwhile

    async def _change_over(self, seat: Entry) -> None:
        if not self._looks or self._node.path is None:
            return
        self._stop()
        self._own_watch.end()
        await self._seat.change_over(seat)
        if self._waits:
            self._wait()
        self.look()

    async def _adopt(self, entries: Queue) -> None:
        try:
            await self._node.adopt(entries)
        except (jute.ZooKeeperError, BackendError):
            pass  # it has gone meanwhile, or it looks again when there is a connection
        self._own_watch.renew()
        self.look()
