"""MultiLock: several names at once, all or none.

Over 400 lines: the lock, its lease and its roll-back are one idea.

Everybody takes the names in one order, that of their UTF-8 bytes, one after the other. So two of them
never wait for each other: whoever holds the last name that both want has all it needs before it.
What a task held *before* is outside of that order: with it, a deadlock is possible again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Never, TypeVar

import anyio

from ._acquire import OwnRequests
from ._body import Blocks, Body
from ._clock import now
from ._core import Core
from ._errors import AcquireTimeout, BackendError, BackendUnavailable, LockLost, NotHeld
from ._lease import Lease, LeaseView
from ._lock import _UNSET, Lock
from ._options import check_timeout, refuse_keywords
from ._request import Block, Request
from ._session import Session

_T = TypeVar("_T")
_L = TypeVar("_L", bound=LeaseView)

#: So many leases are left in one turn of the event loop.
_AT_ONCE = 100


class MultiLock:
    """Several locks as one. Made by ``Client.multilock``; holds nothing, may be used by many tasks.

    ``async with multilock as leases:`` waits for all names and enters the body when all are held.
    When one is lost, all count as lost: the body is cancelled once and ``LockLost`` raised. What is
    held while the rest is waited for is extended. If something is lost during that wait, all is left and
    the acquisition begins again, within the same timeout; but ``LockLost`` is raised where that would
    come again: for ``max_hold``, for ``auto_extend=False``, and inside a block of this task on that name.

    No deadlock between multilocks, in whatever order their names are given. A task that holds locks
    *already* when it acquires a multilock gives up that freedom, as with any locks taken in turns.

    ```python
    both = client.multilock("account:1", "account:2", timeout=5)
    async with both as leases:
        print(leases.tokens)
    ```
    """

    def __init__(self, core: Core, locks: list[Lock], timeout: float | None) -> None:
        self._core = core
        ordered = sorted(locks, key=lambda lock: lock.name.encode())
        #: Their bodies begin together, when all names are granted.
        self._locks = tuple(lock._with_later_body() for lock in ordered)
        self._timeout = timeout
        self._entered: Blocks[MultiLease] = Blocks()

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in self.names)
        return f"<MultiLock {names} on {self._core!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once, in the order in which they are taken."""
        return tuple(lock.name for lock in self._locks)

    async def acquire(self, *, timeout: float | None = _UNSET, **wrong: Never) -> MultiLease:
        """Wait for all names and return their leases; with an error, nothing is held.

        ```python
        leases = await client.multilock("account:1", "account:2").acquire(timeout=5)
        await leases.release()
        ```

        :param timeout: seconds for all of it; None waits for ever, 0 tries each name once. Default: the
            multilock's own. A ``Lock`` that has a timeout of its own is not waited for longer than that.
        :raises AcquireTimeout: when the timeout ran out; ``name`` is the one that was waited for.
        :raises DeadlockError: as ``Lock.acquire``.
        :raises BackendUnavailable: as ``Lock.acquire``.
        :raises ClientClosed: as ``Lock.acquire``.
        :raises LockLost: see the class.
        """
        if wrong:
            refuse_keywords("acquire()", wrong, ["timeout"])
        return await self._acquire(self._timeout if timeout is _UNSET else check_timeout(timeout))

    async def __aenter__(self) -> MultiLease:
        leases = await self._acquire(self._timeout)
        self._entered.enter(leases._arm(), leases, sys._getframe(1))
        return leases

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meant = self._entered.take(self, exc, sys._getframe(1))
        if meant is not None:
            task, lease = meant
            await lease._end_block(task, exc_type, exc)

    # -- inside ------------------------------------------------------------------------------------

    async def _acquire(self, timeout: float | None, own: OwnRequests | None = None) -> MultiLease:
        session = await self._core.ready(within=timeout)
        started = now()

        def time_left() -> float | None:
            if not timeout:
                return timeout
            # 0 would mean to try once: what was granted in time is taken, the rest is not waited for.
            return max(0.001, started + timeout - now())

        while True:
            leases = MultiLease(session)
            try:
                await self._take_all(leases, time_left, own)
            except AcquireTimeout as busy:
                await leases._leave(wait=True)
                raise self._timed_out(busy, timeout) from busy
            except BaseException as failure:
                # A coroutine that is being closed cannot await. And who has waited for a silent store once
                # is not kept any longer.
                silent = isinstance(failure, BackendUnavailable) or session.departure.was_silent
                await leases._leave(wait=not silent and not isinstance(failure, GeneratorExit))
                raise
            lost = leases._look()
            if lost is None:
                for lease in leases._leases.values():
                    lease._request.used = True
                return leases
            error = leases._error()
            await leases._leave(wait=True)
            session.check_usable()
            if not leases._worth_another_try():
                raise error
            if timeout is not None and now() - started >= timeout:
                raise AcquireTimeout(
                    f"{lost.name!r} was lost while the other names were waited for, and the timeout of "
                    f"{timeout:g} s is over: {lost}",
                    name=lost.name,
                ) from error

    async def _take_all(
        self,
        leases: MultiLease,
        time_left: Callable[[], float | None],
        own: OwnRequests | None,
    ) -> None:
        """Acquire in order; return early when a lease is lost that was taken already."""
        scope = asyncio.timeout(None)
        lookout = _Lookout(leases, scope)
        try:
            async with scope:
                for lock in self._locks:
                    lease = await lock._acquire(_shorter(time_left(), lock._options.timeout), own)
                    leases._leases[lock.name] = lease
                    lookout.watch(lease)
                for lease in leases._leases.values():
                    await lease._begin()
        except TimeoutError as ended:
            if isinstance(ended, AcquireTimeout) or not scope.expired():
                raise
        finally:
            lookout.end()
            # What comes out of here may end the task, with this frame, and the scope knows the task.
            del scope, lookout

    @staticmethod
    def _timed_out(busy: AcquireTimeout, timeout: float | None) -> AcquireTimeout:
        if timeout is None:
            return AcquireTimeout(str(busy), name=busy.name)
        return AcquireTimeout(
            f"{busy.name!r} was not granted within the {timeout:g} s for all names: wait longer "
            "(timeout=), or try again later",
            name=busy.name,
        )


class _Lookout:
    """Ends the taking of names, by its scope, when one is lost that was taken already.

    Mutable state: ``_changed`` (resolved when there is something to see), ``_over``. (No closures: two that
    know each other would keep the leases until the collector comes.)
    """

    def __init__(self, leases: MultiLease, scope: asyncio.Timeout) -> None:
        self._leases = leases
        self._scope = scope
        self._over = False
        self._changed = self._begin()

    def watch(self, lease: Lease) -> None:
        """Watch one more lease."""
        self._leases._watch(lease, self._changed)

    def end(self) -> None:
        """Look no longer."""
        self._over = True
        self._changed.remove_done_callback(self._on_change)
        self._changed.cancel()

    def _begin(self) -> asyncio.Future[None]:
        changed = self._leases._new_watcher()
        changed.add_done_callback(self._on_change)
        for lease in self._leases.values():
            self._leases._watch(lease, changed)
        return changed

    def _on_change(self, _: object) -> None:
        if self._over:
            return  # the taking has ended in the same turn of the loop
        if self._leases._look() is None:
            self._changed = self._begin()  # another acquisition of such a name has ended
        elif self._scope.when() is None:
            self._scope.reschedule(self._leases._session.loop.time())


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((time for time in (one, other) if time is not None), default=None)


class MultiLeaseView(Mapping[str, _L]):
    """What the leases of a multilock tell, to tasks and to threads. Maps names to leases."""

    __slots__ = ()

    _leases: dict[str, _L]

    def _is_over(self) -> bool:
        raise NotImplementedError

    def __repr__(self) -> str:
        state = "held" if self.held else "lost" if self.lost else "released"
        return f"<MultiLease {', '.join(map(repr, self._leases))} {state}>"

    # -- a mapping; two are equal only when they are the same object -------------------------------

    def __getitem__(self, name: str) -> _L:
        return self._leases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing token of each name. They are comparable per name only."""
        return {name: lease.token for name, lease in self._leases.items()}

    @property
    def held(self) -> bool:
        """True only while the server certainly honours every one of the leases."""
        return not self._is_over() and all(lease.held for lease in self._leases.values())

    @property
    def lost(self) -> LockLost | None:
        """Why the first of them was lost; None while all are held and after a release."""
        return next((lost for lease in self._leases.values() if (lost := lease.lost)), None)

    def remaining(self) -> float:
        """Return the seconds until the first of them is lost if not extended; 0.0 once over.

        ```python
        print(leases.remaining(), "s, unless they are extended")
        ```
        """
        return min(lease.remaining() for lease in self._leases.values()) if self.held else 0.0

    def ensure_held(self) -> None:
        """Return if all are held, else raise LockLost (or NotHeld after a release).

        ```python
        leases.ensure_held()
        ```
        """
        if not self.held:
            raise self._not_held() if self.lost is None else self._error()

    def _error(self) -> LockLost | BackendError:
        # The clock may have told a loss that is not marked yet.
        error = next(lease._why_not_held() for lease in self._leases.values() if lease.lost)
        assert not isinstance(error, NotHeld)
        return error

    def _not_held(self) -> NotHeld:
        names = list(self._leases)
        return NotHeld(
            f"the leases on {', '.join(map(repr, names))} were released before: a lease is released once",
            name=names[0],
        )


class MultiLease(MultiLeaseView[Lease], Body):
    """The leases of a multilock: a mapping from each name to its ``Lease``, in the order taken.

    As an async context manager it arms ``on_lost`` in the entering task, for all together, and releases
    in reverse on the way out. Without, nobody is cancelled. Losing one loses all: ``held`` is false from
    then on; the other names stay closed until this is released, so that nobody enters a half-done job.

    Mutable state: ``_leases`` (grows while acquiring), ``_over`` (released), ``_watchers``.

    ```python
    async with client.multilock("account:1", "account:2") as leases:
        assert leases.held
        for name, lease in leases.items():
            print(name, lease.token)
    ```
    """

    __slots__ = ("__weakref__", "_leases", "_over", "_watchers")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tasks = []
        self._leases: dict[str, Lease] = {}
        self._over = False
        self._watchers: list[asyncio.Future[None]] = []

    def _is_over(self) -> bool:
        return self._over

    async def wait_lost(self) -> LockLost:
        """Wait until one is lost and return why. Raises NotHeld when all are released instead.

        ```python
        async def tell(leases: aiodlock.MultiLease) -> None:
            lost = await leases.wait_lost()
            print("lost", lost.name, lost.reason)
        ```
        """
        self._session.check_loop()
        while (lost := self._look()) is None:
            if self._over or not any(lease.held for lease in self._leases.values()):
                raise self._not_held()
            watcher = self._new_watcher()
            for lease in self._leases.values():
                self._watch(lease, watcher)
            try:
                await watcher
            finally:
                watcher.cancel()
        return lost

    async def release(self) -> None:
        """Release all, in reverse; each is attempted whatever happens to the others. From any task.

        ```python
        leases = await client.multilock("account:1", "account:2").acquire()
        await leases.release()
        ```

        :raises NotHeld: when this was released before.
        :raises LockLost: when one was lost before, or not answered until its local deadline.
        """
        self._session.check_here()
        if self._over:
            raise self._not_held()
        lost = self._error() if self.lost is not None else None
        self._end()
        held = [lease for lease in reversed(self._leases.values()) if not lease._is_over()]
        ends = await _together(held, Lease.release)
        errors = [error for _, error in ends if error is not None]
        # A cancellation comes out before everything else.
        errors.sort(key=lambda error: isinstance(error, Exception))
        if errors and not isinstance(errors[0], LockLost):
            raise errors[0]
        if lost is not None:
            raise lost
        if errors:
            raise errors[0]

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _acquisitions(self) -> list[Block]:  # type: ignore[override]
        return [(lease._request, lease._serial) for lease in self._leases.values()]

    @property
    def _requests(self) -> list[Request]:
        return [lease._request for lease in self._leases.values()]

    def _look(self) -> LockLost | None:
        """Return why the first of them was lost, and let it stay lost."""
        session = self._session
        for request, serial in self._acquisitions:
            lost = session.register.loss_of(request, serial)
            if lost is not None:
                return lost
        return None

    async def _leave(self, *, wait: bool) -> LockLost | BackendError | None:
        """Leave in reverse; return the loss, if any. What fails or is cancelled ends only the waiting."""
        loss = self._error() if self.lost is not None else None
        self._end()
        leases = list(reversed(self._leases.values()))
        if not wait:
            for lease in leases:
                found = await lease._leave(wait=False)
                loss = loss or found
            return loss
        ends = await _together(leases, lambda lease: lease._leave(wait=True))
        for _, error in ends:
            if error is not None:
                raise error
        for found, _ in ends:
            loss = loss or found
        return loss

    def _end(self) -> None:
        self._over = True
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._watchers.clear()

    def _new_watcher(self) -> asyncio.Future[None]:
        watcher: asyncio.Future[None] = self._session.loop.create_future()
        self._watchers = [known for known in self._watchers if not known.done()]
        self._watchers.append(watcher)
        return watcher

    @staticmethod
    def _watch(lease: Lease, watcher: asyncio.Future[None]) -> None:
        lease._request.add_watcher(watcher)

    def _worth_another_try(self) -> bool:
        """Whether what was lost need not be lost again. (A hold from before is not taken anew: its loss
        is raised inside a block on it, and else counts no more.)"""
        return all(
            request.terms.auto_extend and request.reason != "max_hold"
            for request in self._requests
            if request.reason is not None and not request.handles
        )


async def _together(
    leases: Sequence[Lease], call: Callable[[Lease], Awaitable[_T]]
) -> list[tuple[_T | None, BaseException | None]]:
    """Call for all leases at once; return what each call returned or raised.

    The messages go out in this order, in one round trip. A cancellation ends the wait, and leaves none out.
    """

    async def attempt(lease: Lease) -> tuple[_T | None, BaseException | None]:
        try:
            return await call(lease), None
        except BaseException as error:
            return None, error

    if len(leases) < 2:
        return [await attempt(lease) for lease in leases]
    tasks: list[asyncio.Task[tuple[_T | None, BaseException | None]]] = []
    try:
        for lease in leases:
            tasks.append(asyncio.create_task(attempt(lease)))
            if len(tasks) % _AT_ONCE == 0:
                await asyncio.sleep(0)  # the event loop's other work
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)
        finally:
            for lease in leases:
                if not lease._is_over():  # its call had not begun
                    await lease._leave(wait=False)
        raise  # this one: anyio knows its own by the message
    return [task.result() for task in tasks]
