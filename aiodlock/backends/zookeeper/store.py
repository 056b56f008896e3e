"""Locks in ZooKeeper: the sessions of a client, the queues, and what people want to see.

Over 400 lines: what the core asks, and what people ask of names.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote, unquote

from ..._clock import now
from ..._errors import BackendError, BackendUnavailable, Unsupported
from ..._model import Capabilities, HolderInfo, Kind, LockInfo, Mode, Terms, WaiterInfo
from ..._tasks import start_soon
from .._label import make_label
from ..base import Listener
from . import jute
from .connection import Answer
from .node import BROKEN, is_recallable
from .place import ZooKeeperPlace
from .queue import Queue, holders, read_queue
from .session import Ensemble, Session
from .stands import Stands

_logger = logging.getLogger(__name__)
#: A session that nothing lives in is closed after this time (seconds), and is looked for so often.
_IDLE, _SWEEP_EVERY = 60.0, 10.0
#: A request's node is watched after this time, so that short leases and waits are spared the message.
_WATCH_AFTER = 0.05
_WAIT_UP = 1.0
#: Of how many queues is it remembered that they exist.
_MOST_KNOWN = 10_000
#: How many nodes are asked about at once.
_AT_ONCE = 200
#: How often a break is tried whose holders come and go meanwhile.
_TRIES = 20


class ZooKeeperBackend:
    """One ensemble. Each ttl has a session of its own, whose timeout it is.

    Mutable state: ``_sessions`` (by ttl in milliseconds), ``_group`` (while it runs), ``_reading``
    (queues that are read at the end of this turn of the loop, and who waits for that), ``_unwatched``
    (places whose nodes are to be watched), ``stands`` (this client's own nodes), ``live`` (the requests
    whose places have, or may have, a node), ``_known`` (queues whose nodes were there).
    """

    capabilities: Capabilities = Capabilities(
        lock_delay=False, remaining_known=False, waiting_known=False, linger=True
    )

    def __init__(
        self, ensemble: Ensemble, *, ttl: float, unavailable_after: float, description: str = ""
    ) -> None:
        self.label: str = make_label()
        self.described: str = ensemble.described
        self.root: str = ensemble.root
        self.acl: tuple[jute.Acl, ...] = ensemble.acl
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
        self._known: set[str] = set()
        self._observing: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self.described}>"

    # -- life ----------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        self._sessions.clear()
        self._known.clear()
        self.stands = Stands()
        self.live.clear()
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
            session = Session(self._ensemble, timeout, f"{self.label}-{milliseconds}")
            self._sessions[milliseconds] = session
            self.start(session.run())
        return session

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

    # -- requests ------------------------------------------------------------------------------------

    def place(
        self, terms: Terms, request_id: str, owner: str, listener: Listener
    ) -> ZooKeeperPlace:
        return ZooKeeperPlace(self, terms, request_id, owner, listener)

    def directory(self, kind: str, name: str) -> str:
        """Return the path of a name's queue."""
        return f"{self.root}/{kind}s/{_encoded(name)}"

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

    async def make_directory(self, session: Session, path: str) -> None:
        """Make the node of a queue. The servers delete it when it has been empty for a while."""
        call = jute.create2(path, b"", jute.CONTAINER, self.acl)
        for _ in range(2):
            try:
                await session.ask(call)
                return
            except jute.ZooKeeperError as refused:
                if refused.code == jute.NODE_EXISTS:
                    return
                if refused.code != jute.NO_NODE:
                    raise
                await session.make_root()

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

    async def clear(self, session: Session, path: str) -> None:
        """Delete a node of this client's that no request counts as its own. None is known to come about;
        one that did would hold its name for as long as the client lives."""
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
        observer = _Observer(self._main, self.directory(kind, name), changed)
        self._observing.append(changed)

        def stop() -> None:
            observer.stop()
            if changed in self._observing:
                self._observing.remove(changed)

        return stop

    # -- for people ----------------------------------------------------------------------------------

    async def inspect(self, kind: Kind, name: str) -> LockInfo:
        return (await self.inspect_all(kind, [name]))[0]

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        """Return whether the grant that has this token holds still."""
        info = await self.inspect(kind, name)
        return any(held.token == token and held.mode == mode for held in info.holders)

    async def inspect_all(self, kind: Kind, names: Sequence[str]) -> list[LockInfo]:
        session = self._main
        await session.wait_up(_WAIT_UP)
        found: list[LockInfo] = []
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            calls = [self._inspect(session, kind, name) for name in some]
            found += await asyncio.gather(*calls)
        return found

    async def _inspect(self, session: Session, kind: Kind, name: str) -> LockInfo:
        path = self.directory(kind, name)
        entries = await self._entries(session, path)
        holding = holders(entries)
        held: dict[tuple[str, Mode], HolderInfo] = {}
        waiters: list[WaiterInfo] = []
        for first in range(0, len(entries), _AT_ONCE):
            some = entries[first : first + _AT_ONCE]
            reading = [session.submit(jute.get_data(f"{path}/{entry.node}")) for entry in some]
            for number, (entry, answer) in enumerate(zip(some, reading, strict=True), first):
                try:
                    data, stat = (await asyncio.shield(answer)).value
                except jute.ZooKeeperError:
                    continue  # it has gone meanwhile
                owner, client, token, note, description = _read_about(data)
                mode: Mode = "exclusive" if entry.mode == "x" else "shared"
                if number >= len(holding):
                    waiters.append(
                        WaiterInfo(owner, mode, len(waiters), None, client, note, description)
                    )
                    continue
                before = held.get((owner, mode))
                count = before.count + 1 if before else 1
                held[owner, mode] = HolderInfo(
                    owner, mode, token or stat.created, count, None, client, note, description
                )
        last = max((holder.token for holder in held.values()), default=0)
        return LockInfo(name, tuple(held.values()), tuple(waiters), last, kind=kind)

    async def _entries(self, session: Session, path: str) -> Queue:
        """Read a queue as it is now, not as this client's server saw it a moment ago."""
        session.submit(jute.sync(path))
        try:
            return await asyncio.shield(self.read_queue(session, path))
        except jute.ZooKeeperError as refused:
            if refused.code != jute.NO_NODE:
                raise self._refused(refused) from refused
            return Queue()

    def _refused(self, refused: jute.ZooKeeperError) -> BackendError:
        return BackendError(f"{self.described}: {refused}")

    async def names(self, match: str, kind: Kind = "lock") -> AsyncIterator[str]:
        session = self._main
        await session.wait_up(_WAIT_UP)
        path = f"{self.root}/{kind}s"
        session.submit(jute.sync(path))
        try:
            nodes = (await session.ask(jute.get_children(path))).value[0]
        except jute.ZooKeeperError as refused:
            if refused.code == jute.NO_NODE:
                return
            raise self._refused(refused) from refused
        wanted = [node for node in sorted(nodes) if fnmatch.fnmatchcase(unquote(node), match)]
        for first in range(0, len(wanted), _AT_ONCE):
            some = wanted[first : first + _AT_ONCE]
            asked = [session.submit(jute.exists(f"{path}/{node}")) for node in some]
            for node, answer in zip(some, asked, strict=True):
                try:
                    used = (await asyncio.shield(answer)).value.children
                except jute.ZooKeeperError:
                    continue
                if used:
                    yield unquote(node)

    async def break_lock(self, name: str, kind: Kind = "lock") -> int:
        session, path = self._main, self.directory(kind, name)
        await session.wait_up(_WAIT_UP)
        for _ in range(_TRIES):
            entries = await self._entries(session, path)
            holding = holders(entries)
            if not holding:
                return 0
            calls: list[jute.Call[Any]] = []
            for entry in holding:
                # The receipt tells the holder that this was no accident.
                receipt = f"{self.root}/ids/{entry.request}"
                calls += [jute.delete(f"{path}/{entry.node}"), jute.set_data(receipt, BROKEN)]
            try:
                await session.ask(jute.multi(calls))
            except jute.ZooKeeperError as refused:
                if refused.code != jute.NO_NODE:
                    raise self._refused(refused) from refused
                continue  # one of them has left meanwhile
            return len(holding)
        raise BackendError(f"the holders of {name!r} change too fast to be broken", name=name)

    async def forget(self, name: str) -> bool:
        raise Unsupported("ZooKeeper keeps no record of what was done once", name=name)


class _Observer:
    """Whoever wants to know when a queue changes. A member of the session: connections come and go.

    Mutable state: ``_stopped``.
    """

    def __init__(self, session: Session, path: str, changed: Callable[[], object]) -> None:
        self._session = session
        self._path = path
        self._changed = changed
        self._stopped = False
        session.members.add(self)
        self._arm()

    def stop(self) -> None:
        self._stopped = True
        self._session.members.discard(self)

    def _arm(self) -> None:
        session = self._session
        if self._stopped or not session.is_up:
            return
        unwatch = session.watch_children(self._path, self._fire)

        def on_answer(answer: asyncio.Future[Answer[tuple[list[str], jute.Stat]]]) -> None:
            if isinstance(answer.exception(), jute.ZooKeeperError):
                unwatch()  # there is no queue yet
                if session.is_up and not self._stopped:
                    session.watch_creation(self._path, self._fire)

        session.submit(jute.get_children(self._path, watch=True)).add_done_callback(on_answer)

    def _fire(self) -> None:
        if not self._stopped:
            self._changed()
            self._arm()

    def on_up(self) -> None:
        self._fire()

    def on_down(self, error: BackendUnavailable, silent: float) -> None:
        """What was missed is looked for when there is a connection."""

    def on_over(self) -> None:
        self._session.members.add(self)  # on to the next session

    def look_after(self) -> None:
        """What is missed is told with the next change."""


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


def _read_about(data: bytes) -> tuple[str, str, int, str, str]:
    """Return the owner as people know it, the client's label, a joined node's token, and two notes."""
    try:
        owner, client, token, note, description = json.loads(data)[:5]  # and 1, if it lingers
        shown = unquote(owner[1:]) if owner[0] == "u" else owner[1:]
        return shown, str(client), int(token), str(note), str(description)
    except (ValueError, TypeError, LookupError):
        return "", "", 0, "", ""
