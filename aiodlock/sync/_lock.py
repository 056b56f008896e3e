"""Lock, ReadWriteLock, Semaphore: names with a mode and options, for any number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never

from .. import _lock as core
from .._errors import AcquireTimeout, NotHeld, WouldBlock
from .._lock import UNSET
from .._model import LockInfo, Mode, Terms
from .._options import LOCKS_ELSEWHERE, answers
from ._body import Body
from ._holds import here, holding_threads
from ._lease import Lease
from ._life import Life
from ._recipe import Described
from ._twin import like, said_of_threads


@answers(LOCKS_ELSEWHERE)
class Acquirable(Described[core.Acquirable, Lease]):
    """What locks and semaphores share. Holds nothing itself; any number of threads may use one."""

    _lease_type = Lease

    @property
    def name(self) -> str:
        """The name, as given."""
        return self._terms.name

    @property
    def _terms(self) -> Terms:
        return self._of.template._described.terms

    # -- for users ---------------------------------------------------------------------------------

    def acquire(self, *given: Never, timeout: float | None = UNSET, **wrong: Never) -> Lease:
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
        return self._take_bare(timeout, given, wrong)

    @like(core.Acquirable.acquire_nowait)
    def acquire_nowait(self) -> Lease:
        try:
            return self._take_bare(0.0)
        except AcquireTimeout as busy:
            raise WouldBlock(f"{self.name!r} is held or waited for", name=self.name) from busy

    @like(core.Acquirable.release)
    def release(self) -> None:
        running, terms = self._of.life.use(self.name), self._terms
        owner = self._of.template._described.options.owner
        # Not in a variable: an error that is kept would keep this thread's holds beyond its end.
        holds = here().holds(running, terms, owner)
        if not holds:
            others = ", ".join(map(repr, holding_threads(running, terms, owner)))
            raise NotHeld(
                f"this thread holds no lease on {self.name!r} in {terms.mode} mode"
                + (f" (thread {others} does)" if others else "")
                + ": release in the thread that acquired, or keep the lease that acquire() returns and "
                "call its release(), which any thread may",
                name=self.name,
            )
        live = next((hold for hold in holds if hold.core.held), None)
        if live is None:
            for hold in holds:
                hold.report()  # what is raised here tells of all of them
        meant = live or holds[0]
        Body(running, meant.core, [meant]).release()

    @like(core.Acquirable.locked)
    def locked(self) -> bool:
        return self._of.ask(lambda lock: lock.locked())

    @like(core.Acquirable.inspect)
    def inspect(self) -> LockInfo:
        return self._of.ask(lambda lock: lock.inspect())

    @like(core.Acquirable.break_lock)
    def break_lock(self, *, tokens: Iterable[int] | None = None) -> int:
        return self._of.ask(lambda lock: lock.break_lock(tokens=tokens))


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
        return self._terms.mode

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} {self.mode} on {self._of.life!r}>"


class ReadWriteLock:
    __doc__ = said_of_threads(core.ReadWriteLock)

    def __init__(self, life: Life, read: Lock, write: Lock) -> None:
        self._life = life
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
        return f"<ReadWriteLock {self.name!r} on {self._life!r}>"


class Semaphore(Acquirable):
    __doc__ = said_of_threads(core.Semaphore)

    @property
    def limit(self) -> int:
        """How many may hold at a time."""
        return self._terms.limit

    @like(core.Semaphore.locked)
    def locked(self) -> bool:
        return super().locked()

    def __repr__(self) -> str:
        return f"<Semaphore {self.name!r} limit={self.limit} on {self._of.life!r}>"
