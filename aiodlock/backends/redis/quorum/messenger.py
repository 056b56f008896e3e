"""One message about a request to all nodes, and what each answer changes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .broadcast import Broadcast
from .giving_back import GivingBack
from .requests import Requests
from .votes import Answer, Ballot, Tally


class Messenger:
    """Sends what the script ``vote`` is called with."""

    def __init__(self, requests: Requests, giving_back: GivingBack) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self._giving_back = giving_back

    def ask(self, tally: Tally, length: float, *, wait: bool = True) -> Broadcast[Answer]:
        """Ask all nodes for their votes, and with ``wait`` for places in their queues."""
        return self.send(tally, "ask" if wait else "try", length, partial(self._decided, tally))

    def _decided(self, tally: Tally, _: Broadcast[Answer]) -> bool:
        """Tell whether no further answer is needed: the token of an owner that holds is a majority's."""
        if not self._requests.has_majority(tally):
            return False
        votes = self._requests.votes(tally)
        return not any(vote.stage == "a" for vote in votes) or tally.token_of_owner(votes) > 0

    def send(
        self,
        tally: Tally,
        what: str,
        length: float,
        enough: Callable[[Broadcast[Answer]], bool],
        *,
        token: int = 0,
        ballots: Sequence[Ballot] | None = None,
        on_answer: Callable[[Ballot, Answer], None] | None = None,
    ) -> Broadcast[Answer]:
        """Send one message to every node, or to those of the ballots.

        :param what: ``ask``, ``try``, ``fence`` or ``held``; see ``vote.lua``.
        :param enough: see ``Broadcast``.
        :param on_answer: called with each answer, instead of seeing what it changes for a waiter.
        """
        asked = tally.ballots if ballots is None else ballots
        broadcast = Broadcast[Answer](len(asked), self._nodes.majority, enough)
        for ballot in asked:
            voter = self._nodes.voters[ballot.node]
            heard = partial(self._on_answer, tally, ballot, broadcast, on_answer)
            if not voter.vote(tally, ballot, what, length, token, heard):
                broadcast.take(ballot.node, voter.server.unreachable())
        return broadcast

    def _on_answer(
        self,
        tally: Tally,
        ballot: Ballot,
        broadcast: Broadcast[Answer],
        on_answer: Callable[[Ballot, Answer], None] | None,
        answer: Answer | Exception,
    ) -> None:
        if on_answer is not None:
            if not isinstance(answer, Exception):
                on_answer(ballot, answer)
            broadcast.take(ballot.node, answer)
            return
        was_awaited = not broadcast.settled.done()
        broadcast.take(ballot.node, answer)
        if not tally.leaving:
            self._giving_back.consider(tally, ballot)
            if not was_awaited:
                self._requests.tell_of_majority(tally)
