"""Locks in ZooKeeper: the sessions of a client, and the queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ..._clock import now
from ..._errors import BackendUnavailable
from ..._model import Capabilities, Kind, Mode, Terms
from ..._patience import LEAST
from ..._tasks import start_soon
from ..asked import Asked
from ..base import Listener
from .identity import Acquaintance
from .inspection import Inspection
from .node import QueueNode
from .observer import Observer
from .place import ZooKeeperPlace
from .queues import Queues
from .servers import Ensemble
from .session import Session
from .waits import Waits

_logger = logging.getLogger("aiodlock")
#: A session that nothing lives in is closed after this time (seconds), and is looked for so often.
_IDLE, _SWEEP_EVERY = 60.0, 10.0
#: So many sessions of one client are told: by default servers take 60 connections of an address.
_MANY = 20


class ZooKeeperBackend(Asked):
    """One ensemble. Each ttl has a session of its own, whose timeout it is.

    Mutable state: ``_sessions`` (by ttl in milliseconds), ``_group`` (while it runs), ``_observing`` (what
    is told at the end), ``_down`` (the sessions without a connection, whose outage was told),
    ``_told_many`` (that there are many sessions: idle ones end, and others begin); and what ``queues``
    knows.
    """

    capabilities: Capabilities = Capabilities(
        lock_delay=False, remaining_known=False, waiting_known=False, linger=True
    )

    def __init__(
        self, ensemble: Ensemble, *, ttl: float, unavailable_after: float, description: str = ""
    ) -> None:
        self.queues: Queues = Queues(ensemble, self._start, description)
        self._people = Inspection(self.queues, lambda: self._main)
        super().__init__(self._people, Waits(self.queues, lambda: self._main))
        self.label: str = self.queues.label
        self._described = ensemble.described
        self._unavailable_after = unavailable_after
        self._ensemble = ensemble
        self._ttl = ttl
        self._sessions: dict[int, Session] = {}
        self._group: asyncio.TaskGroup | None = None
        self._down: set[Session] = set()
        self._told_many = False
        self._observing: list[Callable[[], object]] = []
        self.acquaintance: Acquaintance = Acquaintance(
            self._described, silence=unavailable_after, may_hold=self._may_hold
        )

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self._described}>"

    # -- life ----------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        self._sessions.clear()
        self._down.clear()
        self.queues.forget()
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
        self.acquaintance.follow(dead.acquaintance)

    def _may_hold(self) -> bool:
        sessions = self._sessions.values()
        return any(one.members and now() < one.lifetime.deadline for one in sessions)

    def _close_idle(self, main: Session) -> None:
        for ttl, session in list(self._sessions.items()):
            idle = not session.members and now() - session.members.used_at > max(
                _IDLE, 2 * session.timeout
            )
            if idle and session is not main:
                del self._sessions[ttl]
                session.close()

    def _session_in_use(self, timeout: float) -> Session:
        """Return the session with this timeout. It is not idle: it gets a member soon."""
        session = self._session(timeout)
        session.members.used_at = now()
        return session

    def _session(self, timeout: float) -> Session:
        milliseconds = round(timeout * 1000)
        session = self._sessions.get(milliseconds)
        if session is None:
            label = f"{self.label}-{milliseconds}"
            session = Session(self._ensemble, timeout, label, self.acquaintance)
            in_use = bool(self._sessions)  # the first one was up before there was another
            self._sessions[milliseconds] = session
            session.returned = partial(self.queues.look_back, session)
            session.outage.told = partial(self._tell, session)
            self._start(session.run(in_use=in_use))
            if len(self._sessions) >= _MANY and not self._told_many:
                self._told_many = True
                _logger.warning(
                    "%s: this client uses %d different ttl, each with a connection of its own: use fewer",
                    self._described,
                    _MANY,
                    extra={"event": "many_sessions"},
                )
        return session

    def _tell(self, session: Session, failure: Exception | None) -> None:
        """A session has a connection (None), or could not get one: told once per outage."""
        if failure is None:
            self._down.discard(session)
            return
        level = logging.DEBUG if self._down else logging.WARNING
        self._down.add(session)
        extra = {"event": "no_connection"}
        _logger.log(level, "no connection to %s: %s", self._described, failure, extra=extra)

    @property
    def _main(self) -> Session:
        return self._session(self._ttl)

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> bool:
        return start_soon(self._group, coroutine)

    @property
    def failure(self) -> Exception | None:
        """Why there is no connection, if there is none."""
        for session in self._sessions.values():
            if not session.is_up and session.outage.failure is not None:
                return session.outage.failure
        return None

    @property
    def further_at(self) -> float:
        """When entering has last come further; see ``StoreBase``."""
        return max((one.further.at for one in self._sessions.values()), default=0.0)

    @property
    def answers_within(self) -> float:
        """How long the next answer may take (seconds)."""
        return max((one.answers_within for one in self._sessions.values()), default=LEAST)

    # -- requests ------------------------------------------------------------------------------------

    def place(
        self, terms: Terms, request_id: str, owner: str, listener: Listener
    ) -> ZooKeeperPlace:
        return ZooKeeperPlace(
            self.queues,
            QueueNode(self.queues, terms, request_id, owner),
            self._session_in_use,
            terms,
            listener,
            unavailable_after=self._unavailable_after,
        )

    # -- who holds has changed -----------------------------------------------------------------------

    async def holds(self, kind: Kind, name: str, mode: Mode, token: int) -> bool:
        return await self._people.holds(kind, name, mode, token)

    def observe(self, kind: str, name: str, changed: Callable[[], object]) -> Callable[[], object]:
        observer = Observer(self._main, self.queues.directory(kind, name), changed)
        self._observing.append(changed)

        def stop() -> None:
            observer.stop()
            if changed in self._observing:
                self._observing.remove(changed)

        return stop
