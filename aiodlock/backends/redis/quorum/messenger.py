"""One message about a request to all nodes, and what each answer changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ...._backoff import pause_after
from ...._clock import now
from ...base import Unanswered
from .broadcast import Broadcast
from .giving_back import GivingBack
from .requests import Requests
from .votes import Answer, Ballot, Tally

#: So often a node is asked about a waiter again at once when it has answered; then later and later.
_AT_ONCE = 4
#: The first of those pauses, and the longest one: in seconds, and as a part of the length asked for.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_SHARE = 0.01, 0.2, 1 / 12
#: A question counts as one more in a row if it follows the one before within so long: seconds, and a part
#: of the length.
_IN_A_ROW, _IN_A_ROW_SHARE = 1.0, 1 / 4


class Messenger:
    """Sends what the script ``vote`` is called with.

    A node has one question of a waiter to answer at a time. What makes the client ask meanwhile (a notice,
    a break by an operator) may be newer than the answer on its way: the node is asked once more after it.
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

        :param what: ``ask``, ``try``, ``fence`` or ``held``; see ``vote.lua``. While the client cannot
            count votes, what asks for one asks for a place alone.
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
            late = partial(self._on_late, tally, ballot, on_answer)
            if not voter.vote(tally, ballot, what, length, token, heard, late):
                broadcast.take(ballot.node, voter.server.unreachable())
        return broadcast

    def _question(
        self, tally: Tally, ballot: Ballot, broadcast: Broadcast[Answer], length: float
    ) -> None:
        """Ask a node, as soon as it has answered what it was asked before and has had some rest."""
        if ballot.asking or ballot.resting:
            ballot.to_ask.append((broadcast, length))
            return
        since = now() - ballot.asked_at
        if since > min(_IN_A_ROW, length * _IN_A_ROW_SHARE):
            ballot.in_a_row = 0
        elif ballot.in_a_row >= _AT_ONCE:
            ballot.to_ask.append((broadcast, length))
            self._put_later(tally, ballot, length, since)
            return
        self._put(tally, ballot, (broadcast,), length)

    def _put(
        self, tally: Tally, ballot: Ballot, by: Sequence[Broadcast[Answer]], length: float
    ) -> None:
        if tally.token or tally.fencing is not None:
            # The question has waited. It would open a vote that is confirmed: who asks does not hold.
            for broadcast in by:
                broadcast.take(ballot.node, Unanswered("not asked: it holds, or is about to"))
            return
        voter = self._nodes.voters[ballot.node]
        ballot.asked_at, ballot.asking = now(), True
        ballot.in_a_row += 1
        tally.renounced = tally.tried
        heard = partial(self._on_question_answered, tally, ballot, by, length)
        late = partial(self._on_late, tally, ballot, None)
        what = "ask" if self._requests.can_count(tally) else "wait"
        if not voter.vote(tally, ballot, what, length, tally.renounced, heard, late):
            ballot.asking = False
            for broadcast in by:
                broadcast.take(ballot.node, voter.server.unreachable())

    def _on_question_answered(
        self,
        tally: Tally,
        ballot: Ballot,
        by: Sequence[Broadcast[Answer]],
        length: float,
        answer: Answer | Exception,
    ) -> None:
        ballot.asking = False
        for broadcast in by:
            self._on_answer(tally, ballot, broadcast, None, answer)
        if ballot.to_ask and not ballot.resting and not ballot.asking:
            self._put_later(tally, ballot, length, now() - ballot.asked_at)

    def _put_later(self, tally: Tally, ballot: Ballot, length: float, since: float) -> None:
        """Ask what there is to ask: at once, or after a pause that is counted from the last question."""
        repeats = ballot.in_a_row - _AT_ONCE
        pause = 0.0
        if repeats >= 0:
            longest = min(_LONGEST_PAUSE, length * _LONGEST_SHARE)
            pause = pause_after(repeats + 1, first=_FIRST_PAUSE, longest=longest) - since
        if pause <= 0.0:
            self._put_next(tally, ballot)
            return
        ballot.resting = True
        asyncio.get_running_loop().call_later(pause, self._put_next, tally, ballot)

    def _put_next(self, tally: Tally, ballot: Ballot) -> None:
        to_ask, ballot.to_ask, ballot.resting = ballot.to_ask, [], False
        by = [broadcast for broadcast, _ in to_ask]
        self._put(tally, ballot, by, max(length for _, length in to_ask))

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
