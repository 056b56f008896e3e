"""Lease: a granted request as its holder sees it, and what happens when a body is left."""

from __future__ import annotations

import asyncio
import re
from typing import Never, NoReturn
from urllib.parse import quote, unquote

from ._acquisition import Acquisition
from ._body import AsyncBlock
from ._capabilities import refuse_short
from ._errors import BackendError, LockLost, NotHeld, Unsupported
from ._model import Kind, Mode
from ._options import (
    LARGEST_MARGIN,
    LEASES_ELSEWHERE,
    SHORTEST_TTL,
    answers,
    check_seconds,
    check_text,
    refuse_keywords,
)
from ._request import HELD, Request

_TOKEN = re.compile(r"[1-9][0-9]{0,15}")


@answers(LEASES_ELSEWHERE)
class LeaseView:
    """What a lease tells, to tasks and to threads. Sends nothing."""

    __slots__ = ()

    _acquired: Acquisition

    def __repr__(self) -> str:
        return repr(self._acquired)

    @property
    def _request(self) -> Request:
        return self._acquired.request

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
        return self._acquired.held

    @property
    def lost(self) -> LockLost | None:
        """Why the lease was lost; None while it is held and after a release."""
        return self._acquired.lost

    def remaining(self) -> float:
        """Return the seconds until the lease counts as lost if it is not extended; 0.0 once over.

        ```python
        print(lease.remaining(), "s, unless it is extended")
        ```
        """
        return self._acquired.remaining()

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

    def _why_not_held(self) -> LockLost | NotHeld | BackendError:
        return self._acquired.why_not_held()


class Lease(LeaseView, AsyncBlock[Acquisition]):
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

    __slots__ = ("__weakref__", "_acquired")

    def __init__(self, acquired: Acquisition) -> None:
        self._acquired = acquired

    # -- what can be done with it ------------------------------------------------------------------

    async def wait_lost(self) -> LockLost:
        """Wait until the lease is lost and return why. Raises NotHeld when it is released instead.

        ```python
        async def tell(lease: aiodlock.Lease) -> None:
            lost = await lease.wait_lost()
            print("lost:", lost.reason)
        ```
        """
        acquired, request, session = self._acquired, self._request, self._acquired.session
        session.check_loop()
        while (lost := session.register.loss_of(request, acquired.serial)) is None:
            if request.state is not HELD or acquired.is_over:
                raise acquired.not_held()
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
        request, session = self._request, self._acquired.session
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
            await self._acquired.ask(lambda: request.place.extend(ttl))
        except Unsupported:
            request.ttl = before
            raise

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
        await self._acquired.release()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self!r} is one acquisition: it cannot be copied or pickled")


def read_sequencer(text: str) -> tuple[Kind, str, Mode, int] | None:
    """Take a sequencer apart; None for what no lease can have made."""
    encoded, _, rest = text.partition(":")
    mode, _, token = rest.partition(":")
    if not _TOKEN.fullmatch(token) or mode not in ("exclusive", "shared", "semaphore", "once"):
        return None
    try:
        name = check_text("name", unquote(encoded, errors="strict"))
    except ValueError:
        return None
    if quote(name, safe="") != encoded:
        return None
    if mode == "semaphore":
        return "semaphore", name, "shared", int(token)
    if mode == "once":
        return "once", name, "exclusive", int(token)
    return "lock", name, "exclusive" if mode == "exclusive" else "shared", int(token)
