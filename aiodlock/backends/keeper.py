"""What extends every lease and every waiter of a client, in batches.

For stores with a lease per request. Each place stands in one agenda, when something is due about it: the
next extension (a third of the length, or a little earlier, so that what began at about the same time is
extended together), or the look of a head at its blocker's end. An extension has three outcomes: done, gone,
unknown. Unknown is tried again; when the local deadline passes meanwhile, the core marks the loss. One task
looks after what is due, and each batch on its way has one of its own (``sender``).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

from .._agenda import NEVER, Agenda, Entry
from .._backoff import pause_after
from .._clock import TIMER_STEP, now
from .._errors import BackendError, BackendUnavailable, LossReason
from .._model import Gone, Granted, Terms, Waiting
from .._tasks import start_soon
from .kept import NOBODY, Kept, KeptStore, Schedule, give_back_unknown
from .sender import SLICE, Answer, Sender
from .stage import ASKING, HELD, OVER, WAITING

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
#: After a reconnection so many holders are asked about per second, and all within ``_LONGEST_SPREAD``.
_ASKED_PER_SECOND = 1000
_LONGEST_SPREAD = 1.0


#: What is to be done about a place whose extension was answered: end it; wait for the next answer, since a
#: notice has overtaken this one; nothing, since it has left; let it hold; ask for what is due now; go on.
Outcome: TypeAlias = Gone | Literal["outdated", "over", "hold", "again", "go on"]


def outcome(place: Kept, answer: Answer, length: float, as_holder: bool, moment: float) -> Outcome:
    """Return what follows from the answer to an extension by ``length``. Changes nothing.

    :param as_holder: it was sent as a holder's.
    """
    if isinstance(answer, Waiting) and place.granted:
        if not as_holder:
            return "outdated"  # and the extension to the full ttl is due
        answer = Gone("gone")  # a failover has lost the grant, and not the place in the queue
    if place.stage is OVER:
        return "over"
    if not isinstance(answer, Granted):
        return answer if isinstance(answer, Gone) else "go on"
    if place.stage is HELD:
        if answer.token != place.token:
            return Gone("gone")  # it was granted anew: others may have been in between
        # Else it was asked for as a waiter, or before the ttl was changed.
        return "go on" if length >= place.length else "again"
    if answer.token <= place.broken:
        return "again"  # a break has overtaken this answer
    if as_holder and answer.deadline - place.terms.margin <= moment:
        # The full ttl was asked for, and is over when its answer comes. Asking on keeps the name.
        return Gone("expired")
    return "hold"


class Keeper:
    """The agenda of what is due, the timer of the earliest, and what the store says by itself.

    Mutable state: ``places`` (by request id, from before the first message until the leave is answered),
    ``_fresh`` (added lately) and ``_fresh_at`` (when the first of them may be due; 0.0: now), ``_granted``
    (waiters that came to hold, in order, and when each is due), ``_agenda``, ``_wake_at`` and ``_timer``
    (when the task is woken), ``_due`` (set when it is), ``_batch`` (what it extends then), ``_lost`` (whose
    lease ran out: their tokens, and until when the store may keep their names closed), ``_looks`` (places
    that are to be looked at, and how), ``_tasks`` (while it runs).
    """

    def __init__(self, store: KeptStore, unavailable_after: float) -> None:
        self.store: KeptStore = store
        self.places: dict[str, Kept] = {}
        self._unavailable_after = unavailable_after
        self._sender = Sender(store, self._start_batch, self.on_answer, self.on_unknown)
        self._fresh: dict[Kept, None] = {}
        self._fresh_at = NEVER
        self._granted: deque[tuple[float, Kept]] = deque()
        self._agenda: Agenda[Kept] = Agenda()
        self._wake_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()
        self._batch: list[Kept] = []
        self._lost: dict[str, tuple[int, float]] = {}
        self._looks: deque[tuple[deque[Kept], Callable[[Kept], object]]] = deque()
        self._loop: asyncio.AbstractEventLoop
        self._tasks: asyncio.TaskGroup | None = None
        # Each client has its own, so that a host's processes do not ask in step.
        self._phase = random.random()

    def __len__(self) -> int:
        granted = sum(place.stage is not OVER for _, place in self._granted)
        return len(self._fresh) + granted + len(self._agenda)

    async def run(self, ready: Callable[[], None]) -> None:
        """Run the store, and keep what is in it, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._serve())
                await self.store.run(self, ready)
        finally:
            self._tasks, self._wake_at = None, NEVER
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    # -- what places call --------------------------------------------------------------------------

    def add(self, place: Kept) -> None:
        """Take care of a place that was acknowledged just now."""
        terms = place.terms
        if place.stage is WAITING:
            length = ttl = terms.waiter_ttl
        elif terms.auto_extend:
            ttl = terms.ttl
            length = _without_margin(ttl, terms) if terms.margin else ttl
        else:
            return
        # Most leave before anything is due: they need no schedule.
        self._fresh[place] = None
        sent = place.deadline - ttl  # a little earlier: the deadline has room for drift
        earliest = sent + length * _EARLIEST
        if earliest < self._fresh_at:
            self._fresh_at = earliest
            if earliest < self._wake_at:
                self._set_timer()
        if self._wake_at <= sent:
            self._due.set()  # the machine has slept, and the timer is late

    def _first_beat(self, place: Kept) -> float:
        # The answer to a repetition tells what is left of a lease that began with the first message.
        length = place.terms.waiter_ttl if place.stage is WAITING else place.terms.ttl
        return self._beat_of(place, latest=place.deadline - length * 2 / 3)

    def _schedule_of(self, place: Kept) -> Schedule:
        schedule = place.planned()
        if place in self._fresh:
            schedule.beat = self._first_beat(place)
        return schedule

    def look_at(self, place: Kept, moment: float) -> None:
        """The place is the head of its queue, and what blocks it may end at ``moment``."""
        schedule = self._schedule_of(place)
        schedule.look_at = moment + _LOOK_SLACK
        self._watch(place, True)
        self._plan(place, schedule)

    def extend_now(self, place: Kept) -> None:
        """Extend at the next turn of the loop."""
        if place.stage is WAITING or place.stage is HELD:
            schedule = place.planned()
            schedule.beat, schedule.asked = 0.0, False
            self._plan(place, schedule)

    def lose(self, place: Kept) -> None:
        """Its lease ran out, and it leaves: what it keeps closed stays closed, see ``was_lost``."""
        lost, moment, terms = self._lost, now(), place.terms
        while lost and lost[first := next(iter(lost))][1] < moment:
            del lost[first]
        if terms.lock_delay or terms.hold_at_least:
            until = place.surely_over_at + terms.lock_delay + terms.hold_at_least
            lost[place.id] = place.token, until

    def forget(self, place: Kept) -> None:
        """Extend it no more."""
        place.stage = OVER
        schedule = place.schedule
        if schedule is not None and schedule.entry is not None:
            self._agenda.remove(schedule.entry)
            schedule.entry = None
        else:
            self._fresh.pop(place, None)
        if place.watching:
            self._watch(place, False)

    def drop(self, place: Kept) -> None:
        """It is over: tell nobody of it any more."""
        if place.stage is not OVER:  # else its leave was sent
            self.forget(place)
        self.places.pop(place.id, None)
        place.listener = NOBODY

    # -- what the store says by itself: ``Notices`` says what each means ----------------------------

    def on_granted(self, request_id: str, token: int, where: str, recalled: bool = False) -> None:
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
                self.hold(place, token, place.deadline)
            else:
                self.extend_now(place)

    def was_lost(self, request_id: str, token: int) -> bool:
        known = self._lost.get(request_id)
        return known is not None and token <= known[0]

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        place = self.places.get(request_id)
        if place is not None and place.stage is WAITING:
            place.deadline = deadline
            self.hold(place, token, deadline)

    def on_recalled(self, request_id: str) -> None:
        place = self.places.get(request_id)
        if place is not None:
            place.recall()

    def on_look(self, request_id: str | None) -> None:
        if request_id is None:
            self._look_through(self._look)
            return
        place = self.places.get(request_id)
        if place is not None:
            self._look(place)

    def on_other_server(self) -> None:
        self._ask_about_all(0.0)

    def on_back(self) -> None:
        self._ask_about_all(min(len(self.places) / _ASKED_PER_SECOND, _LONGEST_SPREAD))

    def on_broken(self, request_id: str, token: int) -> None:
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
        moment = now()
        return any(
            place.stage is HELD and moment < place.deadline for place in self.places.values()
        )

    def _ask_about_all(self, spread: float) -> None:
        def look(place: Kept) -> None:
            if place.stage is HELD and not place.silent:
                self._ask_about_held(place, spread)
            else:
                self._look(place)

        self._look_through(look)

    def _ask_about_held(self, place: Kept, spread: float) -> None:
        """See within ``spread`` whether the store knows of the hold, unless it must not be extended."""
        if not place.terms.auto_extend or place.at_maximum:
            return
        if not spread:
            self.extend_now(place)
            return
        schedule = self._schedule_of(place)
        if not schedule.asked:
            schedule.beat = min(schedule.beat, now() + random.uniform(0.0, spread))
            self._plan(place, schedule)

    def _look(self, place: Kept) -> None:
        if place.stage is ASKING and place.noticed is None:
            # No grant, but the answer on its way may be older than what there is to see.
            place.noticed = 0
        elif place.stage is WAITING or place.silent:
            self.extend_now(place)
        elif place.lingers and place.stage is HELD and not place.recalled:
            self.extend_now(place)  # its recall may have been missed

    def _look_through(self, look: Callable[[Kept], object]) -> None:
        """Call ``look`` for each place there is now, a slice in each turn of the loop."""
        self._looks.append((deque(self.places.values()), look))
        self._look_on()

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
            self._sender.send(batch)
            if self._looks or not self._fresh_at or len(batch) >= SLICE:
                await asyncio.sleep(0)  # everybody else's turn
                self._look_on()
                continue
            self._set_timer()
            await self._due.wait()
            self._due.clear()

    def _start_batch(self, server: object, batch: Sequence[Kept]) -> None:
        start_soon(self._tasks, self._sender.fly(server, batch))

    def _plan(self, place: Kept, schedule: Schedule) -> None:
        """Let the place come up when the next is due."""
        entry, when = schedule.entry, self._next_moment(place, schedule)
        schedule.due = when
        if entry is not None:
            if entry[0] <= when:
                return  # it comes up before, and is put back then: that makes no object
            self._agenda.remove(entry)
        else:
            self._fresh.pop(place, None)
        schedule.entry = self._agenda.add(place, when)
        if when <= 0.0:
            self._due.set()  # asked for now: no timer
        elif when < self._wake_at:
            self._set_timer()
        elif self._wake_at <= now():
            self._due.set()  # the machine has slept, and the timer is late

    @staticmethod
    def _next_moment(place: Kept, schedule: Schedule) -> float:
        if place.stage is HELD:
            # While an extension is on its way nothing is due: the core knows when the lease ends.
            return NEVER if schedule.asked else schedule.beat
        if schedule.asked:
            # A reply may never come: a waiter asks again when its lease is over.
            return max(place.deadline, now() + _LONGEST_RETRY)
        return schedule.beat if schedule.look_at is None else min(schedule.beat, schedule.look_at)

    def _set_timer(self) -> None:
        wake_at = min(self._agenda.first, self._fresh_at)
        if self._granted:
            wake_at = min(wake_at, self._granted[0][0])
        if wake_at == self._wake_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = wake_at
        if wake_at != NEVER:
            pause = min(max(0.0, wake_at - now()) + TIMER_STEP, _LONGEST_TIMER)
            self._timer = self._loop.call_later(pause, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake_at = NEVER
        self._collect(now())
        if self._batch or not self._fresh_at:
            self._due.set()
        else:
            self._set_timer()

    def _collect(self, moment: float) -> None:
        """Put a slice of what must be extended now into the batch."""
        if self._fresh_at <= moment:
            self._plan_fresh()
        for _ in range(min(SLICE, len(self._granted))):
            when, place = self._granted[0]
            if when > moment and place.stage is HELD:
                break
            self._granted.popleft()
            schedule = place.planned()
            if (
                place.stage is HELD and schedule.entry is None
            ):  # nothing has asked about it meanwhile
                schedule.due, schedule.entry = when, self._agenda.add(place, when)
        due: list[tuple[Kept, Schedule, Entry]] = []
        for _ in range(SLICE):
            entry = self._agenda.take(moment)
            if entry is None:
                break
            place = entry[2]
            schedule = place.planned()
            schedule.entry = None
            if schedule.due > moment:
                schedule.entry = self._agenda.put_back(entry, schedule.due)
            elif place.stage is WAITING or moment < place.deadline - place.terms.margin:
                due.append((place, schedule, entry))
            # Else the lease is over: it must not come back to life, and the core marks it as lost.
        for place, schedule, entry in due:
            schedule.asked = True
            if schedule.silent_since is None:
                schedule.silent_since = moment
            schedule.due = self._next_moment(place, schedule)
            # Not behind the beat after this one: the entry need not be made anew when the answer comes.
            first = min(schedule.due, self._beat_of(place))
            schedule.entry = self._agenda.put_back(entry, first)
            self._batch.append(place)

    def _plan_fresh(self) -> None:
        """Put a slice of what is new, and may be due already, into the heap."""
        self._fresh_at = NEVER
        for place in list(islice(self._fresh, SLICE)):
            self._plan(place, self._schedule_of(place))  # it is not new any more
        if self._fresh:
            self._fresh_at = 0.0

    def _watch(self, place: Kept, watching: bool) -> None:
        if place.watching != watching:
            place.watching = watching
            self.store.watch(place, watching)

    def _look_on(self) -> None:
        """Look at the next slice of what is to be looked at."""
        if self._looks:
            places, look = self._looks[0]
            for _ in range(min(SLICE, len(places))):
                look(places.popleft())
            if not places:
                self._looks.popleft()
            if self._looks:
                self._due.set()

    # -- answers -----------------------------------------------------------------------------------

    def on_answer(self, place: Kept, answer: Answer, length: float, as_holder: bool) -> None:
        """Take the answer to an extension by ``length``; ``as_holder``: it was sent as a holder's."""
        schedule = place.planned()
        schedule.failures, schedule.silent_since, place.silent = 0, None, False
        again = schedule.is_due_again
        what = outcome(place, answer, length, as_holder, now())
        if what != "outdated":
            schedule.asked = False
        if what == "over":
            return
        if isinstance(what, Gone):
            if place.stage is WAITING and what.result is not None:
                self._recorded(place, what.result)
            else:
                self._gone(place, what.reason)
            return
        assert not isinstance(answer, Gone)
        place.deadline = max(place.deadline, answer.deadline)
        if what == "outdated":
            return
        if isinstance(answer, Waiting):
            place.floor, schedule.look_at = answer.floor, None
        elif answer.recalled:
            place.recall()
            if place.is_over:
                return  # it was idle, and left just now
        if what == "hold":
            assert isinstance(answer, Granted)
            self.hold(place, answer.token, answer.deadline)
        elif what == "again":
            self.extend_now(place)
        else:
            schedule.beat = 0.0 if again else self._beat_of(place)
            if isinstance(answer, Waiting) and answer.look_at is not None:
                self.look_at(place, answer.look_at)
                return
            place.capped = place.terms.max_hold is not None and length < place.lease_ttl
            self._plan(place, schedule)

    def hold(self, place: Kept, token: int, deadline: float) -> None:
        """A waiter came to hold, with what was left of its lease as a waiter: extend it to the full ttl.

        When nothing is left (or only the margin), the body waits until that extension is answered. Else it
        is sent a moment later, and who holds for a shorter time is spared it.
        """
        schedule = place.planned()
        schedule.look_at, schedule.asked = None, False
        place.granted, place.token = True, token
        if place.watching:
            self._watch(place, False)
        moment = now()
        left = deadline - place.terms.margin - moment
        if left > 0.0:
            place.hold(token, deadline)
        pause = self.store.capabilities.extend_after
        if place.stage is not HELD:
            self.extend_now(place)
        elif left < pause * 4:
            schedule.beat = moment + left / 4
            self._plan(place, schedule)
        else:
            # Most have left by then: the heap, and the timer for each, would be for nothing. (Beside those
            # that are new, they would have these planned as often: 3 % of a hand-over's instructions.)
            if schedule.entry is not None:
                self._agenda.remove(schedule.entry)
                schedule.entry = None
            else:
                self._fresh.pop(place, None)
            schedule.beat = when = moment + pause
            self._granted.append((when, place))
            if when < self._wake_at:
                self._set_timer()
            elif self._wake_at <= moment:
                self._due.set()  # the machine has slept, and the timer is late

    def _gone(self, place: Kept, reason: LossReason) -> None:
        self.forget(place)
        place.listener.gone(reason)

    def _recorded(self, place: Kept, result: bytes) -> None:
        """A success is on record, and the store has forgotten the waiter: it need not be left."""
        listener = place.listener
        self.forget(place) if place.ambiguous else self.drop(place)
        listener.recorded(result, unsure=place.ambiguous)

    def on_unknown(self, place: Kept, error: BackendError) -> None:
        """An extension had no answer: try it again."""
        schedule = place.planned()
        again = schedule.is_due_again
        schedule.asked = False
        if place.stage is OVER:
            return
        moment = now()
        place.listener.extension_failed(error)
        if schedule.silent_since is None:
            schedule.silent_since = moment
        silent = moment - schedule.silent_since
        patience = self._unavailable_after - silent
        schedule.failures += 1
        place.silent = True
        longest = min(_LONGEST_RETRY, place.length / 6)
        if place.stage is WAITING:
            if patience <= 0.0:
                self._give_up(place, silent, error)
                return
            longest = min(longest, patience)
        pause = pause_after(schedule.failures, first=_FIRST_RETRY, longest=longest)
        schedule.beat = 0.0 if again else moment + pause
        schedule.look_at = None
        self._plan(place, schedule)

    def _give_up(self, place: Kept, silent: float, error: BackendError) -> None:
        self.forget(place)
        unavailable = BackendUnavailable(
            f"no answer about {place.name!r} for {silent:.1f} s: {error}", name=place.name
        )
        unavailable.__cause__ = error
        place.listener.unavailable(unavailable)

    def _beat_of(self, place: Kept, latest: float = NEVER) -> float:
        terms = place.terms
        if place.stage is HELD:
            if not terms.auto_extend or place.at_maximum:
                return NEVER
            length = _without_margin(place.lease_ttl, terms)
        else:
            length = terms.waiter_ttl
        step = length / _GRID
        beat = min(now() + length / 3, latest)
        return beat - (beat / step - self._phase) % 1.0 * step


def _without_margin(ttl: float, terms: Terms) -> float:
    """Return how long a lease of that length counts as held; a tenth of it at least."""
    return max(ttl - terms.margin, ttl / 10)
