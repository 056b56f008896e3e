"""Extending a holder: it holds as long as a majority has kept its token without interruption."""

from __future__ import annotations

from functools import partial

from ...._clock import now
from ...._model import Gone, Granted
from .broadcast import Broadcast
from .messenger import Messenger
from .requests import Requests
from .votes import Answer, Ballot, Queued, Tally, worst_of


class Holding:
    """Extends holders."""

    def __init__(self, requests: Requests, messenger: Messenger) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self._messenger = messenger

    def extend(self, tally: Tally, length: float) -> Broadcast[Answer]:
        """Extend a holder's votes; a node that does not know the holder is asked for its vote."""
        return self._messenger.send(
            tally,
            "held",
            length,
            partial(self._suffices, tally),
            token=tally.token,
            on_answer=_on_answer,
        )

    async def outcome(self, tally: Tally, extension: Broadcast[Answer]) -> Granted | Gone:
        """Return whether the request holds still; raise when too few nodes have answered to tell."""
        await extension.settled
        if now() >= tally.holds_until:
            # Others may have held since, though all nodes have given their votes to this request again.
            return Gone("expired")
        majority = self._nodes.majority
        kept = self._kept(tally, extension)
        if len(kept) >= majority:
            confirmed = tally.confirmed(tally.token, self._nodes.keeps)
            for vote in confirmed:
                vote.healing = False  # the others alone suffice, so nobody was in between
            return Granted(tally.token, tally.hold(tally.token, confirmed))
        silent = len(self._nodes.voters) - len(extension.answers)
        if len(kept) + silent < majority:
            gone = [answer for answer in extension.answers.values() if isinstance(answer, Gone)]
            queued = any(isinstance(answer, Queued) for answer in extension.answers.values())
            return worst_of(gone) if gone or not queued else Gone("taken_over")
        raise extension.failure(self._nodes.described, len(self._nodes.voters))

    def _suffices(self, tally: Tally, extension: Broadcast[Answer]) -> bool:
        return len(self._kept(tally, extension)) >= self._nodes.majority

    def _kept(self, tally: Tally, extension: Broadcast[Answer]) -> list[Ballot]:
        """Return the votes that this message has extended, and that were never interrupted."""
        confirmed = tally.confirmed(tally.token, self._nodes.keeps)
        return [vote for vote in confirmed if vote.node in extension.answers and not vote.healing]


def _on_answer(ballot: Ballot, answer: Answer) -> None:
    if ballot.stage != "c":
        ballot.healing = True
