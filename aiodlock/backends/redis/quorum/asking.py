"""Asking for votes, and what follows from them: a lease, a place in the queues, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...._backoff import pause_after
from ...._clock import now
from ...._errors import BackendUnavailable
from ...._model import Gone, Granted, Refused, StoreRequest, Waiting, first_request
from .broadcast import Broadcast
from .confirming import Confirming
from .holding import Holding
from .messenger import Messenger
from .requests import Requests
from .votes import Answer, Ballot, Denied, Tally, worst_of

#: So often a token is written when a reader takes the same one at the same time.
_ATTEMPTS = 5
#: A token that too few nodes took is written again after so long, twice as long each time (seconds).
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Asking:
    """Asks the nodes for their votes, and says what follows."""

    def __init__(
        self, requests: Requests, messenger: Messenger, confirming: Confirming, holding: Holding
    ) -> None:
        self._requests = requests
        self._nodes = requests.nodes
        self._messenger = messenger
        self._confirming = confirming
        self._holding = holding

    async def acquire(
        self, request: StoreRequest, *, wait: bool
    ) -> Granted | Waiting | Refused | Gone:
        """See ``KeptStore.acquire``."""
        if not wait and (distrust := self._nodes.distrust) is not None:
            raise distrust  # a vote would keep others out, and gain nothing
        tally = self._requests.tally_of(request)
        length = request.terms.waiter_ttl
        self._confirm_owner(request)
        asked = self._messenger.ask(tally, length, wait=wait)
        await asked.settled
        if wait and self._requests.tickets.catch_up(tally):
            asked = self._messenger.ask(tally, length)
            await asked.settled
        denied = [answer for answer in asked.answers.values() if isinstance(answer, Denied)]
        deadlock = self._denies(asked)
        if deadlock or (denied and not wait and not self._requests.has_majority(tally)):
            if len(denied) < len(self._nodes.voters):
                request.ambiguous = True  # others vote for it, or may: they have to be left
            else:
                self._requests.forget(tally)
            return Refused("deadlock" if deadlock else "busy")
        answer = await self.outcome(tally, asked, length)
        tally.waiting = isinstance(answer, Waiting)
        if wait or isinstance(answer, Granted | Gone):
            return answer
        request.ambiguous = True
        if not denied and (distrust := self._nodes.distrust) is not None:
            raise distrust  # nobody says that somebody holds
        return Refused("busy")

    def _denies(self, asked: Broadcast[Answer]) -> bool:
        """Tell whether a majority says that the owner holds shared; one node may not know that it left."""
        denied = [answer for answer in asked.answers.values() if answer == Denied("deadlock")]
        return len(denied) >= self._nodes.majority

    def _confirm_owner(self, request: StoreRequest) -> None:
        """Let the nodes know, before they are asked for more, that the task asks for more than it holds."""
        first = first_request(request.owner)
        holder = self._requests.get(first) if first is not None else None
        if holder is None or holder.request is request or not holder.token:
            return
        if any(ballot.stage == "v" for ballot in holder.ballots):
            self._holding.extend(holder, holder.request.terms.ttl)

    async def outcome(
        self, tally: Tally, asked: Broadcast[Answer] | None, length: float
    ) -> Granted | Waiting | Gone:
        """Return what follows from the votes, once they are confirmed if they are enough."""
        if asked is not None:
            await asked.settled
        granted, asked, repeat_at = await self._confirm(tally, asked, length)
        if granted is not None:
            return granted
        if tally.token:
            # Confirmed by another call for the same request: of several such calls, one sends a message.
            extension = tally.extension
            if extension is None or extension.settled.done():
                extension = tally.extension = self._holding.extend(tally, length)
            return await self._holding.outcome(tally, extension)
        if asked is not None and (gone := self._gone(asked)) is not None:
            return gone
        if asked is not None and len(asked.answers) < self._nodes.majority:
            raise asked.failure(self._nodes.described, len(self._nodes.voters))
        lease = tally.request.terms.waiter_ttl
        if self._nodes.too_slow_for(lease):
            raise BackendUnavailable(
                f"{self._nodes.described}: the nodes answer too slowly for a lease of {lease:g} s; give "
                "the lock a longer ttl (and waiter_ttl)"
            )
        standing = [ballot for ballot in tally.ballots if ballot.stage is not None]
        looks = self._looks(standing, asked.answers if asked is not None else {})
        if repeat_at is not None:
            looks.append(repeat_at)
        return Waiting(tally.deadline(standing), min(looks, default=None))

    async def _confirm(
        self, tally: Tally, asked: Broadcast[Answer] | None, length: float
    ) -> tuple[Granted | None, Broadcast[Answer] | None, float | None]:
        """Write the token of a majority, if there is one.

        Return the grant, the last question for votes, and when the same token is to be written again.
        """
        for _ in range(_ATTEMPTS):
            if tally.token or not self._requests.has_majority(tally):
                break
            granted = await self._confirming.confirm(tally)
            if granted is not None:
                return granted, asked, None
            if self._confirming.took_back(tally):
                asked = self._messenger.ask(tally, length)
                await asked.settled
            elif not self._confirming.has_news(tally):
                # A node whose vote counts is away, say. The same token would meet the same answers.
                vain = tally.fence.vain
                return (
                    None,
                    asked,
                    now() + pause_after(vain, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE),
                )
        return None, asked, None

    def _gone(self, asked: Broadcast[Answer]) -> Gone | None:
        """Return why the request is gone, if so many nodes say so that no majority can know of it."""
        gone = [answer for answer in asked.answers.values() if isinstance(answer, Gone)]
        if len(gone) > len(self._nodes.voters) - self._nodes.majority:
            return worst_of(gone)
        return Gone("gone") if self._denies(asked) else None  # it is refused when it asks anew

    @staticmethod
    def _looks(standing: Sequence[Ballot], answered: Mapping[int, Answer]) -> list[float]:
        """Return the moments at which nodes are to be asked again.

        A silent node has told a moment once. When that has come, the node was asked, and is not asked for
        ever: its next answer tells another moment.
        """
        moment = now()
        return [
            ballot.look_at
            for ballot in standing
            if ballot.look_at is not None and (ballot.look_at > moment or ballot.node in answered)
        ]
