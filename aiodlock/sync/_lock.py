"""Lock, ReadWriteLock, Semaphore: names with a mode and options, for any number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Never

from .. import _lease as core_lease
from .. import _lock as core
from .._errors import AcquireTimeout, NotHeld, WouldBlock
from .._model import LockInfo, Mode
from .._options import ATTRIBUTES_ELSEWHERE, Elsewhere, check_timeout, refuse_keywords
from .._patience import LEAST, soon
from ._blocks import Enterable, here, holding_threads
from ._lease import Body, Lease, arm, call_when_lost, leave, wait_for_thread
from ._options import UNSET

if TYPE_CHECKING:
    from ._client import Client, Description, Running


class Acquirable(Enterable[Lease]):
    """What locks and semaphores share. Holds nothing itself; any number of threads may use one.

    Mutable state: ``_made`` (the lock of the running client that this one was last used with).
    """

    def __init__(self, client: Client, description: Description) -> None:
        super().__init__()
        self._client = client
        self._description = description
        self._on_lost = description.on_lost
        self._core: core.Acquirable = description.make(client._template)
        self._made: tuple[Running, core.Acquirable] | None = None

    @property
    def name(self) -> str:
        """The name, as given."""
        return self._core.name

    # -- for users ---------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # a type checker knows all attributes
        extend, reacquire, owned, local = Elsewhere(), Elsewhere(), Elsewhere(), Elsewhere()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ATTRIBUTES_ELSEWHERE]

    def acquire(self, *, timeout: float | None = UNSET, **wrong: Never) -> Lease:
        """Wait for the turn and return the lease, which is to be released.

        The hold belongs to this thread, which may acquire the name again, in the same job of a pool. It
        ends by ``Lock.release`` in this thread, by ``Lease.release`` in any, or with the thread.

        ```python
        lease = locks.lock("report").acquire(timeout=5)
        lease.release()
        ```

        :param timeout: seconds; None waits for ever, 0 tries once. Default: the lock's own.
        :raises AcquireTimeout: when the timeout ran out; nothing is left in the queue.
        :raises DeadlockError: when this thread is in a block that holds the name in shared mode, and asks
            exclusively.
        :raises LockLost: when this thread is in a block of that name whose lease was lost; when the lease
            was lost on its way into this thread, such as by closing the client.
        :raises BackendUnavailable: when nothing answered for ``unavailable_after``, or at the timeout.
        :raises ClientClosed: when the client is closed meanwhile.
        :raises RuntimeError: in a thread that runs an event loop.
        """
        if wrong:
            refuse_keywords("acquire()", wrong, ["timeout"])
        return self._acquire(self._timeout(timeout))

    def acquire_nowait(self) -> Lease:
        """Return the lease if the lock is free and nobody waits for it.

        ```python
        from aiodlock import WouldBlock

        try:
            lease = locks.lock("report").acquire_nowait()
        except WouldBlock:
            print("somebody else holds it")
        else:
            with lease:
                ...
        ```

        :raises WouldBlock: when it is held or waited for.
        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        try:
            return self._acquire(0.0)
        except AcquireTimeout as busy:
            raise WouldBlock(f"{self.name!r} is held or waited for", name=self.name) from busy

    def release(self) -> None:
        """Release this thread's latest hold of that name and mode.

        ```python
        lock = locks.lock("report")
        lease = lock.acquire()
        lock.release()  # in the same thread
        ```

        :raises NotHeld: when this thread holds nothing of the kind.
        :raises LockLost: once, when the thread has nothing left but what it has lost; or when nothing
            answered until the lease's deadline.
        """
        running, me = self._client._use(self.name), here()
        request, options = self._core, self._core._options
        described = (running, request._kind, self.name, request._mode, options.owner)
        holds = me.holds(*described)
        if not holds:
            others = ", ".join(map(repr, holding_threads(*described)))
            raise NotHeld(
                f"this thread holds no lease on {self.name!r} in {request._mode} mode"
                + (f" (thread {others} does)" if others else "")
                + ": release in the thread that acquired, or keep the lease that acquire() returns and "
                "call its release(), which any thread may",
                name=self.name,
            )
        live = next((lease for lease in holds if lease.held), None)
        if live is None:
            me.forget(holds)  # what is raised here tells of all of them
        (live or holds[0]).release()

    def locked(self) -> bool:
        """Return whether anybody holds the name at this moment, in any mode.

        ```python
        if locks.lock("report").locked():
            print("somebody holds it")
        ```

        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        running = self._client._use(self.name)
        made = self._made_for(running)
        return running.call(made.locked)

    def inspect(self) -> LockInfo:
        """Return who holds it and who waits for it.

        ```python
        print(len(locks.semaphore("mail", limit=3).inspect().holders), "of 3 places are taken")
        ```
        """
        running = self._client._use(self.name)
        made = self._made_for(running)
        return running.call(made.inspect)

    def break_lock(self, *, tokens: Iterable[int] | None = None) -> int:
        """Release all holders by force, or those with these tokens; return their number.

        ```python
        locks.lock("report").break_lock()
        ```
        """
        running = self._client._use(self.name)
        made = self._made_for(running)
        return running.call(lambda: made.break_lock(tokens=tokens))

    # -- inside ------------------------------------------------------------------------------------

    def _take(self) -> Lease:
        return self._acquire(self._core._options.timeout, block=True)

    def _timeout(self, timeout: float | None) -> float | None:
        return self._core._options.timeout if timeout is UNSET else check_timeout(timeout)

    def _made_for(self, running: Running) -> core.Acquirable:
        made = self._made
        if made is None or made[0] is not running:
            self._made = made = (running, self._description.make(running.inner))
        return made[1]

    def _acquire(self, timeout: float | None, *, block: bool = False) -> Lease:
        """Acquire by one call into the loop; for a block, what belongs to it is done in the same call."""
        running = self._client._use(self.name)
        lock = self._made_for(running)
        me = here()
        own = me.own(running, self.name)
        body = Body()

        async def acquire() -> core_lease.Lease:
            left = timeout if running.is_open else await running.open_within(timeout)
            lease = await lock._acquire(left, own)
            wait_for_thread(lease)
            if block:
                await arm([lease._request], body)
            if self._on_lost is not None:
                call_when_lost(running.portal, lease, self._on_lost)
            return lease

        lease = Lease(
            self._client,
            running,
            running.portal.call(
                acquire,
                lambda lease: leave(lease, [lease._request], body),
                within=soon(LEAST) if timeout == 0 else timeout,
            ),
            body,
        )
        if block:
            me.acquired(lease)
            return lease
        try:
            lease._keep()
            lease._begin()
        except BaseException:  # lost on its way into this thread, or a signal handler raised
            lease._let_go()
            lease._leave_soon()
            raise
        return lease


class Lock(Acquirable):
    """A fair distributed lock for threads. Made by ``Client.lock``; many threads may use one.

    ``with lock as lease:`` waits its turn. A thread cannot be cancelled: when the lease is lost,
    ``lease.held`` is False, ``on_lost`` is called if it is a function, and leaving the block raises
    ``LockLost``. A thread that holds it gets in again at once (in the same mode). The next job of a pool
    that runs in the same thread does not: it waits.

    ```python
    lock = locks.lock("order:42", ttl=10)
    with lock as lease:
        print(lease.token)
    ```
    """

    @property
    def mode(self) -> Mode:
        """``"exclusive"`` or ``"shared"``."""
        return self._core._mode

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} {self.mode} on {self._client!r}>"


class ReadWriteLock:
    """The two modes of one name. ``read`` may be held by many at a time, ``write`` by one alone.

    ```python
    page = locks.rwlock("page:7")
    with page.read:
        ...
    with page.write:
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

    ```python
    mail = locks.semaphore("mail", limit=3)
    with mail as lease:
        ...
    ```
    """

    @property
    def limit(self) -> int:
        """How many may hold at a time."""
        return self._core._limit

    def locked(self) -> bool:
        """Return whether ``acquire_nowait`` would be refused at this moment: no place free, or waiters.

        Judged by this object's limit; where others resize the semaphore, it is not known which is in use.

        ```python
        if locks.semaphore("mail", limit=3).locked():
            print("all three places are taken")
        ```

        :raises BackendUnavailable: when nothing answers within 2 s.
        """
        return super().locked()

    def __repr__(self) -> str:
        return f"<Semaphore {self.name!r} limit={self.limit} on {self._client!r}>"
