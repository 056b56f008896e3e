"""What must hold on PostgreSQL besides what must on every store.

honesty     a client believes in no lease for longer than the newest primary has it, also when that one has
            just been promoted
record      what was told to be done is not done again while it is on record, and has one result
log         no client tells of an older state of the store: there is none
sessions    a client ends the session of a connection that it has given up, and leaves a transaction that
            is aborted
ghost       a request that has left does not come back

A client that has never heard of the newest primary, while an old one works alone, is nobody's fault:
nothing is asked of its leases (``is_stranger``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from aiodlock._request import HELD, Request
from aiodlock._session import Session

from ..world import Process
from .postgres_servers import Cluster, Server
from .promises import Promises

#: So often a session may be asked in vain.
_MOST_IN_VAIN = 3
#: Within so many seconds a client has ended what it has given up.
_ENDED_WITHIN = 2.0


class _Done(NamedTuple):
    result: object
    #: True time until which it is certainly on record.
    until: float


class PostgresPromises(Promises):
    """Mutable state besides: ``_met`` (the newest timeline that each session has met), ``_done`` (by name,
    what users were told), ``_replaced`` (whose clients have gone on with another store), ``_ends`` (by name
    and result, until when a success stays on record if it gets there), ``_left`` (requests that have),
    ``_strange`` (requests of clients that did not know of the newest primary), ``_many_since`` (since when
    a client has given up more sessions than it may).
    """

    cluster: Cluster

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._met: dict[Session, int] = {}
        self._done: dict[str, _Done] = {}
        self._replaced: set[Process] = set()
        self._ends: dict[tuple[str, str], float] = {}
        self._left: set[str] = set()
        self._strange: set[str] = set()
        self._many_since: dict[tuple[Process, Server], float] = {}
        #: So many sessions of a process may work for nobody any more.
        self.most_given_up = 4

    # -- strangers -----------------------------------------------------------------------------------

    def _after_turn(self, process: Process) -> None:
        several = len(self.cluster.servers) > 1
        for session in self.sessions.get(process, ()) if several else ():
            known = session.backend.store._known.value  # type: ignore[attr-defined]
            if known is not None and known.timeline > self._met.get(session, 0):
                self._met[session] = known.timeline
        super()._after_turn(process)

    def on_log(self, process: Process, record: logging.LogRecord) -> None:
        super().on_log(process, record)
        if getattr(record, "event", "") == "store_replaced":
            self._replaced.add(process)
        elif "older state" in record.getMessage():  # no server here ever is one
            self._found.append(("log", f"{process}, of no such state: {record.getMessage()}"))

    def is_stranger(self, process: Process, session: Session) -> bool:
        """Whether it cannot know that there is a newer primary than the one that works alone; or has held
        nothing and heard nothing of it for so long that it goes on with the one that is there."""
        met = self._met.get(session, 0)
        unknown = met < self.cluster.primary.timeline or process in self._replaced
        return self.cluster.alone and unknown

    def _believes(self, process: Process, request: Request) -> bool:
        if not super()._believes(process, request):
            return False
        if self.cluster.alone and any(
            self.is_stranger(process, session)
            for session in self.sessions.get(process, ())
            if request.id in session.requests
        ):
            self._strange.add(
                request.id
            )  # also when it meets the newer one: it has to ask that first
        return request.id not in self._strange

    # -- leases against the records ------------------------------------------------------------------

    def _check_record(self, process: Process, request: Request) -> None:
        server, ends = self.cluster.primary, process.true_time_of(request.ends_at)
        if server.tables.unlogged:
            opened_at = server.tables.opened_at
            if opened_at is None or ends <= server.true_time_of(opened_at):
                return  # the tables were emptied, and nobody is let in until then
        super()._check_record(process, request)
        name = server.seen(self.cluster.key_of(request.terms.kind, request.name))
        entry = name.holders.get(request.id)
        if entry is None:
            self.wrong("honesty", f"{process} believes in {request.id}, which waits")
        early = ends - server.true_time_of(entry.deadline)
        if early > 0:
            self.wrong("honesty", f"{process} believes in {request.id} {early:.6f} s too long")

    def check_ghosts(self, new: Iterable[str], left: Iterable[str]) -> None:
        """Some requests are there that were not, and some have left."""
        back = [id for id in new if id in self._left]
        if back:
            self.wrong("ghost", f"{back} come back after they have left")
        self._left.update(left)

    def forgets(self) -> None:
        """The server has forgotten what it did not wait for."""
        self._left.clear()

    def check_all(self) -> None:
        """There is a new primary: whoever believes in a lease has it there."""
        for process, sessions in self.sessions.items():
            if process.dead:
                continue
            for session in sessions:
                for request in session.requests.values():
                    if request.state is HELD and self._believes(process, request):
                        self._check_record(process, request)

    # -- what is done once ---------------------------------------------------------------------------

    def begins(self, process: Process, session: Session, name: str) -> None:
        """A body of what is to be done once begins."""
        done = self._done.get(name)
        if (
            done is None
            or self.is_stranger(process, session)
            or self.cluster.primary.tables.unlogged
        ):
            return
        if self.world.time < done.until:
            self.wrong("record", f"{process} does {name} again, of which {done.result} was told")

    def is_done(self, name: str, result: str, until: float) -> None:
        """A body has ended well: if that is put on record, it is there until then."""
        self._ends[name, result] = until

    def told(self, process: Process, session: Session, name: str, result: str) -> None:
        """A user was told that it is done."""
        until = self._ends.get((name, result), self.world.time)
        if self.is_stranger(process, session) or self.cluster.primary.tables.unlogged:
            return
        done = self._done.get(name)
        # What is told late may have ended since.
        both = done is not None and self.world.time < min(done.until, until)
        if both and done is not None and done.result != result:
            self.wrong("record", f"{process} was told {result} of {name}, others {done.result}")
        if done is None or until > done.until:
            self._done[name] = _Done(result, until)

    # -- sessions ------------------------------------------------------------------------------------

    def check_sessions(self) -> None:
        """A client that makes new connections ends the sessions of those that it gave up, and uses none in
        an aborted transaction."""
        for server in self.cluster.servers:
            for one in server.sessions.values():
                if one.in_vain > _MOST_IN_VAIN:
                    self.wrong("sessions", f"{one!r} stays in an aborted transaction")
        for process in self.sessions:
            if process.dead:
                continue
            for server in self.cluster.servers:
                count = sum(
                    session.is_given_up and getattr(session.peer, "process", None) is process
                    for session in server.sessions.values()
                )
                if count <= self.most_given_up:
                    self._many_since.pop((process, server), None)
                    continue
                since = self._many_since.setdefault((process, server), self.world.time)
                if self.world.time - since > _ENDED_WITHIN:
                    self.wrong("sessions", f"{process} has given {count} up at {server!r}")
