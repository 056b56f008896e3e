"""When a hold ends by its own terms, while what keeps it alive lives on: a session, or a shared lease."""

from __future__ import annotations

import math

from .._clock import now
from .._model import Terms


class HoldEnd:
    """That of one request.

    Mutable state: ``_until`` (the end of a lease that is not extended by itself), ``_closes`` (the end of
    its ``max_hold``).
    """

    __slots__ = ("_closes", "_until")

    def __init__(self) -> None:
        self._until = self._closes = math.inf

    def begin(self, terms: Terms) -> None:
        """A body is told that it holds: its ``max_hold`` counts from now on."""
        self._closes = math.inf if terms.max_hold is None else now() + terms.max_hold

    def extended(self, terms: Terms, length: float) -> None:
        """It was granted or extended now, by so much."""
        if not terms.auto_extend:
            until = now() + length
            self._until = until if self._until == math.inf else max(self._until, until)

    def before(self, alive_until: float) -> float:
        """Return when it ends, if what keeps it alive lives until then."""
        return min(alive_until, self._until, self._closes)

    def is_capped(self, terms: Terms, ttl: float, alive_until: float) -> bool:
        """Whether that is so near because of ``max_hold``. ``ttl``: what was asked for last."""
        if terms.max_hold is None:
            return False
        return ttl >= terms.max_hold or self._closes < min(alive_until, self._until)
