"""What nodes say without being asked: a vote is given, asked back, or was broken by an operator."""

from __future__ import annotations

from .giving_back import GivingBack
from .leaving import Leaving
from .requests import Requests
from .voter import Voter


class NodeNotices:
    """Hears the notices of one node, and tells the keeper what concerns it."""

    def __init__(
        self, voter: Voter, requests: Requests, giving_back: GivingBack, leaving: Leaving
    ) -> None:
        self._voter = voter
        self._requests = requests
        self._giving_back = giving_back
        self._leaving = leaving

    def on_granted(self, request_id: str, token: int, where: str, recalled: bool = False) -> None:
        """The node votes for the request now. It holds at once if a majority gave it the same token."""
        requests = self._requests
        tally = requests.get(request_id)
        if tally is None:
            if requests.listener is None or not requests.listener.was_lost(request_id, token):
                self._leaving.leave_unknown_soon(self._voter, request_id, where)
            return
        tally.ballots[self._voter.node].notice(token)
        if tally.decides or requests.listener is None or not requests.has_majority(tally):
            return
        agreed = tally.agreed(requests.votes(tally)) if tally.waiting else []
        if agreed and agreed[0].token >= requests.nodes.least_token(agreed):
            deadline = tally.hold(agreed[0].token, agreed)
            requests.listener.on_held(request_id, tally.token, deadline)
        else:
            requests.listener.on_look(request_id)

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        raise NotImplementedError  # no node can say this by itself

    def was_lost(self, request_id: str, token: int) -> bool:
        raise NotImplementedError  # the keeper knows

    def on_look(self, request_id: str | None) -> None:
        """The vote of this node is asked back, or there is something to ask about."""
        tally = self._requests.get(request_id)
        if tally is not None:
            ballot = tally.ballots[self._voter.node]
            if ballot.stage == "v" and not tally.token:
                ballot.asked_back = True
                self._giving_back.consider(tally, ballot)
                return
        if self._requests.listener is not None:
            self._requests.listener.on_look(request_id)

    def on_other_server(self) -> None:
        self.on_look(None)

    def on_back(self) -> None:
        """Have tokens confirmed that could not be written while the node was unreachable.

        Its run id tells whether the node has forgotten something, not this.
        """
        self._requests.tell_of_majorities()

    def on_broken(self, request_id: str, token: int) -> None:
        """An operator broke the lease, or at this node a vote that might have become one."""
        requests = self._requests
        tally = requests.get(request_id)
        if tally is not None:
            tally.ballots[self._voter.node].lose(token)
        if requests.listener is not None:
            requests.listener.on_broken(request_id, token)
            requests.listener.on_look(request_id)  # a waiter stays: it queues there again

    def on_recalled(self, request_id: str) -> None:
        """Never: nothing lingers on a quorum."""

    def may_hold(self) -> bool:
        listener = self._requests.listener
        return listener is not None and listener.may_hold()
