"""One acquisition: what a holder has of a request, from the grant to its release or loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from . import _process
from ._backoff import pause_after
from ._body import Body
from ._clock import now
from ._errors import BackendError, LockLost, NotHeld
from ._request import HELD, Block, Request
from ._session import Session
from ._tasks import running_loop


class Acquisition(Body):
    """What a ``Lease`` shows, and what is left with it. There may be several of one request, by re-entry.

    When nobody references it any more, it is released as soon as its task has ended. So an open block does
    not know it, but its serial: a task may end without having left it.
    """

    __slots__ = ("request", "serial", "session", "tasks")

    request: Request
    serial: int
    session: Session
    tasks: tuple[asyncio.Task[Any], ...]

    def __init__(self, session: Session, request: Request) -> None:
        self.session = session
        self.tasks = ()
        self.request = request
        request.serial = self.serial = request.serial + 1
        request.handles += (self.serial,)

    def __repr__(self) -> str:
        request = self.request
        if self.held:
            state = f"held, {self.remaining():.1f} s left"
        elif (loss := request.loss) is not None and self.serial in loss.handles:
            state = f"lost: {loss.reason}"
        else:
            state = "released"
        return f"<Lease {request.name!r} {request.terms.mode} token={request.token} {state}>"

    def __del__(self) -> None:
        # On any thread, in the middle of anything.
        if self.serial in self.request.handles:
            self.session.forgotten.dropped(self.request, self.serial)

    @property
    def acquisitions(self) -> tuple[Block]:
        return ((self.request, self.serial),)

    @property
    def is_over(self) -> bool:
        """Whether it was released or lost, and left."""
        return self.serial not in self.request.handles

    @property
    def held(self) -> bool:
        """True only while the server certainly honours the lease (less ``margin``)."""
        request = self.request
        return (
            request.state is HELD
            and self.serial in request.handles
            and now() < request.ends_at
            and _process.pid == self.session.pid
        )

    @property
    def lost(self) -> LockLost | None:
        """Why it was lost; None while it is held and after a release."""
        return self.request.loss_of(self.serial)

    def remaining(self) -> float:
        """Return the seconds until it counts as lost if it is not extended; 0.0 once over."""
        return max(0.0, self.request.ends_at - now()) if self.held else 0.0

    def ensure_held(self) -> None:
        """Return if it is held, else raise why not."""
        if not self.held:
            raise self.why_not_held()

    def why_not_held(self) -> LockLost | NotHeld | BackendError:
        """Return what to raise when it is not held."""
        session, request = self.session, self.request
        session.check_process()
        if running_loop() is not session.loop:
            # In a thread of the body's: what belongs to the loop is not touched.
            if request.state is HELD and not self.is_over:
                return request.overdue_error()
        else:
            session.register.lose_if_overdue(request)
        return request.error() if request.has_lost(self.serial) else self.not_held()

    def not_held(self) -> NotHeld:
        """Return what a second release raises."""
        return NotHeld(
            f"the lease on {self.request.name!r} was released before: a lease is released once; to go on, "
            "acquire the lock again",
            name=self.request.name,
        )

    async def begin(self) -> None:
        """Tell the store that the body begins, if it has not begun with the grant.

        The caller sets ``used`` when it does begin: until then others of a multilock may still fail.
        """
        if not self.request.used:
            await self.ask(self.request.place.begin)

    async def ask(self, call: Callable[[], Awaitable[None]]) -> None:
        """Tell the store something about this lease, until the local deadline."""
        request, session = self.request, self.session
        failures = 0
        while True:
            try:
                async with asyncio.timeout(max(0.001, request.ends_at - now())):
                    await call()
                self.ensure_held()
                return
            except (TimeoutError, BackendError) as error:
                failures += 1
                session.telling.extension_failed(request, error)
                self.ensure_held()
            await asyncio.sleep(min(pause_after(failures), self.remaining()))
            self.ensure_held()

    async def leave(self, *, wait: bool) -> LockLost | BackendError | None:
        """End it as its body ends; return the loss, if it was lost."""
        request, session, serial = self.request, self.session, self.serial
        session.register.lose_if_overdue(request)
        if serial not in request.handles:  # released inside the body
            return request.error() if request.has_lost(serial) else None
        if not _end_one(session, request, serial):
            return request.error() if request.loss is not None else None
        if not request.options.confirm_release or not wait:
            session.departure.in_background(request)
            session.telling.released(request)
            return None
        left = await session.departure.awaited(request)
        if left is not None and left.what == "gone":
            return session.register.lost_on_leaving(request, left.reason, serial)
        session.telling.released(request)
        return None

    async def release(self) -> None:
        """Release, from any task; see ``Lease.release``."""
        self.session.check_here()
        if self.is_over:
            raise self.not_held()
        await release_handle(self.session, self.request, self.serial)


async def release_handle(session: Session, request: Request, serial: int) -> None:
    """End one acquisition, in the caller's task; see ``Lease.release``."""
    session.register.lose_if_overdue(request)
    if not _end_one(session, request, serial):
        if request.loss is not None:
            raise request.error()
        return
    left = await session.departure.until_deadline(request, serial)
    if left.what == "gone":
        raise session.register.lost_on_leaving(request, left.reason, serial)
    session.telling.released(request)


def _end_one(session: Session, request: Request, serial: int) -> bool:
    """End one acquisition; return whether the caller has to leave the store now: it was the last, and its
    lease is neither lost nor kept for the next body."""
    last = request.end_handle(serial)
    if request.loss is not None:
        if last:
            session.departure.in_background(request)
        return False
    if last and request.may_linger and session.lingering.keep(request):
        session.telling.released(request)
        return False
    return last
