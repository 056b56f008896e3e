"""The nodes of a quorum: which are connected, which refuse this client, and which may be believed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

import anyio

from ...._clock import now
from ...._errors import BackendError, BackendUnavailable
from ...kept import Notices
from ..refusals import refusal_in
from ..settings import Settings
from ..source import Source
from .broadcast import failure_of
from .delays import Delays
from .trust import judge
from .voter import Voter
from .votes import Ballot

_logger = logging.getLogger("aiodlock")

_NEVER = float("inf")
_CONNECT_AGAIN = 1.0
#: How long entering waits for nodes that are not connected when a majority is (seconds).
_WAIT_FOR_ALL = 0.5
#: Between two judgements; the shorter one while some nodes are undecided (seconds).
_JUDGE_SOON, _JUDGE_AGAIN = 0.1, 1.0
#: So often nodes are told and asked which leases are in use (seconds).
_TELL_AGAIN = 10.0


class Nodes:
    """All nodes.

    Mutable state: ``_refusals`` (nodes that refuse this client, and why), ``_entering`` (until a majority
    is connected), ``_leaving`` (set when ``run`` ends), ``doubles`` (nodes that turned out to be the same
    server as another one), ``_believed`` (which nodes counted when they were judged last),
    ``_is_distrusted`` (no majority counted then), ``_could_count`` (a request could have counted votes
    then), ``_tell_again_at`` (when nodes are told and asked again which leases are in use).

    :param on_restarted: called when another server, or an empty one, answers at a node's address.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        settings: Settings,
        label: str,
        restart_delay: float | None,
        described: str,
        on_restarted: Callable[[Voter], None],
    ) -> None:
        self.described = described
        self.majority: int = len(sources) // 2 + 1
        self.delays: Delays = Delays(restart_delay)
        self.voters: list[Voter] = [
            Voter(
                node,
                source,
                settings,
                label,
                self.delays,
                on_restarted=on_restarted,
                on_met=self._on_met,
            )
            for node, source in enumerate(sources)
        ]
        self._refusals: dict[int, BackendError] = {}
        self._entering = True
        self._leaving = False
        self.doubles: dict[int, str] = {}
        self._believed: list[bool] = []
        self._is_distrusted = False
        self._could_count = True
        self._tell_again_at = 0.0
        self._telling = asyncio.Lock()

    def follow(self, dead: Nodes) -> None:
        """Know the nodes, and the leases in use, as the session of this client did that has died."""
        self.delays = dead.delays
        for voter, before in zip(self.voters, dead.voters, strict=True):
            voter.trust = before.trust

    # -- connections -------------------------------------------------------------------------------

    async def run(
        self,
        tasks: asyncio.TaskGroup,
        notices: Callable[[Voter], Notices],
        ready: Callable[[], None],
        on_trust_changed: Callable[[], None],
    ) -> None:
        """Keep the nodes connected and judge them, until cancelled; see ``KeptStore.run``."""
        self._entering, self._leaving = True, False
        came_up = asyncio.Event()
        for voter in self.voters:
            tasks.create_task(self._run_voter(voter, notices(voter), came_up))
        try:
            await self._judge_all(came_up, ready, on_trust_changed)
        finally:
            self._leaving = True

    async def _judge_all(
        self,
        came_up: asyncio.Event,
        ready: Callable[[], None],
        on_trust_changed: Callable[[], None],
    ) -> None:
        while sum(voter.up.is_set() for voter in self.voters) < self.majority:
            came_up.clear()
            await came_up.wait()
        # Only all nodes together can tell whether a quorum is new.
        give_up_at = now() + _WAIT_FOR_ALL
        while now() < give_up_at and any(voter.connecting for voter in self.voters):  # noqa: ASYNC110
            await asyncio.sleep(_WAIT_FOR_ALL / 50)
        if self.doubles:
            raise BackendError(next(iter(self.doubles.values())))
        await self._tell_lengths(len(self.voters))
        undecided = await self._judge(on_trust_changed)
        self._entering = False
        ready()
        while True:
            await asyncio.sleep(_JUDGE_SOON if undecided else _JUDGE_AGAIN)
            undecided = await self._judge(on_trust_changed)

    async def _run_voter(self, voter: Voter, notices: Notices, came_up: asyncio.Event) -> None:
        def on_up() -> None:
            self._refusals.pop(voter.node, None)
            voter.up.set()
            came_up.set()

        while True:
            try:
                await voter.server.run(notices, on_up)
            except (BackendError, ExceptionGroup) as failed:
                if self._leaving:
                    return  # it was cancelled, which a task group that fails keeps to itself
                error = refusal_in(failed)
                if error is not None:
                    self._on_refusal(voter, error)
            finally:
                voter.up.clear()
            await asyncio.sleep(_CONNECT_AGAIN * random.uniform(0.5, 1.0))

    def _on_refusal(self, voter: Voter, error: BackendError) -> None:
        """Treat a node that refuses this user as unreachable; while entering, unless too many do."""
        known = voter.node in self._refusals
        self._refusals[voter.node] = error
        # Whether a node still refuses this client is unknown if it could not be reached since.
        others = [self.voters[node] for node in self._refusals if node != voter.node]
        refusing = [voter, *(other for other in others if not other.is_unreachable)]
        if self._entering and len(refusing) > len(self.voters) - self.majority:
            raise error
        level = logging.DEBUG if known else logging.WARNING
        _logger.log(level, "a node of the quorum: %s", error, extra={"event": "node_refuses"})

    @property
    def failure(self) -> Exception | None:
        """Why there is no majority of connections, or none that counts, if there is none."""
        failures = [voter.server.failure for voter in self.voters]
        missing = [failure for failure in failures if failure is not None]
        if len(missing) > len(self.voters) - self.majority:
            return missing[0]
        return self.distrust

    # -- trust -------------------------------------------------------------------------------------

    @property
    def distrust(self) -> BackendUnavailable | None:
        """Why no majority counts, if none does."""
        late = [voter for voter in self.voters if not self.is_trusted(voter.node)]
        if len(late) <= len(self.voters) - self.majority:
            return None
        lacking = self.majority - (len(self.voters) - len(late))
        counts_at = sorted(
            _NEVER if voter.node in self.doubles else voter.trust.counts_at for voter in late
        )[lacking - 1]
        until = "" if counts_at == _NEVER else f" for another {max(0.0, counts_at - now()):.1f} s"
        return BackendUnavailable(
            f"{self.described}: {len(late)} nodes do not count yet{until}: they were met for the first "
            "time, were restarted, or their clocks stepped"
        )

    def keeps(self, node: int) -> bool:
        """Tell whether what a node says of a holder's vote, which it has kept, counts."""
        return self.voters[node].trust.keeps and node not in self.doubles

    def can_count(self, lease: float) -> bool:
        """Tell whether votes of a majority can be counted within such a lease (seconds).

        They cannot when nodes do not count, are not connected, or answer too late.
        """
        usable = [
            voter
            for voter in self.voters
            if voter.server.wire is not None
            and voter.patience.expected < lease
            and self.is_trusted(voter.node)
        ]
        return len(usable) >= self.majority

    def too_slow_for(self, lease: float) -> bool:
        """Tell whether answers alone take too long for votes to be counted within such a lease."""
        return not self.can_count(lease) and self.can_count(_NEVER)

    @property
    def patience(self) -> float:
        """How long a majority of the nodes needs for its answers, while it answers (seconds)."""
        return sorted(voter.patience.usual for voter in self.voters)[self.majority - 1]

    # -- leases in use -------------------------------------------------------------------------------

    async def note(self, length: int) -> None:
        """See that a majority knows that such leases are in use, before the first one counts.

        :param length: see ``length_of``.
        :raises BackendUnavailable: too few nodes have answered.
        """
        if not self.delays.use(length):
            return
        async with self._telling:
            if not self.delays.use(length):
                return
            answered, failures = await self._tell_lengths(self.majority)
            if answered < self.majority:
                failures += [f for voter in self.voters if (f := voter.server.failure) is not None]
                raise failure_of(self.described, len(self.voters), answered, failures)

    async def _tell_lengths(self, needed: int) -> tuple[int, list[Exception]]:
        """Tell the nodes which leases are in use, and hear it from them.

        Return how many have answered, and why others have not.

        :param needed: the others are not waited for when so many have.
        """
        told, sent = self.delays.to_note(), now()
        kept: list[dict[int, int]] = []
        failures: list[Exception] = []

        async def tell(voter: Voter) -> None:
            try:
                kept.append(self.delays.hear(await voter.tell_lengths(told)))
            except (BackendError, TimeoutError, ValueError, TypeError) as failed:
                _logger.debug("%r: %s", voter, failed)
                failures.append(failed)
                return
            if len(kept) >= needed:
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for voter in self.voters:
                if voter.server.wire is not None:
                    tasks.start_soon(tell, voter)
        self.delays.on_told(kept, sent, self.majority)
        return len(kept), failures

    async def _share_lengths(self) -> None:
        unsettled = [voter.trust for voter in self.voters if voter.trust.unsettled]
        if not unsettled and not self.delays.is_due and now() < self._tell_again_at:
            return
        # Not in turns with ``note``, which a silent node would keep waiting.
        answered, _ = await self._tell_lengths(len(self.voters))
        self._tell_again_at = now() + _TELL_AGAIN * random.uniform(0.8, 1.0)
        if answered >= self.majority:
            for trust in unsettled:
                trust.settle()

    def is_trusted(self, node: int) -> bool:
        """Tell whether the votes of a node count."""
        return self.voters[node].trust.given and node not in self.doubles

    def least_token(self, votes: Sequence[Ballot]) -> int:
        """Return the smallest token that a request may hold with by these votes; see ``Trust``."""
        return max(self.voters[vote.node].trust.least_token for vote in votes)

    async def _judge(self, on_trust_changed: Callable[[], None]) -> bool:
        """Decide which nodes may be believed; return whether that is to be done again soon."""
        await self._share_lengths()
        nodes = [(voter.trust, voter.server.wire) for voter in self.voters]
        undecided = await judge(nodes, self.majority)
        before, self._believed = self._believed, [self.is_trusted(n) for n in range(len(nodes))]
        could, self._could_count = self._could_count, self.can_count(_NEVER)
        if before != self._believed or could != self._could_count:
            on_trust_changed()
        distrust, known = self.distrust, self._is_distrusted
        # While that is not decided, it is not news yet.
        self._is_distrusted = distrust is not None and (known or not undecided)
        if distrust is not None and not undecided and not known:
            _logger.warning("%s", distrust, extra={"event": "quorum_distrusted"})
        return undecided

    def _on_met(self, met: Voter) -> None:
        """Let one server count once, however many addresses lead to it."""
        self.doubles, before = {}, self.doubles
        by_server: dict[bytes, Voter] = {}
        # Of two, the one that is connected counts.
        for voter in sorted(
            self.voters, key=lambda one: one.server.wire is None and one is not met
        ):
            # By its run id, and by the id that the data have: a copy of a node is that node.
            ids = [id for id in (voter.trust.server, voter.trust.id) if id]
            other = next((by_server[id] for id in ids if id in by_server), voter)
            if other is voter:
                by_server |= dict.fromkeys(ids, voter)
            else:
                self.doubles[voter.node] = (
                    f"{other.server.described} and {voter.server.described} are the same server, or one "
                    "is a copy of the other: a quorum needs different ones, only one of these counts"
                )
        for node in self.doubles.keys() - before.keys():
            _logger.warning("%s", self.doubles[node], extra={"event": "node_twice"})
