"""One request's place: what the core asks of it, and what its session tells.

``node`` is what it has in the store, ``own_watch`` whether that is there still, ``seat`` how it goes over
to its owner's; ``entering`` is how the request gets it, ``waiting`` how it comes to hold, ``successors``
what it owes to those behind it, and ``leaving`` how its node is deleted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable, LossReason, Unsupported
from ..._model import End, Gone, Granted, Left, Refused, Terms, Waiting
from ..base import Listener, Unanswered
from ..hold_end import HoldEnd
from ..stage import ASKING, HELD, NEW, OVER, WAITING, Stage
from . import jute
from .entering import Entering, check_ttl
from .leaving import Leaving
from .node import QueueNode
from .own_watch import OwnWatch
from .queue import Holds
from .queues import Queues
from .seat import Seat
from .session import Session
from .successors import Successors
from .waiting import Waiter

#: How long an acquire waits for a connection before it says that there is none.
_WAIT_UP = 1.0


class ZooKeeperPlace:
    """A member of the session whose timeout is the lock's ttl.

    Mutable state: ``token``, ``_stage``, ``_terms`` (a lease that lingers gets others), and its parts'.
    """

    surely_over_at: float = math.inf

    def __init__(
        self,
        queues: Queues,
        node: QueueNode,
        session_of: Callable[[float], Session],
        terms: Terms,
        listener: Listener,
        *,
        unavailable_after: float,
    ) -> None:
        """:param session_of: returns the session with that timeout (seconds)."""
        self.token: int = 0
        self._queues = queues
        self._session_of = session_of
        self._terms = terms
        self._listener = listener
        self._unavailable_after = unavailable_after
        self._node = node
        self._stage: Stage = NEW
        self._seat = Seat(queues, node)
        self._end = HoldEnd()
        self._successors = Successors(node, listener.recalled)
        self._entering = Entering(queues, node, self._seat)
        self._own_watch = OwnWatch(node, self._on_node_gone, self._successors.on_wanted)
        self._waiter = Waiter(
            queues,
            node,
            self._seat,
            self._own_watch,
            self._on_turn,
            self._lose,
            listener.unavailable,
        )
        self._leaving = Leaving(node, self._seat.end)

    def __repr__(self) -> str:
        return f"<ZooKeeperPlace {self._terms.name!r} {self._stage.value} {self._node!r}>"

    # -- what the core pulls -------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the session certainly lives, and the lease is not at its own end."""
        return self._end.before(self._alive_until)

    @property
    def _alive_until(self) -> float:
        return 0.0 if self._node.lifetime is None else self._node.lifetime.deadline

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``."""
        return self._end.is_capped(self._terms, self._terms.ttl, self._alive_until)

    @property
    def silent(self) -> bool:
        """Whether the servers owe answers."""
        return self._node.is_silent

    # -- acquiring -----------------------------------------------------------------------------------

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        node = self._node
        try:
            if node.lifetime is None:
                node.begin(self._session_of(self._terms.ttl))
            session = node.session
            await session.wait_up(_WAIT_UP)
            check_ttl(self._terms, session)
            asked_before, self._stage = self._stage is not NEW, ASKING
            if not wait and not asked_before and await self._entering.is_taken():
                self.abandon()
                return Refused("busy")
            # Not earlier: what has only looked is not over when the session ends.
            if node.lifetime is None:
                node.lifetime = session.lifetime
                session.members.add(self)
                self._queues.live.add(node.id)
            found = await self._entering.enter(wait=wait)
        except jute.ZooKeeperError as refused:
            raise node.refused(refused) from refused
        if isinstance(found, Holds) and self._has_time:
            self._hold(found.followed)
            return Granted(self.token, self.deadline)
        if isinstance(found, Gone | Refused):
            return found
        self._stage = WAITING
        self._waiter.begin(found)
        if isinstance(found, Holds):
            self._wait_for_time()
        return Waiting(self.deadline, None)

    # -- a waiter's grant ----------------------------------------------------------------------------

    @property
    def _has_time(self) -> bool:
        return self.deadline - self._terms.margin > now()

    def _on_turn(self, followed: bool) -> None:
        if self._has_time:
            self._hold(followed)
            self._listener.granted()
        else:
            self._wait_for_time()

    def _wait_for_time(self) -> None:
        """The servers have granted it, and the session's deadline has to move first."""
        if self._node.lifetime is not None:
            self._node.lifetime.on_progress(self._on_progress)

    def _on_progress(self) -> None:
        """The deadline has moved: a grant may have time now."""
        if self._stage is WAITING and not self._has_time:
            self.token = self._node.created
            self._lose("expired")  # granted, too late
        self._waiter.look()

    # -- holding -------------------------------------------------------------------------------------

    def _hold(self, followed: bool) -> None:
        assert self._node.path is not None
        if self._stage is not WAITING:
            self._own_watch.begin()
        self._waiter.end()
        self._stage, self.token = HELD, self._node.created
        self._end.extended(self._terms, self._terms.ttl)
        self._end.begin(self._terms)
        self._successors.begin(self._terms, followed=followed)

    def _on_node_gone(self) -> None:
        self._queues.start(self._find_out())

    async def _find_out(self) -> None:
        """Tell why the node has gone."""
        broken = await self._leaving.was_broken()
        self._lose("broken" if broken and self._stage is HELD else "gone")

    def _lose(self, reason: LossReason) -> None:
        if self._stage in (WAITING, HELD):
            self._stop()
            self._seat.end()
            self._listener.gone(reason)

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease that lingered, with a ``max_hold`` of its own."""
        self._terms = terms
        self._end.begin(terms)

    async def begin(self) -> None:
        """Nothing has to be told: no name stays closed after its body."""

    async def extend(self, ttl: float | None) -> None:
        session = self._node.session
        if ttl is not None and self._terms.auto_extend and ttl != self._terms.ttl:
            raise Unsupported(
                f"ttl={ttl:g}: on ZooKeeper a lease that is extended by itself lasts as long as the "
                f"client's session, {self._terms.ttl:g} s",
                name=self._terms.name,
            )
        await session.wait_up(_WAIT_UP)
        try:
            await session.heartbeat()
        except jute.ZooKeeperError as refused:
            raise self._node.refused(refused) from refused
        if self._node.is_over():
            self._lose("expired")
        else:
            length = self._terms.ttl if ttl is None else ttl
            self._end.extended(self._terms, length)

    def run_out(self) -> None:
        """The lease counts as lost: the node goes when the lease ends, whether the body has ended or not.

        Until then the name stays closed for a body that is cleaning up.
        """
        self._stop()
        self._seat.end()  # what waits behind it watches the node from now on
        pause = max(0.0, self.deadline - now())
        asyncio.get_running_loop().call_later(pause, self._leaving.discard)

    # -- what the session tells ----------------------------------------------------------------------

    def on_up(self) -> None:
        self._leaving.on_up()
        self._own_watch.renew()
        self._successors.look()
        self._waiter.look()

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        if self._stage in (WAITING, HELD):
            self._listener.extension_failed(error)
        if self._stage is WAITING and silent >= self._unavailable_after:
            self._listener.unavailable(error)

    def on_over(self) -> None:
        self._seat.end()
        self._queues.live.discard(self._node.id)
        self._lose("expired")

    def look_after(self) -> None:
        self._waiter.look_after()

    # -- leaving -------------------------------------------------------------------------------------

    async def leave(self, end: End, *, within: float | None = None) -> Left:
        try:
            async with asyncio.timeout(within):
                return await self._leave()
        except TimeoutError as silent:
            raise Unanswered(f"{self._queues.described}: no answer for {within:g} s") from silent
        except jute.ZooKeeperError as refused:
            raise self._node.refused(refused) from refused

    async def _leave(self) -> Left:
        granted = self.token != 0
        found = self._left_already()
        if found is not None:
            return found
        self._stop()
        # Until it is answered, nobody knows which node is to be deleted.
        await self._seat.settle()
        await self._node.session.wait_up(_WAIT_UP)
        if self._node.is_over():
            return self._left_already() or Left("gone", "expired")
        left = await self._leaving.delete(granted=granted)
        self.abandon()
        return left

    def _left_already(self) -> Left | None:
        """Return what a leave finds that has nothing to delete."""
        if self._node.lifetime is None:
            self._stage = OVER
            return Left("withdrawn")
        if self._node.lifetime.over:
            self._stop()
            self.abandon()
            return Left("released") if self._leaving.sent else Left("gone", "expired")
        return None

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        queues, node = self._queues, self._node
        session = None if node.lifetime is None else node.session
        if session is not None and not session.is_up:
            return False
        self._stop()
        return queues.leaves.send(
            node.directory, lambda: self.leave(end), done, queues.start, on=session
        )

    def _stop(self) -> None:
        """Hear of nothing any more."""
        self._stage = OVER
        self._waiter.end()
        self._own_watch.end()
        self._successors.end()

    def abandon(self) -> None:
        self._stop()
        self._seat.end()
        if self._node.lifetime is not None:
            self._node.session.members.discard(self)
        self._queues.live.discard(self._node.id)
