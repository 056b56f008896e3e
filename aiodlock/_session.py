"""What runs while a client is entered: the backend, the deadlines, every request, the only task group.

A session that dies is replaced by another one (``_renewal``).

What must still be said to the server when its caller is gone is handed over to here (``Departure``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

import anyio

from . import _patience, _process
from ._bodies import Bodies
from ._clock import now
from ._deadlines import Deadlines
from ._deadlocks import Deadlocks
from ._departure import Departure
from ._errors import BackendError, BackendUnavailable, ClientClosed
from ._forgotten import Forgotten
from ._home import Home
from ._hooks import Hooks
from ._linger import Lingering
from ._patience import soon
from ._register import Register
from ._request import HELD, KEPT, LEAVING, LOST, WAITING, Events, Request
from ._slices import Slices
from ._tasks import running_loop, start_soon
from ._telling import Telling
from .backends.base import Backend

_logger = logging.getLogger("aiodlock")

#: How long bodies are given to end when closing was cancelled (seconds).
_A_MOMENT = 0.95


class Session(Home):
    """The running half of a client; gone when the client is left, or when it has died.

    Mutable state: ``_tasks``, ``closing``, ``death``, ``_was_cancelled`` (the background was, from outside)
    and ``_came_back`` (to leave), ``_stopping``. What is known of requests is the state of what ``_wire``
    makes; ``requests`` is the register's.

    :param predecessor: the session that died before this one. Its open blocks and what it has lost are
        known here, too: a task is told of them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        unavailable_after: float,
        hooks: list[Hooks],
        deadlock_after: float | None = None,
        predecessor: Session | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.unavailable_after = unavailable_after
        self.slices: Slices = Slices(self.loop)
        self.closing: bool = False
        self.death: BaseException | None = None
        self._numbers = count(1)
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._tasks: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = self._was_cancelled = self._came_back = False
        self._wire(hooks, deadlock_after, predecessor)

    def _wire(
        self, hooks: list[Hooks], deadlock_after: float | None, predecessor: Session | None
    ) -> None:
        """Make what knows of requests, the lower first: who is told of what is written down here alone."""
        known = predecessor
        self.bodies: Bodies = Bodies() if known is None else known.bodies
        self.telling: Telling = Telling(hooks, self.loop, self.new_id)
        #: None: nobody looks for deadlocks.
        self.deadlocks: Deadlocks | None = None
        if deadlock_after is not None:
            self.deadlocks = Deadlocks(
                deadlock_after, self.backend, self.bodies, self.telling, self.start_soon
            )
        looks = self.deadlocks
        ended = _nobody if looks is None else looks.released
        self.deadlines: Deadlines = Deadlines(self.loop, self._on_due, self.telling.blocked)
        self.register: Register = Register(
            self.telling, self.deadlines, ended, None if known is None else known.register.holds_of
        )
        self.departure: Departure = Departure(
            self.loop, self.register, self.telling, self.start_soon, lambda: self.is_running
        )
        self.lingering: Lingering = Lingering(
            self.loop,
            self.register,
            self.departure,
            self.deadlines,
            _no if looks is None else looks.tells_of,
        )
        self.forgotten: Forgotten = Forgotten(self, self.departure, self.telling)
        self.requests: dict[str, Request] = self.register.requests
        self.events: Events = Events(
            holds=self.deadlines.add,
            acquisition_ended=ended,
            gone=self.register.end_of_hold,
            idle_over=self.lingering.leave,
            extension_failed=self.telling.extension_failed,
        )

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, or raise BackendUnavailable (or the BackendError that stands in the way)."""
        self._main = asyncio.create_task(self._run(), name="aiodlock")
        began = now()
        try:
            while not self._ready.done():
                further = max(began, self.backend.further_at) + _patience.ENTERS_WITHIN
                left = min(further, began + _patience.ENTERS_IN_ALL) - now()
                if left <= 0.0:
                    raise self._not_entered(now() - began)
                await asyncio.wait({self._ready}, timeout=left)
            self._ready.result()
        except BaseException:
            await self.stop()
            raise

    def _not_entered(self, seconds: float) -> BackendUnavailable:
        cause = self.backend.failure
        error = BackendUnavailable(
            f"cannot reach the store within {seconds:.0f} s: "
            f"{cause or f'no answer from {self.backend!r}'} (is the server running, and the URL right?)"
        )
        error.__cause__ = cause
        return error

    async def _run(self) -> None:
        # In a task of its own: entering and leaving a client may happen in different tasks, which a
        # task group may not.
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._serve_backend())
        except Exception as error:
            self._die(error)
        finally:
            self.register.end_wait()  # who waits for leaves sees that nothing is sent any more
            if self.death is None and not self._stopping:
                # Cancelled by somebody who cancels every task of the loop: it is as dead.
                self._was_cancelled = True
                if not self.closing:
                    self._die(BackendError("a background task of the client was cancelled"))
            if not self._ready.done():
                self._ready.set_exception(
                    self._death_error() if self.death else ClientClosed("the client was left")
                )
                self._ready.exception()

    async def _serve_backend(self) -> None:
        await self.backend.run(self._on_ready)
        await asyncio.Event().wait()

    def _on_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _die(self, error: Exception) -> None:
        """A background task died: nothing is extended any more, so nobody may go on believing."""
        self.death = cause = _root_cause(error)
        self.register.is_dead = True
        # A store that refuses whoever enters is no bug: the error is raised there.
        if self._ready.done() or not isinstance(cause, BackendError):
            _logger.error(
                "a background task died: what this client holds and waits for ends",
                exc_info=cause,
                extra={"event": "client_died"},
            )
        for request in list(self.requests.values()):
            request.wake(self._death_error())
            if request.state is HELD:
                self.register.lose(request, "closed", failure=self._death_error())

    def _death_error(self) -> BackendError:
        assert self.death is not None
        if isinstance(self.death, BackendError):
            error: BackendError = type(self.death)(str(self.death))
            error.__cause__ = self.death.__cause__ or self.death
        else:
            error = BackendError(f"a background task of the client died: {self.death!r}")
            error.__cause__ = self.death
        return error

    async def close(self, within: float) -> None:
        """End waits and bodies, release everything, stop."""
        self.check_here()  # the connections are the parent's: a child must not release its locks
        self.closing = True
        give_up_at = now() + within
        current = asyncio.current_task()  # perhaps in a body itself
        self.lingering.release_all()
        cancelled: asyncio.CancelledError | None = None
        try:
            try:
                await self._end_all(current, give_up_at)
                await self._until_all_left(give_up_at)
            except asyncio.CancelledError as outer:
                # Perhaps by the loss just told: the body may await the task that closes. Bodies are given a
                # moment to end, so that their locks are released; another cancellation ends the wait.
                cancelled = outer
                self._end_rest(current)
                with anyio.CancelScope(shield=True):
                    await self._until_all_left(min(give_up_at, now() + _A_MOMENT))
            self._end_rest(current)
            overdue = [request for request in self.requests.values() if request.state is LOST]
            for request in overdue:
                self.telling.goes_on(request)
                self.departure.in_background(request)
            if self.is_running:
                # Of bare leases too, which close_timeout may have left no time for: their leaves are sent.
                with anyio.move_on_after(1.0):
                    while any(request.state is LEAVING for request in self.requests.values()):
                        await self.register.removal()
            if self.is_running:
                await self.backend.settle()
        finally:
            await self.stop()
        if cancelled is not None:
            raise cancelled

    async def _end_all(self, current: asyncio.Task[Any] | None, give_up_at: float) -> None:
        """End all waits and leases, a slice in each turn of the loop; bodies first, which need time."""
        requests = list(self.requests.values())
        bodies = [request for request in requests if request.state is HELD]
        for request in (*bodies, *requests):
            if not self.slices.take():
                await self.slices.turn()
                if now() >= give_up_at:
                    return
            self._end(request, current)

    def _end_rest(self, current: asyncio.Task[Any] | None) -> None:
        for request in list(self.requests.values()):
            self._end(request, current)

    def _end(self, request: Request, current: asyncio.Task[Any] | None) -> None:
        """The client is being left: end a wait or a lease. Repeated, it does nothing."""
        if request.state is HELD:
            self.register.lose_if_overdue(request, spare=current)
            self.register.lose(request, "closed", spare=current)
        elif request.state is WAITING:
            request.wake(self.closed_error(request.name))
        # A bare lease has no body to wait for; our own does not end before we do.
        if request.state is LOST and not set(request.armed or ()) - {current}:
            self.departure.in_background(request)

    async def _until_all_left(self, give_up_at: float) -> None:
        """Wait until the store knows of no request any more, and no body goes on."""
        while self.requests and now() < give_up_at:
            if not self.is_running:
                if self._came_back:
                    return
                give_up_at = min(give_up_at, now() + soon(self.backend.answers_within))
                self._come_back()
            try:
                async with asyncio.timeout(give_up_at - now()):
                    await self.register.removal()
            except TimeoutError:
                return

    def when_dead(self, replace: Callable[[], object]) -> None:
        """Have ``replace`` called when this session has died; not if somebody has cancelled every task."""
        assert self._main is not None

        def ended(_: asyncio.Task[None]) -> None:
            if self.death is not None and not self._was_cancelled:
                replace()

        self._main.add_done_callback(ended)

    def _come_back(self) -> None:
        """Run the background once more, so that what is held is released: it has died, or somebody has
        cancelled every task of the loop, as ``asyncio.run`` does at its end."""
        self._came_back = True
        self._main = self.loop.create_task(self._run_to_leave(), name="aiodlock")

    async def _run_to_leave(self) -> None:
        with suppress(Exception):  # what is not left ends with its lease
            async with asyncio.TaskGroup() as self._tasks:
                await self.backend.run(self._leave_again)

    def _leave_again(self) -> None:
        for request in list(self.requests.values()):
            if request.state is LEAVING:
                self.departure.again(request)

    async def stop(self) -> None:
        """Cancel the background and wait for it; a cancellation meanwhile does not leave it behind."""
        self.closing = self._stopping = True
        self.deadlines.stop()
        self.lingering.stop()
        main = self._main
        if main is None:
            return
        main.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not main.done():
            try:
                await asyncio.wait({main})
            except asyncio.CancelledError as outer:
                cancelled = outer
        for request in self.requests.values():
            self.telling.released(request)  # as far as this side will ever know
        self.telling.log.end()
        if cancelled is not None:
            raise cancelled

    def check_usable(self) -> None:
        """Raise unless calls can be made here and now."""
        if _process.pid != self.pid or running_loop() is not self.loop:
            self.check_here()  # each call of a lock comes by: it raises
        if self.death is not None:
            raise self._death_error()
        if self.closing:
            raise self.closed_error()

    @staticmethod
    def closed_error(name: str | None = None) -> ClientClosed:
        about = "" if name is None else f" for {name!r}"
        message = f"the client was left: it does nothing more{about}; use one that is open"
        return ClientClosed(message, name=name)

    @property
    def is_running(self) -> bool:
        """Whether its tasks have not ended yet."""
        return self._main is not None and not self._main.done()

    def start_soon(self, call: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> bool:
        """Run something in the client's task group; False when that is over. From any callback, too."""
        return start_soon(self._tasks, call(*args))

    # -- requests ----------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return a request id that is unique in time and space."""
        return f"{self.backend.label}-{next(self._numbers)}"

    def _on_due(self, request: Request) -> None:
        if request.state is HELD:
            self.register.lose_if_overdue(request)
        elif request.state is KEPT:
            self.lingering.leave(request)  # no body has lost it
        elif request.state is WAITING:
            self._waits_long(request)

    def _waits_long(self, request: Request) -> None:
        """Warn that the task of a long wait is in other blocks: they may wait for each other."""
        task = request.task() if request.task is not None else None
        names = sorted({held.name for held in self.bodies.held(task)} - {request.name})
        if names:
            self.telling.waits_inside(request, names)


def _root_cause(error: BaseException) -> BaseException:
    """Return what stands in a group for the rest: a refusal of the server before a mere absence."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if not isinstance(cause, BackendUnavailable)), causes[0])


def _nobody(request: Request) -> None:
    """There is nobody to tell."""


def _no(request: Request) -> bool:
    return False
