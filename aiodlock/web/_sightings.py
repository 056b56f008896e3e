"""What was seen of the names, look after look, and what follows from it: hand-overs, losses, sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .._clock import now
from .._model import Kind, LockInfo
from ._history import History

#: So many losses are kept, and of so many names that somebody looks at, the last minutes.
_MOST_LOSSES = 50
_MOST_HISTORIES = 200
#: Cycles are looked for among waits of so many seconds, of so many clients.
_LONG, _MOST_CLIENTS = 1.0, 200
#: What there is under a name: each kind has names of its own.
Key: TypeAlias = tuple[Kind, str]


@dataclass(slots=True)
class Seen:
    """What was last seen of a name."""

    info: LockInfo
    at: float
    #: When each holder got it, by owner and token, as far as that is known: at the latest when it was seen.
    holds: dict[tuple[str, int], float]
    #: When the oldest waiter was queued, -inf where the store does not tell; and when the oldest holder got
    #: the name. inf if there is none.
    waiting_since: float
    held_since: float

    @property
    def key(self) -> Key:
        """Its kind and name."""
        return (self.info.kind, self.info.name)


@dataclass(frozen=True, slots=True)
class Loss:
    """A lease that ended without a release, as far as this page can tell."""

    key: Key
    client: str
    token: int
    at: float
    how: str


@dataclass(slots=True)
class Totals:
    """Sums over all names."""

    names: int = 0
    holders: int = 0
    waiters: int = 0
    #: None where the store does not tell.
    longest_wait: float | None = 0.0


class Sightings:
    """Mutable state:

    - ``names``: what was last seen of each.
    - ``losses``: the last ones. ``lost``: the number of all.
    - ``history``: the last minutes, of all names together. ``_histories``: of those that somebody looks at,
      or has looked at.
    - ``_handed_over``: the hand-overs of this look. ``_totals``: the sums, until the look has ended.
    """

    def __init__(self) -> None:
        self.names: dict[Key, Seen] = {}
        self.losses: deque[Loss] = deque(maxlen=_MOST_LOSSES)
        self.lost = 0
        self.history = History()
        self._histories: dict[Key, History] = {}
        self._handed_over = 0
        self._totals: Totals | None = None

    def forget(self) -> None:
        """It was long ago. What was lost, and the last minutes, stay."""
        self.names.clear()
        self._handed_over = 0

    # -- what follows from it ------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Return the sums over all names that were seen."""
        totals = self._totals
        if totals is None:
            self._totals = totals = Totals(names=len(self.names))
            oldest = float("inf")
            for seen in self.names.values():
                totals.holders += len(seen.info.holders)
                totals.waiters += len(seen.info.waiters)
                if seen.waiting_since > float("-inf"):
                    oldest = min(oldest, seen.waiting_since)
            if totals.waiters:
                totals.longest_wait = now() - oldest if oldest < float("inf") else None
        return totals

    def follow(self, key: Key) -> None:
        """Keep the last minutes of this name, too."""
        # At the end of what is kept, though it was there before: the first ones are forgotten.
        self._histories[key] = self._histories.pop(key, History())
        while len(self._histories) > _MOST_HISTORIES:
            del self._histories[next(iter(self._histories))]

    def history_of(self, key: Key) -> History | None:
        """Return the last minutes of a name, if somebody looks at it or did so a short time ago."""
        return self._histories.get(key)

    def who_waits_long(self) -> list[str]:
        """Return the clients whose requests have waited for so long that they may have told it."""
        before = now() - _LONG
        found: dict[str, None] = {}
        for seen in self.names.values():
            if seen.waiting_since < before:
                found.update(dict.fromkeys(waiter.client for waiter in seen.info.waiters))
                if len(found) >= _MOST_CLIENTS:
                    break
        return list(found)[:_MOST_CLIENTS]

    # -- a look ------------------------------------------------------------------------------------

    def end_look(self, at: float, *, failed: bool) -> None:
        """A look has ended: what was seen in it goes into the last minutes."""
        self._totals = None
        waiters = None if failed else self.totals().waiters
        self.history.add(at, waiters=waiters, hand_overs=self._handed_over)
        self._handed_over = 0

    def take(self, info: LockInfo) -> None:
        """This was seen."""
        at, key = now(), (info.kind, info.name)
        before = self.names.get(key)
        known = before.holds if before is not None else {}
        holds = {
            (one.owner, one.token): known.get((one.owner, one.token), at - (one.holding or 0.0))
            for one in info.holders
        }
        handed_over = len(holds.keys() - known) if before is not None and before.info.waiters else 0
        self._handed_over += handed_over
        if (history := self._histories.get(key)) is not None:
            history.add(at, waiters=len(info.waiters), hand_overs=handed_over)
        if before is not None:
            self._find_losses(before, holds, at)
        if not (info.holders or info.waiters or info.closed or info.recorded):
            self.names.pop(key, None)
            return
        self.names[key] = Seen(
            info, at, holds, _waiting_since(info, at), min(holds.values(), default=float("inf"))
        )

    def keep(self, present: set[Key], began: float) -> None:
        """There are no names but these, as of a moment, and those that were seen since."""
        for key in [k for k, seen in self.names.items() if k not in present and seen.at < began]:
            self._find_losses(self.names.pop(key), {}, now())

    def _find_losses(self, before: Seen, holds: Mapping[tuple[str, int], float], at: float) -> None:
        """Record the holders whose lease ran out: nobody extended it when it was last seen."""
        for holder in before.info.holders:
            if (holder.owner, holder.token) in holds or holder.remaining is None:
                continue
            if holder.overdue and at >= before.at + holder.remaining:
                self.lose(Loss(before.key, holder.client, holder.token, at, "not extended"))

    def lose(self, loss: Loss) -> None:
        """Record a loss, once: it may be told by a hook and be seen in the store."""
        if any((loss.key, loss.token) == (other.key, other.token) for other in self.losses):
            return
        self.losses.appendleft(loss)
        self.lost += 1
        for history in (self.history, self._histories.get(loss.key)):
            if history is not None:
                history.add(loss.at, losses=1)


def _waiting_since(info: LockInfo, at: float) -> float:
    if not info.waiters:
        return float("inf")
    known = [waiter.waiting for waiter in info.waiters if waiter.waiting is not None]
    return at - max(known) if known else float("-inf")
