"""A vote for which an older request asks is given back, unless a majority is complete; and every vote while
the client cannot count them.

Once the client has said so, the vote does not count for it. So the client repeats it until the node has
heard it: the older request may be gone by then, and nobody would ask for the vote any more.
"""

from __future__ import annotations

import asyncio
from functools import partial

from .requests import Requests
from .votes import Answer, Ballot, Tally

#: A message that gives a vote back and that was lost is repeated after so long (seconds).
_REPEAT_AFTER = 0.2


class GivingBack:
    """Gives votes back. The state is in the ballots: ``asked_back``, ``given_back``, ``yielding``."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def consider(self, tally: Tally, ballot: Ballot) -> None:
        """Give the vote back if it was asked back, or if the node has not heard that it was given back."""
        if tally.decides or tally.leaving or ballot.yielding:
            return
        # A client that cannot count votes takes none: others could.
        rests = not self._requests.can_count(tally)
        wanted = ballot.stage == "v" and (ballot.asked_back or rests)
        if (wanted and (rests or not self._requests.has_majority(tally))) or ballot.disowned:
            ballot.asked_back = False
            voter = self._requests.nodes.voters[ballot.node]
            on_answer = partial(self._on_answer, tally, ballot)
            voter.give_back(tally, ballot, on_answer, rests=rests)

    def _on_answer(self, tally: Tally, ballot: Ballot, answer: Answer | Exception) -> None:
        if isinstance(answer, Exception):
            loop = asyncio.get_running_loop()
            loop.call_later(_REPEAT_AFTER, self._repeat, tally, ballot)
        else:
            # Nobody waited for the vote any more, and the node has given it to this request again.
            self._requests.tell_of_majority(tally)

    def _repeat(self, tally: Tally, ballot: Ballot) -> None:
        ballot.yielding = False
        self.consider(tally, ballot)
