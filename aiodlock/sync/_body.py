"""The body of a thread: what one call has acquired for it, and how it begins and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

from .._acquisition import Acquisition
from .._body import raise_loss
from .._errors import BackendError, LockLost, NotHeld
from .._multilock import Acquisitions
from .._request import HELD, Request
from .._session import Session
from ._holds import Hold, NoScope, tell_of_long_holds
from ._portal import Portal, runs_a_loop
from ._running import Running

_logger = logging.getLogger("aiodlock")
_T = TypeVar("_T")


class Elsewhere(RuntimeError):
    """A lease is the body of one thread."""


class Body:
    """One acquisition, or several as one, and what the thread that asked for it has of each.

    A signal handler may raise between any two steps. So what begins a body is undone by ``leave_soon``.
    """

    __slots__ = ("core", "holds", "running")

    def __init__(
        self,
        running: Running,
        acquired: Acquisition | Acquisitions,
        holds: Sequence[Hold] | None = None,
    ) -> None:
        self.running: Running = running
        self.core: Acquisition | Acquisitions = acquired
        if holds is None:
            every = (acquired,) if isinstance(acquired, Acquisition) else acquired.all
            scope = NoScope()
            holds = [Hold(running, one, scope) for one in every]
        self.holds: Sequence[Hold] = holds

    def part(self, hold: Hold) -> Body:
        """Return one of several by itself: any may be released before the others."""
        return Body(self.running, hold.core, [hold])

    def remaining(self) -> float:
        """Return the seconds until the first of them is lost; 0.0 once over."""
        return min([hold.core.remaining() for hold in self.holds])

    # -- in the loop's thread ----------------------------------------------------------------------

    def wait_for_thread(self) -> None:
        """Take no body for begun before its thread calls ``begin``."""
        for hold in self.holds:
            hold.wait_for_thread()

    async def arm(self) -> None:
        """Let leaving the client wait for the body."""
        for hold in self.holds:
            hold.arm()

    async def disarm(self) -> None:
        """Let it wait no more."""
        for hold in self.holds:
            hold.disarm()

    async def leave(self) -> LockLost | BackendError | None:
        """End the body; return the loss."""
        await self.disarm()
        return await self.core.leave(wait=True)

    # -- a body ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Be inside of it, in this thread.

        :raises Elsewhere: when another one is.
        """
        for index, hold in enumerate(self.holds):
            if not hold.enter():
                for mine in self.holds[:index]:
                    mine.leave()
                raise Elsewhere(
                    f"the lease on {hold.request.name!r} is the body of another thread: enter it once"
                )

    def begin(self) -> None:
        """Let the body begin, unless the lease was lost on its way into this thread."""
        requests = [hold.request for hold in self.holds]
        before = [request.used for request in requests]
        for request in requests:  # and then look: the loop marks a loss, and then asks for this
            request.used = True
        try:
            self.core.ensure_held()
        except BaseException:
            for request, used in zip(requests, before, strict=True):
                request.used = used
            self.leave_soon()
            raise

    def exit(self, exc: BaseException | None) -> None:
        """End the block."""
        try:
            self.leave_block()
            if not self.running.is_here():
                return  # the parent's, before a fork
            loss = self._end()
        except BaseException:  # a signal handler raised
            self.leave_soon()
            raise
        if loss is not None:
            raise_loss(exc, loss, isinstance(exc, GeneratorExit))

    def leave_block(self) -> None:
        """Be inside of it no more; it is held as before."""
        for hold in self.holds:
            hold.leave()

    def leave_soon(self) -> None:
        """End the block; nobody waits for it. It may have ended already."""
        self.leave_block()
        if self.running.is_here():
            self.running.portal.start_soon(self.leave)

    def _end(self) -> LockLost | BackendError | None:
        if runs_a_loop():
            # Collected with a generator, or left in an event loop: it must not be blocked.
            self.running.portal.start_soon(self.leave)
            error = self.core.lost
            return copy(error) if error is not None else None
        return self.running.portal.call(self.leave, within=self.remaining())

    # -- without a block ---------------------------------------------------------------------------

    def keep(self, given: object) -> None:
        """Be this thread's until it is released; ``given``: the lease, or leases, that the caller gets."""
        each = given.values() if isinstance(given, Mapping) else (given,)
        for hold, lease in zip(self.holds, each, strict=True):
            hold.keep(lease)
        self.running.watch(tell_of_long_holds)

    def let_go(self) -> None:
        """Be no thread's any more."""
        for hold in self.holds:
            hold.let_go()

    def open(self) -> None:
        """Begin a block in this thread, on what was acquired without one."""
        self.enter()
        self.running.portal.call(self.arm)
        self.let_go()

    def close(self) -> None:
        """Take back what ``open`` has done, or has begun to do: it is held as before."""
        for hold in self.holds:
            hold.give_up()
        if not any([hold.inside() for hold in self.holds]):
            self.running.portal.start_soon(self.disarm)

    def release(self) -> None:
        """Release it by hand."""
        self.check_here()
        try:
            self.running.portal.call(self.core.release, within=self.remaining())
        finally:
            for hold in self.holds:
                if hold.core.is_over:
                    hold.let_go()

    def ask(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine about it in the loop's thread."""
        self.check_here()
        return self.running.portal.call(call)

    def check_here(self) -> None:
        """Raise in a process that was forked from the one that has acquired."""
        if not self.running.is_here():
            raise self.not_here()

    def not_here(self) -> NotHeld:
        """Say so."""
        names = [hold.request.name for hold in self.holds]
        return NotHeld(
            f"the lease on {', '.join(map(repr, names))} was acquired by process {self.running.pid}, "
            "before a fork: it stays with that process; acquire the lock here",
            name=names[0],
        )


def call_when_lost(hold: Hold, function: Callable[[LockLost], object]) -> None:
    """Call the function in a thread of its own once the lease is lost. In the loop's thread.

    Once for each loss: that of a re-entry is the loss of the block around it. But each is watched, because
    any of them may be the last to be released.
    """
    one = hold.core
    _look_for_loss(hold.running.portal, one.session, one.request, one.serial, function)


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
        assert request.loss is not None
        if function not in request.loss.told_to:
            request.loss.told_to.append(function)
            start_thread(portal, function, copy(lost))
    elif request.state is HELD and serial in request.handles:
        watcher: asyncio.Future[None] = session.loop.create_future()
        watcher.add_done_callback(
            partial(_look_for_loss, portal, session, request, serial, function)
        )
        request.add_watcher(watcher)


def start_thread(portal: Portal, function: Callable[[LockLost], object], lost: LockLost) -> None:
    """Call the function in a thread of its own."""

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
