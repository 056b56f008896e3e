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
from collections.abc import Callable

import anyio

from ._backoff import pause_after
from ._clock import now
from ._errors import BackendError, BackendUnavailable, LockLost
from ._model import ENDED, RAN_OUT, UNUSED, End, Left
from ._register import Register
from ._request import LEAVING, OVER, Request
from ._telling import Telling

#: Leaving a body returns within a second, answered or not.
_WITHIN = 0.95
_A_MOMENT = 1.0
_NEVER = float("inf")


class Departure:
    """Leaves on behalf of a session.

    Mutable state: ``silent_at`` (when a wait for the answer to a leave has last run out).

    :param start_soon: runs something in the session's task group.
    :param is_running: whether anything can be run there.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        register: Register,
        telling: Telling,
        start_soon: Callable[..., bool],
        is_running: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._register = register
        self._telling = telling
        self._start_soon = start_soon
        self._is_running = is_running
        self.silent_at: float = -_NEVER
        self._context = contextvars.Context()

    @property
    def was_silent(self) -> bool:
        """Whether a wait for an answer ran out a moment ago: another one would, too."""
        return now() - self.silent_at < _A_MOMENT

    async def awaited(self, request: Request) -> Left | None:
        """Leave in the caller's task; None if that stays to be done."""
        register = self._register
        register.begin_leaving(request)
        end = ENDED if request.used else UNUSED
        give_up_at = now() + _WITHIN
        try:
            try:
                left = await request.place.leave(end, within=_WITHIN)
            except BackendUnavailable:
                # Its connection was cut: once more, in the time that is left.
                if (rest := give_up_at - now()) <= 0.0:
                    raise
                async with asyncio.timeout(rest):
                    left = await request.place.leave(end)
        except asyncio.CancelledError:
            await self._hand_over(request, end)
            raise
        except (TimeoutError, BackendError) as error:
            self._telling.leave_delayed(request, error)
            self._start_soon(self._go_on, request, end)
            return None
        except BaseException:
            self._start_soon(self._go_on, request, end)
            raise
        register.remove(request)
        return left

    async def until_deadline(self, request: Request, serial: int, end: End = ENDED) -> Left:
        """Leave in the caller's task, and repeat that until the local deadline; then raise LockLost.

        :param serial: of the acquisition that ends with it.
        """
        register = self._register
        register.begin_leaving(request)
        try:
            left = await self._repeat(request, end, request.place.deadline)
        except asyncio.CancelledError:
            await self._hand_over(request, end)
            raise
        except (TimeoutError, BackendError) as error:
            self._start_soon(self._go_on, request, RAN_OUT)
            request.lose_on_leaving("expired", serial)
            self._telling.ended(request, "expired")
            raise LockLost(
                f"releasing {request.name!r} had no answer until its lease ended "
                f"(token {request.token}): {error!r}",
                name=request.name,
                reason="expired",
            ) from error
        except BaseException:
            self._start_soon(self._go_on, request, end)  # what is being closed cannot await
            raise
        register.remove(request)
        return left

    def in_background(self, request: Request) -> None:
        """Leave without anybody who waits; without a task, unless it has to be repeated."""
        register = self._register
        if request.state in (LEAVING, OVER):
            if not request.handles:
                register.drop_hold(request)  # its session had died, and its task knows by now
            return
        if request.serial:
            register.lose_if_overdue(request)  # only the clock may know, and a lock-delay is kept
        register.begin_leaving(request)
        end = _end_of(request)

        def done(result: Left | BackendError) -> None:
            if isinstance(result, Left):
                register.remove_unawaited(request)
            else:
                self._start_soon(self._go_on, request, end)

        if not request.place.leave_soon(end, done):
            self._start_soon(self._go_on, request, end)

    def again(self, request: Request) -> None:
        """Go on with a leave whose task was cancelled. Its caller may be at it still: both are answered."""
        self._start_soon(self._go_on, request, _end_of(request))

    async def withdraw(self, request: Request) -> None:
        """Leave in the background and wait for it, a second at most. A cancellation ends the wait."""
        if request.state not in (LEAVING, OVER):
            self.in_background(request)
            await self._until_left(request)

    def report(self, lost: list[Request]) -> None:
        """A task is told that it has lost these, and releases them thereby."""
        for request in lost:
            if request.loss is not None:
                request.loss.reported = True
            for serial in {*request.dropped, *request.handles[-1:]}:
                request.end_handle(serial)
            if not request.handles:
                self.in_background(request)

    def give_up(self, request: Request, serial: int) -> None:
        """Release an acquisition that its caller will not get."""
        if serial in request.handles and request.end_handle(serial):
            self.in_background(request)

    async def _hand_over(self, request: Request, end: End) -> None:
        self._start_soon(self._go_on, request, end)
        await self._until_left(request)

    async def _until_left(self, request: Request) -> None:
        if request.state is OVER or not self._is_running():
            return
        loop = self._loop
        request.left = left = loop.create_future()
        timer = loop.call_later(_A_MOMENT, self._end_wait, left, context=self._context)
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
            await self._repeat(request, end, request.place.surely_over_at)
        except (TimeoutError, BackendError) as error:
            if request.state is OVER:
                return  # its caller has heard the answer, see ``again``
            request.place.abandon()
            self._telling.release_failed(request, error)
        self._register.remove_unawaited(request)

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

    def _end_wait(self, waiting: asyncio.Future[None]) -> None:
        if not waiting.done():
            self.silent_at = now()
            waiting.set_result(None)


def _end_of(request: Request) -> End:
    # If no body has begun, ``hold_at_least`` does not apply, whatever the store was told of its beginning.
    kept = request.used or not request.terms.hold_at_least
    return RAN_OUT if request.ran_out and kept else ENDED if request.used else UNUSED
