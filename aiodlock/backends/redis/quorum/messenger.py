"""One message about a request to all nodes, and what each answer changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ...._backoff import pause_after
from ...._clock import now
from .broadcast import Broadcast
from .giving_back import GivingBack
from .requests import Requests
from .votes import Answer, Ballot, Tally

#: So often a node is asked about a waiter again as soon as it has answered; then it is asked later and later.
_AT_ONCE = 4
#: The first of those pauses and the longest one, in seconds, and the longest one as a part of the length asked for.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_SHARE = 0.01, 0.2, 1 / 12
#: A question counts as one more in a row if it follows the one before within so long: seconds, and a part
#: of the length.
_IN_A_ROW, _IN_A_ROW_SHARE = 1.0, 1 / 4


class Messenger:
    """Sends what the script ``vote`` is called with.

    A node has one question of a waiter to answer at a time. What makes the client ask meanwhile (a notice, a
    break by an operator) may be newer than the answer on its way, so the node is asked once more after it.
    """

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
            if what == "ask":
                self._question(tally, ballot, broadcast, length)
                continue
            voter = self._nodes.voters[ballot.node]
            heard = partial(self._on_answer, tally, ballot, broadcast, on_answer)
            if not voter.vote(tally, ballot, what, length, token, heard):
                broadcast.take(ballot.node, voter.server.unreachable())
        return broadcast

    def _question(
        self, tally: Tally, ballot: Ballot, broadcast: Broadcast[Answer], length: float
    ) -> None:
        """Ask a node as soon as it has answered what it was asked before, and has had some rest."""
        questions = ballot.questions
        questions.waiting.append((broadcast, length))
        if questions.asking or questions.resting:
            return
        moment = now()
        if moment - questions.asked_at > min(_IN_A_ROW, length * _IN_A_ROW_SHARE):
            questions.in_a_row = 0
        self._put(tally, ballot)

    def _put(self, tally: Tally, ballot: Ballot) -> None:
        questions = ballot.questions
        put, questions.waiting = questions.waiting, []
        voter = self._nodes.voters[ballot.node]
        length = max(length for _, length in put)
        heard = partial(self._on_question_answered, tally, ballot, [one for one, _ in put], length)
        questions.asked_at, questions.asking = now(), True
        questions.in_a_row += 1
        if not voter.vote(tally, ballot, "ask", length, 0, heard):
            questions.asking = False
            for broadcast, _ in put:
                broadcast.take(ballot.node, voter.server.unreachable())

    def _on_question_answered(
        self,
        tally: Tally,
        ballot: Ballot,
        put: Sequence[Broadcast[Answer]],
        length: float,
        answer: Answer | Exception,
    ) -> None:
        questions = ballot.questions
        questions.asking = False
        for broadcast in put:
            self._on_answer(tally, ballot, broadcast, None, answer)
        if questions.asking or questions.resting or not questions.waiting:
            return
        if questions.in_a_row < _AT_ONCE:
            self._put(tally, ballot)
            return
        pause = pause_after(
            questions.in_a_row - _AT_ONCE + 1,
            first=_FIRST_PAUSE,
            longest=min(_LONGEST_PAUSE, length * _LONGEST_SHARE),
        )
        questions.resting = True
        asyncio.get_running_loop().call_later(pause, self._rested, tally, ballot)

    def _rested(self, tally: Tally, ballot: Ballot) -> None:
        ballot.questions.resting = False
        self._put(tally, ballot)

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
