"""Lease: a granted request as its holder sees it, and what happens when a body is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Never, NoReturn
from urllib.parse import quote

from . import _process
from ._backoff import pause_after
from ._body import Body
from ._capabilities import refuse_short
from ._clock import now
from ._errors import BackendError, LockLost, NotHeld, Unsupported
from ._model import Mode
from ._options import LARGEST_MARGIN, SHORTEST_TTL, check_seconds, refuse_keywords
from ._request import HELD, Block, Request
from ._session import Session


class LeaseView:
    """What a lease tells, to tasks and to threads. Sends nothing."""

    __slots__ = ()

    _session: Session
    _request: Request
    _serial: int

    def __repr__(self) -> str:
        request = self._request
        if self.held:
            state = f"held, {self.remaining():.1f} s left"
        elif request.reason is not None and self._serial in request.lost_handles:
            state = f"lost: {request.reason}"
        else:
            state = "released"
        return f"<Lease {self.name!r} {self.mode} token={self.token} {state}>"

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._request.name

    @property
    def mode(self) -> Mode:
        """``"exclusive"`` or ``"shared"``."""
        return self._request.terms.mode

    @property
    def token(self) -> int:
        """The fencing token: larger than that of every grant of this name before. Below 2**53."""
        return self._request.token

    @property
    def owner(self) -> str:
        """Who reentrancy is judged by: the ``owner`` option, or a string made for this hold."""
        return self._request.options.owner or self._request.owner[1:]

    @property
    def ttl(self) -> float:
        """How long the lease lives without being extended, in seconds."""
        return self._request.ttl

    @property
    def sequencer(self) -> str:
        """Name, mode or kind, and token in one printable string, for ``Client.check_sequencer``."""
        terms = self._request.terms
        kind = terms.mode if terms.kind == "lock" else terms.kind
        return f"{quote(terms.name, safe='')}:{kind}:{self.token}"

    @property
    def held(self) -> bool:
        """True only while the server certainly honours the lease (less ``margin``)."""
        request = self._request
        return (
            request.state is HELD
            and self._serial in request.handles
            and now() < request.ends_at
            and _process.pid == self._session.pid
        )

    @property
    def lost(self) -> LockLost | None:
        """Why the lease was lost; None while it is held and after a release."""
        return self._request.loss_of(self._serial)

    def remaining(self) -> float:
        """Return the seconds until the lease counts as lost if it is not extended; 0.0 once over.

        ```python
        print(lease.remaining(), "s, unless it is extended")
        ```
        """
        return max(0.0, self._request.ends_at - now()) if self.held else 0.0

    def ensure_held(self) -> None:
        """Return if the lease is held, else raise LockLost (or NotHeld after a release).

        ```python
        for chunk in range(3):
            lease.ensure_held()
            ...  # write the chunk
        ```
        """
        if not self.held:
            raise self._why_not_held()

    def _is_over(self) -> bool:
        return self._serial not in self._request.handles

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        self._session.check_process()
        if asyncio._get_running_loop() is not self._session.loop:
            # In a thread of the body's: what belongs to the loop is not touched.
            if self._request.state is HELD and not self._is_over():
                return self._request.overdue_error()
        else:
            self._session.register.lose_if_overdue(self._request)
        if self._serial in self._request.lost_handles:
            return self._request.error()
        return self._not_held()

    def _not_held(self) -> NotHeld:
        return NotHeld(f"the lease on {self.name!r} was released before", name=self.name)


class Lease(LeaseView, Body):
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

    __slots__ = ("__weakref__", "_request", "_serial")

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._tasks = []
        self._request = request
        request.serial = self._serial = request.serial + 1
        request.handles += (self._serial,)

    # -- what can be done with it ------------------------------------------------------------------

    async def wait_lost(self) -> LockLost:
        """Wait until the lease is lost and return why. Raises NotHeld when it is released instead.

        ```python
        async def tell(lease: aiodlock.Lease) -> None:
            lost = await lease.wait_lost()
            print("lost:", lost.reason)
        ```
        """
        request, session = self._request, self._session
        session.check_loop()
        while (lost := session.register.loss_of(request, self._serial)) is None:
            if request.state is not HELD or self._serial not in request.handles:
                raise self._not_held()
            watcher: asyncio.Future[None] = session.loop.create_future()
            request.add_watcher(watcher)
            await watcher
        return lost

    async def extend(self, ttl: float | None = None, **wrong: Never) -> None:
        """Extend now; with ``ttl``, by that and from then on (the deadline never comes nearer).

        Retries until the local deadline.

        ```python
        async with client.lock("report", ttl=10) as lease:
            await lease.extend(60)  # 60 s from now, and each time from now on
        ```

        :raises LockLost: when the lease is lost, before or meanwhile.
        :raises NotHeld: after a release.
        :raises Unsupported: for another ``ttl`` than the lock's, on a store that cannot change it.
        """
        if wrong:
            refuse_keywords("extend()", wrong, ["ttl"])
        request, session = self._request, self._session
        if ttl is not None:
            ttl = check_seconds("ttl", ttl, least=SHORTEST_TTL)
            if request.terms.margin > ttl * LARGEST_MARGIN:
                raise ValueError(
                    f"margin ({request.terms.margin} s) must be at most {LARGEST_MARGIN:.0%} of ttl"
                )
            refuse_short(session.backend.capabilities, "ttl", ttl, repr(session.backend))
        session.check_here()
        self.ensure_held()
        session.check_usable()
        before = request.ttl
        if ttl is not None:
            request.ttl = ttl
        try:
            await self._ask(lambda: request.place.extend(ttl))
        except Unsupported:
            request.ttl = before
            raise

    async def _begin(self) -> None:
        """Tell the store that the body begins, if it has not begun with the grant.

        The caller sets ``used`` when it does begin: until then others of a multilock may still fail.
        """
        if not self._request.used:
            await self._ask(self._request.place.begin)

    async def _ask(self, call: Callable[[], Awaitable[None]]) -> None:
        """Tell the store something about this lease, until the local deadline."""
        request, session = self._request, self._session
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
        await release_handle(self._session, self._request, self._serial)

    @property
    def _acquisitions(self) -> tuple[Block]:  # type: ignore[override]
        return ((self._request, self._serial),)

    # -- inside ------------------------------------------------------------------------------------

    async def _leave(self, *, wait: bool) -> LockLost | BackendError | None:
        request, session = self._request, self._session
        session.register.lose_if_overdue(request)
        if self._serial not in request.handles:  # released inside the body
            return request.error() if self._serial in request.lost_handles else None
        last = request.end_handle(self._serial)
        if request.reason is not None:
            if last:
                session.departure.in_background(request)
            return request.error()
        if not last:
            return None
        if request.may_linger and session.lingering.keep(request):
            session.telling.released(request, request.granted_at)
            return None
        if not request.options.confirm_release or not wait:
            session.departure.in_background(request)
            session.telling.released(request, request.granted_at)
            return None
        left = await session.departure.awaited(request)
        if left is not None and left.what == "gone":
            return session.register.lost_on_leaving(request, left.reason, self._serial)
        session.telling.released(request, request.granted_at)
        return None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self!r} is one acquisition: it cannot be copied or pickled")

    def __del__(self) -> None:
        # On any thread, in the middle of anything.
        if self._serial in self._request.handles:
            self._session.forgotten.dropped(self._request, self._serial)


async def release_handle(session: Session, request: Request, serial: int) -> None:
    """End one acquisition, in the caller's task; see ``Lease.release``."""
    session.register.lose_if_overdue(request)
    last = request.end_handle(serial)
    if request.reason is not None:
        if last:
            session.departure.in_background(request)
        raise request.error()
    if not last:
        return
    held_at = request.granted_at
    if request.may_linger and session.lingering.keep(request):
        session.telling.released(request, held_at)
        return
    left = await session.departure.until_deadline(request, serial)
    if left.what == "gone":
        raise session.register.lost_on_leaving(request, left.reason, serial)
    session.telling.released(request, held_at)
