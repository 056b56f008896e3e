"""Leaving every node that was ever asked: released or withdrawn, whichever the request is there by now.

A leave is over for its caller when a majority has answered and the others cannot change the result. Nodes
that did not answer are told again in the background, until they answer or have surely dropped the request.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from ...._backoff import pause_after
from ...._clock import now
from ...._errors import BackendError, BackendUnavailable
from ...._model import Left, StoreRequest
from ...._tasks import start_soon
from ...base import Unanswered
from ...kept import give_back_unknown
from .broadcast import Broadcast, too_few
from .requests import Requests
from .voter import Voter
from .votes import Ballot, Tally

_logger = logging.getLogger("aiodlock")

#: Pauses between attempts to leave a node that does not answer (seconds).
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0

Done = Callable[[Left | BackendError], object]


@dataclass(slots=True)
class _Departure:
    """One leave, on its way to all nodes that were asked."""

    tally: Tally
    lost: bool
    done: Done
    needed: int
    broadcast: Broadcast[Left] = field(init=False)
    #: Nodes that have not answered, until a task goes on telling them.
    missed: list[Ballot] = field(default_factory=list)
    confirmed: bool = False


class Leaving:
    """Leaves nodes.

    Mutable state: ``tasks`` (where it goes on in the background, while the backend runs), ``_unanswered``
    (leaves that were not answered, and those that nodes are told again), ``_answered`` (set when one was).
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self.tasks: asyncio.TaskGroup | None = None
        self._unanswered = 0
        self._answered = asyncio.Event()

    async def leave(self, request: StoreRequest, lost: bool, within: float | None) -> Left:
        """See ``KeptStore.leave``."""
        left = asyncio.get_running_loop().create_future()
        self._depart(request, lost, False, partial(_give, left))
        try:
            async with asyncio.timeout(within):
                result: Left | BackendError = await left
        except TimeoutError as silent:
            raise Unanswered(f"{self._nodes.described}: no answer for {within:g} s") from silent
        if isinstance(result, BackendError):
            raise result
        return result

    def leave_later(self, request: StoreRequest, done: Done, lost: bool) -> None:
        """See ``KeptStore.leave_later``."""
        # In the caller's context, as the hooks that it calls expect.
        context = contextvars.copy_context()
        self._depart(request, lost, True, lambda result: context.run(done, result))

    def _depart(self, request: StoreRequest, lost: bool, later: bool, done: Done) -> None:
        tally = self._requests.tally_of(request)
        self._requests.leaves(tally)
        asked = [ballot for ballot in tally.ballots if ballot.sent.on is not None]
        departure = _Departure(tally, lost, done, min(self._nodes.majority, len(asked)))
        broadcast = departure.broadcast = Broadcast(
            len(asked),
            self._nodes.majority,
            partial(self._suffices, tally),
            partial(self._on_settled, departure),
        )
        unreachable: list[tuple[Ballot, BackendUnavailable]] = []
        for ballot in asked:
            voter = self._nodes.voters[ballot.node]
            heard = partial(self._on_answer, departure, ballot)
            if voter.unvote(tally, ballot, lost, later, heard):
                self._unanswered += 1
            else:
                unreachable.append((ballot, voter.server.unreachable()))
        if len(unreachable) < len(asked):
            for ballot, error in unreachable:
                departure.missed.append(ballot)
                broadcast.take(ballot.node, error)
            return
        failures = [error for _, error in unreachable]
        nothing = too_few(self._nodes.described, 0, failures) if asked else tally.left({})
        if not asked:
            self._requests.forget(tally)
        asyncio.get_running_loop().call_soon(done, nothing)

    def _suffices(self, tally: Tally, broadcast: Broadcast[Left]) -> bool:
        answers = broadcast.answers
        return len(answers) >= self._nodes.majority and tally.left_for_certain(answers)

    def _on_answer(self, departure: _Departure, ballot: Ballot, answer: Any) -> None:
        self._unanswered -= 1
        self._answered.set()
        ballot.leave(answer)
        if isinstance(answer, Exception):
            departure.missed.append(ballot)
        departure.broadcast.take(ballot.node, answer)
        if departure.confirmed and departure.missed:
            self._leave_missed(departure)

    def _on_settled(self, departure: _Departure) -> None:
        broadcast = departure.broadcast
        if len(broadcast.answers) < departure.needed:
            departure.done(broadcast.failure(self._nodes.described, len(self._nodes.voters)))
            return
        departure.confirmed = True
        self._requests.forget(departure.tally)
        self._leave_missed(departure)
        departure.done(departure.tally.left(broadcast.answers))

    # -- in the background ---------------------------------------------------------------------------

    def _leave_missed(self, departure: _Departure) -> None:
        missed, departure.missed = departure.missed, []
        for ballot in missed:
            voter = self._nodes.voters[ballot.node]
            start_soon(self.tasks, self._leave_missed_at(voter, departure, ballot))

    async def _leave_missed_at(self, voter: Voter, departure: _Departure, ballot: Ballot) -> None:
        self._unanswered += 1
        try:
            await self._leave_at(voter, departure.tally, ballot, departure.lost)
        finally:
            self._unanswered -= 1
            self._answered.set()

    async def _leave_at(self, voter: Voter, tally: Tally, ballot: Ballot, lost: bool) -> None:
        """Leave one node that did not answer, until it does or has surely dropped the request."""
        give_up_at = now() + tally.longest + tally.request.terms.lock_delay
        failures = 1
        while now() < give_up_at and not ballot.sent.has_left:
            await asyncio.sleep(pause_after(failures, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))
            failures += 1
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ballot.sent.ambiguous = True
            sent = voter.unvote(tally, ballot, lost, False, partial(_give, answer))
            if sent and not isinstance(await answer, Exception):
                return

    async def settle(self) -> None:
        """Wait for the nodes that were told, or are told again as they were not connected: a leave returns
        when a majority has answered, and the others must not keep votes of a client that is gone."""
        with anyio.move_on_after(self._nodes.patience):
            while self._unanswered:
                self._answered.clear()
                await self._answered.wait()

    # -- votes for requests that this client does not have ---------------------------------------------

    def leave_unknown_soon(self, voter: Voter, request_id: str, where: str) -> None:
        """Give a vote back that was announced for a request that this client does not have."""
        start_soon(self.tasks, self._leave_unknown(voter, request_id, where))

    async def _leave_unknown(self, voter: Voter, request_id: str, where: str) -> None:
        try:
            await give_back_unknown(partial(voter.leave_unknown, request_id, where))
        except BackendError as error:
            _logger.warning(
                "giving back an unknown vote failed, it ends by itself: %r",
                error,
                extra={"event": "unknown_grant"},
            )


def _give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
