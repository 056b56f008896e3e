"""Whom does a client talk to? One rule for every store.

On entering, a session learns which store it talks to: ids that the store keeps, and a position in its
history that only grows. Each new connection is compared with that before anything is asked on it. What
differs is another store, or an older state of the same one. For this session it is unreachable, and the log
says so once for each place where it was met.

A store may be replaced on purpose (a restore, a move, new nodes one by one). So the session learns anew, at
WARNING, when the store that it knows has been silent for ``unavailable_after`` and no lease of the session
can be held any more: what the old store granted is over then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from .._clock import now
from .._errors import BackendUnavailable

_logger = logging.getLogger("aiodlock")
#: So many places are remembered as told; a resolver that makes up addresses must not fill the memory.
_MOST_TOLD = 100


class Identity(Protocol):
    """What one store says of itself. A frozen value."""

    def conflict(self, known: Self) -> str:
        """Say why this is not the known store, or an older state of it; "" when it is the same one."""

    def after(self, known: Self) -> Self:
        """Return what is known now that this was seen, too: positions only grow."""


IdentityT = TypeVar("IdentityT", bound=Identity)


class OtherStore(BackendUnavailable):
    """A connection reached another store than the session's, or an older state of the same one."""


class Known(Generic[IdentityT]):
    """The store that a session knows. The client's next session, if this one dies, knows the same one.

    Mutable state: ``value`` (None before entering), ``_heard_at`` (when the known store last answered, on
    our clock), ``_told`` (places of which the log has told).

    :param described: the store in words, without secrets.
    :param silence: seconds for which the known store must have been silent before another is believed.
    :param may_hold: whether a lease of this session can still be held.
    """

    def __init__(self, described: str, *, silence: float, may_hold: Callable[[], bool]) -> None:
        self._described = described
        self._silence = silence
        self._may_hold = may_hold
        self.value: IdentityT | None = None
        self._heard_at = now()
        self._told: set[str] = set()

    def meet(self, seen: IdentityT, where: str) -> bool:
        """Compare what answers at a place with what is known.

        :param where: the address, as the log shall name it.
        :returns: whether it is another store than before, or an older state, and is believed from now on.
        :raises OtherStore: it is another store, or an older state: use the connection for nothing.
        """
        known = self.value
        if known is None:
            self.value, self._heard_at = seen, now()
            return False
        conflict = seen.conflict(known)
        if not conflict:
            self.value, self._heard_at = seen.after(known), now()
            self._told.discard(where)
            return False
        if self.may_be_replaced:
            _logger.warning(
                "%s: %s is another store than the known one (%s), which has been silent for %.0f s; no "
                "lease of it is left, so this client goes on with this one",
                self._described,
                where,
                conflict,
                now() - self._heard_at,
                extra={"event": "store_replaced"},
            )
            self.value, self._heard_at = seen, now()
            self._told.clear()
            return True
        message = f"{where} is not the store that this client entered ({conflict}): it is not used"
        if where not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(where)
            _logger.warning("%s: %s", self._described, message, extra={"event": "other_store"})
        raise OtherStore(message)

    @property
    def may_be_replaced(self) -> bool:
        """Whether another store would be believed: the known one is silent, and nothing is held."""
        return now() - self._heard_at >= self._silence and not self._may_hold()

    def heard(self) -> None:
        """The known store has answered."""
        self._heard_at = now()

    def follow(self, dead: Self) -> None:
        """Know what the session of a client knew that has died."""
        self.value, self._heard_at, self._told = dead.value, dead._heard_at, dead._told
