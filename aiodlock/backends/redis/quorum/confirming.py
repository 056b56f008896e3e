"""From the votes of a majority to a lease: the token is written to the nodes that vote for the request.

The request holds when a majority of *all* nodes took the token. What it writes is the largest token that
any of them proposed, or the token that its owner holds with already.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...._model import Granted
from .giving_back import GivingBack
from .messenger import Messenger
from .requests import Requests
from .votes import Ballot, Tally


class Confirming:
    """Writes tokens."""

    def __init__(self, requests: Requests, messenger: Messenger, giving_back: GivingBack) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self._messenger = messenger
        self._giving_back = giving_back

    async def confirm(self, tally: Tally) -> Granted | None:
        """Write the token to the nodes that vote for the request; None if no majority took it."""
        fence = tally.fence
        if fence.message is not None:  # another call for the same request is at it
            await fence.message.settled
            return None
        votes = self._requests.votes(tally)
        known = tally.token_of_owner(votes)
        token = self._token_for(tally, votes)
        fence.writes(token)
        message = fence.message = self._messenger.send(
            tally,
            "held" if known else "fence",
            tally.request.terms.ttl,
            lambda _: self._has_confirmed(tally, token, known),
            token=token,
            ballots=votes,
        )
        try:
            await message.settled
        finally:
            fence.message = None
        if not self._has_confirmed(tally, token, known):
            return None
        confirmed = tally.confirmed(token, self._nodes.is_trusted)
        return Granted(token, tally.hold(token, confirmed))

    def has_news(self, tally: Tally) -> bool:
        """Tell whether another token is to be written than the one that too few nodes took."""
        if tally.token or not self._requests.has_majority(tally):
            return False
        return self._token_for(tally, self._requests.votes(tally)) != tally.fence.written

    def _token_for(self, tally: Tally, votes: Sequence[Ballot]) -> int:
        known = tally.token_of_owner(votes)
        tokens = [vote.token for vote in votes]
        return known or max(self._nodes.least_token(votes), tally.least_token, *tokens)

    def took_back(self, tally: Tally) -> bool:
        """Tell whether nodes took a token in vain: they have to learn that their votes are open."""
        if tally.decides or tally.leaving or self._requests.has_majority(tally):
            return False
        for ballot in tally.ballots:
            self._giving_back.consider(tally, ballot)  # it may have been asked back meanwhile
        return any(ballot.stage == "c" for ballot in tally.ballots)

    def _has_confirmed(self, tally: Tally, token: int, known: int) -> bool:
        """Tell whether a majority took the token, and it is not about to be broken.

        What the owner holds with already ends with that hold, whatever else was broken.
        """
        if tally.was_broken(token) if known else token <= tally.broken:
            return False
        return len(tally.confirmed(token, self._nodes.is_trusted)) >= self._nodes.majority
