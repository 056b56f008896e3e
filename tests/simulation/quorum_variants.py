"""More broken quorums: tokens that an operator broke, and hand-overs that ask. See ``variants.py``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiodlock
from aiodlock._model import first_request
from aiodlock._session import Session
from aiodlock.backends.redis.quorum import asking, votes
from aiodlock.backends.redis.quorum.confirming import Confirming
from aiodlock.backends.redis.quorum.notices import NodeNotices
from aiodlock.backends.redis.quorum.votes import Ballot, Tally

from .handover import HandOver
from .quorum import QuorumSimulation
from .scenario import Simulation
from .server import Command
from .variants import Variant
from .variants import _both as both
from .variants import _faults as faults
from .variants import _nodes as nodes


def _agree_on_broken_votes(simulation: Simulation) -> None:
    """Hold by the same token of a majority although an operator broke a vote with it."""

    def agreed(self: Tally, counting: Sequence[Ballot]) -> list[Ballot]:
        request = self.request
        if request.terms.lock_delay or first_request(request.owner) != request.id:
            return []
        for vote in counting[: len(self.ballots) - self.majority + 1]:
            same = [one for one in counting if one.token == vote.token and one.stage != "a"]
            if len(same) >= self.majority:
                return same
        return []

    simulation.patch(Tally, "agreed", agreed)


def _confirm_what_was_broken(simulation: Simulation) -> None:
    """Hold as soon as a majority took the token, although an operator broke it at another node."""

    def has_confirmed(self: Confirming, tally: Tally, token: int, known: int) -> bool:
        return len(tally.confirmed(token, self._nodes.is_trusted)) >= self._nodes.majority

    simulation.patch(Confirming, "_has_confirmed", has_confirmed)


def _hold_what_was_broken(simulation: Simulation) -> None:
    """Go on holding when a node tells that an operator broke the lease, until an extension is refused."""

    def on_broken(self: NodeNotices, request_id: str, token: int) -> None:
        tally = self._requests.get(request_id)
        if tally is None or not tally.token:
            heard(self, request_id, token)

    heard = NodeNotices.on_broken
    simulation.patch(NodeNotices, "on_broken", on_broken)


def _break_at_hand_overs(simulation: Simulation) -> None:
    """Let an operator break what is just handed over; some messages take long."""
    assert isinstance(simulation, QuorumSimulation)
    chance = random.Random(simulation.seed)
    seen: set[str] = set()

    def executed(command: Command, reply: Any) -> None:
        left = command.script == "unvote" and not command.yields
        if left and command.id not in seen:
            seen.add(command.id)
            if chance.random() < 0.5:
                simulation.world.after(chance.uniform(0.0, 0.02), strike)

    def strike() -> None:
        sessions = simulation.checkers.sessions
        here = [process for process, some in sessions.items() if some and process.running]
        if here and simulation.world.time < simulation.chaos_ends:
            process = chance.choice(here)
            process.start(_broken(sessions[process][0]))

    for node in simulation.nodes:
        node.executed.append(executed)


def _hears_late_of_all_but_one(simulation: Simulation) -> None:
    """Let what nodes say take longer to the first process, but for one node."""
    assert isinstance(simulation, QuorumSimulation)
    late = random.Random(simulation.seed).uniform(0.02, 0.1)

    def slow_down() -> None:
        for network in simulation.networks[1:]:
            for conn in network.connections_of(simulation.world.processes[0]):
                conn.behind = late

    simulation.world.at(0.3, slow_down)


async def _broken(session: Session) -> None:
    with suppress(aiodlock.LockError):
        await session.backend.break_lock("n0")


def _mind_the_mark(simulation: Simulation) -> None:
    """Take a task's owner for another's when its request has a timeout."""

    def first_of(owner: str) -> str | None:
        return owner[1:] if owner.startswith("t") else None

    simulation.patch(votes, "first_request", first_of)
    simulation.patch(asking, "first_request", first_of)


#: An operator breaks what is just handed over, and one client hears of it from one node first.
broken_at_hand_overs = both(
    _break_at_hand_overs,
    _hears_late_of_all_but_one,
    faults(hold=0.2),
    nodes(breaks=0.0, ttls=(2.0,), waiter_ttl=2.0, tasks=1, cancels=0.0),
)

QUORUM_VARIANTS = {
    "quorum: held by votes of which one was broken": Variant(
        both(_agree_on_broken_votes, broken_at_hand_overs),
        ("token", "exclusion", "kept"),
        kind=QuorumSimulation,
    ),
    "quorum: a token is confirmed although it was broken": Variant(
        both(_confirm_what_was_broken, broken_at_hand_overs),
        ("token", "exclusion", "kept"),
        seed=20,  # one of 130 is caught: a waiter has to hear of the break in between
        kind=QuorumSimulation,
    ),
    "quorum: a holder goes on when it hears of a break": Variant(
        both(_hold_what_was_broken, broken_at_hand_overs),
        ("exclusion", "kept"),
        kind=QuorumSimulation,
    ),
    "quorum: a hand-over to a request with a timeout asks": Variant(
        _mind_the_mark, ("asks",), kind=HandOver
    ),
}
