"""A client never stays dead: when its session has died, a new one begins.

A bug in a background task ends a session: its waits and bodies get the error. The new session inherits
nothing but the knowledge which blocks are open: it has a fresh backend, and with it new connections, a new
name for inspectors, and new leases. Before it begins, the dead one leaves what it can still leave.

When somebody has cancelled every task of the loop, as ``asyncio.run`` does at its end, nothing begins by
itself: the next call begins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ._backoff import pause_after
from ._clock import now
from ._session import Session

_logger = logging.getLogger("aiodlock")

#: Seconds before the second new session in a row, and the longest pause. A session that lasted longer than
#: that is the first again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 30.0


class Renewal:
    """Replaces the sessions of one entering of a client.

    Mutable state: ``_session`` (the present one), ``_began`` (when), ``_failures`` (sessions in a row that
    did not last), ``_task`` (begins a new one), ``_over``.

    :param session: the first one, started.
    :param make: makes the session that follows another one; it is not started.
    :param use: is called with each new session.
    :param close_timeout: seconds that the bodies of a dead session are given to end.
    """

    def __init__(
        self,
        session: Session,
        make: Callable[[Session], Session],
        use: Callable[[Session], object],
        close_timeout: float,
    ) -> None:
        self._session = session
        self._make = make
        self._use = use
        self._close_timeout = close_timeout
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._began = now()
        self._over = False
        session.when_dead(self.begin)

    def begin(self) -> None:
        """Begin a new session, unless that is under way, or the client is being left."""
        if not self._over and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._renew(), name="aiodlock: new session")

    async def wait(self, within: float) -> None:
        """Wait until the present session can be used, so many seconds at most."""
        self.begin()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within)

    async def stop(self) -> None:
        """Begin no session any more."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _renew(self) -> None:
        if now() - self._began >= _LONGEST_PAUSE:
            self._failures = 0
        while (dead := self._session).death is not None:
            try:
                await dead.close(self._close_timeout)
                await asyncio.sleep(self._pause())
                await self._start(dead)
            except Exception as failed:  # whatever it is: the next attempt may succeed
                _logger.log(
                    logging.WARNING if self._failures == 1 else logging.DEBUG,
                    "no new session yet: %r",
                    failed,
                    extra={"event": "no_session"},
                )

    def _pause(self) -> float:
        self._failures += 1
        if self._failures == 1:
            return 0.0
        return pause_after(self._failures - 1, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE)

    async def _start(self, dead: Session) -> None:
        fresh = self._make(dead)
        await fresh.start()
        self._session, self._began = fresh, now()
        self._use(fresh)
        _logger.warning(
            "a new session has begun in place of the one that died (%r): it has taken over no lease",
            dead.death,
            extra={"event": "session_renewed"},
        )
        fresh.when_dead(self.begin)
