"""How long to wait before something is tried again: one rule for every retry of the package."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

#: Seconds before the second attempt, and the longest pause of all.
FIRST, LONGEST = 0.02, 1.0
_MOST_DOUBLINGS = 16


def pause_after(failures: int, *, first: float = FIRST, longest: float = LONGEST) -> float:
    """Return the seconds to wait after so many failures in a row: twice as long each time.

    A part of it is random, so that those who failed together do not come back together.
    """
    pause: float = first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)
    return min(pause, longest) * random.uniform(0.5, 1.0)


def pauses(*, first: float = FIRST, longest: float = LONGEST) -> Iterator[float]:
    """Return the pauses between the attempts of something, one after the other."""
    return (pause_after(failures, first=first, longest=longest) for failures in count(1))
