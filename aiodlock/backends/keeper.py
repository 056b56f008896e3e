"""What extends every lease and every waiter of a client, in batches.

Over 400 lines: the heap, what the store says, and what its answers mean share one state.

For stores with a lease per request. Each place stands in one heap, at the moment when something is due: the
next extension (a third of the length, or a little earlier, so that what began at about the same time is
extended together), or the look of a head at its blocker's end. An extension has three outcomes: done, gone,
unknown. Unknown is tried again; when the local deadline passes meanwhile, the core marks the loss. One task
looks after what is due, and each batch on its way has one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any

from .._backoff import pause_after
from .._clock import now
from .._errors import BackendError, BackendUnavailable, LossReason
from .._model import Gone, Granted, Terms, Waiting
from .._tasks import start_soon
from .kept import ASKING, HELD, NOBODY, OVER, WAITING, Kept, KeptStore, give_back_unknown

_logger = logging.getLogger("aiodlock")

_FIRST_RETRY = 0.05
_LONGEST_RETRY = 1.0
#: Time for the server's clock to pass the blocker's end for certain (its milliseconds are floored).
_LOOK_SLACK = 0.003
#: The loop's clock stands still while the machine sleeps: how late what is due may come up.
_LONGEST_TIMER = 1.0
#: Extensions are due at moments that so many parts of their length lie apart.
_GRID = 64
#: The first of them, in parts of the length: a third, less one step.
_EARLIEST = 1 / 3 - 1 / _GRID
#: So many places are served in one turn of the loop: that takes a few milliseconds.
_SLICE = 200
#: So many extensions are on their way to one server at most: what is read at once takes some milliseconds,
#: and few objects grow so old that Python's collector looks at all there are.
_WINDOW = 2000
#: After a reconnection so many holders are asked about per second, and all within ``_LONGEST_SPREAD``.
_ASKED_PER_SECOND = 1000
_LONGEST_SPREAD = 1.0
_NEVER = float("inf")


class Keeper:
    """The heap of what is due, the timer of the earliest, and what the store says by itself.

    Mutable state: ``places`` (by request id, from before the first message until the leave is answered),
    ``_fresh`` (added since the timer came last), ``_heap`` of [moment, serial, place or None],
    ``_dead`` (entries without a place), ``_wake_at`` and ``_timer`` (when the task is woken),
    ``_due`` (set when it is), ``_batch`` (what it extends then), ``_flying`` (how many extensions are on
    their way, per server), ``_kept`` (holders and waiters that wait until there are fewer), ``_lost``
    (whose lease ran out: their tokens, and until when the store may keep their names closed), ``_looks``
    (places that are to be looked at, and how), ``_taken`` (answers taken in this turn), ``_tasks`` (while
    it runs).
    """

    def __init__(self, store: KeptStore, unavailable_after: float) -> None:
        self.store: KeptStore = store
        self.places: dict[str, Kept] = {}
        self._unavailable_after = unavailable_after
        self._fresh: dict[Kept, None] = {}
        self._heap: list[list[Any]] = []
        self._serials = count()
        self._dead = 0
        self._wake_at = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()
        self._batch: list[Kept] = []
        self._flying: dict[object, int] = {}
        self._kept: dict[object, tuple[deque[Kept], deque[Kept]]] = {}
        self._lost: dict[str, tuple[int, float]] = {}
        self._looks: deque[tuple[deque[Kept], Callable[[Kept], object]]] = deque()
        self._taken = 0
        self._loop: asyncio.AbstractEventLoop
        self._tasks: asyncio.TaskGroup | None = None
        # Each client has its own, so that a host's processes do not ask in step.
        self._phase = random.random()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._heap) - self._dead

    async def run(self, ready: Callable[[], None]) -> None:
        """Run the store, and keep what is in it, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._serve())
                await self.store.run(self, ready)
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()

    # -- what places call --------------------------------------------------------------------------

    def add(self, place: Kept) -> None:
        """Take care of a place that was acknowledged just now."""
        terms = place.terms
        if place.stage is WAITING:
            length = ttl = terms.waiter_ttl
        elif terms.auto_extend:
            ttl = terms.ttl
            length = _without_margin(ttl, terms)
        else:
            return
        # Most leave before anything is due: they need no entry in the heap.
        self._fresh[place] = None
        sent = place.deadline - ttl  # a little earlier: the deadline has room for drift
        earliest = sent + length * _EARLIEST
        if earliest < self._wake_at:
            self._set_timer(earliest)
        elif self._wake_at <= sent:
            self._due.set()  # the machine has slept, and the timer is late

    def _first_beat(self, place: Kept) -> float:
        # The answer to a repetition tells what is left of a lease that began with the first message.
        length = place.terms.waiter_ttl if place.stage is WAITING else place.terms.ttl
        return self._beat_of(place, latest=place.deadline - length * 2 / 3)

    def look_at(self, place: Kept, moment: float) -> None:
        """The place is the head of its queue, and what blocks it may end at ``moment``."""
        place.look_at = moment + _LOOK_SLACK
        if place in self._fresh:
            place.beat = self._first_beat(place)
        self._watch(place, True)
        self._schedule(place)

    def extend_now(self, place: Kept) -> None:
        """Extend at the next turn of the loop."""
        if place.stage is WAITING or place.stage is HELD:
            place.beat = 0.0
            place.asked = False
            self._schedule(place)

    def lose(self, place: Kept) -> None:
        """Its lease ran out, and it leaves: what it keeps closed stays closed, see ``was_lost``."""
        lost, moment, terms = self._lost, now(), place.terms
        while lost and lost[first := next(iter(lost))][1] < moment:
            del lost[first]
        if terms.lock_delay or terms.hold_at_least:
            lost[place.id] = place.token, place.ends_by + terms.lock_delay + terms.hold_at_least

    def forget(self, place: Kept) -> None:
        """Extend it no more."""
        place.stage = OVER
        entry = place.entry
        if entry is not None:
            entry[2] = place.entry = None
            self._bury()
        else:
            self._fresh.pop(place, None)
        if place.watching:
            self._watch(place, False)

    def drop(self, place: Kept) -> None:
        """It is over: tell nobody of it any more."""
        self.forget(place)
        self.places.pop(place.id, None)
        place.listener = NOBODY

    # -- what the store says by itself ---------------------------------------------------------------

    def on_granted(self, request_id: str, token: int, where: str, recalled: bool = False) -> None:
        """A notice: the waiter became the holder. ``where`` is for ``KeptStore.leave_unknown``.
        ``recalled``: it must not linger, since others wait behind it."""
        place = self.places.get(request_id)
        if place is None:
            if not self.was_lost(request_id, token):
                start_soon(self._tasks, self._leave_unknown(request_id, where))
            return
        if recalled:
            place.recall()
        if place.stage is ASKING:
            place.noticed = token
        elif place.stage is WAITING:
            # A notice starts a body, so it counts only while the last answer's deadline lasts.
            # And only if it is news: an id whose reply was lost for long may have been queued, granted,
            # dropped and queued again, and the notice may be of the first time.
            if (
                token > place.floor
                and token > place.broken
                and self.store.capabilities.notices == "grants"
                # The body begins when the store knows that it does.
                and not place.terms.hold_at_least
            ):
                self.granted(place, token, place.deadline)
            else:
                self.extend_now(place)

    def was_lost(self, request_id: str, token: int) -> bool:
        """Tell whether this grant, of which a notice comes late, was held and lost. It closes the name for
        its lock-delay, so it is not given back."""
        known = self._lost.get(request_id)
        return known is not None and token <= known[0]

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        """The waiter became the holder, with what was left of its lease as a waiter."""
        place = self.places.get(request_id)
        if place is not None and place.stage is WAITING:
            place.deadline = deadline
            self.granted(place, token, deadline)

    def on_recalled(self, request_id: str) -> None:
        """Others want what this holder has: it must not linger."""
        place = self.places.get(request_id)
        if place is not None:
            place.recall()

    def on_look(self, request_id: str | None) -> None:
        """A hint: ask about this waiter; with None, about all (notices may have been missed)."""
        if request_id is None:
            self._look_through(self._look)
            return
        place = self.places.get(request_id)
        if place is not None:
            self._look(place)

    def on_other_server(self) -> None:
        """Another server answers from now on, which may know less: ask about all, holders too."""
        self._ask_about_all(0.0)

    def on_back(self) -> None:
        """The connection is back, perhaps to a store that was restarted empty: as with another server, but
        there is a little time to ask about holders."""
        self._ask_about_all(self.spread_of(len(self.places)))

    def on_broken(self, request_id: str, token: int) -> None:
        """An operator broke the lease that has this token."""
        place = self.places.get(request_id)
        if place is None:
            return
        if place.stage is HELD:
            self._gone(place, "broken")
        elif self.store.capabilities.notices == "grants":
            # The break has overtaken the grant, which must not start a body any more.
            place.broken = max(place.broken, token)
            if place.stage is ASKING:
                place.noticed = 0
            else:
                self.extend_now(place)

    def may_hold(self) -> bool:
        """Tell whether a lease of this client is held still."""
        moment = now()
        return any(
            place.stage is HELD and moment < place.deadline for place in self.places.values()
        )

    def _ask_about_all(self, spread: float) -> None:
        def look(place: Kept) -> None:
            if place.stage is HELD and not place.failures:
                self._ask_about_held(place, spread)
            else:
                self._look(place)

        self._look_through(look)

    def _ask_about_held(self, place: Kept, spread: float) -> None:
        """See within ``spread`` whether the store knows of the hold, unless it must not be extended."""
        if not place.terms.auto_extend or self._at_maximum(place):
            return
        if not spread:
            self.extend_now(place)
        elif not place.asked:
            place.beat = min(place.beat, now() + random.uniform(0.0, spread))
            self._schedule(place)

    def _look(self, place: Kept) -> None:
        if place.stage is ASKING and place.noticed is None:
            # No grant, but the answer on its way may be older than what there is to see.
            place.noticed = 0
        elif place.stage is WAITING or place.failures:
            self.extend_now(place)
        elif place.lingers and place.stage is HELD and not place.recalled:
            self.extend_now(place)  # its recall may have been missed

    def _look_through(self, look: Callable[[Kept], object]) -> None:
        """Call ``look`` for each place there is now, a slice in each turn of the loop."""
        self._looks.append((deque(self.places.values()), look))
        self._look_on()

    @staticmethod
    def spread_of(number: int) -> float:
        """Return the seconds over which so many holders are asked about after a reconnection."""
        return min(number / _ASKED_PER_SECOND, _LONGEST_SPREAD)

    async def _leave_unknown(self, request_id: str, where: str) -> None:
        try:
            await give_back_unknown(partial(self.store.leave_unknown, request_id, where))
        except BackendError as error:
            _logger.warning(
                "giving back an unknown grant failed, it ends by itself: %r",
                error,
                extra={"event": "unknown_grant"},
            )

    # -- what is due -------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            self._collect(now())
            batch, self._batch = self._batch, []
            for server, part in self._apart(batch).items():
                self._keep(server, part)
            if self._looks or self._fresh or len(batch) >= _SLICE:
                await asyncio.sleep(0)  # everybody else's turn
                self._look_on()
                continue
            self._set_timer()
            await self._due.wait()
            self._due.clear()

    def _bury(self) -> None:
        """Count one more dead entry; when most are, keep the others."""
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] is not None]
            heapify(self._heap)
            self._dead = 0

    def _schedule(self, place: Kept) -> None:
        entry, when = place.entry, self._next_moment(place)
        place.due = when
        if entry is not None:
            if entry[0] <= when:
                return  # it comes up before, and is put back then: that makes no object
            entry[2] = None
            self._bury()
        else:
            self._fresh.pop(place, None)
        place.entry = entry = [when, next(self._serials), place]
        heappush(self._heap, entry)
        if when <= 0.0:
            self._due.set()  # asked for now: no timer
        elif when < self._wake_at:
            self._set_timer()
        elif self._wake_at <= now():
            self._due.set()  # the machine has slept, and the timer is late

    @staticmethod
    def _next_moment(place: Kept) -> float:
        if place.stage is HELD:
            # While an extension is on its way nothing is due: the core knows when the lease ends.
            return _NEVER if place.asked else place.beat
        if place.asked:
            # A reply may never come: a waiter asks again when its lease is over.
            return max(place.deadline, now() + _LONGEST_RETRY)
        return place.beat if place.look_at is None else min(place.beat, place.look_at)

    def _set_timer(self, earliest: float = _NEVER) -> None:
        while self._heap and self._heap[0][2] is None:
            heappop(self._heap)
            self._dead -= 1
        wake_at = min(self._heap[0][0], earliest) if self._heap else earliest
        if wake_at == self._wake_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = wake_at
        if wake_at != _NEVER:
            pause = min(max(0.0, wake_at - now()), _LONGEST_TIMER)
            self._timer = self._loop.call_later(pause, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake_at = _NEVER
        self._collect(now())
        if self._batch or self._fresh:
            self._due.set()
        else:
            self._set_timer()

    def _collect(self, moment: float) -> None:
        """Put a slice of what must be extended now into the batch; and a slice of what is new, which may be
        due already, into the heap."""
        for place in list(islice(self._fresh, _SLICE)):
            place.beat = self._first_beat(place)
            self._schedule(place)  # it is not new any more
        due: list[list[Any]] = []
        room = _SLICE
        while self._heap and room and (self._heap[0][2] is None or self._heap[0][0] <= moment):
            entry = heappop(self._heap)
            found: Kept | None = entry[2]
            if found is None:
                self._dead -= 1
                continue
            place = found
            place.entry = None
            room -= 1
            if place.due > moment:
                self._put_back(place, entry, place.due)
            elif place.stage is WAITING or moment < place.deadline - place.terms.margin:
                due.append(entry)
            # Else the lease is over: it must not come back to life, and the core marks it as lost.
        for entry in due:
            place = entry[2]
            place.asked = True
            if place.silent_since is None:
                place.silent_since = moment
            place.due = self._next_moment(place)
            # Not behind the beat after this one: the entry need not be made anew when the answer comes.
            self._put_back(place, entry, min(place.due, self._beat_of(place)))
            self._batch.append(place)

    @staticmethod
    def _at_maximum(place: Kept) -> bool:
        maximum = place.terms.max_hold
        return maximum is not None and place.deadline >= place.granted_at + maximum

    def _watch(self, place: Kept, watching: bool) -> None:
        if place.watching != watching:
            place.watching = watching
            self.store.watch(place, watching)

    def _put_back(self, place: Kept, entry: list[Any], when: float) -> None:
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

    def _apart(self, batch: Sequence[Kept]) -> dict[object, list[Kept]]:
        """Answers are awaited in order: those of a silent server must not keep another's waiting."""
        parts: dict[object, list[Kept]] = {}
        for place in batch:
            parts.setdefault(self.store.server_of(place), []).append(place)
        return parts

    def _keep(self, server: object, places: Iterable[Kept]) -> None:
        """Extend these as soon as there are not too many on their way; holders first."""
        holders, waiters = self._kept.setdefault(server, (deque(), deque()))
        for place in places:
            (holders if place.granted else waiters).append(place)
        self._send_kept(server)

    def _send_kept(self, server: object) -> None:
        holders, waiters = self._kept[server]
        while (kept := holders or waiters) and self._flying.get(server, 0) < _WINDOW:
            batch = [kept.popleft() for _ in range(min(_SLICE, len(kept)))]
            self._flying[server] = self._flying.get(server, 0) + len(batch)
            start_soon(self._tasks, self._fly(server, batch))
        if not kept:
            # A task that started eagerly may have ended already, and have come by here.
            self._kept.pop(server, None)

    async def _fly(self, server: object, batch: Sequence[Kept]) -> None:
        await self._extend([place for place in batch if place.stage is not OVER])
        self._flying[server] -= len(batch)
        if not self._flying[server]:
            del self._flying[server]
        if server in self._kept:
            self._send_kept(server)

    # -- extending ---------------------------------------------------------------------------------

    async def _extend(self, batch: Sequence[Kept]) -> None:
        lengths = [place.length for place in batch]
        granted = [place.granted for place in batch]
        try:
            outcomes = self.store.extend(list(zip(batch, lengths, strict=True)))
        except BackendError as error:
            # It is no answer about any of them, and what else this client holds must not end for it.
            for place in batch:
                self._on_unknown(place, error)
            return
        for place, length, known, outcome in zip(batch, lengths, granted, outcomes, strict=True):
            try:
                result = await outcome
            except BackendError as error:
                self._on_unknown(place, error)
            else:
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
        self, place: Kept, result: Granted | Waiting | Gone, length: float, granted: bool
    ) -> None:
        """Take the answer to an extension by ``length``; ``granted``: it was sent as a holder's."""
        place.failures, place.silent_since = 0, None
        again = self._asked_for_since(place)
        if place.granted and isinstance(result, Waiting):
            if not granted:
                # A notice has overtaken this answer, and the extension to the full ttl is due.
                place.deadline = max(place.deadline, result.deadline)
                return
            result = Gone("gone")  # a failover has lost the grant, and not the place in the queue
        elif place.stage is HELD and isinstance(result, Granted) and result.token != place.token:
            # The same, and it was granted anew: others may have been in between.
            result = Gone("gone")
        place.asked = False
        if place.stage is OVER:
            return
        if isinstance(result, Gone):
            if place.stage is WAITING and result.result is not None:
                self._recorded(place, result.result)
            else:
                self._gone(place, result.reason)
            return
        place.deadline = max(place.deadline, result.deadline)
        if isinstance(result, Granted) and result.recalled:
            place.recall()
            if place.is_over:
                return  # it was idle, and left just now
        if isinstance(result, Waiting):
            place.look_at = None
            place.floor = result.floor
            if place.stage is WAITING and result.look_at is not None:
                place.beat = 0.0 if again else self._beat_of(place)
                self.look_at(place, result.look_at)
                return
        elif place.stage is WAITING:
            if result.token <= place.broken:
                self.extend_now(place)  # a break has overtaken this answer
            elif granted and result.deadline - place.terms.margin <= now():
                # The full ttl was asked for, and is over when its answer comes. Asking on keeps the name.
                self._gone(place, "expired")
            else:
                self.granted(place, result.token, result.deadline)
            return
        elif length < place.length:
            # Asked for as a waiter, or before the ttl was changed.
            self.extend_now(place)
            return
        place.capped = place.terms.max_hold is not None and length < place.lease_ttl
        place.beat = 0.0 if again else self._beat_of(place)
        self._schedule(place)

    @staticmethod
    def _asked_for_since(place: Kept) -> bool:
        """Whether an extension is due now and not sent yet: an answer that comes now may be older than what
        there is to see then."""
        return place.beat == 0.0 and not place.asked

    def granted(self, place: Kept, token: int, deadline: float) -> None:
        """A waiter came to hold, with what was left of its lease as a waiter: extend it to the full ttl.

        When nothing is left (or only the margin), the body waits until that extension is answered. Else it
        is sent a moment later, and who holds for a shorter time is spared it.
        """
        place.look_at = None
        place.granted, place.token = True, token
        if place.watching:
            self._watch(place, False)
        moment = now()
        left = deadline - place.terms.margin - moment
        if left > 0.0:
            place.hold(token, deadline)
        pause = self.store.capabilities.extend_after
        if place.stage is HELD and pause > 0.0:
            place.beat, place.asked = moment + min(pause, left / 4), False
            self._schedule(place)
        else:
            self.extend_now(place)

    def _gone(self, place: Kept, reason: LossReason) -> None:
        self.forget(place)
        place.listener.gone(reason)

    def _recorded(self, place: Kept, result: bytes) -> None:
        """A success is on record, and the store has forgotten the waiter: it need not be left."""
        listener = place.listener
        self.forget(place) if place.ambiguous else self.drop(place)
        listener.recorded(result, unsure=place.ambiguous)

    def _on_unknown(self, place: Kept, error: BackendError) -> None:
        again = self._asked_for_since(place)
        place.asked = False
        if place.stage is OVER:
            return
        moment = now()
        place.listener.extension_failed(error)
        if place.silent_since is None:
            place.silent_since = moment
        silent = moment - place.silent_since
        patience = self._unavailable_after - silent
        place.failures += 1
        longest = min(_LONGEST_RETRY, place.length / 6)
        if place.stage is WAITING:
            if patience <= 0.0:
                self._give_up(place, silent, error)
                return
            longest = min(longest, patience)
        pause = pause_after(place.failures, first=_FIRST_RETRY, longest=longest)
        place.beat = 0.0 if again else moment + pause
        place.look_at = None
        self._schedule(place)

    def _give_up(self, place: Kept, silent: float, error: BackendError) -> None:
        self.forget(place)
        unavailable = BackendUnavailable(
            f"no answer about {place.name!r} for {silent:.1f} s: {error}", name=place.name
        )
        unavailable.__cause__ = error
        place.listener.unavailable(unavailable)

    def _beat_of(self, place: Kept, latest: float = _NEVER) -> float:
        terms = place.terms
        if place.stage is HELD:
            if not terms.auto_extend or self._at_maximum(place):
                return _NEVER
            length = _without_margin(place.lease_ttl, terms)
        else:
            length = terms.waiter_ttl
        step = length / _GRID
        beat = min(now() + length / 3, latest)
        return beat - (beat / step - self._phase) % 1.0 * step


def _without_margin(ttl: float, terms: Terms) -> float:
    """Return how long a lease of that length counts as held; a tenth of it at least."""
    return max(ttl - terms.margin, ttl / 10) if terms.margin else ttl
