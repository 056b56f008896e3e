"""Leaves of a client that are on their way: what is asked about a name afterwards waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any

from .._errors import BackendError
from .._model import Left

#: It is waited for them no longer (seconds).
_ARRIVED_WITHIN = 1.0


class Leaves:
    """Those of one client. Mutable state: ``_sent`` (by name: each with what it was sent on)."""

    def __init__(self) -> None:
        self._sent: dict[Hashable, dict[asyncio.Future[None], object]] = {}

    def begin(self, name: Hashable, on: object = None) -> asyncio.Future[None]:
        """Note that a leave is on its way until the future is done."""
        on_its_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaves = self._sent.setdefault(name, {})
        leaves[on_its_way] = on

        def arrived(leave: asyncio.Future[None]) -> None:
            del leaves[leave]
            if not leaves and self._sent.get(name) is leaves:
                del self._sent[name]

        on_its_way.add_done_callback(arrived)
        return on_its_way

    async def until_arrived(self, name: Hashable, *, but: object = ...) -> None:
        """Wait for the leaves of a name, except for those that were sent on ``but``."""
        leaves = self._sent.get(name, {})
        if waited_for := [leave for leave, on in leaves.items() if on is not but]:
            await asyncio.wait(waited_for, timeout=_ARRIVED_WITHIN)

    def send(
        self,
        name: Hashable,
        leave: Callable[[], Awaitable[Left]],
        done: Callable[[Left | BackendError], object],
        start: Callable[[Coroutine[Any, Any, None]], bool],
        *,
        on: object = None,
    ) -> bool:
        """Carry out a leave that nobody awaits; ``done`` hears how it went. See ``Place.leave_soon``.

        :param start: runs it in the background; False when nothing is run any more.
        """
        on_its_way = self.begin(name, on)

        async def run() -> None:
            try:
                left: Left | BackendError = await leave()
            except BackendError as failed:
                left = failed
            finally:
                on_its_way.set_result(None)
            done(left)

        if start(run()):
            return True
        on_its_way.set_result(None)
        return False
