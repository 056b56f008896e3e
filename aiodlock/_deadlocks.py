"""Deadlocks of one client's requests: what it tells others of its waits, and what it asks of theirs.

A request without a timeout whose task is inside other blocks is told to the store when it has waited for
``deadlock_after``: as a shared hold of a kind of its own, under the client's label, whose owner is the
message. So every client can read what the tasks of a holder wait for, on every store, also while that
client is busy. When its process dies, what it told ends with a lease. Shorter waits send nothing. Waits of
tasks that hold nothing else send nothing either.

Then a probe looks for a cycle (``_cycles.py``): at once, soon again, and every few seconds while the wait
lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ._clock import now
from ._cycles import Answer, Asking, Cycle, Name, Question, Wait, probe, verify
from ._errors import BackendError, DeadlockError, LossReason, Unsupported
from ._model import ENDED, Granted, Kind, Left, LockInfo, Terms
from ._options import check_text
from ._request import held_in
from .backends.base import Place

if TYPE_CHECKING:
    from ._request import Request
    from ._session import Session
    from .backends.base import Backend

_logger = logging.getLogger("aiodlock")

#: The kind of name under which waits are told. ``locks()`` does not list it.
KIND: Kind = "wait"
#: Of what kinds names are that requests wait for each other at.
_KINDS: tuple[Kind, ...] = ("lock", "semaphore", "once")
#: What a dead client told of its waits ends so many seconds later.
_TOLD_FOR = 5.0
#: A client looks at most once in so many seconds, however many of its waits become long. So others may tell
#: their waits so much later than theirs are long.
_PACE = 0.5
#: A wait is looked at again when it has been long for so many seconds, unless it was when it had been long
#: for ``_SURE``: by then the waits of others are told that began at the same time, or a little later.
_SECOND, _SURE = 0.75, 0.6
#: Seconds between later looks.
_LATER = 2.0
#: An answer about waits may take so long.
_ANSWER_WITHIN = 2.0
_MOST_BLOCKS = 100

#: The task that was last inside a block, here or in a task that has created this one.
_here: contextvars.ContextVar[weakref.ref[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "aiodlock_here", default=None
)


def enter(task: asyncio.Task[Any]) -> None:
    """A task is inside a block: the tasks that it creates from now on know it."""
    known = _here.get()
    if known is None or known() is not task:
        _here.set(weakref.ref(task))


class _Told:
    """One wait, and its place in the store. It listens to that place."""

    def __init__(self, wait: Wait, since: float) -> None:
        self.wait = wait
        self.since = since
        self.place: Place | None = None
        self.left_over: list[Place] = []
        self.probes = 0
        self.due = 0.0

    def granted(self) -> None:
        """Never: it is not queued."""

    def gone(self, reason: LossReason) -> None:
        """The store has forgotten it: tell it again."""
        if self.place is not None:
            self.left_over.append(self.place)
        self.place = None

    def recorded(self, result: bytes, *, unsure: bool) -> None:
        """Never: nothing is recorded of a wait."""

    def extension_failed(self, error: Exception) -> None:
        """It is told again if it ends."""

    def unavailable(self, error: BackendError) -> None:
        """Likewise."""

    def recalled(self) -> None:
        """Never: it does not linger."""


class Deadlocks:
    """Mutable state: ``_timers`` (of waits that are short yet), ``_told``, ``_probing``, ``_longer`` (set
    when one more wait has become long), ``_looked_at``."""

    def __init__(self, session: Session, after: float) -> None:
        self._session = session
        self._after = after
        self._timers: dict[Request, asyncio.TimerHandle] = {}
        self._told: dict[Request, _Told] = {}
        self._probing = False
        self._longer = asyncio.Event()
        self._looked_at = -math.inf

    # -- waits ---------------------------------------------------------------------------------------

    def waits(self, request: Request) -> bool:
        """A request begins to wait; return whether the end of its wait has to be told to ``ends``."""
        if not request.patient or not _is_watched(request):
            return False
        task = request.task() if request.task is not None else None
        if task is None:
            if not request.inside:  # a thread's; it has no creator
                return False
        elif not self._session.bodies.of(task) and not self._is_open_above(request, task):
            return False
        timer = self._session.loop.call_later(self._after, self._waits_long, request)
        self._timers[request] = timer
        return True

    def ends(self, request: Request) -> None:
        """Its wait is over."""
        timer = self._timers.pop(request, None)
        if timer is not None:
            timer.cancel()
        told = self._told.pop(request, None)
        if told is not None:
            self._take_back(told)

    def tells_of(self, request: Request) -> bool:
        """Return whether a wait was told that relies on this hold: its token must be no other body's."""
        held = ((request.terms.kind, request.name), request.token)
        return any(held in told.wait.inside for told in self._told.values())

    def left_block(self, task: asyncio.Task[Any]) -> None:
        """Another task has left a block of this one: what was told of this one's wait is told anew."""
        for request, told in list(self._told.items()):
            if request.task is not None and request.task() is task:
                self._tell_anew(request, told)

    def released(self, hold: Request) -> None:
        """A hold or one of its acquisitions ends, perhaps in a block of a task that waits: the same."""
        if not self._told:
            return
        held = ((hold.terms.kind, hold.name), hold.token)
        for request, told in list(self._told.items()):
            if held in told.wait.inside:
                self._tell_anew(request, told)

    def _tell_anew(self, request: Request, told: _Told) -> None:
        inside = self._inside(request)
        if inside == told.wait.inside:
            return
        self._take_back(told)
        del self._told[request]
        if inside:
            self._told[request] = _Told(replace(told.wait, inside=inside), told.since)
            self._longer.set()

    def _inside(self, request: Request) -> frozenset[tuple[Name, int]]:
        """Return the blocks that its task or thread is in, and that hold by themselves."""
        task = request.task() if request.task is not None else None
        held = held_in(request.inside) if task is None else self._session.bodies.held(task)
        watched = [one for one in held if _is_watched(one)]
        return frozenset(
            [((one.terms.kind, one.name), one.token) for one in watched[:_MOST_BLOCKS]]
        )

    def _is_open_above(self, request: Request, task: asyncio.Task[Any]) -> bool:
        """Tell whether the task that has created this one is inside a block on the name."""
        inherited = _here.get()
        parent = inherited() if inherited is not None else None
        if parent is None or parent is task:
            return False
        return any(
            one.name == request.name and one.terms.kind == request.terms.kind == "lock"
            for one in self._session.bodies.held(parent)
        )

    def _waits_long(self, request: Request) -> None:
        del self._timers[request]
        if request.woken is None or request.woken.done():
            return
        inside = self._inside(request)
        if not inside:
            task = request.task() if request.task is not None else None
            # The creator may have left its block meanwhile, or what it held.
            if task is not None and self._is_open_above(request, task):
                self._session.telling.waits_for_parent(request)
            return
        label = self._session.backend.label
        arrived = time.time() - (now() - request.queued_at)
        self._told[request] = _Told(
            Wait(
                request.id,
                request.name,
                request.terms.mode,
                request.options.owner or request.owner[1:],
                label,
                int(arrived * 1e6),
                inside,
                str(getattr(request.terms, "note", "") or ""),
                request.terms.kind,
            ),
            now(),
        )
        self._longer.set()
        if not self._probing:
            self._probing = self._session.start_soon(self._probe_all)

    # -- the store -----------------------------------------------------------------------------------

    async def _tell(self, request: Request, told: _Told) -> None:
        try:
            await self._tell_for(_TOLD_FOR, told)
        except Unsupported:
            # ZooKeeper's servers limit how long a session is; what the request asks for, they grant.
            await self._tell_for(request.terms.ttl, told)

    async def _tell_for(self, ttl: float, told: _Told) -> None:
        session = self._session
        terms = Terms(
            kind=KIND,
            name=session.backend.label,
            mode="shared",
            limit=0,
            ttl=ttl,
            waiter_ttl=ttl,
            lock_delay=0.0,
            margin=0.0,
            max_hold=None,
            auto_extend=True,
        )
        owner = "u" + quote(encode(told.wait), safe="")
        place = session.backend.place(terms, session.new_id(), owner, told)
        try:
            answer = await place.acquire(wait=False)
        except BaseException:
            self._leave_soon(place)
            raise
        # Not earlier: what is left while its answer is on the way would be kept alive by that answer.
        told.place = place
        if not isinstance(answer, Granted):
            self._take_back(told)

    def _take_back_if_over(self, request: Request, told: _Told) -> None:
        """The wait may have ended while it was told."""
        if self._told.get(request) is not told:
            self._take_back(told)

    def _take_back(self, told: _Told) -> None:
        places, told.left_over = told.left_over, []
        if told.place is not None:
            places.append(told.place)
            told.place = None
        for place in places:
            self._leave_soon(place)

    def _leave_soon(self, place: Place) -> None:
        if not place.leave_soon(ENDED, partial(self._left, place)):
            self._session.start_soon(_leave, place)

    def _left(self, place: Place, answer: Left | BackendError) -> None:
        """What was not answered is said once more: others see the wait until the store knows."""
        if isinstance(answer, BackendError):
            self._session.start_soon(_leave, place)

    async def _probe_all(self) -> None:
        try:
            while self._told:
                await self._until_due()
                try:
                    await self._probe(self._due())
                except Exception as error:  # whatever it is: leases must not be lost for it
                    _logger.debug(
                        "looking for deadlocks failed: %r",
                        error,
                        extra={"event": "probe_failed"},
                    )
        finally:
            self._probing = False

    async def _until_due(self) -> None:
        """Return when a wait is to be looked at; one that has just become long is, as soon as the pace
        allows."""
        await asyncio.sleep(self._looked_at + _PACE - now())
        self._longer.clear()
        pause = min((told.due for told in self._told.values()), default=0.0) - now()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._longer.wait()
        self._looked_at = now()

    def _due(self) -> list[Request]:
        """Return the waits to look at now; the next look may be too late for what is due before it."""
        next_look = self._looked_at + _PACE
        return [request for request, told in self._told.items() if told.due <= next_look]

    async def _probe(self, requests: list[Request]) -> None:
        starts: dict[Request, Wait] = {}
        for request in requests:
            told = self._told.get(request)
            if told is None:
                continue  # its wait has ended meanwhile
            told.due = (
                self._looked_at + _LATER
                if self._looked_at >= told.since + _SURE
                else told.since + _SECOND
            )
            told.probes += 1
            if told.place is None:
                self._take_back(told)  # what the store has forgotten
                await self._tell(request, told)
                self._take_back_if_over(request, told)
            starts[request] = told.wait
        ask = Asked(self._session.backend, {self._session.backend.label: self._own})
        first = await ask.all({request: probe(wait) for request, wait in starts.items()})
        found = await ask.all({request: verify(cycle) for request, cycle in first.items()})
        self._probe_found(found)

    def _probe_found(self, found: Mapping[Request, Cycle]) -> None:
        """End the wait of each victim that still waits."""
        for request, cycle in found.items():
            if request in self._told and request.woken is not None and not request.woken.done():
                self._session.telling.deadlock(request, cycle)
                request.wake(error_of(request.name, cycle))

    def _own(self) -> tuple[Wait, ...]:
        return tuple(told.wait for told in self._told.values())


async def _leave(place: Place) -> None:
    try:
        await place.leave(ENDED, within=_ANSWER_WITHIN)
    except BackendError:
        place.abandon()  # it ends with its lease


class Asked:
    """Asks a store what probes want to know, of all probes together.

    :param known: clients whose waits are known here.
    """

    def __init__(self, backend: Backend, known: Mapping[str, Any]) -> None:
        self._backend = backend
        self._known = known

    async def all(self, asking: Mapping[Any, Asking]) -> dict[Any, Cycle]:
        """Let all of them look; return what they have found."""
        found: dict[Any, Cycle] = {}
        questions: dict[Any, Question] = {}

        def go_on(key: Any, answer: Answer | None) -> None:
            try:
                questions[key] = asking[key].send(answer)  # type: ignore[arg-type]
            except StopIteration as done:
                questions.pop(key, None)
                if done.value is not None:
                    found[key] = done.value

        for key in asking:
            go_on(key, None)
        while questions:
            answer = await self._answer(questions.values())
            for key in list(questions):
                go_on(key, answer)
        return found

    async def _answer(self, questions: Iterable[Question]) -> Answer:
        names = sorted({name for question in questions for name in question.names})
        clients = {client for question in questions for client in question.clients}
        waits = {client: self._known[client]() for client in clients if client in self._known}
        others = sorted(clients - waits.keys())
        infos: list[LockInfo] = []
        async with asyncio.timeout(_ANSWER_WITHIN):
            # One after the other: a pass has to have ended before the next begins.
            for kind in _KINDS:
                some = [name for of, name in names if of == kind]
                infos += await self._backend.inspect_all(kind, some) if some else []
            told = await self._backend.inspect_all(KIND, others) if others else []
        waits |= {info.name: tuple(waits_in(info)) for info in told}
        return Answer({(info.kind, info.name): info for info in infos}, waits)


async def standing(backend: Backend, clients: Iterable[str]) -> list[Cycle]:
    """Return each cycle among the waits that these clients have told, from its youngest request on."""
    labels = sorted(set(clients))
    told = await backend.inspect_all(KIND, labels) if labels else []
    waits = {wait.id: wait for info in told for wait in waits_in(info)}
    ask = Asked(backend, {})
    first = await ask.all({id: probe(wait) for id, wait in waits.items()})
    found = await ask.all({id: verify(cycle) for id, cycle in first.items()})
    return [found[id] for id in sorted(found)]


def error_of(name: str, cycle: Cycle) -> DeadlockError:
    """Return what the victim gets."""
    return DeadlockError(
        f"waiting for {name!r} would never end, each of these requests waits for another: "
        f"{cycle.words()}; take the names in one order, use multilock, or a timeout",
        name=name,
        cycle=cycle.members(),
    )


# -- what is told ------------------------------------------------------------------------------------


def encode(wait: Wait) -> str:
    """Write a wait as text."""
    fields = [wait.id, wait.kind, wait.name, wait.mode, wait.owner, wait.arrived, wait.note]
    inside = [[*where, token] for where, token in sorted(wait.inside)]
    return json.dumps([*fields, inside], separators=(",", ":"))


def waits_in(info: LockInfo) -> Iterable[Wait]:
    """Read what a client told; what cannot be read is left out."""
    for holder in info.holders:
        try:
            id, kind, name, mode, owner, arrived, note, inside = json.loads(holder.owner)
            blocks = frozenset(
                ((of, check_text("name", one)), int(token)) for of, one, token in inside
            )
            if mode not in ("exclusive", "shared") or not {kind, *_kinds(blocks)} <= {*_KINDS}:
                continue
            yield Wait(
                str(id),
                check_text("name", name),
                mode,
                str(owner),
                info.name,
                int(arrived),
                blocks,
                str(note),
                kind,
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue


def _kinds(blocks: Iterable[tuple[Name, int]]) -> set[str]:
    return {kind for (kind, _), _ in blocks}


def _is_watched(request: Request) -> bool:
    """Whether it makes edges: a semaphore with more places is had when any of them is free."""
    terms = request.terms
    return terms.kind in ("lock", "once") or (terms.kind == "semaphore" and terms.limit == 1)
