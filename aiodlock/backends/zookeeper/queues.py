"""What one client knows of the queues, and of its own nodes in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote

from ..._errors import BackendError, BackendUnavailable
from .._label import make_label
from .._leaves import Leaves
from . import jute
from .about import is_recallable
from .connection import Answer
from .queue import Queue, read_queue, request_of
from .servers import Ensemble
from .session import Session
from .stands import Stands

_logger = logging.getLogger("aiodlock")
#: Of how many queues is it remembered that they exist.
_MOST_KNOWN = 10_000
#: After so many questions without an answer servers are taken for some that do not know the question.
_MOST_UNANSWERED = 10


class Queues:
    """It knows of no request but what ``live`` says.

    Mutable state: ``live`` (the requests whose places have, or may have, a node), ``stands`` (this client's
    own nodes), ``leaves`` (those on their way, and on which session, by queue), ``was_let_in`` (a node was
    made: refusals are outages from then on), ``_known`` (queues whose nodes were there), ``_reading``
    (queues that are read at the end of this turn of the loop, and who waits for that), ``_unanswered`` (how
    often in a row a connection was lost by the question which nodes a session has).
    """

    def __init__(
        self,
        ensemble: Ensemble,
        start: Callable[[Coroutine[Any, Any, Any]], bool],
        description: str,
    ) -> None:
        """:param start: runs something in the background, unless the client is ending."""
        self.label: str = make_label()
        self._ours = f"{self.label.rpartition('-')[2]}-"  # what our requests' ids begin with
        self.description: str = description
        self.described: str = ensemble.described
        self.root: str = ensemble.root
        self.acl: tuple[jute.Acl, ...] = ensemble.acl
        self.start: Callable[[Coroutine[Any, Any, Any]], bool] = start
        self.was_let_in: bool = False
        self._reading: dict[tuple[Session, str], list[asyncio.Future[Queue]]] = {}
        self._unanswered = 0
        self.forget()

    def forget(self) -> None:
        """The client runs anew, perhaps in another loop."""
        self.stands: Stands = Stands()
        self.live: set[str] = set()
        self.leaves: Leaves = Leaves()
        self._known: set[str] = set()

    def directory(self, kind: str, name: str) -> str:
        """Return the path of a name's queue."""
        return f"{self.root}/{kind}s/{_encoded(name)}"

    # -- which there are -----------------------------------------------------------------------------

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

    # -- reading them --------------------------------------------------------------------------------

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

    # -- nodes that nobody counts as his own ---------------------------------------------------------

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

    def look_back(self, session: Session) -> None:
        """A session has a connection again."""
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
