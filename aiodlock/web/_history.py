"""The last minutes in figures, and the picture that the page draws of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: Seconds that one bar stands for, and the number of bars.
STEP = 5.0
STEPS = 60
#: Rates are told of the last bars.
_AVERAGED = 3
_HEIGHT = 20
#: After a pause as long as this, what is new may be old.
_PAUSE = 15.0


@dataclass(slots=True)
class Step:
    """What was seen in one step. Moments are of ``_clock``."""

    number: int
    #: What is counted in here happened since then.
    began: float
    hand_overs: int = 0
    losses: int = 0
    #: The most; None if nobody looked.
    waiters: int | None = None


class History:
    """What was seen in the last ``STEPS`` steps.

    Mutable state: the steps in which something was told, the oldest first; when something was told last.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._told = 0.0

    def add(
        self, at: float, *, waiters: int | None = None, hand_overs: int = 0, losses: int = 0
    ) -> None:
        """Add what was seen at a moment."""
        number = int(at // STEP)
        if not self._steps or self._steps[-1].number != number:
            self._steps.append(Step(number, self._told if at - self._told < _PAUSE else at))
        step = self._steps[-1]
        step.hand_overs += hand_overs
        step.losses += losses
        if waiters is not None:
            step.waiters = max(waiters, step.waiters or 0)
        self._told = at

    def hand_overs_per_second(self, at: float) -> float:
        """Return how many there were on average in the last steps; 0 where that is not known yet."""
        last = [step for step in self._steps if step.number > at // STEP - _AVERAGED]
        span = at - last[0].began if last else 0.0
        return sum(step.hand_overs for step in last) / span if span > 0.5 else 0.0

    def pictures(self, at: float) -> list[Picture]:
        """Return what is to be drawn."""
        first = int(at // STEP) - STEPS + 1
        steps = [step for step in self._steps if step.number >= first]
        seen = [step.number - first for step in steps if step.waiters is not None]
        base = "".join(f"M{x} {_HEIGHT}h1" for x in seen)

        def picture(what: str, value: Callable[[Step], int]) -> Picture:
            most = max(map(value, steps), default=0)
            bars = ((step.number - first, value(step)) for step in steps)
            return Picture(what, most, sum(map(value, steps)), _drawn(bars, most), base)

        return [
            picture("waiters", lambda step: step.waiters or 0),
            picture("hand-overs", lambda step: step.hand_overs),
            picture("losses", lambda step: step.losses),
        ]


@dataclass(frozen=True, slots=True)
class Picture:
    """Bars over time: paths in a field of ``STEPS`` by 20."""

    what: str
    most: int
    total: int
    bars: str
    #: A line below the steps in which somebody looked.
    base: str


def _drawn(bars: Iterable[tuple[int, int]], most: int) -> str:
    return "".join(
        f"M{x} {_HEIGHT}v-{max(1.0, value / most * (_HEIGHT - 1)):.1f}h.8V{_HEIGHT}z"
        for x, value in bars
        if value
    )
