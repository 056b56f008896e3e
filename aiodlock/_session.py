"""One entering of a client: the backend, the extender, every place, and the only task group.

What must still be said to the server when its caller is gone is handed over to here (``leave_soon``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

import anyio

from ._bodies import Bodies
from ._clock import now
from ._errors import BackendError, BackendUnavailable, ClientClosed, LockLost, LossReason
from ._extender import Extender
from ._hooks import Hooks
from ._model import Kind, Left
from ._place import Place, State
from ._slices import Slices
from ._tasks import start_soon
from ._telling import Telling
from .backends.base import Backend

_logger = logging.getLogger("aiodlock")

_OTHER_LOOP = "this Client belongs to another event loop: make one per loop"
_OTHER_PROCESS = "this Client was entered before a fork: make a new one in the child"

CONNECT_WITHIN = 4.8
#: Leaving a body returns within a second, answered or not.
_LEAVE_WITHIN = 0.95
_FIRST_RETRY = 0.02
_LONGEST_RETRY = 1.0


class Session:
    """The running half of a client; gone when the client is left.

    Mutable state: ``places`` (by request id, from before the first message until the leave is
    confirmed), ``bodies`` (the open blocks), ``_holds`` (what each task holds), ``_tasks``, ``closing``,
    ``_death``.
    """

    def __init__(self, backend: Backend, *, unavailable_after: float, hooks: list[Hooks]) -> None:
        self.backend = backend
        self.unavailable_after = unavailable_after
        self.telling: Telling = Telling(hooks)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.pid: int = os.getpid()
        self.places: dict[str, Place] = {}
        self.bodies: Bodies = Bodies()
        self.slices: Slices = Slices(self.loop)
        self.closing: bool = False
        self.extender: Extender = Extender(self)
        self._numbers = count(1)
        self._holds: dict[tuple[Kind, str, int], list[Place]] = {}
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._left = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None
        self._death: BaseException | None = None

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, or raise BackendUnavailable (or the BackendError that stands in the way)."""
        self._main = asyncio.create_task(self._run(), name="aiodlock")
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                await asyncio.shield(self._ready)
        except TimeoutError:
            cause = self.backend.failure
            await self.stop()
            raise BackendUnavailable(
                f"cannot reach the store within 5 s: {cause or f'no answer from {self.backend!r}'} "
                "(is the server running, and the URL right?)"
            ) from cause
        except BaseException:
            await self.stop()
            raise

    async def _run(self) -> None:
        # In a task of its own: entering and leaving a client may happen in different tasks, which a
        # task group may not.
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self.extender.run())
                self._tasks.create_task(self._serve_backend())
        except Exception as error:
            self._die(error)
        finally:
            if self._death is None and not self.closing:
                # Cancelled by somebody who cancels every task of the loop: it is as dead.
                self._die(BackendError("a background task of the client was cancelled"))
            if not self._ready.done():
                self._ready.set_exception(
                    self._death_error() if self._death else ClientClosed("the client was left")
                )
                self._ready.exception()

    async def _serve_backend(self) -> None:
        await self.backend.run(self, self._on_ready)
        await asyncio.Event().wait()

    def _on_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _die(self, error: Exception) -> None:
        """A background task died: nothing is extended any more, so nobody may go on believing."""
        self._death = cause = _root_cause(error)
        _logger.error("a background task died", exc_info=cause, extra={"event": "client_died"})
        for place in list(self.places.values()):
            place.wake(self._death_error())
            if place.state is State.HELD:
                self.lose(place, "closed", failure=self._death_error())

    def _death_error(self) -> BackendError:
        assert self._death is not None
        if isinstance(self._death, BackendError):
            error: BackendError = type(self._death)(str(self._death))
        else:
            error = BackendError(f"a background task of the client died: {self._death!r}")
        error.__cause__ = self._death
        return error

    async def close(self, within: float) -> None:
        """End waits and bodies, release everything, stop."""
        self.check_here()  # the connections are the parent's: a child must not release its locks
        self.closing = True
        give_up_at = now() + within
        current = asyncio.current_task()  # perhaps in a body itself
        for place in list(self.places.values()):
            if place.state is State.HELD:
                self.lose_if_overdue(place, spare=current)
                self.lose(place, "closed", spare=current)
            elif place.state in (State.ASKING, State.WAITING):
                place.wake(self.closed_error(place.request.name))
        for place in list(self.places.values()):
            # A bare lease has no body to wait for; our own does not end before we do.
            if place.state is State.LOST and not set(place.armed or ()) - {current}:
                self.leave_soon(place)
        cancelled: asyncio.CancelledError | None = None
        try:
            try:
                await self._until_all_left(give_up_at)
            except asyncio.CancelledError as outer:
                # Perhaps by the loss just told: the body may await the task that closes. Bodies are given a
                # moment to end, so that their locks are released; another cancellation ends the wait.
                cancelled = outer
                with anyio.CancelScope(shield=True):
                    await self._until_all_left(min(give_up_at, now() + _LEAVE_WITHIN))
            overdue = [place for place in self.places.values() if place.state is State.LOST]
            for place in overdue:
                _logger.warning(
                    "%r: its body goes on after close_timeout",
                    place,
                    extra={"event": "body_goes_on", "lock": place.request.name},
                )
                self.leave_soon(place)
            if overdue and self._death is None:
                with anyio.move_on_after(1.0):
                    while any(place.state is State.LEAVING for place in overdue):
                        self._left.clear()
                        await self._left.wait()
            if self._death is None:
                await self.backend.settle()
        finally:
            await self.stop()
        if cancelled is not None:
            raise cancelled

    async def _until_all_left(self, give_up_at: float) -> None:
        """Wait until the store knows of no place any more, and no body goes on."""
        while self.places and now() < give_up_at and self._death is None:
            self._left.clear()
            try:
                async with asyncio.timeout(give_up_at - now()):
                    await self._left.wait()
            except TimeoutError:
                return

    async def stop(self) -> None:
        """Cancel the background and wait for it; a cancellation meanwhile does not leave it behind."""
        self.closing = True
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
        for place in self.places.values():
            self.telling.released(place, place.granted_at)  # as far as this side will ever know
        if cancelled is not None:
            raise cancelled

    def check_usable(self) -> None:
        """Raise unless calls can be made here and now."""
        if os.getpid() != self.pid or asyncio.get_running_loop() is not self.loop:
            self.check_here()  # each call of a lock comes by: it raises
        if self._death is not None:
            raise self._death_error()
        if self.closing:
            raise self.closed_error()

    def check_here(self) -> None:
        """Raise in another loop or process than the client was entered in."""
        self._check_process()
        self.check_loop()

    def check_loop(self) -> None:
        """Raise in another loop than the client was entered in."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(_OTHER_LOOP)

    def foreign(self) -> RuntimeError | None:
        """Return why nothing of this client can be left here: for what may run without any loop, too."""
        if os.getpid() != self.pid:
            return RuntimeError(_OTHER_PROCESS)
        running = asyncio._get_running_loop()
        return RuntimeError(_OTHER_LOOP) if running not in (None, self.loop) else None

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise RuntimeError(_OTHER_PROCESS)

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

    # -- places ----------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return a request id that is unique in time and space."""
        return f"{self.backend.label}-{next(self._numbers)}"

    def holds(self, kind: Kind, name: str, task: asyncio.Task[Any] | None) -> list[Place]:
        """Return what a task holds of a name, in order of acquisition."""
        found = self._holds.get((kind, name, id(task)))
        if not found:
            return []
        # A task of the same id that is gone is somebody else.
        return [place for place in found if place.task is not None and place.task() is task]

    def add_hold(self, place: Place) -> None:
        request = place.request
        self._holds.setdefault((request.kind, request.name, place.task_id), []).append(place)

    def _drop_hold(self, place: Place) -> None:
        key = (place.request.kind, place.request.name, place.task_id)
        found = self._holds.get(key)
        if found is not None and place in found:
            found.remove(place)
            if not found:
                del self._holds[key]

    def _remove(self, place: Place) -> None:
        place.end()
        if place.left is not None:
            _resolve(place.left)
        self.places.pop(place.request.id, None)
        self._left.set()

    # -- leaving ---------------------------------------------------------------------------------

    async def leave(self, place: Place) -> Left | None:
        """Tell the server, in the caller's task; None if that stays to be done.

        Returns within about a second. Cancelled or unanswered, the client's own task goes on with it.
        """
        if os.getpid() != self.pid:
            raise RuntimeError(_OTHER_PROCESS)
        self._end(place)
        give_up_at = now() + _LEAVE_WITHIN
        try:
            try:
                left = await self.backend.leave(place.request, within=_LEAVE_WITHIN)
            except BackendUnavailable:
                # Its connection was cut: once more, in the time that is left.
                async with asyncio.timeout(give_up_at - now()):
                    left = await self.backend.leave(place.request)
                left = _of_the_first(left)
        except asyncio.CancelledError:
            await self._leave_and_wait(place)
            raise
        except (TimeoutError, BackendError) as error:
            _logger.info(
                "leaving %r goes on in the background: %r",
                place.request.name,
                error,
                extra={"event": "leave_delayed", "lock": place.request.name},
            )
            self.start_soon(self._leave_until_done, place)
            return None
        except BaseException:
            self.start_soon(self._leave_until_done, place)
            raise
        self._remove(place)
        return left

    def leave_soon(self, place: Place) -> None:
        """Leave in the background; without a task, unless it has to be repeated."""
        if place.state in (State.LEAVING, State.OVER):
            return
        if place.serial:
            self.lose_if_overdue(place)  # only the clock may know, and a lock-delay is kept
        self._end(place)
        lost = place.ran_out

        def done(result: Left | BackendError) -> None:
            if isinstance(result, Left):
                self._remove_unawaited(place)
            else:
                self.start_soon(self._leave_until_done, place, lost)

        if not self.backend.leave_later(place.request, done, lost=lost):
            self.start_soon(self._leave_until_done, place, lost)

    async def withdraw(self, place: Place) -> None:
        """Leave in the background and wait for it, a second at most. A cancellation ends the wait."""
        if place.state in (State.LEAVING, State.OVER):
            return
        self.leave_soon(place)
        await self._until_left(place)

    async def _leave_and_wait(self, place: Place) -> None:
        self.start_soon(self._leave_until_done, place)
        await self._until_left(place)

    async def _until_left(self, place: Place) -> None:
        if place.state is State.OVER or self._main is None or self._main.done():
            return
        place.left = left = self.loop.create_future()
        timer = self.loop.call_later(1.0, _resolve, left)
        try:
            # The shield keeps anyio's scopes from ending the wait at once; asyncio's cancel() does.
            with anyio.CancelScope(shield=True):
                await left
        finally:
            timer.cancel()

    async def _leave_until_done(self, place: Place, lost: bool = False) -> None:
        """Repeat the leave until it is answered, or until the server has surely dropped the request."""
        request = place.request
        longest = max(request.waiter_ttl, request.ttl, place.ttl)
        give_up_at = max(place.deadline, now() + longest)
        pause = _FIRST_RETRY
        while True:
            try:
                await self.backend.leave(request, lost=lost)
                break
            except BackendError as error:
                if now() >= give_up_at or self._death is not None:
                    self.telling.release_failed(place, error)
                    break
            await asyncio.sleep(min(pause, max(0.0, give_up_at - now())))
            pause = min(2 * pause, _LONGEST_RETRY)
        self._remove_unawaited(place)

    def _remove_unawaited(self, place: Place) -> None:
        self._remove(place)
        self.telling.released(place, place.granted_at)

    async def release(self, place: Place) -> Left:
        """Repeat the leave in the caller's task until the local deadline; then raise LockLost."""
        self._end(place)
        request, pause, repeated = place.request, _FIRST_RETRY, False
        try:
            while True:
                try:
                    async with asyncio.timeout(max(0.001, place.deadline - now())):
                        left = await self.backend.leave(request)
                    break
                except (TimeoutError, BackendError) as error:
                    repeated = True
                    if now() >= place.deadline:
                        self.start_soon(self._leave_until_done, place, True)
                        place.lose_on_leaving("expired")
                        raise LockLost(
                            f"releasing {request.name!r} had no answer until its lease ended "
                            f"(token {place.token}): {error!r}",
                            name=request.name,
                            reason="expired",
                        ) from error
                await asyncio.sleep(min(pause, max(0.0, place.deadline - now())))
                pause = min(2 * pause, _LONGEST_RETRY)
        except LockLost as lost:
            self.telling.ended(place, lost.reason)
            raise
        except asyncio.CancelledError:
            await self._leave_and_wait(place)
            raise
        self._remove(place)
        return _of_the_first(left) if repeated else left

    def _end(self, place: Place) -> None:
        self.extender.forget(place)
        self._drop_hold(place)
        if place.on_task_end is not None and place.task is not None:
            task = place.task()
            if task is not None:
                task.remove_done_callback(place.on_task_end)
            place.on_task_end = None
        place.leave()

    # -- what the backend hears --------------------------------------------------------------------

    def on_granted(self, request_id: str, token: int, where: str) -> None:
        place = self.places.get(request_id)
        if place is None:
            self.start_soon(self._leave_unknown, request_id, where)
        elif place.state is State.ASKING:
            place.noticed = token
        elif place.state is State.WAITING:
            # A notice starts a body, so it counts only while the last answer's deadline lasts.
            # And only if it is news: an id whose reply was lost for long may have been queued, granted,
            # dropped and queued again, and the notice may be of the first time.
            if (
                token > max(place.floor, place.broken)
                and self.backend.capabilities.notices == "grants"
            ):
                self.extender.granted(place, token, place.deadline)
            else:
                self.extender.extend_now(place)

    def on_held(self, request_id: str, token: int, deadline: float) -> None:
        place = self.places.get(request_id)
        if place is not None and place.state is State.WAITING:
            place.deadline = deadline
            self.extender.granted(place, token, deadline)

    def on_look(self, request_id: str | None) -> None:
        if request_id is not None:
            place = self.places.get(request_id)
            if place is not None:
                self._look(place)
            return
        self.extender.look_through(self._look)

    def on_other_server(self) -> None:
        self._ask_about_all(0.0)

    def on_back(self) -> None:
        self._ask_about_all(self.extender.spread_of(len(self.places)))

    def _ask_about_all(self, spread: float) -> None:
        def look(place: Place) -> None:
            if place.state is State.HELD and not place.failures:
                self.extender.ask_about_held(place, spread)
            else:
                self._look(place)

        self.extender.look_through(look)

    def _look(self, place: Place) -> None:
        if place.state is State.ASKING and place.noticed is None:
            # No grant, but the answer on its way may be older than what there is to see.
            place.noticed = 0
        elif place.state is State.WAITING or place.failures:
            self.extender.extend_now(place)

    def on_broken(self, request_id: str, token: int) -> None:
        place = self.places.get(request_id)
        if place is None:
            return
        if place.state is State.HELD:
            self.lose(place, "broken")
        elif self.backend.capabilities.notices == "grants":
            # The break has overtaken the grant, which must not start a body any more.
            place.broken = max(place.broken, token)
            if place.state is State.ASKING:
                place.noticed = 0
            else:
                self.extender.extend_now(place)

    async def _leave_unknown(self, request_id: str, where: str) -> None:
        try:
            await self.backend.leave_unknown(request_id, where)
        except BackendError as error:
            _logger.warning(
                "giving back an unknown grant failed, it ends by itself: %r",
                error,
                extra={"event": "unknown_grant"},
            )

    def waits_long(self, place: Place) -> None:
        """Warn, once, when the task of a long wait is in other blocks: they may wait for each other."""
        place.queued_at = float("inf")
        task = place.task() if place.task is not None else None
        mine = (other.request for other in self.bodies.of(task) if other.state is State.HELD)
        names = sorted({request.name for request in mine} - {place.request.name})
        if names:
            self.telling.waits_inside(place, names)

    # -- losses, and leases that nobody has left ---------------------------------------------------

    def lose(
        self,
        place: Place,
        reason: LossReason,
        *,
        failure: BackendError | None = None,
        spare: asyncio.Task[Any] | None = None,
    ) -> None:
        """A lease is lost: cancel its bodies, stop extending, tell."""
        if place.state is State.HELD:
            place.lose(reason, failure, spare=spare)
            self._on_lost(place)

    def lose_if_overdue(self, place: Place, *, spare: asyncio.Task[Any] | None = None) -> None:
        """The clock decides when no message came."""
        if place.state is State.HELD and now() >= place.ends_at:
            place.lose_if_overdue(spare=spare)
            self._on_lost(place)

    def is_live(self, place: Place) -> bool:
        """Whether the place holds at this moment. What is overdue is marked as lost."""
        self.lose_if_overdue(place)
        return place.state is State.HELD

    def _on_lost(self, place: Place) -> None:
        self.extender.forget(place)
        self.telling.lost(place)

    def lost_on_leaving(self, place: Place, reason: LossReason) -> LockLost:
        """The store's answer to a leave was that the lease had ended."""
        place.lose_on_leaving(reason)
        self.telling.lost(place)
        lost = place.lost
        assert lost is not None
        return lost

    def report(self, lost: list[Place]) -> None:
        """A task is told that it has lost these, and releases them thereby."""
        for place in lost:
            place.reported = True
            for serial in {*place.dropped, *place.handles[-1:]}:
                place.end_handle(serial)
            if not place.handles:
                self.leave_soon(place)

    def dropped(self, place: Place, serial: int) -> None:
        """Nobody references a lease any more that was not left. Called by the collector, on any thread."""
        if os.getpid() != self.pid or self.loop.is_closed():
            return  # after a fork the lease is the parent's
        if place.task is None or asyncio._get_running_loop() is self.loop:
            self._on_dropped(place, serial)
        else:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(self._on_dropped, place, serial)

    def _on_dropped(self, place: Place, serial: int) -> None:
        """The hold lives on as long as its task, which can still release it."""
        if serial not in place.handles:
            return
        task = place.task() if place.task is not None else None
        if task is None or task.done() or place.reported:
            self._forget(place, serial)
            return
        place.dropped += (serial,)
        if place.on_task_end is None:

            def forget(_: asyncio.Task[Any]) -> None:
                # Each by itself: where warnings are errors, one raises.
                for left in place.dropped:
                    self.loop.call_soon(self._forget, place, left)

            place.on_task_end = forget
            task.add_done_callback(forget)

    def _forget(self, place: Place, serial: int) -> None:
        """The task of a hold has ended, and nobody can release it any more. Called on any thread."""
        held = place.state is State.HELD and serial in place.handles
        # Later: this may be in the middle of anything. The warning may be turned into an error.
        self.loop.call_soon_threadsafe(self._leave_forgotten, place, serial, held)
        if held:  # else there is nothing that the holder should have released
            warnings.warn(_forgotten(place), ResourceWarning, stacklevel=2)

    def _leave_forgotten(self, place: Place, serial: int, held: bool) -> None:
        if held:
            about = {"event": "forgotten", "lock": place.request.name}
            _logger.warning("%s", _forgotten(place), extra=about)
        if serial in place.handles and place.end_handle(serial):
            self.leave_soon(place)


def _forgotten(place: Place) -> str:
    block = "an async with" if place.task is not None else "a with block"
    return (
        f"lease on {place.request.name!r} (token {place.token}) was forgotten while held, and nobody "
        f"references it any more: release it, or use it in {block}"
    )


def _resolve(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _of_the_first(left: Left) -> Left:
    """What the answer to a repeated leave says of the first, whose answer was lost.

    The store keeps the record of an expired lease for its lock-delay, and says so: nothing was released.
    """
    return Left("released") if left == Left("gone", "gone") else left


def _root_cause(error: BaseException) -> BaseException:
    """Return what stands in a group for the rest: a refusal of the server before a mere absence."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_root_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if not isinstance(cause, BackendUnavailable)), causes[0])
