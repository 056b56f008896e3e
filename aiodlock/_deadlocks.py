"""Deadlocks of one client's requests: which of its waits are long, and the search for cycles among them.

A request without a timeout whose task is inside other blocks is told to others when it has waited for
``deadlock_after`` (``_waits.py``). Shorter waits send nothing. Waits of tasks that hold nothing else send
nothing either.

Then its client searches for cycles (``_cycles.py``), for all of its long waits together: at once, soon
again, and every few seconds while waits last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ._bodies import Bodies, creator
from ._clock import now
from ._cycles import TURN, Answer, Asking, Block, Cycle, Name, Question, Wait, search, verify
from ._errors import DeadlockError
from ._model import LockInfo
from ._patience import soon
from ._request import HELD, held_in
from ._telling import Telling
from ._waits import PACE, Reader, Record

if TYPE_CHECKING:
    from ._request import Request
    from .backends.base import Backend

_logger = logging.getLogger("aiodlock")
_T = TypeVar("_T")

#: A client searches at most once in so many seconds, however many of its waits become long. So others may
#: tell their waits so much later than theirs are long.
_PACE = PACE
#: A wait is looked at again when it has been long for so many seconds, unless it was when it had been long
#: for ``_SURE``: by then the waits of others are told that began at the same time, or a little later.
_SECOND, _SURE = 0.75, 0.6
#: Seconds until each later look: what it finds is what an earlier one was not told.
_LATER = 2.0
#: After a search that took long, so many times that.
_TIMES = 20.0
#: So many names are asked about in one call, with their queues and without.
_QUEUES_AT_ONCE, _NAMES_AT_ONCE = 20, 250
#: So many waits become long in one turn of the event loop.
_SLICE = 100
#: The waits of so many victims end in one turn.
_VICTIMS = 50
_MOST_BLOCKS = 100


class _Long:
    """A long wait. ``since`` when, ``due`` for the next look, ``sure`` that others were told of by then
    that began at the same time."""

    __slots__ = ("due", "since", "sure", "wait")

    def __init__(self, wait: Wait, since: float) -> None:
        self.wait = wait
        self.since = since
        self.due = 0.0
        self.sure = False


class Deadlocks:
    """Mutable state: ``_short`` (when each wait becomes long, the earliest first) and ``_timer`` of the
    first; ``_long`` waits, ``_inside_of`` (which of them are inside a block), ``_searching``, ``_longer``
    (set when one more wait has become long), ``_looked_at``, ``_took`` (the last search).

    :param after: seconds until a wait is long.
    :param start_soon: runs something in the session's task group.
    """

    def __init__(
        self,
        after: float,
        backend: Backend,
        bodies: Bodies,
        telling: Telling,
        start_soon: Callable[..., bool],
    ) -> None:
        self._after = after
        self._backend = backend
        self._bodies = bodies
        self._telling = telling
        self._start_soon = start_soon
        self._short: dict[Request, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._long: dict[Request, _Long] = {}
        self._inside_of: dict[Block, set[Request]] = {}
        self._record = Record(backend, start_soon)
        self._reader = Reader(backend)
        self._searching = False
        self._longer = asyncio.Event()
        self._looked_at = -math.inf
        self._took = 0.0

    # -- waits ---------------------------------------------------------------------------------------

    def waits(self, request: Request) -> bool:
        """A request begins to wait; return whether the end of its wait has to be told to ``ends``."""
        if not request.patient or not _is_watched(request):
            return False
        task = request.task() if request.task is not None else None
        if task is None:
            if not request.inside:  # a thread's; it has no creator
                return False
        elif not self._bodies.of(task) and not self._is_open_above(request, task):
            return False
        self._short[request] = now() + self._after
        if self._timer is None:
            self._set_timer()
        return True

    def ends(self, request: Request) -> None:
        """Its wait is over."""
        self._short.pop(request, None)
        if request in self._long:
            self._forget(request)
            # A named owner may have another request in the queue, which looks like this one.
            granted = request.state is HELD and request.options.owner is None
            self._record.remove(request.id, granted=granted)

    def tells_of(self, request: Request) -> bool:
        """Return whether others may read that a waiting task relies on this hold: its token must be no
        other body's."""
        block = _block_of(request)
        return block in self._inside_of or self._record.names(block)

    def left_block(self, task: asyncio.Task[Any]) -> None:
        """Another task has left a block of this one: what was told of this one's wait is told anew."""
        for request in [one for one in self._long if one.task_id == id(task)]:
            self._tell_anew(request)

    def released(self, hold: Request) -> None:
        """A hold or one of its acquisitions ends, perhaps in a block of a task that waits: the same."""
        if self._inside_of:
            for request in tuple(self._inside_of.get(_block_of(hold), ())):
                self._tell_anew(request)

    def _tell_anew(self, request: Request) -> None:
        long, inside = self._long[request], self._inside(request)
        if inside == long.wait.inside:
            return
        self._forget(request)
        if inside:
            self._add(request, _Long(replace(long.wait, inside=inside), long.since))
        else:
            self._record.remove(request.id, granted=False)

    def _add(self, request: Request, long: _Long) -> None:
        self._long[request] = long
        for block in long.wait.inside:
            self._inside_of.setdefault(block, set()).add(request)
        self._record.put(long.wait)
        self._longer.set()

    def _forget(self, request: Request) -> None:
        long = self._long.pop(request)
        for block in long.wait.inside:
            inside = self._inside_of[block]
            inside.discard(request)
            if not inside:
                del self._inside_of[block]

    def _inside(self, request: Request) -> frozenset[Block]:
        """Return the blocks that its task or thread is in, and that hold by themselves."""
        task = request.task() if request.task is not None else None
        held = held_in(request.inside) if task is None else self._bodies.held(task)
        watched = [one for one in held if _is_watched(one)]
        return frozenset([_block_of(one) for one in watched[:_MOST_BLOCKS]])

    def _is_open_above(self, request: Request, task: asyncio.Task[Any]) -> bool:
        """Tell whether the task that has created this one is inside a block on the name."""
        inherited = creator()
        parent = inherited() if inherited is not None else None
        if parent is None or parent is task:
            return False
        return any(
            one.name == request.name and one.terms.kind == request.terms.kind and _is_watched(one)
            for one in self._bodies.held(parent)
        )

    # -- long waits ----------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        pause = max(0.0, next(iter(self._short.values())) - now())
        self._timer = asyncio.get_running_loop().call_later(pause, self._on_timer)

    def _on_timer(self) -> None:
        """Those that have become long, a slice in each turn of the loop."""
        self._timer = None
        moment = now()
        for _ in range(_SLICE):
            request, due = next(iter(self._short.items()), (None, math.inf))
            if request is None or due > moment:
                break
            self._waits_long(request)
        if self._short and self._timer is None:
            self._set_timer()

    def _waits_long(self, request: Request) -> None:
        del self._short[request]
        if request.woken is None or request.woken.done():
            return
        inside = self._inside(request)
        if not inside:
            task = request.task() if request.task is not None else None
            # The creator may have left its block meanwhile, or what it held.
            if task is not None and self._is_open_above(request, task):
                self._telling.waits_for_parent(request)
            return
        arrived = time.time() - (now() - request.asked_at)
        wait = Wait(
            request.id,
            request.name,
            request.terms.mode,
            request.options.owner or request.owner[1:],
            self._backend.label,
            int(arrived * 1e6),
            inside,
            request.terms.note,
            request.terms.kind,
        )
        self._add(request, _Long(wait, now()))
        if not self._searching:
            self._searching = self._start_soon(self._search_all)

    # -- the search ----------------------------------------------------------------------------------

    async def _search_all(self) -> None:
        try:
            while self._long:
                await self._until_due()
                began = now()
                try:
                    await self._search()
                except Exception as error:  # whatever it is: leases must not be lost for it
                    _logger.debug(
                        "looking for deadlocks failed: %r",
                        error,
                        extra={"event": "probe_failed"},
                    )
                self._took = now() - began
        finally:
            self._searching = False

    async def _until_due(self) -> None:
        """Return when a wait is to be looked at; one that has just become long is, as soon as the pace
        allows."""
        await asyncio.sleep(self._looked_at + _PACE - now())
        self._longer.clear()
        pause = min((long.due for long in self._long.values()), default=0.0) - now()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._longer.wait()
        self._looked_at = now()

    def _plan(self) -> bool:
        """All waits are looked at now: plan the next look at each. Return False if none is due, or will be
        before the next look could be."""
        moment = self._looked_at
        if all(long.due > moment + _PACE for long in self._long.values()):
            return False
        pause = max(_LATER, _TIMES * self._took)
        for long in self._long.values():
            long.sure = moment >= long.since + _SURE
            long.due = moment + pause if long.sure else long.since + _SECOND
        return True

    async def _search(self) -> None:
        """Search for cycles of all waits, if some of them are due."""
        if not self._plan():
            return
        await self._record.told()
        label = self._backend.label
        requests = {long.wait.id: request for request, long in self._long.items()}
        ask = Asked(self._backend, self._reader, {label: self._record.waits})
        first = await ask.first_pass(list(self._record.waits.values()), label)
        if not first:
            return
        await self._record.told(narrowing=True)
        found = await ask.second_pass(first, label)
        for at in range(0, len(found), _VICTIMS):
            part = found[at : at + _VICTIMS]
            self._found({requests[cycle.edges[0].wait.id]: cycle for cycle in part})
            await asyncio.sleep(0)

    def _found(self, found: Mapping[Request, Cycle]) -> None:
        """End the wait of each victim that still waits."""
        for request, cycle in found.items():
            if request in self._long and request.woken is not None and not request.woken.done():
                self._telling.deadlock(request, cycle)
                request.wake(error_of(request.name, cycle))


class Asked:
    """Asks a store what the passes of a search want to know.

    :param known: the waits of clients that are known here, by id; they may change meanwhile.
    """

    def __init__(
        self, backend: Backend, reader: Reader, known: Mapping[str, Mapping[str, Wait]]
    ) -> None:
        self._backend = backend
        self._reader = reader
        self._known = known

    async def first_pass(self, mine: Collection[Wait], me: str) -> list[Cycle]:
        """Look for cycles of these waits."""
        return await self._run(search(list(mine), me))

    async def second_pass(self, found: Collection[Cycle], me: str) -> list[Cycle]:
        """Return the cycles that are still there. The first pass has to have ended before."""
        return await self._run(verify(list(found), me))

    async def _run(self, asking: Asking[_T]) -> _T:
        answer: Answer | None = None
        while True:
            try:
                question = asking.send(answer)  # type: ignore[arg-type]
            except StopIteration as done:
                result: _T = done.value
                return result
            if question is TURN:
                await asyncio.sleep(0)
            else:
                answer = await self._answer(question)

    async def _answer(self, question: Question) -> Answer:
        # One after the other: tasks leave the queue of a name before what was told of them is changed.
        infos = await self._inspect(question.names, queues=False)
        infos |= await self._inspect(question.queues, queues=True)
        waits = {client: dict(known) for client in question.clients
                 if (known := self._known.get(client)) is not None}  # fmt: skip
        others = question.clients - waits.keys()
        if others:
            async with asyncio.timeout(soon(self._backend.answers_within)):
                waits |= await self._reader.waits_of(others)  # type: ignore[arg-type]
        return Answer(infos, waits)

    async def _inspect(self, names: Iterable[Name], *, queues: bool) -> dict[Name, LockInfo]:
        kinds: dict[Any, list[str]] = {}
        for kind, name in sorted(names):
            kinds.setdefault(kind, []).append(name)
        infos: dict[Name, LockInfo] = {}
        size = _QUEUES_AT_ONCE if queues else _NAMES_AT_ONCE
        for kind, of_kind in kinds.items():
            for at in range(0, len(of_kind), size):
                async with asyncio.timeout(soon(self._backend.answers_within)):
                    found = await self._backend.inspect_all(
                        kind, of_kind[at : at + size], queues=queues
                    )
                infos |= {(info.kind, info.name): info for info in found}
                await asyncio.sleep(0)
        return infos


async def standing(backend: Backend, clients: Iterable[str]) -> list[Cycle]:
    """Return each cycle among the waits that these clients have told, from its youngest request on."""
    reader = Reader(backend)
    async with asyncio.timeout(soon(backend.answers_within)):
        told = await reader.waits_of(set(clients))
    ask = Asked(backend, reader, {})
    first = await ask.first_pass([one for waits in told.values() for one in waits.values()], "")
    found = await ask.second_pass(first, "") if first else []
    return sorted(found, key=lambda cycle: cycle.edges[0].wait.id)


def error_of(name: str, cycle: Cycle) -> DeadlockError:
    """Return what the victim gets."""
    return DeadlockError(
        f"waiting for {name!r} would never end, each of these requests waits for another: "
        f"{cycle.words()}; take the names in one order, use multilock, or a timeout",
        name=name,
        cycle=cycle.members(),
    )


def _block_of(request: Request) -> Block:
    return (request.terms.kind, request.name), request.token


def _is_watched(request: Request) -> bool:
    """Whether it makes edges: a semaphore with more places is had when any of them is free."""
    terms = request.terms
    return terms.kind in ("lock", "once") or (terms.kind == "semaphore" and terms.limit == 1)
