"""What must hold on every store, looked at from the clients' side and held against the store's own records.

Each check belongs to a checker, whose name a violation carries:

exclusion   leases that are held at the same true time are compatible
honesty     while ``lease.held`` is true, the store has the request, and keeps it for longer
fairness    nobody holds in front of whom an earlier request still waits or holds
told        a body is cancelled when its lease is lost, at once: it takes no second step
token       tokens grow with every exclusive grant
store       what compares tokens takes nothing from an older writer
idle        a free name is not kept from a waiter that is well
liveness    after the faults everybody is served
ghost, leak afterwards nothing is left, neither in the store nor tasks nor places
storm       no process sends more messages in a second than its requests and beats need
log         no process writes more warnings in a second than there can be news
failure     no background task dies, nothing unexpected is raised
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

from aiodlock._lease import Lease
from aiodlock._request import HELD, LEAVING, WAITING, Request
from aiodlock._session import Session

from ...inside import check_request, holds_of
from ..checkers import _AFTER_SLEEP, _PROMPT, Body
from ..world import Process, World, Wrong


class Stood(NamedTuple):
    """One request as the store has it, in the order of a name's queue."""

    id: str
    #: "x", "s", or a semaphore's limit in decimals.
    mode: str
    owner: str
    #: Requests with one place in the queue belong to one owner.
    place: object


class Truth(Protocol):
    """The records of a store, read at once and by nobody's message."""

    def queue(self, kind: str, name: str) -> list[Stood]:
        """Return who holds and waits, in order."""

    def is_closed(self, kind: str, name: str) -> bool:
        """Whether a name is kept closed after its holder, by a lock-delay or a hold."""

    def id_of(self, request: Request) -> str:
        """Return what the store calls a request."""


class Promises:
    """All of them, on one world. Mutable state is listed in ``__init__``."""

    def __init__(self, world: World, truth: Truth) -> None:
        self.world = world
        self.truth = truth
        self.sessions: dict[Process, list[Session]] = {}
        self.bodies: list[Body] = []
        #: Requests of which operators or others took the record away: nothing is promised of them.
        self.excused: set[str] = set()
        self.grants = 0
        #: How many messages a process may send in a second, and warnings write. Tasks that ask again
        #: without a pause have 85 turns in a second, of five messages each; what spins sends thousands.
        self.most_messages, self.most_warnings = 600, 30
        self._messages: defaultdict[Process, deque[float]] = defaultdict(deque)
        self._warnings: defaultdict[Process, deque[float]] = defaultdict(deque)
        #: What was found inside of the library's own code, where it would be one exception among others.
        self._found: list[tuple[str, str]] = []
        self._held: dict[str, float] = {}
        self._tokens: dict[tuple[str, str], int] = {}
        self._writes: dict[str, tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}
        #: Since when a request that waits is the first one of its queue.
        self._first: dict[str, float] = {}
        self.on_waiter: Callable[[], None] | None = None
        world.after_turn.append(self._after_turn)

    def wrong(self, checker: str, message: str) -> NoReturn:
        raise Wrong(checker, f"{message} (true time {self.world.time:.6f})")

    # -- what a scenario tells -------------------------------------------------------------------------

    def entered(self, session: Session) -> None:
        """A client has been entered."""

    def on_given_up(self, id: str) -> None:
        """Nobody waits any more for the answer to an extension by hand."""

    def on_reply(self, *told: object) -> None:
        """Answers are looked at by what clients make of them."""

    def on_broken(self, id: str, token: int) -> None:
        """Likewise."""

    def on_send(self, process: Process) -> None:
        """A process sends a message."""
        self._count(self._messages[process], self.most_messages, "storm", f"{process} messages")

    def on_log(self, process: Process, record: logging.LogRecord) -> None:
        """A process writes a warning or an error."""
        if getattr(record, "event", "") == "node_left":
            self._found.append(("ghost", f"{process}: {record.getMessage()}"))
        about = f"{process} warnings ({record.getMessage()})"
        self._count(self._warnings[process], self.most_warnings, "log", about)

    def _count(self, times: deque[float], most: int, checker: str, what: str) -> None:
        now = self.world.time
        times.append(now)
        while times[0] <= now - 1.0:
            times.popleft()
        if len(times) > most:
            self._found.append((checker, f"{len(times)} of {what} within a second"))

    # -- leases against the store ----------------------------------------------------------------------

    def removed(self, id: str) -> None:
        """The store has ended a request: nobody may still believe in it."""
        for process, sessions in self.sessions.items():
            if process.dead:
                continue
            for session in sessions:
                for request in session.requests.values():
                    if self.truth.id_of(request) == id and self._believes(process, request):
                        early = process.true_time_of(request.ends_at) - self.world.time
                        self.wrong(
                            "honesty",
                            f"{process} believes in {request.id} for {early:.6f} s more than the store",
                        )

    def _believes(self, process: Process, request: Request) -> bool:
        return (
            request.state is HELD
            and self.truth.id_of(request) not in self.excused
            and process.boot() < request.ends_at
        )

    def _after_turn(self, process: Process) -> None:
        if self._found:
            self.wrong(*self._found[0])
        if process.failures:
            self.wrong("failure", f"{process}: {process.failures[0]}")
        for session in self.sessions.get(process, ()):
            for id, request in session.requests.items():
                if request.state is HELD:
                    if self._held.get(id) != request.ends_at:
                        self._check_held(process, session, request)
                elif request.state is WAITING and self.on_waiter is not None:
                    self.on_waiter()
        for body in self.bodies:
            if body.process is process and body.cancels and not body.told:
                self._check_told(body)

    def _check_held(self, process: Process, session: Session, request: Request) -> None:
        """A request has begun to hold, or holds for longer."""
        check_request(session, request)
        first = request.id not in self._held
        self._held[request.id] = request.ends_at
        if not self._believes(process, request):
            return
        self._check_together(process, request)
        self._check_record(process, request)
        if first:
            self.grants += 1
            self._numbers[request.id] = self.grants
            self._check_token(request)

    def _check_record(self, process: Process, request: Request) -> None:
        """The store has it, and nobody in front of it that it would have to wait for."""
        id = self.truth.id_of(request)
        queue = self.truth.queue(request.terms.kind, request.name)
        mine = next((one for one in queue if one.id == id), None)
        if mine is None:
            self.wrong("honesty", f"{process} believes in {request.id}, the store does not")
        # What a client has sent its leave for stands in the way of no other request of that client.
        leaving = {
            self.truth.id_of(other)
            for session in self.sessions[process]
            for other in session.requests.values()
            if other.state is LEAVING
        }
        before: list[Stood] = []
        for one in queue:
            if one.place == mine.place:
                break
            if one.id not in leaving:
                before.append(one)
        if mine.mode.isdecimal():
            if len({one.place for one in before}) >= int(mine.mode):
                self.wrong("fairness", f"{request.id} holds behind {before}")
        elif any("x" in (one.mode, mine.mode) and one.owner != mine.owner for one in before):
            self.wrong("fairness", f"{request.id} holds behind {before}")

    def _check_together(self, process: Process, request: Request) -> None:
        terms = request.terms
        beside = [request]
        for other_process, sessions in self.sessions.items():
            if other_process.dead:
                continue
            for session in sessions:
                for other in session.requests.values():
                    if (
                        other is not request
                        and other.terms.kind == terms.kind
                        and other.name == terms.name
                        and self._believes(other_process, other)
                        and other.owner != request.owner
                    ):
                        beside.append(other)
        if terms.limit:
            if len(beside) > terms.limit:
                self.wrong("exclusion", f"{len(beside)} hold at the same time: {beside}")
        elif len(beside) > 1 and any(one.terms.mode == "exclusive" for one in beside):
            self.wrong("exclusion", f"held at the same time: {beside}")

    def _check_token(self, request: Request) -> None:
        terms = request.terms
        if terms.limit or request.owner.startswith("u"):
            return  # an owner's have one token
        last = self._tokens.get((terms.kind, terms.name), 0)
        if terms.mode == "exclusive":
            if request.token <= last:
                self.wrong("token", f"{request.id} has token {request.token} after {last}")
            self._tokens[terms.kind, terms.name] = request.token

    # -- bodies ------------------------------------------------------------------------------------------

    def _check_told(self, body: Body) -> None:
        process, request = body.process, body.lease._request
        if body.task.done():
            return
        now = self.world.time
        if request.loss is not None:
            if body.lost_at is None:
                body.lost_at = now
            if body.task.cancelling():
                body.told = True
            elif now - max(body.lost_at, process.resumed_at) > _PROMPT:
                self.wrong("told", f"{process}: {request.id} was lost, its body goes on")
        elif request.state is HELD:
            overdue = now - process.true_time_of(request.ends_at)
            if overdue <= _PROMPT or now - process.resumed_at <= _PROMPT:
                return
            if not process.slept(now - _AFTER_SLEEP):
                self.wrong("told", f"{process}: {request.id}'s body is {overdue:.6f} s overdue")

    async def step(self, lease: Lease) -> None:
        """A body has taken a step: when its lease has ended, there is no second one."""
        task = asyncio.current_task()
        request = lease._request
        mine = [
            b for b in self.bodies if b.task is task and b.lease._request is request and b.cancels
        ]
        if not mine or lease.held or task is None or task.cancelling():
            return
        process = mine[0].process
        if process.slept(self.world.time - _AFTER_SLEEP):
            return  # its timers stood still meanwhile
        await asyncio.sleep(0)
        self.wrong("told", f"{process}: the body of {request.id} goes on after its lease")

    def write(self, base: str, lease: Lease, accepted: bool) -> None:
        """What keeps the largest token has taken or refused a write of an exclusive holder."""
        number = self._numbers.get(lease._request.id, 0)
        if accepted:
            last, token = self._writes.get(base, (0, 0))
            if 0 < number < last and lease.token > token:
                self.wrong("store", f"grant {number} (token {lease.token}) after {last} ({token})")
            self._writes[base] = (max(number, last), lease.token)

    # -- from time to time, and at the end -----------------------------------------------------------------

    def check_idle(self, patience: float) -> bool:
        """No request is first in its queue for long without holding. Return whether anybody waits."""
        now = self.world.time
        waiting = {
            self.truth.id_of(request): (process, request)
            for process, sessions in self.sessions.items()
            for session in sessions
            for request in session.requests.values()
            if request.state is WAITING
        }
        first: dict[str, float] = {}
        for terms in {
            request.terms.kind: request.terms for _, request in waiting.values()
        }.values():
            for name in {request.name for _, request in waiting.values()}:
                queue = self.truth.queue(terms.kind, name)
                closed = self.truth.is_closed(terms.kind, name)
                if queue and queue[0].id in waiting and not closed:
                    first[queue[0].id] = self._first.get(queue[0].id, now)
        self._first = first
        for id, since in first.items():
            process, request = waiting[id]
            since = max(since, process.resumed_at)
            if process.running and now - since > patience:
                self.wrong("idle", f"{request.id} is first for {now - since:.3f} s, and waits")
        return bool(waiting)

    def check_nothing_left(self, process: Process, session: Session) -> None:
        """All that its tasks began is over: the client has no request any more."""
        left: list[Any] = [list(session.requests), holds_of(session), len(session.deadlines)]
        if any(left):
            self.wrong("leak", f"{process} still has requests, holds, deadlines: {left}")
