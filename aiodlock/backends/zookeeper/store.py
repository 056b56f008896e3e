"""Locks in ZooKeeper: the sessions of a client, and the queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable
from ..._model import Capabilities, Kind, LockInfo, Mode, Terms, Tokens
from ..._patience import LEAST
from ..._tasks import start_soon
from .._label import make_label
from ..base import Listener
from . import jute
from .connection import Answer
from .identity import Acquaintance
from .inspection import Inspection
from .node import is_recallable
from .observer import Observer
from .place import ZooKeeperPlace
from .queue import Queue, read_queue, request_of
from .session import Ensemble, Session
from .stands import Stands
from .waits import Waits

_logger = logging.getLogger("aiodlock")
#: A session that nothing lives in is closed after this time (seconds), and is looked for so often.
_IDLE, _SWEEP_EVERY = 60.0, 10.0
#: A request's node is watched after this time, so that short leases and waits are spared the message.
_WATCH_AFTER = 0.05
#: Of how many queues is it remembered that they exist.
_MOST_KNOWN = 10_000
#: After so many questions without an answer servers are taken for some that do not know the question.
_MOST_UNANSWERED = 10
#: So long a look at a queue waits for this client's own leaves that are on their way (seconds).
_LEFT_WITHIN = 1.0


class ZooKeeperBackend:
    """One ensemble. Each ttl has a session of its own, whose timeout it is.

    Mutable state: ``_sessions`` (by ttl in milliseconds), ``_group`` (while it runs), ``_reading``
    (queues that are read at the end of this turn of the loop, and who waits for that), ``_unwatched``
    (places whose nodes are to be watched), ``stands`` (this client's own nodes), ``live`` (the requests
    whose places have, or may have, a node), ``_leaving`` (leaves that are on their way, and on which
    session, by queue), ``_known`` (queues whose nodes were there), ``_unanswered`` (how often in a row
    a connection was lost by the question which nodes a session has), ``_observing`` (what is told at the
    end), ``was_let_in`` (a node was made: refusals are outages from then on), ``_down`` (the sessions
    without a connection, whose outage was told).
    """

    capabilities: Capabilities = Capabilities(
        lock_delay=False, remaining_known=False, waiting_known=False, linger=True
    )

    def __init__(
        self, ensemble: Ensemble, *, ttl: float, unavailable_after: float, description: str = ""
    ) -> None:
        self.label: str = make_label()
        self._ours = f"{self.label.rpartition('-')[2]}-"  # what our requests' ids begin with
        self.described: str = ensemble.described
        self.root: str = ensemble.root
        self.acl: tuple[jute.Acl, ...] = ensemble.acl
        self.tick: float = ensemble.tick
        self.unavailable_after: float = unavailable_after
        self.description: str = description
        self._ensemble = ensemble
        self._ttl = ttl
        self._sessions: dict[int, Session] = {}
        self._group: asyncio.TaskGroup | None = None
        self._reading: dict[tuple[Session, str], list[asyncio.Future[Queue]]] = {}
        self._unwatched: list[ZooKeeperPlace] = []
        self.stands: Stands = Stands()
        self.live: set[str] = set()
        self._leaving: dict[str, dict[asyncio.Future[None], Session]] = {}
        self._known: set[str] = set()
        self._unanswered = 0
        self.was_let_in: bool = False
        self._down: set[Session] = set()
        self._observing: list[Callable[[], object]] = []
        self._acquaintance = Acquaintance(
            self.described, silence=unavailable_after, may_hold=self._may_hold
        )
        self._inspection = Inspection(self, lambda: self._main)
        self._waits = Waits(self, lambda: self._main)

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self.described}>"

    # -- life ----------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        self._sessions.clear()
        self._down.clear()
        self._known.clear()
        self.stands = Stands()
        self.live.clear()
        self._leaving.clear()
        self._unwatched = []  # the timer that is to watch them may have ended with its loop
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                main = self._session(self._ttl)
                while not main.is_up:
                    try:
                        await main.wait_up(_IDLE)
                    except BackendUnavailable:
                        continue
                ready()
                while True:
                    await asyncio.sleep(_SWEEP_EVERY)
                    self._close_idle(main)
        finally:
            self._group = None
            for changed in list(self._observing):
                changed()  # nothing more is told

    def follow(self, dead: ZooKeeperBackend) -> None:
        """Know the servers that the backend of the client's dead session knew."""
        self._acquaintance.follow(dead._acquaintance)

    def _may_hold(self) -> bool:
        sessions = self._sessions.values()
        return any(one.members and now() < one.lifetime.deadline for one in sessions)

    def _close_idle(self, main: Session) -> None:
        for ttl, session in list(self._sessions.items()):
            idle = not session.members and now() - session.used_at > max(_IDLE, 2 * session.timeout)
            if idle and session is not main:
                del self._sessions[ttl]
                session.close()

    def session_of(self, terms: Terms) -> Session:
        """Return the session whose timeout is the ttl. It is not idle: it gets a member soon."""
        session = self._session(terms.ttl)
        session.used_at = now()
        return session

    def _session(self, timeout: float) -> Session:
        milliseconds = round(timeout * 1000)
        session = self._sessions.get(milliseconds)
        if session is None:
            label = f"{self.label}-{milliseconds}"
            session = Session(self._ensemble, timeout, label, self._acquaintance)
            in_use = bool(self._sessions)  # the first one was up before there was another
            self._sessions[milliseconds] = session
            session.returned = partial(self._look_back, session)
            session.told = partial(self._tell, session)
            self.start(session.run(in_use=in_use))
        return session

    def _tell(self, session: Session, failure: Exception | None) -> None:
        """A session has a connection (None), or could not get one: told once per outage."""
        if failure is None:
            self._down.discard(session)
            return
        level = logging.DEBUG if self._down else logging.WARNING
        self._down.add(session)
        extra = {"event": "no_connection"}
        _logger.log(level, "no connection to %s: %s", self.described, failure, extra=extra)

    @property
    def _main(self) -> Session:
        return self._session(self._ttl)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it in the background, unless the client is ending."""
        start_soon(self._group, coroutine)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for session in self._sessions.values():
            if not session.is_up and session.failure is not None:
                return session.failure
        return None

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``Backend``."""
        return max((one.further.at for one in self._sessions.values()), default=0.0)

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return max((one.answers_within for one in self._sessions.values()), default=LEAST)

    # -- requests ------------------------------------------------------------------------------------

    def place(
        self, terms: Terms, request_id: str, owner: str, listener: Listener
    ) -> ZooKeeperPlace:
        return ZooKeeperPlace(self, terms, request_id, owner, listener)

    def directory(self, kind: str, name: str) -> str:
        """Return the path of a name's queue."""
        return f"{self.root}/{kind}s/{_encoded(name)}"

    def leaving(self, session: Session, path: str) -> asyncio.Future[None]:
        """Note that a leave is on its way to this queue, until the future is done."""
        on_its_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaves = self._leaving.setdefault(path, {})
        leaves[on_its_way] = session

        def arrived(leave: asyncio.Future[None]) -> None:
            del leaves[leave]
            if not leaves and self._leaving.get(path) is leaves:
                del self._leaving[path]

        on_its_way.add_done_callback(arrived)
        return on_its_way

    async def until_left(self, session: Session, path: str) -> None:
        """Wait for the leaves of a queue that this client has sent on other sessions than this one.

        Each session has a connection of its own, perhaps to another server: what is asked on one may
        overtake what was sent on the other, whatever ``sync`` does.
        """
        sent = self._leaving.get(path)
        if sent and (others := [leave for leave, its in sent.items() if its is not session]):
            await asyncio.wait(others, timeout=_LEFT_WITHIN)

    def is_known(self, path: str) -> bool:
        """Tell whether this queue's node was there when it was used last."""
        return path in self._known

    def note(self, path: str, *, exists: bool) -> None:
        """Note whether a queue's node is there. The servers may have deleted it since."""
        if not exists:
            self._known.discard(path)
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(path)

    def read_queue(self, session: Session, path: str) -> asyncio.Future[Queue]:
        """Read a queue at the end of this turn of the loop; once for all that ask."""
        loop = asyncio.get_running_loop()
        waiting = self._reading.get((session, path))
        if waiting is None:
            waiting = self._reading[session, path] = []
            loop.call_soon(self._send_reading, session, path)
        reading: asyncio.Future[Queue] = loop.create_future()
        waiting.append(reading)
        return reading

    def _send_reading(self, session: Session, path: str) -> None:
        waiting = self._reading.pop((session, path))

        def on_answer(answer: asyncio.Future[Answer[tuple[list[str], jute.Stat]]]) -> None:
            error = answer.exception()
            entries = Queue()
            if error is None:
                entries = read_queue(answer.result().value[0])
                entries.zxid = answer.result().zxid
                self._clear_left(session, path, entries)
            for one in waiting:
                _resolve(one, entries, error)

        try:
            session.submit(jute.get_children(path)).add_done_callback(on_answer)
        except BackendUnavailable as unavailable:
            for one in waiting:
                _resolve(one, Queue(), unavailable)

    async def recall(self, session: Session, paths: Sequence[str]) -> None:
        """Tell those who hold by these nodes, and linger, that somebody wants their name. One attempt: who
        tries again tells it again."""
        try:
            for path in paths:
                data, stat = (await session.ask(jute.get_data(path))).value
                if is_recallable(data, stat):
                    await session.ask(jute.set_data(path, data))
        except (jute.ZooKeeperError, BackendError) as failed:
            _logger.debug("recalling a lease that lingers failed: %s", failed)

    def _clear_left(self, session: Session, path: str, entries: Queue) -> None:
        """Delete nodes of this client's that no request counts as its own, whoever waits behind them."""
        for entry in entries:
            if entry.request.startswith(self._ours) and entry.request not in self.live:
                self.start(self._clear_unless_live(session, entry.request, f"{path}/{entry.node}"))

    async def _clear_unless_live(self, session: Session, request: str, path: str) -> None:
        try:
            stat = (await session.ask(jute.exists(path))).value
        except (jute.ZooKeeperError, BackendError):
            return  # it has gone, on another session perhaps
        if stat.ephemeral_owner == session.id and request not in self.live:
            await self.clear(session, path)

    def _look_back(self, session: Session) -> None:
        if self._unanswered < _MOST_UNANSWERED:
            self.start(self._clear_restored(session))

    async def _clear_restored(self, session: Session) -> None:
        """Delete the session's nodes that no request counts as its own, after a connection was lost.

        Servers have lost what they had committed when their leader changed: a deletion, and the node was
        there again. They close all connections then.
        """
        for kind in ("locks", "semaphores"):
            try:
                nodes = (await session.ask(jute.get_ephemerals(f"{self.root}/{kind}/"))).value
            except jute.ZooKeeperError:
                self._unanswered = _MOST_UNANSWERED  # before 3.6; they close the connection, too
                return
            except BackendError:
                self._unanswered += 1
                return
            self._unanswered = 0
            for node in nodes:
                if request_of(node) not in self.live:
                    await self.clear(session, node)

    async def clear(self, session: Session, path: str) -> None:
        """Delete a node of this client's that no request counts as its own. Servers may have restored it;
        it would hold its name for as long as the client lives."""
        try:
            await session.ask(jute.delete(path))
        except (jute.ZooKeeperError, BackendError) as failed:
            _logger.debug("deleting a node that was left failed: %s", failed)
        else:
            about = {"event": "node_left"}
            _logger.warning("no request counted %s as its own: it is deleted", path, extra=about)

    def watch_soon(self, place: ZooKeeperPlace) -> None:
        """Have a request's node watched, if it still waits or holds then."""
        if not self._unwatched:
            asyncio.get_running_loop().call_later(_WATCH_AFTER, self._watch_all)
        self._unwatched.append(place)

    def _watch_all(self) -> None:
        places, self._unwatched = self._unwatched, []
        for place in places:
            place.watch_own()

    async def settle(self) -> None:
        """Sessions are closed behind what was sent on them."""

    # -- who holds has changed -----------------------------------------------------------------------

    def announce(self, kind: str, name: str) -> None:
        """Observers watch the queue itself."""

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        observer = Observer(self._main, self.directory(kind, name), changed)
        self._observing.append(changed)

        def stop() -> None:
            observer.stop()
            if changed in self._observing:
                self._observing.remove(changed)

        return stop

    # -- for people ----------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        return await self._inspection.inspect(kind, name)

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        return await self._inspection.holds(kind, name, mode, token)

    async def inspect_all(
        self, kind: Kind, names: Sequence[str], *, queues: bool = True
    ) -> list[LockInfo]:
        return await self._inspection.inspect_all(kind, names)

    async def tell_waits(self, serial: int, record: bytes, *, keep: float) -> None:
        await self._waits.tell(serial, record)

    async def waits_of(self, labels: Sequence[str]) -> dict[str, bytes]:
        return await self._waits.read(labels)

    def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        return self._inspection.names(match, kind)

    async def break_lock(self, name: str, kind: Kind = "lock", tokens: Tokens | None = None) -> int:
        return await self._inspection.break_lock(name, kind, tokens)

    async def forget(self, name: str) -> bool:
        return await self._inspection.forget(name)


def _encoded(name: str) -> str:
    """Return a name as one step of a path. Dots alone would be other nodes' names."""
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if not encoded.strip(".") else encoded


def _resolve(reading: asyncio.Future[Queue], entries: Queue, error: BaseException | None) -> None:
    if reading.done():
        return
    if error is None:
        reading.set_result(entries)
    else:
        reading.set_exception(error)
        reading.exception()  # it may be that nobody awaits it
