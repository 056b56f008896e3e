"""One message about a request to all nodes, and what each answer changes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...base import Unanswered
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

        :param what: ``ask``, ``try``, ``fence`` or ``held``; see ``vote.lua``. While the client cannot
            count votes, what asks for one asks for a place alone.
        :param enough: see ``Broadcast``.
        :param on_answer: called with each answer, instead of seeing what it changes for a waiter.
        """
        asked = tally.ballots if ballots is None else ballots
        broadcast = Broadcast[Answer](len(asked), self._nodes.majority, enough)
        for ballot in asked:
            if what == "ask":
                ballot.questions.ask(partial(self._put, tally, ballot), broadcast, length)
                continue
            voter = self._nodes.voters[ballot.node]
            heard = partial(self._on_answer, tally, ballot, broadcast, on_answer)
            late = partial(self._on_late, tally, ballot, on_answer)
            if not voter.vote(tally, ballot, what, length, token, heard, late):
                broadcast.take(ballot.node, voter.server.unreachable())
        return broadcast

    def _put(
        self, tally: Tally, ballot: Ballot, by: Sequence[Broadcast[Answer]], length: float
    ) -> bool:
        """Ask a node about a waiter; see ``Questions``."""
        voter = self._nodes.voters[ballot.node]
        failure: Exception
        if tally.decides:
            # The question has waited. It would open a vote that is confirmed: who asks does not hold.
            failure = Unanswered("not asked: it holds, or is about to")
        else:
            token = tally.fence.renounced = tally.fence.tried
            heard = partial(self._on_question_answered, tally, ballot, by, length)
            late = partial(self._on_late, tally, ballot, None)
            what = "ask" if self._requests.can_count(tally) else "wait"
            if voter.vote(tally, ballot, what, length, token, heard, late):
                return True
            failure = voter.server.unreachable()
        for broadcast in by:
            broadcast.take(ballot.node, failure)
        return False

    def _on_question_answered(
        self,
        tally: Tally,
        ballot: Ballot,
        by: Sequence[Broadcast[Answer]],
        length: float,
        answer: Answer | Exception,
    ) -> None:
        ballot.questions.answered()
        for broadcast in by:
            self._on_answer(tally, ballot, broadcast, None, answer)
        ballot.questions.go_on(partial(self._put, tally, ballot), length)

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

    def _on_late(
        self,
        tally: Tally,
        ballot: Ballot,
        on_answer: Callable[[Ballot, Answer], None] | None,
        answer: Answer | Exception,
    ) -> None:
        """Take an answer that nobody waits for any more. What it says is as good as any other."""
        if isinstance(answer, Exception):
            return
        if on_answer is not None:
            on_answer(ballot, answer)
        elif not tally.leaving:
            self._giving_back.consider(tally, ballot)
            self._requests.tell_of_majority(tally)
