"""One task that extends every lease and every waiter of a client, in batches.

Each place stands in one heap, at the moment when something is due: the next extension (a third of the
length, or a little earlier, so that what began at about the same time is extended together), the look of
a head at its blocker's end, or the end of the lease. An extension has three outcomes: done, gone,
unknown. Unknown is tried again until the local deadline, and is lost then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from ._clock import now
from ._errors import BackendError, BackendUnavailable
from ._model import Gone, Granted, Waiting
from ._place import Place, State

if TYPE_CHECKING:
    from ._session import Session

_logger = logging.getLogger("aiodlock")

_FIRST_RETRY = 0.05
_LONGEST_RETRY = 1.0
#: Time for the server's clock to pass the blocker's end for certain (its milliseconds are floored).
_LOOK_SLACK = 0.003
#: The loop's clock stands still while the machine sleeps, leases end: how late a body may hear of it.
_LONGEST_TIMER = 1.0
#: Extensions are due at moments that so many parts of their length lie apart.
_GRID = 64
#: So many places are served in one turn of the loop: that takes a few milliseconds.
_SLICE = 200
#: So many extensions are on their way to one server at most: what is read at once takes some milliseconds,
#: and few objects grow so old that Python's collector looks at all there are.
_WINDOW = 2000
#: After a reconnection so many holders are asked about per second, and all within ``_LONGEST_SPREAD``.
_ASKED_PER_SECOND = 1000
_LONGEST_SPREAD = 1.0
_NEVER = float("inf")
#: While somebody holds, the timer comes at least so often in the shortest ttl. A loop that was blocked for
#: that part of it is worth a warning: a little longer, and leases are lost.
_TICKS, _BLOCKED = 8, 0.5
#: A request that waits for so many ttls while its task is in other blocks is worth a warning.
_LONG_WAIT = 3


class Extender:
    """The heap of what is due, and the timer of the earliest.

    Mutable state: ``_heap`` of [moment, serial, place or None], ``_dead`` (entries without a place),
    ``_wake_at`` and ``_timer`` (when the task is woken), ``_due`` (set when it is), ``_batch`` (what it
    extends then), ``_flying`` (how many extensions are on their way, per server), ``_kept`` (places that
    wait until there are fewer), ``_shortest`` (the shortest ttl of a holder since there was none),
    ``_looks`` (places that are to be looked at, and how), ``_taken`` (answers taken in this turn).
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._heap: list[list[Any]] = []
        self._serials = count()
        self._dead = 0
        self._wake_at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()
        self._batch: list[Place] = []
        self._flying: dict[object, int] = {}
        self._kept: dict[object, deque[Place]] = {}
        self._shortest = _NEVER
        self._looks: deque[tuple[deque[Place], Callable[[Place], object]]] = deque()
        self._taken = 0
        # Each client has its own, so that a host's processes do not ask in step.
        self._phase = random.random()

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    # -- what the others call ----------------------------------------------------------------------

    def add(self, place: Place) -> None:
        """Take care of a place that was acknowledged just now."""
        # The answer to a repetition tells what is left of a lease that began with the first message.
        held = place.state is State.HELD
        length = place.request.ttl if held else place.request.waiter_ttl
        if held and length < self._shortest:
            self._shortest = length
        place.beat = self._beat_of(place, latest=place.deadline - length * 2 / 3)
        self._schedule(place)

    def look_at(self, place: Place, moment: float) -> None:
        """The place is the head of its queue, and what blocks it may end at ``moment``."""
        place.look_at = moment + _LOOK_SLACK
        self._watch(place, True)
        self._schedule(place)

    def extend_now(self, place: Place) -> None:
        """Extend at the next turn of the loop."""
        if place.state in (State.WAITING, State.HELD):
            place.beat = 0.0
            place.asked = False
            self._schedule(place)

    def ask_about_held(self, place: Place, spread: float = 0.0) -> None:
        """See within ``spread`` whether the store knows of the hold, unless it must not be extended."""
        if not place.options.auto_extend or self._at_maximum(place):
            return
        if not spread:
            self.extend_now(place)
        elif not place.asked:
            place.beat = min(place.beat, now() + random.uniform(0.0, spread))
            self._schedule(place)

    def look_through(self, look: Callable[[Place], object]) -> None:
        """Call ``look`` for each place there is now, a slice in each turn of the loop."""
        self._looks.append((deque(self._session.places.values()), look))
        self._look_on()

    @staticmethod
    def spread_of(number: int) -> float:
        """Return the seconds over which so many holders are asked about after a reconnection."""
        return min(number / _ASKED_PER_SECOND, _LONGEST_SPREAD)

    def forget(self, place: Place) -> None:
        """Stop caring."""
        entry = place.entry
        if entry is not None:
            entry[2] = place.entry = None
            self._bury()
        if place.watching:
            self._watch(place, False)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                self._collect(now())
                batch, self._batch = self._batch, []
                for server, part in self._apart(batch).items():
                    self._keep(server, part)
                if self._looks or len(batch) >= _SLICE:
                    await asyncio.sleep(0)  # everybody else's turn
                    self._look_on()
                    continue
                self._set_timer()
                await self._due.wait()
                self._due.clear()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    # -- what is due -------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Count one more dead entry; when most are, keep the others."""
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapify(self._heap)
            self._dead = 0

    def _schedule(self, place: Place) -> None:
        entry, when = place.entry, self._next_moment(place)
        place.due = when
        if entry is not None:
            if entry[0] <= when:
                return  # it comes up before, and is put back then: that makes no object
            entry[2] = None
            self._bury()
        place.entry = entry = [when, next(self._serials), place]
        heappush(self._heap, entry)
        if when <= 0.0:
            self._due.set()  # asked for now: no timer
        elif when < self._wake_at:
            self._set_timer()
        elif self._wake_at <= now():
            self._due.set()  # the machine has slept, and the timer is late

    def _next_moment(self, place: Place) -> float:
        # While an extension is on its way only the end of the lease is due.
        moment = _NEVER if place.asked else place.beat
        if place.state is State.HELD:
            return min(moment, place.ends_at)
        if place.look_at is not None and not place.asked:
            moment = min(moment, place.look_at)
        # A reply may never come: a waiter asks again when its lease is over.
        return min(moment, max(place.deadline, now() + _LONGEST_RETRY)) if place.asked else moment

    def _set_timer(self) -> None:
        while self._heap and self._heap[0][2] is None:
            heappop(self._heap)
            self._dead -= 1
        wake_at = self._heap[0][0] if self._heap else _NEVER
        if wake_at == self._wake_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = wake_at
        if wake_at != _NEVER:
            # It comes often enough to tell for how long the loop was blocked.
            longest = min(_LONGEST_TIMER, self._shortest / _TICKS)
            pause = min(max(0.0, wake_at - now()), longest)
            self._timer = self._loop.call_later(pause, self._on_timer)
        else:
            self._shortest = _NEVER

    def _on_timer(self) -> None:
        assert self._timer is not None
        late = self._loop.time() - self._timer.when()
        self._timer = None
        self._wake_at = _NEVER
        if late > self._shortest * (_BLOCKED - 1 / _TICKS):
            self._warn_of_block(late)
        # Here, and not in the task: a body must not take another step after its lease has ended.
        self._collect(now())
        if self._batch:
            self._due.set()
        else:
            self._set_timer()

    def _warn_of_block(self, late: float) -> None:
        held = (entry[2] for entry in self._heap if entry[2] and entry[2].state is State.HELD)
        self._shortest = min((place.ttl for place in held), default=_NEVER)
        if late > self._shortest * (_BLOCKED - 1 / _TICKS):
            self._session.telling.blocked(late, self._shortest)

    def _collect(self, moment: float) -> None:
        """Mark what has ended as lost, and put a slice of what must be extended now into the batch."""
        due: list[list[Any]] = []
        room = _SLICE
        while self._heap and room and (self._heap[0][2] is None or self._heap[0][0] <= moment):
            entry = heappop(self._heap)
            place: Place | None = entry[2]
            if place is None:
                self._dead -= 1
                continue
            place.entry = None
            self._session.lose_if_overdue(place)
            if place.state in (State.WAITING, State.HELD):
                room -= 1
                if place.due > moment:
                    self._put_back(place, entry, place.due)
                    continue
                due.append(entry)
                if (
                    place.state is State.WAITING
                    and place.queued_at + _LONG_WAIT * place.ttl < moment
                ):
                    self._session.waits_long(place)
        for entry in due:
            place = entry[2]
            place.asked = True
            if place.silent_since is None:
                place.silent_since = moment
            place.due = self._next_moment(place)
            # Not behind the beat after this one: the entry need not be made anew when the answer comes.
            self._put_back(place, entry, min(place.due, self._beat_of(place)))
            self._batch.append(place)

    def _put_back(self, place: Place, entry: list[Any], when: float) -> None:
        entry[0], place.entry = when, entry
        heappush(self._heap, entry)

    def _look_on(self) -> None:
        """Look at the next slice of what is to be looked at."""
        if self._looks:
            places, look = self._looks[0]
            for _ in range(min(_SLICE, len(places))):
                look(places.popleft())
            if not places:
                self._looks.popleft()
            if self._looks:
                self._due.set()

    def _apart(self, batch: Sequence[Place]) -> dict[object, list[Place]]:
        """Answers are awaited in order: those of a silent server must not keep another's waiting."""
        parts: dict[object, list[Place]] = {}
        for place in batch:
            parts.setdefault(self._session.backend.server_of(place.request), []).append(place)
        return parts

    def _keep(self, server: object, places: Iterable[Place]) -> None:
        """Extend these as soon as there are not too many on their way."""
        self._kept.setdefault(server, deque()).extend(places)
        self._send_kept(server)

    def _send_kept(self, server: object) -> None:
        kept = self._kept[server]
        while kept and self._flying.get(server, 0) < _WINDOW:
            batch = [kept.popleft() for _ in range(min(_SLICE, len(kept)))]
            self._flying[server] = self._flying.get(server, 0) + len(batch)
            self._session.start_soon(self._fly, server, batch)
        if not kept:
            del self._kept[server]

    async def _fly(self, server: object, batch: Sequence[Place]) -> None:
        await self._extend([place for place in batch if place.state in (State.WAITING, State.HELD)])
        self._flying[server] -= len(batch)
        if not self._flying[server]:
            del self._flying[server]
        if server in self._kept:
            self._send_kept(server)

    # -- extending ---------------------------------------------------------------------------------

    async def _extend(self, batch: Sequence[Place]) -> None:
        backend = self._session.backend
        requests = [place.request for place in batch]
        lengths = [place.length for place in batch]
        granted = [place.granted for place in batch]
        outcomes = backend.extend(list(zip(requests, lengths, strict=True)))
        for place, request, length, known, outcome in zip(
            batch, requests, lengths, granted, outcomes, strict=True
        ):
            try:
                result = await outcome
            except BackendError as error:
                if place.request is request:
                    self._on_unknown(place, error)
            else:
                if place.request is request:
                    self.on_answer(place, result, length, known)
            if self._taken >= _SLICE:
                await self._pass_turn()
            elif not self._taken:
                self._loop.call_soon(self._new_turn)
            self._taken += 1

    async def _pass_turn(self) -> None:
        """Take no more answers in this turn of the loop: thousands may have come in one packet."""
        while self._taken >= _SLICE:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if not self._taken:
            self._loop.call_soon(self._new_turn)

    def _new_turn(self) -> None:
        self._taken = 0

    def on_answer(
        self, place: Place, result: Granted | Waiting | Gone, length: float, granted: bool
    ) -> None:
        """Take the answer to an extension by ``length``; ``granted``: it was sent as a holder's."""
        place.failures, place.silent_since = 0, None
        if place.granted and isinstance(result, Waiting):
            if not granted:
                # A notice has overtaken this answer, and the extension to the full ttl is due.
                place.deadline = max(place.deadline, result.deadline)
                return
            result = Gone("gone")  # a failover has lost the grant, and not the place in the queue
        elif (
            place.state is State.HELD
            and isinstance(result, Granted)
            and result.token != place.token
        ):
            # The same, and it was granted anew: others may have been in between.
            result = Gone("gone")
        place.asked = False
        if place.state not in (State.WAITING, State.HELD):
            return
        if isinstance(result, Gone):
            self.forget(place)
            if place.state is State.HELD:
                self._session.lose_if_overdue(place)
                self._session.lose(place, result.reason)
            else:
                place.unqueue()
            return
        place.deadline = max(place.deadline, result.deadline)
        if isinstance(result, Waiting):
            place.look_at = None
            place.floor = result.floor
            if place.state is State.WAITING and result.look_at is not None:
                place.beat = self._beat_of(place)
                self.look_at(place, result.look_at)
                return
        elif place.state is State.WAITING:
            if result.token <= place.broken:
                self.extend_now(place)  # a break has overtaken this answer
            elif granted and result.deadline - place.options.margin <= now():
                # The full ttl was asked for, and is over when its answer comes. Asking on keeps the name.
                self.forget(place)
                place.unqueue()
            else:
                self.granted(place, result.token, result.deadline)
            return
        elif length < place.length:
            # Asked for as a waiter, or before the ttl was changed.
            self.extend_now(place)
            return
        place.capped = place.options.max_hold is not None and length < place.ttl
        place.beat = self._beat_of(place)
        self._schedule(place)

    def granted(self, place: Place, token: int, deadline: float) -> None:
        """A waiter came to hold, with what was left of its lease as a waiter: extend it to the full ttl.

        When nothing is left (or only the margin), the body waits until that extension is answered. Else it
        is sent a moment later, and who holds for a shorter time is spared it.
        """
        place.look_at = None
        place.granted = True
        if place.watching:
            self._watch(place, False)
        moment = now()
        left = deadline - place.options.margin - moment
        if left > 0.0:
            place.grant(token, deadline)
        pause = self._session.backend.capabilities.extend_after
        if place.state is State.HELD and pause > 0.0:
            place.beat, place.asked = moment + min(pause, left / 4), False
            self._schedule(place)
        else:
            self.extend_now(place)

    def _on_unknown(self, place: Place, error: BackendError) -> None:
        place.asked = False
        if place.state not in (State.WAITING, State.HELD):
            return
        moment = now()
        session = self._session
        session.telling.extension_failed(place, error)
        if place.silent_since is None:
            place.silent_since = moment
        silent = moment - place.silent_since
        if place.state is State.WAITING and silent >= session.unavailable_after:
            self.forget(place)
            unavailable = BackendUnavailable(
                f"no answer about {place.request.name!r} for {silent:.1f} s: {error}",
                name=place.request.name,
            )
            unavailable.__cause__ = error
            place.wake(unavailable)
            return
        pause = min(_FIRST_RETRY * 2**place.failures, _LONGEST_RETRY, place.length / 6)
        if place.state is State.WAITING:
            pause = min(pause, session.unavailable_after - silent)
        place.failures = min(place.failures + 1, 10)
        place.beat = moment + pause * random.uniform(0.5, 1.0)
        place.look_at = None
        self._schedule(place)

    def _beat_of(self, place: Place, latest: float = _NEVER) -> float:
        if place.state is State.HELD:
            if not place.options.auto_extend or self._at_maximum(place):
                return _NEVER
            margin = place.options.margin
            length = max(place.ttl - margin, place.ttl / 10) if margin else place.ttl
        else:
            length = place.request.waiter_ttl
        step = length / _GRID
        beat = min(now() + length / 3, latest)
        return beat - (beat / step - self._phase) % 1.0 * step

    @staticmethod
    def _at_maximum(place: Place) -> bool:
        maximum = place.options.max_hold
        return maximum is not None and place.deadline >= place.granted_at + maximum

    def _watch(self, place: Place, watching: bool) -> None:
        if place.watching != watching:
            place.watching = watching
            self._session.backend.watch(place.request, watching)
