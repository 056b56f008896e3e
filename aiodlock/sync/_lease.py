"""Lease: one acquisition, as a thread sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Never, Self

from .. import _lease as core
from .. import _multilock as core_multilock
from .._errors import BackendError, LockLost, NotHeld
from ._body import Body, Elsewhere
from ._life import Life
from ._twin import like


class Held:
    """What one lease and several at once share: a body in a thread."""

    __slots__ = ("__weakref__", "_body", "_life")

    def __init__(self, life: Life, body: Body) -> None:
        self._life = life  # a client that is collected is closed
        self._body = body

    def ensure_held(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        body = self._body
        try:
            self.ensure_held()
        except (LockLost, BackendError):
            if not any([hold.inside() for hold in body.holds]):
                body.leave_soon()  # there is no body, and nobody will leave it later
            raise
        try:
            body.open()
        except Elsewhere:
            raise
        except BaseException:  # a signal handler raised: it is held as before
            body.close()
            raise
        try:
            self.ensure_held()
        except BaseException:
            body.leave_soon()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._body.exit(exc)
        except BaseException:  # a signal handler raised, or there was a loss
            self._body.leave_soon()
            raise


class Lease(core.LeaseView, Held):
    """One acquisition of a lock, from the grant to its release or loss.

    Any thread may ask it, extend it and release it. As a context manager it releases on the way out, and
    raises ``LockLost`` there when the lease was lost. What ``acquire`` returns is held by the thread that
    called it, also when this object is dropped: until it is released, or the thread ends (then with a
    ResourceWarning).

    In a process forked from the one that acquired it the lease is not held: it stays with the parent.

    ```python
    with locks.lock("report") as lease:
        print(lease.token, lease.held, lease.remaining())
    ```
    """

    __slots__ = ("_acquired", "_hold")

    def __init__(self, life: Life, body: Body) -> None:
        Held.__init__(self, life, body)
        self._hold = body.holds[0]
        self._acquired = self._hold.core

    def __repr__(self) -> str:
        running = self._hold.running
        if not running.is_here():
            return f"<Lease {self.name!r} {self.mode} token={self.token} of process {running.pid}>"
        return super().__repr__()

    @like(core.Lease.wait_lost)
    def wait_lost(self) -> LockLost:
        return self._body.ask(core.Lease(self._acquired).wait_lost)

    @like(core.Lease.extend)
    def extend(self, ttl: float | None = None, **wrong: Never) -> None:
        self._body.ask(lambda: core.Lease(self._acquired).extend(ttl, **wrong))

    @like(core.Lease.release)
    def release(self) -> None:
        if self._hold.ended:
            raise self._ended_error()
        self._body.release()

    # -- inside ------------------------------------------------------------------------------------

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        if not self._hold.running.is_here():
            return self._body.not_here()
        error = super()._why_not_held()
        return self._ended_error() if self._hold.ended and isinstance(error, NotHeld) else error

    def _ended_error(self) -> NotHeld:
        return NotHeld(
            f"the lease on {self.name!r} ended with the thread that acquired it: release in that "
            "thread, or acquire in the one that goes on",
            name=self.name,
        )


class MultiLease(core_multilock.MultiLeaseView[Lease], Held):
    """The leases of a multilock: a mapping from each name to its ``Lease``, in the order taken.

    As a context manager it releases in reverse on the way out. Losing one loses all: ``held`` is false from
    then on; the other names stay closed until this is released, so that nobody enters a half-done job.

    ```python
    with locks.multilock("account:1", "account:2") as leases:
        assert leases.held
    ```
    """

    __slots__ = ("_acquired", "_leases")

    def __init__(self, life: Life, body: Body) -> None:
        Held.__init__(self, life, body)
        assert isinstance(body.core, core_multilock.Acquisitions)
        self._acquired = body.core
        self._leases = {one.request.name: Lease(life, body.part(one)) for one in body.holds}

    @like(core_multilock.MultiLeaseView.ensure_held)
    def ensure_held(self) -> None:
        self._body.check_here()
        super().ensure_held()

    @like(core_multilock.MultiLease.wait_lost)
    def wait_lost(self) -> LockLost:
        return self._body.ask(core_multilock.MultiLease(self._acquired).wait_lost)

    @like(core_multilock.MultiLease.release)
    def release(self) -> None:
        self._body.release()
