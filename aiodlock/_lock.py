"""Lock: a name, a mode and options, and ``async with``."""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Never

from . import _short_way
from ._acquire import Acquisition, OwnRequests
from ._body import NOTHING, Blocks
from ._capabilities import refuse_unsupported
from ._clock import now
from ._core import Core
from ._errors import (
    AcquireTimeout,
    NotHeld,
    WouldBlock,
)
from ._lease import Lease, release_handle
from ._model import Kind, LockInfo, Mode, Terms
from ._options import (
    ATTRIBUTES_ELSEWHERE,
    Elsewhere,
    LockOptions,
    check_timeout,
    check_tokens,
    refuse_keywords,
)
from ._patience import LEAST, soon
from ._request import Request
from ._tasks import task_of

_logger = logging.getLogger("aiodlock")

_UNSET: Any = object()


class Acquirable:
    """What locks and semaphores share: options, and ``async with``. Holds nothing itself.

    Mutable state: ``_entered`` (the ``async with`` blocks that are open, any task's).
    """

    _kind: Kind = "lock"
    _lease_type: type[Lease] = Lease

    def __init__(
        self,
        core: Core,
        name: str,
        mode: Mode,
        options: LockOptions,
        limit: int = 0,
        resize: bool = False,
    ) -> None:
        self._core = core
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
            waiter_ttl=min(core.waiter_ttl, self._ttl),
            lock_delay=options.lock_delay,
            margin=options.margin,
            max_hold=options.max_hold,
            auto_extend=options.auto_extend,
            hold_at_least=options.hold_at_least,
            resize=resize,
            note=options.note,
            linger=options.linger,
        )
        refuse_unsupported(core.store.capabilities, self._terms, options.ttl, core.described)
        #: Whether a block may begin and end by ``_short_way``.
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
        :raises BackendUnavailable: when nothing answers within 2 s, or within twice what answers take.
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
        session = self._core.use(self._name)
        lost: list[Request] = []
        for request in reversed(
            session.register.holds(self._kind, self._name, asyncio.current_task())
        ):
            mine = request.terms.mode == self._mode and request.options.owner == self._options.owner
            if mine and request.handles:
                if session.register.is_live(request):
                    await release_handle(session, request, request.handles[-1])
                    return
                if not request.reported:
                    lost.append(request)
        if lost:
            error = lost[0].error()
            session.departure.report(lost)
            raise error
        raise NotHeld(
            f"this task does not hold {self._name!r} in {self._mode} mode; to release from "
            "another task, keep the lease and call its release(); asyncio.wait_for on Python 3.11 "
            "acquires in another task: use timeout= instead",
            name=self._name,
        )

    async def locked(self) -> bool:
        """Return whether anybody holds the name at this moment, in any mode, or keeps it closed.

        Waiters do not count. What this task holds does, and so does a lease that lingers.

        ```python
        if await client.lock("report").locked():
            print("somebody holds it")
        ```
        """
        info = await self._core.inspect(self._kind, self._name)
        return bool(info.holders) or info.closed > 0

    async def inspect(self) -> LockInfo:
        """Return who holds it and who waits for it; as ``Client.inspect``.

        ```python
        info = await client.semaphore("mail", limit=3).inspect()
        print(len(info.holders), "of 3 places are taken")
        ```
        """
        return await self._core.inspect(self._kind, self._name)

    async def break_lock(self, *, tokens: Iterable[int] | None = None) -> int:
        """Release all holders by force, or those with these tokens; as ``Client.break_lock``.

        ```python
        await client.lock("report").break_lock()
        ```
        """
        return await self._core.break_lock(self._kind, self._name, check_tokens(tokens))

    async def __aenter__(self) -> Lease:
        if self._short and (session := self._core.session) is not None:
            asked = session, self._terms, self._options, self._entered, self._lease_type
            kept = _short_way.begin(*asked, sys._getframe(1))
            if kept is _short_way.NEXT_TURN:
                await asyncio.sleep(0)
                kept = _short_way.begin(*asked, sys._getframe(1))
            if kept is not None and kept is not _short_way.NEXT_TURN:
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
            and (session := self._core.session) is not None
            and _short_way.end(session, self._entered)
        ):
            return NOTHING
        meant = self._entered.take(self, exc, sys._getframe(1))
        if meant is None:
            return NOTHING
        task, lease = meant
        return lease._end_block(task, exc_type, exc)  # type: ignore[return-value]

    # -- inside ------------------------------------------------------------------------------------

    def _acquire(
        self, timeout: float | None, own: OwnRequests | None = None
    ) -> Coroutine[Any, Any, Lease]:
        """Wait for the turn. With ``own`` the hold belongs to its ``Lease``, not to the current task."""
        session = self._core.session
        if session is not None and session.death is not None:
            return self._acquire_later(timeout, own)
        session = self._core.use(self._name)
        task = task_of(session.loop) if own is None else None
        if task is None and own is None:
            raise RuntimeError(f"{self!r} can be acquired inside an asyncio task only")
        asked = Acquisition(session, self._terms, self._options, self._lease_type, timeout)
        return asked.lease(task, own)

    async def _acquire_later(self, timeout: float | None, own: OwnRequests | None) -> Lease:
        """The session has died: wait for the next one."""
        began = now()
        await self._core.ready(self._name, soon(LEAST) if timeout == 0 else timeout)
        left = max(0.001, timeout - (now() - began)) if timeout else timeout
        return await self._acquire(left, own)


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
        return f"<Lock {self._name!r} {self._mode} on {self._core!r}>"

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
        return f"<ReadWriteLock {self.name!r} on {self._write._core!r}>"


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
        info = await self._core.inspect(self._kind, self._name)
        taken = sum(holder.count for holder in info.holders) + info.closed_places
        return taken >= self._limit or bool(info.waiters)

    def __repr__(self) -> str:
        return f"<Semaphore {self._name!r} limit={self._limit} on {self._core!r}>"
