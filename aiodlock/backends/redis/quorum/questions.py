"""When a node is asked about a waiter: one question at a time, and in a row later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...._backoff import pause_after
from ...._clock import now
from .broadcast import Broadcast

#: So often a node is asked about a waiter again at once when it has answered; then later and later.
_AT_ONCE = 4
#: The first of those pauses, and the longest one: in seconds, and as a part of the length asked for.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_SHARE = 0.01, 0.2, 1 / 12
#: A question counts as one more in a row if it follows the one before within so long: seconds, and a part
#: of the length.
_IN_A_ROW, _IN_A_ROW_SHARE = 1.0, 1 / 4

#: Sends one question for all of these; False if it did not, and has told them why.
Put = Callable[[Sequence[Broadcast[Any]], float], bool]


class Questions:
    """The questions about one waiter at one node.

    What makes the client ask while one is on its way (a notice, a break by an operator) may be newer than
    the answer to that. So the node is asked once more after it.

    Mutable state: ``_is_asked`` (one is on its way), ``_next`` (who waits for the next one, and the length
    each asks for), ``_rests`` (it may not be sent yet), ``_asked_at``, ``_in_a_row``.
    """

    __slots__ = ("_asked_at", "_in_a_row", "_is_asked", "_next", "_rests")

    def __init__(self) -> None:
        self._is_asked = False
        self._next: list[tuple[Broadcast[Any], float]] = []
        self._rests = False
        self._asked_at = 0.0
        self._in_a_row = 0

    def ask(self, put: Put, by: Broadcast[Any], length: float) -> None:
        """Ask, as soon as the node has answered what it was asked before and has had some rest."""
        if self._is_asked or self._rests:
            self._next.append((by, length))
            return
        since = now() - self._asked_at
        if since > min(_IN_A_ROW, length * _IN_A_ROW_SHARE):
            self._in_a_row = 0
        elif self._in_a_row >= _AT_ONCE:
            self._next.append((by, length))
            self._ask_later(put, length, since)
            return
        self._ask(put, (by,), length)

    def answered(self) -> None:
        """The question has its answer, or has none. What that leads to may be the next one."""
        self._is_asked = False

    def go_on(self, put: Put, length: float) -> None:
        """Ask what there is to ask still."""
        if self._next and not self._rests and not self._is_asked:
            self._ask_later(put, length, now() - self._asked_at)

    def _ask(self, put: Put, by: Sequence[Broadcast[Any]], length: float) -> None:
        self._asked_at, self._is_asked = now(), True
        self._in_a_row += 1
        if not put(by, length):
            self._is_asked = False

    def _ask_later(self, put: Put, length: float, since: float) -> None:
        """Ask at once, or after a pause that is counted from the last question."""
        repeats = self._in_a_row - _AT_ONCE
        pause = 0.0
        if repeats >= 0:
            longest = min(_LONGEST_PAUSE, length * _LONGEST_SHARE)
            pause = pause_after(repeats + 1, first=_FIRST_PAUSE, longest=longest) - since
        if pause <= 0.0:
            self._ask_next(put)
            return
        self._rests = True
        asyncio.get_running_loop().call_later(pause, self._ask_next, put)

    def _ask_next(self, put: Put) -> None:
        following, self._next, self._rests = self._next, [], False
        self._ask(put, [by for by, _ in following], max(length for _, length in following))
