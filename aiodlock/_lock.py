"""Lock: a name, a mode and options, and ``async with``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import CoroutineType, TracebackType
from typing import Any, Never

from . import _short_way
from ._acquisition import Acquisition, release_handle
from ._body import NOTHING, Blocks, coroutine_function
from ._core import Core
from ._description import Description
from ._errors import AcquireTimeout, NotHeld, WouldBlock
from ._lease import Lease
from ._model import LockInfo, Mode
from ._options import (
    LOCKS_ELSEWHERE,
    answers,
    check_timeout,
    check_tokens,
    refuse_keywords,
)
from ._request import Request

UNSET: Any = object()


@answers(LOCKS_ELSEWHERE)
class Acquirable:
    """What locks and semaphores share: options, and ``async with``. Holds nothing itself.

    Mutable state: ``_entered`` (the ``async with`` blocks that are open, any task's).
    """

    def __init__(self, described: Description) -> None:
        self._described = described
        self._acquire = described.acquire
        #: Whether a block may begin and end by ``_short_way``.
        self._short = _short_way.is_open(described.terms, described.options)
        self._entered: Blocks[Acquisition] = Blocks()

    def __repr__(self) -> str:
        return repr(self._described)

    @property
    def name(self) -> str:
        """The name, as given."""
        return self._described.name

    # -- for users ---------------------------------------------------------------------------------

    async def acquire(self, *given: Never, timeout: float | None = UNSET, **wrong: Never) -> Lease:
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
        if given or wrong:
            refuse_keywords("acquire()", wrong, ["timeout"], given)
        timeout = self._described.options.timeout if timeout is UNSET else check_timeout(timeout)
        return Lease(await self._acquire(timeout))

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
            return Lease(await self._acquire(0.0))
        except AcquireTimeout as busy:
            raise WouldBlock(f"{self.name!r} is held or waited for", name=self.name) from busy

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
        terms, owner = self._described.terms, self._described.options.owner
        session = self._described.core.use(terms.name)
        lost: list[Request] = []
        for request in reversed(
            session.register.holds(terms.kind, terms.name, asyncio.current_task())
        ):
            mine = request.terms.mode == terms.mode and request.options.owner == owner
            if mine and request.handles:
                if session.register.is_live(request):
                    await release_handle(session, request, request.handles[-1])
                    return
                if request.loss is not None and not request.loss.reported:
                    lost.append(request)
        if lost:
            error = lost[0].error()
            session.departure.report(lost)
            raise error
        raise NotHeld(
            f"this task does not hold {terms.name!r} in {terms.mode} mode; to release from "
            "another task, keep the lease and call its release(); asyncio.wait_for on Python 3.11 "
            "acquires in another task: use timeout= instead",
            name=terms.name,
        )

    async def locked(self) -> bool:
        """Return whether anybody holds the name at this moment, in any mode, or keeps it closed.

        Waiters do not count. What this task holds does, and so does a lease that lingers. It has to be
        called: ``if lock.locked:`` asks nothing and is always true, as mypy will say.

        ```python
        if await client.lock("report").locked():
            print("somebody holds it")
        ```
        """
        info = await self.inspect()
        return bool(info.holders) or info.closed > 0

    async def inspect(self) -> LockInfo:
        """Return who holds it and who waits for it; as ``Client.inspect``.

        ```python
        info = await client.semaphore("mail", limit=3).inspect()
        print(len(info.holders), "of 3 places are taken")
        ```
        """
        terms = self._described.terms
        return await self._described.core.inspect(terms.kind, terms.name)

    async def break_lock(self, *, tokens: Iterable[int] | None = None) -> int:
        """Release all holders by force, or those with these tokens; as ``Client.break_lock``.

        ```python
        await client.lock("report").break_lock()
        ```
        """
        terms, meant = self._described.terms, check_tokens(tokens)
        return await self._described.core.break_lock(terms.kind, terms.name, meant)

    async def __aenter__(self) -> Lease:
        described = self._described
        if self._short and (session := described.core.session) is not None:
            kept = _short_way.begin(session, described.terms, described.options)
            if kept is _short_way.NEXT_TURN:
                await asyncio.sleep(0)
                kept = _short_way.begin(session, described.terms, described.options)
            if kept is not None and kept is not _short_way.NEXT_TURN:
                self._entered.enter(kept.tasks[0], kept)
                return Lease(kept)
        acquired = await self._acquire(described.options.timeout)
        whose = acquired.request.task
        self._entered.enter(acquired.arm(None if whose is None else whose()), acquired)
        return Lease(acquired)

    @coroutine_function
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
            and (session := self._described.core.session) is not None
            and _short_way.end(session, self._entered)
        ):
            return NOTHING
        meant = self._entered.take(self, exc)
        if meant is None:
            return NOTHING
        task, acquired = meant
        return acquired.end_block(task, exc_type, exc)  # type: ignore[return-value]


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
        return self._described.terms.mode


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

    def __init__(self, read: Lock, write: Lock, core: Core) -> None:
        self._read = read
        self._write = write
        self._core = core

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
        return f"<ReadWriteLock {self.name!r} on {self._core!r}>"


class Semaphore(Acquirable):
    """A lock with ``limit`` holders, in the same fair queue. Not reentrant; made by ``Client.semaphore``.

    Its keys are its own: a lock of the same name is another thing.

    ```python
    mail = client.semaphore("mail", limit=3)
    async with mail as lease:
        ...
    ```
    """

    @property
    def limit(self) -> int:
        """How many may hold at a time."""
        return self._described.terms.limit

    async def locked(self) -> bool:
        """Return whether ``acquire_nowait`` would be refused at this moment: no place free, or waiters.

        Judged by this object's limit; where others resize the semaphore, it is not known which is in use.

        ```python
        if await client.semaphore("mail", limit=3).locked():
            print("all three places are taken")
        ```
        """
        info = await self.inspect()
        taken = sum(holder.count for holder in info.holders) + info.closed_places
        return taken >= self.limit or bool(info.waiters)
