"""Slices: what thousands of tasks begin in one turn of the event loop is spread over several turns.

Else ten thousand requests, or as many cancellations, stall the loop for so long that leases get lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

#: So many requests begin, or are cancelled, in one turn.
_SIZE = 100
#: So many are counted only: a callback in each turn would cost more than it is worth.
_FREE = 16
_ROOMY = _SIZE - _FREE


class Slices:
    """Runs calls in order: at once while there is room in this turn, else in a later one.

    Mutable state: ``_room`` (left in this turn), ``_later`` (calls that wait), ``_planned``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = _SIZE
        self._later: deque[Callable[[], object]] = deque()
        self._planned = False

    def run(self, call: Callable[[], object]) -> None:
        """Call it, now or soon."""
        if self.take():
            call()
        else:
            self._later.append(call)

    def take(self) -> bool:
        """Take a place in this turn; False when there is none."""
        if not self._room:  # else nothing waits
            return False
        self._room = room = self._room - 1
        if room < _ROOMY and not self._planned:
            self._plan()
        return True

    def turn(self) -> asyncio.Future[None]:
        """Return what is done in a turn with room."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self._later.append(partial(_begin, turn))
        return turn

    def _next(self) -> None:
        self._planned, self._room = False, _SIZE
        try:
            while self._later and self._room:
                self._room -= 1
                self._later.popleft()()
        finally:
            # Even when nothing is left to run: without room, nobody else would plan a turn with room.
            if self._room < _ROOMY or self._later:
                self._plan()

    def _plan(self) -> None:
        """See to it that room which was used is there again in the next turn."""
        self._planned = True
        self._loop.call_soon(self._next)


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Woken(asyncio.Future[None]):
    """What a waiter waits for. Its cancellation may have to wait for a turn with room.

    One is made for each wait, so it has no ``__init__`` of its own: who makes it sets ``slices``, and
    ``cancelled_with`` to None. (The message, in a tuple: anyio knows its own cancellation again by it.)
    Only ``cancel`` is replaced, which is rare: who resolves it asks for ``cancelled_with`` before, and
    calls ``cancel_now`` instead.
    """

    __slots__ = ("cancelled_with", "slices")

    slices: Slices
    cancelled_with: tuple[Any] | None

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        if self.cancelled_with is None:
            self.cancelled_with = (msg,)
            self.slices.run(self.cancel_now)
        elif msg is not None:
            self.cancelled_with = (msg,)  # anyio's, say, whose cancellation came second
        return True

    def cancel_now(self) -> None:
        """Carry out the cancellation that was asked for."""
        if not self.done() and self.cancelled_with is not None:
            super().cancel(*self.cancelled_with)
