"""MultiLock: several names at once, all or none.

Over 400 lines: the lock, its lease and its roll-back are one idea.

Everybody takes the names in one order, that of their UTF-8 bytes, one after the other. So two of them
never wait for each other: whoever holds the last name that both want has all it needs before it.
What a task held *before* is outside of that order: with it, a deadlock is possible again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Never, TypeVar

import anyio

from ._acquire import OwnRequests
from ._acquisition import Acquisition
from ._body import AsyncBlock, Blocks, Body
from ._clock import now
from ._core import Core
from ._description import Description
from ._errors import AcquireTimeout, BackendError, BackendUnavailable, LockLost, NotHeld
from ._lease import Lease, LeaseView
from ._lock import UNSET, Lock
from ._options import check_timeout, refuse_keywords
from ._patience import left_of
from ._request import Block
from ._session import Session

_T = TypeVar("_T")
_L = TypeVar("_L", bound=LeaseView)

#: So many leases are left in one turn of the event loop.
_AT_ONCE = 100


def described_once(
    core: Core, names_or_locks: Sequence[str | Lock], describe: Callable[[str], Description]
) -> list[Description]:
    """Return one description for each name of a multilock, as ``Client.multilock`` says."""
    given: dict[str, list[Description]] = {}
    plain: dict[str, Description] = {}
    for one in names_or_locks:
        if isinstance(one, Lock):
            described = one._described
            if described.core is not core:
                raise ValueError(f"{one!r} belongs to another client than {core!r}")
            given.setdefault(one.name, []).append(described)
        elif isinstance(one, str):
            plain[one] = describe(one)
        else:
            raise TypeError(
                f"multilock takes names and Lock objects (such as rwlock(name).read), not {one!r}"
            )
    merged = plain | {name: _merge(same) for name, same in given.items()}
    for name in plain.keys() & given.keys():
        merged[name] = merged[name].in_mode("exclusive")
    return list(merged.values())


def _merge(same: list[Description]) -> Description:
    """Choose one of several descriptions of a name: the first that is exclusive, else the first."""
    if len({lock.options.owner for lock in same}) > 1:
        raise ValueError(f"{same[0].name!r} is given with different owners, and is taken once")
    return next((lock for lock in same if lock.terms.mode == "exclusive"), same[0])


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

    def __init__(self, core: Core, locks: list[Description], timeout: float | None) -> None:
        self._core = core
        ordered = sorted(locks, key=lambda lock: lock.name.encode())
        #: Their bodies begin together, when all names are granted.
        self._locks = tuple(lock.with_later_body() for lock in ordered)
        self._timeout = timeout
        self._entered: Blocks[Acquisitions] = Blocks()

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in self.names)
        return f"<MultiLock {names} on {self._core!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once, in the order in which they are taken."""
        return tuple(lock.name for lock in self._locks)

    async def acquire(
        self, *given: Never, timeout: float | None = UNSET, **wrong: Never
    ) -> MultiLease:
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
        if given or wrong:
            refuse_keywords("acquire()", wrong, ["timeout"], given)
        timeout = self._timeout if timeout is UNSET else check_timeout(timeout)
        return MultiLease(await self._acquire(timeout))

    async def __aenter__(self) -> MultiLease:
        acquired = await self._acquire(self._timeout)
        self._entered.enter(acquired.arm(), acquired)
        return MultiLease(acquired)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        meant = self._entered.take(self, exc)
        if meant is not None:
            task, acquired = meant
            await acquired.end_block(task, exc_type, exc)

    # -- inside ------------------------------------------------------------------------------------

    async def _acquire(self, timeout: float | None, own: OwnRequests | None = None) -> Acquisitions:
        started = now()
        session = await self._core.ready(within=timeout)

        while True:
            acquired = Acquisitions(session)
            try:
                await self._take_all(acquired, partial(left_of, timeout, started), own)
            except AcquireTimeout as busy:
                await acquired.leave(wait=True)
                raise self._timed_out(busy, timeout) from busy
            except BaseException as failure:
                # A coroutine that is being closed cannot await. And who has waited for a silent store once
                # is not kept any longer.
                silent = isinstance(failure, BackendUnavailable) or session.departure.was_silent
                await acquired.leave(wait=not silent and not isinstance(failure, GeneratorExit))
                raise
            lost = acquired.look()
            if lost is None:
                for one in acquired.all:
                    one.request.used = True
                return acquired
            error = acquired.error()
            await acquired.leave(wait=True)
            session.check_usable()
            if not acquired.worth_another_try():
                raise error
            if timeout is not None and now() - started >= timeout:
                raise AcquireTimeout(
                    f"{lost.name!r} was lost while the other names were waited for, and the timeout of "
                    f"{timeout:g} s is over: {lost}",
                    name=lost.name,
                ) from error

    async def _take_all(
        self,
        acquired: Acquisitions,
        time_left: Callable[[], float | None],
        own: OwnRequests | None,
    ) -> None:
        """Acquire in order; return early when a lease is lost that was taken already."""
        scope = asyncio.timeout(None)
        lookout = _Lookout(acquired, scope)
        try:
            async with scope:
                for lock in self._locks:
                    one = await lock.acquire(_shorter(time_left(), lock.options.timeout), own)
                    acquired.all.append(one)
                    one.request.add_watcher(lookout.changed)
                for one in acquired.all:
                    await one.begin()
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

    Mutable state: ``changed`` (resolved when there is something to see), ``_over``. (No closures: two that
    know each other would keep the acquisitions until the collector comes.)
    """

    def __init__(self, acquired: Acquisitions, scope: asyncio.Timeout) -> None:
        self._acquired = acquired
        self._scope = scope
        self._over = False
        self.changed: asyncio.Future[None] = self._begin()

    def end(self) -> None:
        """Look no longer."""
        self._over = True
        self.changed.remove_done_callback(self._on_change)
        self.changed.cancel()

    def _begin(self) -> asyncio.Future[None]:
        changed = self._acquired.new_watcher()
        changed.add_done_callback(self._on_change)
        return changed

    def _on_change(self, _: object) -> None:
        if self._over:
            return  # the taking has ended in the same turn of the loop
        if self._acquired.look() is None:
            self.changed = self._begin()  # another acquisition of such a name has ended
        elif self._scope.when() is None:
            self._scope.reschedule(self._acquired.session.loop.time())


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((time for time in (one, other) if time is not None), default=None)


class Acquisitions(Body):
    """What a ``MultiLease`` shows. Losing one loses all.

    Mutable state: ``all`` (grows while acquiring), ``over`` (released), ``_watchers``.
    """

    __slots__ = ("_watchers", "all", "over", "session", "tasks")

    session: Session
    tasks: tuple[asyncio.Task[Any], ...]

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tasks = ()
        self.all: list[Acquisition] = []
        self.over: bool = False
        self._watchers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = "held" if self.held else "lost" if self.lost else "released"
        return f"<MultiLease {', '.join(repr(one.request.name) for one in self.all)} {state}>"

    @property
    def acquisitions(self) -> Sequence[Block]:
        """What a body of it relies on."""
        return [block for one in self.all for block in one.acquisitions]

    @property
    def held(self) -> bool:
        """Whether all are held."""
        return not self.over and all(one.held for one in self.all)

    @property
    def lost(self) -> LockLost | None:
        """Why the first of them was lost; None while all are held and after a release."""
        return next((lost for one in self.all if (lost := one.lost)), None)

    def ensure_held(self) -> None:
        """Return if all are held, else raise why not."""
        if not self.held:
            raise self.not_held() if self.lost is None else self.error()

    def error(self) -> LockLost | BackendError:
        """Return what to raise when one is lost."""
        # The clock may have told a loss that is not marked yet.
        error = next(one.why_not_held() for one in self.all if one.lost)
        assert not isinstance(error, NotHeld)
        return error

    def not_held(self) -> NotHeld:
        """Return what a second release raises."""
        names = [one.request.name for one in self.all]
        return NotHeld(
            f"the leases on {', '.join(map(repr, names))} were released before: a lease is released once; "
            "to go on, acquire the locks again",
            name=names[0],
        )

    def look(self) -> LockLost | None:
        """Return why the first of them was lost, and let it stay lost."""
        for one in self.all:
            lost = self.session.register.loss_of(one.request, one.serial)
            if lost is not None:
                return lost
        return None

    def new_watcher(self) -> asyncio.Future[None]:
        """Return what is resolved when there is something to see of any of them."""
        watcher: asyncio.Future[None] = self.session.loop.create_future()
        self._watchers = [known for known in self._watchers if not known.done()]
        self._watchers.append(watcher)
        for one in self.all:
            one.request.add_watcher(watcher)
        return watcher

    async def release(self) -> None:
        """Release all, in reverse; see ``MultiLease.release``."""
        self.session.check_here()
        if self.over:
            raise self.not_held()
        lost = self.error() if self.lost is not None else None
        self._end()
        held = [one for one in reversed(self.all) if not one.is_over]
        ends = await _together(held, Acquisition.release)
        errors = [error for _, error in ends if error is not None]
        # A cancellation comes out before everything else.
        errors.sort(key=lambda error: isinstance(error, Exception))
        if errors and not isinstance(errors[0], LockLost):
            raise errors[0]
        if lost is not None:
            raise lost
        if errors:
            raise errors[0]

    async def leave(self, *, wait: bool) -> LockLost | BackendError | None:
        """Leave in reverse; return the loss, if any. What fails or is cancelled ends only the waiting."""
        loss = self.error() if self.lost is not None else None
        self._end()
        if not wait:
            for one in reversed(self.all):
                found = await one.leave(wait=False)
                loss = loss or found
            return loss
        ends = await _together(self.all[::-1], lambda one: one.leave(wait=True))
        for _, error in ends:
            if error is not None:
                raise error
        for found, _ in ends:
            loss = loss or found
        return loss

    def worth_another_try(self) -> bool:
        """Whether what was lost need not be lost again. (A hold from before is not taken anew: its loss
        is raised inside a block on it, and else counts no more.)"""
        return all(
            one.request.terms.auto_extend and loss.reason != "max_hold"
            for one in self.all
            if (loss := one.request.loss) is not None and not one.request.handles
        )

    def _end(self) -> None:
        self.over = True
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._watchers.clear()


class MultiLeaseView(Mapping[str, _L]):
    """What the leases of a multilock tell, to tasks and to threads. Maps names to leases."""

    __slots__ = ()

    _acquired: Acquisitions
    _leases: dict[str, _L]

    def __repr__(self) -> str:
        return repr(self._acquired)

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
        return self._acquired.held

    @property
    def lost(self) -> LockLost | None:
        """Why the first of them was lost; None while all are held and after a release."""
        return self._acquired.lost

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
        self._acquired.ensure_held()


class MultiLease(MultiLeaseView[Lease], AsyncBlock["Acquisitions"]):
    """The leases of a multilock: a mapping from each name to its ``Lease``, in the order taken.

    As an async context manager it arms ``on_lost`` in the entering task, for all together, and releases
    in reverse on the way out. Without, nobody is cancelled. Losing one loses all: ``held`` is false from
    then on; the other names stay closed until this is released, so that nobody enters a half-done job.

    ```python
    async with client.multilock("account:1", "account:2") as leases:
        assert leases.held
        for name, lease in leases.items():
            print(name, lease.token)
    ```
    """

    __slots__ = ("__weakref__", "_acquired", "_leases")

    def __init__(self, acquired: Acquisitions) -> None:
        self._acquired = acquired
        self._leases: dict[str, Lease] = {one.request.name: Lease(one) for one in acquired.all}

    async def wait_lost(self) -> LockLost:
        """Wait until one is lost and return why. Raises NotHeld when all are released instead.

        ```python
        async def tell(leases: aiodlock.MultiLease) -> None:
            lost = await leases.wait_lost()
            print("lost", lost.name, lost.reason)
        ```
        """
        acquired = self._acquired
        acquired.session.check_loop()
        while (lost := acquired.look()) is None:
            if acquired.over or not any(one.held for one in acquired.all):
                raise acquired.not_held()
            watcher = acquired.new_watcher()
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
        await self._acquired.release()


async def _together(
    acquired: Sequence[Acquisition], call: Callable[[Acquisition], Awaitable[_T]]
) -> list[tuple[_T | None, BaseException | None]]:
    """Call for all at once; return what each call returned or raised.

    The messages go out in this order, in one round trip. A cancellation ends the wait, and leaves none out.
    """

    async def attempt(one: Acquisition) -> tuple[_T | None, BaseException | None]:
        try:
            return await call(one), None
        except BaseException as error:
            return None, error

    if len(acquired) < 2:
        return [await attempt(one) for one in acquired]
    tasks: list[asyncio.Task[tuple[_T | None, BaseException | None]]] = []
    try:
        for one in acquired:
            tasks.append(asyncio.create_task(attempt(one)))
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
            for one in acquired:
                if not one.is_over:  # its call had not begun
                    await one.leave(wait=False)
        raise  # this one: anyio knows its own by the message
    return [task.result() for task in tasks]
