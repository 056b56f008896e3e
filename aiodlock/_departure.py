"""How requests leave the store: one way, with three policies.

- ``awaited``: a body has ended. Returns within about a second; what is not answered then goes on in the
  background.
- ``until_deadline``: a release by hand. Repeated in the caller's task until the lease's own deadline.
- ``in_background``: nobody waits for the answer, or only for a moment (``withdraw``). Repeated until it is
  answered, or until the store has surely ended the request.

The request is told first, then the store. A cancellation ends the caller's wait, and never the leave.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING

import anyio

from . import _process
from ._backoff import pause_after
from ._clock import now
from ._errors import BackendError, BackendUnavailable, LockLost
from ._model import ENDED, LOST, UNUSED, End, Left
from ._request import LEAVING, OVER, Request

if TYPE_CHECKING:
    from ._session import Session

#: Leaving a body returns within a second, answered or not.
_WITHIN = 0.95
_A_MOMENT = 1.0
_NEVER = float("inf")


class Departure:
    """Leaves on behalf of a session.

    Mutable state: ``silent_at`` (when a wait for the answer to a leave has last run out).
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.silent_at: float = -_NEVER
        self._context = contextvars.Context()

    @property
    def was_silent(self) -> bool:
        """Whether a wait for an answer ran out a moment ago: another one would, too."""
        return now() - self.silent_at < _A_MOMENT

    async def awaited(self, request: Request) -> Left | None:
        """Leave in the caller's task; None if that stays to be done."""
        session = self._session
        if _process.pid != session.pid:
            session.check_here()  # it raises
        session.begin_leaving(request)
        end = ENDED if request.used else UNUSED
        give_up_at = now() + _WITHIN
        try:
            try:
                left = await request.place.leave(end, within=_WITHIN)
            except BackendUnavailable:
                # Its connection was cut: once more, in the time that is left.
                async with asyncio.timeout(give_up_at - now()):
                    left = await request.place.leave(end)
        except asyncio.CancelledError:
            await self._hand_over(request, end)
            raise
        except (TimeoutError, BackendError) as error:
            session.telling.leave_delayed(request, error)
            session.start_soon(self._go_on, request, end)
            return None
        except BaseException:
            session.start_soon(self._go_on, request, end)
            raise
        session.remove(request)
        return left

    async def until_deadline(self, request: Request, serial: int, end: End = ENDED) -> Left:
        """Leave in the caller's task, and repeat that until the local deadline; then raise LockLost.

        :param serial: of the acquisition that ends with it.
        """
        session = self._session
        session.begin_leaving(request)
        try:
            left = await self._repeat(request, end, request.place.deadline)
        except asyncio.CancelledError:
            await self._hand_over(request, end)
            raise
        except (TimeoutError, BackendError) as error:
            session.start_soon(self._go_on, request, LOST)
            request.lose_on_leaving("expired", serial)
            session.telling.ended(request, "expired")
            raise LockLost(
                f"releasing {request.name!r} had no answer until its lease ended "
                f"(token {request.token}): {error!r}",
                name=request.name,
                reason="expired",
            ) from error
        except BaseException:
            session.start_soon(self._go_on, request, end)  # what is being closed cannot await
            raise
        session.remove(request)
        return left

    def in_background(self, request: Request) -> None:
        """Leave without anybody who waits; without a task, unless it has to be repeated."""
        session = self._session
        if request.state in (LEAVING, OVER):
            return
        if request.serial:
            session.lose_if_overdue(request)  # only the clock may know, and a lock-delay is kept
        session.begin_leaving(request)
        end = _end_of(request)

        def done(result: Left | BackendError) -> None:
            if isinstance(result, Left):
                session.remove_unawaited(request)
            else:
                session.start_soon(self._go_on, request, end)

        if not request.place.leave_soon(end, done):
            session.start_soon(self._go_on, request, end)

    def again(self, request: Request) -> None:
        """Go on with a leave whose task was cancelled."""
        self._session.start_soon(self._go_on, request, _end_of(request))

    async def withdraw(self, request: Request) -> None:
        """Leave in the background and wait for it, a second at most. A cancellation ends the wait."""
        if request.state not in (LEAVING, OVER):
            self.in_background(request)
            await self._until_left(request)

    async def _hand_over(self, request: Request, end: End) -> None:
        self._session.start_soon(self._go_on, request, end)
        await self._until_left(request)

    async def _until_left(self, request: Request) -> None:
        if request.state is OVER or not self._session.is_running:
            return
        loop = self._session.loop
        request.left = left = loop.create_future()
        timer = loop.call_later(_A_MOMENT, self._give_up, left, context=self._context)
        try:
            if anyio.current_effective_deadline() == _NEVER:
                await left  # anyio would make notes on each task, and there may be thousands
            else:
                # The shield keeps anyio's scopes from ending the wait at once; asyncio's cancel() does.
                with anyio.CancelScope(shield=True):
                    await left
        finally:
            timer.cancel()

    async def _go_on(self, request: Request, end: End) -> None:
        """Repeat the leave until it is answered, or until the store has surely dropped the request."""
        try:
            await self._repeat(request, end, request.place.ends_by)
        except (TimeoutError, BackendError) as error:
            request.place.abandon()
            self._session.telling.release_failed(request, error)
        self._session.remove_unawaited(request)

    async def _repeat(self, request: Request, end: End, give_up_at: float) -> Left:
        """Leave until that is answered; raise what came instead when it is too late."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(max(0.001, give_up_at - now())):
                    return await request.place.leave(end)
            except (TimeoutError, BackendError):
                failures += 1
                if now() >= give_up_at:
                    raise
            await asyncio.sleep(min(pause_after(failures), max(0.0, give_up_at - now())))

    def _give_up(self, waiting: asyncio.Future[None]) -> None:
        if not waiting.done():
            self.silent_at = now()
            waiting.set_result(None)


def _end_of(request: Request) -> End:
    # What no body has used keeps no name closed, whatever the store was told of its beginning.
    kept = request.used or not request.terms.hold_at_least
    return LOST if request.ran_out and kept else ENDED if request.used else UNUSED
