"""The longest lease in use, which clients tell each other through the nodes.

A node that came back empty may have forgotten a lease that lasts. So its votes do not count before the
longest lease in use is over, whoever uses it: it is noted on a majority of the nodes before the first such
lease is asked for. Each length is kept for as long as it is used, and read as the largest that any node or
this client remembers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ...._clock import now
from ...._model import Terms

#: Nobody waits for longer than that (seconds).
CAP: Final = 86_400.0
#: A length is kept for so many times itself, and at least for so long (seconds), after its last use.
_KEPT_TIMES, _KEPT_AT_LEAST = 3.0, 60.0


def length_of(terms: Terms, ttl: float) -> int:
    """Return for how many ms a lease may keep its name closed: a few different numbers, rounded up."""
    seconds = min(CAP, ttl + terms.lock_delay + terms.hold_at_least)
    length = max(1, round(seconds * 1000 + 0.5))
    step = int(10 ** max(0, len(str(length)) - 2))
    return -(-length // step) * step


class Delays:
    """The lengths in use, as far as this client knows, in whichever session.

    Mutable state: ``_until`` (for each length in ms: until when it counts, on our clock), ``_used`` (for
    each that this client uses: since when that is to be noted again), ``noted`` (for each length: until
    when a majority of the nodes certainly keeps it).

    :param least: what a user has asked for (seconds); None for nothing, 0: this client's own leases need
        none, because the nodes forget nothing.
    """

    def __init__(self, least: float | None) -> None:
        self._least = least
        self._until: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.noted: dict[int, float] = {}

    @property
    def notes(self) -> bool:
        """Whether this client's own leases count."""
        return self._least != 0.0

    @property
    def least(self) -> float:
        """What a user has asked for at least (seconds)."""
        return self._least or 0.0

    @property
    def longest(self) -> float:
        """For how long a node that came back does not count (seconds)."""
        if not self._until:
            return self._least or 0.0
        moment = now()
        for length in [length for length, until in self._until.items() if until <= moment]:
            del self._until[length]
        return max(self._least or 0.0, max(self._until, default=0) / 1000)

    def use(self, length: int) -> bool:
        """A lease of this length is asked for or extended; return whether it has to be noted first."""
        if not self.notes:
            return False
        moment, lasts = now(), length / 1000
        until = self.noted.get(length, 0.0)
        if until - moment < 2 * lasts:
            self._used[length] = moment
            self._until[length] = max(self._until.get(length, 0.0), moment + _kept(length))
        return until - moment < lasts

    @property
    def is_due(self) -> bool:
        """Whether lengths that are in use have to be noted again."""
        return bool(self._used)

    def to_note(self) -> list[int]:
        """Return what a node is told: lengths, and for how long each counts still, in ms."""
        moment = now()
        return [
            number
            for length, until in self._until.items()
            if until > moment
            for number in (length, round((until - moment) * 1000))
        ]

    def hear(self, reply: Any) -> dict[int, int]:
        """Take what a node keeps, and return it: lengths, and for how long each counts, in ms.

        :raises ValueError, TypeError: somebody else has written there.
        """
        flat = [int(number) for number in reply]
        kept = dict(zip(flat[::2], flat[1::2], strict=True))
        moment = now()
        for length, left in kept.items():
            if 0 < length <= CAP * 1000 and left > 0:
                until = moment + min(left / 1000, _kept(length))
                self._until[length] = max(self._until.get(length, 0.0), until)
        return kept

    def on_told(self, told: Iterable[dict[int, int]], sent: float, majority: int) -> None:
        """Take what nodes keep that were asked at this moment or later."""
        lefts: dict[int, list[int]] = {}
        for kept in told:
            for length, left in kept.items():
                lefts.setdefault(length, []).append(left)
        for length, by_node in lefts.items():
            if len(by_node) >= majority:
                left = sorted(by_node, reverse=True)[majority - 1]
                self.noted[length] = sent + left / 1000
                if self._used.get(length, sent) <= sent:
                    self._used.pop(length, None)


def _kept(length: int) -> float:
    return max(_KEPT_AT_LEAST, _KEPT_TIMES * length / 1000)
