"""Lease: a granted request as its holder sees it, and what happens when a body is left."""

from __future__ import annotations

import asyncio
import dis
import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from ._clock import now
from ._errors import BackendError, LockLost, NotHeld
from ._model import Mode
from ._options import LARGEST_MARGIN, SHORTEST_TTL, check_seconds
from ._place import Place, State
from ._scope import BodyScope

if TYPE_CHECKING:
    from ._session import Session

_EXTEND_RETRY = 0.05
#: Instructions that drop a result which nobody keeps (from Python 3.13 on a condition is TO_BOOL).
_DISCARDING = ("POP_TOP", "POP_JUMP", "TO_BOOL", "UNARY_NOT")


class Lease:
    """One acquisition of a lock, from the grant to its release or loss.

    As an async context manager it arms ``on_lost`` in the entering task and releases on the way out.
    Without, it is a bare lease: nobody is cancelled when it is lost, ``held``, ``ensure_held`` and
    ``wait_lost`` tell. A bare lease that is garbage-collected while held is released, with a
    ResourceWarning. (Discarding the result of ``await lock.acquire()`` is not forgetting it:
    ``await lock.release()`` in the same task still ends that hold, and so does the task's end.)

    ```python
    lease = await client.lock("report").acquire()
    async with lease:
        print(lease.token, lease.held, lease.remaining())
    ```
    """

    __slots__ = ("__weakref__", "_place", "_scope", "_scope_task", "_serial", "_session")

    def __init__(self, session: Session, place: Place) -> None:
        self._session = session
        self._place = place
        self._serial = place.new_handle()
        self._scope: BodyScope | None = None
        self._scope_task: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        place = self._place
        if self.held:
            state = f"held, {self.remaining():.1f} s left"
        elif place.lost is not None:
            state = f"lost: {place.lost.reason}"
        else:
            state = "released"
        return f"<Lease {self.name!r} {self.mode} token={self.token} {state}>"

    # -- what it is --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._place.request.name

    @property
    def mode(self) -> Mode:
        """``"exclusive"`` or ``"shared"``."""
        return self._place.request.mode

    @property
    def token(self) -> int:
        """The fencing token: larger than that of every grant of this name before. Below 2**53."""
        return self._place.token

    @property
    def owner(self) -> str:
        """Who reentrancy is judged by: the ``owner`` option, or a string made for this task."""
        return self._place.options.owner or self._place.request.owner[1:]

    @property
    def ttl(self) -> float:
        """How long the lease lives without being extended, in seconds."""
        return self._place.ttl

    @property
    def sequencer(self) -> str:
        """Name, mode and token in one printable string, for ``Client.check_sequencer`` elsewhere."""
        request = self._place.request
        kind = "semaphore" if request.kind == "semaphore" else request.mode
        return f"{quote(request.name, safe='')}:{kind}:{self.token}"

    @property
    def held(self) -> bool:
        """True only while the server certainly honours the lease (less ``margin``)."""
        place = self._place
        return place.state is State.HELD and self._serial in place.handles and now() < place.ends_at

    @property
    def lost(self) -> LockLost | None:
        """Why the lease was lost; None while it is held and after a release."""
        place = self._place
        if place.state is State.HELD and now() >= place.ends_at:
            # Only told: it is the extender that marks the loss and cancels the bodies.
            return place.overdue_error()
        return place.lost

    def remaining(self) -> float:
        """Return the seconds until the lease counts as lost if it is not extended; 0.0 once over.

        ```python
        async with client.lock("report", ttl=10) as lease:
            print(lease.remaining(), "s, unless it is extended")
        ```
        """
        return max(0.0, self._place.ends_at - now()) if self.held else 0.0

    def ensure_held(self) -> None:
        """Return if the lease is held, else raise LockLost (or NotHeld after a release).

        ```python
        async with client.lock("report", on_lost="flag") as lease:
            for chunk in range(3):
                lease.ensure_held()
                ...  # write the chunk
        ```
        """
        if not self.held:
            raise self._why_not_held()

    async def wait_lost(self) -> LockLost:
        """Wait until the lease is lost and return why. Raises NotHeld when it is released instead.

        ```python
        async def tell(lease: aiodlock.Lease) -> None:
            lost = await lease.wait_lost()
            print("lost:", lost.reason)
        ```
        """
        place = self._place
        self._notice_overdue()
        while place.lost is None:
            if place.state is not State.HELD or self._serial not in place.handles:
                raise self._not_held()
            watcher: asyncio.Future[None] = self._session.loop.create_future()
            place.watchers = [w for w in place.watchers or () if not w.done()]
            place.watchers.append(watcher)
            await watcher
        return place.lost

    # -- what can be done with it ------------------------------------------------------------------

    async def extend(self, ttl: float | None = None) -> None:
        """Extend now; with ``ttl``, by that and from then on (the deadline never comes nearer).

        Retries until the local deadline.

        ```python
        async with client.lock("report", ttl=10) as lease:
            await lease.extend(60)  # 60 s from now, and each time from now on
        ```

        :raises LockLost: when the lease is lost, before or meanwhile.
        :raises NotHeld: after a release.
        """
        place, session = self._place, self._session
        if ttl is not None:
            ttl = check_seconds("ttl", ttl, least=SHORTEST_TTL)
            if place.options.margin > ttl * LARGEST_MARGIN:
                raise ValueError(
                    f"margin ({place.options.margin} s) must be at most {LARGEST_MARGIN:.0%} of ttl"
                )
        session.check_here()
        self.ensure_held()
        session.check_usable()
        if ttl is not None:
            place.ttl = ttl
        while True:
            try:
                async with asyncio.timeout(max(0.001, place.ends_at - now())):
                    length = place.length
                    (answer,) = session.backend.extend([(place.request, length)])
                    session.extender.on_answer(place, await answer, length, granted=True)
                self.ensure_held()
                return
            except (TimeoutError, BackendError) as error:
                session.telling.extension_failed(place, error)
                self.ensure_held()
            await asyncio.sleep(min(_EXTEND_RETRY, self.remaining()))
            self.ensure_held()

    async def release(self) -> None:
        """Release; from any task. Retries until the local deadline.

        ```python
        lease = await client.lock("report").acquire()
        try:
            ...
        finally:
            await lease.release()
        ```

        :raises NotHeld: when this lease was released before.
        :raises LockLost: when it was lost before, or nothing answered until the local deadline.
        """
        place, session = self._place, self._session
        session.check_here()
        self._notice_overdue()
        if self._serial not in place.handles:
            raise self._not_held()
        place.handles.remove(self._serial)
        if place.lost is not None:
            if not place.handles:
                session.leave_soon(place)
            raise place.error()
        if place.handles:
            place.wake_watchers()
            return
        held_at = place.granted_at
        left = await session.release(place)
        if left.what == "gone":
            raise self._lost_on_leaving(left.reason)
        session.telling.released(place, held_at)

    async def __aenter__(self) -> Self:
        self.ensure_held()
        self._arm()
        return self

    def _arm(self) -> asyncio.Task[Any]:
        """Make a loss cancel the current task's body, once, however often the lock is nested.

        With ``on_lost="flag"`` too: nothing is cancelled then, but leaving the client waits for it.
        Returns that task.
        """
        place = self._place
        task = asyncio.current_task()
        assert task is not None
        if place.armed is None:
            place.armed = {}
        if self._scope_task is not None and self._scope_task is not task:
            if not self._scope_task.done():
                raise RuntimeError(
                    f"the lease on {self.name!r} is the body of another task already: enter it once"
                )
            self._scope = self._scope_task = None
        if task not in place.armed:
            place.armed[task] = self._scope = BodyScope(task)
            self._scope_task = task
        return task

    def _disarm(self, exc_type: type[BaseException] | None) -> bool:
        """Return whether what comes out of the body is the cancellation that the loss caused."""
        scope, task = self._scope, self._scope_task
        if scope is None or task is None:
            return False
        self._scope = self._scope_task = None
        if self._place.armed:
            self._place.armed.pop(task, None)
        return scope.leave(exc_type)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cancelled_by_loss = self._disarm(exc_type)
        # A coroutine that is being closed cannot await.
        loss = await self._leave(wait=exc_type is not GeneratorExit)
        if loss is not None:
            raise_loss(exc, loss, cancelled_by_loss)

    async def _leave(self, *, wait: bool) -> LockLost | BackendError | None:
        """End this acquisition as its body ends; return the loss, if it was lost."""
        place, session = self._place, self._session
        self._notice_overdue()
        if self._is_over():  # released inside the body
            return place.error() if place.lost is not None else None
        place.handles.remove(self._serial)
        if place.lost is not None:
            if not place.handles:
                session.leave_soon(place)
            return place.error()
        if place.handles:
            place.wake_watchers()
            return None
        if not place.options.confirm_release or not wait:
            session.leave_soon(place)
            session.telling.released(place, place.granted_at)
            return None
        left = await session.leave(place)
        if left is not None and left.what == "gone":
            return self._lost_on_leaving(left.reason)
        session.telling.released(place, place.granted_at)
        return None

    def _is_over(self) -> bool:
        return self._serial not in self._place.handles

    # -- inside ------------------------------------------------------------------------------------

    def _notice_overdue(self) -> None:
        place = self._place
        if place.state is State.HELD and now() >= place.ends_at:
            place.lose_if_overdue()
            self._session.on_lost(place)

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        if asyncio._get_running_loop() is not self._session.loop:
            # In a thread of the body's: what belongs to the loop is not touched.
            if self._place.state is State.HELD and not self._is_over():
                return self._place.overdue_error()
        else:
            self._notice_overdue()
        if self._place.lost is not None:
            return self._place.error()
        return self._not_held()

    def _not_held(self) -> NotHeld:
        return NotHeld(f"the lease on {self.name!r} was released before", name=self.name)

    def _lost_on_leaving(self, reason: Any) -> LockLost:
        place = self._place
        place.state = State.HELD
        # A leave that was long on its way may find that the lease had ended, and was swept.
        place.lose_if_overdue()
        place.lose(reason)
        place.state = State.OVER
        self._session.telling.lost(place)
        assert place.lost is not None
        return place.lost.copy()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        place = self._place
        if self._serial not in place.handles or place.state not in (State.HELD, State.LOST):
            return
        task = place.task() if place.task is not None else None
        running = task is not None and not task.done() and place.state is State.HELD
        if task is not None and running and _result_is_discarded(sys._getframe(1)):
            self._session.discarded(place, self._serial, task)
            return
        self._session.forgotten(place, self._serial)


def raise_loss(
    exc: BaseException | None, loss: LockLost | BackendError, cancelled_by_loss: bool
) -> None:
    """An outer cancellation first; then the body's own exception; then the loss."""
    if exc is None or cancelled_by_loss:
        raise loss from loss.__cause__
    if not isinstance(exc, asyncio.CancelledError | LockLost):
        exc.add_note(str(loss))


def _result_is_discarded(frame: Any) -> bool:
    """Was the object dropped by a bare ``await lock.acquire()`` rather than by ``del`` or a return?

    Or by ``if await lock.acquire():``, as locks are used whose ``acquire`` returns a bool.
    """
    code, at = frame.f_code, frame.f_lasti
    instruction: str = dis.opname[code.co_code[at]]
    if instruction.startswith("STORE_FAST"):
        # pytest keeps the value of `assert await lock.acquire()` in a variable of its own, then clears it.
        # Of two instructions in one (3.13), the first has four bits.
        argument = code.co_code[at + 1]
        stored: str = code.co_varnames[argument if instruction == "STORE_FAST" else argument >> 4]
        return stored.startswith("@py_")
    return instruction.startswith(_DISCARDING)
