"""Lease: a granted request as its holder sees it, and what happens when a body is left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Never
from urllib.parse import quote

from ._bodies import Body
from ._clock import now
from ._errors import BackendError, LockLost, NotHeld
from ._model import Mode
from ._options import LARGEST_MARGIN, SHORTEST_TTL, check_seconds, refuse_keywords
from ._place import Place, State

if TYPE_CHECKING:
    from ._session import Session

_EXTEND_RETRY = 0.05


class Lease(Body):
    """One acquisition of a lock, from the grant to its release or loss.

    As an async context manager it arms ``on_lost`` in the entering task and releases on the way out.
    Without, it is a bare lease: nobody is cancelled when it is lost, ``held``, ``ensure_held`` and
    ``wait_lost`` tell. A bare lease belongs to the task that acquired it, whatever becomes of this object
    while that task runs: ``await lock.release()`` there ends it. It is released with a ResourceWarning
    when the task has ended and nobody references this object any more.

    ```python
    lease = await client.lock("report").acquire()
    async with lease:
        print(lease.token, lease.held, lease.remaining())
    ```
    """

    __slots__ = ("__weakref__", "_place", "_places", "_serial")

    def __init__(self, session: Session, place: Place) -> None:
        self._session = session
        self._tasks = []
        self._place = place
        self._places = (place,)
        self._serial = place.new_handle()

    def __repr__(self) -> str:
        place = self._place
        if self.held:
            state = f"held, {self.remaining():.1f} s left"
        elif place.reason is not None:
            state = f"lost: {place.reason}"
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
        place, session = self._place, self._session
        session.check_loop()
        session.lose_if_overdue(place)
        while (lost := place.lost) is None:
            if place.state is not State.HELD or self._serial not in place.handles:
                raise self._not_held()
            watcher: asyncio.Future[None] = session.loop.create_future()
            place.watchers = [w for w in place.watchers or () if not w.done()]
            place.watchers.append(watcher)
            await watcher
        return lost

    # -- what can be done with it ------------------------------------------------------------------

    async def extend(self, ttl: float | None = None, **wrong: Never) -> None:
        """Extend now; with ``ttl``, by that and from then on (the deadline never comes nearer).

        Retries until the local deadline.

        ```python
        async with client.lock("report", ttl=10) as lease:
            await lease.extend(60)  # 60 s from now, and each time from now on
        ```

        :raises LockLost: when the lease is lost, before or meanwhile.
        :raises NotHeld: after a release.
        """
        if wrong:
            refuse_keywords("extend()", wrong, ["ttl"])
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
        self._session.check_here()
        if self._is_over():
            raise self._not_held()
        await release_handle(self._session, self._place, self._serial)

    # -- inside ------------------------------------------------------------------------------------

    async def _leave(self, *, wait: bool) -> LockLost | BackendError | None:
        place, session = self._place, self._session
        session.lose_if_overdue(place)
        if self._serial not in place.handles:  # released inside the body
            return place.error() if place.reason is not None else None
        last = place.end_handle(self._serial)
        if place.reason is not None:
            if last:
                session.leave_soon(place)
            return place.error()
        if not last:
            return None
        if not place.options.confirm_release or not wait:
            session.leave_soon(place)
            session.telling.released(place, place.granted_at)
            return None
        left = await session.leave(place)
        if left is not None and left.what == "gone":
            return session.lost_on_leaving(place, left.reason)
        session.telling.released(place, place.granted_at)
        return None

    def _is_over(self) -> bool:
        return self._serial not in self._place.handles

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        if asyncio._get_running_loop() is not self._session.loop:
            # In a thread of the body's: what belongs to the loop is not touched.
            if self._place.state is State.HELD and not self._is_over():
                return self._place.overdue_error()
        else:
            self._session.lose_if_overdue(self._place)
        if self._place.reason is not None:
            return self._place.error()
        return self._not_held()

    def _not_held(self) -> NotHeld:
        return NotHeld(f"the lease on {self.name!r} was released before", name=self.name)

    def __del__(self) -> None:
        # On any thread, in the middle of anything.
        if self._serial in self._place.handles:
            self._session.dropped(self._place, self._serial)


async def release_handle(session: Session, place: Place, serial: int) -> None:
    """End one acquisition, in the caller's task; see ``Lease.release``."""
    session.lose_if_overdue(place)
    last = place.end_handle(serial)
    if place.reason is not None:
        if last:
            session.leave_soon(place)
        raise place.error()
    if not last:
        return
    held_at = place.granted_at
    left = await session.release(place)
    if left.what == "gone":
        raise session.lost_on_leaving(place, left.reason)
    session.telling.released(place, held_at)
