"""One request's place: a node in a queue, from the transaction that makes it to its deletion.

``blockers`` is what it waits for, ``leaving`` how its node is deleted. Over 400 lines: asking, waiting and
holding change the same few states.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable, LossReason, Unsupported
from ..._model import End, Gone, Granted, Left, Refused, Terms, Waiting
from ..base import Listener, Unanswered
from . import jute
from .blockers import Blockers
from .connection import Answer
from .leaving import Leaving
from .node import QueueNode
from .queue import Barred, Blocked, Entry, Holds, Joins, Queue
from .queues import Queues
from .session import Session
from .stands import Stand
from .successors import Successors

#: How long an acquire waits for a connection before it says that there is none.
_WAIT_UP = 1.0
#: The timeout that servers grant is in whole milliseconds.
_ROUNDED = 0.0015
#: A session of fewer ticks is over before three writes have shown that the leader has heard of it.
_FEWEST_TICKS = 1.25


class _State(Enum):
    NEW = "new"
    ASKING = "asking"  # the node may be there
    WAITING = "waiting"
    HELD = "held"
    OVER = "over"  # left, or its session has ended


# On Python 3.11 an attribute of an Enum takes a hundred times as long as a global.
_NEW: Final = _State.NEW
_ASKING: Final = _State.ASKING
_WAITING: Final = _State.WAITING
_HELD: Final = _State.HELD
_OVER: Final = _State.OVER


class ZooKeeperPlace:
    """A member of the session whose timeout is the lock's ttl.

    Mutable state: ``token``; ``_state``; ``_session``; ``_own`` (the path of its node, while that is
    watched); ``_stand`` (its node, as other places of this client know it); ``_looking`` (the queue is
    being read); ``_moving`` (while its node changes over to its owner's seat); ``_until`` (the end of a
    lease that is not extended); ``_closes`` (the end of one with a ``max_hold``); ``_successors`` (of a
    holder that lingers), ``_untold`` (of a semaphore: the next one has not surely heard that this one
    holds). What it waits for is in ``Blockers``, the end of its node in ``Leaving``.
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
        self._state = _NEW
        self._session: Session | None = None
        self._blockers = Blockers(queues, node, self._look, self._on_ahead_gone, self._on_refused)
        self._own: str | None = None
        self._stand: Stand | None = None
        self._looking = False
        self._moving: asyncio.Future[None] | None = None
        self._until = self._closes = math.inf
        self._successors: Successors | None = None
        self._untold = False
        self._leaving = Leaving(node, self._end_stand)

    def __repr__(self) -> str:
        return f"<ZooKeeperPlace {self._terms.name!r} {self._state.value} {self._node!r}>"

    # -- what the core pulls -------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the session certainly lives, and the lease is not at its own end."""
        return min(self._extended_to, self._closes)

    @property
    def _extended_to(self) -> float:
        lifetime = self._node.lifetime
        return 0.0 if lifetime is None else min(lifetime.deadline, self._until)

    @property
    def capped(self) -> bool:
        """Whether the deadline is that near because of ``max_hold``."""
        if self._closes < self._extended_to:
            return True
        maximum = self._terms.max_hold
        return maximum is not None and not self._terms.auto_extend and self._terms.ttl >= maximum

    @property
    def silent(self) -> bool:
        """Whether the servers owe answers."""
        return self._session is None or self._session.is_silent

    # -- acquiring -----------------------------------------------------------------------------------

    async def acquire(self, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        try:
            if self._session is None or self._node.lifetime is None:
                self._session = self._session_of(self._terms.ttl)
            session = self._session
            await session.wait_up(_WAIT_UP)
            self._check_ttl(session)
            asked_before, self._state = self._state is not _NEW, _ASKING
            if not wait and not asked_before and await self._is_taken(session):
                self.abandon()
                return Refused("busy")
            # Not earlier: what has only looked is not over when the session ends.
            if self._node.lifetime is None:
                self._node.lifetime = session.lifetime
                session.members.add(self)
                self._queues.live.add(self._node.id)
            return await self._ask(session, wait=wait)
        except jute.ZooKeeperError as refused:
            raise self._node.refused(refused) from refused

    async def _is_taken(self, session: Session) -> bool:
        """Look at the queue as it is now. What is refused for this costs no commit, and leaves nothing."""
        await self._queues.leaves.until_arrived(self._node.directory, but=session)
        session.submit(jute.sync(self._node.directory))
        reading = self._queues.read_queue(session, self._node.directory)
        try:
            entries = await asyncio.shield(reading)
            if not self._node.is_taken(entries):
                return False
            self._recall(session, self._node.blocked_by(entries))
            return True
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise
            return False

    def _recall(self, session: Session, nodes: Sequence[str]) -> None:
        """Tell those of them that linger: who is refused does not stay in the queue that they watch."""
        if not self._terms.limit:
            paths = [f"{self._node.directory}/{node}" for node in nodes]
            self._queues.start(self._queues.recall(session, paths))

    def _check_ttl(self, session: Session) -> None:
        ttl, granted, longest = self._terms.ttl, session.granted, self._terms.max_hold
        # What is held for no longer than its ttl is deleted by the client itself.
        brief = longest is not None and longest <= ttl
        if granted > session.timeout + _ROUNDED and not brief:
            raise Unsupported(
                f"ttl={ttl:g} is shorter than the shortest session that these servers grant, {granted:g} s "
                "(minSessionTimeout, by default 2 * tickTime)",
                name=self._terms.name,
            )
        if granted < session.timeout - _ROUNDED:
            raise Unsupported(
                f"ttl={ttl:g} is longer than the longest session that these servers grant, {granted:g} s "
                "(maxSessionTimeout, by default 20 * tickTime)",
                name=self._terms.name,
            )
        tick = session.tick
        if granted < _FEWEST_TICKS * tick:
            raise Unsupported(
                f"ttl={ttl:g} is too short for tick_time={tick:g}: no lease could be extended. Give the "
                "servers' tickTime in seconds, as tick_time= in the URL, or a ttl of at least "
                f"{_FEWEST_TICKS * tick:g}",
                name=self._terms.name,
            )

    async def _ask(self, session: Session, *, wait: bool) -> Granted | Waiting | Refused | Gone:
        while not self._node.is_over():
            directory = self._node.directory
            near = self._node.is_plain and self._queues.stands.ends_with_exclusive(
                directory, session
            )
            entries = await self._node.enter(session, reads=not near)
            if self._node.is_over():
                break
            ahead = self._begin_stand(session)
            if entries is None and ahead is not None:
                if not wait:
                    self._recall(session, [ahead.node])
                    return Refused("busy", unsure=True)
                self._wait(session)
                self._blockers.follow(ahead)
                return Waiting(self.deadline, None)
            if entries is None:
                entries = await self._node.read(session)
            match self._node.where(entries):
                case None:
                    return Gone("broken")  # somebody has deleted it before it was known here
                case Joins(seat):
                    await self._join(session, seat)
                case Barred(limit):
                    # The core leaves: the node is there.
                    return Refused("limit" if limit else "deadlock", limit, unsure=True)
                case Blocked() as blocked:
                    if not wait:
                        self._recall(session, self._node.blocked_by(entries))
                        return Refused("busy", unsure=True)
                    self._wait(session)
                    if session.is_up:  # else it looks when there is a connection
                        self._blockers.wait_for(session, blocked)
                    return Waiting(self.deadline, None)
                case Holds(followed):
                    if not self._has_time:
                        self._wait(session)
                        self._wait_for_time()
                        return Waiting(self.deadline, None)
                    self._hold(session, followed)
                    return Granted(self.token, self.deadline)
        return Gone("expired")

    @property
    def _has_time(self) -> bool:
        return self.deadline - self._terms.margin > now()

    def _begin_stand(self, session: Session) -> Stand | None:
        """Tell other places of this client of the node; return the one right in front, if it is ours."""
        node, stands = self._node, self._queues.stands
        if self._stand is None and node.path is not None and not self._terms.limit:
            exclusive = self._terms.mode == "exclusive"
            self._stand = Stand(
                node.path, session=session, exclusive=exclusive, alone=node.is_alone
            )
            stands.begin(self._stand)
        return None if self._stand is None else stands.in_front_of(self._stand)

    def _end_stand(self, held_until: int = 0) -> None:
        stand, self._stand = self._stand, None
        if stand is not None:
            self._queues.stands.end(stand, held_until=held_until)

    async def _join(self, session: Session, seat: Entry) -> None:
        self._end_stand()
        self._queues.stands.share(self._node.directory, seat.number)
        await self._node.join(session, seat)

    # -- waiting -------------------------------------------------------------------------------------

    def _wait(self, session: Session) -> None:
        self._state = _WAITING
        if self._node.may_join:
            session.members.looking[self._look] = None  # nothing tells it that its owner holds now
        self._queues.soon(self.watch_own)

    def watch_own(self) -> None:
        """See whether the node is deleted by others, unless the request has ended meanwhile."""
        session, node = self._session, self._node.path
        if self._state not in (_WAITING, _HELD) or session is None or node is None:
            return
        if self._moving is not None:
            return  # its new node is watched
        if session.is_up and self._own is None:
            self._watch_node(session, node)

    def _on_ahead_gone(self, held_until: int) -> None:
        session = self._session
        if self._state is not _WAITING or session is None:
            return
        # A node that is younger than that deletion stands in another queue, which was made since.
        next_then = held_until >= self._node.created > 0
        if not (next_then and self._node.is_plain) or self._node.is_over():
            self._look()
        elif self._has_time:
            self._hold(session, followed=False)
            self._listener.granted()
        else:
            self._wait_for_time()

    def _on_refused(self, refused: jute.ZooKeeperError) -> None:
        """The request would not hear of the end of what blocks it: another user has made that."""
        if self._state is _WAITING:
            self._listener.unavailable(BackendUnavailable(str(self._node.refused(refused))))

    def _watch_node(self, session: Session, node: str) -> None:
        """Have it told when the node is written or goes, and see whether it was written already."""
        self._own = node

        def on_answer(answer: asyncio.Future[Answer[tuple[bytes, jute.Stat]]]) -> None:
            error = answer.exception()
            if isinstance(error, jute.ZooKeeperError) and error.code == jute.NO_NODE:
                self._queues.start(self._find_out(session))
                return
            if isinstance(error, BackendUnavailable) and self._own == node:
                # The next connection sets the watch, but what was written before is not told by that.
                self._own = None
                session.watches.forget(node, self._on_own_gone)
            wanted = error is None and answer.result().value[1].version > 0
            if wanted and self._successors is not None:  # one who was refused has written it
                self._successors.tell()

        session.watches.data(node, self._on_own_gone).add_done_callback(on_answer)

    def _unwatch(self) -> None:
        self._blockers.clear()
        own, self._own = self._own, None
        if self._session is not None:
            self._session.members.looking.pop(self._look, None)
            if own is not None:
                self._session.watches.forget(own, self._on_own_gone)

    def _look(self) -> None:
        """Read the queue, as what blocked the request may have gone."""
        if self._state is not _WAITING or self._looking:
            return
        session = self._session
        assert session is not None
        if session.is_up:
            self._looking = True
            self._queues.read_queue(session, self._node.directory).add_done_callback(
                self._on_looked
            )

    def _on_looked(self, reading: asyncio.Future[Queue]) -> None:
        self._looking = False
        session, error = self._session, reading.exception()
        if self._state is not _WAITING or session is None:
            return
        if isinstance(error, jute.ZooKeeperError):
            self._lose("gone")  # the queue itself was deleted
            return
        if error is not None or self._node.is_over():
            return  # it looks again when there is a connection
        entries = reading.result()
        if self._node.path is None and self._node.where(entries) is not None:
            # The answer to its move into a seat was lost: it is at one of two places.
            self._queues.start(self._adopt(session, entries))
            return
        match self._node.where(entries):
            case None:
                self._lose("gone")
            case Holds(followed):
                if self._has_time:
                    self._hold(session, followed)
                    self._listener.granted()
                else:
                    self._wait_for_time()
            case Blocked() as blocked:
                if session.is_up:  # else it looks again when there is a connection
                    self._blockers.wait_for(session, blocked)
            case Joins(seat):
                if self._moving is None:
                    self._queues.start(self._change_over(session, seat))
            case Barred():
                pass  # it waits on: the owner came to hold by another request meanwhile

    async def _change_over(self, session: Session, seat: Entry) -> None:
        if self._state is not _WAITING or self._moving is not None or self._node.path is None:
            return
        self._unwatch()
        moving = self._moving = asyncio.get_running_loop().create_future()
        try:
            await self._join(session, seat)
        except (jute.ZooKeeperError, BackendError):
            pass
        finally:
            self._moving = None
            moving.set_result(None)
        if self._state is _WAITING:
            self._wait(session)
        self._look()

    async def _adopt(self, session: Session, entries: Queue) -> None:
        try:
            await self._node.adopt(session, entries)
        except (jute.ZooKeeperError, BackendError):
            pass  # it has gone meanwhile, or it looks again when there is a connection
        self._queues.soon(self.watch_own)  # before, it was not known which node to watch
        self._look()

    def _wait_for_time(self) -> None:
        """The servers have granted it, and the session's deadline has to move first."""
        if self._node.lifetime is not None:
            self._node.lifetime.on_progress(self._on_progress)

    def _on_progress(self) -> None:
        """The deadline has moved: a grant may have time now."""
        if self._state is _WAITING and not self._has_time:
            self.token = self._node.created
            self._lose("expired")  # granted, too late
        self._look()

    # -- holding -------------------------------------------------------------------------------------

    def _hold(self, session: Session, followed: bool) -> None:
        assert self._node.path is not None
        watches = self._state is not _WAITING
        self._blockers.clear()
        self._state, self.token = _HELD, self._node.created
        if not self._terms.auto_extend:
            self._until = now() + self._terms.ttl
        if self._terms.max_hold is not None:
            self._closes = now() + self._terms.max_hold
        if self._terms.linger:
            self._successors = Successors(session, self._node, self._listener.recalled)
        session.members.looking.pop(self._look, None)
        if watches:
            self._queues.soon(self.watch_own)
        self._untold = bool(self._terms.limit) and followed
        self._tell_next(session)

    def _tell_next(self, session: Session) -> None:
        """Write a semaphore's node: the next one in the queue learns that it is the first now.

        It watches no other node. So the word is repeated after a lost connection.
        """
        if not self._untold or self._state is not _HELD or not session.is_up:
            return
        assert self._node.path is not None

        def on_answer(answer: asyncio.Future[Answer[jute.Stat]]) -> None:
            if not isinstance(answer.exception(), BackendError):
                self._untold = False

        writing = session.submit(jute.set_data(self._node.path, self._node.about()))
        writing.add_done_callback(on_answer)

    def _on_own_gone(self) -> None:
        """The node was changed or has gone."""
        if self._state not in (_WAITING, _HELD):
            return
        session, node = self._session, self._node.path
        if session is None or node is None:
            return
        self._own = None
        if session.is_up:
            self._watch_node(session, node)

    async def _find_out(self, session: Session) -> None:
        """Tell why the node has gone."""
        broken = await self._leaving.was_broken(session)
        self._lose("broken" if broken and self._state is _HELD else "gone")

    def _lose(self, reason: LossReason) -> None:
        if self._state in (_WAITING, _HELD):
            self._stop()
            self._end_stand()
            self._listener.gone(reason)

    def reuse(self, terms: Terms) -> None:
        """A new body has the lease that lingered, with a ``max_hold`` of its own."""
        self._terms = terms
        self._closes = math.inf if terms.max_hold is None else now() + terms.max_hold

    async def begin(self) -> None:
        """Nothing has to be told: no name stays closed after its body."""

    async def extend(self, ttl: float | None) -> None:
        session = self._session
        assert session is not None
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
        elif not self._terms.auto_extend:
            length = self._terms.ttl if ttl is None else ttl
            self._until = max(self._until, now() + length)

    def run_out(self) -> None:
        """The lease counts as lost: the node goes when the lease ends, whether the body has ended or not.

        Until then the name stays closed for a body that is cleaning up.
        """
        self._stop()
        self._end_stand()  # what waits behind it watches the node from now on
        pause = max(0.0, self.deadline - now())
        if self._session is not None:
            asyncio.get_running_loop().call_later(pause, self._leaving.discard, self._session)

    # -- what the session tells ----------------------------------------------------------------------

    def on_up(self) -> None:
        if self._session is not None:
            self._leaving.on_up(self._session)
        self._queues.soon(self.watch_own)
        if self._successors is not None:
            self._successors.look()
        if self._session is not None:
            self._tell_next(self._session)
        self._look()

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        if self._state in (_WAITING, _HELD):
            self._listener.extension_failed(error)
        if self._state is _WAITING and silent >= self._unavailable_after:
            self._listener.unavailable(error)

    def on_over(self) -> None:
        self._end_stand()
        self._queues.live.discard(self._node.id)
        self._lose("expired")

    def look_after(self) -> None:
        """See whether what it waits for is there still, and is somebody's; see ``Blockers.look_after``."""
        session = self._session
        if self._state is not _WAITING or self._moving or session is None or not session.is_up:
            return
        if not self._blockers.look_after(session):
            self._look()

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
        session, granted = self._session, self.token != 0
        self._leaving.begin(held=self._state is _HELD)
        found = self._left_already()
        if found is not None:
            return found
        assert session is not None
        self._stop()
        # Until it is answered, nobody knows which node is to be deleted.
        under_way = self._moving or self._node.making
        if under_way is not None:
            await asyncio.wait([under_way])
        await session.wait_up(_WAIT_UP)
        if self._node.is_over():
            return self._left_already() or Left("gone", "expired")
        left = await self._leaving.delete(session, granted=granted)
        self.abandon()
        return left

    def _left_already(self) -> Left | None:
        """Return what a leave finds that has nothing to delete."""
        if self._session is None or self._node.lifetime is None:
            self._state = _OVER
            return Left("withdrawn")
        if self._node.lifetime.over:
            self._stop()
            self.abandon()
            return Left("released") if self._leaving.sent else Left("gone", "expired")
        return None

    def leave_soon(self, end: End, done: Callable[[Left | BackendError], object]) -> bool:
        session, queues = self._session, self._queues
        if session is not None and not session.is_up:
            return False
        self._leaving.begin(held=self._state is _HELD)
        self._stop()
        return queues.leaves.send(
            self._node.directory, lambda: self.leave(end), done, queues.start, on=session
        )

    def _stop(self) -> None:
        """Hear of nothing any more."""
        self._state = _OVER
        self._unwatch()
        if self._successors is not None:
            self._successors.end()

    def abandon(self) -> None:
        self._stop()
        self._end_stand()
        if self._session is not None:
            self._session.members.discard(self)
        self._queues.live.discard(self._node.id)
