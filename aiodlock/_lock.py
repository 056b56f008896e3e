"""Lock: a name, a mode and options. The one loop that waits for a turn, and reentrancy.

Over 400 lines: the loop is one, and locks, semaphores and their docstrings share it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Never
from urllib.parse import quote

from ._backoff import LONGEST, pause_after
from ._bodies import NOTHING, Blocks
from ._capabilities import refuse_unsupported
from ._clock import now
from ._errors import (
    AcquireTimeout,
    BackendError,
    BackendUnavailable,
    DeadlockError,
    LockLost,
    NotHeld,
    WouldBlock,
    concerning,
)
from ._lease import Lease, release_handle
from ._linger import NEXT_TURN
from ._model import IMPATIENT, Gone, Granted, Kind, LockInfo, Mode, Refused, Terms, Waiting
from ._options import (
    ATTRIBUTES_ELSEWHERE,
    Elsewhere,
    LockOptions,
    check_timeout,
    refuse_keywords,
)
from ._request import ASKING, HELD, OVER, WAITING, AlreadyDone, Request
from ._slices import Woken

if TYPE_CHECKING:
    from ._client import Client
    from ._deadlocks import Deadlocks
    from ._session import Session
    from ._telling import Telling

_logger = logging.getLogger("aiodlock")

#: What does not wait (``acquire_nowait``, ``timeout=0``) answers or raises within 2 s.
ANSWER_WITHIN = 1.8
#: The first pause after a grant that came too late.
_FIRST_PAUSE = 0.04
#: A first answer that takes longer than this at a time-out means that the store is away.
_SLOW_ANSWER = 0.1
_UNSET: Any = object()


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """What the caller has in open blocks, where a task does not stand for the caller: aiodlock.sync.

    Leases, of which others may end one at any moment, also while the caller waits for another name.
    """

    #: Of the names that it asks for: it gets in again.
    named: Mapping[str, Sequence[Lease]]
    #: All, which it holds while it waits.
    inside: tuple[Lease, ...] = ()


class Acquirable:
    """What locks and semaphores share: the waiting loop, and ``async with``. Holds nothing itself.

    Mutable state: ``_entered`` (the ``async with`` blocks that are open, any task's).
    """

    _kind: Kind = "lock"
    _lease_type: type[Lease] = Lease

    def __init__(
        self,
        client: Client,
        name: str,
        mode: Mode,
        options: LockOptions,
        limit: int = 0,
        resize: bool = False,
    ) -> None:
        self._client = client
        self._name = name
        self._mode: Mode = mode
        self._options = options
        self._limit = limit
        longest = options.ttl if options.max_hold is None else options.max_hold
        self._ttl = min(options.ttl, longest)
        self._terms = Terms(
            kind=self._kind,
            name=name,
            mode=mode,
            limit=limit,
            ttl=self._ttl,
            # A granted waiter's lease is what is left of this: no longer than a holder's.
            waiter_ttl=min(client._waiter_ttl, self._ttl),
            lock_delay=options.lock_delay,
            margin=options.margin,
            max_hold=options.max_hold,
            auto_extend=options.auto_extend,
            hold_at_least=options.hold_at_least,
            resize=resize,
            note=options.note,
            linger=options.linger,
        )
        refuse_unsupported(client._store.capabilities, self._terms, options.ttl, client._described)
        #: Whether a block may begin and end by the short way, of ``Lingering``.
        self._short = (
            options.linger > 0.0
            and self._kind == "lock"
            and mode == "exclusive"
            and options.owner is None
            and options.max_hold is None
        )
        self._entered: Blocks[Lease] = Blocks()

    @property
    def name(self) -> str:
        """The name, as given."""
        return self._name

    if not TYPE_CHECKING:  # a type checker knows all attributes
        extend, reacquire, owned, local = Elsewhere(), Elsewhere(), Elsewhere(), Elsewhere()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ATTRIBUTES_ELSEWHERE]

    # -- for users ---------------------------------------------------------------------------------

    async def acquire(self, *, timeout: float | None = _UNSET, **wrong: Never) -> Lease:
        """Wait for the turn and return the lease.

        ```python
        lease = await client.lock("report").acquire(timeout=5)
        try:
            ...
        finally:
            await lease.release()
        ```

        :param timeout: seconds; None waits for ever, 0 tries once. Default: the lock's own.
            (Better than ``asyncio.wait_for``, which on Python 3.11 acquires in another task.)
        :raises AcquireTimeout: when the timeout ran out; nothing is left in the queue.
        :raises DeadlockError: when the owner holds the name in shared mode and asks exclusively.
        :raises LockLost: inside a block of this task whose lease on the name is lost.
        :raises BackendUnavailable: when nothing answered for ``unavailable_after``, or at the timeout.
        :raises ClientClosed: when the client is left meanwhile.
        """
        if wrong:
            refuse_keywords("acquire()", wrong, ["timeout"])
        timeout = self._options.timeout if timeout is _UNSET else check_timeout(timeout)
        return await self._acquire(timeout)

    async def acquire_nowait(self) -> Lease:
        """Return the lease if the lock is free and nobody waits for it.

        ```python
        try:
            lease = await client.lock("report").acquire_nowait()
        except aiodlock.WouldBlock:
            print("somebody else holds it")
        else:
            async with lease:
                ...
        ```

        :raises WouldBlock: when it is held or waited for.
        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        try:
            return await self._acquire(0.0)
        except AcquireTimeout as busy:
            raise WouldBlock(f"{self._name!r} is held or waited for", name=self._name) from busy

    async def release(self) -> None:
        """Release this task's latest hold of that name and mode.

        ```python
        lock = client.lock("report")
        await lock.acquire()
        await lock.release()  # in the same task
        ```

        :raises NotHeld: when this task holds nothing of the kind.
        :raises LockLost: once, when it has nothing left but what it has lost; or when nothing answered
            until the lease's deadline.
        """
        session = self._client._use(self._name)
        lost: list[Request] = []
        for request in reversed(session.holds(self._kind, self._name, asyncio.current_task())):
            mine = request.terms.mode == self._mode and request.options.owner == self._options.owner
            if mine and request.handles:
                if session.is_live(request):
                    await release_handle(session, request, request.handles[-1])
                    return
                if not request.reported:
                    lost.append(request)
        if lost:
            error = lost[0].error()
            session.report(lost)
            raise error
        raise NotHeld(
            f"this task does not hold {self._name!r} in {self._mode} mode; to release from "
            "another task, keep the lease and call its release(); asyncio.wait_for on Python 3.11 "
            "acquires in another task: use timeout= instead",
            name=self._name,
        )

    async def locked(self) -> bool:
        """Return whether anybody holds the name at this moment, in any mode.

        ```python
        if await client.lock("report").locked():
            print("somebody holds it")
        ```
        """
        info = await self._client._inspect(self._kind, self._name)
        return bool(info.holders) or info.closed > 0

    async def inspect(self) -> LockInfo:
        """Return who holds it and who waits for it; as ``Client.inspect``.

        ```python
        info = await client.semaphore("mail", limit=3).inspect()
        print(len(info.holders), "of 3 places are taken")
        ```
        """
        return await self._client._inspect(self._kind, self._name)

    async def break_lock(self, *, tokens: Iterable[int] | None = None) -> int:
        """Release all holders by force, or those with these tokens; as ``Client.break_lock``.

        ```python
        await client.lock("report").break_lock()
        ```
        """
        return await self._client.break_lock(self._name, kind=self._kind, tokens=tokens)

    async def __aenter__(self) -> Lease:
        if self._short and (session := self._client._session) is not None:
            short_way, frame = session.lingering.enter, sys._getframe(1)
            kept = short_way(self._terms, self._options, self._entered, self._lease_type, frame)
            if kept is NEXT_TURN:
                await asyncio.sleep(0)
                kept = short_way(self._terms, self._options, self._entered, self._lease_type, frame)
            del frame  # what waits below would keep it in a cycle
            if kept is not None and kept is not NEXT_TURN:
                return kept
        lease = await self._acquire(self._options.timeout)
        whose = lease._request.task
        task = lease._arm(None if whose is None else whose())
        self._entered.enter(task, lease, sys._getframe(1))
        return lease

    def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> CoroutineType[Any, Any, None]:
        # No coroutine around the lease's: that would be one more for each block. To pyright, what a context
        # manager returns here is what ``async def`` returns, and no other Coroutine.
        if (
            self._short
            and (session := self._client._session) is not None
            and session.lingering.exit(self._entered)
        ):
            return NOTHING
        meant = self._entered.take(self, exc, sys._getframe(1))
        if meant is None:
            return NOTHING
        task, lease = meant
        return lease._end_block(task, exc_type, exc)  # type: ignore[return-value]

    # -- the loop ----------------------------------------------------------------------------------

    async def _acquire(self, timeout: float | None, own: OwnRequests | None = None) -> Lease:
        """Wait for the turn. With ``own`` the hold belongs to its ``Lease``, not to the current task."""
        session = self._client._session
        if session is None or session.death is not None:
            began = now()
            await self._client._ready(self._name, ANSWER_WITHIN if timeout == 0 else timeout)
            timeout = max(0.001, timeout - (now() - began)) if timeout else timeout
        session = self._client._use(self._name)
        task = asyncio.current_task() if own is None else None
        if task is None and own is None:
            raise RuntimeError(f"{self!r} can be acquired inside an asyncio task only")
        bodies = session.bodies.of(task) if own is None else _open(own.named.get(self._name, ()))
        if bodies:
            self._check_bodies(session, bodies)
        mine: Sequence[Request] = ()
        if self._options.owner is None and self._kind == "lock":
            if own is None:
                holds = session.holds("lock", self._name, task)
                mine = self._live(session, holds) if holds else ()
            else:
                mine = [
                    held
                    for held in reversed(bodies)
                    if held.options.owner is None and held.terms.kind == "lock"
                ]
            for held in mine:  # an exclusive hold counts also behind a later shared one
                if held.terms.mode == self._mode:
                    return Lease(session, held)
            if mine:
                if self._mode == "exclusive":
                    raise self._deadlock()
                for held in mine:
                    held.share_owner()
        lingering = session.lingering
        if self._name in lingering.kept and self._kind == "lock" and not mine:
            moment = now()
            if task is not None and not lingering.has_turn(task, moment):
                await asyncio.sleep(0)
                session.check_usable()
                self._check_bodies(session, bodies)
                moment = now()
                lingering.has_turn(task, moment)  # of the new turn, which it has in any case
            kept = lingering.hand_out(self._terms, self._options, task, moment)
            if kept is not None:
                lease = self._lease_type(session, kept)
                try:
                    session.telling.handed_out(kept)
                except BaseException:
                    session.give_up(kept, lease._serial)
                    raise
                return lease
        if not session.slices.take():
            await session.slices.turn()
            session.check_usable()
        request_id = session.new_id()
        owner = mine[0].owner if mine else self._owner(request_id, timeout is None)
        request = Request(session, self._terms, self._options, request_id, owner, task)
        del (
            task
        )  # what comes out of here may end it, with this frame: only the collector would free both
        request.patient = timeout is None
        if own is not None:
            request.inside = tuple([(lease._request, lease._serial) for lease in own.inside])
        if mine:
            request.share_owner()
        started = now()
        about = session.telling.acquiring(request)
        try:
            within = ANSWER_WITHIN if timeout == 0 else timeout
            request = await self._get(session, request, timeout, within, started)
            if bodies:
                await self._check_bodies_again(session, bodies, request)
        except BaseException as error:
            session.telling.not_acquired(about, started, error)
            if isinstance(error, asyncio.CancelledError | AcquireTimeout):
                # Of thousands of tasks that end so, none keeps our frames and what is in them.
                del request
                error.with_traceback(None)
            raise
        session.add_hold(request)
        lease = self._lease_type(session, request)
        try:
            session.telling.acquired(request, about, started)
        except BaseException:  # what a hook raises goes to the log; not an exit
            session.give_up(request, lease._serial)
            raise
        request.used = request.terms.begins
        return lease

    async def _get(
        self,
        session: Session,
        request: Request,
        timeout: float | None,
        within: float | None,
        started: float,
    ) -> Request:
        """Return the request that holds; whatever comes out instead, nothing is left at the server."""
        spent = 0.0
        if self._name in session.lingering.kept and self._kind == "lock":
            await self._give_back(session, request, timeout, within, started)
            spent = now() - started
        try:
            if within is None:
                request = await self._wait_for_turn(session, request, started)
            else:
                async with asyncio.timeout(max(0.001, within - spent)):
                    if timeout == 0:
                        await self._try_once(session, request, started)
                    else:
                        request = await self._wait_for_turn(session, request, started)
        except TimeoutError as elapsed:
            if isinstance(elapsed, AcquireTimeout):
                raise
            request = self._current(session, request)
            away = self._is_away(session, request, started)
            if away:
                session.departure.in_background(request)
            else:
                await session.departure.withdraw(request)
                away = request.state is not OVER  # no answer within a second: the store is silent
        except AlreadyDone as done:
            request = self._current(session, request)
            if request.state is WAITING:
                # The store said so, and has forgotten the waiter.
                if done.unsure:
                    session.departure.in_background(request)
                else:
                    request.leave()
                    session.remove(request)
            raise
        except BackendUnavailable:
            session.departure.in_background(
                self._current(session, request)
            )  # no answer is to be waited for
            raise
        except GeneratorExit:
            session.departure.in_background(
                self._current(session, request)
            )  # what is being closed cannot await
            raise
        except BaseException:
            await session.departure.withdraw(self._current(session, request))
            raise
        else:
            return request
        # Out here it has no context: that would keep the cancelled wait, its frames and its tracebacks.
        raise self._timed_out(session, timeout, away, request.unanswered) from (
            session.backend.failure if away else None
        )

    async def _give_back(
        self,
        session: Session,
        request: Request,
        timeout: float | None,
        within: float | None,
        started: float,
    ) -> None:
        """Release what the client keeps of the name, which is not what this request asks for."""
        try:
            async with asyncio.timeout(within):
                await session.lingering.give_back(self._name)
            session.check_usable()
        except TimeoutError:
            request.end()  # it was never sent
            away = now() - started > _SLOW_ANSWER or session.backend.failure is not None
            raise self._timed_out(session, timeout, away) from (
                session.backend.failure if away else None
            )
        except BaseException:
            request.end()
            raise

    async def _wait_for_turn(self, session: Session, request: Request, started: float) -> Request:
        """Ask, wait until woken, and ask anew when the place in the queue was lost."""
        late: LateGrants | None = None
        while True:
            session.requests[request.id] = request
            # No coroutine around the wait, and nothing kept meanwhile: thousands may wait.
            if isinstance(await self._ask(session, request, started, wait=True), Waiting):
                woken, deadlocks = self._begin_waiting(session, request)
                try:
                    await woken
                finally:
                    request.woken = None
                    if deadlocks is not None:
                        deadlocks.ends(request)
                moment = now()
            else:
                moment = request.granted_at  # just now
            if request.state is HELD and moment < request.ends_at and not session.closing:
                return request
            session.check_usable()
            # No time left, or broken before we ran, or the server has forgotten the request: begin again at
            # the end.
            too_late = request.place.token != 0 and request.reason != "broken"
            request = self._begin_again(session, request)
            if too_late:
                request.failures += 1  # at a timeout it is the store that is to blame
                if late is None:
                    late = LateGrants(session.telling)
                await late.pause(self._name, self._ttl, session.unavailable_after)
            started = now()

    @staticmethod
    def _begin_waiting(session: Session, request: Request) -> tuple[Woken, Deadlocks | None]:
        """Return what wakes its task, and who is to be told of the end of the wait."""
        request.queue()
        request.woken = woken = Woken(loop=session.loop)
        woken.slices, woken.cancelled_with = session.slices, None
        if request.task is not None and session.bodies.of(request.task()):
            session.deadlines.add(request)  # it may wait for what its own task holds
        deadlocks = session.deadlocks
        watched = deadlocks is not None and deadlocks.waits(request)
        return woken, deadlocks if watched else None

    async def _try_once(self, session: Session, request: Request, started: float) -> None:
        session.requests[request.id] = request
        answer = await self._ask(session, request, started, wait=False)
        if answer == Gone("broken"):
            session.departure.in_background(request)
            raise AcquireTimeout(
                f"{self._name!r} was granted, and an operator broke that grant at once: try again",
                name=self._name,
            )
        if request.state is not HELD or now() >= request.ends_at:
            raise BackendUnavailable(
                f"{self._name!r} was granted, but the store's answer took longer than the lease lasts",
                name=self._name,
            )

    async def _ask(
        self, session: Session, request: Request, started: float, *, wait: bool
    ) -> Granted | Waiting | Gone:
        """Send the request until it is answered. The same id makes a repetition harmless."""
        place = request.place
        while True:
            try:
                answer = await place.acquire(wait=wait)
                break
            except BackendUnavailable as error:
                session.check_usable()
                request.failures += 1
                request.unanswered = str(error)
                silent = now() - started
                if silent >= session.unavailable_after:
                    raise BackendUnavailable(
                        f"no answer about {self._name!r} for {silent:.1f} s: {error}",
                        name=self._name,
                    ) from (error.__cause__ or session.backend.failure or error)
            except BackendError as error:
                raise concerning(error, self._name) from error.__cause__
            pause = pause_after(request.failures)
            await asyncio.sleep(min(pause, session.unavailable_after - silent))
        request.failures = 0
        if session.closing:
            raise session.closed_error(self._name)
        if isinstance(answer, Granted):
            request.hold()
            if answer.recalled:
                request.recalled()
        elif isinstance(answer, Refused):
            if answer.unsure:
                session.departure.in_background(request)
            else:
                session.remove(request)
            if answer.why == "recorded":
                raise AlreadyDone(answer.result)
            raise self._refused(answer)
        return answer

    def _begin_again(self, session: Session, request: Request) -> Request:
        task = request.task() if request.task is not None else None
        session.departure.in_background(request)
        request_id = session.new_id()
        owner = request.owner
        if owner == self._owner(request.id, request.patient):
            owner = self._owner(request_id, request.patient)
        fresh = Request(session, self._terms, self._options, request_id, owner, task)
        fresh.patient, fresh.inside = request.patient, request.inside
        if not request.may_linger and owner == request.owner:
            fresh.share_owner()
        request.successor = fresh
        return fresh

    @staticmethod
    def _current(session: Session, request: Request) -> Request:
        while request.successor is not None:
            request = request.successor
        return request

    # -- reentrancy --------------------------------------------------------------------------------

    def _owner(self, request_id: str, patient: bool) -> str:
        named = self._options.owner
        if named is not None:
            return f"u{quote(named, safe='')}"
        # The first letter keeps a task's id from ever being equal to a user's string. The last one tells
        # those who look for deadlocks that the request gives up by itself.
        return f"t{request_id}" if patient else f"t{request_id}{IMPATIENT}"

    def _check_bodies(self, session: Session, bodies: Sequence[Request]) -> None:
        """Inside a block whose lease is lost, the name is not to be had again: raise its loss."""
        for request in bodies:
            if request.name == self._name and request.terms.kind == self._kind:
                session.lose_if_overdue(request)
                if request.reason is not None:
                    raise request.error()

    async def _check_bodies_again(
        self, session: Session, bodies: Sequence[Request], granted: Request
    ) -> None:
        """Give a turn back that came when the lease of a block around it was lost meanwhile.

        Others may have held the name between the two, and what the body had begun was cut short.
        """
        try:
            self._check_bodies(session, bodies)
        except LockLost:
            await session.departure.withdraw(granted)
            raise

    @staticmethod
    def _live(session: Session, holds: Sequence[Request]) -> list[Request]:
        """Return what the task itself holds of the name, the latest first; not what it has lost."""
        mine: list[Request] = []
        lost: list[Request] = []
        for held in reversed(holds):
            if held.options.owner is None:
                (mine if session.is_live(held) else lost).append(held)
        # ``release`` tells one loss: a task that goes on losing without asking keeps no more of them.
        session.report([held for held in lost[1:] if not held.armed and held.is_dropped])
        return mine

    # -- parts -------------------------------------------------------------------------------------

    @staticmethod
    def _is_away(session: Session, request: Request, started: float) -> bool:
        if request.failures or request.place.silent:
            return True
        slow = now() - started > _SLOW_ANSWER or session.backend.failure is not None
        return request.state is ASKING and slow

    def _timed_out(
        self, session: Session, timeout: float | None, away: bool, unanswered: str = ""
    ) -> AcquireTimeout | BackendUnavailable:
        if away:
            why = str(session.backend.failure or "") or unanswered or "no reply"
            return BackendUnavailable(
                f"the store did not answer about {self._name!r}: {why}", name=self._name
            )
        return AcquireTimeout(
            f"{self._name!r} was not granted within {timeout:g} s: wait longer (timeout=), or try "
            "again later",
            name=self._name,
        )

    def _refused(self, answer: Refused) -> Exception:
        if answer.why == "deadlock":
            return self._deadlock()
        if answer.why == "limit":
            return ValueError(
                f"semaphore {self._name!r} is in use with limit {answer.used}, not {self._limit}: "
                "all users of a name must agree on its limit"
            )
        return AcquireTimeout(f"{self._name!r} is held or waited for", name=self._name)

    def _deadlock(self) -> DeadlockError:
        return DeadlockError(
            f"{self._name!r} is held in shared mode by this owner, who would wait for itself: "
            "release the shared hold first, or take the lock exclusively from the start",
            name=self._name,
        )


def _open(leases: Sequence[Lease]) -> Sequence[Request]:
    """Return the requests of those that nobody has released."""
    return [lease._request for lease in leases if not lease._is_over()]


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


class Lock(Acquirable):
    """A fair distributed lock. Made by ``Client.lock``; may be used by many tasks at once.

    ``async with lock as lease:`` waits its turn. When the lease is lost in the body, the body is
    cancelled once and ``LockLost`` raised (with ``on_lost="flag"`` only at the end).

    ```python
    lock = client.lock("order:42", ttl=10)
    async with lock as lease:
        print(lease.token)
    ```
    """

    @property
    def mode(self) -> Mode:
        """``"exclusive"`` or ``"shared"``."""
        return self._mode

    def __repr__(self) -> str:
        return f"<Lock {self._name!r} {self._mode} on {self._client!r}>"

    def _with_later_body(self) -> Lock:
        """Return this lock, or one like it whose ``hold_at_least`` counts when a body is said to begin."""
        if not self._options.hold_at_least:
            return self
        later = copy.copy(self)
        later._terms = replace(self._terms, begins=False)
        return later


class ReadWriteLock:
    """The two modes of one name. ``read`` may be held by many at a time, ``write`` by one alone.

    ```python
    page = client.rwlock("page:7")
    async with page.read:
        ...
    async with page.write:
        ...
    ```
    """

    def __init__(self, read: Lock, write: Lock) -> None:
        self._read = read
        self._write = write

    @property
    def name(self) -> str:
        """The name, as given; the same lock as ``Client.lock(name)``."""
        return self._write.name

    @property
    def read(self) -> Lock:
        """The lock in shared mode."""
        return self._read

    @property
    def write(self) -> Lock:
        """The lock in exclusive mode."""
        return self._write

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r} on {self._write._client!r}>"


class Semaphore(Acquirable):
    """A lock with ``limit`` holders, in the same fair queue. Not reentrant; made by ``Client.semaphore``.

    Its keys are its own: a lock of the same name is another thing.

    ```python
    mail = client.semaphore("mail", limit=3)
    async with mail as lease:
        ...
    ```
    """

    _kind: Kind = "semaphore"

    @property
    def limit(self) -> int:
        """How many may hold at a time."""
        return self._limit

    async def locked(self) -> bool:
        """Return whether ``acquire_nowait`` would be refused at this moment: no place free, or waiters.

        Judged by this object's limit; where others resize the semaphore, it is not known which is in use.

        ```python
        if await client.semaphore("mail", limit=3).locked():
            print("all three places are taken")
        ```
        """
        info = await self._client._inspect(self._kind, self._name)
        taken = sum(holder.count for holder in info.holders) + info.closed_places
        return taken >= self._limit or bool(info.waiters)

    def __repr__(self) -> str:
        return f"<Semaphore {self._name!r} limit={self._limit} on {self._client!r}>"
