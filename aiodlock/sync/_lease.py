"""Lease: one acquisition, as a thread sees it."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

from .. import _lease as core
from .. import _multilock as core_multilock
from .. import _process
from .._acquisition import Acquisition
from .._body import raise_loss
from .._errors import BackendError, LockLost, NotHeld
from .._request import Request, State
from .._scope import BodyScope
from .._session import Session
from ._blocks import Here, here
from ._twin import like

if TYPE_CHECKING:
    from ._client import Client
    from ._portal import Portal
    from ._running import Running

_logger = logging.getLogger("aiodlock")
_T = TypeVar("_T")


class Held:
    """What one lease and several at once share: the body of a thread, in the process that has acquired."""

    __slots__ = ("__weakref__", "_body", "_running")

    _running: Running
    _body: Body
    _core: core.Lease | core_multilock.MultiLease

    @property
    def _acquired(self) -> Acquisition | core_multilock.Acquisitions:
        raise NotImplementedError

    def ensure_held(self) -> None:
        raise NotImplementedError

    def _parts(self) -> Sequence[Lease]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        parts = self._parts()
        try:
            self.ensure_held()
        except (LockLost, BackendError):
            if not any(lease._is_open() for lease in parts):
                self._leave_soon()  # there is no body, and nobody will leave it later
            raise
        for lease in parts:
            lease._check_thread()
        try:
            self._enter_block()  # first: the other threads' check finds it
            self._running.portal.call(lambda: arm(self._requests(), self._body))
            self._let_go()
        except BaseException:  # a signal handler raised: it is held as before
            self._leave_block()
            self._running.portal.start_soon(lambda: disarm(self._requests(), self._body))
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave_block()
            if not self._is_here():
                return  # the parent's, before a fork
            for lease in reversed(self._parts()):
                here().released(lease)
            loss = self._end()
        except BaseException:  # a signal handler raised
            self._leave_soon()
            raise
        if loss is not None:
            raise_loss(exc, loss, isinstance(exc, GeneratorExit))

    _exit = __exit__

    def _begin(self) -> None:
        begin(self, self._requests())

    def _requests(self) -> Sequence[Request]:
        return [lease._request for lease in self._parts()]

    def _enter_block(self) -> None:
        for lease in self._parts():
            lease._enter_block()

    def _leave_block(self) -> None:
        for lease in self._parts():
            lease._leave_block()

    def _keep(self) -> None:
        for lease in self._parts():
            lease._keep()

    def _let_go(self) -> None:
        for lease in self._parts():
            lease._let_go()

    def _release(self) -> None:
        self._check_here()
        try:
            self._running.portal.call(self._core.release, within=self._core.remaining())
        finally:
            for lease in self._parts():
                if lease._acquired.is_over:
                    lease._let_go()
        for lease in self._parts():
            here().released(lease)

    def _end(self) -> LockLost | BackendError | None:
        if asyncio._get_running_loop() is not None:
            # Collected with a generator, or left in an event loop: it must not be blocked.
            self._running.portal.start_soon(self._leave)
            error = self._core.lost
            return copy(error) if error is not None else None
        return self._running.portal.call(self._leave, within=self._core.remaining())

    def _leave_soon(self) -> None:
        self._leave_block()
        if self._is_here():
            self._running.portal.start_soon(self._leave)

    def _leave(self) -> Coroutine[Any, Any, LockLost | BackendError | None]:
        return leave(self._acquired, self._body)

    def _ask(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        self._check_here()
        return self._running.portal.call(call)

    def _is_here(self) -> bool:
        return self._running.pid == _process.pid

    def _check_here(self) -> None:
        if not self._is_here():
            raise self._not_here()

    def _not_here(self) -> NotHeld:
        names = [lease.name for lease in self._parts()]
        return NotHeld(
            f"the lease on {', '.join(map(repr, names))} was acquired by process {self._running.pid}, "
            "before a fork: it stays with that process; acquire the lock here",
            name=names[0],
        )


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

    __slots__ = (
        *("_acquired", "_client", "_core", "_ended", "_here", "_job", "_number", "_owner"),
    )

    _core: core.Lease

    def __init__(
        self, client: Client | None, running: Running, acquired: Acquisition, body: Body
    ) -> None:
        self._client = client  # a client that is collected is closed
        self._running = running
        self._acquired = acquired
        self._core = core.Lease(acquired)
        self._here: weakref.ref[Here] | None = None
        self._owner: weakref.ref[Here] | None = None
        self._number = 0
        self._job: object | None = None
        #: Whether the thread that held it has ended without releasing it.
        self._ended = False
        self._body = body

    def __repr__(self) -> str:
        if not self._is_here():
            return f"<Lease {self.name!r} {self.mode} token={self.token} of process {self._running.pid}>"
        return super().__repr__()

    @like(core.Lease.wait_lost)
    def wait_lost(self) -> LockLost:
        return self._ask(self._core.wait_lost)

    @like(core.Lease.extend)
    def extend(self, ttl: float | None = None, **wrong: Never) -> None:
        self._ask(lambda: self._core.extend(ttl, **wrong))

    @like(core.Lease.release)
    def release(self) -> None:
        if self._ended:
            raise self._ended_error()
        self._release()

    # -- inside ------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Be this thread's until it is released: it was acquired without a block."""
        me = here()
        self._owner = me.ref
        twin = Lease(None, self._running, self._acquired, self._body)
        twin._owner = me.ref
        me.keep(self, twin)
        self._running.watch()

    def _let_go(self) -> None:
        """Be no thread's any more: it was released, or is in a block now."""
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.bare.pop(self._acquired, None)

    def _forget(self) -> None:
        """Release what an ended thread holds, in the background, with a warning."""
        if self._is_here():
            acquired = self._acquired
            forgotten = acquired.session.forgotten
            drop = partial(forgotten.left_by_thread, acquired.request, acquired.serial)
            self._running.portal.call_later(0, drop)

    def _check_thread(self) -> None:
        if self._here is not None and self._here() not in (None, here()):
            raise RuntimeError(
                f"the lease on {self.name!r} is the body of another thread already: enter it once"
            )

    def _is_open(self) -> bool:
        thread = self._here() if self._here is not None else None
        return thread is not None and self in thread.blocks

    def _parts(self) -> Sequence[Lease]:
        return (self,)

    def _requests(self) -> Sequence[Request]:
        return (self._request,)

    def _enter_block(self) -> None:
        """Let this thread's acquisitions of the name be re-entries, until the block is left."""
        me = here()
        self._here = me.ref
        me.enter(self)

    def _leave_block(self) -> None:
        thread = self._here() if self._here is not None else None
        if thread is not None and self in thread.blocks:
            thread.blocks.remove(self)

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        if not self._is_here():
            return self._not_here()
        error = super()._why_not_held()
        return self._ended_error() if self._ended and isinstance(error, NotHeld) else error

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

    __slots__ = ("_acquired", "_core", "_leases")

    _core: core_multilock.MultiLease

    def __init__(
        self, client: Client, running: Running, acquired: core_multilock.Acquisitions, body: Body
    ) -> None:
        self._running = running
        self._acquired = acquired
        self._core = core_multilock.MultiLease(acquired)
        self._body = body
        self._leases = {one.request.name: Lease(client, running, one, body) for one in acquired.all}

    @like(core_multilock.MultiLeaseView.ensure_held)
    def ensure_held(self) -> None:
        if not self._is_here():
            raise self._not_here()
        super().ensure_held()

    @like(core_multilock.MultiLease.wait_lost)
    def wait_lost(self) -> LockLost:
        return self._ask(self._core.wait_lost)

    @like(core_multilock.MultiLease.release)
    def release(self) -> None:
        self._release()

    # -- inside ------------------------------------------------------------------------------------

    def _parts(self) -> Sequence[Lease]:
        return tuple(self._leases.values())


def acquisitions_of(
    acquired: Acquisition | core_multilock.Acquisitions,
) -> Sequence[Acquisition]:
    """Return the one, or all of a multilock."""
    return (acquired,) if isinstance(acquired, Acquisition) else acquired.all


def wait_for_thread(one: Acquisition) -> None:
    """Take no body for begun before its thread calls ``begin``. In the loop's thread."""
    if one.request.handles == (one.serial,):  # else a re-entry, and the first body has begun
        one.request.used = False


def begin(entered: Held, requests: Sequence[Request]) -> None:
    """Let the body begin, unless the lease was lost on its way into this thread."""
    before = [request.used for request in requests]
    for request in requests:  # and then look: the loop marks a loss, and then asks for this
        request.used = True
    try:
        entered.ensure_held()
    except BaseException:
        for request, used in zip(requests, before, strict=True):
            request.used = used
        entered._leave_soon()
        raise


async def arm(requests: Sequence[Request], body: Body) -> None:
    """Let leaving the client wait for the body. In the loop's thread."""
    for request in requests:
        if request.armed is None:
            request.armed = {}
        request.armed[body] = body  # type: ignore[index]


async def disarm(requests: Sequence[Request], body: Body) -> None:
    """Let it wait no more. In the loop's thread."""
    for request in requests:
        if request.armed:
            request.armed.pop(body, None)  # type: ignore[call-overload]


async def leave(
    acquired: Acquisition | core_multilock.Acquisitions, body: Body
) -> LockLost | BackendError | None:
    """End a block; return the loss. In the loop's thread."""
    await disarm([one.request for one in acquisitions_of(acquired)], body)
    return await acquired.leave(wait=True)


class Body(BodyScope):
    """Stands for a body that cannot be cancelled."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        """A thread looks at ``lease.held`` itself."""


def call_when_lost(
    portal: Portal, acquired: Acquisition, function: Callable[[LockLost], object]
) -> None:
    """Call the function in a thread of its own once the lease is lost. In the loop's thread.

    Once for each loss: that of a re-entry is the loss of the block around it. But each is watched, because
    any of them may be the last to be released.
    """
    _look_for_loss(portal, acquired.session, acquired.request, acquired.serial, function)


def _look_for_loss(
    portal: Portal,
    session: Session,
    request: Request,
    serial: int,
    function: Callable[[LockLost], object],
    _: asyncio.Future[None] | None = None,
) -> None:
    # The acquisition itself is not kept for this: once nobody else has it, it is released.
    lost = session.register.loss_of(request, serial)
    if lost is not None:
        if function not in request.told_to:
            request.told_to.append(function)
            start_thread(portal, function, copy(lost))
    elif request.state is State.HELD and serial in request.handles:
        watcher: asyncio.Future[None] = session.loop.create_future()
        watcher.add_done_callback(
            partial(_look_for_loss, portal, session, request, serial, function)
        )
        request.add_watcher(watcher)


def start_thread(portal: Portal, function: Callable[[LockLost], object], lost: LockLost) -> None:
    def run() -> None:
        try:
            function(lost)
        except Exception:
            _logger.exception(
                "on_lost of %r raised",
                lost.name,
                extra={"event": "on_lost_failed", "lock": lost.name},
            )

    portal.start_thread(run, f"aiodlock: {lost.name!r} was lost")
