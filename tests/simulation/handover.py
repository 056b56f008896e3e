"""Nothing goes wrong, and the next one waits at every node when the holder leaves: then it asks nobody.

asks        who has waited at all nodes for a while when the holder leaves, sends nothing to any node before
            its body begins, whether it has a timeout or not
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import aiodlock
from aiodlock._request import HELD, WAITING
from aiodlock._session import Session
from aiodlock.backends.redis.quorum.voter import Voter
from aiodlock.backends.redis.quorum.votes import Ballot, Tally

from .quorum import QuorumSimulation
from .scenario import SimClient, Simulation
from .server import Command, SimServer
from .world import Process

#: Leases are extended later than anybody waits.
_LASTING = 60.0
#: Longer than a request and its answer take to all nodes and back.
_SETTLED = 0.1
#: Longer than clients that enter together need to agree that the quorum is new: then waiters look again.
_JUDGED = 1.5
_TURNS = 5
_STATE = b"aiodlock:2:lock:{n0}:state"


def _all_well(simulation: Simulation) -> None:
    assert isinstance(simulation, QuorumSimulation)
    simulation.deaths, simulation.wrong_clocks = {}, {}


def _has_vote(node: SimServer, id: str) -> bool:
    if node.votes is None:
        state = node.db.get(_STATE)
        return state is not None and id.encode() in state.value._values
    name = node.votes.names.get(_STATE)
    return name is not None and id in name.state.fields


class HandOver(QuorumSimulation):
    """One seed. Mutable state besides: ``_waits_since`` (by request id),
    ``_left_at`` (when a holder's leave reached a node last), ``_asked_at`` (by request id: when a node was
    asked), ``_has_votes`` (the requests that do not wait at all nodes), ``_held`` (those that have come to
    hold)."""

    reads_late = 0.0

    def __init__(
        self, seed: int, prepare: Callable[[Simulation], None] | None = None, **options: Any
    ) -> None:
        super().__init__(seed, _all_well, **options)
        self.style = replace(
            self.style,
            processes=self.random.choice((1, 2, 3)),
            tasks=2,
            names=1,
            ttls=(_LASTING,),
            waiter_ttl=_LASTING,
            delays=(0.0,),
            shared=0.0,
            faults=(),
            breaks=0.0,
            named_owners=0.0,
        )
        self._waits_since: dict[str, float] = {}
        self._left_at = 0.0
        self._asked_at: dict[str, float] = {}
        self._has_votes: set[str] = set()
        self._held: set[str] = set()
        self.restart_delay = _LASTING
        for node in self.nodes:
            node.executed.append(self._executed)
        self.world.after_turn.append(self._look)
        if prepare is not None:
            prepare(self)

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        rng = self.random
        await asyncio.sleep(_JUDGED)
        for _ in range(_TURNS):
            timeout = rng.choice((None, 30.0))
            async with client.lock("n0", timeout=timeout):
                await asyncio.sleep(rng.uniform(0.5, 2.0) * _SETTLED)

    # -- what must hold ----------------------------------------------------------------------------

    def _executed(self, command: Command, reply: Any) -> None:
        if command.script == "unvote" and command.arguments[1] != b"yield":
            self._left_at = self.world.time
        elif command.script == "vote":
            self._asked_at[command.id] = self.world.time

    def _look(self, process: Process) -> None:
        for session in self.checkers.sessions.get(process, ()):
            for request in session.requests.values():
                if request.state is WAITING and request.id not in self._waits_since:
                    self._waits_since[request.id] = self.world.time
                    self.world.after(_SETTLED, self._look_for_votes, request.id)
                elif request.state is HELD and request.id not in self._held:
                    self._held.add(request.id)
                    self._check(process, request.id)

    def _look_for_votes(self, id: str) -> None:
        """Those who ask together each get some votes, give them back, and ask again. Who keeps one that is
        newer than those of the holder has to tell its token to the other nodes."""
        if any(_has_vote(node, id) for node in self.nodes):
            self._has_votes.add(id)

    def _check(self, process: Process, id: str) -> None:
        settled = self._waits_since.get(id, inf) + _SETTLED
        if settled > self._left_at or id in self._has_votes:
            return
        self.outcomes["handed over"] = self.outcomes.get("handed over", 0) + 1
        if self._asked_at[id] > settled:
            self.checkers.wrong(
                "asks", f"{process}: {id} waits since {settled:.3f}, and asked again"
            )


class BrokenHandOver(HandOver):
    """An operator breaks the name several times at each hand-over: waiters ask on, and no node in a hurry.

    questions   a node has one question of a waiter to answer at a time, and few within a fifth of a second

    Mutable state besides: ``_asked`` (by node and request: when), ``most`` (within a fifth of a second).
    """

    #: Breaks of the name per holder that leaves, within so many seconds.
    _BREAKS, _WITHIN = 6, 0.2
    #: Questions to one node within a fifth of a second: those at once, those that come later and later, and
    #: as many again for what follows from an answer.
    _MOST = 20

    def __init__(
        self, seed: int, prepare: Callable[[Simulation], None] | None = None, **options: Any
    ) -> None:
        super().__init__(seed, **options)
        self._chance = random.Random(seed)
        self._asked: dict[tuple[int, str], deque[float]] = {}
        self._left: set[str] = set()
        self.most: int = 0
        for number, node in enumerate(self.nodes):
            node.executed.append(partial(self._count_question, number))
        self._watch_messages()
        if prepare is not None:
            prepare(self)

    def _watch_messages(self) -> None:
        vote, checkers = Voter.vote, self.checkers
        on_their_way: set[Ballot] = set()

        def watched(
            self: Voter,
            tally: Tally,
            ballot: Ballot,
            what: str,
            length: float,
            token: int,
            on_answer: Callable[[Any], None],
            on_late: Callable[[Any], None],
        ) -> bool:
            if what != "ask":
                return vote(self, tally, ballot, what, length, token, on_answer, on_late)
            if ballot in on_their_way:
                checkers.wrong(
                    "questions", f"{tally.request.id} asks node {ballot.node} twice at once"
                )

            def answered(answer: Any) -> None:
                on_their_way.discard(ballot)
                on_answer(answer)

            on_their_way.add(ballot)
            sent = vote(self, tally, ballot, what, length, token, answered, on_late)
            if not sent:
                on_their_way.discard(ballot)
            return sent

        self.patch(Voter, "vote", watched)

    async def _work(self, process: Process, client: SimClient, over: asyncio.Event) -> None:
        for _ in range(_TURNS):
            with suppress(aiodlock.LockError):
                async with client.lock("n0", timeout=self.random.choice((None, 30.0))):
                    await asyncio.sleep(self.random.uniform(0.5, 2.0) * _SETTLED)

    def _count_question(self, number: int, command: Command, reply: Any) -> None:
        if command.script == "vote" and command.arguments[7] == b"ask":
            asked = self._asked.setdefault((number, command.id), deque())
            asked.append(self.world.time)
            while asked[0] < self.world.time - 0.2:
                asked.popleft()
            self.most = max(self.most, len(asked))
            if len(asked) > self._MOST:
                self.checkers.wrong("questions", f"{command} is the {len(asked)}th within 0.2 s")
        left = command.script == "unvote" and command.arguments[1] != b"yield"
        if left and command.id not in self._left:
            self._left.add(command.id)
            for _ in range(self._BREAKS):
                self.world.after(self._chance.uniform(0.0, self._WITHIN), self._break)

    def _break(self) -> None:
        sessions = self.checkers.sessions
        here = [process for process, some in sessions.items() if some and process.running]
        if here:
            process = self._chance.choice(here)
            process.start(self._break_by(sessions[process][0]))

    async def _break_by(self, session: Session) -> None:
        with suppress(aiodlock.LockError):
            await session.backend.break_lock("n0")

    def _check(self, process: Process, id: str) -> None:
        """Who is broken may ask."""
