"""The order of requests: tickets, that are alike on all nodes (Lamport 1978)."""

from __future__ import annotations

from ...._clock import now
from .nodes import Nodes
from .votes import Tally

#: Clocks that are right are no further apart than this, and a queue's order need not tell them apart.
_SAME_TIME_US = 1_000_000


class Tickets:
    """Makes the tickets of one client, in microseconds. Mutable state: ``_last``."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._last = 0

    def next(self) -> int:
        """Return a ticket that is later than all that this client knows of.

        It follows the latest of the nodes' clocks, not a middle one: a wrong clock then moves all clients
        alike, whichever nodes they hear. The floors tell a client that does not hear it (``catch_up``).
        """
        self._last = max(self._last + 1, self.latest_clock())
        return self._last

    def latest_clock(self) -> int:
        """Return the latest of the nodes' clocks, as last heard plus what passed since."""
        moment = now()
        times = [voter.trust.time_at(moment) for voter in self._nodes.voters]
        return int(max((time for time in times if time is not None), default=0.0) * 1e6)

    def catch_up(self, tally: Tally) -> bool:
        """Make a ticket later if the name's order is ahead of every clock that this client has heard.

        With each place, a node tells the largest token, or ticket from its own future, that it knows of.
        Without this, a client that hears other clocks would always come before those that wait already.

        :returns: whether the ticket has changed.
        """
        latest = max(ballot.floor for ballot in tally.ballots)
        if latest <= tally.ticket or latest <= self.latest_clock() + _SAME_TIME_US:
            return False
        tally.ticket = self._last = max(latest, self._last) + 1
        tally.packed = None
        return True
