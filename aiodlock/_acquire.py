"""One call of ``acquire``: what the caller has, what the client keeps, or a turn that it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ._acquisition import Acquisition
from ._backoff import LONGEST, pause_after
from ._clock import now
from ._deadlocks import Deadlocks
from ._errors import (
    AcquireTimeout,
    BackendError,
    BackendUnavailable,
    DeadlockError,
    concerning,
)
from ._model import IMPATIENT, Gone, Granted, Refused, RequestInfo, Terms, Waiting
from ._options import LockOptions
from ._patience import soon
from ._request import ASKING, HELD, LEAVING, OVER, AlreadyDone, Request
from ._session import Session
from ._slices import Woken
from ._telling import Telling

#: The first pause after a grant that came too late.
_FIRST_PAUSE = 0.04
#: A first answer that takes longer than this at a time-out means that the store is away.
_SLOW_ANSWER = 0.1


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """What the caller has in open blocks, where a task does not stand for the caller: aiodlock.sync.

    Others may end any of it at any moment, also while the caller waits for another name.
    """

    #: Of the names that it asks for: it gets in again.
    named: Mapping[str, Sequence[Acquisition]]
    #: All, which it holds while it waits.
    inside: tuple[Acquisition, ...] = ()


class Acquiring:
    """One call of ``acquire``, from its beginning to the acquisition. When something else comes out,
    nothing is left at the store.

    Mutable state: ``_request`` (the one that asks now: a place that was lost is asked for anew by another
    one), ``_failures`` (its attempts without an answer) and ``_started`` (when the first one began to).
    """

    __slots__ = (
        "_failures",
        "_kept_as",
        "_name",
        "_options",
        "_request",
        "_session",
        "_started",
        "_terms",
        "_timeout",
    )

    _request: Request
    _started: float

    def __init__(
        self,
        session: Session,
        terms: Terms,
        options: LockOptions,
        kept_as: type[Acquisition],
        timeout: float | None,
    ) -> None:
        self._session = session
        self._name = terms.name
        self._terms = terms
        self._options = options
        self._kept_as = kept_as
        self._timeout = timeout
        self._failures = 0

    async def acquire(self, task: asyncio.Task[Any] | None, own: OwnRequests | None) -> Acquisition:
        """Return what was acquired.

        :param task: whose hold it is; None with ``own``: it belongs to its ``Lease``.
        """
        session, terms = self._session, self._terms
        if own is None:
            bodies = session.bodies.of(task)
        else:
            bodies = [one.request for one in own.named.get(terms.name, ()) if not one.is_over]
        if bodies:
            self._check_bodies(bodies)
        mine = self._holds_of(task, own, bodies)
        for held in mine:  # an exclusive hold counts also behind a later shared one
            if held.terms.mode == terms.mode:
                return Acquisition(session, held)
        if not mine and terms.name in session.lingering.kept and terms.kind == "lock":
            kept = await self._kept(task, bodies)
            if kept is not None:
                return kept
        if not session.slices.take():
            await session.slices.turn()
            session.check_usable()
        self._begin(task, own, mine)
        # What comes out of here may end it, with this frame: only the collector would free both.
        del task
        about = session.telling.acquiring(self._request) if session.telling.hooks else None
        try:
            timeout = self._timeout
            try:
                await (self._wait_for_turn() if timeout is None else self._turn_within(timeout))
                if bodies:
                    # A lease may have been lost meanwhile whose block is around this one. Others may have
                    # held the name between the two, and what that body had begun was cut short.
                    self._check_bodies(bodies)
            except BaseException as error:
                await self._leave(error)
                raise
        except BaseException as error:
            if about is not None:
                session.telling.not_acquired(about, self._started, error)
            if isinstance(error, asyncio.CancelledError | AcquireTimeout):
                # Of thousands of tasks that end so, none keeps our frames and what is in them.
                del self
                error.with_traceback(None)
            raise
        return self._granted(about)

    # -- what the caller has ------------------------------------------------------------------------

    def _holds_of(
        self, task: asyncio.Task[Any] | None, own: OwnRequests | None, bodies: Sequence[Request]
    ) -> Sequence[Request]:
        """Return what the caller itself holds of the name, the latest first.

        :raises DeadlockError: if it would wait for that.
        """
        if self._options.owner is not None or self._terms.kind != "lock":
            return ()
        if own is None:
            holds = self._session.register.holds("lock", self._name, task)
            mine = self._live(holds) if holds else ()
        else:
            mine = [
                held
                for held in reversed(bodies)
                if held.options.owner is None and held.terms.kind == "lock"
            ]
        if mine and all(held.terms.mode != self._terms.mode for held in mine):
            if self._terms.mode == "exclusive":
                raise self._deadlock()
            for held in mine:
                held.share_owner()
        return mine

    def _live(self, holds: Sequence[Request]) -> Sequence[Request]:
        """Return what the task itself holds of the name, the latest first; not what it has lost."""
        session = self._session
        mine: list[Request] = []
        lost: list[Request] = []
        for held in reversed(holds):
            if held.options.owner is None:
                (mine if session.register.is_live(held) else lost).append(held)
        # ``release`` tells one loss: a task that goes on losing without asking keeps no more of them.
        session.departure.report([held for held in lost[1:] if not held.armed and held.is_dropped])
        return mine

    def _check_bodies(self, bodies: Sequence[Request]) -> None:
        """Inside a block whose lease is lost, the name is not to be had again: raise its loss. And what is
        done once would wait for its own body."""
        for request in bodies:
            if request.name == self._name and request.terms.kind == self._terms.kind:
                self._session.register.lose_if_overdue(request)
                if request.loss is not None:
                    raise request.error()
                if request.terms.kind == "once" and request.handles:
                    raise DeadlockError(
                        f"{self._name!r} is entered again in its own body, which would wait for itself",
                        name=self._name,
                    )

    # -- what the client keeps ----------------------------------------------------------------------

    async def _kept(
        self, task: asyncio.Task[Any] | None, bodies: Sequence[Request]
    ) -> Acquisition | None:
        """Return a lease that lingers, if it is what is asked for."""
        session, lingering, moment = self._session, self._session.lingering, now()
        if task is not None and not lingering.has_turn(task, moment):
            await asyncio.sleep(0)
            session.check_usable()
            self._check_bodies(bodies)
            moment = now()
            lingering.has_turn(task, moment)  # of the new turn, which it has in any case
        request = lingering.hand_out(self._terms, self._options, task, moment)
        if request is None:
            return None
        acquired = self._kept_as(session, request)
        try:
            session.telling.handed_out(request)
        except BaseException:
            session.departure.give_up(request, acquired.serial)
            raise
        return acquired

    # -- a turn -------------------------------------------------------------------------------------

    def _begin(
        self, task: asyncio.Task[Any] | None, own: OwnRequests | None, mine: Sequence[Request]
    ) -> None:
        session = self._session
        request_id = session.new_id()
        owner = mine[0].owner if mine else self._owner(request_id)
        self._request = request = Request(
            session.backend, session.events, self._terms, self._options, request_id, owner, task
        )
        request.patient = self._timeout is None
        if own is not None:
            # Not the acquisitions: they would be released no sooner than this one.
            request.inside = tuple([(one.request, one.serial) for one in own.inside])
        if mine:
            request.share_owner()
        self._started = now()

    def _begin_again(self) -> None:
        """The place in the queue was lost: a new request asks, at the end."""
        session, lost = self._session, self._request
        task = lost.task() if lost.task is not None else None
        session.departure.in_background(lost)
        request_id = session.new_id()
        owner = lost.owner
        if owner == self._owner(lost.id):
            owner = self._owner(request_id)
        self._request = request = Request(
            session.backend, session.events, self._terms, self._options, request_id, owner, task
        )
        request.patient, request.inside = lost.patient, lost.inside
        self._failures = 0
        if not lost.may_linger and owner == lost.owner:
            request.share_owner()

    def _owner(self, request_id: str) -> str:
        named = self._options.owner
        if named is not None:
            return f"u{quote(named, safe='')}"
        # The first letter keeps a task's id from ever being equal to a user's string. The last one tells
        # those who look for deadlocks that the request gives up by itself.
        return f"t{request_id}" if self._timeout is None else f"t{request_id}{IMPATIENT}"

    async def _turn_within(self, timeout: float) -> None:
        """Return when the request holds; 0: ask once.

        :raises AcquireTimeout: when the time is up; the request has left.
        """
        try:
            limit = timeout or soon(self._session.backend.answers_within)
            async with asyncio.timeout(max(0.001, limit)):
                await (self._wait_for_turn() if timeout else self._try_once())
                return
        except TimeoutError as elapsed:
            if isinstance(elapsed, AcquireTimeout):
                raise
            is_away = await self._leave_late()
        # Out here it has no context: that would keep the cancelled wait, its frames and its tracebacks.
        raise self._timed_out(is_away) from (self._session.backend.failure if is_away else None)

    async def _leave_late(self) -> bool:
        """Leave nothing at the store when the time is up; return whether it is the store that is away."""
        request, departure = self._request, self._session.departure
        if not self._is_sent:
            request.end()
            return now() - self._started > _SLOW_ANSWER or self._session.backend.failure is not None
        if self._is_away:
            departure.in_background(request)
            return True
        await departure.withdraw(request)
        return request.state is not OVER  # no answer within a second: the store is silent

    async def _leave(self, error: BaseException) -> None:
        """Leave nothing at the store, and wait for that no longer than what has come out allows."""
        request, session = self._request, self._session
        if request.state is LEAVING or request.state is OVER:
            return  # refused, or too late
        if not self._is_sent:
            request.end()
        elif isinstance(error, AlreadyDone) and not error.unsure:
            # The store said so, and has forgotten the waiter.
            session.register.begin_leaving(request)
            session.register.remove(request)
        elif isinstance(error, AlreadyDone | BackendUnavailable | GeneratorExit):
            # No answer is to be waited for; and what is being closed cannot await.
            session.departure.in_background(request)
        else:
            await session.departure.withdraw(request)

    @property
    def _is_sent(self) -> bool:
        """Whether the store may know the request."""
        return self._request.id in self._session.requests

    async def _wait_for_turn(self) -> None:
        """Ask, wait until woken, and ask anew when the place in the queue was lost."""
        session, started = self._session, self._started
        late: LateGrants | None = None
        while True:
            # No coroutine around the wait, and nothing kept meanwhile: thousands may wait.
            if isinstance(await self._ask(started, wait=True), Waiting):
                woken, deadlocks = self._begin_waiting(started)
                try:
                    await woken
                finally:
                    self._request.woken = None
                    if deadlocks is not None:
                        deadlocks.ends(self._request)
                moment = now()
            else:
                moment = self._request.granted_at  # just now
            request = self._request
            if request.state is HELD and moment < request.ends_at and not session.closing:
                return
            session.check_usable()
            # No time left, or broken before we ran, or the server has forgotten the request: begin again at
            # the end.
            broken = request.loss is not None and request.loss.reason == "broken"
            too_late = request.place.token != 0 and not broken
            self._begin_again()
            if too_late:
                self._failures += 1  # at a timeout it is the store that is to blame
                if late is None:
                    late = LateGrants(session.telling)
                await late.pause(self._name, self._terms.ttl, session.unavailable_after)
            started = now()

    def _begin_waiting(self, asked_at: float) -> tuple[Woken, Deadlocks | None]:
        """Return what wakes its task, and who is to be told of the end of the wait."""
        request, session = self._request, self._session
        request.queue(asked_at)
        request.woken = woken = Woken(loop=session.loop)
        woken.slices, woken.cancelled_with = session.slices, None
        if request.task is not None and session.bodies.of(request.task()):
            session.deadlines.add(request)  # it may wait for what its own task holds
        deadlocks = session.deadlocks
        watched = deadlocks is not None and deadlocks.waits(request)
        return woken, deadlocks if watched else None

    async def _try_once(self) -> None:
        answer, request = await self._ask(self._started, wait=False), self._request
        if answer == Gone("broken"):
            self._session.departure.in_background(request)
            raise AcquireTimeout(
                f"{self._name!r} was granted, and an operator broke that grant at once: try again",
                name=self._name,
            )
        if request.state is not HELD or now() >= request.ends_at:
            raise BackendUnavailable(
                f"{self._name!r} was granted, but the store's answer took longer than the lease lasts",
                name=self._name,
            )

    async def _ask(self, started: float, *, wait: bool) -> Granted | Waiting | Gone:
        """Send the request until it is answered. The same id makes a repetition harmless."""
        request, session = self._request, self._session
        if self._name in session.lingering.kept and self._terms.kind == "lock":
            # It is not what this request asks for.
            await session.lingering.give_back(self._name)
            session.check_usable()
        session.requests[request.id] = request
        while True:
            try:
                answer = await request.place.acquire(wait=wait)
                break
            except BackendUnavailable as error:
                session.check_usable()
                self._failures += 1
                request.unanswered = str(error)
                silent = now() - started
                if silent >= session.unavailable_after:
                    raise BackendUnavailable(
                        f"no answer about {self._name!r} for {silent:.1f} s: {error}",
                        name=self._name,
                    ) from (error.__cause__ or session.backend.failure or error)
            except BackendError as error:
                raise concerning(error, self._name) from error.__cause__
            pause = pause_after(self._failures)
            await asyncio.sleep(min(pause, session.unavailable_after - silent))
        self._failures = 0
        if session.closing:
            raise session.closed_error(self._name)
        if isinstance(answer, Refused):
            raise self._refused(answer)
        if isinstance(answer, Granted):
            request.hold()
            if answer.recalled:
                request.recalled()
        return answer

    def _refused(self, answer: Refused) -> Exception:
        """The store has taken nothing in; return what to raise."""
        request, session = self._request, self._session
        if answer.unsure:
            session.departure.in_background(request)
        else:
            session.register.remove(request)
        match answer.why:
            case "recorded":
                return AlreadyDone(answer.result)
            case "deadlock":
                return self._deadlock()
            case "limit":
                return ValueError(
                    f"semaphore {self._name!r} is in use with limit {answer.used}, not "
                    f"{self._terms.limit}: all users of a name must agree on its limit"
                )
        return AcquireTimeout(f"{self._name!r} is held or waited for", name=self._name)

    def _granted(self, about: RequestInfo | None) -> Acquisition:
        """Return what the request holds."""
        session, request = self._session, self._request
        session.register.add_hold(request)
        acquired = self._kept_as(session, request)
        if about is not None:
            try:
                session.telling.acquired(request, about, self._started)
            except BaseException:  # what a hook raises goes to the log; not an exit
                session.departure.give_up(request, acquired.serial)
                raise
        request.used = request.terms.begins
        return acquired

    # -- errors -------------------------------------------------------------------------------------

    @property
    def _is_away(self) -> bool:
        request = self._request
        if self._failures or request.place.silent:
            return True
        slow = now() - self._started > _SLOW_ANSWER or self._session.backend.failure is not None
        return request.state is ASKING and slow

    def _timed_out(self, is_away: bool) -> AcquireTimeout | BackendUnavailable:
        if is_away:
            why = str(self._session.backend.failure or "") or self._request.unanswered or "no reply"
            return BackendUnavailable(
                f"the store did not answer about {self._name!r}: {why}", name=self._name
            )
        return AcquireTimeout(
            f"{self._name!r} was not granted within {self._timeout:g} s: wait longer (timeout=), or try "
            "again later",
            name=self._name,
        )

    def _deadlock(self) -> DeadlockError:
        return DeadlockError(
            f"{self._name!r} is held in shared mode by this owner, who would wait for itself: "
            "release the shared hold first, or take the lock exclusively from the start",
            name=self._name,
        )


class LateGrants:
    """Grants of one call whose answers came when the lease was over.

    For the caller they are none, and for everybody else the name was held. So they are logged, come more
    and more rarely, and end the call as the silence of a store does.

    Mutable state: ``_times``, ``_first_at``.
    """

    __slots__ = ("_first_at", "_telling", "_times")

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._times = 0
        self._first_at = 0.0

    async def pause(self, name: str, ttl: float, unavailable_after: float) -> None:
        """Wait before the next try.

        :raises BackendUnavailable: when no grant was in time for ``unavailable_after``.
        """
        self._times += 1
        text = (
            f"{name!r} was granted, but the answer came when the lease of {ttl:g} s was over: the store "
            "answers too slowly for that ttl; give the lock a longer one, or a smaller margin"
        )
        if self._times == 1:
            self._first_at = now()
            self._telling.late_grant(name, text)
        elif self._times > 2 and now() - self._first_at >= unavailable_after:
            raise BackendUnavailable(text, name=name)
        await asyncio.sleep(pause_after(self._times, first=_FIRST_PAUSE, longest=2 * LONGEST))
