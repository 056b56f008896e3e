"""The requests of this client that the nodes were asked about, and whether a majority votes for them."""

from __future__ import annotations

from ...._model import StoreRequest
from ...kept import Notices
from .nodes import Nodes
from .tickets import Tickets
from .votes import Ballot, Tally


class Requests:
    """One ``Tally`` for each request, from before its first message until it leaves.

    Mutable state: the tallies by request id, ``listener`` (while the backend runs).
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.tickets: Tickets = Tickets(nodes)
        self.listener: Notices | None = None
        self._tallies: dict[str, Tally] = {}

    def get(self, request_id: str | None) -> Tally | None:
        """Return the tally of a request that has not left."""
        return self._tallies.get(request_id) if request_id is not None else None

    def tally_of(self, request: StoreRequest) -> Tally:
        """Return the request's tally, a new one for a new request."""
        tally: Tally | None = request.tally
        if tally is None:
            voters = len(self.nodes.voters)
            tally = request.tally = Tally(request, self.tickets.next(), voters)
            self._tallies[request.id] = tally
        return tally

    def leaves(self, tally: Tally) -> None:
        """From now on the request is not asked about, and no notice counts for it."""
        tally.leaving = True
        self._tallies.pop(tally.request.id, None)

    def forget(self, tally: Tally) -> None:
        """The request is over. The two know each other: they are not left to the collector."""
        self._tallies.pop(tally.request.id, None)
        tally.request.tally = None

    def clear(self) -> None:
        """The client is left."""
        self._tallies.clear()
        self.listener = None

    def node_restarted(self, node: int) -> None:
        """Forget what the node has said: another server, or an empty one, answers from now on."""
        for tally in self._tallies.values():
            tally.ballots[node].restarted()

    def votes(self, tally: Tally) -> list[Ballot]:
        """Return the votes that count."""
        return tally.votes(self.nodes.is_trusted)

    def has_majority(self, tally: Tally) -> bool:
        """Tell whether the votes that count are a majority of all nodes."""
        return tally.has_majority(self.nodes.is_trusted)

    def can_count(self, tally: Tally) -> bool:
        """Tell whether votes of a majority could count for it now: a request takes no votes otherwise."""
        return self.nodes.can_count(tally.request.terms.waiter_ttl)

    def tell_of_majorities(self) -> None:
        """Have all majorities confirmed: a node may be back that did not learn a token."""
        for tally in tuple(self._tallies.values()):
            self.tell_of_majority(tally)

    def tell_of_majority(self, tally: Tally) -> None:
        """Have a majority confirmed that was completed by an answer that nobody waits for."""
        if tally.decides or tally.leaving or self.listener is None:
            return
        if self.has_majority(tally):
            self.listener.on_look(tally.request.id)
