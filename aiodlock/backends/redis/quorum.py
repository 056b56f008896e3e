"""A quorum of independent servers: the Redlock algorithm (Antirez, 2015) with what it lacks.

Every server is a ``Voter`` with a queue of its own, ordered by tickets, so alike on all. All are asked at
once. Who has the votes of a majority writes its token to them, the largest that any of them proposed, and
holds when a majority took it. A vote that stands in the way of an older ticket is asked back, and given
back unless a majority is there: no split votes, no random retries (Maekawa 1985, corrected by Sanders
1987).
What the answers mean is in ``votes``; which servers may be believed in ``trust``.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Capabilities, Gone, Granted, Left, LockInfo, Refused, Request, Waiting
from ..._tasks import start_soon
from .._label import make_label
from ..base import Unanswered
from ..kept import Notices as Listener
from .calls import Outcome
from .refusals import refusal_in
from .seen import merge
from .settings import Settings
from .source import Source
from .trust import Trust
from .voter import ANSWER_WITHIN, Voter
from .votes import Answer, Ballot, Denied, Queued, Round, Tally

_logger = logging.getLogger("aiodlock")

_T = TypeVar("_T")

#: How long the others are waited for when a majority has answered, and has not decided.
_GRACE = 0.02
#: Rounds of writing a token, when a reader took the same one at the same time.
_ATTEMPTS = 5
_CONNECT_AGAIN = 1.0
_LEAVE_AGAIN = 0.2
_YIELD_AGAIN = 0.2
#: For how long a body runs on its lease as a waiter: most are over by then, and need no extension.
_EXTEND_AFTER = 0.01
_LONGEST_PAUSE = 2.0
#: How long entering waits for nodes that are not up when a majority is.
_WAIT_FOR_ALL = 0.5
_LOOK_AGAIN, _JUDGE_AGAIN = 0.1, 1.0
#: Clocks that are right are no further apart than this, and a queue's order need not tell them apart.
_SAME_TIME_US = 1_000_000
CAPABILITIES = Capabilities(
    fair="by ticket", semaphores=False, notices="hints", extend_after=_EXTEND_AFTER
)


@dataclass(slots=True)
class _Ear:
    """Hears the notices of one node."""

    quorum: QuorumBackend
    voter: Voter

    def on_granted(self, request_id: str, token: int, where: str) -> None:
        self.quorum.on_vote(self.voter, request_id, token, where)

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        raise NotImplementedError  # no node can say this by itself

    def on_look(self, request_id: str | None) -> None:
        self.quorum.on_look(self.voter, request_id)

    def on_other_server(self) -> None:
        self.quorum.on_look(self.voter, None)

    def on_back(self) -> None:
        pass  # a node that has forgotten something is noticed by its run id

    def on_broken(self, request_id: str, token: int) -> None:
        self.quorum.on_broken(self.voter, request_id, token)


@dataclass(slots=True)
class _Departure:
    """One leave, on its way to all nodes that were asked."""

    tally: Tally
    lost: bool
    done: Callable[[Left | BackendError], object]
    needed: int
    round: Round[Left] = field(init=False)
    #: Nodes that did not hear of it, until somebody goes on telling them.
    missed: list[Ballot] = field(default_factory=list)
    confirmed: bool = False


class QuorumBackend:
    """All nodes of a quorum, asked at once.

    Mutable state: ``_tallies`` (by request id, from before the first message until the first one to
    leave), ``_refusals`` (nodes that refuse this client, and why), ``_entering`` (until a majority is up),
    ``_doubles`` (nodes that turned out to be the same server as another), ``_believed`` (which nodes
    counted when last looked at), ``_last_ticket``, ``_departing``.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        *,
        restart_delay: float,
        described: str,
        label: str | None = None,
    ) -> None:
        self.capabilities: Capabilities = CAPABILITIES
        self.label: str = label or make_label()
        self._described = described
        self._majority = len(sources) // 2 + 1
        self._voters = [
            Voter(
                node,
                source,
                settings,
                self.label,
                restart_delay,
                on_restarted=self._on_restarted,
                on_met=self._on_met,
            )
            for node, source in enumerate(sources)
        ]
        self._tallies: dict[str, Tally] = {}
        self._refusals: dict[int, BackendError] = {}
        self._entering = True
        self._doubles: dict[int, str] = {}
        self._believed: list[bool] = []
        self._last_ticket = 0
        self._listener: Listener | None = None
        self._tasks: asyncio.TaskGroup | None = None
        # Leaves that were sent and not answered, and what wakes those who wait for that.
        self._departing = 0
        self._departed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<QuorumBackend {self._described}>"

    # -- life ------------------------------------------------------------------------------------

    async def run(self, listener: Listener, ready: Callable[[], None]) -> None:
        self._listener = listener
        self._entering = True
        came_up = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for voter in self._voters:
                    self._tasks.create_task(self._run_voter(voter, came_up))
                while sum(voter.up.is_set() for voter in self._voters) < self._majority:
                    came_up.clear()
                    await came_up.wait()
                # A new quorum is told by all of its nodes together.
                give_up_at = now() + _WAIT_FOR_ALL
                while now() < give_up_at and any(voter.connecting for voter in self._voters):  # noqa: ASYNC110
                    await asyncio.sleep(_WAIT_FOR_ALL / 50)
                if self._doubles:
                    raise BackendError(next(iter(self._doubles.values())))
                undecided = await self._judge()
                self._entering = False
                ready()
                while True:
                    await asyncio.sleep(_LOOK_AGAIN if undecided else _JUDGE_AGAIN)
                    undecided = await self._judge()
        finally:
            self._tasks = self._listener = None
            self._tallies.clear()

    async def _run_voter(self, voter: Voter, came_up: asyncio.Event) -> None:
        def on_up() -> None:
            self._refusals.pop(voter.node, None)
            voter.up.set()
            came_up.set()

        while True:
            try:
                await voter.server.run(_Ear(self, voter), on_up)
            except (BackendError, ExceptionGroup) as failed:
                error = refusal_in(failed)
                if error is not None:
                    self._on_refusal(voter, error, failed)
            voter.up.clear()
            await asyncio.sleep(_CONNECT_AGAIN * random.uniform(0.5, 1.0))

    def _on_refusal(self, voter: Voter, error: BackendError, failed: Exception) -> None:
        """Take a node that refuses this user for one that is away; while entering, unless too many do."""
        known = voter.node in self._refusals
        self._refusals[voter.node] = error
        # Of a node that could not be reached since, it is not known any more.
        others = [self._voters[node] for node in self._refusals if node != voter.node]
        refusing = [voter, *(other for other in others if not other.is_away)]
        if self._entering and len(refusing) > len(self._voters) - self._majority:
            raise error from failed
        level = logging.DEBUG if known else logging.WARNING
        _logger.log(level, "a node of the quorum: %s", error, extra={"event": "node_refuses"})

    async def _judge(self) -> bool:
        """Form an opinion of which nodes may be believed; return whether it is to be formed soon again."""
        nodes = [(voter.trust, voter.server.wire) for voter in self._voters]
        undecided = await Trust.judge(nodes, self._majority)
        before, self._believed = self._believed, [self._trusted(n) for n in range(len(nodes))]
        if before != self._believed and self._listener is not None:
            self._listener.on_look(None)
        return undecided

    @property
    def failure(self) -> Exception | None:
        """Why there is no majority of connections, if there is none."""
        failures = [voter.server.failure for voter in self._voters]
        missing = [failure for failure in failures if failure is not None]
        return missing[0] if len(missing) > len(self._voters) - self._majority else None

    def _trusted(self, node: int) -> bool:
        return self._voters[node].trust.given and node not in self._doubles

    def _on_met(self, met: Voter) -> None:
        """Let one server count once, under however many addresses it answers."""
        self._doubles, before = {}, self._doubles
        by_server: dict[bytes, Voter] = {}
        # Of two, the one that is connected counts.
        for voter in sorted(
            self._voters, key=lambda one: one.server.wire is None and one is not met
        ):
            if not voter.trust.server:
                continue
            other = by_server.setdefault(voter.trust.server, voter)
            if other is not voter:
                self._doubles[voter.node] = (
                    f"{other.server.described} and {voter.server.described} are the same server: "
                    "a quorum needs different ones, only one of these counts"
                )
        for node in self._doubles.keys() - before.keys():
            _logger.warning("%s", self._doubles[node], extra={"event": "node_twice"})

    def _on_restarted(self, voter: Voter) -> None:
        for tally in self._tallies.values():
            tally.ballots[voter.node].restarted()

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: Request, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        tally = self._tally(request)
        length = request.waiter_ttl
        self._confirm_owner(request)
        decided = partial(self._decided, tally)
        first = self._send(tally, "ask" if wait else "try", length, decided)
        await first.settled
        if wait and self._catches_up(tally):
            first = self._send(tally, "ask", length, decided)
            await first.settled
        denied = [answer for answer in first.answers.values() if isinstance(answer, Denied)]
        deadlock = self._denies(first)
        if deadlock or (denied and not wait and not self._voted(tally)):
            if len(denied) < len(self._voters):
                request.ambiguous = True  # others vote for it, or may: they have to be left
            else:
                self._forget(tally)
            return Refused("deadlock" if deadlock else "busy")
        answer = await self._outcome(tally, first, length)
        tally.waiting = isinstance(answer, Waiting)
        if wait or isinstance(answer, Granted | Gone):
            return answer
        request.ambiguous = True
        return Refused("busy")

    def _denies(self, round: Round[Answer]) -> bool:
        """Whether the owner holds shared by a majority; one node may not have heard yet that it left."""
        denied = [answer for answer in round.answers.values() if answer == Denied("deadlock")]
        return len(denied) >= self._majority

    def _confirm_owner(self, request: Request) -> None:
        """Let the nodes know, before they are asked for more, that the task asks for more than it holds."""
        holder = self._tallies.get(request.owner[1:])
        if holder is None or holder.request is request or not holder.token:
            return
        if any(ballot.stage == "v" for ballot in holder.ballots):
            self._send_held(holder, holder.token, holder.request.ttl)

    def extend(
        self, batch: Sequence[tuple[Request, float]]
    ) -> Sequence[Awaitable[Granted | Waiting | Gone]]:
        return [self._extend(request, length) for request, length in batch]

    def _extend(self, request: Request, length: float) -> Awaitable[Granted | Waiting | Gone]:
        tally = self._tallies.get(request.id)
        if tally is None:
            return Outcome(_gone)  # it left meanwhile: asking now would queue it again
        if tally.token:
            held = self._send_held(tally, tally.token, length)
            return Outcome(lambda: self._still_held(tally, held))
        if self._voted(tally):
            return Outcome(lambda: self._outcome(tally, None, length))
        asked = self._send(tally, "ask", length, partial(self._decided, tally))
        return Outcome(lambda: self._outcome(tally, asked, length))

    def server_of(self, request: Request) -> object:
        # Who may have to ask twice must not keep the others waiting.
        tally = self._tallies.get(request.id)
        return None if tally is not None and tally.token else request.id

    def _tally(self, request: Request) -> Tally:
        tally: Tally | None = request.tally
        if tally is None:
            tally = request.tally = Tally(request, self._ticket(), len(self._voters))
            self._tallies[request.id] = tally
        return tally

    def _forget(self, tally: Tally) -> None:
        """The request is over. The two know each other: they are not left to the collector."""
        self._tallies.pop(tally.request.id, None)
        tally.request.tally = None

    def _ticket(self) -> int:
        """Return a ticket that is later than all that this client knows of, in microseconds (Lamport 1978).

        By the latest of the nodes' clocks, not by a middle one: a clock that is wrong then moves everybody
        alike, whichever nodes one hears. Who has not heard it is told by the floors (``_catches_up``).
        """
        self._last_ticket = max(self._last_ticket + 1, self._latest_clock())
        return self._last_ticket

    def _latest_clock(self) -> int:
        moment = now()
        times = [voter.trust.time_at(moment) for voter in self._voters]
        return int(max((time for time in times if time is not None), default=0.0) * 1e6)

    def _catches_up(self, tally: Tally) -> bool:
        """Make the ticket later if the name's order is ahead of every clock that this client has heard.

        A node tells with each place the largest token, or ticket from its own future, that it knows of.
        Without this, who follows other clocks would always come before those who wait already.
        """
        latest = max(ballot.floor for ballot in tally.ballots)
        if latest <= tally.ticket or latest <= self._latest_clock() + _SAME_TIME_US:
            return False
        tally.ticket = self._last_ticket = max(latest, self._last_ticket) + 1
        tally.message = None
        return True

    def _send(
        self,
        tally: Tally,
        what: str,
        length: float,
        enough: Callable[[Round[Answer]], bool],
        *,
        token: int = 0,
        ballots: Sequence[Ballot] | None = None,
    ) -> Round[Answer]:
        """Send one message to every node (or those of the ballots)."""
        asked = tally.ballots if ballots is None else ballots
        round = Round[Answer](len(asked), self._majority, _GRACE, enough)
        for ballot in asked:
            voter = self._voters[ballot.node]
            hear = partial(self._hear, tally, ballot, round)
            if not voter.vote(tally, ballot, what, length, token, hear):
                round.take(ballot.node, voter.server.unreachable())
        return round

    def _hear(
        self, tally: Tally, ballot: Ballot, round: Round[Answer], answer: Answer | Exception
    ) -> None:
        waited_for = not round.settled.done()
        round.take(ballot.node, answer)
        if not tally.leaving:
            self._consider_giving_back(tally, ballot)
            if not waited_for:
                self._look_if_voted(tally)

    def _look_if_voted(self, tally: Tally) -> None:
        """An answer that nobody waits for may have made the majority."""
        if tally.token or tally.leaving or tally.fencing is not None or self._listener is None:
            return
        if self._voted(tally):
            self._listener.on_look(tally.request.id)

    def _voted(self, tally: Tally) -> bool:
        return tally.has_majority(self._trusted)

    def _decided(self, tally: Tally, _: Round[Answer]) -> bool:
        """Tell whether no further answer is needed: the token of an owner that holds is a majority's."""
        if not self._voted(tally):
            return False
        votes = tally.votes(self._trusted)
        return not any(vote.stage == "a" for vote in votes) or tally.token_of_owner(votes) > 0

    async def _outcome(
        self, tally: Tally, first: Round[Answer] | None, length: float
    ) -> Granted | Waiting | Gone:
        """Return what follows from the votes, once they are confirmed if they are enough."""
        if first is not None:
            await first.settled
        for _ in range(_ATTEMPTS):
            if tally.token or not self._voted(tally):
                break
            granted = await self._confirm(tally)
            if granted is not None:
                return granted
            if self._took_back(tally):
                first = self._send(tally, "ask", length, partial(self._decided, tally))
                await first.settled
        if tally.token:
            # Confirmed by another call for the same request.
            return await self._still_held(tally, self._send_held(tally, tally.token, length))
        answers = list(first.answers.values()) if first is not None else []
        gone = [answer for answer in answers if isinstance(answer, Gone)]
        if len(gone) > len(self._voters) - self._majority:
            return _worst(gone)
        if first is not None and self._denies(first):
            return Gone("gone")  # it is refused when it asks anew
        if first is not None and len(first.answers) < self._majority:
            raise _unanswered(self._described, first)
        standing = [ballot for ballot in tally.ballots if ballot.stage is not None]
        heard = first.answers if first is not None else {}
        moment = now()
        # A node that is silent has told a moment once. When it has come, the node was asked, and is not
        # asked for ever: its next answer tells another.
        looks = [
            ballot.look_at
            for ballot in standing
            if ballot.look_at is not None and (ballot.look_at > moment or ballot.node in heard)
        ]
        return Waiting(tally.deadline(standing), min(looks) if looks else None)

    async def _confirm(self, tally: Tally) -> Granted | None:
        """Write the token to the nodes that vote for the request; None if no majority took it."""
        fencing = tally.fencing
        if fencing is not None:  # another call for the same request is at it
            await fencing.settled
            return None
        votes = tally.votes(self._trusted)
        known = tally.token_of_owner(votes)
        token = known or max(self._least_token(votes), *(vote.token for vote in votes))
        # With ``max_hold`` a place may last longer than what follows it, and its deadline stands. These may
        # be other nodes than those that kept the place.
        length = max(tally.request.ttl, tally.request.waiter_ttl)
        fencing = tally.fencing = self._send(
            tally,
            "held" if known else "fence",
            length,
            lambda _: self._has_confirmed(tally, token),
            token=token,
            ballots=votes,
        )
        try:
            await fencing.settled
        finally:
            tally.fencing = None
        if not self._has_confirmed(tally, token):
            return None
        tally.token = token
        return Granted(token, tally.deadline(tally.confirmed(token, self._trusted)))

    def _least_token(self, votes: Sequence[Ballot]) -> int:
        return max(self._voters[vote.node].trust.least_token for vote in votes)

    def _took_back(self, tally: Tally) -> bool:
        """Whether nodes took a token that no majority took: they have to know that their votes are open."""
        if tally.token or tally.leaving or tally.fencing is not None or self._voted(tally):
            return False
        for ballot in tally.ballots:
            self._consider_giving_back(tally, ballot)  # it may have been asked back meanwhile
        return any(ballot.stage == "c" for ballot in tally.ballots)

    def _has_confirmed(self, tally: Tally, token: int) -> bool:
        return len(tally.confirmed(token, self._trusted)) >= self._majority

    # -- holding ---------------------------------------------------------------------------------

    def _send_held(self, tally: Tally, token: int, length: float) -> Round[Answer]:
        """Extend a holder; a node that has forgotten it, or never knew, is asked for its vote again."""
        enough = partial(self._kept_by_enough, tally)
        round = Round[Answer](len(tally.ballots), self._majority, _GRACE, enough)
        for ballot in tally.ballots:
            voter = self._voters[ballot.node]
            hear = partial(self._hear_held, ballot, round)
            if not voter.vote(tally, ballot, "held", length, token, hear):
                round.take(ballot.node, voter.server.unreachable())
        return round

    def _kept_by_enough(self, tally: Tally, round: Round[Answer]) -> bool:
        return len(self._kept(tally, round)) >= self._majority

    @staticmethod
    def _hear_held(ballot: Ballot, round: Round[Answer], answer: Answer | Exception) -> None:
        if not isinstance(answer, Exception) and ballot.stage != "c":
            ballot.healing = True
        round.take(ballot.node, answer)

    def _kept(self, tally: Tally, round: Round[Answer]) -> list[Ballot]:
        """Return the votes that this round has extended, and that were never interrupted."""
        confirmed = tally.confirmed(tally.token, self._trusted)
        return [vote for vote in confirmed if vote.node in round.answers and not vote.healing]

    async def _still_held(self, tally: Tally, round: Round[Answer]) -> Granted | Gone:
        await round.settled
        kept = self._kept(tally, round)
        if len(kept) >= self._majority:
            confirmed = tally.confirmed(tally.token, self._trusted)
            for vote in confirmed:
                vote.healing = False  # the others alone suffice, so nobody was in between
            return Granted(tally.token, tally.deadline(confirmed))
        silent = len(self._voters) - len(round.answers)
        if len(kept) + silent < self._majority:
            gone = [answer for answer in round.answers.values() if isinstance(answer, Gone)]
            queued = any(isinstance(answer, Queued) for answer in round.answers.values())
            return _worst(gone) if gone or not queued else Gone("taken_over")
        raise _unanswered(self._described, round)

    # -- leaving ---------------------------------------------------------------------------------

    async def leave(
        self, request: Request, *, lost: bool = False, within: float | None = None
    ) -> Left:
        left = asyncio.get_running_loop().create_future()
        self._depart(request, lost, False, partial(_give, left))
        result: Left | BackendError = await left
        if isinstance(result, BackendError):
            raise result
        return result

    def leave_later(
        self, request: Request, done: Callable[[Left | BackendError], object], *, lost: bool = False
    ) -> bool:
        # In the caller's context, as the hooks that it calls expect.
        context = contextvars.copy_context()
        self._depart(request, lost, True, lambda result: context.run(done, result))
        return True

    def _depart(
        self,
        request: Request,
        lost: bool,
        later: bool,
        done: Callable[[Left | BackendError], object],
    ) -> None:
        """Leave every node that was ever asked; those that do not answer are asked again later on."""
        tally = self._tally(request)
        tally.leaving = True
        self._tallies.pop(request.id, None)
        asked = [ballot for ballot in tally.ballots if ballot.asked]
        departure = _Departure(tally, lost, done, min(self._majority, len(asked)))
        enough, then = partial(self._suffices, tally), partial(self._on_departed, departure)
        round = departure.round = Round(len(asked), self._majority, _GRACE, enough, then)
        away: list[tuple[Ballot, BackendUnavailable]] = []
        for ballot in asked:
            voter = self._voters[ballot.node]
            hear = partial(self._hear_left, departure, ballot)
            if voter.unvote(tally, ballot, lost, later, hear):
                self._departing += 1
            else:
                away.append((ballot, voter.server.unreachable()))
        if len(away) < len(asked):
            for ballot, error in away:
                departure.missed.append(ballot)
                round.take(ballot.node, error)
            return
        failures = [error for _, error in away]
        nothing = _too_few(self._described, 0, failures) if asked else tally.left({})
        if not asked:
            self._forget(tally)
        asyncio.get_running_loop().call_soon(done, nothing)

    def _suffices(self, tally: Tally, round: Round[Left]) -> bool:
        return len(round.answers) >= self._majority and tally.left_for_certain(round.answers)

    def _hear_left(self, departure: _Departure, ballot: Ballot, answer: Any) -> None:
        self._departing -= 1
        self._departed.set()
        ballot.leave(answer)
        if isinstance(answer, Exception):
            departure.missed.append(ballot)
        departure.round.take(ballot.node, answer)
        if departure.confirmed and departure.missed:
            self._leave_missed(departure)

    def _on_departed(self, departure: _Departure) -> None:
        round = departure.round
        if len(round.answers) < departure.needed:
            departure.done(_unanswered(self._described, round))
            return
        departure.confirmed = True
        self._forget(departure.tally)
        self._leave_missed(departure)
        departure.done(departure.tally.left(round.answers))

    def _leave_missed(self, departure: _Departure) -> None:
        missed, departure.missed = departure.missed, []
        for ballot in missed:
            voter = self._voters[ballot.node]
            leaving = self._leave_at(voter, departure.tally, ballot, departure.lost)
            start_soon(self._tasks, leaving)

    async def _leave_at(self, voter: Voter, tally: Tally, ballot: Ballot, lost: bool) -> None:
        """Leave one node that did not answer, until it does or has surely dropped the request."""
        give_up_at = now() + tally.longest + tally.request.lock_delay
        pause = _LEAVE_AGAIN
        while now() < give_up_at:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ballot.ambiguous = True
            sent = voter.unvote(tally, ballot, lost, False, partial(_give, answer))
            if sent and not isinstance(await answer, Exception):
                return

    async def settle(self) -> None:
        """A leave returns when a majority has answered; the others must not keep votes of who is gone."""
        with anyio.move_on_after(2 * ANSWER_WITHIN):
            while self._departing:
                self._departed.clear()
                await self._departed.wait()

    async def leave_unknown(self, request_id: str, where: str) -> None:
        await self._all(lambda voter: voter.leave_unknown(request_id, where))

    # -- what the nodes say by themselves ------------------------------------------------------------

    def on_vote(self, voter: Voter, request_id: str, token: int, where: str) -> None:
        """A notice: this node votes for the request now."""
        tally = self._tallies.get(request_id)
        if tally is None:
            start_soon(self._tasks, self._leave_unknown(voter, request_id, where))
            return
        tally.ballots[voter.node].notice(token)
        if tally.token or tally.fencing is not None or self._listener is None:
            return
        if not self._voted(tally):
            return
        agreed = tally.agreed(tally.votes(self._trusted)) if tally.waiting else []
        if agreed and agreed[0].token >= self._least_token(agreed):
            tally.token = agreed[0].token
            self._listener.on_held(request_id, tally.token, tally.deadline(agreed))
        else:
            self._listener.on_look(request_id)

    async def _leave_unknown(self, voter: Voter, request_id: str, where: str) -> None:
        try:
            await voter.leave_unknown(request_id, where)
        except BackendError as error:
            _logger.warning(
                "giving back an unknown vote failed, it ends by itself: %r",
                error,
                extra={"event": "unknown_grant"},
            )

    def on_look(self, voter: Voter, request_id: str | None) -> None:
        """A hint: the vote of this node is asked back, or there is something to see."""
        tally = self._tallies.get(request_id) if request_id is not None else None
        if tally is not None:
            ballot = tally.ballots[voter.node]
            if ballot.stage == "v" and not tally.token:
                ballot.asked_back = True
                self._consider_giving_back(tally, ballot)
                return
        if self._listener is not None:
            self._listener.on_look(request_id)

    def on_broken(self, voter: Voter, request_id: str, token: int) -> None:
        """An operator broke the lease, or at this node a vote that might have become one."""
        tally = self._tallies.get(request_id)
        if tally is not None:
            tally.ballots[voter.node].lose(token)
        if self._listener is not None:
            self._listener.on_broken(request_id, token)
            self._listener.on_look(request_id)  # a waiter stays: it queues there again

    def _consider_giving_back(self, tally: Tally, ballot: Ballot) -> None:
        """Give the vote back that an older request waits for, unless a majority is there.

        Once that is said, the vote does not count, so it is said again until the node has heard it: the
        older request may be gone by then, and nobody would ask for the vote any more.
        """
        if tally.token or tally.fencing is not None or tally.leaving or ballot.yielding:
            return
        wanted = ballot.asked_back and ballot.stage == "v" and not self._voted(tally)
        if wanted or ballot.disowned:
            ballot.asked_back = False
            hear = partial(self._hear_given_back, tally, ballot)
            self._voters[ballot.node].give_back(tally, ballot, hear)

    def _hear_given_back(self, tally: Tally, ballot: Ballot, answer: Answer | Exception) -> None:
        if isinstance(answer, Exception):
            loop = asyncio.get_running_loop()
            loop.call_later(_YIELD_AGAIN, self._give_back_again, tally, ballot)
        else:
            self._look_if_voted(tally)  # nobody waited for the vote any more: it was given anew

    def _give_back_again(self, tally: Tally, ballot: Ballot) -> None:
        ballot.yielding = False
        self._consider_giving_back(tally, ballot)

    def watch(self, request: Request, watching: bool) -> None:
        for voter in self._voters:
            voter.watch(request, watching)

    def announce(self, kind: str, name: str) -> None:
        for voter in self._voters:
            voter.announce(kind, name)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        stops = [voter.observe(kind, name, changed) for voter in self._voters]

        def stop() -> None:
            for one in stops:
                one()

        return stop

    # -- for people ------------------------------------------------------------------------------

    async def inspect(self, kind: str, name: str) -> LockInfo:
        seen = await self._all(lambda voter: voter.seen(kind, name))
        return merge(name, seen, len(self._voters))

    async def inspect_all(self, kind: str, names: Sequence[str]) -> list[LockInfo]:
        return await asyncio.gather(*(self.inspect(kind, name) for name in names))

    async def names(self, match: str) -> AsyncIterator[str]:
        found = await self._all(lambda voter: _collected(voter.names(match)))
        for name in sorted(set().union(*found)):
            yield name

    async def break_lock(self, name: str) -> int:
        broken = await self._all(lambda voter: voter.break_votes(name))
        return len(set().union(*broken))

    async def _all(self, call: Callable[[Voter], Coroutine[Any, Any, _T]]) -> list[_T]:
        """Call every node; return the answers when a majority has given one."""
        answers: list[_T] = []
        failures: list[BackendError] = []

        async def one(voter: Voter) -> None:
            try:
                async with asyncio.timeout(2 * ANSWER_WITHIN):
                    answers.append(await call(voter))
            except BackendError as error:
                failures.append(error)
            except TimeoutError:
                failures.append(Unanswered(f"{voter!r} did not answer in time"))

        connected = [voter for voter in self._voters if voter.server.wire is not None]
        async with anyio.create_task_group() as tasks:
            for voter in connected if len(connected) >= self._majority else self._voters:
                tasks.start_soon(one, voter)
        if len(answers) < self._majority:
            refused = [error for error in failures if not isinstance(error, BackendUnavailable)]
            raise refused[0] if refused else _too_few(self._described, len(answers), failures)
        return answers


async def _gone() -> Gone:
    return Gone("gone")


async def _collected(names: AsyncIterator[str]) -> set[str]:
    return {name async for name in names}


def _give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _worst(gone: Iterable[Gone]) -> Gone:
    reasons = [answer.reason for answer in gone]
    return Gone(next((known for known in ("broken", "expired") if known in reasons), "gone"))


def _unanswered(described: str, round: Round[Any]) -> BackendError:
    refused = [
        error
        for error in round.failures
        if isinstance(error, BackendError) and not isinstance(error, BackendUnavailable)
    ]
    return refused[0] if refused else _too_few(described, len(round.answers), round.failures)


def _too_few(described: str, answers: int, failures: Sequence[Exception]) -> Unanswered:
    # With none, the others have answered, are too few, and who is silent was not waited for.
    why = failures[0] if failures else "the others did not answer in time"
    error = Unanswered(f"{described}: {answers} nodes answered, which does not suffice: {why}")
    error.__cause__ = failures[0] if failures else None
    return error
