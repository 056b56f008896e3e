"""What runs of a client in one process: an ``aiodlock.Client`` on the portal's loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .. import _client as core
from .. import _process
from .._clock import now
from .._errors import BackendUnavailable, ClientClosed
from .._patience import LEAST, left_of, soon
from .._request import HELD
from ._portal import Portal, TakeBack

_T = TypeVar("_T")

#: Seconds for the first call to connect, before its thread asks whether the loop turns.
_CONNECT_WITHIN = 5.0
#: At the end of the process: seconds for waiters to leave. Daemon threads do not end their bodies any more.
_CLOSE_AT_EXIT = 0.5
#: Seconds between two looks at what threads hold.
_LOOK_EVERY = 1.0


class Running:
    """One client in one process, from its first use to its closing.

    Mutable state, all changed in the loop's thread: ``is_open``, ``_opening`` (the task that connects),
    ``_closing``. In any: ``_watching``.
    """

    def __init__(self, inner: core.Client, portal: Portal) -> None:
        self.inner: core.Client = inner
        self.portal: Portal = portal
        self.pid: int = portal.pid
        self.is_open: bool = False
        self._opening: asyncio.Task[None] | None = None
        self._closing = False
        self._watching = False

    def is_here(self) -> bool:
        """Whether this is its process, and not one that was forked from it."""
        return self.pid == _process.look()

    def call(
        self, call: Callable[[], Coroutine[Any, Any, _T]], take_back: TakeBack[_T] | None = None
    ) -> _T:
        """Connect if need be, then run the coroutine on the loop and wait for it."""

        async def opened() -> _T:
            if not self.is_open:
                await self.open()
            return await call()

        return self.portal.call(opened, take_back, within=_CONNECT_WITHIN)

    def watch(self, look: Callable[[Running], bool]) -> None:
        """Look from time to time, in the loop's thread, while there is something to see."""
        if not self._watching:
            self._watching = True
            self.portal.call_later(_LOOK_EVERY, lambda: self._look(look))

    def _look(self, look: Callable[[Running], bool]) -> None:
        self._watching = False
        if self.is_open and look(self):
            self.watch(look)

    async def open(self) -> None:
        """Connect, once for all threads that need it."""
        if self.is_open:
            return
        if self._closing:
            raise ClientClosed("the client was closed: it does nothing more")
        if self._opening is None or self._opening.done():  # it has failed: try again
            self._opening = asyncio.create_task(self._open(), name="aiodlock.sync: connecting")
            self._opening.add_done_callback(_look_at)
        opening = self._opening
        await asyncio.wait({opening})
        if opening.cancelled():
            raise ClientClosed("the client was closed while it connected")
        error = opening.exception()
        if error is not None:
            # Several threads may wait: each gets an exception of its own.
            fresh = copy.copy(error)
            fresh.__cause__ = error.__cause__
            raise fresh

    async def open_within(self, timeout: float | None) -> float | None:
        """Connect; return what is left of the timeout."""
        if timeout is None:
            await self.open()
            return None
        started, limit = now(), timeout or soon(LEAST)
        try:
            async with asyncio.timeout(limit):
                await self.open()
        except TimeoutError as elapsed:
            spent = "before the call's timeout" if timeout else f"within {limit:g} s"
            raise BackendUnavailable(
                f"{self.inner!r} was not connected {spent}: its first call connects"
            ) from elapsed
        return left_of(timeout, started)

    async def _open(self) -> None:
        await self.inner.__aenter__()
        self.is_open = True
        self.portal.at_exit(self, self._close_at_exit)

    async def close(self) -> None:
        """Leave the client."""
        self._closing = True
        self.portal.closed(self)
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening})
        self.is_open = False
        await self.inner.__aexit__(None, None, None)

    async def _close_at_exit(self) -> None:
        of_inner = core.core_of(self.inner)
        of_inner.close_timeout = _CLOSE_AT_EXIT
        session = of_inner.session
        if session is not None:
            for request in list(session.requests.values()):
                if request.state is HELD and not request.armed:
                    session.departure.in_background(request)  # released, not lost
        await self.close()


def _look_at(opening: asyncio.Task[None]) -> None:
    """Let asyncio log nothing: those who wait are told of the failure."""
    if not opening.cancelled():
        opening.exception()
