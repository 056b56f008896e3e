"""How a request gets its node, and what the queue says of it then."""

from __future__ import annotations

from collections.abc import Sequence

from ..._errors import Unsupported
from ..._model import Gone, Refused, Terms
from . import jute
from .node import QueueNode
from .queue import Barred, Blocked, Holds, Joins
from .queues import Queues
from .seat import Seat
from .session import Session
from .stands import Stand

#: The timeout that servers grant is in whole milliseconds.
_ROUNDED = 0.0015
#: A session of fewer ticks is over before three writes have shown that the leader has heard of it.
_FEWEST_TICKS = 1.25


def check_ttl(terms: Terms, session: Session) -> None:
    """Refuse a ttl that no session of these servers has."""
    ttl, granted, longest = terms.ttl, session.granted, terms.max_hold
    # What is held for no longer than its ttl is deleted by the client itself.
    brief = longest is not None and longest <= ttl
    if granted > session.timeout + _ROUNDED and not brief:
        wrong = (
            f"shorter than the shortest session that these servers grant, {granted:g} s "
            "(minSessionTimeout, by default 2 * tickTime)"
        )
    elif granted < session.timeout - _ROUNDED:
        wrong = (
            f"longer than the longest session that these servers grant, {granted:g} s "
            "(maxSessionTimeout, by default 20 * tickTime)"
        )
    elif granted < _FEWEST_TICKS * session.tick:
        wrong = (
            f"too short for tick_time={session.tick:g}: no lease could be extended. Give the servers' "
            "tickTime in seconds, as tick_time= in the URL, or a ttl of at least "
            f"{_FEWEST_TICKS * session.tick:g}"
        )
    else:
        return
    raise Unsupported(f"ttl={ttl:g} is {wrong}", name=terms.name)


class Entering:
    """The way in of one request."""

    def __init__(self, queues: Queues, node: QueueNode, seat: Seat) -> None:
        self._queues = queues
        self._node = node
        self._seat = seat

    async def is_taken(self) -> bool:
        """Look at the queue as it is now. What is refused for this costs no commit, and leaves nothing."""
        node = self._node
        await self._queues.leaves.until_arrived(node.directory, but=node.session)
        node.session.submit(jute.sync(node.directory))
        entries = await node.read()
        taken = node.asked.is_taken(entries)
        if taken:
            self._recall(node.asked.blocked_by(entries))
        return taken

    def _recall(self, nodes: Sequence[str]) -> None:
        """Tell those of them that linger: who is refused does not stay in the queue that they watch."""
        if not self._node.asked.limit:
            paths = [f"{self._node.directory}/{node}" for node in nodes]
            self._queues.start(self._queues.recall(self._node.session, paths))

    async def enter(self, *, wait: bool) -> Holds | Blocked | Stand | Refused | Gone:
        """Make the node, unless that is done; return what it stands behind, if it has to wait."""
        node = self._node
        while not node.is_over():
            near = node.asked.is_plain and self._queues.stands.ends_with_exclusive(
                node.directory, node.session
            )
            entries = await node.enter(reads=not near)
            if node.is_over():
                break
            ahead = self._seat.begin()
            if entries is None and ahead is not None:
                if wait:
                    return ahead
                self._recall([ahead.node])
                return Refused("busy", unsure=True)
            if entries is None:
                entries = await node.read()
            match node.where(entries):
                case None:
                    return Gone("broken")  # somebody has deleted it before it was known here
                case Joins(seat):
                    await self._seat.join(seat)
                case Barred(limit):
                    # The core leaves: the node is there.
                    return Refused("limit" if limit else "deadlock", limit, unsure=True)
                case Blocked() as blocked:
                    if wait:
                        return blocked
                    self._recall(node.asked.blocked_by(entries))
                    return Refused("busy", unsure=True)
                case Holds() as holds:
                    return holds
        return Gone("expired")
