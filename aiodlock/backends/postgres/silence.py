"""Noticing that an answer does not come in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..._patience import Patience
from .connection import Connection

#: How much later than it was due a missing answer is looked for once more (seconds).
_LAST_LOOK = 0.05
_Answers: TypeAlias = Sequence[asyncio.Future[Any]]


class Silence:
    """Watches one call at a time.

    Mutable state: ``_on`` (the connection of the present call; None: there is none), ``_answers`` (who
    waits for it), ``_within`` and ``_late_at`` (how long, and until when its answer may take), ``_timer``.

    :param on_silence: is told of a call that is not answered in time: its connection, in words, and
        who waits.
    """

    def __init__(
        self, patience: Patience, on_silence: Callable[[Connection, TimeoutError, _Answers], object]
    ) -> None:
        self._patience = patience
        self._on_silence = on_silence
        self._on: Connection | None = None
        self._answers: _Answers = ()
        self._within = self._late_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, connection: Connection, answers: _Answers, lease: float | None = None) -> None:
        """A call begins.

        :param lease: the length of the lease that hangs on it (seconds).
        """
        loop = asyncio.get_running_loop()
        self._on, self._answers = connection, answers
        self._within = self._patience.within(lease)
        self._late_at = loop.time() + self._within
        if self._timer is None:
            # One timer for all calls: where it comes too early, it is set again.
            self._timer = loop.call_at(self._late_at, self._look_at_clock, loop)

    def end(self, took: float) -> None:
        """The call was answered, perhaps late: that is a sample, too."""
        self._patience.answered(took)
        self._answers = ()

    def forget(self) -> None:
        """There is no call."""
        self._on = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_at_clock(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._on is None:
            return
        if loop.time() < self._late_at:
            self._timer = loop.call_at(self._late_at, self._look_at_clock, loop)
        else:
            # If the loop stood still, the answer may have come, and is read before this.
            self._timer = loop.call_later(_LAST_LOOK, self._end_silence, loop, self._late_at)

    def _end_silence(self, loop: asyncio.AbstractEventLoop, late_at: float) -> None:
        self._timer = None
        if self._on is None or self._late_at != late_at:
            self._look_at_clock(loop)  # it was answered
        else:
            self._on_silence(
                self._on, TimeoutError(f"no answer for {self._within:.3g} s"), self._answers
            )
